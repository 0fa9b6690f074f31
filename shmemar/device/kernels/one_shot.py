"""One-shot all-reduce: every rank sends all of its data to every peer.

Algorithm, for each thread t of a grid of T, on every rank alike:

1. Load the packet's worth of input that is thread t's, and slot t's epoch word.
2. Advance the epoch; store the packet to slot t on every peer; load the next input, if any.
3. Poll slot t of every peer's packets until all have arrived; empty them, if they are sentinel
   packets.
4. Reduce in rank order 0 ... N-1, the own data from registers; store to the output.
5. Go on with the group of packets T further, if there is one. Store the epoch word.

Layout: :mod:`shmemar.layout`. Half-open bytes of the region on the receiving rank::

    [buffer * B + source * P + slot * 16, + 16)    one packet; slot = thread

    A complex128 product with LL takes two packets a thread: thread t owns slots 2t and 2t + 1, each
    with its own epoch word, so a call of one kind may follow one of the other on the same region.

Requires: the same arguments on all ranks, but for addresses and what they hold; a grid of no more
threads than slots; all blocks resident at once; launches of one communicator in the same order on
all ranks, one after another.

Reuse is safe as :mod:`shmemar.device.packet_buffer` argues; between two launches the kernel
boundary stands in for "the same thread", and for the fence behind resets.

Cost: N - 1 remote stores of 16 bytes and one round of polls a packet, which carries 8 bytes with LL
and 16 with the sentinel; no barrier. A fence only with the sentinel, in a thread's third pass of a
launch and beyond, behind the sends.

From 16 ranks on :mod:`shmemar.device.kernels.one_shot_wide` takes its place.

Source: the one-shot all-reduce of NCCL's symmetric LL kernels, and "Every µs Matters: Achieving
Near Speed-of-Light Latency in GPU Collectives" (2026).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from shmemar.device.kernels import one_shot_wide
from shmemar.device.kernels.exchange import exchange
from shmemar.device.registry import device
from shmemar.device.words import u32, word_array

if TYPE_CHECKING:
    from collections.abc import Callable

    from shmemar.device.kernels.arguments import KernelArguments
    from shmemar.device.kernels.exchange import KernelThread
    from shmemar.layout import LLLayout
    from shmemar.spec import KernelSpec

__all__ = ["build"]


def build(spec: KernelSpec, layout: LLLayout, *, looped: bool = False) -> Callable[..., Any]:
    """Return the kernel's body for `spec` and `layout`, which are constants of its code.

    With `looped` it may be run several times in one launch.
    """
    if spec.lanes > 1:
        return one_shot_wide.build(spec, layout, looped=looped)
    # Templated arguments.
    this = exchange(spec, layout)
    PACKETS, WORDS = this.packets, this.words
    OWN_WORDS = PACKETS * WORDS
    LOOPED = looped
    open_thread, may_start, advance, finish = (
        this.open_thread,
        this.may_start,
        this.advance,
        this.finish,
    )
    load, store, buffer, encode = this.load, this.store, this.buffer, this.encode
    bcast, reduce = this.bcast, this.reduce

    @device
    def load_group(words: list[int], arguments: KernelArguments, first: int) -> None:
        for p in range(PACKETS):
            load(words, WORDS * p, arguments, u32(first + p))

    @device
    def take_pass(
        me: KernelThread, epoch: list[int], payload: list[int], first: int, following: int
    ) -> bool:
        is_last = following >= u32(me.arguments.share)
        advance(epoch)
        encode(me, payload, 0)
        bcast(me, epoch, payload)
        # Two passes of a launch need no fence, so that it stands in those between first and last.
        if LOOPED or not (is_last or first == u32(me.first_slot)):
            buffer(me, epoch[0]).fence_resets()
        own = word_array(OWN_WORDS)
        for word in range(OWN_WORDS):
            own[word] = payload[word]
        if not is_last:
            load_group(payload, me.arguments, following)
        result = word_array(OWN_WORDS)
        if not reduce(me, epoch, own, result):
            return False
        for p in range(PACKETS):
            store(result, WORDS * p, me.arguments, u32(first + p))
        return True

    def one_shot(
        arguments: KernelArguments, rank: int, thread: int, nthreads: int, block_threads: int
    ) -> None:
        # Packets are counted in 32 bits: half the instructions before the first load.
        share = u32(arguments.share)
        first = u32(thread * PACKETS)
        if first >= share:
            return
        me = open_thread(arguments, rank, thread, block_threads)
        payload = word_array(OWN_WORDS)
        epoch = word_array(PACKETS)

        # The input's load is issued before the epoch's: the other order serialises two round trips.
        load_group(payload, arguments, first)
        if not may_start(me, epoch):
            return

        # The first pass, most often the only one, has code of its own: a loop's takes 0.1 us more
        # (4 ranks on an H200, in a CUDA graph, 2026-11-30). Not where the launch loops over the
        # body: nothing makes the lanes of a warp meet again behind its polls, which cost 0.6 us.
        if LOOPED:
            while first < share:
                following = u32(first + nthreads * PACKETS)
                if not take_pass(me, epoch, payload, first, following):
                    return
                first = following
        else:
            following = u32(first + nthreads * PACKETS)
            if not take_pass(me, epoch, payload, first, following):
                return
            if following >= share:
                # Here, so that the code of further passes is behind the end of most launches.
                finish(me, epoch)
                return
            while following < share:
                first = following
                following = u32(first + nthreads * PACKETS)
                if not take_pass(me, epoch, payload, first, following):
                    return

        finish(me, epoch)

    return one_shot
