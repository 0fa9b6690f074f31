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

from shmemar.device.kernels.exchange import exchange
from shmemar.device.registry import device
from shmemar.device.words import u32, word_array
from shmemar.layout import WORDS_PER_PACKET

if TYPE_CHECKING:
    from collections.abc import Callable

    from shmemar.device.kernels.arguments import KernelArguments
    from shmemar.layout import LLLayout
    from shmemar.spec import KernelSpec

__all__ = ["build"]


def build(spec: KernelSpec, layout: LLLayout) -> Callable[..., Any]:
    """Return the kernel's body for `spec` and `layout`, which are constants of its code."""
    # Templated arguments.
    this = exchange(spec, layout)
    NRANKS = spec.nranks
    PACKETS, WORDS, GAP, STEP = this.packets, this.words, this.gap, this.step
    OWN_WORDS = PACKETS * WORDS
    ALL_WORDS = NRANKS * STEP
    INPUT_WORDS = NRANKS * OWN_WORDS
    load, store, reduce, finish = this.load, this.store, this.reduce, this.finish
    make_watchdog, make_buffer, may_start = this.watchdog, this.buffer, this.may_start

    @device
    def load_shares(words: list[int], arguments: KernelArguments, first: int) -> None:
        for owner in range(NRANKS):
            for p in range(PACKETS):
                packet = u32(u32(arguments.share) * u32(owner) + u32(first + p))
                at = owner * OWN_WORDS + WORDS * p
                if packet < u32(arguments.npackets):
                    load(words, at, arguments, packet)
                else:
                    for word in range(WORDS):
                        words[at + word] = u32(0)

    @device
    def put_own(packets: list[int], own: int, words: list[int], at: int) -> None:
        for word in range(OWN_WORDS):
            packets[own + GAP * word] = words[at + word]

    @device
    def store_shares(packets: list[int], arguments: KernelArguments, first: int) -> None:
        for owner in range(NRANKS):
            for p in range(PACKETS):
                packet = u32(u32(arguments.share) * u32(owner) + u32(first + p))
                if packet < u32(arguments.npackets):
                    words = word_array(WORDS)
                    for word in range(WORDS):
                        words[word] = packets[owner * STEP + WORDS_PER_PACKET * p + GAP * word]
                    store(words, 0, arguments, packet)

    def two_shot(
        arguments: KernelArguments, rank: int, thread: int, nthreads: int, block_threads: int
    ) -> None:
        share = u32(arguments.share)
        first_slot = u32(thread * PACKETS)
        first = first_slot
        if first >= share:
            return
        watchdog = make_watchdog(arguments, rank, thread, block_threads)
        shares = word_array(INPUT_WORDS)
        packets = word_array(ALL_WORDS)
        result = word_array(OWN_WORDS)
        epoch = word_array(PACKETS)
        own = STEP * rank

        # The input's load is issued before the epoch's: the other order serialises two round trips.
        load_shares(shares, arguments, first)
        if not may_start(arguments, watchdog, epoch, first_slot):
            return

        is_first = True
        while True:
            following = u32(first + nthreads * PACKETS)
            is_last = following >= share
            for p in range(PACKETS):
                ll = make_buffer(arguments, rank, epoch[p], watchdog).advance_epoch()
                epoch[p] = ll.epoch
                slot = u32(first_slot + p)
                for distance in range(1, NRANKS):
                    peer = rank + distance if rank + distance < NRANKS else rank + distance - NRANKS
                    at = peer * OWN_WORDS + WORDS * p
                    ll.encode(shares, at)
                    ll.send(peer, slot, shares, at)
                ll.encode(shares, rank * OWN_WORDS + WORDS * p)
                if not is_first:
                    ll.fence_resets()
            put_own(packets, own, shares, rank * OWN_WORDS)
            for p in range(PACKETS):
                ll = make_buffer(arguments, rank, epoch[p], watchdog)
                slot = u32(first_slot + p)
                if not ll.recv_unrolled(slot, packets, WORDS_PER_PACKET * p, STEP):
                    return
                ll.reset(slot)
            reduce(result, packets)

            for p in range(PACKETS):
                ll = make_buffer(arguments, rank, epoch[p], watchdog).advance_epoch()
                epoch[p] = ll.epoch
                ll.encode(result, WORDS * p)
                ll.bcast(u32(first_slot + p), result, WORDS * p)
                if not is_last:
                    ll.fence_resets()
            put_own(packets, own, result, 0)
            for p in range(PACKETS):
                ll = make_buffer(arguments, rank, epoch[p], watchdog)
                slot = u32(first_slot + p)
                if not ll.recv_unrolled(slot, packets, WORDS_PER_PACKET * p, STEP):
                    return
                ll.reset(slot)
            store_shares(packets, arguments, first)
            if is_last:
                break
            first = following
            is_first = False
            load_shares(shares, arguments, first)

        finish(arguments, epoch, first_slot)

    return two_shot
