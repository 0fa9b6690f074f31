"""Arrays of users, as addresses that kernels take."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from shmemar.dtypes import DType, as_dtype
from shmemar.errors import ArgumentError, ArgumentTypeError

__all__ = ["Operand", "as_operand", "check_pair"]


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


def as_operand(name: str, array: Any, *, writeable: bool) -> Operand:
    """Check one array and describe it.

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
            f"{name} is {type(array).__name__}; expected a numpy.ndarray (the emulated backend "
            "runs on the CPU). Convert it with numpy.asarray."
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
