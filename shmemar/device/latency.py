"""What the hardware takes, in loops of one thread: fences, loads from L2, stores, and ping-pong.

Launched as users' kernels are (:mod:`shmemar.device.ll_buffer`), which no packet of is sent. One
thread of the launch works, the first of a block: which multiprocessor that runs on, and so on which
side of the L2 it is, changes with the block. It writes the nanoseconds of all rounds to ``found``,
0 where a peer did not answer.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from shmemar.device.memory import (
    fence_acq_rel_gpu,
    fence_acq_rel_sys,
    fence_sc_gpu,
    globaltimer_ns,
    ld_relaxed_sys_b32,
    ld_relaxed_sys_b64,
    relax,
    st_b32,
    st_relaxed_sys_b32,
)
from shmemar.device.registry import device
from shmemar.device.words import u32, u64

if TYPE_CHECKING:
    from collections.abc import Callable

    from shmemar.device.ll_buffer import LLBuffer

__all__ = [
    "FENCES",
    "PENDING",
    "WARMUPS",
    "fence_kernel",
    "load_kernel",
    "ping_pong",
    "store_kernel",
]


def _name_of(fence: Callable[[], None]) -> str:
    """Its instruction, which the primitive is named after."""
    kind, _, scope = fence.__name__.removeprefix("fence_").rpartition("_")
    return f"fence.{kind}.{scope}"


FENCES = MappingProxyType(
    {
        "__threadfence()": fence_sc_gpu,
        **{_name_of(each): each for each in (fence_acq_rel_gpu, fence_acq_rel_sys)},
    }
)
"""Fences by name; the first is ``fence.sc.gpu``."""

PENDING = ("nothing", "own store", "peer store")
"""What a thread has stored right before a fence."""

WARMUPS = 50
"""Rounds before those that are timed."""

_POLLS = 1 << 24
"""Polls before a thread gives up: some seconds."""


@device
def _report(found: Any, rank: int, nanoseconds: int) -> None:
    place = u64(found[rank])
    st_b32(place, u32(nanoseconds))
    st_b32(place + u64(4), u32(u64(nanoseconds) >> u64(32)))


def fence_kernel(fence: str, pending: str) -> Callable[..., None]:
    """A kernel of fences, each behind a store of `pending`.

    Args:
        fence: One of `FENCES`.
        pending: One of `PENDING`.

    Returns:
        ``kernel(ll, thread, nthreads, memory, found, active, peer, rounds)``.
    """
    perform, stores, to_peer = FENCES[fence], pending != PENDING[0], pending == PENDING[2]

    def fences(
        ll: LLBuffer,
        thread: int,
        nthreads: int,
        memory: Any,
        found: Any,
        active: int,
        peer: int,
        rounds: int,
    ) -> None:
        if thread != active:
            return
        address = u64(memory[peer if to_peer else ll.rank])
        start = u64(0)
        for number in range(rounds + WARMUPS):
            if number == WARMUPS:
                start = globaltimer_ns()
            if stores:
                st_relaxed_sys_b32(address, u32(number))
            perform()
        _report(found, ll.rank, u64(globaltimer_ns() - start))

    return fences


def load_kernel(
    ll: LLBuffer, thread: int, nthreads: int, zeros: Any, found: Any, active: int, rounds: int
) -> None:
    """Load zeros from the own memory, each address known from the load before."""
    if thread != active:
        return
    base = u64(zeros[ll.rank])
    offset, start = u64(0), u64(0)
    for number in range(rounds + WARMUPS):
        if number == WARMUPS:
            start = globaltimer_ns()
        offset = ld_relaxed_sys_b64(base + offset)
    _report(found, ll.rank, u64(globaltimer_ns() - start + offset))


def store_kernel(
    ll: LLBuffer, thread: int, nthreads: int, memory: Any, found: Any, active: int, rounds: int
) -> None:
    """Store to every peer in turn, and wait for nothing."""
    if thread != active:
        return
    start = u64(0)
    for number in range(rounds + WARMUPS):
        if number == WARMUPS:
            start = globaltimer_ns()
        for step in range(1, ll.size):
            peer = ll.rank + step
            if peer >= ll.size:
                peer -= ll.size
            st_relaxed_sys_b32(u64(memory[peer]), u32(number))
    _report(found, ll.rank, u64(globaltimer_ns() - start))


@device
def _arrives(address: int, word: int) -> bool:
    for _ in range(_POLLS):
        if ld_relaxed_sys_b32(address) == word:
            return True
        relax()
    return False


def ping_pong(
    ll: LLBuffer,
    thread: int,
    nthreads: int,
    memory: Any,
    found: Any,
    active: int,
    offset: int,
    first: int,
    second: int,
    rounds: int,
    mark: int,
) -> None:
    """Two ranks store to each other in turn, each when it has seen the other's word.

    Round i stores ``mark + i`` at `offset`: marks of two launches are ``rounds + WARMUPS`` apart.
    """
    if thread != active or ll.rank not in (first, second):
        return
    peer = second if ll.rank == first else first
    mine = u64(memory[ll.rank]) + u64(offset)
    theirs = u64(memory[peer]) + u64(offset)
    start = u64(0)
    for number in range(rounds + WARMUPS):
        if number == WARMUPS:
            start = globaltimer_ns()
        word = u32(mark + number)
        if ll.rank == first:
            st_relaxed_sys_b32(theirs, word)
        if not _arrives(mine, word):
            _report(found, ll.rank, u64(0))
            return
        if ll.rank == second:
            st_relaxed_sys_b32(theirs, word)
    _report(found, ll.rank, u64(globaltimer_ns() - start))
