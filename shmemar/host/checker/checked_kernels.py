"""Kernels that users write, as the checker runs them: their arrays lie in its memory."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from shmemar.device import kernels
from shmemar.device.kernels import UserArguments
from shmemar.device.packet import LAST_EPOCH, SENTINEL
from shmemar.errors import ArgumentError, ArgumentTypeError
from shmemar.host.checker.checked_arrays import CheckedArray, OwnPart, Symmetric
from shmemar.host.checker.memory_map import Span
from shmemar.host.checker.packet_log import PacketLog
from shmemar.host.checker.threads import Launch
from shmemar.host.checker.verdict import ProtocolError, Verdict
from shmemar.host.user_kernels import as_scalar
from shmemar.layout import BLOCK_THREADS, FAILURE_DTYPE
from shmemar.spec import Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from numpy.typing import NDArray

    from shmemar.host.checker.hostile_machine import HostileMachine
    from shmemar.host.checker.memory_map import Area
    from shmemar.user_spec import UserKernelSpec

__all__ = ["UserProgram"]

ITEM_NBYTES = (1, 2, 4, 8, 16)
_SIXTEEN_BITS = ("float16", "bfloat16")
"""Types that kernels see as the bits they are."""

FIRST_EPOCHS = (0, 0, LAST_EPOCH - 1, LAST_EPOCH - 3)


@dataclass(frozen=True, eq=False)
class UserProgram:
    """A user's kernel, launched several times on all ranks.

    Attributes:
        spec: The kernel.
        nthreads: Threads of a launch.
        nlaunches: Launches.
        limit: Operations of a run.
        arguments: ``arguments(rank, launch)`` makes a rank's arguments.
        expected: ``expected(rank, launch)`` says what they hold afterwards, None where any will do.
    """

    spec: UserKernelSpec
    nthreads: int
    nlaunches: int
    limit: int
    arguments: Callable[[int, int], Sequence[Any]]
    expected: Callable[[int, int], Sequence[Any]]

    def prepare(self, machine: HostileMachine, seed: int) -> list[Iterator[Launch]]:
        """Make the memory of a run, and each rank's launches."""
        machine.turns.limit = self.limit
        epoch = random.Random(seed).choice(FIRST_EPOCHS)  # noqa: S311 - it need not be secret
        return _UserRun(self, machine, epoch).launches()


class _UserRun:
    def __init__(self, program: UserProgram, machine: HostileMachine, first_epoch: int) -> None:
        self._program = program
        self._machine = machine
        spec = program.spec
        ranks, area, layout = range(spec.nranks), machine.map.add, spec.buffer.layout
        fill = SENTINEL << 32 | SENTINEL if spec.buffer.protocol is Protocol.SENTINEL else 0
        log = None
        if machine.follows_packets:
            log = PacketLog(spec.buffer.name, layout, spec.buffer.nthreads)
        self._regions = [
            area(f"region of {spec.buffer.name}", r, layout.nbytes, fill=fill, log=log)
            for r in ranks
        ]
        if spec.buffer.multicast:
            machine.window(self._regions)
        epochs = first_epoch << 32 | first_epoch
        self._epochs = [
            area("epochs of the LLBuffer", r, 4 * spec.buffer.nthreads, fill=epochs) for r in ranks
        ]
        self._control = [area("broken word", r, 4) for r in ranks]
        self._records = [area("failure record", r, FAILURE_DTYPE.itemsize) for r in ranks]
        self._symmetric = self._make_symmetric()

    def _make_symmetric(self) -> dict[int, list[Area]]:
        ranks = range(self._program.spec.nranks)
        first = [self._program.arguments(rank, 0) for rank in ranks]
        found: dict[int, list[Area]] = {}
        for place, argument in enumerate(first[0]):
            if isinstance(argument, Symmetric):
                parts = [_part_of(arguments, place, argument) for arguments in first]
                found[place] = [
                    self._machine.map.add(f"symmetric argument {place}", rank, part.nbytes)
                    for rank, part in enumerate(parts)
                ]
                for area, part in zip(found[place], parts, strict=True):
                    self._machine.poke(area.address, part.tobytes())
        return found

    def launches(self) -> list[Iterator[Launch]]:
        return [self._launches_of(rank) for rank in range(self._program.spec.nranks)]

    def _launches_of(self, rank: int) -> Iterator[Launch]:
        for number in range(self._program.nlaunches):
            yield self._launch(rank, number)

    def _launch(self, rank: int, number: int) -> Launch:
        program, spec = self._program, self._program.spec
        given = list(program.arguments(rank, number))
        areas = [self._area(rank, place, given) for place in range(len(given))]
        seen = tuple(self._seen(place, given, areas) for place in range(len(given)))
        spans = [
            Span(area, "rw" if area.rank == rank else "w", is_shared=True) for area in self._regions
        ]
        spans += [
            Span(area, "rw" if area.rank == rank else "w", is_shared=True)
            for parts in self._symmetric.values()
            for area in parts
        ]
        own = [self._epochs[rank], self._control[rank], self._records[rank]]
        spans += [Span(area, "rw") for area in own]
        spans += [
            Span(area, "rw", is_shared=program.nthreads > 1)
            for area, argument in zip(areas, given, strict=True)
            if area is not None and isinstance(argument, np.ndarray)
        ]
        body = kernels.build(spec, spec.buffer.layout)
        peers = tuple(area.address for area in self._regions)
        if spec.buffer.multicast:
            peers += (self._machine.window(self._regions),)
        arguments = UserArguments(
            peers,
            self._epochs[rank].address,
            self._control[rank].address,
            self._records[rank].address,
            0,
            seen,
        )
        nthreads = program.nthreads

        def run(index: int) -> None:
            body(arguments, rank, index, nthreads, BLOCK_THREADS)

        return Launch(
            f"{spec.name} (launch {number})",
            rank,
            [lambda index=index: run(index) for index in range(nthreads)],  # type: ignore[misc]
            self._machine.map.rights(spans),
            BLOCK_THREADS,
            at_end=lambda: self._check(rank, number, given, areas),
        )

    def _area(self, rank: int, place: int, given: list[Any]) -> Area | None:
        argument = given[place]
        if isinstance(argument, Symmetric):
            return self._symmetric[place][rank]
        if isinstance(argument, OwnPart):
            owner = next((at for at, other in enumerate(given) if other is argument.of), None)
            if owner is None:
                raise ArgumentError(
                    f"argument {place} is a part of a symmetric array that is no argument; "
                    "expected the array among the arguments, too."
                )
            return self._symmetric[owner][rank]
        if isinstance(argument, np.ndarray):
            area = self._machine.map.add(f"argument {place}", rank, argument.nbytes)
            self._machine.poke(area.address, argument.tobytes())
            return area
        return None

    def _seen(self, place: int, given: list[Any], areas: list[Area | None]) -> Any:
        """An argument as the kernel sees it."""
        argument, area = given[place], areas[place]
        if isinstance(argument, Symmetric):
            return tuple(np.int64(part.address) for part in self._symmetric[place])
        if area is None:
            found = as_scalar(f"argument {place}", argument)
            if found is None:
                raise ArgumentTypeError(
                    f"argument {place} is {type(argument).__name__}; expected a numpy array, "
                    "Symmetric, its array, an integer or a float."
                )
            return found
        array = argument.of.first if isinstance(argument, OwnPart) else argument
        dtype = np.dtype(np.uint16) if array.dtype.name in _SIXTEEN_BITS else array.dtype
        if dtype.kind not in "iufc" or dtype.itemsize not in ITEM_NBYTES or array.size == 0:
            raise ArgumentError(
                f"argument {place} has {array.size} elements of {dtype}; expected one or more "
                "numbers of 1, 2, 4, 8 or 16 bytes."
            )
        return CheckedArray(f"argument {place}", area.address, dtype, array.size)

    def _check(self, rank: int, number: int, given: list[Any], areas: list[Area | None]) -> None:
        expected = self._program.expected(rank, number)
        if len(expected) != len(given):
            raise ArgumentError(
                f"expected({rank}, {number}) has {len(expected)} items; expected {len(given)}, one "
                "for each argument, and None where any value will do."
            )
        for place, (what, area) in enumerate(zip(expected, areas, strict=True)):
            if what is None or area is None:
                continue
            argument = given[place]
            of = argument.of.first if isinstance(argument, OwnPart) else argument
            of = of.first if isinstance(of, Symmetric) else of
            right = np.ascontiguousarray(np.asarray(what, of.dtype)).reshape(-1)
            got = np.frombuffer(self._machine.peek(area.address, area.nbytes), of.dtype)
            if right.size != got.size:
                raise ArgumentError(
                    f"expected({rank}, {number}) has {right.size} elements for argument {place}; "
                    f"expected {got.size}."
                )
            wrong = np.flatnonzero(_bytes_of(got) != _bytes_of(right))
            if wrong.size:
                at = int(wrong[0]) // of.dtype.itemsize
                raise ProtocolError(
                    Verdict.WRONG_VALUE,
                    f"rank {rank} got {got[at]} for element {at} of argument {place}, expected "
                    f"{right[at]}, in {self._program.spec.name} (launch {number})",
                    rank,
                )


def _part_of(arguments: Sequence[Any], place: int, like: Symmetric) -> NDArray[Any]:
    """A rank's part of the symmetric array that is argument `place` on rank 0."""
    found = arguments[place] if place < len(arguments) else None
    if not isinstance(found, Symmetric) or found.first.nbytes != like.first.nbytes:
        raise ArgumentError(
            f"argument {place} is symmetric on rank 0, of {like.first.nbytes} bytes; expected the "
            "same on all ranks."
        )
    return found.first


def _bytes_of(array: NDArray[Any]) -> NDArray[np.uint8]:
    return array.view(np.uint8)
