"""Eager calls that were made before, found again by what their arrays are.

What a first call has checked and chosen depends on little of its arrays: library, element type,
count, contiguity, GPU, and how their addresses are aligned. A later call of arrays that agree in
all of that is launched at once, with its own addresses (:mod:`shmemar.host.fast_launch`).
Everything else, and everything that is wrong, goes the long way.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from shmemar.host.interop import stream_handle

if TYPE_CHECKING:
    from collections.abc import Callable

    from shmemar.dtypes import ReduceOp
    from shmemar.host.contract import BoundLaunch

__all__ = ["EagerCalls", "EagerLaunch"]

MANY_CALLS = 4096
"""Kinds of calls that are remembered."""

_ALIGNMENT = 15
"""The bits of an address that a kernel's arguments depend on: an access has 16 bytes at most."""


@dataclass(frozen=True)
class _Library:
    """What is asked of the arrays of one library.

    Attributes:
        describe: Returns an array's address, its bytes, and everything else that matters. It may
            raise anything of an array without these.
        current: The current stream for an array.
        empty_like: Makes a new array.
        orders: Whether an array names the current stream as the one it was written on, so that
            another one has to wait for that.
    """

    describe: Callable[[Any], tuple[int, int, Any]]
    current: Callable[[Any], int]
    empty_like: Callable[[Any], Any]
    orders: bool


class EagerLaunch(NamedTuple):
    """A call that can be launched at once.

    Attributes:
        bound: Launches it.
        name: Name of its kernel.
        stream: Handle of its stream.
        producer: Handle of the stream that it waits for.
        source: Address of the input.
        destination: Address of the output.
        out: The output.
    """

    bound: BoundLaunch
    name: str
    stream: int
    producer: int
    source: int
    destination: int
    out: Any


class EagerCalls:
    """What was launched before. Not for use by several threads at once."""

    def __init__(self) -> None:
        """Know nothing."""
        self._libraries: dict[type, _Library] = {}
        self._known: dict[Any, tuple[BoundLaunch, str]] = {}
        self._inputs: set[Any] = set()
        self._stream: Any = None
        self._handle = 0

    def clear(self) -> None:
        """Forget all: kernels are chosen otherwise from now on, or not at all."""
        self._known.clear()
        self._inputs.clear()
        self._stream = None

    def remember(
        self,
        x: Any,
        out: Any,
        op: str | ReduceOp,
        name: str,
        bind: Callable[[], BoundLaunch | None],
    ) -> None:
        """Remember a call that was checked and launched, if its arrays are of a known library.

        Args:
            x: As of `Communicator.allreduce`.
            out: Its result.
            op: As of `Communicator.allreduce`.
            name: Name of the kernel.
            bind: Prepares the launch.
        """
        library = self._library_of(type(x))
        if library is None or type(out) is not type(x):
            return
        _, _, mine = library.describe(x)
        _, _, other = library.describe(out)
        if len(self._known) >= MANY_CALLS:
            self.clear()
        bound = bind()
        if bound is not None:
            self._known[mine, other, op] = bound, name
            self._inputs.add((mine, op))

    def find(self, x: Any, out: Any, op: str | ReduceOp, stream: Any) -> EagerLaunch | None:
        """Find a call among those that were made before; None where it must go the long way.

        Args:
            x: As of `Communicator.allreduce`.
            out: As of `Communicator.allreduce`.
            op: As of `Communicator.allreduce`.
            stream: As of `Communicator.allreduce`.
        """
        library = self._libraries.get(type(x))
        if library is None:
            return None
        try:
            handle, current = self._streams(library, x, stream)
            source, nbytes, mine = library.describe(x)
            if out is None:
                # A library makes arrays for use on its current stream.
                if handle != current or (mine, op) not in self._inputs:
                    return None
                out = library.empty_like(x)
            elif type(out) is not type(x):
                return None
            destination, _, other = library.describe(out)
            known = self._known.get((mine, other, op))
        except Exception:  # noqa: BLE001 - the long way finds out what is wrong, and says it
            return None
        apart = source + nbytes <= destination or destination + nbytes <= source
        if known is None or (source != destination and not apart):
            return None
        producer = current if library.orders else handle
        return EagerLaunch(*known, handle, producer, source, destination, out)

    def _streams(self, library: _Library, x: Any, stream: Any) -> tuple[int, int]:
        """The stream of a call, and the library's current one."""
        current = library.current(x)
        if stream is None:
            return current, current
        if stream is not self._stream:
            # Held, so that no other object takes its place in memory.
            self._handle, self._stream = stream_handle(stream, None), stream
        return self._handle, current

    def _library_of(self, kind: type) -> _Library | None:
        if kind not in self._libraries:
            cupy, torch = sys.modules.get("cupy"), sys.modules.get("torch")
            if cupy is not None and kind is cupy.ndarray:
                self._libraries[kind] = _of_cupy(cupy)
            elif torch is not None and kind is torch.Tensor:
                self._libraries[kind] = _of_torch(torch)
        return self._libraries.get(kind)


def _of_cupy(cupy: Any) -> _Library:
    def describe(x: Any) -> tuple[int, int, Any]:
        memory = x.data
        address, count, dtype = memory.ptr, x.size, x.dtype
        key = count, dtype, address & _ALIGNMENT, memory.device_id, x.flags.c_contiguous
        return address, count * dtype.itemsize, key

    current_stream = cupy.cuda.get_current_stream
    return _Library(describe, lambda _: int(current_stream().ptr), cupy.empty_like, orders=True)


def _of_torch(torch: Any) -> _Library:
    def describe(x: Any) -> tuple[int, int, Any]:
        address, count = x.data_ptr(), x.numel()
        # A tensor that requires a gradient, and a lazy view, are refused.
        refused = x.requires_grad or x.is_conj() or x.is_neg()
        where = x.get_device(), x.is_contiguous(), refused
        return address, count * x.element_size(), (count, x.dtype, address & _ALIGNMENT, where)

    # What torch.cuda.current_stream makes an object of; torch's own compiler calls it.
    raw = getattr(torch._C, "_cuda_getCurrentRawStream", None)  # noqa: SLF001

    def current(x: Any) -> int:
        if raw is not None:
            return int(raw(x.get_device()))
        return int(torch.cuda.current_stream(x.device).cuda_stream)

    return _Library(describe, current, torch.empty_like, orders=False)
