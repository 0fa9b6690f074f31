"""Lowerings of the register primitives, which are the same LLVM instructions on every target."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

import numpy as np
from llvmlite import ir
from numba import types

from shmemar.device import elements, packet_buffer, words
from shmemar.device.ll_buffer import _element_of, _step, elements_of
from shmemar.device.memory import fence_proxy_alias

if TYPE_CHECKING:
    from collections.abc import Callable

    from shmemar.device.registry import Compiler

__all__ = ["U32", "U64", "instruction", "lower_elements", "lower_words"]

U32, U64 = types.uint32, types.uint64
I32, I64 = ir.IntType(32), ir.IntType(64)


def instruction(
    compiler: Compiler,
    result: types.Type,
    operands: tuple[types.Type, ...],
    emit: Callable[..., Any],
) -> Callable[..., Any]:
    """Make an intrinsic of fixed signature.

    Args:
        compiler: Whose intrinsic it is.
        result: Type of the result: void, a scalar, or a uniform tuple.
        operands: Types of the operands; numba casts to them.
        emit: Called with the LLVM builder and the operands; returns the result, a list of the
            tuple's items, or None for void.
    """

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        value = emit(builder, *args)
        if value is None:
            return context.get_dummy_value()
        if isinstance(value, list):
            return context.make_tuple(builder, signature.return_type, value)
        return value

    def typing(typingctx: Any, *_: Any) -> Any:
        return result(*operands), codegen

    names = ["typingctx", *(f"operand{i}" for i in range(len(operands)))]
    positional = inspect.Parameter.POSITIONAL_OR_KEYWORD
    typing.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [inspect.Parameter(name, positional) for name in names]
    )
    made: Callable[..., Any] = compiler.extending.intrinsic(typing)
    return made


def lower_words(compiler: Compiler) -> None:
    """Lower :mod:`shmemar.device.words`, except `word_array`, floats and float16."""
    pair = types.UniTuple(U32, 2)

    def split(builder: Any, bits: Any) -> list[Any]:
        high = builder.lshr(bits, ir.Constant(I64, 32))
        return [builder.trunc(bits, I32), builder.trunc(high, I32)]

    def join(builder: Any, low: Any, high: Any) -> Any:
        shifted = builder.shl(builder.zext(high, I64), ir.Constant(I64, 32))
        return builder.or_(shifted, builder.zext(low, I64))

    def to_f32(builder: Any, word: Any) -> Any:
        return builder.bitcast(word, ir.FloatType())

    def from_f32(builder: Any, value: Any) -> Any:
        return builder.bitcast(value, I32)

    def to_f64(builder: Any, low: Any, high: Any) -> Any:
        return builder.bitcast(join(builder, low, high), ir.DoubleType())

    def from_f64(builder: Any, value: Any) -> list[Any]:
        return split(builder, builder.bitcast(value, I64))

    def sign_extend(builder: Any, word: Any) -> Any:
        return builder.sext(word, I64)

    def low_word(builder: Any, value: Any) -> Any:
        return builder.trunc(value, I32)

    f32_from_word = instruction(compiler, types.float32, (U32,), to_f32)
    word_from_f32 = instruction(compiler, U32, (types.float32,), from_f32)
    f64_from_words = instruction(compiler, types.float64, (U32, U32), to_f64)
    words_from_f64 = instruction(compiler, pair, (types.float64,), from_f64)
    i64_from_word = instruction(compiler, types.int64, (U32,), sign_extend)
    word_from_i64 = instruction(compiler, U32, (types.int64,), low_word)
    i64_from_words = instruction(compiler, types.int64, (U32, U32), join)
    words_from_i64 = instruction(compiler, pair, (types.int64,), split)

    lower = compiler.lower
    lower(words.u32)(lambda value: lambda value: U32(value))
    lower(words.u64)(lambda value: lambda value: U64(value))
    lower(words.f32_from_word)(lambda word: lambda word: f32_from_word(word))
    lower(words.word_from_f32)(lambda value: lambda value: word_from_f32(value))
    lower(words.f64_from_words)(lambda low, high: lambda low, high: f64_from_words(low, high))
    lower(words.words_from_f64)(lambda value: lambda value: words_from_f64(value))
    lower(words.i64_from_word)(lambda word: lambda word: i64_from_word(word))
    lower(words.word_from_i64)(lambda value: lambda value: word_from_i64(value))
    lower(words.i64_from_words)(lambda low, high: lambda low, high: i64_from_words(low, high))
    lower(words.words_from_i64)(lambda value: lambda value: words_from_i64(value))


def lower_elements(compiler: Compiler, local_array: Callable[[int], Callable[..., Any]]) -> None:
    """Lower :mod:`shmemar.device.elements`, and what depends on the number of ranks.

    Args:
        compiler: Which compiler.
        local_array: ``local_array(length)`` makes the function of two arguments that makes a word
            array of a constant length.
    """
    element_of, step = _element_of, _step

    def packet_array(peers: types.Type, like: types.Type) -> Callable[..., Any]:
        return local_array(peers.count * elements.packet_words(_nbytes(like)))

    def part_array(peers: types.Type, like: types.Type) -> Callable[..., Any]:
        nranks = elements.ranks_at_once(peers.count)
        return local_array(nranks * elements.packet_words(_nbytes(like)))

    def elements_of_more(ll: Any, packets: Any, own: Any, rest: Any) -> Any:
        r = ll.size - len(rest)
        value = element_of(ll, r, packets, step(ll) * r, own)
        return (value, *elements_of(ll, packets, own, rest[1:]))

    def elements_of_rest(
        ll: types.Type, packets: types.Type, own: types.Type, rest: types.Type
    ) -> Callable[..., Any]:
        return elements_of_more if rest.count else lambda ll, packets, own, rest: ()

    by_window, to_each = packet_buffer.send_by_window, packet_buffer.send_to_each

    def send_to_all(
        window: types.Type, ll: types.Type, slot: types.Type, words: types.Type, at: types.Type
    ) -> Callable[..., Any]:
        if window.count:
            return lambda window, ll, slot, words, at: by_window(window, ll, slot, words, at)
        return lambda window, ll, slot, words, at: to_each(window, ll, slot, words, at)

    def fence_aliases(window: types.Type) -> Callable[..., Any]:
        fence = fence_proxy_alias
        return (lambda window: fence()) if window.count else (lambda window: None)

    lower = compiler.lower
    lower(packet_buffer.send_to_all)(send_to_all)
    lower(packet_buffer.fence_aliases)(fence_aliases)
    lower(elements.words_from_element)(_words_from_element)
    lower(elements.element_from_words)(_element_from_words)
    lower(elements.as_element)(_as_element)
    lower(elements.packet_array, inline="always")(packet_array)
    lower(elements.part_array, inline="always")(part_array)
    lower(elements_of)(elements_of_rest)


def _nbytes(like: types.Type) -> int:
    if isinstance(like, types.BaseTuple):
        return int(like.count) * _nbytes(like[0])
    return int(like.bitwidth) // 8


def _words_from_element(value: types.Type, like: types.Type) -> Callable[..., Any]:
    from_f32, from_f64, from_i64 = words.word_from_f32, words.words_from_f64, words.words_from_i64
    convert = elements.words_from_element
    zero = np.uint32(0)

    def two_of_8(value: Any, like: Any) -> Any:
        low, high = convert(value[0], like[0]), convert(value[1], like[1])
        return low[0], low[1], high[0], high[1]

    def two_of_4(value: Any, like: Any) -> Any:
        return convert(value[0], like[0])[0], convert(value[1], like[1])[0], zero, zero

    def three_of_4(value: Any, like: Any) -> Any:
        third = convert(value[2], like[2])[0]
        return convert(value[0], like[0])[0], convert(value[1], like[1])[0], third, zero

    def four_of_4(value: Any, like: Any) -> Any:
        third, fourth = convert(value[2], like[2])[0], convert(value[3], like[3])[0]
        return convert(value[0], like[0])[0], convert(value[1], like[1])[0], third, fourth

    def of_complex64(value: Any, like: Any) -> Any:
        return from_f32(value.real), from_f32(value.imag), zero, zero

    def of_complex128(value: Any, like: Any) -> Any:
        low, high = from_f64(value.real), from_f64(value.imag)
        return low[0], low[1], high[0], high[1]

    def of_float64(value: Any, like: Any) -> Any:
        word = from_f64(value)
        return word[0], word[1], zero, zero

    def of_64_bits(value: Any, like: Any) -> Any:
        word = from_i64(value)
        return word[0], word[1], zero, zero

    if isinstance(like, types.BaseTuple):
        if like[0].bitwidth == 64:
            return two_of_8
        return {2: two_of_4, 3: three_of_4, 4: four_of_4}[like.count]
    special = {
        types.complex64: of_complex64,
        types.complex128: of_complex128,
        types.float32: lambda value, like: (from_f32(value), zero, zero, zero),
        types.float64: of_float64,
    }
    if like in special:
        return special[like]
    if like.bitwidth == 64:
        return of_64_bits
    # Through a signed integer: a negative float has no unsigned one.
    mask, low_word = np.uint32((1 << like.bitwidth) - 1), words.word_from_i64
    return lambda value, like: (U32(low_word(value) & mask), zero, zero, zero)


def _element_from_words(
    first: types.Type, second: types.Type, third: types.Type, fourth: types.Type, like: types.Type
) -> Callable[..., Any]:
    to_f32, to_f64, to_i64 = words.f32_from_word, words.f64_from_words, words.i64_from_words
    convert, cast = elements.element_from_words, like

    def two_of_8(first: int, second: int, third: int, fourth: int, like: Any) -> Any:
        low = convert(first, second, third, fourth, like[0])
        return low, convert(third, fourth, third, fourth, like[1])

    def two_of_4(first: int, second: int, third: int, fourth: int, like: Any) -> Any:
        low = convert(first, second, third, fourth, like[0])
        return low, convert(second, second, third, fourth, like[1])

    def three_of_4(first: int, second: int, third: int, fourth: int, like: Any) -> Any:
        low = convert(first, second, third, fourth, like[0])
        middle = convert(second, second, third, fourth, like[1])
        return low, middle, convert(third, second, third, fourth, like[2])

    def four_of_4(first: int, second: int, third: int, fourth: int, like: Any) -> Any:
        low = convert(first, second, third, fourth, like[0])
        middle = convert(second, second, third, fourth, like[1])
        upper = convert(third, second, third, fourth, like[2])
        return low, middle, upper, convert(fourth, second, third, fourth, like[3])

    def complex64(first: int, second: int, third: int, fourth: int, like: Any) -> Any:
        return complex(to_f32(first), to_f32(second))

    def complex128(first: int, second: int, third: int, fourth: int, like: Any) -> Any:
        return complex(to_f64(first, second), to_f64(third, fourth))

    if isinstance(like, types.BaseTuple):
        if like[0].bitwidth == 64:
            return two_of_8
        return {2: two_of_4, 3: three_of_4, 4: four_of_4}[like.count]
    special = {
        types.complex64: complex64,
        types.complex128: complex128,
        types.float32: lambda first, second, third, fourth, like: to_f32(first),
        types.float64: lambda first, second, third, fourth, like: to_f64(first, second),
    }
    if like in special:
        return special[like]
    if like.bitwidth == 64:
        return lambda first, second, third, fourth, like: cast(to_i64(first, second))
    return lambda first, second, third, fourth, like: cast(first)


def _as_element(value: types.Type, like: types.Type) -> Callable[..., Any]:
    split, join = elements.words_from_element, elements.element_from_words

    def through_words(value: Any, like: Any) -> Any:
        parts = split(value, like)
        return join(parts[0], parts[1], parts[2], parts[3], like)

    return (lambda value, like: value) if value == like else through_words
