"""Element types and reduction operators that the collectives take.

A complex number is moved, and but for ``prod`` also reduced, as its two real components, so the
kernels know components of 1, 2, 4 or 8 bytes only.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from functools import cache
from types import MappingProxyType
from typing import TYPE_CHECKING

from shmemar.errors import ArgumentError, ArgumentTypeError

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = [
    "DTYPES",
    "DType",
    "Kind",
    "ReduceOp",
    "as_dtype",
    "as_reduce_op",
    "supported_ops",
    "why_unsupported",
]


class ReduceOp(Enum):
    """Reduction operators, by the name that ``op=`` takes.

    ``avg`` is the sum times the reciprocal of the number of ranks, and the reciprocal is rounded to
    the type of the sum first: float32 for 16-bit floats, else that of a component.
    """

    SUM = "sum"
    PROD = "prod"
    MIN = "min"
    MAX = "max"
    AVG = "avg"


class Kind(Enum):
    """What a component is to the arithmetic."""

    FLOAT = "float"
    INT = "int"
    UINT = "uint"


@dataclass(frozen=True)
class DType:
    """An element type.

    Attributes:
        name: numpy's name of the type (of bfloat16, ml_dtypes').
        kind: Kind of one component.
        component_nbytes: Bytes of one component (1, 2, 4 or 8).
        components: Components of one element (2 for complex types).
    """

    name: str
    kind: Kind
    component_nbytes: int
    components: int = 1

    @property
    def itemsize(self) -> int:
        """Bytes of one element."""
        return self.component_nbytes * self.components

    @property
    def is_complex(self) -> bool:
        """True when an element has a real and an imaginary component."""
        return self.components == 2

    @property
    def is_integer(self) -> bool:
        """True of integers, with and without a sign."""
        return self.kind is not Kind.FLOAT


DTYPES: Mapping[str, DType] = MappingProxyType(
    {
        dtype.name: dtype
        for dtype in (
            DType("float16", Kind.FLOAT, 2),
            DType("bfloat16", Kind.FLOAT, 2),
            DType("float32", Kind.FLOAT, 4),
            DType("float64", Kind.FLOAT, 8),
            DType("int8", Kind.INT, 1),
            DType("int32", Kind.INT, 4),
            DType("int64", Kind.INT, 8),
            DType("uint8", Kind.UINT, 1),
            DType("uint32", Kind.UINT, 4),
            DType("uint64", Kind.UINT, 8),
            DType("complex64", Kind.FLOAT, 4, components=2),
            DType("complex128", Kind.FLOAT, 8, components=2),
        )
    }
)


@cache
def supported_ops(dtype: DType) -> tuple[ReduceOp, ...]:
    """Operators defined for `dtype`: no order of complex numbers, no average of integers."""
    return tuple(op for op in ReduceOp if why_unsupported(dtype, op) is None)


def why_unsupported(dtype: DType, op: ReduceOp) -> str | None:
    """Say why `dtype` does not define `op`, in words that follow "does not define"; else None."""
    if dtype.is_complex and op in (ReduceOp.MIN, ReduceOp.MAX):
        return "complex numbers have no order"
    if dtype.is_integer and op is ReduceOp.AVG:
        return "an average of integers is seldom an integer"
    return None


def as_dtype(name: str) -> DType:
    """Look up an element type by numpy's name for it.

    Raises:
        ArgumentTypeError: The type is not supported; the message lists those that are.
    """
    dtype = DTYPES.get(name)
    if dtype is None:
        raise ArgumentTypeError(
            f"dtype is {name}; expected one of {', '.join(DTYPES)}. Convert the array first."
        )
    return dtype


def as_reduce_op(op: str | ReduceOp, dtype: DType) -> ReduceOp:
    """Look up an operator by name and check that `dtype` has it.

    Raises:
        ArgumentError: The operator is unknown, or not defined for `dtype`.
    """
    allowed = supported_ops(dtype)
    try:
        found = ReduceOp(op)
    except ValueError:
        names = ", ".join(candidate.value for candidate in allowed)
        raise ArgumentError(f"op is {op!r}; expected one of {names} for {dtype.name}.") from None
    if found not in allowed:
        names = ", ".join(candidate.value for candidate in allowed)
        raise ArgumentError(
            f"op is {found.value!r}, which {dtype.name} does not define "
            f"({why_unsupported(dtype, found)}); expected one of {names}."
        )
    return found
