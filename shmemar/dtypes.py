"""Element types and reduction operators that the collectives take.

A complex number is moved, and for ``sum`` also reduced, as its two real components, so the
kernels know components of 4 or 8 bytes only.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from types import MappingProxyType
from typing import TYPE_CHECKING

from shmemar.errors import ArgumentError, ArgumentTypeError

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["DTYPES", "DType", "ReduceOp", "as_dtype", "as_reduce_op", "supported_ops"]


class ReduceOp(Enum):
    """Reduction operators, by the name that ``op=`` takes."""

    SUM = "sum"
    PROD = "prod"
    MIN = "min"
    MAX = "max"


class Kind(Enum):
    """What a component is to the arithmetic."""

    FLOAT = "float"
    INT = "int"


@dataclass(frozen=True)
class DType:
    """An element type.

    Attributes:
        name: numpy's name of the type.
        kind: Kind of one component.
        component_nbytes: Bytes of one component (4 or 8).
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


DTYPES: Mapping[str, DType] = MappingProxyType(
    {
        dtype.name: dtype
        for dtype in (
            DType("float32", Kind.FLOAT, 4),
            DType("float64", Kind.FLOAT, 8),
            DType("int32", Kind.INT, 4),
            DType("int64", Kind.INT, 8),
            DType("complex64", Kind.FLOAT, 4, components=2),
            DType("complex128", Kind.FLOAT, 8, components=2),
        )
    }
)


def supported_ops(dtype: DType) -> tuple[ReduceOp, ...]:
    """Operators defined for `dtype`: complex numbers have no order, so no min and no max."""
    if dtype.is_complex:
        return (ReduceOp.SUM, ReduceOp.PROD)
    return tuple(ReduceOp)


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
    names = ", ".join(candidate.value for candidate in allowed)
    try:
        found = ReduceOp(op)
    except ValueError:
        raise ArgumentError(f"op is {op!r}; expected one of {names} for {dtype.name}.") from None
    if found not in allowed:
        raise ArgumentError(
            f"op is {found.value!r}, which {dtype.name} does not define (complex numbers have no "
            f"order); expected one of {names}."
        )
    return found
