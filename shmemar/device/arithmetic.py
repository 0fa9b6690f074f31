"""Reduction operators on the data words of packets.

Integers wrap. ``min`` and ``max`` return a NaN when either operand is one (the first in rank order)
and order -0 below +0. The product of complex numbers is the textbook formula, without fused
multiply-add, so that every rank rounds alike.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

from shmemar.device import words
from shmemar.device.registry import device
from shmemar.dtypes import DType, Kind, ReduceOp

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Arithmetic", "arithmetic"]


class Arithmetic(NamedTuple):
    """Device functions that reduce `KernelSpec.unit_words` words at a time.

    Attributes:
        unpack: ``unpack(packets, at, gap)`` makes a tuple of values of the data words that stand at
            `at`, ``at + gap`` and on: a gap of 2 leaves out LL's flags.
        combine: ``combine(left, right)`` reduces two such tuples; `left` is of the lower ranks.
        pack: ``pack(values)`` makes a tuple of the data words.
    """

    unpack: Callable[[list[int], int, int], tuple[Any, ...]]
    combine: Callable[[Any, Any], tuple[Any, ...]]
    pack: Callable[[Any], tuple[int, ...]]


def arithmetic(dtype: DType, op: ReduceOp) -> Arithmetic:
    """Return the device functions for an element type and an operator."""
    wide = dtype.component_nbytes == 8
    if dtype.is_complex and op is ReduceOp.PROD:
        if wide:
            return Arithmetic(_unpack_two_f64, _multiply_complex, _pack_two_f64)
        return Arithmetic(_unpack_f32, _multiply_complex, _pack_f32)
    scalar = _scalar(dtype, op)
    if dtype.kind is Kind.FLOAT:
        if wide:
            return Arithmetic(_unpack_f64, _single(scalar), _pack_f64)
        return Arithmetic(_unpack_f32, _pairwise(scalar), _pack_f32)
    if wide:
        return Arithmetic(_unpack_i64, _single(scalar), _pack_i64)
    return Arithmetic(_unpack_i32, _pairwise(scalar), _pack_i32)


def _scalar(dtype: DType, op: ReduceOp) -> Callable[[Any, Any], Any]:
    if op is ReduceOp.SUM:
        return _add
    if op is ReduceOp.PROD:
        return _multiply_int if dtype.kind is Kind.INT else _multiply_float
    lower = op is ReduceOp.MIN
    if dtype.kind is Kind.INT:
        return _min_int if lower else _max_int
    if dtype.component_nbytes == 8:
        return _min_f64 if lower else _max_f64
    return _min_f32 if lower else _max_f32


@cache
def _single(scalar: Callable[[Any, Any], Any]) -> Callable[[Any, Any], tuple[Any, ...]]:
    @device
    def combine(left: Any, right: Any) -> tuple[Any]:
        return (scalar(left[0], right[0]),)

    return combine


@cache
def _pairwise(scalar: Callable[[Any, Any], Any]) -> Callable[[Any, Any], tuple[Any, ...]]:
    @device
    def combine(left: Any, right: Any) -> tuple[Any, Any]:
        return scalar(left[0], right[0]), scalar(left[1], right[1])

    return combine


@device
def _add(left: Any, right: Any) -> Any:
    return left + right


@device
def _multiply_int(left: int, right: int) -> int:
    return left * right


@device
def _multiply_float(left: Any, right: Any) -> Any:
    return words.mul_rn(left, right)


@device
def _multiply_complex(left: Any, right: Any) -> tuple[Any, Any]:
    real = words.mul_rn(left[0], right[0]) - words.mul_rn(left[1], right[1])
    imag = words.mul_rn(left[0], right[1]) + words.mul_rn(left[1], right[0])
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
