"""Packets of 16 bytes that say themselves when they have arrived, and the epochs behind them.

An *LL* packet is ``{data, flag, data, flag}`` of 32 bits each, stored at once. A reader takes it
when *both* flags show its epoch, so it is right wherever 8 aligned bytes are written together.

A *sentinel* packet is 16 bytes of data. An empty slot holds `SENTINEL` in every word, and a reader
takes the packet when every machine word has changed: words of 32 bits, or of 64 bits where a
component has 8 bytes, as half of one may look like the sentinel. A machine word of data that equals
the sentinel, which is a NaN in every floating type, is sent as its twin, another NaN.

Source: NCCL's LL protocol; Hu et al., "Demystifying NCCL" (2025), section on protocols; "Every µs
Matters: Achieving Near Speed-of-Light Latency in GPU Collectives" (2026), on sentinel values.
"""

from __future__ import annotations

from shmemar.device.registry import device
from shmemar.device.words import u32

__all__ = ["AFTER_LAST_EPOCH", "LAST_EPOCH", "SENTINEL", "TWIN", "next_epoch"]

LAST_EPOCH, AFTER_LAST_EPOCH = 0xFFFFFFFE, 3
"""Epochs run 1, 2, ... LAST_EPOCH, 3, ...: never 0, which is what fresh memory holds, and at the
wrap, too, odd after even and a multiple of 3 after a remainder of 2, so that two and three buffers
take turns for ever."""

SENTINEL = 0xFFFAFFFA
"""A NaN as one float32 or two float16 or bfloat16, and twice over as one float64."""

TWIN = SENTINEL ^ 1
"""What stands for it in data: a NaN again (of a float64 in its lower word)."""


@device
def next_epoch(epoch: int) -> int:
    """Return the epoch after `epoch`; 0, of a fresh epoch word, counts as before the first."""
    return u32(AFTER_LAST_EPOCH) if epoch == u32(LAST_EPOCH) else u32(epoch + u32(1))
