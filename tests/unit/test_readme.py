"""README's numbers are those of the kept results."""

from __future__ import annotations

import json
import re

import pytest

from tests.launcher import ROOT

RESULTS = "2026-11-29-h200-one-gpu-{}-ranks.json"
UNITS = {"B": 1, "KiB": 1024}


def rows_of_the_table() -> dict[int, list[str]]:
    rows = re.findall(
        r"^\| (\d+) (B|KiB) \| (.*) \|$", (ROOT / "README.md").read_text(), re.MULTILINE
    )
    return {int(number) * UNITS[unit]: cells.split(" | ") for number, unit, cells in rows}


@pytest.mark.parametrize(("column", "nranks"), [(0, 2), (2, 4), (4, 8)])
def test_the_table_shows_the_kept_results(column: int, nranks: int) -> None:
    document = json.loads((ROOT / "benchmarks/results" / RESULTS.format(nranks)).read_text())
    assert (document["ranks"], document["ranks on a GPU"]) == (str(nranks), str(nranks))
    kept = {(row["mode"], row["nbytes"]): f"{row['median_us']:.2f}" for row in document["rows"]}
    table = rows_of_the_table()
    assert sorted(table) == [128, 1024, 8192, 65536, 262144]
    for nbytes, cells in table.items():
        assert cells[column] == kept["device", nbytes]
        assert cells[column + 1] == kept["graph", nbytes]
    assert sum(row["wrong"] for row in document["rows"]) == 0
