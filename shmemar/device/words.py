"""Primitives on registers: casts, bit patterns, and small per-thread arrays.

Every cast is spelled out, because an unsigned 64-bit integer that meets a signed one becomes a
float64 in numba and in numpy. In the Python bodies unsigned words are plain integers.
"""

from __future__ import annotations

from typing import TypeAlias, TypeVar

import numpy as np

__all__ = [
    "Packet",
    "Payload",
    "add_ordered",
    "f32_from_word",
    "f64_from_words",
    "i64_from_word",
    "i64_from_words",
    "mul_rn",
    "opaque",
    "two_f16_from_word",
    "u32",
    "u64",
    "word_array",
    "word_from_f32",
    "word_from_i64",
    "word_from_two_f16",
    "words_from_f64",
    "words_from_i64",
]

Payload: TypeAlias = tuple[int, int]
"""The two data words of a packet, low word first."""

Packet: TypeAlias = tuple[int, int, int, int]

Float = TypeVar("Float", np.float32, np.float64)

_MASK32 = 0xFFFFFFFF
_MASK64 = 0xFFFFFFFFFFFFFFFF


def u32(value: int) -> int:
    """Wrap to an unsigned 32-bit integer."""
    return int(value) & _MASK32


def u64(value: int) -> int:
    """Wrap to an unsigned 64-bit integer."""
    return int(value) & _MASK64


def word_array(length: int) -> list[int]:
    """Make an array of words in registers; `length` is a compile-time constant."""
    return [0] * length


def f32_from_word(word: int) -> np.float32:
    """Reinterpret a word as a float32."""
    return np.uint32(word).view(np.float32)


def word_from_f32(value: np.float32) -> int:
    """Reinterpret a float32 as a word."""
    return int(np.float32(value).view(np.uint32))


def two_f16_from_word(word: int) -> tuple[np.float32, np.float32]:
    """Convert the two float16 of a word to float32, the lower half first."""
    low, high = (np.uint16(word >> shift & 0xFFFF).view(np.float16) for shift in (0, 16))
    return np.float32(low), np.float32(high)


def word_from_two_f16(low: np.float32, high: np.float32) -> int:
    """Round two float32 to the nearest float16, ties to even, and join them to a word.

    A NaN becomes a quiet one: on a CPU with the upper bits of what it carries, on a GPU the one
    that the GPU gives for all.
    """
    return _f16_bits(low) | _f16_bits(high) << 16


def _f16_bits(value: np.float32) -> int:
    bits = word_from_f32(value)
    if np.isnan(value):
        return bits >> 16 & 0x8000 | 0x7E00 | bits >> 13 & 0x03FF
    with np.errstate(all="ignore"):
        return int(np.float32(value).astype(np.float16).view(np.uint16))


def f64_from_words(low: int, high: int) -> np.float64:
    """Reinterpret two words as a float64."""
    return np.uint64(high << 32 | low).view(np.float64)


def words_from_f64(value: np.float64) -> Payload:
    """Reinterpret a float64 as two words."""
    bits = int(np.float64(value).view(np.uint64))
    return bits & _MASK32, bits >> 32


def i64_from_word(word: int) -> int:
    """Sign-extend a word, the bits of an int32, to 64 bits."""
    return word - (word >> 31 << 32)


def word_from_i64(value: int) -> int:
    """Keep the low word of a 64-bit integer."""
    return value & _MASK32


def i64_from_words(low: int, high: int) -> int:
    """Join two words to a signed 64-bit integer."""
    bits = high << 32 | low
    return bits - (bits >> 63 << 64)


def words_from_i64(value: int) -> Payload:
    """Split a 64-bit integer into two words, wrapping."""
    return value & _MASK32, value >> 32 & _MASK32


def add_ordered(left: Float, right: Float) -> Float:
    """Add two floats of one type, the operands in the order in which they are given.

    Of two NaNs a GPU's float64 addition gives one by their places, and compilers exchange them as
    registers allow: on one rank and not on another, which then differ in the bits of a NaN.
    """
    return left + right


def mul_rn(left: Float, right: Float) -> Float:
    """Multiply two floats of one type, round to nearest, and never fuse with an addition.

    Of two NaNs it gives either.

    A compiler that is free to fuse may do so on one rank and not on another.
    """
    return left * right


def opaque(word: int) -> int:
    """Return the word, of which a compiler then knows as little as of one that was received.

    So it makes the same instructions of what is computed with either.
    """
    return word
