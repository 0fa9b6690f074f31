"""Broadcast: one rank's data go to every peer, and packets that nobody reads come back.

Algorithm, for each thread t of a grid of T, on every rank alike:

1. The root loads the packet's worth of data that is thread t's; all load slot t's epoch word.
2. Advance the epoch; store the packet, whatever it holds on ranks other than the root, to slot t
   on every peer.
3. Poll slot t of every peer's packets until all have arrived; take the root's.
4. All ranks but the root store it. Go on with the group of packets T further, if there is one.
   Store the epoch word.

Packets go between all ranks, not only from the root and to it: a slot is written again two epochs
later, and that every peer has sent the epoch between is what says that it may be.

Layout, requirements and reuse are those of :mod:`shmemar.device.kernels.one_shot`, and the region
and the epoch words may be shared with it. LL packets only: with a sentinel not every pattern of
bits would arrive as it was sent.

Cost: that of the one-shot all-reduce.

Source: "Every µs Matters: Achieving Near Speed-of-Light Latency in GPU Collectives" (2026), on
bidirectional exchange.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from shmemar.device.kernels.exchange import chain, exchange
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
    # Templated arguments.
    this = exchange(spec, layout)
    PACKETS, WORDS, GAP, STEP = this.packets, this.words, this.gap, this.step
    OWN_WORDS = PACKETS * WORDS
    open_thread, may_start, advance, finish = (
        this.open_thread,
        this.may_start,
        this.advance,
        this.finish,
    )
    load, store, bcast, receive = this.load, this.store, this.bcast, this.receive

    @device
    def load_group(words: list[int], arguments: KernelArguments, first: int) -> None:
        for p in range(PACKETS):
            load(words, WORDS * p, arguments, u32(first + p))

    @device
    def done(me: KernelThread, epoch: list[int], words: list[int]) -> bool:
        return True

    def take_part(source: int, end: int, following: Callable[..., bool]) -> Callable[..., bool]:
        SOURCE, END, LENGTH = source, end, (end - source) * STEP

        @device
        def take(me: KernelThread, epoch: list[int], words: list[int]) -> bool:
            packets = word_array(LENGTH)
            if not receive(packets, me, epoch, SOURCE, END):
                return False
            for peer in range(SOURCE, END):
                if peer != me.rank and u32(peer) == u32(me.arguments.root):
                    at = (peer - SOURCE) * STEP
                    for word in range(OWN_WORDS):
                        words[word] = packets[at + GAP * word]
            return following(me, epoch, words)

        return take

    take_from_root = chain(spec.nranks, take_part, done)

    def broadcast(
        arguments: KernelArguments, rank: int, thread: int, nthreads: int, block_threads: int
    ) -> None:
        share = u32(arguments.share)
        first = u32(thread * PACKETS)
        if first >= share:
            return
        me = open_thread(arguments, rank, thread, block_threads)
        words = word_array(OWN_WORDS)
        epoch = word_array(PACKETS)
        is_root = u32(rank) == u32(arguments.root)

        if is_root:
            load_group(words, arguments, first)
        if not may_start(me, epoch):
            return

        while True:
            advance(epoch)
            bcast(me, epoch, words)
            if not take_from_root(me, epoch, words):
                return
            if not is_root:
                for p in range(PACKETS):
                    store(words, WORDS * p, arguments, u32(first + p))
            first = u32(first + nthreads * PACKETS)
            if first >= share:
                break
            if is_root:
                load_group(words, arguments, first)

        finish(me, epoch)

    return broadcast
