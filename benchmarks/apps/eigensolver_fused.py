"""The product's end and its sum over the ranks in one kernel, over shmemar's `LLBuffer`.

`add_tiles` leaves this rank's part of ``y = A v`` in memory, where the all-reduce, a launch of its
own, finds it. Here whoever has added up a row's tiles sends the sum to its peers at once, and
stores the sum of what it receives: a launch and a trip through memory less in each column.

A warp has 4 rows, and 8 lanes share the tiles of a row, as the threads of `add_tiles` do, in the
same order, so that the sums have the same bits. Lane l has part ``l // 4`` of row ``l % 4``; parts
are added up from lane to lane, and the last 4 lanes exchange. Behind the rows come the products of
v with W and V, which concern no other rank.

Requires: the same n, k, j and grid on all ranks; `nown`, `first_tile` and what arrays hold are a
rank's own. A thread's rows depend on its number and the grid alone, and each takes one epoch, with
an element to and from every peer: so its slot may be written again as
:mod:`shmemar.device.packet_buffer` argues. A grid of fewer threads than rows makes several rounds.

Cost: one remote store of 16 bytes to each peer and one round of polls a row (two of complex128); no
barrier, no fence.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

from benchmarks.apps.eigensolver_tiles import build_sums
from shmemar.device.groups import WARP_THREADS, from_lane_before, share_work
from shmemar.device.registry import device
from shmemar.errors import ArgumentError

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy as np

    from benchmarks.apps.eigensolver_parts import Shape

__all__ = ["fused_kernel", "fused_threads"]


def fused_threads(nrows: int, nproducts: int, shape: Shape) -> int:
    """Threads that have all rows and products at once."""
    team = WARP_THREADS // shape.parts
    return WARP_THREADS * (-(-nrows // team) + -(-nproducts // team))


@cache
def fused_kernel(dtype: np.dtype[Any], block: int, shape: Shape) -> Callable[..., None]:
    """Make the kernel, for `Communicator.launch`; arguments are those of `build_tiles`.

    Its own arguments are ``across, along, dots, products, out, n, k, j, nown, first_tile``, those
    of `add_tiles`; `out` gets the sum over all ranks.

    Raises:
        ArgumentError: The parts of a row are not those of a warp.
    """
    if WARP_THREADS % shape.parts:
        raise ArgumentError(
            f"parts is {shape.parts}; expected a divisor of the {WARP_THREADS} lanes of a warp."
        )
    zero = dtype.type(0)
    PARTS, TEAM = shape.parts, WARP_THREADS // shape.parts
    row_sum, product_sum = (device(each) for each in build_sums(dtype, block, shape))

    if dtype.kind == "c":

        @device
        def from_part_before(value: Any) -> Any:
            return complex(
                from_lane_before(value.real, TEAM),
                from_lane_before(value.imag, TEAM),
            )

    else:

        @device
        def from_part_before(value: Any) -> Any:
            return from_lane_before(value, TEAM)

    def add_tiles_and_sum(
        ll: Any,
        thread: int,
        nthreads: int,
        across: Any,
        along: Any,
        dots: Any,
        products: Any,
        out: Any,
        n: int,
        k: int,
        j: int,
        nown: int,
        first_tile: int,
    ) -> None:
        together = share_work()
        lane = thread % WARP_THREADS
        part = lane // TEAM
        if not together and part != PARTS - 1:
            return
        begin = part if together else 0
        end = part + 1 if together else PARTS
        nrows, nproducts = n - 1 - j, 2 * (j - k)
        behind = (nrows + TEAM - 1) // TEAM * TEAM
        # All lanes of a warp go on alike.
        first = thread // WARP_THREADS * TEAM
        while first < behind + nproducts:
            i = first + lane % TEAM
            at = i - behind
            total = zero
            for each in range(begin, end):
                share = zero
                if i < nrows:
                    share = row_sum(
                        across, along, n, nown, ll.rank, ll.size, first_tile, j + 1 + i, each
                    )
                elif 0 <= at < nproducts:
                    share = product_sum(dots, n, j, at, each)
                total = share if each == begin else total + share
            if together:
                for each in range(1, PARTS):
                    before = from_part_before(total)
                    if part == each:
                        total = before + total
            if part == PARTS - 1:
                if i < nrows:
                    ll.bcast(0, total)
                    out[i] = ll.recv_reduce(0, total, lambda a, b: a + b)
                    ll.advance_epoch()
                elif 0 <= at < nproducts:
                    products[at] = total
            first += nthreads // WARP_THREADS * TEAM

    return add_tiles_and_sum
