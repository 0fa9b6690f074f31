"""PacketBuffer: exchange packets with every peer, without a barrier.

Contract, for whoever writes a kernel with it:

* One store for each (peer, slot, epoch). The thread that owns a slot is the only one on its rank
  that writes it, and the same slot is used for the same data on every rank.
* Every epoch of a slot is exchanged with every peer, both ways, before the epoch advances.
* The epoch starts from the slot's epoch word, and is written back when the kernel is done with it.
* With sentinel packets, what was received is emptied with `reset` before the epoch advances; and
  where a kernel makes three exchanges or more, `fence_resets` stands behind the sends of each but
  the first and the last.

Why a slot may be written again. LL: epoch e lies in buffer e mod 2, and a thread writes epoch e + 2
only after it has received every peer's e + 1, which the peer's thread sent after it had read all of
e. Sentinel: epoch e lies in buffer e mod 3, and a thread writes e + 3 only after it has received
every peer's e + 2, which the peer's thread sent after it had emptied e and, with the fence or the
end of a kernel between, made that visible.

With multicast `bcast_packet` stores a packet to all ranks by one address. That also stores it to
the own region, in the place of the own rank, which nobody polls, empties or gives another use: it
is left as it is. Reuse is argued as above, for each peer's copy of a slot by itself. A packet's
flag or words of data come in the 8 bytes that they vouch for, so a packet needs no order with
another one and LL ones no fence. A reset and the packet that comes after it are stores by two
addresses of the same memory, of which PTX keeps the order only behind an alias fence, so
`fence_resets` has one.
"""

from __future__ import annotations

from typing import NamedTuple

from shmemar.device.memory import (
    fence_acq_rel_gpu,
    fence_proxy_alias,
    globaltimer_ns,
    ld_relaxed_sys_v4_b32,
    multimem_st_relaxed_sys_two_b64,
    relax,
    st_relaxed_sys_v4_b32,
)
from shmemar.device.packet import SENTINEL, TWIN
from shmemar.device.registry import device, device_methods
from shmemar.device.watchdog import POLLS_PER_LOOK, Watchdog, report, should_give_up
from shmemar.device.words import u32, u64
from shmemar.layout import WORDS_PER_PACKET, packet_offset

__all__ = ["PacketBuffer", "fence_aliases", "send_to_all"]


@device_methods(
    "at_epoch",
    "encode",
    "send_packet",
    "send_packet_to",
    "bcast_packet",
    "fence_resets",
    "recv_packets",
    "reset",
)
class PacketBuffer(NamedTuple):
    """A thread's view of the region, at one epoch. Immutable: ``ll = ll.at_epoch(epoch)``.

    Attributes:
        peers: Address of the region on each rank, in rank order, the own one included.
        rank: The own rank.
        pitch_nbytes: Bytes between the packets of two sources.
        buffer_nbytes: Bytes between two buffers.
        machine_word_nbytes: 0 for LL packets; for sentinel ones the width of the words that are
            compared, 4 or 8: 8 where components have 8 bytes. A constant of the kernel's code.
        epoch: Epoch of what is sent and received.
        watchdog: Deadline of the polls.
        window: The region's multicast address, alone; or nothing. Its type, so how many it holds,
            decides which code there is.
    """

    peers: tuple[int, ...]
    rank: int
    pitch_nbytes: int
    buffer_nbytes: int
    machine_word_nbytes: int
    epoch: int
    watchdog: Watchdog
    window: tuple[int, ...] = ()

    def at_epoch(self, epoch: int) -> PacketBuffer:
        """Return the buffer at another epoch."""
        return PacketBuffer(
            self.peers,
            self.rank,
            self.pitch_nbytes,
            self.buffer_nbytes,
            self.machine_word_nbytes,
            epoch,
            self.watchdog,
            self.window,
        )

    def encode(self, words: list[int], at: int) -> None:
        """Put the twin in the place of what equals the sentinel, in a packet's data words.

        `send_packet` wants words that were encoded, and so does whoever reduces the own data beside
        what peers were sent. With LL packets nothing changes.
        """
        if self.machine_word_nbytes == 4:
            for word in range(at, at + 4):
                if words[word] == u32(SENTINEL):
                    words[word] = u32(TWIN)
        elif self.machine_word_nbytes == 8:
            for word in range(at, at + 4, 2):
                if (words[word] == u32(SENTINEL)) & (words[word + 1] == u32(SENTINEL)):
                    words[word] = u32(TWIN)

    def send_packet(self, peer: int, slot: int, words: list[int], at: int) -> None:
        """Send a packet's data words, from ``words[at]`` on, to `slot` of `peer`: one store.

        Two words with LL packets, four with sentinel ones.
        """
        self.send_packet_to(self.peers[peer], slot, words, at)

    def send_packet_to(self, region: int, slot: int, words: list[int], at: int) -> None:
        """Send a packet to the peer whose region is at the address `region`."""
        address = _packet_address(self, region, self.rank, slot)
        if self.machine_word_nbytes == 0:
            epoch = self.epoch
            st_relaxed_sys_v4_b32(address, words[at], epoch, words[at + 1], epoch)
        else:
            st_relaxed_sys_v4_b32(address, words[at], words[at + 1], words[at + 2], words[at + 3])

    def bcast_packet(self, slot: int, words: list[int], at: int) -> None:
        """Send a packet to `slot` of every peer, beginning with the rank after this one.

        With multicast to all at once, by two stores of 8 bytes.
        """
        send_to_all(self.window, self, slot, words, at)

    def fence_resets(self) -> None:
        """Make the resets before it visible to peers before the sends behind it."""
        if self.machine_word_nbytes != 0:
            fence_acq_rel_gpu()
            fence_aliases(self.window)

    def recv_packets(
        self, slot: int, packets: list[int], at: int, step: int, source: int, end: int
    ) -> bool:
        """Receive `slot` from the ranks `source` to ``end - 1``, but the own one.

        The packets of all of them are loaded before any is judged, so that one round trip to L2
        serves them all. Each takes four registers: beyond a dozen or so, receive in parts. There is
        nothing to receive from ranks beyond the last one.

        Args:
            slot: The slot.
            packets: Word array; the packet of rank r goes to the four words from
                ``at + step * (r - source)`` on, {data, flag, data, flag} or four of data. Those of
                the own rank are left alone.
            at: Word of the first packet.
            step: Words between the packets of two ranks.
            source: The first rank.
            end: The rank behind the last one. How many they are is a constant of the kernel's code.

        Returns:
            True when all have arrived; False when the deadline passed, on this call or before it.
        """
        polls = u32(0)
        since_ns = u64(0)
        while True:
            for peer in range(source, end):
                if _is_peer(self, peer):
                    address = _packet_address(self, self.peers[self.rank], peer, slot)
                    packet = ld_relaxed_sys_v4_b32(address)
                    for word in range(WORDS_PER_PACKET):
                        packets[at + step * (peer - source) + word] = packet[word]
            if _all_arrived(self, packets, at, step, source, end):
                return True
            polls = u32(polls + u32(1))
            if polls & u32(POLLS_PER_LOOK - 1) == u32(0):
                if since_ns == u64(0):
                    since_ns = globaltimer_ns()
                if should_give_up(self.watchdog, since_ns):
                    _report_missing(self, slot, packets, at, step, source, end)
                    return False
            relax()

    def reset(self, slot: int, source: int, end: int) -> None:
        """Empty `slot` of what the ranks `source` to ``end - 1`` sent. LL packets need it not."""
        if self.machine_word_nbytes != 0:
            empty = u32(SENTINEL)
            for peer in range(source, end):
                if _is_peer(self, peer):
                    address = _packet_address(self, self.peers[self.rank], peer, slot)
                    st_relaxed_sys_v4_b32(address, empty, empty, empty, empty)


device(packet_offset)


def send_to_all(
    window: tuple[int, ...], ll: PacketBuffer, slot: int, words: list[int], at: int
) -> None:
    """Send a packet to every peer, by the multicast address where there is one."""
    (send_by_window if window else send_to_each)(window, ll, slot, words, at)


def fence_aliases(window: tuple[int, ...]) -> None:
    """Order accesses by the multicast address against others, where there is one."""
    if window:
        fence_proxy_alias()


@device
def send_to_each(
    window: tuple[int, ...], ll: PacketBuffer, slot: int, words: list[int], at: int
) -> None:
    """Send a packet to one peer after another."""
    for distance in range(1, len(ll.peers)):
        ll.send_packet(_rank_after(ll, distance), slot, words, at)


@device
def send_by_window(
    window: tuple[int, ...], ll: PacketBuffer, slot: int, words: list[int], at: int
) -> None:
    """Send a packet to all ranks by one address."""
    address = _packet_address(ll, window[0], ll.rank, slot)
    if ll.machine_word_nbytes == 0:
        epoch = ll.epoch
        multimem_st_relaxed_sys_two_b64(address, words[at], epoch, words[at + 1], epoch)
    else:
        multimem_st_relaxed_sys_two_b64(
            address, words[at], words[at + 1], words[at + 2], words[at + 3]
        )


@device
def _rank_after(ll: PacketBuffer, distance: int) -> int:
    rank = ll.rank + distance
    return rank if rank < len(ll.peers) else rank - len(ll.peers)


@device
def _is_peer(ll: PacketBuffer, rank: int) -> bool:
    return rank != ll.rank and rank < len(ll.peers)


@device
def _packet_address(ll: PacketBuffer, region: int, source: int, slot: int) -> int:
    nbuffers = 2 if ll.machine_word_nbytes == 0 else 3
    offset = packet_offset(ll.epoch, source, slot, ll.pitch_nbytes, ll.buffer_nbytes, nbuffers)
    return region + u64(offset)


@device
def _arrived(ll: PacketBuffer, packets: list[int], at: int) -> bool:
    empty = u32(SENTINEL)
    if ll.machine_word_nbytes == 0:
        return (packets[at + 1] == ll.epoch) & (packets[at + 3] == ll.epoch)
    if ll.machine_word_nbytes == 4:
        low = (packets[at] != empty) & (packets[at + 1] != empty)
        return low & (packets[at + 2] != empty) & (packets[at + 3] != empty)
    low = (packets[at] != empty) | (packets[at + 1] != empty)
    return low & ((packets[at + 2] != empty) | (packets[at + 3] != empty))


@device
def _all_arrived(
    ll: PacketBuffer, packets: list[int], at: int, step: int, source: int, end: int
) -> bool:
    arrived = True
    for peer in range(source, end):
        if _is_peer(ll, peer):
            arrived = arrived & _arrived(ll, packets, at + step * (peer - source))
    return arrived


@device
def _report_missing(
    ll: PacketBuffer, slot: int, packets: list[int], at: int, step: int, source: int, end: int
) -> None:
    missing = u64(0)
    first = ll.rank
    seen = u32(0)
    for peer in range(end - 1, source - 1, -1):
        here = at + step * (peer - source)
        if _is_peer(ll, peer) and not _arrived(ll, packets, here):
            missing = missing | (u64(1) << u64(peer))
            first = peer
            if ll.machine_word_nbytes != 0:
                seen = u32(SENTINEL)
            else:
                seen = packets[here + 1] if packets[here + 1] != ll.epoch else packets[here + 3]
    report(ll.watchdog, first, missing, slot, ll.epoch, ll.epoch, seen)
