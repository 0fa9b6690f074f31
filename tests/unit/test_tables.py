"""Tables as files, and how they are made of what was measured."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shmemar.dtypes import DTYPES, ReduceOp
from shmemar.errors import ArgumentError, BackendUnavailableError, ConfigurationError
from shmemar.host.default_tables import default_table
from shmemar.host.plotting import draw, read_table
from shmemar.host.selector import CANDIDATES, Terms, select
from shmemar.host.tables import (
    FORMAT,
    facts_of,
    kept_path,
    parse_table,
    table_document,
    write_table,
)
from shmemar.host.tuning import Measured, table_of

if TYPE_CHECKING:
    from pathlib import Path

FACTS = {
    "shmemar": "0.1.0",
    "backend": "nvshmem",
    "GPU": "NVIDIA H200, sm_90",
    "ranks": "4",
    "ranks on a GPU": "2",
    "MPS": "running",
}
BEYOND = default_table(4, shares_gpu=True)
OTHERS = {"date": "2026-11-30T12:00:00+00:00", "dtype": "float32", "op": "sum", "mode": "graph"}


def row(nbytes: int, kernel: str, median_us: float, **others: Any) -> Measured:
    what: dict[str, Any] = {"max_blocks": None, "blocks": 8, "spread_us": 0.1, "wrong": 0}
    return Measured(nbytes, kernel, median_us=median_us, **{**what, **others})


ROWS = [
    row(128, "one_shot/ll", 2.0),
    row(128, "two_shot/ll", 3.0),
    row(2048, "one_shot/ll", 4.0),
    row(2048, "two_shot/ll", 3.5),
    row(2048, "one_shot/ll", 3.0, max_blocks=4),
    row(2048, "one_shot/sentinel", 1.0, wrong=1),
]


def text_of(**changes: Any) -> str:
    document = table_document(table_of(ROWS, "here", BEYOND), FACTS, **OTHERS)
    return json.dumps({**document, **changes})


def test_the_fastest_that_was_right_comes_first_with_its_grid() -> None:
    table = table_of(ROWS, "here", BEYOND)
    # Beyond twice the largest size stands what came with the package.
    assert [band.up_to for band in table.bands] == [512, 4096, 128 << 10, 2 << 20, None]
    assert table.bands[2:] == BEYOND.bands[1:]
    names = [[each.name for each in band.candidates] for band in table.bands[:2]]
    assert names == [["one_shot/ll", "two_shot/ll"]] * 2
    assert table.bands[1].candidates[0].max_blocks == 4
    assert table.bands[1].candidates[0].latency_us == 3.0
    assert table.origin == "here"


measured = st.builds(
    row,
    nbytes=st.integers(1, 1 << 40),
    kernel=st.sampled_from([each.name for each in CANDIDATES]),
    median_us=st.floats(0.1, 1e6),
    max_blocks=st.none() | st.integers(1, 1000),
    wrong=st.integers(0, 1),
)


@given(rows=st.lists(measured, min_size=1))
def test_any_measurements_make_a_table_that_a_file_keeps(rows: list[Measured]) -> None:
    table = table_of(rows, "here", BEYOND)
    for each in rows:
        band = table.band(each.nbytes)
        if not each.wrong:
            listed = next(c for c in band.candidates if c.name == each.kernel)
            assert listed.latency_us is not None
            assert listed.latency_us <= each.median_us
    text = json.dumps(table_document(table, FACTS, **OTHERS))
    again = parse_table(text, FACTS, "kept.json")
    assert again.origin == "kept.json, measured 2026-11-30T12:00:00+00:00"
    assert repr(again.bands) == repr(table.bands)


def test_what_a_table_says_changes_the_choice() -> None:
    table = parse_table(text_of(), FACTS, "kept.json")
    terms = Terms(4, table)
    choice = select(4096, DTYPES["float32"], ReduceOp.SUM, terms)
    assert (choice.candidate.name, choice.candidate.max_blocks) == ("one_shot/ll", 4)
    assert "kept.json, measured 2026-11-30" in choice.why


@pytest.mark.parametrize(
    ("fact", "value", "expected"),
    [
        ("GPU", "NVIDIA B200, sm_100", "with GPU NVIDIA H200, sm_90, and here it is NVIDIA B200"),
        ("ranks", "8", "with ranks 4, and here it is 8"),
        ("ranks on a GPU", "1", "with ranks on a GPU 2, and here it is 1"),
        ("shmemar", "9.9.9", r"with shmemar 0\.1\.0, and here it is 9\.9\.9"),
        ("MPS", "not running", "with MPS running, and here it is not running"),
        ("backend", "emulated", "with backend nvshmem, and here it is emulated"),
    ],
)
def test_a_table_of_another_machine_or_version_is_refused(
    fact: str, value: str, expected: str
) -> None:
    with pytest.raises(ConfigurationError, match=f"kept.json was measured {expected}.*tune"):
        parse_table(text_of(), {**FACTS, fact: value}, "kept.json")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "JSONDecodeError"),
        ("[]", "TypeError"),
        ("{}", "KeyError: 'format'"),
        (text_of(facts={}), "KeyError: 'shmemar'"),
        (text_of(bands=[]), "bands end at"),
        (text_of(bands=[{"up_to": -1, "candidates": []}]), "up_to is -1"),
        (text_of(bands=[{"up_to": True, "candidates": []}]), "up_to is True"),
        (
            text_of(
                bands=[
                    {
                        "up_to": None,
                        "candidates": [
                            {
                                "kernel": "barrier",
                                "protocol": "push",
                                "max_blocks": None,
                                "latency_us": None,
                            }
                        ],
                    }
                ]
            ),
            "barrier/push is no all-reduce kernel",
        ),
        (
            text_of(
                bands=[
                    {
                        "up_to": None,
                        "candidates": [
                            {
                                "kernel": "one_shot",
                                "protocol": "ll",
                                "max_blocks": 0,
                                "latency_us": 1.0,
                            }
                        ],
                    }
                ]
            ),
            "max_blocks is 0",
        ),
        (text_of(bands=[{"up_to": None, "candidates": [{"kernel": "three_shot"}]}]), "three_shot"),
    ],
)
def test_what_is_no_table_is_refused(text: str, expected: str) -> None:
    with pytest.raises(ConfigurationError, match=f"kept.json is no table.*{expected}"):
        parse_table(text, FACTS, "kept.json")


def test_another_format_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=f"with format 99, and here it is {FORMAT}"):
        parse_table(text_of(format=99, bands="?"), FACTS, "kept.json")


def test_a_table_is_kept_by_machine_whatever_the_version(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    path = kept_path(FACTS)
    assert path.parent == tmp_path / "shmemar" / "tables"
    assert kept_path({**FACTS, "shmemar": "9.9.9"}) == path
    assert kept_path({**FACTS, "ranks": "8"}) != path


def test_facts_are_those_of_the_description() -> None:
    described = {**FACTS, "numpy": "2.4", "LL128 lines": "passed"}
    assert facts_of(described) == FACTS
    assert facts_of({"shmemar": "1", "backend": "emulated", "ranks": "2"})["GPU"] == "none"


def test_a_file_is_written_whole_or_the_reason_is_said(tmp_path: Path) -> None:
    path = tmp_path / "new" / "table.json"
    write_table(path, json.loads(text_of()))
    assert parse_table(path.read_text(), FACTS, "kept.json").bands
    assert [each.name for each in path.parent.iterdir()] == ["table.json"]
    with pytest.raises(ConfigurationError, match=r"could not be written.*another --output"):
        write_table(path / "below", {})


# The plot


def document() -> dict[str, Any]:
    return {**json.loads(text_of()), "rows": [each.as_dict() for each in ROWS]}


def test_all_kernels_are_drawn(tmp_path: Path) -> None:
    (tmp_path / "table.json").write_text(json.dumps(document()))
    draw(read_table(tmp_path / "table.json"), tmp_path / "plot.svg")
    drawn = (tmp_path / "plot.svg").read_text()
    for text in ("one_shot/ll", "two_shot/ll", "one_shot/sentinel", "NVIDIA H200", "2 KiB"):
        assert f"<!-- {text}" in drawn or text in drawn


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"rows": [], "bands": [1]}'])
def test_what_cannot_be_drawn_is_said(tmp_path: Path, text: str) -> None:
    (tmp_path / "table.json").write_text(text)
    with pytest.raises(ArgumentError, match="is no table of the tuner's"):
        read_table(tmp_path / "table.json")


def test_a_plot_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match=r"plot\.what: "):
        draw(document(), tmp_path / "plot.what")
    with pytest.raises(ArgumentError, match="could not be written"):
        draw(document(), tmp_path / "none" / "plot.svg")


def test_without_matplotlib_the_extra_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(BackendUnavailableError, match=r"shmemar\[plot\].*--draw TABLE"):
        draw(document(), tmp_path / "plot.svg")
