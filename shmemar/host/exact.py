"""Inputs whose reduction is exact in every supported type, so that a result is right or wrong.

Element values are small integers that change with index, rank and call, and every rank can compute
every other rank's, so that a check needs no communication. An average is not always exact, but its
bits are known: it is rounded here as in the kernels.

numpy has no bfloat16: ml_dtypes adds it, where it is installed.
"""

from __future__ import annotations

from contextlib import suppress
from functools import reduce
from typing import TYPE_CHECKING, Any

import numpy as np

from shmemar.dtypes import DType, Kind, ReduceOp
from shmemar.errors import ArgumentError
from shmemar.host.average import scale_to_average

with suppress(ImportError):
    import ml_dtypes  # noqa: F401 - from now on numpy knows bfloat16

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = [
    "COMBINE",
    "count_wrong",
    "exact_input",
    "exact_limit",
    "exact_result",
    "largest_input",
    "numpy_dtype",
    "poison",
]

COMBINE: dict[ReduceOp, Any] = {
    ReduceOp.SUM: np.add,
    ReduceOp.PROD: np.multiply,
    ReduceOp.MIN: np.minimum,
    ReduceOp.MAX: np.maximum,
    ReduceOp.AVG: np.add,
}
"""numpy's function for each operator; `scale_to_average` makes an average of the sum."""

_SIGNIFICAND_BITS = {
    "float16": 11,
    "bfloat16": 8,
    "float32": 24,
    "float64": 53,
    "complex64": 24,
    "complex128": 53,
}
_FACTORS = np.array([1, -1, 2, -1, 1, 3, -2, 1])
_SMALL_FACTORS = np.array([1, -1, 2, -1, 1, -1, -2, 1])
_COMPLEX_FACTORS = np.array([1, 1j, -1, 1 + 1j, -1j, 1 - 1j, 1, -1 + 1j])


def numpy_dtype(dtype: DType) -> np.dtype[Any]:
    """Return numpy's data type.

    Raises:
        ArgumentError: It is bfloat16, and ml_dtypes is not installed.
    """
    try:
        return np.dtype(dtype.name)
    except TypeError:
        raise ArgumentError(
            f"dtype is {dtype.name}, which numpy has with ml_dtypes only; install it with "
            "`pip install ml_dtypes`."
        ) from None


def exact_limit(dtype: DType) -> int | None:
    """Magnitude up to which `dtype` holds every integer; None where numbers wrap instead."""
    bits = _SIGNIFICAND_BITS.get(dtype.name)
    return None if bits is None else 1 << bits


def largest_input(dtype: DType) -> int:
    """Largest magnitude of an input to sum, avg, min and max (of its real part).

    The sum of 8 ranks is exact, or wraps.
    """
    limit = exact_limit(dtype)
    return 2000 if limit is None else min(2000, limit // 8)


def _is_16_bit_float(dtype: DType) -> bool:
    return dtype.kind is Kind.FLOAT and dtype.component_nbytes == 2


def exact_input(dtype: DType, op: ReduceOp, count: int, *, rank: int, call: int) -> NDArray[Any]:
    """Return what `rank` contributes to `call`: shape ``(count,)``.

    Sums of 64 ranks stay below 2**24, and those of 8 ranks are exact in 16-bit floats, too. Factors
    of a product are so small that 8 ranks stay exact. Integers wrap as they should with any number.

    Raises:
        ArgumentError: `dtype` is bfloat16, and ml_dtypes is not installed.
    """
    numpys = numpy_dtype(dtype)
    mixed = _mix(count, rank, call)
    if op is ReduceOp.PROD:
        factors = _SMALL_FACTORS if _is_16_bit_float(dtype) else _FACTORS
        return (_COMPLEX_FACTORS if dtype.is_complex else factors)[mixed % 8].astype(numpys)
    largest = largest_input(dtype)
    values = mixed.astype(np.int64) % (2 * largest + 1) - largest
    if dtype.is_complex:
        return (values + 1j * (mixed >> np.uint64(16) & np.uint64(1023))).astype(numpys)
    return values.astype(numpys)


def exact_result(dtype: DType, op: ReduceOp, count: int, *, nranks: int, call: int) -> NDArray[Any]:
    """Return what every rank must get from `call`: reduced in float32 at least, then rounded."""
    numpys = numpy_dtype(dtype)
    wide = np.dtype(np.float32) if _is_16_bit_float(dtype) else numpys
    inputs = (exact_input(dtype, op, count, rank=rank, call=call) for rank in range(nranks))
    with np.errstate(over="ignore"):
        result: NDArray[Any] = reduce(COMBINE[op], (each.astype(wide) for each in inputs))
        if op is ReduceOp.AVG:
            scale_to_average(result, nranks)
        return result.astype(numpys, copy=False)


def poison(array: NDArray[Any]) -> None:
    """Fill an output with a pattern that no exact result of 16 bits or more has.

    So what is not written shows.
    """
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
