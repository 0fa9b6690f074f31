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
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np

from shmemar.layout import failure_offset

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

__all__ = ["NOT_AS_USUAL", "DriverCalls", "Gate", "PreparedLaunch", "compile_launch"]

NOT_AS_USUAL = -1
"""Returned where nothing was launched; else it is a CUresult."""

_PROGRAMMATIC_STREAM_SERIALIZATION = 6
"""``CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION``."""


@dataclass(frozen=True)
class DriverCalls:
    """Functions of the driver, with 64-bit integers for handles and addresses.

    Attributes:
        ctx_get_current: ``cuCtxGetCurrent(address)``.
        stream_is_capturing: ``cuStreamIsCapturing(stream, address)``.
        stream_get_id: ``cuStreamGetId(stream, address)``.
        launch_kernel: ``cuLaunchKernelEx(config, function, parameters, extra)``.
        event_record: ``cuEventRecord(event, stream)``.
        stream_wait_event: ``cuStreamWaitEvent(stream, event, flags)``.
    """

    ctx_get_current: Any
    stream_is_capturing: Any
    stream_get_id: Any
    launch_kernel: Any
    event_record: Any
    stream_wait_event: Any

    @classmethod
    @cache
    def load(cls) -> DriverCalls:
        """Look them up in the driver's library, which the runtime has loaded."""
        library = ctypes.CDLL("libcuda.so.1")
        found = cls(
            library.cuCtxGetCurrent,
            library.cuStreamIsCapturing,
            library.cuStreamGetId,
            library.cuLaunchKernelEx,
            library.cuEventRecord,
            library.cuStreamWaitEvent,
        )
        word, number = ctypes.c_uint64, ctypes.c_uint32
        found.ctx_get_current.argtypes = [word]
        found.stream_is_capturing.argtypes = [word, word]
        found.stream_get_id.argtypes = [word, word]
        found.launch_kernel.argtypes = [word, word, word, word]
        found.event_record.argtypes = [word, word]
        found.stream_wait_event.argtypes = [word, word, number]
        for each in vars(found).values():
            each.restype = ctypes.c_int32
        return found


class Gate:
    """What launches of one communicator look at first.

    Attributes:
        words: Whether it is open, and what launches work with.
        address: Of these words.
    """

    def __init__(
        self,
        context: int,
        event: int,
        producers: int,
        record: NDArray[np.uint32],
        last_stream: NDArray[np.uint64],
    ) -> None:
        """Make an open one.

        Args:
            context: The context that has to be current.
            event: The event behind each launch.
            producers: The event behind what other streams have enqueued.
            record: The failure record, which a kernel may write.
            last_stream: Id of the stream of the last launch outside of captures.
        """
        self._kept = record, last_stream
        valid = record.ctypes.data + failure_offset("valid")
        self.words = np.array(
            [1, context, event, producers, valid, last_stream.ctypes.data], np.uint64
        )
        self.address = int(self.words.ctypes.data)

    def shut(self) -> None:
        """Let nothing through from now on."""
        self.words[0] = 0


_CONFIG = np.dtype(
    {
        "names": ["grid", "block", "shared", "stream", "attributes", "nattributes"],
        "formats": ["3u4", "3u4", "u4", "u8", "u8", "u4"],
        "offsets": [0, 12, 24, 32, 40, 48],
        "itemsize": 56,
    }
)
"""``CUlaunchConfig``."""

_ATTRIBUTE = np.dtype(
    {"names": ["id", "value"], "formats": ["u4", "i4"], "offsets": [0, 8], "itemsize": 72}
)
"""``CUlaunchAttribute``, whose value is a union of 64 bytes."""


class PreparedLaunch:
    """What the driver takes of one kernel, grid and arguments, in its own structures.

    Launches from several threads at once need one each.

    Attributes:
        values: The parameters, 64 bits each; the driver copies them at each launch.
        config: Address of the ``CUlaunchConfig``.
        parameters: Address of ``kernelParams``.
        address: Of the words that `compile_launch` reads.
    """

    def __init__(
        self,
        function: int,
        nparameters: int,
        *,
        is_programmatic: bool = False,
        gate: int = 0,
        source_at: int = 0,
    ) -> None:
        """Prepare a launch, all but its grid, stream and parameters.

        Args:
            function: Handle of the function.
            nparameters: Parameters of the kernel.
            is_programmatic: Whether it may start before the kernel before it has ended.
            gate: Address of the gate's words.
            source_at: Which parameter the input's address is; the output's is the next.
        """
        self.values = np.zeros(nparameters, np.uint64)
        self._pointers = self.values.ctypes.data + 8 * np.arange(nparameters, dtype=np.uint64)
        self._attribute = np.zeros(1, _ATTRIBUTE)
        self._attribute["id"] = _PROGRAMMATIC_STREAM_SERIALIZATION
        self._attribute["value"] = 1
        self._config = np.zeros(1, _CONFIG)
        self._config["attributes"] = self._attribute.ctypes.data
        self._config["nattributes"] = int(is_programmatic)
        self._stream = self._config["stream"]
        self.config = int(self._config.ctypes.data)
        self.parameters = int(self._pointers.ctypes.data)
        arrays = self.values.ctypes.data + 8 * source_at
        self._words = np.array([gate, self.config, function, self.parameters, arrays, 0], np.uint64)
        self.address = int(self._words.ctypes.data)

    def set_grid(self, blocks: int, block_threads: int) -> None:
        """Choose the grid, of one dimension."""
        self._config["grid"] = blocks, 1, 1
        self._config["block"] = block_threads, 1, 1

    def set_stream(self, stream: int) -> None:
        """Choose the stream."""
        self._stream[0] = stream


_STREAM_OFFSET = _CONFIG.fields["stream"][1] if _CONFIG.fields else 0


def compile_launch(driver: DriverCalls) -> Callable[[int, int, int, int, int], int]:
    """Compile ``launch(prepared, stream, producer, source, destination)``.

    `prepared` is the address of a `PreparedLaunch`, whose parameters `source` and `destination` it
    sets. Where `producer` is another stream than `stream`, the launch waits for what that has
    enqueued.

    It lets go of Python's lock: a launch waits where the stream's queue is full. It returns what
    the driver returned, or `NOT_AS_USUAL`: where the gate is shut or the failure record written, in
    another context, for a stream that is being captured or is not that of the launch before, and
    where the driver says no to anything before the launch.
    """
    from numba import njit, types

    ctx_get_current = driver.ctx_get_current
    stream_is_capturing = driver.stream_is_capturing
    stream_get_id = driver.stream_get_id
    launch_kernel = driver.launch_kernel
    event_record = driver.event_record
    stream_wait_event = driver.stream_wait_event
    load_u32, load_u64, store_u64 = _memory()
    u64 = np.uint64
    is_open, context, event, producers, valid, last_stream = (u64(8 * at) for at in range(6))
    gate, config, function, parameters, arrays, answer = (u64(8 * at) for at in range(6))
    stream_offset = u64(_STREAM_OFFSET)

    def is_captured(stream: int, room: int) -> bool:
        store_u64(room, 0)
        return bool(stream_is_capturing(stream, room) != 0 or load_u32(room) != 0)

    captured = njit(types.boolean(types.uint64, types.uint64))(is_captured)

    def launch(prepared: int, stream: int, producer: int, source: int, destination: int) -> int:
        # Addresses come as int64, as Python's integers do, and are never negative.
        place, handle, other = u64(prepared), u64(stream), u64(producer)
        words, room = load_u64(place + gate), place + answer
        if load_u64(words + is_open) == 0 or load_u32(load_u64(words + valid)) != 0:
            return NOT_AS_USUAL
        if ctx_get_current(room) != 0 or load_u64(room) != load_u64(words + context):
            return NOT_AS_USUAL
        if captured(handle, room):
            return NOT_AS_USUAL
        last = load_u64(load_u64(words + last_stream))
        if stream_get_id(handle, room) != 0 or load_u64(room) != last:
            return NOT_AS_USUAL
        if other != handle:
            if captured(other, room):
                return NOT_AS_USUAL
            ahead = load_u64(words + producers)
            if event_record(ahead, other) != 0 or stream_wait_event(handle, ahead, 0) != 0:
                return NOT_AS_USUAL
        arguments = load_u64(place + arrays)
        store_u64(arguments, u64(source))
        store_u64(arguments + u64(8), u64(destination))
        described = load_u64(place + config)
        store_u64(described + stream_offset, handle)
        status = launch_kernel(
            described, load_u64(place + function), load_u64(place + parameters), 0
        )
        if status == 0:
            status = event_record(load_u64(words + event), handle)
        return status  # type: ignore[no-any-return]

    signature = types.int64(*[types.int64] * 5)
    compiled: Callable[[int, int, int, int, int], int] = njit(signature, nogil=True)(launch)
    return compiled


@cache
def _memory() -> tuple[Any, Any, Any]:
    """Compile ``load_u32(address)``, ``load_u64(address)`` and ``store_u64(address, value)``."""
    from llvmlite import ir
    from numba import types
    from numba.extending import intrinsic

    def load_of(numba_type: Any, bits: int) -> Any:
        def load(typing: Any, address: Any) -> Any:
            def emit(context: Any, builder: Any, signature: Any, operands: Any) -> Any:
                pointer = builder.inttoptr(operands[0], ir.IntType(bits).as_pointer())
                return builder.load(pointer)

            return numba_type(types.uint64), emit

        return intrinsic(load)

    def store(typing: Any, address: Any, value: Any) -> Any:
        def emit(context: Any, builder: Any, signature: Any, operands: Any) -> Any:
            pointer = builder.inttoptr(operands[0], ir.IntType(64).as_pointer())
            builder.store(operands[1], pointer)
            return context.get_dummy_value()

        return types.void(types.uint64, types.uint64), emit

    return load_of(types.uint32, 32), load_of(types.uint64, 64), intrinsic(store)
