"""Barrier: one block of every rank meets those of the peers, and nothing is moved.

Algorithm, for the one block of the grid, on every rank alike:

1. Load the block's epoch word, and advance the epoch.
2. Meet the peers' blocks (:mod:`shmemar.device.barrier`).
3. Store the epoch word.

The kernel ends on no rank before it has started on all of them. What a kernel before it on the
stream wrote, also to a peer's memory, was performed when that kernel ended, so it can be read by
what comes behind this one on any rank.

With multicast the blocks count (:mod:`shmemar.device.barrier`), and nothing else differs.

Layout: flags alone, as :class:`shmemar.layout.BarrierLayout` draws them. Reuse is safe as
:mod:`shmemar.device.barrier` argues, from one launch to the next as within one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from shmemar.device.barrier import block_barrier
from shmemar.device.groups import all_in_block, share_work
from shmemar.device.watchdog import was_broken
from shmemar.device.words import u32

if TYPE_CHECKING:
    from collections.abc import Callable

    from shmemar.device.kernels.arguments import KernelArguments
    from shmemar.layout import BarrierLayout
    from shmemar.spec import KernelSpec

__all__ = ["build"]


def build(spec: KernelSpec, layout: BarrierLayout, *, looped: bool = False) -> Callable[..., Any]:
    """Return the kernel's body for `spec` and `layout`, which are constants of its code.

    With `looped` it may be run several times in one launch.
    """
    # Templated arguments.
    LOOPED = looped
    open_thread, load_epoch, advance, meet_peers, finish = block_barrier(layout, spec.code)

    def barrier(
        arguments: KernelArguments, rank: int, thread: int, nthreads: int, block_threads: int
    ) -> None:
        me = open_thread(arguments, rank, thread, block_threads)
        if not share_work() and me.lane != 0:
            return
        epoch = advance(u32(load_epoch(me)))
        if not meet_peers(me, epoch, not was_broken(me.watchdog)):
            return
        finish(me, epoch)
        if LOOPED:
            # The next run of the body loads the epoch word on all threads.
            all_in_block(True)  # noqa: FBT003

    return barrier
