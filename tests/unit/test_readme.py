"""README's numbers are those of the kept results."""

from __future__ import annotations

import json
import re

import pytest

from tests.launcher import ROOT

RESULTS = {
    0: ("2026-11-29-h200-two-gpus.json", "device", "2", "1"),
    1: ("2026-11-29-h200-two-gpus.json", "graph", "2", "1"),
    2: ("2026-11-30-h200-one-gpu-4-ranks.json", "device", "4", "4"),
    3: ("2026-11-30-h200-one-gpu-4-ranks.json", "graph", "4", "4"),
    4: ("2026-11-30-h200-one-gpu-8-ranks.json", "device", "8", "8"),
    5: ("2026-11-30-h200-one-gpu-8-ranks.json", "graph", "8", "8"),
}
"""By column of the table: file, mode, ranks, ranks on a GPU."""
UNITS = {"B": 1, "KiB": 1024}


def rows_of_the_table() -> dict[int, list[str]]:
    rows = re.findall(
        r"^\| (\d+) (B|KiB) \| (.*) \|$", (ROOT / "README.md").read_text(), re.MULTILINE
    )
    return {int(number) * UNITS[unit]: cells.split(" | ") for number, unit, cells in rows}


@pytest.mark.parametrize("column", RESULTS)
def test_the_table_shows_the_kept_results(column: int) -> None:
    name, mode, nranks, on_a_gpu = RESULTS[column]
    document = json.loads((ROOT / "benchmarks/results" / name).read_text())
    assert (document["ranks"], document["ranks on a GPU"]) == (nranks, on_a_gpu)
    kept = {
        row["nbytes"]: f"{row['median_us']:.2f}"
        for row in document["rows"]
        if (row["kernel"], row["mode"]) == ("one_shot/ll", mode)
    }
    table = rows_of_the_table()
    assert sorted(table) == [128, 8192, 65536, 262144]
    assert {nbytes: cells[column] for nbytes, cells in table.items()} == {
        nbytes: kept[nbytes] for nbytes in table
    }
    assert sum(row["wrong"] for row in document["rows"]) == 0
