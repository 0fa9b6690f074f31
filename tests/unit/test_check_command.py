"""``python -m shmemar check``: what it prints, its exit status, and what it refuses."""

from __future__ import annotations

import re
from typing import Any

import pytest

from shmemar.__main__ import main
from shmemar.device.packet_buffer import PacketBuffer
from shmemar.errors import ArgumentError
from shmemar.host.checker.check_runs import request, run_checks
from shmemar.host.checker.controls import Control
from shmemar.host.checker.drawn_calls import MULTICAST_PAIRS, PAIRS
from shmemar.host.checker.guards import CONTROLS

SENTINEL_TWO_SHOT = ["check", "--kernel", "two_shot", "--protocol", "sentinel", "--ranks", "2"]


def rows(text: str) -> list[list[str]]:
    return [line.split() for line in text.splitlines() if not line.startswith(("#", " #", "  s"))]


def test_each_kernel_protocol_and_number_of_ranks_has_a_line(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["check", "--ranks", "2", "3", "--seeds", "2", "--jobs", "1"]) == 0
    text = capsys.readouterr().out
    found = [(*row[:4], row[-1]) for row in rows(text)]
    assert len(found) == len(set(found)) == 2 * (len(PAIRS) + len(MULTICAST_PAIRS))
    assert ("one_shot", "ll", "2", "2", "nothing") in found
    assert ("one_shot", "ll/multicast", "3", "2", "nothing") in found
    assert text.splitlines()[-1] == "# nothing found"


def test_multicast_forms_are_run_alone_and_only_where_they_are(
    capsys: pytest.CaptureFixture[str],
) -> None:
    few = ["--seeds", "1", "--jobs", "1"]
    assert main(["check", "--kernel", "one_shot", "--multicast", "--ranks", "2", *few]) == 0
    found = [row[:3] for row in rows(capsys.readouterr().out)]
    assert found == [["one_shot", f"{p}/multicast", "2"] for p in ("ll", "sentinel")]
    # One rank has nobody to store to.
    assert main(["check", "--ranks", "1", *few]) == 0
    assert len(rows(capsys.readouterr().out)) == len(PAIRS)
    assert main(["check", "--kernel", "barrier", "--ranks", "2", *few]) == 0
    assert [row[1] for row in rows(capsys.readouterr().out)] == ["push"]


@pytest.fixture
def _unfenced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PacketBuffer, "fence_resets", lambda _: None)


@pytest.mark.usefixtures("_unfenced")
def test_a_failure_prints_its_seed_which_replays_it_to_the_letter(
    capsys: pytest.CaptureFixture[str],
) -> None:
    arguments = [*SENTINEL_TWO_SHOT, "--jobs", "1"]
    assert main(arguments) == 1
    text = capsys.readouterr().out
    found = re.search(r"^  (slot reused(?:.|\n)*?)^# 1 failed$", text, re.MULTILINE)
    assert found
    told = re.search(r"again: python -m shmemar (check .* --seed \d+)$", text, re.MULTILINE)
    assert told
    assert main(told[1].split()) == 1
    assert found[1] in capsys.readouterr().out


@pytest.mark.usefixtures("_unfenced")
def test_a_failure_of_a_multicast_form_is_replayed_as_one(
    capsys: pytest.CaptureFixture[str],
) -> None:
    arguments = ["check", "--kernel", "one_shot", "--protocol", "sentinel", "--ranks", "2"]
    assert main([*arguments, "--multicast", "--jobs", "1"]) == 1
    told = re.search(r"again: python -m shmemar (check .*)$", capsys.readouterr().out, re.MULTILINE)
    assert told
    assert " --multicast" in told[1]
    assert main(told[1].split()) == 1


@pytest.mark.usefixtures("_unfenced")
def test_a_search_finds_it_too_and_replays_it_by_its_number(
    capsys: pytest.CaptureFixture[str],
) -> None:
    arguments = [*SENTINEL_TWO_SHOT, "--schedule", "exhaustive"]
    assert main([*arguments, "--seeds", "3000"]) == 1
    text = capsys.readouterr().out
    told = re.search(
        r"(seed \d+, schedule exhaustive;(?:.|\n)*)again: python -m shmemar (.*)", text
    )
    assert told
    assert told[2].endswith("--schedule exhaustive")
    assert main(told[2].split()) == 1
    assert told[1] in capsys.readouterr().out


def test_processes_share_the_seeds() -> None:
    options: dict[str, Any] = {"kernel": "one_shot", "protocol": "ll", "ranks": [2]}
    options |= {"seeds": 12, "seed": None, "schedule": None}
    (alone,), (shared,) = (list(run_checks(request(jobs=jobs, **options))) for jobs in (1, 2))
    assert (alone.runs, alone.operations) == (shared.runs, shared.operations)
    assert alone.runs == 12
    assert alone.passed
    assert shared.passed


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--ranks", "0"], "ranks has 0; expected 1 to 64"),
        (["--ranks", "2", "65"], "ranks has 65; expected 1 to 64"),
        (["--seeds", "0"], "seeds is 0; expected 1 or more"),
        (["--seed", "-1"], "seed is -1; expected 0 or more"),
        (["--jobs", "0"], "jobs is 0; expected 1 or more"),
        (["--schedule", "mild"], "schedule is 'mild'; expected one of uniform, slow_rank"),
        (
            ["--kernel", "broadcast", "--protocol", "sentinel"],
            "kernel is broadcast, and protocol sentinel; expected one of one_shot with ll",
        ),
        (
            ["--kernel", "two_shot", "--multicast"],
            "kernel is two_shot, and protocol None, and multicast True; expected one of one_shot",
        ),
        (
            ["--kernel", "one_shot", "--multicast", "--ranks", "2", "16"],
            "multicast is True, and nranks 16; expected 2 to 15 for kernel one_shot",
        ),
    ],
)
def test_what_cant_be_is_refused(
    arguments: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["check", *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith(f"shmemar: ArgumentError: {told}")


def test_the_error_of_a_schedule_lists_all_kinds() -> None:
    with pytest.raises(ArgumentError, match=r"round_robin, priorities, exhaustive\.$"):
        request(kernel=None, protocol=None, ranks=[2], seeds=1, seed=None, schedule="x", jobs=1)


def test_an_unknown_kernel_is_answered_with_the_known_ones(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["check", "--kernel", "three_shot"])
    assert caught.value.code == 2
    assert "'one_shot', 'two_shot', 'broadcast'" in capsys.readouterr().err


@pytest.mark.parametrize(("controls", "status"), [(CONTROLS[:2], 0), ((), 0)])
def test_controls_print_a_table(
    controls: tuple[Control, ...],
    status: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("shmemar.host.checker.guards.CONTROLS", controls)
    assert main(["check", "--controls"]) == status
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2 + len(controls)
    assert lines[0].startswith("| taken out | kernel |")


def test_a_control_that_is_not_found_is_a_failure(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = Control("nothing", (), CONTROLS[0].program)
    monkeypatch.setattr("shmemar.host.checker.guards.CONTROLS", (whole,))
    monkeypatch.setattr("shmemar.host.checker.controls.MOST_RUNS", 2)
    assert main(["check", "--controls"]) == 1
    assert "not found" in capsys.readouterr().out


def test_the_checker_is_as_fast_as_it_is_said_to_be(capsys: pytest.CaptureFixture[str]) -> None:
    """A part of it: machines were seen to differ by three, and other work goes on beside it."""
    assert (
        main(["check", "--ranks", "4", "--seeds", "9", "--jobs", "1", "--kernel", "two_shot"]) == 0
    )
    speeds = [float(row[6]) for row in rows(capsys.readouterr().out)]
    assert min(speeds) > 10_000
