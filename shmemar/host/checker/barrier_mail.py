"""What the checker makes of a barrier: all threads write to all ranks before it, and read after it.

The words of one barrier lie in one of two buffers, and those of the next in the other, as kernels
around barriers would have it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from shmemar.device.memory import ld_no_allocate_v2_b32, st_v2_b32
from shmemar.host.checker.memory_map import Area, Span
from shmemar.host.checker.verdict import ProtocolError, Verdict

if TYPE_CHECKING:
    from collections.abc import Callable

    from shmemar.host.checker.hostile_machine import HostileMachine

__all__ = ["BarrierMail"]

MOST_THREADS = 128
ITEM_NBYTES = 8


class BarrierMail:
    """Memory to which threads write around barriers."""

    def __init__(self, machine: HostileMachine, nranks: int) -> None:
        """Make it."""
        self._machine = machine
        self._nranks = nranks
        self._boxes: list[Area] = [
            machine.map.add("mail of barriers", rank, 2 * nranks * MOST_THREADS * ITEM_NBYTES)
            for rank in range(nranks)
        ]
        self._nbarriers = [0] * nranks

    def spans(self, rank: int) -> list[Span]:
        """What a rank's launch may touch."""
        return [
            Span(area, "rw" if area.rank == rank else "w", is_shared=True) for area in self._boxes
        ]

    def around(self, body: Callable[..., Any], rank: int, nbarriers: int) -> Callable[..., None]:
        """Make a body that writes, runs `body`, a barrier, and reads; run so often in a launch."""
        first = self._nbarriers[rank]
        self._nbarriers[rank] += nbarriers
        done: dict[int, int] = {}

        def with_mail(
            arguments: Any, rank: int, thread: int, nthreads: int, block_threads: int
        ) -> None:
            if not self._machine.share_work:
                nthreads = 1
            if thread < nthreads:
                number = done[thread] = done.get(thread, first) + 1
                for peer in range(self._nranks):
                    st_v2_b32(self._address(peer, number, rank, thread), number, thread)
            body(arguments, rank, thread, block_threads, block_threads)
            if thread < nthreads:
                for source in range(self._nranks):
                    self._read(rank, number, source, (thread + 1) % nthreads)

        return with_mail

    def _address(self, owner: int, number: int, source: int, thread: int) -> int:
        place = (number % 2 * self._nranks + source) * MOST_THREADS + thread
        return self._boxes[owner].address + place * ITEM_NBYTES

    def _read(self, rank: int, number: int, source: int, thread: int) -> None:
        found = ld_no_allocate_v2_b32(self._address(rank, number, source, thread))
        if found != (number, thread):
            raise ProtocolError(
                Verdict.WRONG_VALUE,
                f"rank {rank} found {found} behind barrier {number} where thread {thread} of rank "
                f"{source} had stored {(number, thread)} before it",
                rank,
                source,
            )
