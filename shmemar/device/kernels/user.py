"""Kernels that users write over an LLBuffer.

The body that is launched loads a thread's epoch word, makes its LLBuffer, calls the user's
function, and stores the word again: unless the thread gave up, after which nothing is sent on this
rank. The word is the epoch to be used next; 0, of fresh memory, means 1.

Layout: that of :mod:`shmemar.layout`. Packet p of slot s of thread t lies in the layout's slot
``(s * npackets + p) * nthreads + t``, where `nthreads` is the most that a launch may have.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from shmemar.device.ll_buffer import ALIVE, EPOCH, STATE_WORDS, LLBuffer
from shmemar.device.memory import ld_b32, st_b32
from shmemar.device.packet_buffer import PacketBuffer
from shmemar.device.registry import device
from shmemar.device.watchdog import Watchdog, was_broken
from shmemar.device.words import i64_from_word, u32, u64, word_array
from shmemar.layout import WORD_NBYTES
from shmemar.user_spec import ADDRESSES

if TYPE_CHECKING:
    from collections.abc import Callable

    from shmemar.layout import LLLayout
    from shmemar.user_spec import UserKernelSpec

__all__ = ["UserArguments", "build", "numba_type"]


class UserArguments(NamedTuple):
    """Parameters of a launch of a user's kernel.

    Attributes:
        peers: Address of the region on each rank, in rank order; with multicast its multicast
            address behind them.
        epochs: Address of the rank's epoch words, one a thread.
        broken: Address of the rank's broken word.
        record: Address of the rank's failure record.
        timeout_ns: Deadline of a spin in nanoseconds; 0 for none.
        own: The user's arguments: arrays and scalars; for a GPU's launch words of 64 bits.
    """

    peers: tuple[int, ...]
    epochs: int
    broken: int
    record: int
    timeout_ns: int
    own: tuple[Any, ...]

    def typed(self) -> UserArguments:
        """The same with numpy's scalars, of the type that `numba_type` says."""
        word: Any = np.uint64
        return UserArguments(
            tuple(map(word, self.peers)),
            word(self.epochs),
            word(self.broken),
            word(self.record),
            word(self.timeout_ns),
            self.own,
        )

    def flat(self) -> list[int]:
        """The parameters one after the other, as a GPU's launch takes them."""
        words = self.epochs, self.broken, self.record, self.timeout_ns
        return [*self.peers, *words, *self.own]


def numba_type(spec: UserKernelSpec) -> Any:
    """The type of `UserArguments`, to numba's compilers."""
    from numba import types

    own: list[Any] = []
    for name in spec.argument_types:
        scalar = getattr(types, "int64" if name == ADDRESSES else name.removesuffix("[:]"))
        if name == ADDRESSES:
            own.append(types.UniTuple(scalar, spec.nranks))
        else:
            own.append(types.Array(scalar, 1, "C") if name.endswith("[:]") else scalar)
    return types.NamedTuple(
        (
            types.UniTuple(types.uint64, spec.nranks + spec.buffer.multicast),
            *[types.uint64] * (len(UserArguments._fields) - 2),
            types.Tuple(own),
        ),
        UserArguments,
    )


def build(spec: UserKernelSpec, layout: LLLayout) -> Callable[..., Any]:
    """Return the body that runs the user's function."""
    # Templated arguments.
    SIZE = spec.nranks
    LIKE = spec.buffer.like
    NPACKETS = spec.buffer.npackets
    NTHREADS = spec.buffer.nthreads
    MACHINE_WORD = spec.buffer.machine_word_nbytes
    PITCH_NBYTES, BUFFER_NBYTES = layout.pitch_nbytes, layout.buffer_nbytes
    KERNEL = spec.code
    function = device(spec.function)

    def user_kernel(
        arguments: UserArguments, rank: int, thread: int, nthreads: int, block_threads: int
    ) -> None:
        watchdog = Watchdog(
            arguments.broken,
            arguments.record,
            arguments.timeout_ns,
            KERNEL,
            rank,
            thread,
            block_threads,
        )
        epoch_address = arguments.epochs + u64(thread) * u64(WORD_NBYTES)
        state = word_array(STATE_WORDS)
        epoch = ld_b32(epoch_address)
        if was_broken(watchdog):
            return
        state[EPOCH] = epoch if epoch != u32(0) else u32(1)
        state[ALIVE] = u32(1)
        packets = PacketBuffer(
            arguments.peers[:SIZE],
            rank,
            PITCH_NBYTES,
            BUFFER_NBYTES,
            MACHINE_WORD,
            u32(0),
            watchdog,
            arguments.peers[SIZE:],
        )
        ll = LLBuffer(rank, SIZE, packets, LIKE, NPACKETS, NTHREADS, u32(thread), state)
        function(ll, i64_from_word(u32(thread)), i64_from_word(u32(nthreads)), *arguments.own)
        ll.advance_epoch()
        if state[ALIVE] != u32(0):
            st_b32(epoch_address, state[EPOCH])

    return user_kernel
