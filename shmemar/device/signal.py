"""Put and signal: bulk data to a reachable peer, and a word that says it has arrived.

For kernels that users write, where a message is longer than a few packets: `put` moves bytes with
plain stores of 16 bytes, and a signal of 64 bits covers them. The signal's release and the
waiter's acquire are the barrier that packets do without.

Each operation has three scopes, as in NVSHMEM: of one thread, of a warp, and of a block
(``_warp``, ``_block``). The threads of a warp or block must all come, with the same arguments. They
meet before the operation and after it, so what each wrote before is among what is sent, and what a
signal covers may be read by all of them. A thread that gave up at its deadline must keep coming: an
operation to which not all come sends no signal, and its waiters get False.

Addresses are those of symmetric memory, ``array[rank]`` of a `shmemar.SymmetricArray` that was
passed to the kernel, plus bytes. Sources may be any memory of the own GPU.

A signal only grows: a waiter waits until it is at least some value, so none can be missed. What
stood in the destination may be overwritten only once the peer has said, by a signal of its own,
that it was read.

Order. A put's stores are plain. The threads of a warp or block meet before the signal, and one of
them releases it (``st.release.sys`` or ``red.release.sys``), which makes the stores of all of them
visible before it. The waiter polls relaxed, with one acquire fence behind the poll that succeeds,
and then meets the threads of its own scope.

Where threads of a rank run one after another (emulated), nobody is met: the first thread of a warp
or block does the work of all, when it comes to it. There a source must have been written before
the launch, or by that thread.

Source: OpenSHMEM 1.5, ``shmem_put_signal`` and ``shmem_signal_wait_until``; PTX ISA 8.x, "Memory
Consistency Model", release and acquire patterns.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from shmemar.device.groups import (
    WARP_THREADS,
    all_in_block,
    all_in_warp,
    any_in_block,
    any_in_warp,
    share_work,
)
from shmemar.device.ll_buffer import ALIVE, EPOCH
from shmemar.device.memory import (
    fence_acq_rel_sys,
    globaltimer_ns,
    ld_b8,
    ld_b32,
    ld_no_allocate_v4_b32,
    ld_relaxed_sys_b64,
    red_release_sys_add_u64,
    relax,
    st_b8,
    st_b32,
    st_release_sys_b64,
    st_v4_b32,
)
from shmemar.device.registry import device
from shmemar.device.watchdog import POLLS_PER_LOOK, report, should_give_up
from shmemar.device.words import u32, u64
from shmemar.layout import BLOCK_THREADS, NO_SLOT, WORD_NBYTES

if TYPE_CHECKING:
    from shmemar.device.ll_buffer import LLBuffer

__all__ = [
    "SIGNAL_ADD",
    "SIGNAL_SET",
    "put",
    "put_block",
    "put_signal",
    "put_signal_block",
    "put_signal_warp",
    "put_warp",
    "signal_op",
    "signal_op_block",
    "signal_op_warp",
    "signal_wait",
    "signal_wait_block",
    "signal_wait_warp",
]

SIGNAL_SET, SIGNAL_ADD = 0, 1
"""Signal operations: store a value, or add it."""

VECTOR_NBYTES = 16


@device
def put(ll: LLBuffer, destination: int, source: int, nbytes: int) -> None:
    """Copy bytes to a peer's memory; one thread does it all.

    Args:
        ll: The thread's buffer. Nothing is done once the thread gave up.
        destination: Address in a peer's symmetric memory.
        source: Address in memory of the own GPU.
        nbytes: How many. Where both addresses are multiples of 16 they go 16 at a time, of 4 by
            words, else one by one.
    """
    _copy(ll, destination, source, nbytes, 0, 1)


@device
def put_warp(ll: LLBuffer, destination: int, source: int, nbytes: int) -> None:
    """Copy as `put`, by the threads of a warp together."""
    all_in_warp(True)  # noqa: FBT003
    _copy_together(ll, destination, source, nbytes, WARP_THREADS)
    all_in_warp(True)  # noqa: FBT003


@device
def put_block(ll: LLBuffer, destination: int, source: int, nbytes: int) -> None:
    """Copy as `put`, by the threads of a block together."""
    all_in_block(True)  # noqa: FBT003
    _copy_together(ll, destination, source, nbytes, BLOCK_THREADS)
    all_in_block(True)  # noqa: FBT003


@device
def signal_op(ll: LLBuffer, signal: int, value: int, op: int) -> None:
    """Set a peer's signal, or add to it, behind everything that this thread stored.

    Args:
        ll: As of `put`.
        signal: Address of 64 bits in a peer's symmetric memory.
        value: What is stored or added.
        op: `SIGNAL_SET` or `SIGNAL_ADD`.
    """
    if ll.state[ALIVE] != u32(0):
        if op == SIGNAL_ADD:
            red_release_sys_add_u64(signal, value)
        else:
            st_release_sys_b64(signal, value)


@device
def signal_op_warp(ll: LLBuffer, signal: int, value: int, op: int) -> None:
    """Signal as `signal_op`, once, behind everything that the threads of the warp stored."""
    if all_in_warp(ll.state[ALIVE] != u32(0)) and ll.thread % u32(WARP_THREADS) == u32(0):
        signal_op(ll, signal, value, op)


@device
def signal_op_block(ll: LLBuffer, signal: int, value: int, op: int) -> None:
    """Signal as `signal_op`, once, behind everything that the threads of the block stored."""
    if all_in_block(ll.state[ALIVE] != u32(0)) and ll.thread % u32(BLOCK_THREADS) == u32(0):
        signal_op(ll, signal, value, op)


@device
def put_signal(
    ll: LLBuffer, destination: int, source: int, nbytes: int, signal: int, value: int, op: int
) -> None:
    """Copy bytes to a peer's memory as `put` does, and then `signal_op` there."""
    put(ll, destination, source, nbytes)
    signal_op(ll, signal, value, op)


@device
def put_signal_warp(
    ll: LLBuffer, destination: int, source: int, nbytes: int, signal: int, value: int, op: int
) -> None:
    """Copy and signal as `put_signal`, by the threads of a warp together."""
    all_in_warp(True)  # noqa: FBT003
    _copy_together(ll, destination, source, nbytes, WARP_THREADS)
    signal_op_warp(ll, signal, value, op)


@device
def put_signal_block(
    ll: LLBuffer, destination: int, source: int, nbytes: int, signal: int, value: int, op: int
) -> None:
    """Copy and signal as `put_signal`, by the threads of a block together."""
    all_in_block(True)  # noqa: FBT003
    _copy_together(ll, destination, source, nbytes, BLOCK_THREADS)
    signal_op_block(ll, signal, value, op)


@device
def signal_wait(ll: LLBuffer, source: int, signal: int, value: int) -> bool:
    """Wait until the own signal is `value` or more; what was put before it can then be read.

    Args:
        ll: The thread's buffer, for the deadline.
        source: The rank that signals, for the message of the deadline.
        signal: Address of the signal in the own symmetric memory.
        value: The least value, 1 or more.

    Returns:
        True; False once the deadline passed, on this call or before it.
    """
    polls = u32(0)
    since_ns = u64(0)
    while ll.state[ALIVE] != u32(0):
        seen = ld_relaxed_sys_b64(signal)
        if seen >= u64(value):
            fence_acq_rel_sys()
            return True
        polls = u32(polls + u32(1))
        if polls & u32(POLLS_PER_LOOK - 1) == u32(0):
            if since_ns == u64(0):
                since_ns = globaltimer_ns()
            if should_give_up(ll.packets.watchdog, since_ns):
                missing = u64(u64(1) << u64(source))
                report(
                    ll.packets.watchdog,
                    source,
                    missing,
                    u32(NO_SLOT),
                    ll.state[EPOCH],
                    u32(value),
                    u32(seen),
                )
                ll.state[ALIVE] = u32(0)
        relax()
    return False


@device
def signal_wait_warp(ll: LLBuffer, source: int, signal: int, value: int) -> bool:
    """Wait as `signal_wait`; one thread of the warp polls for all."""
    came = False
    if not share_work() or ll.thread % u32(WARP_THREADS) == u32(0):
        came = signal_wait(ll, source, signal, value)
    came = any_in_warp(came)
    if not came:
        ll.state[ALIVE] = u32(0)
    return came


@device
def signal_wait_block(ll: LLBuffer, source: int, signal: int, value: int) -> bool:
    """Wait as `signal_wait`; one thread of the block polls for all."""
    came = False
    if not share_work() or ll.thread % u32(BLOCK_THREADS) == u32(0):
        came = signal_wait(ll, source, signal, value)
    came = any_in_block(came)
    if not came:
        ll.state[ALIVE] = u32(0)
    return came


@device
def _copy_together(ll: LLBuffer, destination: int, source: int, nbytes: int, threads: int) -> None:
    first = ll.thread % u32(threads)
    if share_work():
        _copy(ll, destination, source, nbytes, first, threads)
    elif first == u32(0):
        _copy(ll, destination, source, nbytes, 0, 1)


@device
def _copy(ll: LLBuffer, destination: int, source: int, nbytes: int, first: int, step: int) -> None:
    if ll.state[ALIVE] == u32(0):
        return
    width = 1
    if (u64(destination) | u64(source)) % u64(VECTOR_NBYTES) == u64(0):
        width = VECTOR_NBYTES
        for i in range(first, nbytes // VECTOR_NBYTES, step):
            at = u64(i) * u64(VECTOR_NBYTES)
            words = ld_no_allocate_v4_b32(u64(source) + at)
            st_v4_b32(u64(destination) + at, words[0], words[1], words[2], words[3])
    elif (u64(destination) | u64(source)) % u64(WORD_NBYTES) == u64(0):
        width = WORD_NBYTES
        for i in range(first, nbytes // WORD_NBYTES, step):
            at = u64(i) * u64(WORD_NBYTES)
            st_b32(u64(destination) + at, ld_b32(u64(source) + at))
    rest = nbytes // width * width if width > 1 else 0
    for i in range(rest + first, nbytes, step):
        st_b8(u64(destination) + u64(i), ld_b8(u64(source) + u64(i)))
