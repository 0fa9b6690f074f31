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


CONTENDERS = (
    ("graph", "shmemar-pdl"),
    ("behind", "shmemar-no-pdl"),
    ("graph", "nccl"),
    ("graph", "torch-one-shot"),
    ("graph", "torch-two-shot"),
)
"""By column of the table of contenders: mode and row."""


def test_the_table_of_contenders_shows_the_kept_results() -> None:
    text = (ROOT / "README.md").read_text()
    name = "2026-11-30-h200-two-gpus-contenders.json"
    document = json.loads((ROOT / "benchmarks/results" / name).read_text())
    assert (document["ranks"], document["ranks on a GPU"]) == ("2", "1")
    assert f"benchmarks/results/{name}" in text
    assert f"one store to the peer, was {document['floor']['l_sol_us']:.2f} us" in text
    kept = {
        (row["mode"], row["contender"], row["nbytes"]): row["median_us"] for row in document["rows"]
    }
    shown = text[text.index("| bytes | shmemar |") :].partition("\n\n")[0]
    rows = re.findall(r"^\| (\d+) (B|KiB|MiB) \| (.*) \|$", shown, re.MULTILINE)
    assert len(rows) == 5
    for number, unit, cells in rows:
        nbytes = int(number) * {**UNITS, "MiB": 1 << 20}[unit]
        expected = [f"{kept[mode, who, nbytes]:.2f}" for mode, who in CONTENDERS]
        assert cells.split(" | ") == expected
    assert not any(row["wrong"] for row in document["rows"])
    nccl = {row["kernel"] for row in document["rows"] if row["contender"] == "nccl"}
    assert nccl == {"NCCL 22809"}
    handed = {
        name for row in document["rows"] if row["contender"] == "nvshmem" for name in row["ran"]
    }
    assert any("ncclDevKernel_AllReduce" in each for each in handed)


def test_the_hosts_times_are_those_of_the_kept_results() -> None:
    text = " ".join((ROOT / "README.md").read_text().split())
    name = "2026-11-30-h200-one-gpu-4-ranks-launches.json"
    document = json.loads((ROOT / "benchmarks/results" / name).read_text())
    kept = {row["contender"]: row["median_us"] for row in document["rows"]}
    assert f"A call of a plan takes the host {kept['plan']:.1f} us" in text
    assert f"like one before {kept['eager']:.1f}, whatever" in text
    assert (
        f"in machine code takes {kept['loop']:.1f}, and numba's dispatch {kept['numba']:.0f}"
        in text
    )
