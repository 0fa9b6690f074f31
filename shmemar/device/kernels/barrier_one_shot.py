"""One-shot all-reduce with barriers: stage the data of all ranks, meet, reduce all of it.

Algorithm, for each block b and each pass over its slots, on every rank alike:

1. Advance the block's epoch e. Load the block's packets of the input, and stage them in buffer
   e mod 2: *pull*, in the own region; *push*, in the place of the own rank on every rank.
2. Meet the peers' blocks b (:mod:`shmemar.device.barrier`).
3. Load each rank's packet, *pull* from the peers' regions, *push* from the own one; reduce them in
   rank order 0 ... N-1; store the result to the output.

Staged packets move by weak stores and loads of 16 bytes (:mod:`shmemar.device.kernels.staging`).

Places of a region, of P bytes each behind the flags (:class:`shmemar.layout.BarrierLayout`)::

    pull    [0, P) even epochs                     [P, 2P) odd epochs
    push    [0, P) even epochs, from rank 0  ...   [NP, NP+P) odd epochs, from rank 0  ...

Requirements: symmetric regions for flags and packets, flags zeroed, and epoch words of the kernel's
own; input and output aligned to their components, one array or two that do not overlap; the same
grid and layout on all ranks, whole blocks, all resident at once.

One barrier a pass is enough, as there are two buffers. Buffer e mod 2 is written again at e + 2,
behind the barrier of e + 1; each peer's block came to that one after it had reduced what was staged
at e, whether it loads that from here or from home. With a single buffer a second barrier would have
to stand behind step 3. A block's slots do not depend on the grid, and the last barrier of a launch
counts for the first pass of the next.

Cost, a pass: `pull`, N - 1 remote loads of 16 bytes a packet; `push`, as many remote stores; one
barrier.

Source: the "one-stage" all-reduces of vLLM, TensorRT-LLM and FlashInfer, which read the peers'
inputs between two barriers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from shmemar.device.barrier import block_barrier
from shmemar.device.groups import all_in_block, share_work
from shmemar.device.kernels.staging import staging
from shmemar.device.registry import device
from shmemar.device.watchdog import was_broken
from shmemar.device.words import i64_from_word, u32, word_array
from shmemar.layout import WORDS_PER_PACKET

if TYPE_CHECKING:
    from collections.abc import Callable

    from shmemar.device.barrier import BlockThread
    from shmemar.device.kernels.arguments import KernelArguments
    from shmemar.layout import BarrierLayout
    from shmemar.spec import KernelSpec

__all__ = ["build"]


@device
def buffer_at(epoch: int) -> int:
    """Return which of the two buffers an epoch's packets are staged in."""
    return i64_from_word(u32(epoch & u32(1)))


def build(spec: KernelSpec, layout: BarrierLayout, *, looped: bool = False) -> Callable[..., Any]:
    """Return the kernel's body for `spec` and `layout`, which are constants of its code.

    With `looped` it may be run several times in one launch.
    """
    # Templated arguments.
    BLOCK_SLOTS, BUFFER_PLACES = layout.block_slots, layout.nplaces // 2
    LOOPED = looped
    open_thread, load_epoch, advance, meet_peers, finish = block_barrier(layout, spec.code)
    this = staging(spec, layout)
    step, packet_at, next_base = this.step, this.packet_at, this.next_base
    load_input, store_output = this.load_input, this.store_output
    publish, reduce = this.publish, this.reduce

    @device
    def stage_all(me: BlockThread, place: int, base: int, nthreads: int) -> None:
        for slot in range(me.lane, BLOCK_SLOTS, step()):
            packet = packet_at(base, nthreads, slot)
            if packet >= u32(me.arguments.share):
                break
            words = word_array(WORDS_PER_PACKET)
            load_input(me, words, 0, packet)
            publish(me, place, slot, words)

    @device
    def reduce_all(me: BlockThread, place: int, base: int, nthreads: int) -> None:
        for slot in range(me.lane, BLOCK_SLOTS, step()):
            packet = packet_at(base, nthreads, slot)
            if packet >= u32(me.arguments.share):
                break
            result = word_array(WORDS_PER_PACKET)
            reduce(me, place, slot, result)
            store_output(me, result, 0, packet)

    def barrier_one_shot(
        arguments: KernelArguments, rank: int, thread: int, nthreads: int, block_threads: int
    ) -> None:
        me = open_thread(arguments, rank, thread, block_threads)
        if not share_work() and me.lane != 0:
            return
        ready = not was_broken(me.watchdog)
        epoch = u32(load_epoch(me))
        base = u32(u32(thread) - u32(me.lane))
        while base < u32(arguments.share):
            epoch = advance(epoch)
            place = buffer_at(epoch) * BUFFER_PLACES
            if ready:
                stage_all(me, place, base, nthreads)
            if not meet_peers(me, epoch, ready):
                return
            reduce_all(me, place, base, nthreads)
            base = next_base(base, nthreads)

        finish(me, epoch)
        if LOOPED:
            # The next run of the body loads the epoch word on all threads.
            all_in_block(True)  # noqa: FBT003

    return barrier_one_shot
