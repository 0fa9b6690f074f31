"""Runs of the checker, one a seed, and what is told of the first that goes wrong."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from itertools import islice
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from shmemar.device.interpreter import running
from shmemar.errors import ArgumentError
from shmemar.host.checker.hostile_machine import HostileMachine
from shmemar.host.checker.memory_map import MemoryMap
from shmemar.host.checker.moves import Moves
from shmemar.host.checker.schedule import ScheduleKind, bounded_schedules, schedule_of
from shmemar.host.checker.verdict import CheckReport, Failure, ProtocolError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from shmemar.host.checker.schedule import Bounded, Schedule
    from shmemar.host.checker.threads import Launch

__all__ = ["EXHAUSTIVE", "Program", "as_schedule_kind", "run_bounded", "run_seeds"]

EXHAUSTIVE = "exhaustive"
"""Name of the schedules that are gone through instead of drawn."""

SHOWN_MOVES = 20

Launches: TypeAlias = "list[Iterator[Launch]]"


@dataclass(frozen=True)
class Program:
    """What is run.

    Attributes:
        name: For messages.
        nranks: Ranks.
        prepare: ``prepare(machine, seed)`` makes the memory of a run, and each rank's launches.
        resident: ``resident(seed)`` as of `HostileMachine`.
        follows_packets: As of `HostileMachine`.
    """

    name: str
    nranks: int
    prepare: Callable[[HostileMachine, int], Launches]
    resident: Callable[[int], int | None] = lambda _: None
    follows_packets: bool = True


def as_schedule_kind(name: str, *others: str) -> ScheduleKind:
    """Look up a kind of schedule; `others` are what the caller takes beside them.

    Raises:
        ArgumentError: There is none of that name.
    """
    try:
        return ScheduleKind(name)
    except ValueError:
        names = ", ".join([*(kind.value for kind in ScheduleKind), *others])
        raise ArgumentError(f"schedule is {name!r}; expected one of {names}.") from None


def run_seeds(
    program: Program, seeds: Iterable[int], kind: ScheduleKind | None = None
) -> CheckReport:
    """Run a program once a seed, until it goes wrong.

    Raises:
        ArgumentError: There are no seeds.
    """
    schedules = (
        (seed, lambda seed=seed: schedule_of(seed, program.nranks, kind)) for seed in seeds
    )
    return _run(program, schedules, every_point=True)


def run_bounded(
    program: Program, deviations: int, *, first: int = 0, behind: int | None = None
) -> CheckReport:
    """Run a program under all schedules that deviate from a first one in so few choices.

    Seeds are the numbers of the schedules. All runs are of the program that seed 0 makes.

    Args:
        program: What is run.
        deviations: The most choices that are not the first one.
        first: The number of the first schedule whose outcome counts. Those before it are run too:
            how many choices there are shows only then.
        behind: The number behind that of the last one; None for all.
    """
    fixed = replace(
        program,
        prepare=lambda machine, _: program.prepare(machine, 0),
        resident=lambda _: program.resident(0),
    )

    def again(schedule: Bounded) -> Callable[[], Schedule]:
        given = [schedule]
        return lambda: given.pop() if given else replace(schedule, made=[])

    numbered = enumerate(islice(bounded_schedules(deviations), behind))
    for number, schedule in islice(numbered, first):
        _once(fixed, number, schedule, every_point=False)
    return _run(fixed, ((number, again(each)) for number, each in numbered), every_point=False)


def _run(
    program: Program,
    schedules: Iterable[tuple[int, Callable[[], Schedule]]],
    *,
    every_point: bool,
) -> CheckReport:
    start = time.perf_counter()
    runs = operations = 0
    failure = None
    for seed, make in schedules:
        runs += 1
        machine, error = _once(program, seed, make(), every_point=every_point)
        operations += machine.operations
        if error is not None:
            failure = _failure(program, seed, make(), error, every_point=every_point)
            break
    if not runs:
        raise ArgumentError("seeds is empty; expected one or more, a run each.")
    seconds = time.perf_counter() - start
    return CheckReport(program.name, program.nranks, runs, operations, seconds, failure)


def _once(
    program: Program,
    seed: int,
    schedule: Schedule,
    *,
    every_point: bool,
    moves: Moves | None = None,
) -> tuple[HostileMachine, ProtocolError | None]:
    machine = HostileMachine(
        schedule,
        MemoryMap(program.nranks),
        resident=program.resident(seed),
        every_point=every_point,
        follows_packets=program.follows_packets,
        moves=moves,
    )
    try:
        # Threads have a state of their own; this one performs additions, perhaps of NaNs.
        with running(machine), np.errstate(all="ignore"):
            machine.run(program.prepare(machine, seed))
    except ProtocolError as error:
        return machine, error
    return machine, None


def _failure(
    program: Program,
    seed: int,
    schedule: Schedule,
    error: ProtocolError,
    *,
    every_point: bool,
) -> Failure:
    """Run it again, and write down what its threads do."""
    moves = Moves()
    machine, again = _once(program, seed, schedule, every_point=every_point, moves=moves)
    message = str(error)
    if again is None or (again.verdict, str(again)) != (error.verdict, message):
        message += (
            ". A second run of the seed was another one: the kernel depends on something that the "
            "checker does not set, such as a clock or an array that it kept from the first run"
        )
    lines = moves.last(SHOWN_MOVES, error.ranks, machine.map)
    return Failure(error.verdict, message, seed, schedule.name, lines)
