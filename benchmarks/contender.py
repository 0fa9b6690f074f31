"""What a contender is, and what several of them share."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from benchmarks.buffers import Buffers, empty_array
from shmemar.host.timing import NO_KERNEL

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import shmemar
    from benchmarks.buffers import Case
    from shmemar.host.kernel_set import Prepared

__all__ = [
    "GRAPHS",
    "OTHER_KERNEL",
    "Contender",
    "Opened",
    "Turns",
    "as_it_is",
    "ordinary",
    "ran_only",
]

T = TypeVar("T")

GRAPHS = ("graph", "behind", "early")
"""Modes whose calls are captured into a graph."""

OTHER_KERNEL = "ran another kernel"
"""How the note of a row begins whose graph held other kernels than those asked for."""


@dataclass(frozen=True)
class Opened:
    """A contender that is ready to run one case.

    Attributes:
        call: ``call(number, stream)`` enqueues an all-reduce.
        data: Its arrays.
        kernel: What it is asked to run.
        must_run: Whether the kernels in a graph, by their names, are what it was asked for.
        prepared: Of our kernels, for mode `device`.
        pdl: Of our kernels, when they are launched programmatically.
    """

    call: Callable[[int, Any], None]
    data: Buffers
    kernel: str
    must_run: Callable[[tuple[str, ...]], bool] = lambda _: True
    prepared: Prepared | None = None
    pdl: str | None = None


class Contender(Protocol):
    """Something that all-reduces."""

    @property
    def name(self) -> str:
        """Its name in tables."""

    @property
    def modes(self) -> tuple[str, ...]:
        """Modes that it can be measured in."""

    def why_not(self, comm: shmemar.Communicator, case: Case) -> str | None:
        """Say why it can't run; None where it can. Alike on all ranks."""

    def make(self, comm: shmemar.Communicator, case: Case) -> Buffers | None:
        """Make the arrays; None where that is collective, and left to `open`. Not collective."""

    def open(self, comm: shmemar.Communicator, case: Case, data: Buffers | None) -> Opened:
        """Make ready, with what `make` made. Collective."""

    def during_eager(self, comm: shmemar.Communicator) -> Any:
        """A context in which eager calls run. Collective."""


@contextmanager
def as_it_is(_: shmemar.Communicator) -> Iterator[None]:
    """Run eager calls without further ado."""
    yield


def ordinary(comm: shmemar.Communicator, case: Case) -> Buffers:
    """Make arrays in ordinary memory."""
    return Buffers(comm, case, partial(empty_array, comm.backend))


class Turns:
    """Arrays of memory that is not given back: two of each kind take turns."""

    def __init__(self) -> None:
        self._kept: dict[Any, list[Any]] = {}

    def next(self, kind: Any, make: Callable[[], T]) -> T:
        """Return the one that was not returned last, made where there are not two yet."""
        kept = self._kept.setdefault(kind, [])
        kept.append(make() if len(kept) < 2 else kept.pop(0))
        found: T = kept[-1]
        return found


def ran_only(parts: tuple[str, ...], ran: tuple[str, ...]) -> bool:
    """Whether a graph has kernels, and none but those with one of `parts` in their names."""
    kernels = [each for each in ran if not each.startswith(NO_KERNEL)]
    return bool(kernels) and all(any(part in each for part in parts) for each in kernels)
