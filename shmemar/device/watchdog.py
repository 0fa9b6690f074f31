"""Deadlines of spins, and the record of the first one that passed.

A spin looks at the clock and at the rank's *broken* word once in `POLLS_PER_LOOK` polls, so that a
wait that ends in time pays nothing. The first thread past the deadline claims the broken word and
writes the failure record; everything that spins or starts on this rank afterwards gives up at once.
"""

from __future__ import annotations

from typing import NamedTuple

from shmemar.device.memory import (
    exch_relaxed_sys_b32,
    fence_acq_rel_sys,
    globaltimer_ns,
    ld_b32,
    ld_relaxed_sys_b32,
    st_relaxed_sys_b32,
)
from shmemar.device.registry import device
from shmemar.device.words import opaque, u32, u64
from shmemar.layout import failure_offset

__all__ = ["POLLS_PER_LOOK", "Watchdog", "is_broken", "report", "should_give_up", "was_broken"]

POLLS_PER_LOOK = 1024
"""A power of two. A poll takes an L2 round trip or more (0.15 us on an H200, 2026-11-29), so a look
comes every 0.15 ms or later."""

_VALID = failure_offset("valid")
_KERNEL = failure_offset("kernel")
_RANK = failure_offset("rank")
_PEER = failure_offset("peer")
_MISSING_LO = failure_offset("missing_lo")
_MISSING_HI = failure_offset("missing_hi")
_THREAD = failure_offset("thread")
_BLOCK_THREADS = failure_offset("block_threads")
_SLOT = failure_offset("slot")
_EPOCH = failure_offset("epoch")
_EXPECTED = failure_offset("expected")
_SEEN = failure_offset("seen")


class Watchdog(NamedTuple):
    """What a thread needs to give up and to say why.

    Attributes:
        broken: Address of the rank's broken word.
        record: Address of the rank's failure record.
        timeout_ns: Deadline of a spin in nanoseconds; 0 for none.
        kernel: ``KernelSpec.code`` of the kernel.
        rank: The rank that waits.
        thread: Global index of the thread that waits.
        block_threads: Threads a block.
    """

    broken: int
    record: int
    timeout_ns: int
    kernel: int
    rank: int
    thread: int
    block_threads: int


@device
def was_broken(watchdog: Watchdog) -> bool:
    """Return whether a launch before this one passed its deadline on this rank.

    A weak load, as the kernel boundary orders it: a relaxed one of system scope would go to the
    word's own side of the L2, and every launch would wait for it before it sends.
    """
    return ld_b32(watchdog.broken) != u32(0)


@device
def is_broken(watchdog: Watchdog) -> bool:
    """Return whether any spin on this rank has passed its deadline."""
    return ld_relaxed_sys_b32(watchdog.broken) != u32(0)


@device
def should_give_up(watchdog: Watchdog, since_ns: int) -> bool:
    """Return whether a spin that was first looked at `since_ns` must end."""
    overdue = watchdog.timeout_ns != u64(0) and (
        u64(globaltimer_ns() - since_ns) > watchdog.timeout_ns
    )
    return overdue or is_broken(watchdog)


@device
def report(
    watchdog: Watchdog,
    peer: int,
    missing: int,
    slot: int,
    epoch: int,
    expected: int,
    seen: int,
) -> None:
    """Break the communicator on this rank and write the record, unless that was done before.

    Args:
        watchdog: Who waited.
        peer: The first rank that was missing.
        missing: Bit r for each rank r that was missing.
        slot: The slot that was polled.
        epoch: The epoch of the exchange.
        expected: The word that was waited for.
        seen: The word that stood there.
    """
    if exch_relaxed_sys_b32(watchdog.broken, u32(1)) == u32(0):
        # Opaque, so that no part of the address is computed before it is needed.
        record = watchdog.record + u64(opaque(u32(0)))
        st_relaxed_sys_b32(record + u64(_KERNEL), u32(watchdog.kernel))
        st_relaxed_sys_b32(record + u64(_RANK), u32(watchdog.rank))
        st_relaxed_sys_b32(record + u64(_PEER), u32(peer))
        st_relaxed_sys_b32(record + u64(_MISSING_LO), u32(missing))
        st_relaxed_sys_b32(record + u64(_MISSING_HI), u32(missing >> u64(32)))
        st_relaxed_sys_b32(record + u64(_THREAD), u32(watchdog.thread))
        st_relaxed_sys_b32(record + u64(_BLOCK_THREADS), u32(watchdog.block_threads))
        st_relaxed_sys_b32(record + u64(_SLOT), u32(slot))
        st_relaxed_sys_b32(record + u64(_EPOCH), epoch)
        st_relaxed_sys_b32(record + u64(_EXPECTED), expected)
        st_relaxed_sys_b32(record + u64(_SEEN), seen)
        fence_acq_rel_sys()
        st_relaxed_sys_b32(record + u64(_VALID), u32(1))
