"""Two-shot all-reduce: every rank reduces a share of the data and sends the result to every peer.

The packets of the message are divided into N contiguous shares of S packets, the last ones perhaps
empty in part. Algorithm, for each thread t of a grid of T, on every rank alike:

1. Load packet t of each share, and slot t's epoch word.
2. Advance the epoch; store packet t of rank r's share to slot t on rank r, for every peer r.
3. Poll slot t of every peer's packets: packet t of the own share, of every rank. Reduce them in
   rank order 0 ... N-1.
4. Advance the epoch; store the result to slot t on every peer; poll slot t of every peer's packets.
5. Store packet t of every share to the output.
6. Go on with the packets T further, if there are any. Store the epoch word.

A packet beyond the end of the message is sent as zeros and not stored, so that every epoch of a
slot is exchanged with every peer, whatever the count. Results land in the scratch first, so input
and output may be any memory, also the same: a thread reads what it overwrites before.

Layout, requirements and reuse are those of :mod:`shmemar.device.kernels.one_shot`: this is two of
its exchanges, with a share of the data in the first.

Cost: 2 (N - 1) remote stores of 16 bytes and two rounds of polls for N packets; no barrier. A fence
only with the sentinel, behind the second sends of every pass of a launch but the last, and behind
the first ones from the second pass on.

Source: "Every µs Matters: Achieving Near Speed-of-Light Latency in GPU Collectives" (2026), whose
two-shot kernels write into a symmetric output.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from shmemar.device.kernels.exchange import chain, exchange
from shmemar.device.registry import device
from shmemar.device.words import u32, word_array
from shmemar.layout import WORDS_PER_PACKET

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
    NRANKS = spec.nranks
    PACKETS, WORDS, GAP, STEP = this.packets, this.words, this.gap, this.step
    OWN_WORDS = PACKETS * WORDS
    LOOPED = looped
    FIRST_END = this.parts[0][1]
    FIRST_WORDS = FIRST_END * OWN_WORDS
    open_thread, may_start, advance, finish = (
        this.open_thread,
        this.may_start,
        this.advance,
        this.finish,
    )
    load, store, buffer, encode = this.load, this.store, this.buffer, this.encode
    bcast, receive, put, reduce = this.bcast, this.receive, this.put, this.reduce

    @device
    def packet_of(arguments: KernelArguments, owner: int, packet: int) -> int:
        return u32(u32(arguments.share) * u32(owner) + u32(packet))

    @device
    def load_shares(
        words: list[int], arguments: KernelArguments, first: int, source: int, end: int
    ) -> None:
        for owner in range(source, end):
            for p in range(PACKETS):
                packet = packet_of(arguments, owner, first + p)
                at = (owner - source) * OWN_WORDS + WORDS * p
                if packet < u32(arguments.npackets):
                    load(words, at, arguments, packet)
                else:
                    for word in range(WORDS):
                        words[at + word] = u32(0)

    @device
    def send_shares(
        words: list[int],
        me: KernelThread,
        epoch: list[int],
        own: list[int],
        source: int,
        end: int,
    ) -> None:
        for p in range(PACKETS):
            ll = buffer(me, epoch[p])
            for owner in range(source, end):
                at = (owner - source) * OWN_WORDS + WORDS * p
                ll.encode(words, at)
                if owner == me.rank:
                    for word in range(WORDS):
                        own[WORDS * p + word] = words[at + word]
                else:
                    ll.send_packet(owner, u32(me.first_slot + p), words, at)

    @device
    def store_shares(
        packets: list[int], arguments: KernelArguments, first: int, source: int, end: int
    ) -> None:
        for owner in range(source, end):
            for p in range(PACKETS):
                packet = packet_of(arguments, owner, first + p)
                if packet < u32(arguments.npackets):
                    words = word_array(WORDS)
                    at = (owner - source) * STEP + WORDS_PER_PACKET * p
                    for word in range(WORDS):
                        words[word] = packets[at + GAP * word]
                    store(words, 0, arguments, packet)

    @device
    def done(me: KernelThread, epoch: list[int], words: list[int], first: int) -> bool:
        return True

    def scatter_part(source: int, end: int, following: Callable[..., bool]) -> Callable[..., bool]:
        SOURCE, END, LENGTH = source, end, (end - source) * OWN_WORDS

        @device
        def scatter_later(me: KernelThread, epoch: list[int], own: list[int], first: int) -> bool:
            words = word_array(LENGTH)
            load_shares(words, me.arguments, first, SOURCE, END)
            send_shares(words, me, epoch, own, SOURCE, END)
            return following(me, epoch, own, first)

        # The kernel loads and sends the first part itself, as it loads it ahead.
        return scatter_later if source > 0 else following

    def gather_part(source: int, end: int, following: Callable[..., bool]) -> Callable[..., bool]:
        SOURCE, END, LENGTH = source, end, (end - source) * STEP

        @device
        def gather(me: KernelThread, epoch: list[int], result: list[int], first: int) -> bool:
            packets = word_array(LENGTH)
            if not receive(packets, me, epoch, SOURCE, END):
                return False
            if SOURCE <= me.rank < END:
                put(packets, STEP * (me.rank - SOURCE), result)
            store_shares(packets, me.arguments, first, SOURCE, END)
            return following(me, epoch, result, first)

        return gather

    scatter_rest = chain(NRANKS, scatter_part, done)
    gather = chain(NRANKS, gather_part, done)

    def two_shot(
        arguments: KernelArguments, rank: int, thread: int, nthreads: int, block_threads: int
    ) -> None:
        share = u32(arguments.share)
        first = u32(thread * PACKETS)
        if first >= share:
            return
        me = open_thread(arguments, rank, thread, block_threads)
        shares = word_array(FIRST_WORDS)
        own = word_array(OWN_WORDS)
        result = word_array(OWN_WORDS)
        epoch = word_array(PACKETS)

        # The input's load is issued before the epoch's: the other order serialises two round trips.
        load_shares(shares, arguments, first, 0, FIRST_END)
        if not may_start(me, epoch):
            return

        is_first = True
        while True:
            following = u32(first + nthreads * PACKETS)
            is_last = following >= share
            advance(epoch)
            send_shares(shares, me, epoch, own, 0, FIRST_END)
            scatter_rest(me, epoch, own, first)
            if LOOPED or not is_first:
                buffer(me, epoch[0]).fence_resets()
            if not reduce(me, epoch, own, result):
                return

            advance(epoch)
            encode(me, result, 0)
            bcast(me, epoch, result)
            if LOOPED or not is_last:
                buffer(me, epoch[0]).fence_resets()
            if not gather(me, epoch, result, first):
                return
            if is_last:
                break
            first = following
            is_first = False
            load_shares(shares, arguments, first, 0, FIRST_END)

        finish(me, epoch)

    return two_shot
