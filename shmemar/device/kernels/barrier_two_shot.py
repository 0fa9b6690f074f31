"""Two-shot all-reduce with barriers: every rank reduces a share of the data, and all fetch it.

The packets of the message are divided into N contiguous shares of S packets, the last ones perhaps
empty in part. Algorithm, for each block b and each pass over its slots, on every rank alike:

1. Advance the block's epoch. Load the block's packets of each share of the input, and stage them:
   *pull*, in the own region, a place for each share; *push*, each share on the rank that owns it,
   in the place of the own rank.
2. Meet the peers' blocks b (:mod:`shmemar.device.barrier`).
3. Load each rank's packet of the own share, *pull* from the peers' regions, *push* from the own
   one; reduce them in rank order 0 ... N-1. Stage the result in a place of its own: *pull*, at
   home; *push*, on every rank.
4. Advance the epoch, and meet the peers' blocks again.
5. Load each share's result, *pull* from the ranks that own them, *push* from the own region, and
   store it to the output.

Staged packets move by weak stores and loads of 16 bytes (:mod:`shmemar.device.kernels.staging`).

Places of a region, of P bytes each behind the flags (:class:`shmemar.layout.BarrierLayout`)::

    pull    [0, P) own input, share 0         ...   [NP, NP+P) own result
    push    [0, P) own share, from rank 0     ...   [NP, NP+P) result of rank 0    ...

With multicast, a variant of *pull*: a place of the region is loaded as the sum over all ranks by
one ``multimem.ld_reduce`` of a multicast address, and the result is stored to all ranks by one
``multimem.st``; it is fetched from home, where each rank's result has a place of its own::

    [0, P) own input, share 0   ...   [NP, NP+P) result of rank 0   ...   [2NP-P, 2NP) of rank N-1

The order of the sum is the switch's, so it is not deterministic. 16-bit types are added up in
float32 at least, rounded to their type, and by ``avg`` scaled in float32 and rounded again. Loads
and stores by the multicast address and those by the others are ordered by the alias fence in each
barrier.

Requirements: those of :mod:`shmemar.device.kernels.barrier_one_shot`.

Two barriers a pass are enough, with one buffer, as results have places that inputs have not. Shares
are staged again in the next pass, behind this one's second barrier; each peer came to that after it
had reduced what was staged before. Results are staged again behind the next pass's first barrier;
each peer came to that after it had stored the results before to its output. Were a result staged
over an input, the next pass would overwrite what peers have not fetched, and need a third barrier.
A block's slots do not depend on the grid, so this holds from one launch to the next.

Cost, a pass: for N packets, `pull`, 2 (N - 1) remote loads of 16 bytes, `push`, as many remote
stores; with multicast one load and one store of 16 bytes through the switch; two barriers.

Source: the "two-stage" all-reduces of vLLM, TensorRT-LLM and FlashInfer.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from shmemar.device.barrier import block_barrier
from shmemar.device.groups import all_in_block, share_work
from shmemar.device.kernels.exchange import chain
from shmemar.device.kernels.staging import staging
from shmemar.device.registry import device
from shmemar.device.watchdog import was_broken
from shmemar.device.words import u32, word_array
from shmemar.layout import WORDS_PER_PACKET
from shmemar.spec import Protocol

if TYPE_CHECKING:
    from collections.abc import Callable

    from shmemar.device.barrier import BlockThread
    from shmemar.device.kernels.arguments import KernelArguments
    from shmemar.layout import BarrierLayout
    from shmemar.spec import KernelSpec

__all__ = ["build"]


@device
def place_of_results(nranks: int) -> int:
    """Return the first place that is a result's: those before are for inputs."""
    return nranks


def build(spec: KernelSpec, layout: BarrierLayout, *, looped: bool = False) -> Callable[..., Any]:
    """Return the kernel's body for `spec` and `layout`, which are constants of its code.

    With `looped` it may be run several times in one launch.
    """
    # Templated arguments.
    NRANKS = spec.nranks
    BLOCK_SLOTS = layout.block_slots
    PUSHES = spec.protocol is Protocol.PUSH
    LOOPED = looped
    open_thread, load_epoch, advance, meet_peers, finish = block_barrier(layout, spec.code)
    this = staging(spec, layout)
    step, packet_at, next_base, at = this.step, this.packet_at, this.next_base, this.at
    load_input, store_output, put = this.load_input, this.store_output, this.put
    publish, get_part, reduce = this.publish, this.get_part, this.reduce

    @device
    def packet_of(me: BlockThread, owner: int, packet: int) -> int:
        return u32(u32(me.arguments.share) * u32(owner) + u32(packet))

    @device
    def done(me: BlockThread, slot: int, packet: int) -> bool:
        return True

    def stage_part(source: int, end: int, following: Callable[..., bool]) -> Callable[..., bool]:
        SOURCE, END, LENGTH = source, end, (end - source) * WORDS_PER_PACKET

        @device
        def stage(me: BlockThread, slot: int, packet: int) -> bool:
            words = word_array(LENGTH)
            for owner in range(SOURCE, END):
                here = packet_of(me, owner, packet)
                if here < u32(me.arguments.npackets):
                    load_input(me, words, WORDS_PER_PACKET * (owner - SOURCE), here)
            for owner in range(SOURCE, END):
                if packet_of(me, owner, packet) < u32(me.arguments.npackets):
                    target, place = (owner, me.rank) if PUSHES else (me.rank, owner)
                    put(
                        me.arguments.peers[target],
                        at(me, place, slot),
                        words,
                        WORDS_PER_PACKET * (owner - SOURCE),
                    )
            return following(me, slot, packet)

        return stage

    def fetch_part(source: int, end: int, following: Callable[..., bool]) -> Callable[..., bool]:
        SOURCE, END, LENGTH = source, end, (end - source) * WORDS_PER_PACKET
        get = get_part(source, end)

        @device
        def fetch(me: BlockThread, slot: int, packet: int) -> bool:
            words = word_array(LENGTH)
            get(me, place_of_results(NRANKS), slot, words)
            for owner in range(SOURCE, END):
                here = packet_of(me, owner, packet)
                if here < u32(me.arguments.npackets):
                    store_output(me, words, WORDS_PER_PACKET * (owner - SOURCE), here)
            return following(me, slot, packet)

        return fetch

    stage_shares = chain(NRANKS, stage_part, done)
    fetch_shares = chain(NRANKS, fetch_part, done)

    @device
    def stage_all(me: BlockThread, base: int, nthreads: int) -> None:
        for slot in range(me.lane, BLOCK_SLOTS, step()):
            packet = packet_at(base, nthreads, slot)
            if packet >= u32(me.arguments.share):
                break
            stage_shares(me, slot, packet)

    @device
    def reduce_all(me: BlockThread, base: int, nthreads: int) -> None:
        place = 0 if PUSHES else me.rank
        for slot in range(me.lane, BLOCK_SLOTS, step()):
            packet = packet_at(base, nthreads, slot)
            if packet >= u32(me.arguments.share):
                break
            if packet_of(me, me.rank, packet) < u32(me.arguments.npackets):
                result = word_array(WORDS_PER_PACKET)
                reduce(me, place, slot, result)
                publish(me, place_of_results(NRANKS), slot, result)

    @device
    def fetch_all(me: BlockThread, base: int, nthreads: int) -> None:
        for slot in range(me.lane, BLOCK_SLOTS, step()):
            packet = packet_at(base, nthreads, slot)
            if packet >= u32(me.arguments.share):
                break
            fetch_shares(me, slot, packet)

    def barrier_two_shot(
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
            if ready:
                stage_all(me, base, nthreads)
            if not meet_peers(me, epoch, ready):
                return
            reduce_all(me, base, nthreads)
            epoch = advance(epoch)
            if not meet_peers(me, epoch, ready):
                return
            fetch_all(me, base, nthreads)
            base = next_base(base, nthreads)

        finish(me, epoch)
        if LOOPED:
            # The next run of the body loads the epoch word on all threads.
            all_in_block(True)  # noqa: FBT003

    return barrier_two_shot
