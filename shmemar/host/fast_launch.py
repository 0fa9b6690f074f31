"""Launches that were prepared down to the driver's arguments, as one call of machine code.

From Python a call into the driver costs more than a microsecond on top (a prepared cuLaunchKernel
took 6.4 us, and 4.7 in a loop in C, on the host of an H200), and a launch needs five of them: the
current context, whether the stream is being captured, which stream it is, the launch,
and the event behind it (:class:`shmemar.host.launch.StreamOrder`). So numba compiles a function of
the CPU that makes all five. Where anything is not as usual it launches nothing and says so, and the
caller goes the long way.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from shmemar.layout import failure_offset

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

__all__ = ["NOT_AS_USUAL", "DriverCalls", "Gate", "compile_launch", "launch_words"]

NOT_AS_USUAL = -1
"""Returned where nothing was launched; else it is a CUresult."""

_VALID = failure_offset("valid") // 4

_IS_OPEN, _CONTEXT, _EVENT = range(3)
_FUNCTION, _BLOCKS, _THREADS, _PARAMETERS, _CONTEXT_NOW, _CAPTURING, _STREAM_ID, _ROOMS = range(8)


@dataclass(frozen=True)
class DriverCalls:
    """Functions of the driver, with 64-bit integers for handles and addresses.

    Attributes:
        ctx_get_current: ``cuCtxGetCurrent(address)``.
        stream_is_capturing: ``cuStreamIsCapturing(stream, address)``.
        stream_get_id: ``cuStreamGetId(stream, address)``.
        launch_kernel: ``cuLaunchKernel``.
        event_record: ``cuEventRecord(event, stream)``.
    """

    ctx_get_current: Any
    stream_is_capturing: Any
    stream_get_id: Any
    launch_kernel: Any
    event_record: Any

    @classmethod
    def load(cls) -> DriverCalls:
        """Look them up in the driver's library, which the runtime has loaded."""
        library = ctypes.CDLL("libcuda.so.1")
        found = cls(
            library.cuCtxGetCurrent,
            library.cuStreamIsCapturing,
            library.cuStreamGetId,
            library.cuLaunchKernel,
            library.cuEventRecord,
        )
        word, number = ctypes.c_uint64, ctypes.c_uint32
        found.ctx_get_current.argtypes = [word]
        found.stream_is_capturing.argtypes = [word, word]
        found.stream_get_id.argtypes = [word, word]
        found.launch_kernel.argtypes = [word, *[number] * 7, word, word, word]
        found.event_record.argtypes = [word, word]
        for each in vars(found).values():
            each.restype = ctypes.c_int32
        return found


class Gate:
    """What launches of one communicator look at first.

    Attributes:
        words: Open or not, context, event.
        record: The failure record, which a kernel may write.
        last_stream: Id of the stream of the last launch outside of captures.
    """

    def __init__(
        self,
        context: int,
        event: int,
        record: NDArray[np.uint32],
        last_stream: NDArray[np.uint64],
    ) -> None:
        """Make an open one."""
        self.words = np.array([1, context, event], np.uint64)
        self.record = record
        self.last_stream = last_stream

    def shut(self) -> None:
        """Let nothing through from now on."""
        self.words[_IS_OPEN] = 0


def launch_words(
    function: int, blocks: int, block_threads: int, parameters: int
) -> NDArray[np.uint64]:
    """What is particular to one launch, with room for the driver's answers.

    Launches from several threads at once need one each.

    Args:
        function: Handle of the function.
        blocks: Blocks.
        block_threads: Threads a block.
        parameters: Address of ``kernelParams``.
    """
    words = np.array([function, blocks, block_threads, parameters, *[0] * 4], np.uint64)
    words[_ROOMS] = words.ctypes.data
    return words


def compile_launch(driver: DriverCalls) -> Callable[..., int]:
    """Compile ``launch(gate.words, gate.record, gate.last_stream, launch_words, stream)``.

    It lets go of Python's lock: a launch waits where the stream's queue is full. It returns what
    the driver returned, or `NOT_AS_USUAL`: where the gate is shut or the failure record written, in
    another context, for a stream that is being captured or is not that of the launch before, and
    where the driver says no to one of these questions.
    """
    from numba import njit, types

    ctx_get_current = driver.ctx_get_current
    stream_is_capturing = driver.stream_is_capturing
    stream_get_id = driver.stream_get_id
    launch_kernel = driver.launch_kernel
    event_record = driver.event_record
    one, none = np.uint32(1), np.uint32(0)
    context_now, capturing, stream_id = (
        np.uint64(8 * at) for at in (_CONTEXT_NOW, _CAPTURING, _STREAM_ID)
    )

    def launch(
        words: NDArray[np.uint64],
        record: NDArray[np.uint32],
        last_stream: NDArray[np.uint64],
        prepared: NDArray[np.uint64],
        stream: int,
    ) -> int:
        if words[_IS_OPEN] == 0 or record[_VALID] != 0:
            return NOT_AS_USUAL
        room = prepared[_ROOMS]
        if ctx_get_current(room + context_now) != 0 or prepared[_CONTEXT_NOW] != words[_CONTEXT]:
            return NOT_AS_USUAL
        prepared[_CAPTURING] = 0
        if stream_is_capturing(stream, room + capturing) != 0 or prepared[_CAPTURING] != 0:
            return NOT_AS_USUAL
        if stream_get_id(stream, room + stream_id) != 0 or prepared[_STREAM_ID] != last_stream[0]:
            return NOT_AS_USUAL
        status = launch_kernel(
            prepared[_FUNCTION],
            np.uint32(prepared[_BLOCKS]),
            one,
            one,
            np.uint32(prepared[_THREADS]),
            one,
            one,
            none,
            stream,
            prepared[_PARAMETERS],
            0,
        )
        if status == 0:
            status = event_record(words[_EVENT], stream)
        return status  # type: ignore[no-any-return]

    word = types.uint64[::1]
    compiled: Callable[..., int] = njit(
        types.int64(word, types.uint32[::1], word, word, types.uint64), nogil=True
    )(launch)
    return compiled
