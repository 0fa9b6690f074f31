"""What guards the kernels, taken out: the checker must miss it, and nothing else."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING

import pytest

from shmemar.device.kernels import exchange
from shmemar.host.checker.checked_run import Program, run_seeds
from shmemar.host.checker.controls import Control, control_table, removed
from shmemar.host.checker.guards import CONTROLS
from shmemar.host.checker.verdict import ProtocolError, Verdict

if TYPE_CHECKING:
    from collections.abc import Iterator

    from shmemar.host.checker.hostile_machine import HostileMachine
    from shmemar.host.checker.threads import Launch

controls = pytest.mark.parametrize(
    "control", CONTROLS, ids=[f"{c.name} {c.program.name}" for c in CONTROLS]
)


@cache
def whole_run_passes(program: Program, nseeds: int) -> bool:
    """Nothing is taken out, so controls of one program have one answer."""
    return run_seeds(program, range(nseeds)).passed


@controls
def test_what_is_taken_out_is_missed(control: Control) -> None:
    report = control.run()
    assert report.failure is not None
    assert whole_run_passes(control.program, -(-report.runs // 20) * 20)


@controls
def test_what_is_taken_out_shows_in_results_alone(control: Control) -> None:
    report = control.run(follows_packets=False)
    assert report.failure is not None
    assert report.failure.verdict in {Verdict.WRONG_VALUE, Verdict.DEADLOCK, Verdict.LIVELOCK}


def test_a_guard_is_put_back() -> None:
    before = exchange.EPOCH_NBYTES
    (control,) = [
        each
        for each in CONTROLS
        if each.name == "an epoch word for each slot" and each.program.name == "one_shot/ll"
    ]
    with removed(control):
        assert before != exchange.EPOCH_NBYTES
    assert before == exchange.EPOCH_NBYTES


def test_a_control_that_takes_nothing_out_is_not_found_and_the_table_says_so() -> None:
    whole = Control("nothing", (), CONTROLS[0].program)
    _, (line, is_right) = control_table([whole], seeds=range(3))
    assert line == "| nothing | `one_shot/ll` | not found | 3 | not found | 3 |"
    assert not is_right


def test_the_table_says_when_it_is_not_the_guard_that_was_missed() -> None:
    """A program that is wrong by itself."""
    control = CONTROLS[0]

    def raises(machine: HostileMachine, seed: int) -> list[Iterator[Launch]]:
        raise ProtocolError(Verdict.RAISED, "always")

    broken = replace(control, program=replace(control.program, prepare=raises))
    _, (line, is_right) = control_table([broken], seeds=range(3))
    assert "but with it: exception in a kernel: always" in line
    assert not is_right
