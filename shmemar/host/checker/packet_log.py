"""What became of each packet: who sent it in which epoch, and whether it was read in time.

Read means loaded by the rank that it was sent to, at least once: whether that poll succeeded, or
was made again because another packet was missing, is not followed.

An epoch is told by the flag of an LL packet, and of sentinel packets by the buffer, which changes
from one epoch to the next. Slots that share an epoch are a *lane*: of the kernels here each slot is
one, and with an LLBuffer all slots of a thread are.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING

from shmemar.device.packet import SENTINEL
from shmemar.host.checker.verdict import ProtocolError, Verdict
from shmemar.layout import PACKET_NBYTES, SENTINEL_BUFFERS

if TYPE_CHECKING:
    from shmemar.host.checker.messages import Message, Store
    from shmemar.layout import LLLayout

__all__ = ["RESET", "Packet", "PacketLog"]

EMPTY = SENTINEL << 32 | SENTINEL


@dataclass(eq=False)
class Packet:
    """A packet on its way.

    Attributes:
        log: Of the region.
        source: The rank that sent it.
        target: The rank that it was sent to.
        buffer: The buffer that it lies in.
        slot: The slot.
        epoch: What tells its epoch.
        halves: Halves that were read.
    """

    log: PacketLog
    source: int
    target: int
    buffer: int
    slot: int
    epoch: int
    halves: int = 0

    def __str__(self) -> str:
        """Who sent it where."""
        epoch = f"epoch {self.epoch}" if not self.log.is_sentinel else f"buffer {self.buffer}"
        return f"the packet of {epoch} from rank {self.source} in slot {self.slot}"


RESET = "an emptying of the slot"
"""In the place of a packet."""


class _Epochs:
    """How many epochs a lane went through with a peer, one way."""

    __slots__ = ("count", "last")

    def __init__(self) -> None:
        self.count = 0
        self.last = -1

    def add(self, epoch: int) -> None:
        if epoch != self.last:
            self.last = epoch
            self.count += 1


class PacketLog:
    """Follows the packets of a region on all ranks.

    Attributes:
        name: Kernel and protocol that it is for.
        layout: Its layout.
        is_sentinel: True of sentinel packets.
    """

    def __init__(self, name: str, layout: LLLayout, lanes: int | None = None) -> None:
        """Begin.

        Args:
            name: For messages.
            layout: The region's.
            lanes: Slots from one slot of a lane to its next; by default each slot is a lane.
        """
        self.name = name
        self.layout = layout
        self.is_sentinel = layout.nbuffers == SENTINEL_BUFFERS
        self._lanes = lanes or layout.nslots
        self._last: dict[tuple[int, int, int], int] = {}
        self._sent: defaultdict[tuple[int, int, int], _Epochs] = defaultdict(_Epochs)
        self._taken: defaultdict[tuple[int, int, int], _Epochs] = defaultdict(_Epochs)
        self._touched: defaultdict[int, set[int]] = defaultdict(set)

    def place(self, at: int) -> tuple[int, int, int, int]:
        """Buffer, source, slot and byte of a byte of the region."""
        buffer, rest = divmod(at, self.layout.buffer_nbytes)
        source, rest = divmod(rest, self.layout.pitch_nbytes)
        slot, byte = divmod(rest, PACKET_NBYTES)
        return buffer, source, slot, byte

    def describe(self, at: int) -> str:
        """Say which packet a byte of the region is in."""
        buffer, source, slot, byte = self.place(at)
        where = f"buffer {buffer}, from rank {source}, slot {slot}"
        return f"{where} + {byte} bytes" if byte else where

    def store(self, rank: int, owner: int, at: int, words: tuple[int, ...]) -> Packet | str:
        """Hear of a rank's store to the region of `owner`.

        Raises:
            ProtocolError: It is not the rank's place, or the slot's second packet of an epoch.
        """
        buffer, source, slot, byte = self.place(at)
        is_whole = len(words) * 4 == PACKET_NBYTES and byte == 0
        if rank == owner:
            if source == rank or not self.is_sentinel or not is_whole or set(words) != {SENTINEL}:
                raise ProtocolError(
                    Verdict.OUTSIDE,
                    f"rank {rank} stored {_hex(words)} to its own region of {self.name}, "
                    f"{self.describe(at)}; expected sentinels, where a peer sends sentinel "
                    "packets, and nothing else.",
                    rank,
                )
            return RESET
        if source != rank or not is_whole:
            raise ProtocolError(
                Verdict.OUTSIDE,
                f"rank {rank} stored {_hex(words)} to rank {owner}'s region of {self.name}, "
                f"{self.describe(at)}; expected a whole packet, in a place for rank {rank}.",
                rank,
                owner,
            )
        epoch = buffer if self.is_sentinel else words[1]
        packet = Packet(self, rank, owner, buffer, slot, epoch)
        key = rank, owner, slot
        if self._last.get(key) == epoch:
            raise ProtocolError(
                Verdict.WRITTEN_TWICE,
                f"rank {rank} sent {packet} of {self.name} to rank {owner}, and sent another one "
                "there in that epoch; expected one.",
                rank,
                owner,
            )
        self._last[key] = epoch
        lane = slot % self._lanes
        self._touched[rank].add(lane)
        self._sent[rank, lane, owner].add(epoch)
        return packet

    def store_to_all(
        self, rank: int, owner: int, at: int, words: tuple[int, ...]
    ) -> Packet | str | None:
        """Hear of a rank's store to the region of `owner` by a multicast address.

        Its own region is one of those that it stores to, where nobody looks at the packet.

        Raises:
            ProtocolError: As of `store`.
        """
        _, source, _, byte = self.place(at)
        is_whole = len(words) * 4 == PACKET_NBYTES and byte == 0
        if rank == owner == source and is_whole:
            return None
        return self.store(rank, owner, at, words)

    def performed(self, before: Message, store: Store) -> None:
        """Hear of a half that is performed on another one.

        Raises:
            ProtocolError: That one had not been read, or not been emptied.
        """
        lost, packet = before.packet, store.packet
        if isinstance(lost, Packet) and not before.was_read:
            raise ProtocolError(
                Verdict.REUSED,
                f"{packet} fell on {lost} of {self.name}, which rank {lost.target} had not read.",
                lost.source,
                lost.target,
            )
        if self.is_sentinel and isinstance(packet, Packet) and before.value != EMPTY:
            raise ProtocolError(
                Verdict.REUSED,
                f"{packet} of {self.name} fell on a slot of rank {packet.target} that was not "
                f"empty: it held {before.value:#x}.",
                packet.source,
                packet.target,
            )

    def read(self, packet: Packet) -> None:
        """Hear that the second half of a packet was read for the first time, or the first."""
        packet.halves += 1
        if packet.halves == 2:
            lane = packet.slot % self._lanes
            self._touched[packet.target].add(lane)
            self._taken[packet.target, lane, packet.source].add(packet.epoch)

    def end_launch(self, rank: int) -> None:
        """Hear that a launch of a rank has ended.

        Raises:
            ProtocolError: An epoch of it was not exchanged with every peer, both ways.
        """
        peers = [peer for peer in range(self.layout.nranks) if peer != rank]
        for lane in self._touched.pop(rank, ()):
            sent = [self._sent[rank, lane, peer].count for peer in peers]
            taken = [self._taken[rank, lane, peer].count for peer in peers]
            if len({*sent, *taken}) > 1:
                counts = ", ".join(
                    f"{s} to and {t} from rank {peer}"
                    for s, t, peer in zip(sent, taken, peers, strict=True)
                )
                raise ProtocolError(
                    Verdict.ONE_WAY,
                    f"lane {lane} of {self.name} on rank {rank} went through {counts}, in epochs; "
                    "expected the same number with every peer, both ways.",
                    rank,
                )


def _hex(words: tuple[int, ...]) -> str:
    return "(" + ", ".join(f"{word:#x}" for word in words) + ")"
