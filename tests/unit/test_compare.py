"""Two result documents side by side."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.compare import FACTS, VERSIONS, Comparison, compare, load, render, rows_of
from shmemar.errors import ArgumentError

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
EARLIER = RESULTS / "2026-11-29-h200-one-gpu-2-ranks.json"
LATER = RESULTS / "2026-11-30-h200-one-gpu-2-ranks.json"
BARRIERS = RESULTS / "2026-11-30-h200-one-gpu-2-ranks-barriers.json"
TUNED = RESULTS / "2026-11-30-h200-four-gpus-tuned.json"
MACHINE_CODE = RESULTS / "2026-11-30-sm_90-machine-code.json"
OTHERS = ("tuned", "launches", "machine-code", "floor")
OF_ALLREDUCE = sorted(
    path for path in RESULTS.glob("*.json") if not any(each in path.name for each in OTHERS)
)


def row(**changes: Any) -> dict[str, Any]:
    what = {
        "collective": "allreduce",
        "contender": "shmemar",
        "mode": "graph",
        "nbytes": 8192,
        "count": 2048,
        "dtype": "float32",
        "op": "sum",
        "kernel": "one_shot/ll",
        "blocks": 16,
        "in_place": False,
        "chained": False,
        "median_us": 2.0,
        "p20_us": 1.9,
        "p80_us": 2.1,
        "p99_us": 2.5,
        "other_us": 0.7,
        "xsol": 2.2,
        "wrong": 0,
        "note": None,
    }
    return {**what, **changes}


def timed(median_us: float, p20_us: float, p80_us: float, **changes: Any) -> dict[str, Any]:
    return row(median_us=median_us, p20_us=p20_us, p80_us=p80_us, **changes)


def absent(note: str | None = "NCCL is not installed", **changes: Any) -> dict[str, Any]:
    nothing = dict.fromkeys(("median_us", "p20_us", "p80_us", "kernel", "blocks"))
    return row(**{"contender": "nccl", "note": note, **nothing, **changes})


def document(*rows: dict[str, Any], **facts: Any) -> dict[str, Any]:
    what = {
        "date": "2026-12-01T10:00:00+00:00",
        "command": "python -m benchmarks allreduce",
        "shmemar": "0.1.0",
        "ranks": "2",
        "backend": "nvshmem",
        "GPU": "NVIDIA H200, sm_90",
        "ranks on a GPU": "1",
        "MPS": "not running",
        "CUDA driver": "13.0",
        "NVSHMEM": "3.8.0",
        "numba-cuda": "0.30.4",
        "cuda-core": "1.2.0",
        "numpy": "2.4.6",
        "programmatic launch": "yes",
    }
    return {**what, **facts, "rows": list(rows)}


def of(before: dict[str, Any], after: dict[str, Any]) -> Comparison:
    return compare(document(before), document(after))


def verdicts(comparison: Comparison) -> list[str]:
    return [pair.verdict for pair in comparison.pairs]


def reasons(comparison: Comparison) -> list[str]:
    return [reason for _, reason in comparison.uncompared]


# Verdicts


@pytest.mark.parametrize(
    ("after", "expected"),
    [
        ((2.0, 1.9, 2.1), "same"),
        ((3.0, 2.11, 3.1), "slower"),
        ((3.0, 2.1, 3.1), "same"),  # the intervals touch
        ((1.0, 0.9, 1.89), "faster"),
        ((1.0, 0.9, 1.9), "same"),
    ],
)
def test_times_whose_intervals_overlap_are_the_same(
    after: tuple[float, float, float], expected: str
) -> None:
    found = of(timed(2.0, 1.9, 2.1), timed(*after))
    assert verdicts(found) == [expected]
    assert found.regressed == (expected == "slower")


@pytest.mark.parametrize(
    ("median_us", "expected"),
    [(102.9, "same"), (103.1, "slower"), (97.1, "same"), (96.9, "faster")],
)
def test_medians_within_3_percent_are_the_same(median_us: float, expected: str) -> None:
    found = of(timed(100.0, 100.0, 100.0), timed(median_us, median_us, median_us))
    assert verdicts(found) == [expected]
    assert found.pairs[0].ratio == pytest.approx(median_us / 100)


SLOWER = timed(4.0, 3.9, 4.1)


def test_a_slower_row_like_for_like_is_a_regression() -> None:
    found = of(row(), SLOWER)
    assert found.pairs[0].like_for_like
    assert found.regressed
    text = render(found)
    assert text.endswith("0 not like for like (*); 0 not compared; regressed")
    assert "  2.00   4.00         2.000  slower\n" in text


# What is not like for like


@pytest.mark.parametrize("fact", FACTS)
def test_a_fact_that_matters_and_differs_is_said_once_and_is_no_regression(fact: str) -> None:
    before = document(row(), row(nbytes=128), **{fact: "this"})
    after = document(SLOWER, timed(4.0, 3.9, 4.1, nbytes=128), **{fact: "that"})
    found = compare(before, after)
    assert verdicts(found) == ["slower", "slower"]
    assert not any(pair.like_for_like for pair in found.pairs)
    assert not found.regressed
    text = render(found)
    assert text.count(f"# * all rows: {fact}: this before, that after") == 1
    assert text.count("slower *") == 2
    assert "2 not like for like" in text


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        ({"programmatic launch": None}, {}, "programmatic launch: not said before, yes after"),
        ({}, {"MPS": None}, "MPS: not running before, not said after"),
    ],
)
def test_a_fact_that_one_file_lacks_differs(
    before: dict[str, Any], after: dict[str, Any], expected: str
) -> None:
    found = compare(document(row(), **before), document(row(), **after))
    assert found.facts == (expected,)


def test_a_fact_that_both_files_lack_does_not_differ() -> None:
    bare = {"rows": [row()]}
    found = compare(bare, bare)
    assert found.pairs[0].like_for_like
    assert found.head == ("before: not said", "after: not said")


def test_numbers_and_text_of_a_fact_are_alike() -> None:
    assert compare(document(row(), ranks=2), document(row(), ranks="2")).facts == ()


@pytest.mark.parametrize("fact", VERSIONS)
def test_other_facts_are_said_and_change_nothing(fact: str) -> None:
    found = compare(document(row(), **{fact: "1"}), document(SLOWER, **{fact: "2"}))
    assert found.regressed
    assert f"# also differs: {fact}: 1 before, 2 after" in render(found)


@pytest.mark.parametrize(
    ("changes", "said", "shown"),
    [
        (
            {"kernel": "two_shot/ll"},
            "kernel: one_shot/ll before, two_shot/ll after",
            "one_shot/ll -> two_shot/ll",
        ),
        ({"blocks": 8}, "blocks: 16 before, 8 after", " one_shot/ll  "),
        ({"blocks": None}, "blocks: 16 before, not said after", " one_shot/ll  "),
        (
            {"kernel": None, "blocks": 8},
            "kernel: one_shot/ll before, not said after; blocks: 16 before, 8 after",
            "one_shot/ll -> -",
        ),
    ],
)
def test_another_kernel_or_grid_is_said_and_is_no_regression(
    changes: dict[str, Any], said: str, shown: str
) -> None:
    found = of(row(), {**SLOWER, **changes})
    assert verdicts(found) == ["slower"]
    assert found.pairs[0].differs == said
    assert not found.regressed
    text = render(found)
    assert f"8192 bytes: {said}" in text
    assert shown in text
    assert "slower *" in text


def test_only_the_row_that_differs_has_the_star() -> None:
    before = document(row(), row(nbytes=128), row(nbytes=64))
    after = document(
        timed(4.0, 3.9, 4.1, blocks=8), timed(4.0, 3.9, 4.1, nbytes=128), row(nbytes=64, blocks=8)
    )
    found = compare(before, after)
    assert [pair.like_for_like for pair in found.pairs] == [False, True, False]
    assert found.regressed
    # Rows that differ in the same way are on one line.
    line = "# * graph shmemar one_shot/ll, 8192, 64 bytes: blocks: 16 before, 8 after"
    assert render(found).splitlines().count(line) == 1


# Matching


@pytest.mark.parametrize(
    "changes",
    [
        {"collective": "broadcast"},
        {"contender": "nccl"},
        {"mode": "device"},
        {"nbytes": 128},
        {"dtype": "float64"},
        {"op": "max"},
        {"in_place": True},
        {"chained": True},
    ],
)
def test_rows_of_another_case_are_not_matched(changes: dict[str, Any]) -> None:
    found = of(row(), row(**changes))
    assert found.pairs == ()
    assert reasons(found) == ["only before", "only after"]
    assert not found.regressed
    text = render(found)
    assert "8192 bytes: only before" in text
    assert "bytes: only after" in text
    assert "0 compared" in text


def test_what_a_table_does_not_show_is_its_heading() -> None:
    case = {"op": "max", "in_place": True}
    found = compare(
        document(row(), row(**case), row(chained=True)),
        document(row(), row(**case), row(chained=True)),
    )
    lines = render(found).splitlines()
    assert lines.count("# allreduce, float32, sum") == 1
    assert lines.count("# allreduce, float32, max, in place") == 1
    assert lines.count("# allreduce, float32, sum, chained") == 1


PINNED = [row(kernel=name) for name in ("one_shot/ll", "one_shot/sentinel", "two_shot/ll")]


def test_several_rows_of_a_key_are_matched_by_kernel() -> None:
    found = compare(document(*PINNED), document(*reversed(PINNED)))
    assert [pair.after.kernel for pair in found.pairs] == [each["kernel"] for each in PINNED]
    assert all(pair.like_for_like for pair in found.pairs)
    assert not found.uncompared


def test_one_row_of_a_key_is_matched_by_kernel_where_the_other_file_has_several() -> None:
    several, one = document(*PINNED), document(row(kernel="two_shot/ll"))
    found = compare(one, several)
    assert [pair.after.kernel for pair in found.pairs] == ["two_shot/ll"]
    assert reasons(found) == ["only after"] * 2
    found = compare(several, one)
    assert [pair.before.kernel for pair in found.pairs] == ["two_shot/ll"]
    assert reasons(found) == ["only before"] * 2


def test_rows_alike_are_matched_in_their_order() -> None:
    twice = document(row(blocks=1), row(blocks=2))
    found = compare(twice, document(row(blocks=1), row(blocks=2), row(blocks=3)))
    assert [(pair.before.blocks, pair.after.blocks) for pair in found.pairs] == [(1, 1), (2, 2)]
    assert [each.blocks for each, _ in found.uncompared] == [3]


# Rows without a number


def test_a_row_without_a_number_is_listed_with_its_reason() -> None:
    number = row(contender="nccl", kernel="ncclDevKernel")
    found = of(absent(), number)
    assert found.pairs == ()
    assert reasons(found) == ["no number before: NCCL is not installed"]
    assert "graph nccl ncclDevKernel, 8192 bytes: no number before: NCCL is" in render(found)
    assert reasons(of(number, absent())) == ["no number after: NCCL is not installed"]
    found = of(absent(), absent(note=None))
    assert reasons(found) == [
        "no number before: NCCL is not installed; no number after: the file does not say why"
    ]
    assert not found.regressed


def test_a_row_without_a_number_on_one_side_only_keeps_its_reason() -> None:
    found = of(row(), absent())
    expected = ["only before", "only after, and without a number: NCCL is not installed"]
    assert reasons(found) == expected


# Wrong results


def test_wrong_results_afterwards_are_a_regression_whatever_else_differs() -> None:
    found = compare(document(row()), document(row(wrong=3), GPU="another"))
    assert verdicts(found) == ["wrong"]
    assert found.regressed
    text = render(found)
    said = "# WRONG after: 3 elements, graph shmemar one_shot/ll, 8192 bytes, allreduce, float32"
    assert said in text
    assert "wrong *" in text
    assert text.endswith("; regressed")


def test_wrong_results_before_are_said_and_no_time_is_judged() -> None:
    found = of(row(wrong=1), SLOWER)
    assert verdicts(found) == ["wrong"]
    assert not found.regressed
    assert "# WRONG before: 1 elements" in render(found)


@pytest.mark.parametrize(
    "wrong", [absent(wrong=1), row(mode="early", wrong=1)], ids=["no number", "only after"]
)
def test_wrong_results_count_in_rows_that_are_not_compared(wrong: dict[str, Any]) -> None:
    found = compare(document(row(), absent()), document(row(), wrong))
    assert verdicts(found) == ["same"]
    assert found.regressed
    assert "# WRONG after: 1 elements" in render(found)


# Real files, of the form before contenders


def test_a_file_is_the_same_as_itself() -> None:
    document = load(LATER)
    found = compare(document, document)
    assert verdicts(found) == ["same"] * len(document["rows"])
    assert all(pair.ratio == 1 and pair.like_for_like for pair in found.pairs)
    assert not found.uncompared
    assert not found.regressed
    text = render(found)
    assert text.count("\n# allreduce, float32, sum\n") == 1
    assert "GPU: NVIDIA H200, sm_90; ranks: 2; ranks on a GPU: 2; MPS: running" in text
    assert text.endswith(
        "# 48 compared: 48 same, 0 faster, 0 slower, 0 wrong; 0 not like for like (*); "
        "0 not compared; nothing like for like is slower or wrong"
    )


def test_two_days_of_a_machine_are_like_for_like() -> None:
    found = compare(load(EARLIER), load(LATER))
    assert len(found.pairs) == 48
    assert all(pair.like_for_like for pair in found.pairs)
    assert not found.uncompared
    # 128 bytes of one_shot/ll in mode device: 0.57 and 0.59 us, with intervals apart.
    slower = [pair.after.name for pair in found.pairs if pair.verdict == "slower"]
    assert slower == ["device shmemar one_shot/ll"]
    assert found.regressed


def test_a_table_lines_up() -> None:
    lines = render(compare(load(EARLIER), load(LATER))).splitlines()
    table = [line for line in lines if line.startswith(" ")]
    assert len(table) == 48
    heading = next(line for line in lines if "after/before" in line)
    ends = heading.index("after/before") + len("after/before")
    assert all(line[ends - 5 : ends].lstrip(" ")[1] == "." and line[ends] == " " for line in table)
    columns = ["size", "mode", "contender", "kernel", "before", "after", "after/before", "verdict"]
    assert heading.split() == ["#", *columns]
    assert max(map(len, table)) <= 100


@pytest.mark.parametrize("path", OF_ALLREDUCE, ids=lambda path: path.stem)
def test_all_kept_files_can_be_read(path: Path) -> None:
    document = load(path)
    rows = rows_of(document)
    assert len(rows) == len(document["rows"])
    assert {each.contender for each in rows} <= {"shmemar"} or "contender" in document["rows"][0]
    assert not compare(document, document).regressed


def test_old_barriers_are_barriers() -> None:
    found = rows_of(load(BARRIERS))
    assert {(each.collective, each.what) for each in found} == {("barrier", "barrier")}


def test_the_remark_of_a_file_is_said() -> None:
    remarked = load(RESULTS / "2026-11-30-h200-one-gpu-2-ranks-lanes-apart.json")
    found = compare(load(EARLIER), remarked)
    assert "a form of the looped kernel that was given up" in found.head[1]


# What is no result


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "Expecting value"),
        ("[]", "the document is a list, not an object"),
        ("{}", "the document has no rows"),
        ('{"rows": []}', "the document has no rows"),
        ('{"rows": {}}', "the document has no rows"),
        ('{"rows": [3]}', "row 1 is a int, not an object"),
        ("[" * 200_000, "recursion"),
    ],
    ids=["empty", "list", "no rows", "none", "object", "number", "deep"],
)
def test_what_is_no_result_is_refused(tmp_path: Path, text: str, expected: str) -> None:
    path = tmp_path / "rows.json"
    path.write_text(text)
    with pytest.raises(ArgumentError, match=rf"rows\.json is no result.*{expected}.*Expected a"):
        load(path)


def test_bytes_that_are_no_text_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(ArgumentError, match=r"rows\.json is no result.*utf-8"):
        load(path)


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match=r"none\.json is no result.*No such file"):
        load(tmp_path / "none.json")
    with pytest.raises(ArgumentError, match=r"is no result.*directory"):
        load(tmp_path)


@pytest.mark.parametrize(
    ("path", "expected"),
    [(TUNED, "mode of row 1 is None; expected text"), (MACHINE_CODE, "has no rows")],
    ids=["tuner", "machine code"],
)
def test_other_documents_are_refused(path: Path, expected: str) -> None:
    with pytest.raises(ArgumentError, match=f"{path.name} is no result.*{expected}"):
        load(path)


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("mode", None, "mode of row 2 is None; expected text"),
        ("dtype", 4, "dtype of row 2 is 4; expected text"),
        ("op", None, "op of row 2 is None; expected text"),
        ("nbytes", "8K", "nbytes of row 2 is '8K'; expected a whole number"),
        ("nbytes", True, "nbytes of row 2 is True; expected a whole number"),
        ("nbytes", -1, "nbytes of row 2 is -1; expected a whole number of 0 or more"),
        ("collective", 1, "collective of row 2 is 1; expected text"),
        ("contender", [], r"contender of row 2 is \[\]; expected text"),
        ("kernel", 1, "kernel of row 2 is 1; expected text"),
        ("blocks", 1.5, "blocks of row 2 is 1.5; expected a whole number"),
        ("in_place", 1, "in_place of row 2 is 1; expected true or false"),
        ("chained", "no", "chained of row 2 is 'no'; expected true or false"),
        ("wrong", -1, "wrong of row 2 is -1; expected a whole number"),
        ("note", 1, "note of row 2 is 1; expected text"),
        ("median_us", "2", "median_us of row 2 is '2'; expected a time above 0"),
        ("median_us", True, "median_us of row 2 is True; expected a time above 0"),
        ("median_us", 0, "median_us of row 2 is 0; expected a time above 0"),
        ("median_us", float("nan"), "median_us of row 2 is nan; expected a time above 0"),
        ("p20_us", None, "p20_us of row 2 is None; expected a time above 0"),
        ("p80_us", float("inf"), "p80_us of row 2 is inf; expected a time above 0"),
    ],
)
def test_a_row_that_is_no_measurement_is_named(
    tmp_path: Path, name: str, value: Any, expected: str
) -> None:
    bad = document(row(), row(**{name: value}))
    with pytest.raises(ArgumentError, match=expected):
        compare(document(row()), bad)
    (tmp_path / "rows.json").write_text(json.dumps(bad))
    with pytest.raises(ArgumentError, match=rf"rows\.json is no result.*{expected}"):
        load(tmp_path / "rows.json")


OPTIONAL = ("collective", "contender", "kernel", "blocks", "in_place", "chained", "wrong", "note")


@pytest.mark.parametrize("name", OPTIONAL)
def test_what_a_row_may_lack_is_filled_in(name: str) -> None:
    whole = row()
    del whole[name]
    (found,) = rows_of({"rows": [whole]})
    filled = {"kernel": "", "blocks": None, "note": ""}
    assert getattr(found, name) == filled.get(name, row()[name])


def test_noise_may_leave_nothing_of_a_difference() -> None:
    noisy = timed(0.2, -0.1, 0.5, mode="behind")
    assert verdicts(of(noisy, noisy)) == ["same"]
    nothing = timed(-0.1, -0.3, 0.1, mode="early")
    found = of(nothing, noisy | {"mode": "early"})
    assert not found.pairs
    assert "what was ahead took as long" in reasons(found)[0]


def test_who_ran_another_kernel_has_no_right_result() -> None:
    honest = timed(2.0, 1.9, 2.1)
    lying = timed(1.0, 0.9, 1.1, note="ran another kernel: something")
    found = of(honest, lying)
    assert verdicts(found) == ["wrong"]
    assert found.regressed
