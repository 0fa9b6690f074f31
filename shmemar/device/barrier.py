"""A barrier of a block with the block of the same number on every peer: by flags, or multicast.

What any thread of the block wrote before it, to whatever memory, can be read after it by every
thread of the peers' blocks, and what those read before may be overwritten after it.

Steps, at epoch e of block b, for thread r of the block, where r is another rank:

1. The block meets.
2. Store e, with release order, to the flag of block b and the own rank on rank r.
3. Poll the flag of block b and rank r at home, with acquire order, until it equals e.
4. The block meets; if a thread has given up at its deadline, all do.

The release is cumulative over what the threads of the block did before they met, and the acquire
holds for what they do after they meet again.

Flags::

    flags[e mod 2][block][source rank]     in symmetric memory, a word each
    epochs[block]                          in the rank's own memory, a word each

Nothing is ever reset: epochs count up, and the first one is 1, where fresh memory holds 0.

Reuse is safe because a peer is one barrier ahead at most: it sets its flag of e + 1 only after it
has the own flag of e, so while e is polled the flag of the same parity holds e - 2 or e, and equal
is enough. It sets that of e + 2 only after it has the own one of e + 1, which is stored after the
block has met behind its polls of e.

With multicast a block has one counter on each rank, to which every rank adds, and steps 2 and 3 are
those of the block's first thread, for the e-th barrier:

2. Fence aliases; add 1 to the counter of block b on all ranks, by one ``multimem.red`` of release
   order; fence aliases.
3. Poll the counter at home until it has come to Ne, the own addition included; fence.

A counter is never reset and wraps, and so does e, which here counts barriers and skips nothing: Ne
is meant modulo 2**32, and "has come to" is told by the difference, which is N at most either way.
One counter is enough. A rank adds for e + 1 only after its own counter has come to Ne, so after
every rank has added for e. So what is polled for e lies from N(e - 1), which was seen before, to
Ne + N - 1, with what peers add for e + 1; while it is less than Ne, someone has not added for e.

The first alias fence stands on the path from what a block did by one address of memory to what a
peer's does by another: stores by home or peer addresses to loads by the multicast address, and
stores by that to loads at home. The second stands between the addition and the own polls of what it
adds to. What PTX does not say is that polls at home synchronise with additions by a multicast
address: for that both would have to use the same proxy. Here it is taken for granted, as in
libraries of NVIDIA's that poll so. Not run on a GPU.

Requires as many threads a block as ranks, and that all threads of a block come to each of its
barriers with the same epoch. Where the threads of a rank run one after another, the first of a
block does it all, and the others must not come.

Cost: a remote store of 4 bytes to each peer and one round of polls, one fence of system scope, two
meetings of the block. The fence is what the release becomes on sm_90; the acquire becomes none, but
each poll discards what the L1 cache holds. With multicast one addition in the place of the stores,
polls of one word by one thread, a fence behind them, and two alias fences.

Source: PTX ISA 8.x, "Memory Consistency Model", release and acquire patterns, and "Proxy-preserved
base causality order".
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from shmemar.device.groups import all_in_block, share_work
from shmemar.device.memory import (
    fence_acq_rel_sys,
    fence_proxy_alias,
    globaltimer_ns,
    ld_acquire_sys_b32,
    ld_b32,
    ld_relaxed_sys_b32,
    multimem_red_release_sys_add_u32,
    relax,
    st_b32,
    st_release_sys_b32,
)
from shmemar.device.packet import next_epoch
from shmemar.device.registry import device
from shmemar.device.watchdog import POLLS_PER_LOOK, Watchdog, report, should_give_up
from shmemar.device.words import i64_from_word, u32, u64
from shmemar.layout import WORD_NBYTES, flag_offset
from shmemar.spec import MULTICAST_CODE

if TYPE_CHECKING:
    from collections.abc import Callable

    from shmemar.device.kernels import KernelArguments
    from shmemar.layout import BarrierLayout

__all__ = ["BlockBarrier", "BlockThread", "block_barrier"]

EPOCH_NBYTES = WORD_NBYTES
"""Each block has an epoch word of its own."""


class BlockThread(NamedTuple):
    """What a thread of a block is told once: its call, and who it is.

    Attributes:
        arguments: The launch's.
        rank: The own rank, a constant of the code.
        block: The block.
        lane: Its place in the block.
        peer_region: The region of the rank whose number that is, if there is one.
        watchdog: Deadline of its polls.
    """

    arguments: KernelArguments
    rank: int
    block: int
    lane: int
    peer_region: int
    watchdog: Watchdog


class BlockBarrier(NamedTuple):
    """Device functions of one layout; ``me`` is a `BlockThread`.

    Attributes:
        open_thread: ``open_thread(arguments, rank, thread, block_threads)`` makes ``me``.
        load_epoch: ``load_epoch(me)`` loads the epoch of the block's last barrier.
        advance: ``advance(epoch)`` is the epoch after it.
        meet_peers: ``meet_peers(me, epoch, ready)`` is the barrier. False when a thread of the
            block is not `ready`, and no flag was set; or when one gave up.
        finish: ``finish(me, epoch)`` stores the epoch of the last one.
    """

    open_thread: Callable[..., BlockThread]
    load_epoch: Callable[[BlockThread], int]
    advance: Callable[[int], int]
    meet_peers: Callable[[BlockThread, int, bool], bool]
    finish: Callable[[BlockThread, int], None]


def block_barrier(layout: BarrierLayout, kernel: int) -> BlockBarrier:
    """Make them for a layout, and for the kernel of that code (`KernelSpec.code`)."""
    # Templated arguments.
    NRANKS, NBLOCKS, BLOCK_THREADS = layout.nranks, layout.nblocks, layout.block_threads
    KERNEL = kernel
    multicast = bool(kernel & MULTICAST_CODE)

    @device
    def open_thread(
        arguments: KernelArguments, rank: int, thread: int, block_threads: int
    ) -> BlockThread:
        block, lane = u32(thread) // u32(BLOCK_THREADS), u32(thread) % u32(BLOCK_THREADS)
        watchdog = Watchdog(
            arguments.broken,
            arguments.record,
            arguments.timeout_ns,
            KERNEL,
            rank,
            thread,
            block_threads,
        )
        place = i64_from_word(lane)
        region = region_of(arguments.peers, place)
        return BlockThread(arguments, rank, i64_from_word(block), place, region, watchdog)

    @device
    def epoch_address(me: BlockThread) -> int:
        return me.arguments.epochs + u64(me.block) * u64(EPOCH_NBYTES)

    @device
    def load_epoch(me: BlockThread) -> int:
        return ld_b32(epoch_address(me))

    @device
    def flag_of(me: BlockThread, region: int, epoch: int, source: int) -> int:
        parity = i64_from_word(u32(epoch & u32(1)))
        return region + u64(flag_offset(parity, me.block, source, NBLOCKS, NRANKS))

    @device
    def exchange_flags(me: BlockThread, epoch: int) -> bool:
        home = me.arguments.peers[me.rank]
        came = True
        if share_work():
            if me.lane < NRANKS and me.lane != me.rank:
                st_release_sys_b32(flag_of(me, me.peer_region, epoch, me.rank), epoch)
                came = await_flag(me, flag_of(me, home, epoch, me.lane), epoch, me.lane)
        else:
            for peer in range(NRANKS):
                if peer != me.rank:
                    flag = flag_of(me, me.arguments.peers[peer], epoch, me.rank)
                    st_release_sys_b32(flag, epoch)
            for peer in range(NRANKS):
                if peer != me.rank and came:
                    came = await_flag(me, flag_of(me, home, epoch, peer), epoch, peer)
        return came

    @device
    def count_in(me: BlockThread, epoch: int) -> bool:
        came = True
        if me.lane == 0:
            offset = u64(flag_offset(0, me.block, 0, NBLOCKS, NRANKS))
            add_to_counters(me.arguments.peers[NRANKS] + offset)
            came = await_count(me, me.arguments.peers[me.rank] + offset, epoch, NRANKS)
        return came

    exchange = count_in if multicast else exchange_flags

    @device
    def meet_peers(me: BlockThread, epoch: int, ready: bool) -> bool:  # noqa: FBT001 - an operand
        if not all_in_block(ready):
            return False
        came = exchange(me, epoch)
        return all_in_block(came)

    @device
    def finish(me: BlockThread, epoch: int) -> None:
        if me.lane == 0:
            st_b32(epoch_address(me), epoch)

    @device
    def advance_flags(epoch: int) -> int:
        return next_epoch(epoch)

    @device
    def advance_counts(epoch: int) -> int:
        return next_count(epoch)

    advance = advance_counts if multicast else advance_flags
    return BlockBarrier(open_thread, load_epoch, advance, meet_peers, finish)


device(flag_offset)


@device
def next_count(epoch: int) -> int:
    """Return the epoch after `epoch`, of counters: how many barriers there were, which wraps."""
    return u32(epoch + u32(1))


@device
def region_of(peers: tuple[int, ...], rank: int) -> int:
    """Return the region of a rank that only the running thread knows, from registers."""
    region = peers[0]
    for peer in range(1, len(peers)):
        if peer == rank:
            region = peers[peer]
    return region


@device
def await_flag(me: BlockThread, flag: int, epoch: int, source: int) -> bool:
    """Wait until a flag equals the epoch; what `source` did before it set it can then be seen.

    Returns:
        True; False when the deadline passed, on this call or before it.
    """
    polls = u32(0)
    since_ns = u64(0)
    while True:
        seen = ld_acquire_sys_b32(flag)
        if seen == epoch:
            return True
        polls = u32(polls + u32(1))
        if polls & u32(POLLS_PER_LOOK - 1) == u32(0):
            if since_ns == u64(0):
                since_ns = globaltimer_ns()
            if should_give_up(me.watchdog, since_ns):
                missing = u64(u64(1) << u64(source))
                report(me.watchdog, source, missing, u32(me.block), epoch, epoch, seen)
                return False
        relax()


@device
def add_to_counters(counter: int) -> None:
    """Add to a block's counter on all ranks, behind everything that its threads did or saw done."""
    fence_proxy_alias()
    multimem_red_release_sys_add_u32(counter, u32(1))
    fence_proxy_alias()


@device
def has_come_to(seen: int, count: int) -> bool:
    """Return whether a counter, which wraps, has come to a count that is near."""
    return u32(seen - count) < u32(1 << 31)


@device
def await_count(me: BlockThread, counter: int, epoch: int, nranks: int) -> bool:
    """Wait until all ranks have added to a counter so often; what they did before can then be seen.

    A counter does not say whose addition is missing, so at the deadline all peers are reported.

    Returns:
        True; False when the deadline passed, on this call or before it.
    """
    count = u32(epoch * u32(nranks))
    polls = u32(0)
    since_ns = u64(0)
    while True:
        seen = ld_relaxed_sys_b32(counter)
        if has_come_to(seen, count):
            fence_acq_rel_sys()
            return True
        polls = u32(polls + u32(1))
        if polls & u32(POLLS_PER_LOOK - 1) == u32(0):
            if since_ns == u64(0):
                since_ns = globaltimer_ns()
            if should_give_up(me.watchdog, since_ns):
                everyone = u64(u64(~u64(0)) >> u64(64 - nranks))
                missing = u64(everyone ^ u64(u64(1) << u64(me.rank)))
                peer = me.rank + 1 if me.rank + 1 < nranks else 0
                report(me.watchdog, peer, missing, u32(me.block), epoch, count, seen)
                return False
        relax()
