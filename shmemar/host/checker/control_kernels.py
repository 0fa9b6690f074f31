"""Kernels over LLBuffer, put and signal that the negative controls of the checker run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from shmemar.device.signal import (
    SIGNAL_ADD,
    SIGNAL_SET,
    put_signal,
    put_signal_warp,
    signal_op,
    signal_wait,
    signal_wait_warp,
)
from shmemar.host.checker.checked_arrays import Symmetric
from shmemar.host.checker.checked_kernels import UserProgram
from shmemar.host.checker.checked_run import Program
from shmemar.spec import Protocol
from shmemar.user_spec import BufferSpec, UserKernelSpec

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

__all__ = ["in_a_ring", "in_a_ring_of_warps", "ring", "sums"]


def exchanged(ll: Any, thread: int, nthreads: int, x: Any, y: Any) -> None:
    """Add up the elements of all ranks."""
    for i in range(thread, x.size, nthreads):
        ll.bcast(0, x[i])
        y[i] = ll.recv_reduce(0, x[i], lambda a, b: a + b)
        ll.advance_epoch()


def in_a_ring(
    ll: Any, thread: int, nthreads: int, box: Any, signals: Any, inbox: Any, x: Any, y: Any
) -> None:
    """Put all of `x` to the right neighbour, again and again, and take what comes from the left."""
    right, left = (ll.rank + 1) % ll.size, (ll.rank - 1) % ll.size
    outbox = box[ll.rank] + 4 * x.size
    for turn in range(1, 4):
        for i in range(x.size):
            inbox[x.size + i] = x[i] + turn
        op = SIGNAL_SET if turn % 2 else SIGNAL_ADD
        put_signal(
            ll, box[right], outbox, 4 * x.size, signals[right], turn if turn % 2 else 1, op
        )  # fmt: skip
        if signal_wait(ll, left, signals[ll.rank], turn):
            for i in range(x.size):
                y[(turn - 1) * x.size + i] = inbox[i]
        signal_op(ll, signals[left] + 8, turn, SIGNAL_SET)
        signal_wait(ll, right, signals[ll.rank] + 8, turn)


def in_a_ring_of_warps(
    ll: Any, thread: int, nthreads: int, box: Any, signals: Any, inbox: Any, x: Any, y: Any
) -> None:
    """Each lane writes one word of what the lanes put together, and reads another one's."""
    right, left = (ll.rank + 1) % ll.size, (ll.rank - 1) % ll.size
    inbox[x.size + thread] = x[thread] + 1
    outbox = box[ll.rank] + 4 * x.size
    put_signal_warp(ll, box[right], outbox, 4 * x.size, signals[right], 1, SIGNAL_SET)
    if signal_wait_warp(ll, left, signals[ll.rank], 1):
        y[x.size - 1 - thread] = inbox[x.size - 1 - thread]


def words_of(rank: int, launch: int, count: int) -> NDArray[np.uint32]:
    """Words that differ by rank and launch."""
    return np.arange(count, dtype=np.uint32) + np.uint32(1000 * rank + 100 * launch + 1)


def ring(kernel: Callable[..., None], nthreads: int, count: int, turns: int) -> Program:
    """Two ranks put `count` words to each other, so many times."""

    def arguments(rank: int, launch: int) -> tuple[Any, ...]:
        y = np.zeros(turns * count, np.uint32)
        box = Symmetric(np.zeros(2 * count, np.uint32))
        signals = Symmetric(np.zeros(2, np.uint64))
        return box, signals, box.array, words_of(rank, launch, count), y

    def expected(rank: int, launch: int) -> tuple[Any, ...]:
        x = words_of(1 - rank, launch, count)
        # What comes in the ring's turn 1, 2, ... is larger by as much.
        parts = [x + np.uint32(turn) for turn in range(1, turns + 1)]
        return None, None, None, None, np.concatenate(parts)

    return _user(kernel, "int32", Protocol.LL, nthreads, 1, arguments, expected)


def _user(
    kernel: Callable[..., None],
    dtype: str,
    protocol: Protocol,
    nthreads: int,
    nlaunches: int,
    arguments: Callable[[int, int], tuple[Any, ...]],
    expected: Callable[[int, int], tuple[Any, ...]],
) -> Program:
    buffer = BufferSpec.of(2, dtype, threads=nthreads, slots=1, protocol=protocol)
    spec = UserKernelSpec(kernel, buffer, ())
    run = UserProgram(spec, nthreads, nlaunches, 400_000, arguments, expected)
    return Program(kernel.__name__, 2, run.prepare)


def sums(protocol: Protocol) -> Program:
    """Two ranks add up arrays, in two launches."""

    def values(rank: int, launch: int) -> NDArray[np.float32]:
        return words_of(rank, launch, 7).astype(np.float32)

    return _user(
        exchanged,
        "float32",
        protocol,
        2,
        2,
        lambda rank, launch: (values(rank, launch), np.zeros(7, np.float32)),
        lambda _, launch: (None, values(0, launch) + values(1, launch)),
    )
