"""LL packets: 8 bytes of data that carry their own flags, and the epochs that the flags show.

A packet is ``{data, flag, data, flag}`` of 32 bits each, stored at once. A reader takes it when
*both* flags show its epoch, so it is right wherever 8 aligned bytes are written together.

Source: NCCL's LL protocol; Hu et al., "Demystifying NCCL" (2025), section on protocols.
"""

from __future__ import annotations

from shmemar.device.memory import st_relaxed_sys_v4_b32
from shmemar.device.registry import device
from shmemar.device.words import u32

__all__ = ["LAST_EPOCH", "next_epoch", "st_packet"]

LAST_EPOCH = 0xFFFFFFFE
"""Epochs run 1, 2, ... LAST_EPOCH, 1: never 0, which is what fresh memory holds, and odd after even
also at the wrap, so that halves alternate for ever."""


@device
def next_epoch(epoch: int) -> int:
    """Return the epoch after `epoch`; 0, of a fresh epoch word, counts as before the first."""
    return u32(1) if epoch == u32(LAST_EPOCH) else u32(epoch + u32(1))


@device
def st_packet(address: int, low: int, high: int, epoch: int) -> None:
    """Store two data words with the epoch as their flags."""
    st_relaxed_sys_v4_b32(address, low, epoch, high, epoch)
