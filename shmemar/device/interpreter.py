"""The machine that primitives talk to when a kernel runs as plain Python.

A checker implements :class:`Machine` and runs kernel threads inside :func:`running`. Each call on
the machine is a point where another thread may run.
"""

from __future__ import annotations

from contextlib import contextmanager
from enum import Enum
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = ["Group", "Machine", "Order", "Scope", "current", "running"]


class Order(Enum):
    """Strength and scope of a memory operation, as PTX names them."""

    WEAK = "weak"
    RELAXED_SYS = "relaxed.sys"
    ACQUIRE_SYS = "acquire.sys"
    RELEASE_SYS = "release.sys"


class Scope(Enum):
    """Observers to whom a fence promises its order."""

    GPU = "gpu"
    SYS = "sys"


class Group(Enum):
    """Threads that meet."""

    WARP = "warp"
    BLOCK = "block"


class Machine(Protocol):
    """Memory and time, as the threads of one run see them. Words are 32 bits, little-endian."""

    def load(self, address: int, nwords: int, order: Order) -> tuple[int, ...]:
        """Load `nwords` words; those of 8 aligned bytes are read together."""

    def store(self, address: int, words: tuple[int, ...], order: Order) -> None:
        """Store words; those of 8 aligned bytes are written together."""

    def load_part(self, address: int, nbytes: int) -> int:
        """Load 1 or 2 aligned bytes; weak."""

    def store_part(self, address: int, nbytes: int, value: int) -> None:
        """Store 1 or 2 aligned bytes; weak."""

    def exchange(self, address: int, word: int) -> int:
        """Store a word and return the one before it, as one relaxed operation of system scope."""

    def add(self, address: int, value: int) -> None:
        """Add to a word, wrapping, as one relaxed operation of system scope."""

    def add_b64(self, address: int, value: int, order: Order) -> None:
        """Add to 8 aligned bytes, wrapping, as one operation."""

    def add_to_line(
        self, address: int, words: tuple[int, ...], add: Callable[[int, int], int]
    ) -> None:
        """Add four words to 16 aligned bytes, by ``add(before, word)``, with the rest of the warp.

        The thread's warp meets. Lanes whose bytes make up 128 aligned ones add to them as one
        relaxed operation of system scope. Where threads do not share work, this one adds its words
        by themselves, the first one last.
        """

    def store_to_all(self, address: int, words: tuple[int, ...], order: Order) -> None:
        """Store words to every rank, the own one included, by a multicast address.

        As of `store`; each rank's copy may be stored at a time of its own.
        """

    def add_to_all(self, address: int, value: int) -> None:
        """Add to a word of every rank by a multicast address, wrapping, as releases of `.sys`."""

    def load_sum(self, address: int, add: Callable[[int, int], int]) -> tuple[int, ...]:
        """Load four words of every rank by a multicast address, weakly, and add them up.

        In any order, by ``add(sum, word)``.
        """

    def fence_aliases(self) -> None:
        """Order accesses by a multicast address against those of the same memory by the others."""

    def fence(self, scope: Scope) -> None:
        """Order everything before against everything after, as observers of `scope` see it."""

    def wait_for_launch(self) -> None:
        """Perform `programmatic.wait_for_launch`."""

    def trigger(self) -> None:
        """Perform `programmatic.trigger`."""

    def shares_work(self) -> bool:
        """Whether the threads of a block run at once, so that they may meet."""

    def meet(
        self, group: Group, offered: Any, *, orders_memory: bool = True
    ) -> tuple[int, list[Any]]:
        """Wait for the rest of the thread's group; by default order their operations around it.

        Returns:
            The own place in the group, and what each thread offered, by place: None of one that has
            ended. Where threads do not share work, 0 and what this one offered.
        """

    def relax(self) -> None:
        """A poll found nothing new; others may run."""

    def clock_ns(self) -> int:
        """Nanoseconds since any fixed time."""


_current: list[Machine] = []


def current() -> Machine:
    """Return the machine that runs the calling thread."""
    if not _current:
        raise RuntimeError(
            "a device primitive was called from plain Python, outside a machine; launch the kernel "
            "through a communicator, or run it inside shmemar.device.interpreter.running(machine)"
        )
    return _current[-1]


@contextmanager
def running(machine: Machine) -> Iterator[Machine]:
    """Let primitives talk to `machine` in the body of the ``with`` statement."""
    _current.append(machine)
    try:
        yield machine
    finally:
        _current.pop()
