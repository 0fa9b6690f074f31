"""The choices that schedules make, and the runs that a bounded search goes through."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from itertools import pairwise, product
from typing import TYPE_CHECKING, Any

import pytest

from shmemar.host.checker.schedule import ScheduleKind, bounded_schedules, schedule_of

if TYPE_CHECKING:
    from shmemar.host.checker.schedule import Schedule


@dataclass(eq=False)
class Turn:
    """A thread."""

    rank: int
    number: int


TURNS = [Turn(rank, rank << 20 | index) for rank in range(3) for index in range(2)]
kinds = pytest.mark.parametrize("kind", ScheduleKind, ids=lambda kind: kind.value)


def choices_of(schedule: Schedule, count: int = 300) -> list[tuple[Any, ...]]:
    found: list[tuple[Any, ...]] = []
    current: Any = None
    for _ in range(count):
        current = schedule.next_thread(TURNS, current)
        performed = schedule.may_perform(5), schedule.must_perform(5)
        found.append((current.number, *performed, schedule.message(2, 6)))
    return found


@kinds
def test_a_seed_makes_the_same_choices_and_another_one_others(kind: ScheduleKind) -> None:
    first = choices_of(schedule_of(7, 3, kind))
    assert choices_of(schedule_of(7, 3, kind)) == first
    assert choices_of(schedule_of(8, 3, kind)) != first


@kinds
def test_choices_are_among_what_there_is(kind: ScheduleKind) -> None:
    for seed in range(20):
        for number, may, must, message in choices_of(schedule_of(seed, 3, kind)):
            assert number in {turn.number for turn in TURNS}
            assert -1 <= may < 5
            assert 0 <= must < 5
            assert 2 <= message <= 6


def test_kinds_take_turns_from_seed_to_seed() -> None:
    names = [schedule_of(seed, 2).name for seed in range(2 * len(ScheduleKind))]
    assert names == 2 * [kind.value for kind in ScheduleKind]


def ranks_of(kind: ScheduleKind, seed: int) -> Counter[int]:
    return Counter(number >> 20 for number, *_ in choices_of(schedule_of(seed, 3, kind)))


def test_one_rank_is_slow_or_fast() -> None:
    assert all(min(ranks_of(ScheduleKind.SLOW_RANK, seed).values()) < 20 for seed in range(9))
    assert all(max(ranks_of(ScheduleKind.FAST_RANK, seed).values()) > 270 for seed in range(9))


def test_threads_go_in_order() -> None:
    ascending, descending, round_robin = (
        [number for number, *_ in choices_of(schedule_of(0, 3, kind), 12)]
        for kind in (ScheduleKind.ASCENDING, ScheduleKind.DESCENDING, ScheduleKind.ROUND_ROBIN)
    )
    numbers = [turn.number for turn in TURNS]
    assert ascending == numbers[:1] * 12
    assert descending == numbers[-1:] * 12
    assert round_robin == numbers * 2


def test_stores_wait_or_the_newest_goes_first() -> None:
    delaying = choices_of(schedule_of(0, 3, ScheduleKind.DELAYING))
    assert sum(may >= 0 for _, may, *_ in delaying) < 10
    newest = choices_of(schedule_of(0, 3, ScheduleKind.NEWEST_FIRST))
    assert sum(must == 4 for *_, must, _ in newest) > 250


def test_priorities_keep_a_thread_until_it_loses_its_own() -> None:
    numbers = [number for number, *_ in choices_of(schedule_of(0, 3, ScheduleKind.PRIORITIES))]
    changes = sum(a != b for a, b in pairwise(numbers))
    assert 0 < changes < 20


@pytest.mark.parametrize("deviations", [0, 1, 2, 3])
def test_a_bounded_search_makes_each_run_of_few_deviations_once(deviations: int) -> None:
    """Of three choices, of three, two and, behind a first 1, four ways; from the newest, too."""
    runs: list[tuple[int, ...]] = []
    others: list[tuple[int, ...]] = []
    for schedule in bounded_schedules(deviations):
        first, second = schedule.must_perform(3), schedule.must_perform(2)
        third = schedule.must_perform(4 if first == 1 else 1)
        if schedule.newest_first:
            others.append((2 - first, 1 - second, 3 - third if first == 1 else 0))
        else:
            runs.append((first, second, third))
    every = [run for run in product(range(3), range(2), range(4)) if run[0] == 1 or run[2] == 0]
    expected = [run for run in every if sum(choice != 0 for choice in run) <= deviations]
    assert sorted(runs) == sorted(others) == sorted(expected)
    sizes = [sum(choice != 0 for choice in run) for run in runs]
    assert sizes == sorted(sizes)


def test_the_first_choices_of_a_search_are_the_quiet_ones() -> None:
    schedule, other = bounded_schedules(0)
    assert (schedule.must_perform(4), other.must_perform(4)) == (0, 3)
    assert schedule.next_thread(TURNS, TURNS[3]) is TURNS[3]
    assert schedule.next_thread(TURNS[::-1], None) is TURNS[0]
    assert (schedule.may_perform(4), schedule.must_perform(4), schedule.message(3, 9)) == (-1, 0, 9)
