"""Reduction operators on the data words of packets.

Integers wrap. ``min`` and ``max`` return a NaN when either operand is one (the first in rank order)
and order -0 below +0. The product of complex numbers is the textbook formula, without fused
multiply-add, so that every rank rounds alike. ``avg`` is the sum times the reciprocal of the number
of ranks, which is itself rounded to the type of the sum. 16-bit floats are reduced as float32, and
rounded once, at the end.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from shmemar.device import narrow, words
from shmemar.device.registry import device
from shmemar.dtypes import DType, ReduceOp

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Arithmetic", "arithmetic"]


class Arithmetic(NamedTuple):
    """Device functions that reduce `KernelSpec.unit_words` words at a time.

    Attributes:
        unpack: ``unpack(packets, at, gap)`` makes a tuple of values of the data words that stand at
            `at`, ``at + gap`` and on: a gap of 2 leaves out LL's flags.
        combine: ``combine(left, right)`` reduces two such tuples; `left` is of the lower ranks.
        finish: ``finish(values)`` makes the result of the tuple that all ranks are reduced to.
        pack: ``pack(values)`` makes a tuple of the data words.
    """

    unpack: Callable[[list[int], int, int], tuple[Any, ...]]
    combine: Callable[[Any, Any], tuple[Any, ...]]
    finish: Callable[[Any], tuple[Any, ...]]
    pack: Callable[[Any], tuple[int, ...]]


def arithmetic(dtype: DType, op: ReduceOp, nranks: int) -> Arithmetic:
    """Return the device functions for an element type, an operator and a number of ranks."""
    if dtype.is_complex and op is ReduceOp.PROD:
        if dtype.component_nbytes == 8:
            return Arithmetic(_unpack_two_f64, _multiply_complex128, _as_is, _pack_two_f64)
        return Arithmetic(_unpack_f32, _multiply_complex64, _as_is, _pack_f32)
    unpack, pack, count = _LAYOUTS[dtype.name]
    finish = _scale(dtype, nranks, count) if op is ReduceOp.AVG else _as_is
    return Arithmetic(unpack, _elementwise(_scalar(dtype, op), count), finish, pack)


def _scalar(dtype: DType, op: ReduceOp) -> Callable[[Any, Any], Any]:
    if op in (ReduceOp.SUM, ReduceOp.AVG):
        return _add_f64 if not dtype.is_integer and dtype.component_nbytes == 8 else _add
    if op is ReduceOp.PROD:
        if dtype.is_integer:
            return _multiply_int
        return _multiply_f64 if dtype.component_nbytes == 8 else _multiply_float
    lower = op is ReduceOp.MIN
    if dtype.is_integer:
        return _min_int if lower else _max_int
    if dtype.component_nbytes == 8:
        return _min_f64 if lower else _max_f64
    return _min_f32 if lower else _max_f32


@cache
def _scale(dtype: DType, nranks: int, count: int) -> Callable[[Any], tuple[Any, ...]]:
    """Make the `finish` that multiplies `count` values by the reciprocal of `nranks`."""
    number = np.float64 if dtype.component_nbytes == 8 else np.float32
    RECIPROCALS = (number(1) / number(nranks),) * count
    multiply = _elementwise(_multiply_float, count)

    @device
    def scale(values: Any) -> tuple[Any, ...]:
        return multiply(values, RECIPROCALS)

    return scale


@cache
def _elementwise(
    scalar: Callable[[Any, Any], Any], count: int
) -> Callable[[Any, Any], tuple[Any, ...]]:
    """Make the function that applies `scalar` to each pair of values of two tuples of `count`."""
    if count == 1:

        @device
        def single(left: Any, right: Any) -> tuple[Any, ...]:
            return (scalar(left[0], right[0]),)

        return single

    HALF = count // 2
    half = _elementwise(scalar, HALF)

    @device
    def combine(left: Any, right: Any) -> tuple[Any, ...]:
        return half(left[:HALF], right[:HALF]) + half(left[HALF:], right[HALF:])

    return combine


@device
def _as_is(values: tuple[Any, ...]) -> tuple[Any, ...]:
    return values


@device
def _add(left: Any, right: Any) -> Any:
    return left + right


@device
def _add_f64(left: Any, right: Any) -> Any:
    return words.add_ordered(left, right)


@device
def _multiply_int(left: int, right: int) -> int:
    return left * right


@device
def _multiply_float(left: Any, right: Any) -> Any:
    return words.mul_rn(left, right)


@device
def _multiply_f64(left: Any, right: Any) -> Any:
    # A product of NaNs would depend on the places of its factors, which compilers may exchange; of
    # float32 all operations give one NaN.
    if left != left:
        return left
    if right != right:
        return right
    return words.mul_rn(left, right)


@device
def _multiply_complex64(left: Any, right: Any) -> tuple[Any, Any]:
    real = words.mul_rn(left[0], right[0]) - words.mul_rn(left[1], right[1])
    imag = words.mul_rn(left[0], right[1]) + words.mul_rn(left[1], right[0])
    return real, imag


@device
def _multiply_complex128(left: Any, right: Any) -> tuple[Any, Any]:
    real = words.add_ordered(_multiply_f64(left[0], right[0]), -_multiply_f64(left[1], right[1]))
    imag = words.add_ordered(_multiply_f64(left[0], right[1]), _multiply_f64(left[1], right[0]))
    return real, imag


@device
def _min_int(left: int, right: int) -> int:
    return left if left < right else right


@device
def _max_int(left: int, right: int) -> int:
    return left if left > right else right


# Equal floats differ in bits only as -0 and +0: their bits OR to the lower, AND to the higher.


@device
def _min_f32(left: Any, right: Any) -> Any:
    if left != left:
        return left
    if right != right:
        return right
    if left == right:
        return words.f32_from_word(words.word_from_f32(left) | words.word_from_f32(right))
    return left if left < right else right


@device
def _max_f32(left: Any, right: Any) -> Any:
    if left != left:
        return left
    if right != right:
        return right
    if left == right:
        return words.f32_from_word(words.word_from_f32(left) & words.word_from_f32(right))
    return left if left > right else right


@device
def _min_f64(left: Any, right: Any) -> Any:
    if left != left:
        return left
    if right != right:
        return right
    if left == right:
        a, b = words.words_from_f64(left), words.words_from_f64(right)
        return words.f64_from_words(a[0] | b[0], a[1] | b[1])
    return left if left < right else right


@device
def _max_f64(left: Any, right: Any) -> Any:
    if left != left:
        return left
    if right != right:
        return right
    if left == right:
        a, b = words.words_from_f64(left), words.words_from_f64(right)
        return words.f64_from_words(a[0] & b[0], a[1] & b[1])
    return left if left > right else right


@device
def _unpack_f32(packets: list[int], at: int, gap: int) -> tuple[Any, Any]:
    return words.f32_from_word(packets[at]), words.f32_from_word(packets[at + gap])


@device
def _unpack_f64(packets: list[int], at: int, gap: int) -> tuple[Any]:
    return (words.f64_from_words(packets[at], packets[at + gap]),)


@device
def _unpack_two_f64(packets: list[int], at: int, gap: int) -> tuple[Any, Any]:
    real = words.f64_from_words(packets[at], packets[at + gap])
    imag = words.f64_from_words(packets[at + 2 * gap], packets[at + 3 * gap])
    return real, imag


@device
def _unpack_i32(packets: list[int], at: int, gap: int) -> tuple[int, int]:
    return words.i64_from_word(packets[at]), words.i64_from_word(packets[at + gap])


@device
def _unpack_i64(packets: list[int], at: int, gap: int) -> tuple[int]:
    return (words.i64_from_words(packets[at], packets[at + gap]),)


@device
def _pack_f32(values: Any) -> tuple[int, int]:
    return words.word_from_f32(values[0]), words.word_from_f32(values[1])


@device
def _pack_f64(values: Any) -> tuple[int, int]:
    return words.words_from_f64(values[0])


@device
def _pack_two_f64(values: Any) -> tuple[int, int, int, int]:
    real = words.words_from_f64(values[0])
    imag = words.words_from_f64(values[1])
    return real[0], real[1], imag[0], imag[1]


@device
def _pack_i32(values: Any) -> tuple[int, int]:
    return words.word_from_i64(values[0]), words.word_from_i64(values[1])


@device
def _pack_i64(values: Any) -> tuple[int, int]:
    return words.words_from_i64(values[0])


@device
def _unpack_u32(packets: list[int], at: int, gap: int) -> tuple[int, int]:
    zero = words.u32(0)
    return words.i64_from_words(packets[at], zero), words.i64_from_words(packets[at + gap], zero)


@device
def _unpack_u64(packets: list[int], at: int, gap: int) -> tuple[int]:
    high = words.u64(words.u64(packets[at + gap]) << words.u64(32))
    return (words.u64(high | words.u64(packets[at])),)


@device
def _pack_u64(values: Any) -> tuple[int, int]:
    return words.u32(values[0]), words.u32(values[0] >> words.u64(32))


_LAYOUTS: dict[str, tuple[Callable[..., Any], Callable[..., Any], int]] = {
    "float16": (narrow.unpack_f16, narrow.pack_f16, 4),
    "bfloat16": (narrow.unpack_bf16, narrow.pack_bf16, 4),
    "float32": (_unpack_f32, _pack_f32, 2),
    "float64": (_unpack_f64, _pack_f64, 1),
    "int8": (narrow.unpack_i8, narrow.pack_bytes, 8),
    "int32": (_unpack_i32, _pack_i32, 2),
    "int64": (_unpack_i64, _pack_i64, 1),
    "uint8": (narrow.unpack_u8, narrow.pack_bytes, 8),
    "uint32": (_unpack_u32, _pack_i32, 2),
    "uint64": (_unpack_u64, _pack_u64, 1),
    "complex64": (_unpack_f32, _pack_f32, 2),
    "complex128": (_unpack_f64, _pack_f64, 1),
}
"""How to unpack and pack two words of each type, and how many values they hold."""
