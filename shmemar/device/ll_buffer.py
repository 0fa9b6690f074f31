"""LLBuffer: exchange 8 bytes with every peer, without a barrier and without a fence.

Contract, for whoever writes a kernel with it:

* One store for each (peer, slot, epoch). The thread that owns a slot is the only one on its rank
  that writes it, and the same slot is used for the same data on every rank.
* Every epoch of a slot is exchanged with every peer, both ways, before the epoch advances.
* The epoch starts from the slot's epoch word, and is written back when the kernel is done with it.

Why a slot may be written again: epoch e lies in half e & 1, and a thread writes epoch e + 2 only
after it has received every peer's e + 1, which the peer's thread sent after it had read all of e.
"""

from __future__ import annotations

from typing import NamedTuple

from shmemar.device.memory import globaltimer_ns, ld_relaxed_sys_v4_b32, relax
from shmemar.device.packet import next_epoch, st_packet
from shmemar.device.registry import device, device_methods
from shmemar.device.watchdog import POLLS_PER_LOOK, Watchdog, report, should_give_up
from shmemar.device.words import u32, u64
from shmemar.layout import WORDS_PER_PACKET, packet_offset

__all__ = ["LLBuffer"]


@device_methods("advance_epoch", "send", "bcast", "recv_unrolled")
class LLBuffer(NamedTuple):
    """A thread's view of the region, at one epoch. Immutable: ``ll = ll.advance_epoch()``.

    Attributes:
        peers: Address of the region on each rank, in rank order, the own one included.
        rank: The own rank.
        pitch_nbytes: Bytes between the packets of two sources.
        half_nbytes: Bytes between the two halves.
        epoch: Epoch of what is sent and received.
        watchdog: Deadline of the polls.
    """

    peers: tuple[int, ...]
    rank: int
    pitch_nbytes: int
    half_nbytes: int
    epoch: int
    watchdog: Watchdog

    def advance_epoch(self) -> LLBuffer:
        """Return the buffer at the next epoch."""
        return LLBuffer(
            self.peers,
            self.rank,
            self.pitch_nbytes,
            self.half_nbytes,
            next_epoch(self.epoch),
            self.watchdog,
        )

    def send(self, peer: int, slot: int, low: int, high: int) -> None:
        """Send two data words to `slot` of `peer`: one 16-byte store."""
        st_packet(
            _packet_address(self, peer, self.rank, slot),
            low,
            high,
            self.epoch,
        )

    def bcast(self, slot: int, low: int, high: int) -> None:
        """Send two data words to `slot` of every peer, beginning with the rank after this one."""
        for step in range(1, len(self.peers)):
            self.send(_rank_after(self, step), slot, low, high)

    def recv_unrolled(self, slot: int, packets: list[int], first: int, step: int) -> bool:
        """Receive `slot` from every peer.

        The packets of all peers are loaded before any flag is judged, so that one round trip to L2
        serves them all.

        Args:
            slot: The slot.
            packets: Word array; the packet of rank r goes to words ``first + step * r`` and on,
                as {low, flag, high, flag}. Those of the own rank are left alone.
            first: Word of rank 0's packet.
            step: Words between the packets of two ranks.

        Returns:
            True when all have arrived; False when the deadline passed, on this call or before it.
        """
        polls = u32(0)
        since_ns = u64(0)
        while True:
            for distance in range(1, len(self.peers)):
                source = _rank_after(self, distance)
                packet = ld_relaxed_sys_v4_b32(_packet_address(self, self.rank, source, slot))
                for word in range(WORDS_PER_PACKET):
                    packets[first + step * source + word] = packet[word]
            if _all_arrived(self, packets, first, step):
                return True
            polls = u32(polls + u32(1))
            if polls & u32(POLLS_PER_LOOK - 1) == u32(0):
                if since_ns == u64(0):
                    since_ns = globaltimer_ns()
                if should_give_up(self.watchdog, since_ns):
                    _report_missing(self, slot, packets, first, step)
                    return False
            relax()


device(packet_offset)


@device
def _rank_after(ll: LLBuffer, distance: int) -> int:
    rank = ll.rank + distance
    return rank if rank < len(ll.peers) else rank - len(ll.peers)


@device
def _packet_address(ll: LLBuffer, owner: int, source: int, slot: int) -> int:
    offset = packet_offset(ll.epoch, source, slot, ll.pitch_nbytes, ll.half_nbytes)
    return ll.peers[owner] + u64(offset)


@device
def _arrived(packets: list[int], at: int, epoch: int) -> bool:
    return (packets[at + 1] == epoch) & (packets[at + 3] == epoch)


@device
def _all_arrived(ll: LLBuffer, packets: list[int], first: int, step: int) -> bool:
    arrived = True
    for distance in range(1, len(ll.peers)):
        source = _rank_after(ll, distance)
        arrived = arrived & _arrived(packets, first + step * source, ll.epoch)
    return arrived


@device
def _report_missing(ll: LLBuffer, slot: int, packets: list[int], first: int, step: int) -> None:
    missing = u64(0)
    peer = ll.rank
    seen = u32(0)
    for distance in range(len(ll.peers) - 1, 0, -1):
        source = _rank_after(ll, distance)
        at = first + step * source
        if not _arrived(packets, at, ll.epoch):
            missing = missing | (u64(1) << u64(source))
            peer = source
            seen = packets[at + 1] if packets[at + 1] != ll.epoch else packets[at + 3]
    report(ll.watchdog, peer, missing, slot, ll.epoch, ll.epoch, seen)
