"""What additions of floats in memory do to a word, as the L2 cache of a GPU adds.

Each addition is rounded to the type, to nearest and ties to even. float32 flushes subnormal
numbers, of operands and results, to zeros of their sign; the 16-bit types keep theirs.

Source: PTX ISA 8.x, ``red``.
"""

from __future__ import annotations

from shmemar.device.narrow import two_bf16_from_word, word_from_two_bf16
from shmemar.device.registry import device
from shmemar.device.words import (
    f32_from_word,
    two_f16_from_word,
    u32,
    word_from_f32,
    word_from_two_f16,
)

__all__ = ["add_f32", "add_two_bf16", "add_two_f16"]


@device
def add_f32(left: int, right: int) -> int:
    """Add two float32, given by their bits."""
    total = f32_from_word(_flushed(left)) + f32_from_word(_flushed(right))
    return _flushed(word_from_f32(total))


@device
def _flushed(word: int) -> int:
    return u32(word & u32(0x80000000)) if u32(word & u32(0x7F800000)) == u32(0) else u32(word)


# float32 has more than twice the bits of either, so that its own rounding changes no result.


@device
def add_two_f16(left: int, right: int) -> int:
    """Add the two float16 of a word to those of another."""
    low, high = two_f16_from_word(left)
    more_low, more_high = two_f16_from_word(right)
    return word_from_two_f16(low + more_low, high + more_high)


@device
def add_two_bf16(left: int, right: int) -> int:
    """Add the two bfloat16 of a word to those of another."""
    low, high = two_bf16_from_word(left)
    more_low, more_high = two_bf16_from_word(right)
    return word_from_two_bf16(low + more_low, high + more_high)
