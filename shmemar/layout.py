"""Arithmetic on bytes: packets, slots, halves, epoch words, the failure record, and the grid.

Everything here is pure and the same on every rank, because the thread that writes a slot on one
rank and the thread that reads it on another compute its address apart from each other.

One-shot LL region of one rank (half-open byte ranges, P = ``pitch_nbytes``, H = ``half_nbytes``)::

    half 0   [0, P) from rank 0   [P, 2P) from rank 1   ...   [(N-1)P, NP) from rank N-1
    half 1   [H, H+P) from rank 0 ...                         H = N * P
    a source's pitch holds one 16-byte packet a slot: [0, 16) slot 0, [16, 32) slot 1, ...
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from shmemar.errors import ConfigurationError

__all__ = [
    "BLOCK_THREADS",
    "DEFAULT_SCRATCH_NBYTES",
    "FAILURE_DTYPE",
    "HALVES",
    "MAX_LAUNCH_PACKETS",
    "MAX_PACKETS_PER_THREAD",
    "PACKET_NBYTES",
    "PAYLOAD_NBYTES",
    "WORDS_PER_PACKET",
    "WORD_NBYTES",
    "Grid",
    "LLLayout",
    "failure_offset",
    "grid_for",
    "packet_count",
    "packet_offset",
    "vector_packets",
]

WORD_NBYTES = 4
"""A word is 32 bits: the unit of flags, epochs and payload halves."""

PACKET_NBYTES = 16
"""An LL packet: {data, flag, data, flag}, a word each, written by one 16-byte store."""

PAYLOAD_NBYTES = 8
"""Data bytes in a packet."""

WORDS_PER_PACKET = PACKET_NBYTES // WORD_NBYTES

MAX_PACKETS_PER_THREAD = 2
"""Most slots that a thread of any kernel owns."""

MAX_LAUNCH_PACKETS = 1 << 31
"""Most packets of one launch, so that kernels count them in 32 bits; 16 GiB of payload."""

HALVES = 2
"""Double buffering: a slot's epoch e lies in half e & 1."""

BLOCK_THREADS = 128
"""Threads a block. In trials on an H200 (2026-11-29) 128 was the best from 8 KiB on."""

DEFAULT_SCRATCH_NBYTES = 4 << 20
"""Symmetric scratch of the one-shot kernels, per rank."""

FAILURE_DTYPE = np.dtype(
    [
        (name, "<u4")
        for name in (
            "valid",  # 1 once all other words are written
            "kernel",  # KernelSpec.code
            "rank",
            "peer",  # the first rank that was missing
            "missing_lo",  # bit r: rank r was missing
            "missing_hi",  # bit r - 32
            "thread",  # global index
            "block_threads",
            "slot",
            "epoch",
            "expected",  # the word that was waited for
            "seen",  # what stood there instead
        )
    ]
)
"""What a rank writes, once, when a spin passes its deadline."""


def failure_offset(name: str) -> int:
    """Byte offset of a word of the failure record."""
    return int(FAILURE_DTYPE.fields[name][1])  # type: ignore[index]


@dataclass(frozen=True)
class LLLayout:
    """Where the packets of an LL exchange lie in a rank's region.

    Attributes:
        nranks: Ranks of the communicator.
        nslots: Slots a source has in one half. It bounds the grid, and is fixed for the lifetime
            of the region: a slot's address must not depend on the message.
    """

    nranks: int
    nslots: int

    @classmethod
    def fit(cls, nranks: int, scratch_nbytes: int) -> LLLayout:
        """Lay out the most slots, in whole blocks of any kernel, that `scratch_nbytes` hold.

        Raises:
            ConfigurationError: Not even one block fits.
        """
        unit = cls(nranks, BLOCK_THREADS * MAX_PACKETS_PER_THREAD)
        blocks = scratch_nbytes // unit.nbytes
        if blocks < 1:
            raise ConfigurationError(
                f"scratch_nbytes is {scratch_nbytes}; expected at least {unit.nbytes} for {nranks} "
                f"ranks (the default is {DEFAULT_SCRATCH_NBYTES}). Raise it, or unset "
                "SHMEMAR_SCRATCH_NBYTES."
            )
        return cls(nranks, blocks * unit.nslots)

    @property
    def pitch_nbytes(self) -> int:
        """Bytes between the packets of two sources."""
        return self.nslots * PACKET_NBYTES

    @property
    def half_nbytes(self) -> int:
        """Bytes between the two halves."""
        return self.nranks * self.pitch_nbytes

    @property
    def nbytes(self) -> int:
        """Bytes of the region."""
        return HALVES * self.half_nbytes

    @property
    def epochs_nbytes(self) -> int:
        """Bytes of the epoch words: one a slot, in the rank's own memory."""
        return self.nslots * WORD_NBYTES

    def packet_offset(self, epoch: int, source: int, slot: int) -> int:
        """Byte offset of the packet that `source` writes to `slot` in `epoch`."""
        return packet_offset(epoch, source, slot, self.pitch_nbytes, self.half_nbytes)


def packet_offset(epoch: int, source: int, slot: int, pitch_nbytes: int, half_nbytes: int) -> int:
    """Byte offset of a packet in a region; kernels compile this very function."""
    half = epoch & (HALVES - 1)
    return half * half_nbytes + source * pitch_nbytes + slot * PACKET_NBYTES


def packet_count(nbytes: int) -> int:
    """Packets that carry a message."""
    return -(-nbytes // PAYLOAD_NBYTES)


def vector_packets(address: int, nbytes: int) -> int:
    """Packets, from the first on, whose payload an array can give or take in one access.

    All that are whole; none where the array is not aligned to a payload.
    """
    return 0 if address % PAYLOAD_NBYTES else nbytes // PAYLOAD_NBYTES


@dataclass(frozen=True)
class Grid:
    """Blocks and threads of a launch."""

    blocks: int
    block_threads: int

    @property
    def nthreads(self) -> int:
        """Threads of the launch."""
        return self.blocks * self.block_threads


def grid_for(
    nbytes: int, layout: LLLayout, *, packets_per_thread: int = 1, max_blocks: int | None = None
) -> Grid:
    """Choose the grid of a message: a thread for each group of packets, as far as slots reach.

    A pure function of arguments that are equal on all ranks; what is left over goes in passes.

    Args:
        nbytes: Bytes of the message; at least 1.
        layout: Layout of the region.
        packets_per_thread: Packets that a thread reduces together.
        max_blocks: Cap on the blocks, such as those that are resident at once; None for no cap.
    """
    per_block = BLOCK_THREADS * packets_per_thread
    blocks = -(-packet_count(nbytes) // per_block)
    limit = layout.nslots // per_block
    return Grid(min(blocks, limit, max_blocks or limit), BLOCK_THREADS)
