"""README's numbers are those of the kept results."""

from __future__ import annotations

import json
import re

import pytest

from tests.launcher import ROOT

RESULTS = {
    0: ("2026-11-29-h200-two-gpus.json", "2", "1"),
    2: ("2026-11-29-h200-one-gpu-4-ranks.json", "4", "4"),
    4: ("2026-11-29-h200-one-gpu-8-ranks.json", "8", "8"),
}
"""By column of the table: file, ranks, ranks on a GPU."""
UNITS = {"B": 1, "KiB": 1024}


def rows_of_the_table() -> dict[int, list[str]]:
    rows = re.findall(
        r"^\| (\d+) (B|KiB) \| (.*) \|$", (ROOT / "README.md").read_text(), re.MULTILINE
    )
    return {int(number) * UNITS[unit]: cells.split(" | ") for number, unit, cells in rows}


@pytest.mark.parametrize("column", RESULTS)
def test_the_table_shows_the_kept_results(column: int) -> None:
    name, nranks, on_a_gpu = RESULTS[column]
    document = json.loads((ROOT / "benchmarks/results" / name).read_text())
    assert (document["ranks"], document["ranks on a GPU"]) == (nranks, on_a_gpu)
    kept = {
        (row["mode"], row["nbytes"]): f"{row['median_us']:.2f}"
        for row in document["rows"]
        if row["kernel"] == "one_shot/ll"
    }
    table = rows_of_the_table()
    assert sorted(table) == [128, 1024, 8192, 65536, 262144]
    for nbytes, cells in table.items():
        assert cells[column] == kept["device", nbytes]
        assert cells[column + 1] == kept["graph", nbytes]
    assert sum(row["wrong"] for row in document["rows"]) == 0
