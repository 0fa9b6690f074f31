"""Components narrower than a word: what is packed in words, and what it is reduced as.

Two 16-bit floats are in a word, the one of the lower address in its lower half. They are reduced as
float32, and the result is rounded once, to the nearest and ties to even. A NaN stays one, and is
made quiet. Four 8-bit integers are in a word, likewise. They are reduced as 64-bit integers, and
the result keeps the lowest 8 bits.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from shmemar.device import words
from shmemar.device.registry import device

if TYPE_CHECKING:
    import numpy as np

__all__ = [
    "pack_bf16",
    "pack_bytes",
    "pack_f16",
    "two_bf16_from_word",
    "unpack_bf16",
    "unpack_f16",
    "unpack_i8",
    "unpack_u8",
    "word_from_two_bf16",
]


@device
def unpack_f16(packets: list[int], at: int, gap: int) -> tuple[Any, Any, Any, Any]:
    """Unpack four float16."""
    a, b = words.two_f16_from_word(packets[at])
    c, d = words.two_f16_from_word(packets[at + gap])
    return a, b, c, d


@device
def pack_f16(values: Any) -> tuple[int, int]:
    """Round and pack four float16."""
    low = words.word_from_two_f16(values[0], values[1])
    return low, words.word_from_two_f16(values[2], values[3])


@device
def unpack_bf16(packets: list[int], at: int, gap: int) -> tuple[Any, Any, Any, Any]:
    """Unpack four bfloat16."""
    a, b = two_bf16_from_word(packets[at])
    c, d = two_bf16_from_word(packets[at + gap])
    return a, b, c, d


@device
def pack_bf16(values: Any) -> tuple[int, int]:
    """Round and pack four bfloat16."""
    low = word_from_two_bf16(values[0], values[1])
    return low, word_from_two_bf16(values[2], values[3])


@device
def two_bf16_from_word(word: int) -> tuple[Any, Any]:
    """Convert the two bfloat16 of a word, each the upper half of a float32."""
    low = words.u32(word << words.u32(16))
    high = words.u32(word & words.u32(0xFFFF0000))
    return words.f32_from_word(low), words.f32_from_word(high)


@device
def word_from_two_bf16(low: np.float32, high: np.float32) -> int:
    """Round two float32 to bfloat16, and join them to a word."""
    upper = words.u32(_bf16_bits_from_f32(high) << words.u32(16))
    return words.u32(upper | _bf16_bits_from_f32(low))


@device
def _bf16_bits_from_f32(value: np.float32) -> int:
    bits = words.word_from_f32(value)
    upper = words.u32(bits >> words.u32(16))
    if value != value:
        # Rounding could carry into the exponent, and truncation leave an infinity.
        return words.u32(upper | words.u32(0x0040))
    odd = words.u32(upper & words.u32(1))
    return words.u32(words.u32(bits + words.u32(0x7FFF) + odd) >> words.u32(16))


@device
def unpack_i8(packets: list[int], at: int, gap: int) -> tuple[Any, ...]:
    """Unpack eight int8."""
    low, high = packets[at], packets[at + gap]
    return (
        _i8(low, 24),
        _i8(low, 16),
        _i8(low, 8),
        _i8(low, 0),
        _i8(high, 24),
        _i8(high, 16),
        _i8(high, 8),
        _i8(high, 0),
    )


@device
def _i8(word: int, shift: int) -> int:
    """Sign-extend the byte that a shift to the left brings to the top of the word."""
    return words.i64_from_word(words.u32(word << words.u32(shift))) >> 24


@device
def unpack_u8(packets: list[int], at: int, gap: int) -> tuple[Any, ...]:
    """Unpack eight uint8."""
    low, high = packets[at], packets[at + gap]
    return (
        _u8(low, 0),
        _u8(low, 8),
        _u8(low, 16),
        _u8(low, 24),
        _u8(high, 0),
        _u8(high, 8),
        _u8(high, 16),
        _u8(high, 24),
    )


@device
def _u8(word: int, shift: int) -> int:
    return words.i64_from_word(words.u32(words.u32(word >> words.u32(shift)) & words.u32(0xFF)))


@device
def pack_bytes(values: Any) -> tuple[int, int]:
    """Pack eight integers of 8 bits, wrapping."""
    low = _word_from_bytes(values[0], values[1], values[2], values[3])
    return low, _word_from_bytes(values[4], values[5], values[6], values[7])


@device
def _word_from_bytes(a: int, b: int, c: int, d: int) -> int:
    low = words.u32(_byte(a) | words.u32(_byte(b) << words.u32(8)))
    high = words.u32(_byte(c) | words.u32(_byte(d) << words.u32(8)))
    return words.u32(low | words.u32(high << words.u32(16)))


@device
def _byte(value: int) -> int:
    return words.u32(words.word_from_i64(value) & words.u32(0xFF))
