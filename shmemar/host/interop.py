"""Arrays of users, as addresses that kernels take."""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from shmemar.dtypes import DType, as_dtype
from shmemar.errors import ArgumentError, ArgumentTypeError

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = [
    "Operand",
    "check_pair",
    "current_stream_of",
    "current_streams",
    "device_operand",
    "host_operand",
    "library_of",
    "no_stream",
    "stream_handle",
]

_DLPACK_CUDA = 2
"""kDLCUDA: memory of one GPU; managed and pinned memory have other numbers."""


@dataclass(frozen=True)
class Operand:
    """A contiguous array, checked.

    Attributes:
        address: Of its first byte.
        count: Elements.
        dtype: Element type.
    """

    address: int
    count: int
    dtype: DType

    @property
    def nbytes(self) -> int:
        """Bytes of the array."""
        return self.count * self.dtype.itemsize

    def call(self, *, on_host: bool, **others: Any) -> dict[str, Any]:
        """What of a call with this array has to be the same on all ranks."""
        where = "host" if on_host else "device"
        return {"count": self.count, "dtype": self.dtype.name, "memory": where, **others}

    def as_components(self, dtype: DType) -> Operand:
        """The same memory as components of a type of their width."""
        return Operand(self.address, self.count * self.dtype.components, dtype)

    def part(self, start: int, length: int) -> Operand:
        """At most `length` elements, from element `start` on."""
        address = self.address + start * self.dtype.itemsize
        return Operand(address, min(length, self.count - start), self.dtype)


def host_operand(name: str, array: Any, *, writeable: bool) -> Operand:
    """Check a numpy array and describe it.

    Args:
        name: Argument's name, for messages.
        array: What the caller gave.
        writeable: True when it is written to.

    Raises:
        ArgumentTypeError: Not a plain numpy array, or of an element type that is not supported.
        ArgumentError: Not contiguous, misaligned, of foreign byte order, or read-only.
    """
    if isinstance(array, np.ma.MaskedArray):
        raise ArgumentTypeError(
            f"{name} is a masked array; expected a plain numpy.ndarray. Fill it with "
            f"{name}.filled()."
        )
    if not isinstance(array, np.ndarray):
        raise ArgumentTypeError(
            f"{name} is {type(array).__name__}; expected a numpy.ndarray. Convert it with "
            "numpy.asarray."
        )
    if not array.dtype.isnative:
        raise ArgumentError(
            f"{name} has byte order {array.dtype.byteorder!r}; expected native byte order. Convert "
            f"it with {name}.astype({name}.dtype.newbyteorder('='))."
        )
    dtype = _named_dtype(name, array.dtype.name)
    if not array.flags.c_contiguous:
        raise ArgumentError(
            f"{name} has shape {array.shape} and strides {array.strides}; expected a C-contiguous "
            f"array. Copy it with numpy.ascontiguousarray({name})."
        )
    address = int(array.__array_interface__["data"][0])
    if address % dtype.component_nbytes:
        raise ArgumentError(
            f"{name} starts at address {address:#x}; expected a multiple of "
            f"{dtype.component_nbytes} for {dtype.name}. Copy it with {name}.copy()."
        )
    if writeable and not array.flags.writeable:
        raise ArgumentError(f"{name} is read-only; expected an array that can be written to.")
    return Operand(address, array.size, dtype)


def device_operand(name: str, array: Any, stream: int, *, device: int, writeable: bool) -> Operand:
    """Check an array on a GPU and describe it.

    An array that names the stream it was written on (CUDA array interface 3, DLPack) is waited for
    on `stream`, unless a capture forbids that.

    Args:
        name: Argument's name, for messages.
        array: Anything with the CUDA array interface or DLPack.
        stream: Handle of the stream that will use it.
        device: Ordinal of the GPU that it must be on.
        writeable: True when it is written to.

    Raises:
        ArgumentTypeError: No GPU array, or of an element type that is not supported.
        ArgumentError: On another GPU, not contiguous, misaligned, or read-only.
    """
    view = _device_view(name, array, stream)
    if not view.is_device_accessible:
        raise ArgumentTypeError(
            f"{name} is {type(array).__name__} in host memory; expected an array on GPU {device}, "
            "or a numpy.ndarray. Copy it there."
        )
    found = _device_of(array, view)
    if found != device:
        raise ArgumentError(
            f"{name} is on device {found}; expected GPU {device}, this rank's. Copy it "
            "there, or pick the GPU with shmemar.init(..., device=)."
        )
    dtype = _named_dtype(name, _dtype_name(array, view))
    shape, strides = tuple(view.shape), view.strides
    if strides is not None and not _is_c_contiguous(shape, tuple(strides)):
        raise ArgumentError(
            f"{name} has shape {shape} and strides {tuple(strides)} (elements); expected a "
            "C-contiguous array. Copy it first."
        )
    if view.ptr % dtype.component_nbytes:
        raise ArgumentError(
            f"{name} starts at address {view.ptr:#x}; expected a multiple of "
            f"{dtype.component_nbytes} for {dtype.name}. Copy it first."
        )
    if writeable and view.readonly:
        raise ArgumentError(f"{name} is read-only; expected an array that can be written to.")
    return Operand(view.ptr, math.prod(shape), dtype)


def stream_handle(stream: Any, x: Any) -> int:
    """Return the handle of a stream of CuPy, torch, numba, cuda.core, or an integer.

    With None, that of the current stream of `x`'s library: CuPy's or torch's; else 0, the legacy
    default stream.

    Raises:
        ArgumentError: Not a stream.
    """
    if stream is None:
        return current_stream_of(x)()
    if isinstance(stream, int) and not isinstance(stream, bool):
        return stream
    if hasattr(stream, "__cuda_stream__"):
        _, handle = stream.__cuda_stream__()
        return int(handle)
    for attribute in ("cuda_stream", "ptr", "handle"):
        handle = getattr(stream, attribute, None)
        if handle is not None:
            return int(getattr(handle, "value", handle) or 0)
    raise ArgumentError(
        f"stream is {stream!r}; expected a stream of CuPy, torch, numba or cuda.core, its handle "
        "as an integer, or None for the current one."
    )


def current_stream_of(x: Any) -> Callable[[], int]:
    """Return what returns the handle of the current stream of `x`'s library.

    CuPy or torch; 0 of others. What has to be found out of `x` is found out here.
    """
    library = library_of(x)
    if library == "torch" and x.is_cuda:
        from torch.cuda import current_stream

        device = x.device
        return lambda: int(current_stream(device).cuda_stream)
    if library == "cupy":
        from cupy.cuda import get_current_stream

        return lambda: int(get_current_stream().ptr)
    return lambda: 0


def current_streams() -> list[int]:
    """Handles of the current streams of CuPy and torch, as far as they are loaded."""
    found = []
    if "cupy" in sys.modules:
        from cupy.cuda import get_current_stream

        found.append(int(get_current_stream().ptr))
    if "torch" in sys.modules:
        import torch

        if torch.cuda.is_initialized():
            found.append(int(torch.cuda.current_stream().cuda_stream))
    return found


def library_of(array: Any) -> str | None:
    """Name the library of an array, ``cupy`` or ``torch``, also of a class derived from its own."""
    modules = {cls.__module__.partition(".")[0] for cls in type(array).__mro__}
    return next((library for library in ("cupy", "torch") if library in modules), None)


def no_stream(stream: Any) -> int:
    """Refuse a stream where the host does the work.

    Raises:
        ArgumentError: `stream` is not None.
    """
    if stream is not None:
        raise ArgumentError(
            f"stream is {stream!r}; expected None, because numpy arrays are reduced on the CPU, "
            "before the call returns."
        )
    return 0


def _device_view(name: str, array: Any, stream: int) -> Any:
    for lazy, remedy in (("is_conj", "resolve_conj"), ("is_neg", "resolve_neg")):
        if getattr(array, lazy, bool)():
            raise ArgumentError(
                f"{name} is a lazy view of torch ({lazy}); expected what is in memory. Use "
                f"{name}.{remedy}()."
            )
    described = "__cuda_array_interface__", "__dlpack__"
    if not any(hasattr(type(array), attribute) for attribute in described):
        raise ArgumentTypeError(
            f"{name} is {type(array).__name__}; expected an array on a GPU, of CuPy, torch, numba "
            "or any library with the CUDA array interface or DLPack, or a numpy.ndarray."
        )
    from cuda.core.utils import StridedMemoryView

    from shmemar.host.launch import is_capturing

    # 1 is the legacy default stream by CUDA's own name, which producers use.
    ordered_on = -1 if is_capturing(stream) else stream or 1
    try:
        if hasattr(array, "__cuda_array_interface__"):
            return StridedMemoryView.from_cuda_array_interface(array, ordered_on)
        return StridedMemoryView.from_dlpack(array, ordered_on)
    except Exception as error:
        raise ArgumentTypeError(
            f"{name} is {type(array).__name__} and can't be seen by the GPU "
            f"({type(error).__name__}: {error}); expected an array on a GPU (of torch: detached)."
        ) from error


def _device_of(array: Any, view: Any) -> int:
    """Ordinal of the GPU that an array is on.

    DLPack says it; the CUDA array interface does not, so CUDA's runtime is asked. What cuda.core
    makes of that interface is always 0 with some cuda.bindings (NVIDIA/cuda-python issue 2928).
    """
    if hasattr(type(array), "__dlpack_device__"):
        kind, ordinal = array.__dlpack_device__()
        if kind == _DLPACK_CUDA:
            return int(ordinal)
    if view.ptr:
        from cuda.bindings import runtime

        status, attributes = runtime.cudaPointerGetAttributes(view.ptr)
        if status == runtime.cudaError_t.cudaSuccess and attributes.device >= 0:
            return int(attributes.device)
    return int(view.device_id)


def _dtype_name(array: Any, view: Any) -> str:
    """Name an element type as numpy does.

    The CUDA array interface has no name for bfloat16, and numpy has none without ml_dtypes, so
    that one the array itself is asked for: ``torch.bfloat16`` in torch.
    """
    own = str(getattr(array, "dtype", "")).removeprefix("torch.")
    return own if own == "bfloat16" else str(view.dtype)


def _is_c_contiguous(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    if 0 in shape:
        return True
    expected = 1
    for length, stride in zip(reversed(shape), reversed(strides), strict=True):
        if length != 1 and stride != expected:
            return False
        expected *= length
    return True


def check_pair(x: Operand, out: Operand) -> None:
    """Check that `out` can take the reduction of `x`: same type and count, same memory or disjoint.

    Raises:
        ArgumentError: They don't go together.
    """
    if x.dtype != out.dtype:
        raise ArgumentError(
            f"out has dtype {out.dtype.name}; expected that of x, {x.dtype.name}. Convert one."
        )
    if x.count != out.count:
        raise ArgumentError(
            f"out has {out.count} elements; expected as many as x, {x.count}. Slice one of them."
        )
    apart = x.address + x.nbytes <= out.address or out.address + out.nbytes <= x.address
    if x.address != out.address and not apart:
        raise ArgumentError(
            f"out starts {out.address - x.address} bytes from x and overlaps it; expected the same "
            "memory as x (in place) or none of it. Copy one of them."
        )


def _named_dtype(name: str, dtype_name: str) -> DType:
    try:
        return as_dtype(dtype_name)
    except ArgumentTypeError as error:
        raise ArgumentTypeError(f"{name}: {error}") from None
