"""float16 to and from float32 where no instruction does it, in integer arithmetic: on the CPU.

A CPU's compiler calls its own run-time library for a conversion, which numba does not link.

Both ways, subnormal numbers go through a float32 in [0.5, 1), whose last bit weighs 2**-24, as the
last bit of a subnormal float16 does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from shmemar.device.registry import device
from shmemar.device.words import f32_from_word, u32, word_from_f32

if TYPE_CHECKING:
    import numpy as np

__all__ = ["f16_from_f32", "f32_from_f16"]

_HALF = 0x3F000000  # 0.5 as a float32
_BIAS = 112 << 23  # what float32 adds to the exponent of a float16
_SMALLEST_NORMAL = 0x0400
_INFINITY = 0x7C00


@device
def f32_from_f16(bits: int) -> np.float32:
    """Convert a float16, given by its bits: exact, and a NaN keeps what it carries."""
    sign = u32(u32(bits & u32(0x8000)) << u32(16))
    magnitude = u32(bits & u32(0x7FFF))
    if magnitude < u32(_SMALLEST_NORMAL):
        value = f32_from_word(u32(magnitude + u32(_HALF))) - f32_from_word(u32(_HALF))
        return f32_from_word(u32(sign | word_from_f32(value)))
    # The exponent of infinities and NaNs has to stay all ones.
    bias = u32(2 * _BIAS) if magnitude >= u32(_INFINITY) else u32(_BIAS)
    return f32_from_word(u32(sign | u32(u32(magnitude << u32(13)) + bias)))


@device
def f16_from_f32(value: np.float32) -> int:
    """Round to the bits of the nearest float16, ties to even; a NaN becomes a quiet one."""
    bits = word_from_f32(value)
    sign = u32(u32(bits >> u32(16)) & u32(0x8000))
    magnitude = u32(bits & u32(0x7FFFFFFF))
    if magnitude > u32(0x7F800000):
        carried = u32(u32(magnitude >> u32(13)) & u32(0x03FF))
        return u32(sign | u32(carried | u32(_INFINITY | 0x0200)))
    if magnitude >= u32(0x47800000):  # 65536: what is less and too large, rounding carries there
        return u32(sign | u32(_INFINITY))
    if magnitude < u32((_SMALLEST_NORMAL << 13) + _BIAS):
        rounded = word_from_f32(f32_from_word(magnitude) + f32_from_word(u32(_HALF)))
        return u32(sign | u32(rounded - u32(_HALF)))
    odd = u32(u32(magnitude >> u32(13)) & u32(1))
    rounded = u32(magnitude - u32(_BIAS) + u32(0x0FFF) + odd)
    return u32(sign | u32(rounded >> u32(13)))
