"""Inputs whose reduction is exact in every supported type, so that a result is right or wrong.

Element values are small integers that change with index, rank and call, and every rank can compute
every other rank's, so that a check needs no communication.
"""

from __future__ import annotations

from functools import reduce
from typing import TYPE_CHECKING, Any

import numpy as np

from shmemar.dtypes import DType, ReduceOp

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["COMBINE", "LARGEST", "count_wrong", "exact_input", "exact_result", "poison"]

COMBINE: dict[ReduceOp, Any] = {
    ReduceOp.SUM: np.add,
    ReduceOp.PROD: np.multiply,
    ReduceOp.MIN: np.minimum,
    ReduceOp.MAX: np.maximum,
}
"""numpy's function for each operator."""

LARGEST = 2000
"""Largest magnitude of an input to sum, min and max (of its real part)."""

_FACTORS = np.array([1, -1, 2, -1, 1, 3, -2, 1])
_COMPLEX_FACTORS = np.array([1, 1j, -1, 1 + 1j, -1j, 1 - 1j, 1, -1 + 1j])


def exact_input(dtype: DType, op: ReduceOp, count: int, *, rank: int, call: int) -> NDArray[Any]:
    """Return what `rank` contributes to `call`: shape ``(count,)``.

    Sums stay below 2**24 for 64 ranks. Factors of a product are so small that 8 ranks stay exact in
    float32; integers wrap as they should with any number.
    """
    mixed = _mix(count, rank, call)
    if op is ReduceOp.PROD:
        factors = _COMPLEX_FACTORS if dtype.is_complex else _FACTORS
        return factors[mixed % 8].astype(dtype.name)
    values = mixed.astype(np.int64) % (2 * LARGEST + 1) - LARGEST
    if dtype.is_complex:
        return (values + 1j * (mixed >> np.uint64(16) & np.uint64(1023))).astype(dtype.name)
    return values.astype(dtype.name)


def exact_result(dtype: DType, op: ReduceOp, count: int, *, nranks: int, call: int) -> NDArray[Any]:
    """Return what every rank must get from `call`."""
    inputs = (exact_input(dtype, op, count, rank=rank, call=call) for rank in range(nranks))
    with np.errstate(over="ignore"):
        result: NDArray[Any] = reduce(COMBINE[op], inputs)
    return result


def poison(array: NDArray[Any]) -> None:
    """Fill an output with a pattern that no exact result has, so that what is not written shows."""
    array.view(np.uint8)[...] = 0xA5


def count_wrong(got: NDArray[Any], expected: NDArray[Any]) -> int:
    """Count the elements that differ."""
    return int(np.count_nonzero(got != expected))


def _mix(count: int, rank: int, call: int) -> NDArray[np.uint64]:
    """Hash (index, rank, call) to 32 bits with splitmix64's finaliser (Steele et al. 2014)."""
    index = np.arange(count, dtype=np.uint64)
    z = index * np.uint64(0x9E3779B97F4A7C15) + np.uint64((rank << 40) + (call << 1) + 1)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z >> np.uint64(32)
