"""Who runs next, what is performed when, and which message a load reads: every choice of a run.

A schedule is drawn from a seed, so the seed makes the same run again. One kind is not drawn: it
goes through all runs that differ from a first one in a few choices.
"""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

__all__ = ["Bounded", "Schedule", "ScheduleKind", "Turn", "bounded_schedules", "schedule_of"]


class Turn(Protocol):
    """What a schedule knows of a thread.

    Attributes:
        rank: Its rank.
        number: Its place among all threads of the run: by rank, then by index.
    """

    rank: int
    number: int


class ScheduleKind(Enum):
    """Kinds of schedule, as ``--schedule`` names them."""

    UNIFORM = "uniform"
    SLOW_RANK = "slow_rank"
    FAST_RANK = "fast_rank"
    NEWEST_FIRST = "newest_first"
    DELAYING = "delaying"
    ASCENDING = "ascending"
    DESCENDING = "descending"
    ROUND_ROBIN = "round_robin"
    PRIORITIES = "priorities"


class Schedule(Protocol):
    """The choices of one run."""

    @property
    def name(self) -> str:
        """What it is called in reports."""

    def next_thread(self, threads: Sequence[Any], current: Any) -> Any:
        """Choose among threads that can go on; `current` runs now, and is None when it can't."""

    def may_perform(self, nqueues: int) -> int:
        """Choose a queue, from the oldest to the newest, to perform a store of; -1 for none."""

    def must_perform(self, nqueues: int) -> int:
        """Choose a queue, when nobody can go on or a kernel ends."""

    def message(self, oldest: int, newest: int) -> int:
        """Choose the message that a load reads."""

    def patience(self) -> int:
        """Old messages that a thread may read before it must see the newest."""


class _Drawn:
    """Threads and stores at random, as often as this run's own odds say."""

    def __init__(self, kind: ScheduleKind, seed: int, nranks: int) -> None:
        self.name = kind.value
        generator = random.Random(f"{kind.value} {seed}")  # noqa: S311 - it need not be secret
        self._draw = draw = generator.random
        self._stay = generator.choice([0.0, 0.5, 0.9])
        self._promptness = generator.choice([0.05, 0.3, 0.7])
        self._staleness = generator.choice([0.0, 0.1, 0.4])
        self._newest_first = generator.choice([0.0, 0.5, 0.9])
        self._lapses = generator.choice([0.01, 0.05, 0.2])
        self._rank = int(draw() * nranks)

    def next_thread(self, threads: Sequence[Any], current: Any) -> Any:
        draw = self._draw
        if current is not None and draw() < self._stay:
            return current
        return threads[int(draw() * len(threads))]

    def may_perform(self, nqueues: int) -> int:
        return self.must_perform(nqueues) if self._draw() < self._promptness else -1

    def must_perform(self, nqueues: int) -> int:
        draw = self._draw
        return nqueues - 1 if draw() < self._newest_first else int(draw() * nqueues)

    def message(self, oldest: int, newest: int) -> int:
        draw = self._draw
        return oldest + int(draw() * (newest - oldest)) if draw() < self._staleness else newest

    def patience(self) -> int:
        return 4


class _SlowRank(_Drawn):
    def next_thread(self, threads: Sequence[Any], current: Any) -> Any:
        chosen = super().next_thread(threads, current)
        if chosen.rank == self._rank and self._draw() < 0.95:
            others = [thread for thread in threads if thread.rank != self._rank]
            if others:
                return others[int(self._draw() * len(others))]
        return chosen


class _FastRank(_Drawn):
    def next_thread(self, threads: Sequence[Any], current: Any) -> Any:
        if self._draw() < 0.95:
            own = [thread for thread in threads if thread.rank == self._rank]
            if own:
                return own[int(self._draw() * len(own))]
        return super().next_thread(threads, current)


class _NewestFirst(_Drawn):
    def must_perform(self, nqueues: int) -> int:
        return nqueues - 1 if self._draw() < 0.97 else int(self._draw() * nqueues)


class _Delaying(_Drawn):
    """Stores wait until nobody can go on without them; some, until the end of the kernel."""

    def may_perform(self, nqueues: int) -> int:
        return self.must_perform(nqueues) if self._draw() < 0.002 else -1


def _number(thread: Any) -> int:
    return int(thread.number)


class _Ascending(_Drawn):
    def next_thread(self, threads: Sequence[Any], current: Any) -> Any:
        return min(threads, key=_number)


class _Descending(_Drawn):
    def next_thread(self, threads: Sequence[Any], current: Any) -> Any:
        return max(threads, key=_number)


class _RoundRobin(_Drawn):
    _last = -1

    def next_thread(self, threads: Sequence[Any], current: Any) -> Any:
        behind = [thread for thread in threads if thread.number > self._last]
        chosen = min(behind or threads, key=_number)
        self._last = chosen.number
        return chosen


class _Priorities(_Drawn):
    """The thread of the highest priority runs, and now and then loses it.

    Source: Burckhardt et al., "A Randomized Scheduler with Probabilistic Guarantees of Finding
    Bugs" (2010).
    """

    def __init__(self, kind: ScheduleKind, seed: int, nranks: int) -> None:
        super().__init__(kind, seed, nranks)
        self._priority: dict[Any, float] = {}
        self._lowest = 0.0

    def next_thread(self, threads: Sequence[Any], current: Any) -> Any:
        priority = self._priority
        if current is not None and self._draw() < self._lapses:
            self._lowest -= 1.0
            priority[current] = self._lowest
        for thread in threads:
            if thread not in priority:
                priority[thread] = self._draw()
        return max(threads, key=priority.__getitem__)


_CLASSES: dict[ScheduleKind, type[_Drawn]] = {
    ScheduleKind.UNIFORM: _Drawn,
    ScheduleKind.SLOW_RANK: _SlowRank,
    ScheduleKind.FAST_RANK: _FastRank,
    ScheduleKind.NEWEST_FIRST: _NewestFirst,
    ScheduleKind.DELAYING: _Delaying,
    ScheduleKind.ASCENDING: _Ascending,
    ScheduleKind.DESCENDING: _Descending,
    ScheduleKind.ROUND_ROBIN: _RoundRobin,
    ScheduleKind.PRIORITIES: _Priorities,
}


def schedule_of(seed: int, nranks: int, kind: ScheduleKind | None = None) -> Schedule:
    """Draw the schedule of a seed; without a kind, all kinds take turns."""
    kinds = list(ScheduleKind)
    found = kind or kinds[seed % len(kinds)]
    return _CLASSES[found](found, seed, nranks)


@dataclass
class Bounded:
    """A run that makes given choices first and then the first of each.

    The first choice is: the same thread goes on, no store is performed before it must be, then the
    oldest or the newest, and loads read what is newest.

    Attributes:
        newest_first: Which store is performed first when one must be.
        choices: The given choices, in their order: how far each is from the first one.
        made: How many ways there were, choice by choice.
    """

    newest_first: bool
    choices: tuple[int, ...] = ()
    made: list[int] = field(default_factory=list)

    @property
    def name(self) -> str:
        """One name for all; the number tells them apart."""
        return "exhaustive"

    def _choose(self, ways: int) -> int:
        if ways == 1:
            return 0
        at = len(self.made)
        self.made.append(ways)
        return self.choices[at] if at < len(self.choices) else 0

    def next_thread(self, threads: Sequence[Any], current: Any) -> Any:
        """Choose among all; the current one is the first."""
        ordered = sorted(threads, key=lambda thread: (thread is not current, thread.number))
        return ordered[self._choose(len(ordered))]

    def may_perform(self, nqueues: int) -> int:
        """Choose none, or any."""
        return self._choose(nqueues + 1) - 1

    def must_perform(self, nqueues: int) -> int:
        """Choose any."""
        chosen = self._choose(nqueues)
        return nqueues - 1 - chosen if self.newest_first else chosen

    def message(self, oldest: int, newest: int) -> int:
        """Choose any; the newest is the first."""
        return newest - self._choose(newest - oldest + 1)

    def patience(self) -> int:
        """Choices are bounded, and so is this."""
        return 2


def bounded_schedules(deviations: int) -> Iterator[Bounded]:
    """Go through all runs with at most so many choices that are not the first one.

    The fewer, the sooner. Each schedule must have been run before the next one is asked for. The
    number of runs grows as the number of choices to the power of `deviations`.
    """
    left = deque([Bounded(newest_first=False), Bounded(newest_first=True)])
    while left:
        schedule = left.popleft()
        yield schedule
        prefix = schedule.choices
        if sum(choice != 0 for choice in prefix) < deviations:
            for at in range(len(prefix), len(schedule.made)):
                stem = prefix + (0,) * (at - len(prefix))
                left.extend(
                    Bounded(schedule.newest_first, (*stem, choice))
                    for choice in range(1, schedule.made[at])
                )
