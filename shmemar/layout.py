"""Arithmetic on bytes: packets, slots, buffers, epoch words, the failure record, and the grid.

Everything here is pure and the same on every rank, because the thread that writes a slot on one
rank and the thread that reads it on another compute its address apart from each other.

Region of one rank (half-open byte ranges, P = ``pitch_nbytes``, B = ``buffer_nbytes``)::

    buffer 0   [0, P) from rank 0   [P, 2P) from rank 1   ...   [(N-1)P, NP) from rank N-1
    buffer 1   [B, B+P) from rank 0 ...                         B = N * P
    a source's pitch holds one 16-byte packet a slot: [0, 16) slot 0, [16, 32) slot 1, ...

A slot's epoch e lies in buffer e mod 2 with LL packets, and e mod 3 with sentinel ones.

Behind the packets of an LL128 kernel lie two accumulators of 128-byte lines (A =
``packets_nbytes``)::

    accumulator 0   [A, A+P)        [A, A+128) line 0   [A+128, A+256) line 1   ...
    accumulator 1   [A+P, A+2P)     a line's 16 bytes of lane j are those of slot 8 * line + j

A line's epoch e is added up in accumulator e mod 2.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from shmemar.errors import ConfigurationError

__all__ = [
    "ACCUMULATORS",
    "BLOCK_THREADS",
    "DEFAULT_SCRATCH_NBYTES",
    "DEFAULT_TWO_SHOT_SCRATCH_NBYTES",
    "FAILURE_DTYPE",
    "FLAG_NBYTES",
    "LINE_LANES",
    "LINE_NBYTES",
    "LL_BUFFERS",
    "MAX_BARRIER_BLOCKS",
    "MAX_LAUNCH_PACKETS",
    "MAX_PACKETS_PER_THREAD",
    "NO_SLOT",
    "PACKET_NBYTES",
    "SENTINEL_BUFFERS",
    "WARP_LINES",
    "WORDS_PER_PACKET",
    "WORD_NBYTES",
    "AnyLayout",
    "BarrierLayout",
    "Grid",
    "LLLayout",
    "StagingLayout",
    "accumulator_offset",
    "barrier_grid",
    "failure_offset",
    "flag_offset",
    "grid_for",
    "packet_count",
    "packet_offset",
    "share_lines",
    "staging_offset",
    "vector_packets",
]

WORD_NBYTES = 4
"""A word is 32 bits: the unit of flags, epochs and payload halves."""

PACKET_NBYTES = 16
"""A packet is four words, written by one 16-byte store."""

WORDS_PER_PACKET = PACKET_NBYTES // WORD_NBYTES

LINE_NBYTES = 128
"""A line is what one instruction of one warp adds to at once; an L2 cache has lines of as much."""

LINE_LANES = LINE_NBYTES // PACKET_NBYTES
"""Lanes of a warp that share a line, 16 bytes each."""

WARP_LINES = 4
"""Lines of a warp."""

ACCUMULATORS = 2
"""One is cleared while the other is added to."""

MAX_PACKETS_PER_THREAD = 2
"""Most slots that a thread of any kernel owns."""

MAX_LAUNCH_PACKETS = 1 << 31
"""Most packets of one launch, so that kernels count them in 32 bits; 16 GiB or more."""

LL_BUFFERS = 2
"""Double buffering, the least that lets an epoch arrive while the one before it is read."""

SENTINEL_BUFFERS = 3
"""One more, which is emptied meanwhile."""

NO_SLOT = 0xFFFFFFFF
"""In the place of a slot in a failure record: a signal was waited for."""

BLOCK_THREADS = 128
"""Threads a block. In trials on an H200 (2026-11-29) 128 was the best from 8 KiB on."""

FLAG_NBYTES = 8
"""A barrier's flag is a word with 8 bytes to itself: the protocol checker keeps order in units of 8
bytes, and is to tell the flags of two ranks apart."""

MAX_BARRIER_BLOCKS = 512
"""Most blocks of a barrier kernel: with a packet a thread 1 MiB is on its way. Not tuned."""

DEFAULT_SCRATCH_NBYTES = 4 << 20
"""Symmetric scratch of the one-shot kernels, per rank."""

DEFAULT_TWO_SHOT_SCRATCH_NBYTES = 64 << 20
"""Symmetric scratch of the two-shot kernels, per rank."""

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
            "expected",  # the flag that was waited for; of sentinel packets any data was
            "seen",  # a word that stood there instead
        )
    ]
)
"""What a rank writes, once, when a spin passes its deadline."""


def failure_offset(name: str) -> int:
    """Byte offset of a word of the failure record."""
    return int(FAILURE_DTYPE.fields[name][1])  # type: ignore[index]


@dataclass(frozen=True)
class LLLayout:
    """Where the packets of an exchange lie in a rank's region.

    Attributes:
        nranks: Ranks of the communicator.
        nslots: Slots a source has in one buffer. It bounds the grid, and is fixed for the lifetime
            of the region: a slot's address must not depend on the message.
        nbuffers: `LL_BUFFERS` or `SENTINEL_BUFFERS`.
        accumulators: `ACCUMULATORS`, or none.
    """

    nranks: int
    nslots: int
    nbuffers: int = LL_BUFFERS
    accumulators: int = 0

    @classmethod
    def fit(
        cls,
        nranks: int,
        scratch_nbytes: int,
        nbuffers: int = LL_BUFFERS,
        accumulators: int = 0,
    ) -> LLLayout:
        """Lay out the most slots, in whole blocks of any kernel, that `scratch_nbytes` hold.

        Raises:
            ConfigurationError: Not even one block fits.
        """
        unit = cls(nranks, BLOCK_THREADS * MAX_PACKETS_PER_THREAD, nbuffers, accumulators)
        blocks = scratch_nbytes // unit.nbytes
        if blocks < 1:
            raise ConfigurationError(
                f"scratch_nbytes is {scratch_nbytes}; expected at least {unit.nbytes} for {nranks} "
                f"ranks (the default is {DEFAULT_SCRATCH_NBYTES}, and for two-shot kernels "
                f"{DEFAULT_TWO_SHOT_SCRATCH_NBYTES}). Raise it, or unset SHMEMAR_SCRATCH_NBYTES or "
                "SHMEMAR_TWO_SHOT_SCRATCH_NBYTES."
            )
        return cls(nranks, blocks * unit.nslots, nbuffers, accumulators)

    @property
    def pitch_nbytes(self) -> int:
        """Bytes between the packets of two sources."""
        return self.nslots * PACKET_NBYTES

    @property
    def buffer_nbytes(self) -> int:
        """Bytes from one buffer to the next."""
        return self.nranks * self.pitch_nbytes

    @property
    def packets_nbytes(self) -> int:
        """Bytes of all packets, which come first."""
        return self.nbuffers * self.buffer_nbytes

    @property
    def nbytes(self) -> int:
        """Bytes of the region."""
        return self.packets_nbytes + self.zeroed_nbytes

    @property
    def zeroed_nbytes(self) -> int:
        """Bytes of the accumulators, which come last and hold zeros at first."""
        return self.accumulators * self.pitch_nbytes

    @property
    def epochs_nbytes(self) -> int:
        """Bytes of the epoch words: one a slot, in the rank's own memory."""
        return self.nslots * WORD_NBYTES

    def packet_offset(self, epoch: int, source: int, slot: int) -> int:
        """Byte offset of the packet that `source` writes to `slot` in `epoch`."""
        return packet_offset(
            epoch, source, slot, self.pitch_nbytes, self.buffer_nbytes, self.nbuffers
        )


def packet_offset(
    epoch: int, source: int, slot: int, pitch_nbytes: int, buffer_nbytes: int, nbuffers: int
) -> int:
    """Byte offset of a packet in a region; kernels compile this very function."""
    buffer = epoch % 2 if nbuffers == 2 else epoch % 3
    return buffer * buffer_nbytes + source * pitch_nbytes + slot * PACKET_NBYTES


@dataclass(frozen=True)
class BarrierLayout:
    """Where flags and staged packets of a barrier kernel lie in a rank's region.

    Half-open byte ranges, N ranks, B = ``nblocks``, F = ``flags_nbytes``, P = ``pitch_nbytes``::

        even epochs   [0, 8) block 0 from rank 0   [8, 16) from rank 1   ...   [8N, 8N+8) block 1
        odd epochs    [8BN, 8BN+8) block 0 from rank 0   ...
        staging       [F, F+P) place 0   [F+P, F+2P) place 1   ...
        a place       [0, 16) slot 0   [16, 32) slot 1   ...   block b has slots from bC on

    A block has C = ``block_slots`` slots of a place, whatever the grid and the message.

    Attributes:
        nranks: Ranks of the communicator.
        nplaces: Places for staged packets (`KernelSpec.nplaces`); 0 for none.
        nblocks: The most blocks of a launch, fixed for the lifetime of the region.
        block_slots: Packets that a block stages in one place in a pass: several a thread.
        block_threads: Threads a block; at least one for each rank.
    """

    nranks: int
    nplaces: int
    nblocks: int
    block_slots: int
    block_threads: int = BLOCK_THREADS

    @classmethod
    def fit(cls, nranks: int, nplaces: int, scratch_nbytes: int) -> BarrierLayout:
        """Lay out the most blocks, and for each the most slots, that `scratch_nbytes` hold.

        Raises:
            ConfigurationError: Not even one block fits.
        """
        if not nplaces:
            return cls(nranks, 0, 1, 0)
        unit = cls(nranks, nplaces, 1, BLOCK_THREADS)
        nblocks = min(scratch_nbytes // unit.nbytes, MAX_BARRIER_BLOCKS)
        if nblocks < 1:
            raise ConfigurationError(
                f"scratch_nbytes is {scratch_nbytes}; expected at least {unit.nbytes} for a kernel "
                f"with barriers of {nranks} ranks. Raise it, or unset SHMEMAR_SCRATCH_NBYTES or "
                "SHMEMAR_TWO_SHOT_SCRATCH_NBYTES."
            )
        each = cls(nranks, nplaces, nblocks, BLOCK_THREADS)
        rounds = (scratch_nbytes - each.flags_nbytes) // (nplaces * each.pitch_nbytes)
        rounds = min(rounds, MAX_LAUNCH_PACKETS // each.nslots)
        return cls(nranks, nplaces, nblocks, rounds * BLOCK_THREADS)

    @property
    def nslots(self) -> int:
        """Slots of a place."""
        return self.nblocks * self.block_slots

    @property
    def flags_nbytes(self) -> int:
        """Bytes of the flags."""
        return 2 * self.nblocks * self.nranks * FLAG_NBYTES

    @property
    def pitch_nbytes(self) -> int:
        """Bytes of a place."""
        return self.nslots * PACKET_NBYTES

    @property
    def nbytes(self) -> int:
        """Bytes of the region."""
        return self.flags_nbytes + self.nplaces * self.pitch_nbytes

    @property
    def zeroed_nbytes(self) -> int:
        """Bytes that hold zeros at first: all."""
        return self.nbytes

    @property
    def epochs_nbytes(self) -> int:
        """Bytes of the epoch words: one a block, in the rank's own memory."""
        return self.nblocks * WORD_NBYTES

    def flag_offset(self, epoch: int, block: int, source: int) -> int:
        """Byte offset of the flag that `block` of the rank `source` sets at `epoch`."""
        return flag_offset(epoch, block, source, self.nblocks, self.nranks)

    def staging_offset(self, place: int, block: int, slot: int) -> int:
        """Byte offset of a staged packet: `slot` of those of a block."""
        return staging_offset(
            place, block, slot, self.flags_nbytes, self.pitch_nbytes, self.block_slots
        )


@dataclass(frozen=True)
class StagingLayout:
    """Symmetric memory for a part of a message, and behind it for what the stock collective makes.

    Attributes:
        nbytes: Bytes of the region on each rank.
    """

    nbytes: int

    zeroed_nbytes = 0

    @property
    def part_nbytes(self) -> int:
        """Bytes of a part, and of its place: whole packets."""
        return self.nbytes // (2 * PACKET_NBYTES) * PACKET_NBYTES

    epochs_nbytes = WORD_NBYTES
    """A word that nothing reads: nothing is counted here."""


AnyLayout: TypeAlias = LLLayout | BarrierLayout | StagingLayout
"""Of any kernel's scratch."""


def flag_offset(epoch: int, block: int, source: int, nblocks: int, nranks: int) -> int:
    """Byte offset of a barrier's flag in a region; kernels compile this very function."""
    return (((epoch & 1) * nblocks + block) * nranks + source) * FLAG_NBYTES


def staging_offset(
    place: int, block: int, slot: int, flags_nbytes: int, pitch_nbytes: int, block_slots: int
) -> int:
    """Byte offset of a staged packet in a region; kernels compile this very function."""
    return flags_nbytes + place * pitch_nbytes + (block * block_slots + slot) * PACKET_NBYTES


def accumulator_offset(epoch: int, slot: int, packets_nbytes: int, pitch_nbytes: int) -> int:
    """Byte offset of a slot's 16 bytes of its line's accumulator; kernels compile this, too."""
    return packets_nbytes + epoch % 2 * pitch_nbytes + slot * PACKET_NBYTES


def share_lines(data_lines: int, nranks: int, line_elements: int) -> int:
    """Lines that a rank adds up: its share of the data lines, and those of what they displace.

    Whole warps of lines. A line's first element is its count, so each data line displaces one, and
    an extra line takes ``line_elements - 1`` of them.
    """
    share = packet_count(data_lines, nranks)
    lines = share + packet_count(share, line_elements - 1)
    return packet_count(lines, WARP_LINES) * WARP_LINES


def packet_count(nbytes: int, payload_nbytes: int) -> int:
    """Packets of `payload_nbytes` that carry a message."""
    return -(-nbytes // payload_nbytes)


def vector_packets(address: int, nbytes: int, payload_nbytes: int) -> int:
    """Packets, from the first on, whose payload an array can give or take in one access.

    All that are whole; none where the array is not aligned to a payload.
    """
    return 0 if address % payload_nbytes else nbytes // payload_nbytes


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
    ngroups: int,
    layout: LLLayout,
    *,
    packets_per_thread: int = 1,
    lanes: int = 1,
    max_blocks: int | None = None,
) -> Grid:
    """Choose the grid of a message: threads for each group of packets, as far as slots reach.

    A pure function of arguments that are equal on all ranks; what is left over goes in passes.

    Args:
        ngroups: Groups of packets that a thread takes at once (`KernelSpec.group_count`).
        layout: Layout of the region.
        packets_per_thread: Slots of a thread.
        lanes: Threads that share the same group, and its slots.
        max_blocks: Cap on the blocks, such as those that are resident at once; None for no cap.
    """
    blocks = -(-ngroups * lanes // BLOCK_THREADS)
    limit = layout.nslots * lanes // (BLOCK_THREADS * packets_per_thread)
    return Grid(min(blocks, limit, max_blocks or limit), BLOCK_THREADS)


def barrier_grid(ngroups: int, layout: BarrierLayout, *, max_blocks: int | None = None) -> Grid:
    """Choose the grid of a barrier kernel: a thread for each packet, as far as blocks reach.

    A pure function of arguments that are equal on all ranks; threads go on to further packets.

    Args:
        ngroups: Packets, of two-shot kernels those of a share (`KernelSpec.group_count`).
        layout: Layout of the region.
        max_blocks: Cap on the blocks, such as those that are resident at once; None for no cap.
    """
    blocks = -(-ngroups // layout.block_threads)
    return Grid(min(blocks, layout.nblocks, max_blocks or blocks), layout.block_threads)
