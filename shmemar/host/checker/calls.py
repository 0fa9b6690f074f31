"""Collective calls that the checker makes: what goes in, and what must come out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from shmemar.device.groups import WARP_THREADS
from shmemar.device.packet import SENTINEL, TWIN
from shmemar.dtypes import ReduceOp
from shmemar.host.exact import exact_input, exact_result
from shmemar.layout import BLOCK_THREADS, LINE_LANES, BarrierLayout, LLLayout
from shmemar.spec import WIDE_RANKS, Kernel, Protocol

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from shmemar.layout import AnyLayout
    from shmemar.spec import KernelSpec

__all__ = ["FEW_SLOTS", "MARKS", "Call", "CallSequence", "barrier_layout_of", "layout_of"]

FEW_SLOTS = 4
"""Slots of a region, and so the most threads of a launch: enough for them to be mixed up. From
`WIDE_RANKS` on, where lanes may work together, there are two warps."""

SIGNALING = SENTINEL ^ 1 << 22
"""A NaN that is the sentinel once something was added to it, where NaNs keep what they carry."""

MARKS: dict[tuple[str, ReduceOp], list[tuple[int, ...]]] = {
    ("float32", ReduceOp.MIN): [(SENTINEL,)],
    ("float32", ReduceOp.SUM): [(SIGNALING,)],
    ("float64", ReduceOp.MIN): [(SENTINEL, 1 << 30), (SENTINEL, SENTINEL), (1, SENTINEL)],
}
"""Words of elements that look like an empty slot, all or in part, or become so."""


@dataclass(frozen=True)
class Call:
    """One call, as every rank makes it.

    Attributes:
        spec: The kernel.
        count: Elements.
        nthreads: Threads of the grid; of kernels with barriers rounded up to whole blocks.
        root: The rank whose data a broadcast sends.
        repeats: Times that the body runs in one launch, each with data of its own.
        in_place: True where input and output are one array.
        shift: By how much arrays begin behind an aligned address; it differs by rank.
        is_marked: True where some elements have the words of `MARKS`, on all ranks.
    """

    spec: KernelSpec
    count: int
    nthreads: int
    root: int = 0
    repeats: int = 1
    in_place: bool = False
    shift: int = 0
    is_marked: bool = False

    def __post_init__(self) -> None:
        """Round up the grid."""
        if self.spec.kernel.has_barriers:
            layout = barrier_layout_of(self.spec)
            nblocks = min(-(-self.nthreads // layout.block_threads), layout.nblocks)
            object.__setattr__(self, "nthreads", nblocks * layout.block_threads)

    @property
    def block_threads(self) -> int:
        """Threads a block."""
        if self.spec.kernel.has_barriers:
            return barrier_layout_of(self.spec).block_threads
        return min(self.nthreads, BLOCK_THREADS)

    @property
    def pass_nbytes(self) -> int:
        """Bytes of a message that take one pass."""
        spec, packets = self.spec, self.nthreads * self.spec.packets_per_thread
        if spec.kernel.has_barriers:
            layout = barrier_layout_of(spec)
            packets = self.nthreads * layout.block_slots // layout.block_threads
        return packets * spec.payload_nbytes * (spec.nranks if spec.kernel.is_two_shot else 1)

    def input(self, number: int, rank: int) -> NDArray[Any]:
        """What `rank` contributes to the run of a body that is numbered so."""
        spec = self.spec
        data = exact_input(spec.dtype, spec.op, self.count, rank=rank, call=number)
        return _marked(data, number, self.marks) if self.is_marked else data

    def result(self, number: int, rank: int) -> NDArray[Any] | None:
        """What it must leave on `rank`; None for nothing."""
        if self.spec.kernel is Kernel.BARRIER:
            return None
        what = self.spec.dtype, self.spec.op, self.count
        if self.spec.kernel is not Kernel.BROADCAST:
            result = exact_result(*what, nranks=self.spec.nranks, call=number)
            return _marked(result, number, self.marked_results) if self.is_marked else result
        return None if rank == self.root else self.input(number, self.root)

    @property
    def marks(self) -> list[tuple[int, ...]]:
        """Words of the elements that are marked, which take turns; none of most types."""
        return MARKS.get((self.spec.dtype.name, self.spec.op), [])

    @property
    def marked_results(self) -> list[tuple[int, ...]]:
        """What becomes of them."""
        spec = self.spec
        if spec.op is ReduceOp.SUM:
            number = np.uint32(self.marks[0][0]).view(np.float32)
            adds_to_zero = spec.kernel is Kernel.LL128_ATOMIC
            total = np.float32(0) if adds_to_zero else number
            with np.errstate(invalid="ignore"):
                for _ in range(0 if adds_to_zero else 1, spec.nranks):
                    total = total + number
            # What comes out as the sentinel is sent only by kernels with two exchanges.
            word = int(total.view(np.uint32))
            is_sent = spec.kernel is not Kernel.ONE_SHOT and spec.protocol is Protocol.SENTINEL
            return [(TWIN if is_sent and word == SENTINEL else word,)]
        if spec.protocol is not Protocol.SENTINEL:
            return self.marks
        return [(TWIN, *words[1:]) if set(words) == {SENTINEL} else words for words in self.marks]


def barrier_layout_of(spec: KernelSpec) -> BarrierLayout:
    """The layout of the region of a kernel with barriers.

    Two blocks of as few threads as can be, each of which stages two packets in a place; of many
    ranks, so of many threads, one.
    """
    block_threads = max(2, spec.nranks)
    nblocks = 1 if spec.kernel is Kernel.BARRIER else 2
    rounds = 2 if spec.nranks <= FEW_SLOTS else 1
    return BarrierLayout(spec.nranks, spec.nplaces, nblocks, rounds * block_threads, block_threads)


def layout_of(spec: KernelSpec) -> AnyLayout:
    """The layout of a kernel's region."""
    if spec.kernel.has_barriers:
        return barrier_layout_of(spec)
    if spec.nranks >= WIDE_RANKS:
        nslots = 2 * WARP_THREADS
    else:
        nslots = 2 * LINE_LANES if spec.kernel is Kernel.LL128_ATOMIC else FEW_SLOTS
    return LLLayout(spec.nranks, nslots, spec.nbuffers, spec.accumulators)


def _marked(data: NDArray[Any], number: int, marks: list[tuple[int, ...]]) -> NDArray[Any]:
    words = data.view(np.uint32).reshape(data.size, -1)
    for turn, at in enumerate(range(number % 3, data.size, 3)):
        words[at] = marks[turn % len(marks)]
    return data


@dataclass(frozen=True)
class CallSequence:
    """Calls, one after another.

    Attributes:
        calls: The calls.
        first_epoch: What all epoch words hold at first.
        replays: Times that the calls are made, with the same arguments and other data.
        resident: As of `HostileMachine`: launches that fit at once, where they overlap.
        share_work: Likewise: True on a GPU, False of the emulated backend.
    """

    calls: tuple[Call, ...]
    first_epoch: int = 0
    replays: int = 1
    resident: int | None = None
    share_work: bool = True

    @property
    def warp_threads(self) -> int:
        """Lanes of a warp: those of a line, where no kernel has more that work together."""
        return LINE_LANES if self.calls[0].spec.nranks < WIDE_RANKS else WARP_THREADS
