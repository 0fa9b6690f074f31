"""Lowerings of the register primitives, which are the same LLVM instructions on every target."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

from llvmlite import ir
from numba import types

from shmemar.device import words

if TYPE_CHECKING:
    from collections.abc import Callable

    from shmemar.device.registry import Compiler

__all__ = ["U32", "U64", "instruction", "lower_words"]

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
    """Lower :mod:`shmemar.device.words`, except `word_array`, `mul_rn` and float16."""
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
