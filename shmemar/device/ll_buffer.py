"""LLBuffer: elements exchanged with every peer, without a barrier, in kernels that users write.

A kernel is a plain Python function ``kernel(ll, thread, nthreads, *arguments)``. Each thread has an
LLBuffer of its own, with `slots` places for an element from each peer. A thread's *epochs* are the
rounds of its exchange. This reduces an array over all ranks::

    def one_shot(ll, thread, nthreads, x, y):
        for i in range(thread, x.size, nthreads):
            ll.bcast(0, x[i])
            y[i] = ll.recv_reduce(0, x[i], lambda a, b: a + b)
            ll.advance_epoch()

Contract, for each thread and alike on all ranks:

* In every epoch it sends to every peer and receives from every peer, at least one element each way.
  An empty answer will do: it says that what was sent before has been read.
* Everything that it is sent in an epoch it receives before it advances, and a slot is sent to a
  peer at most once an epoch.
* The thread of the same number sends and receives on all ranks, and goes through the same number
  of epochs there. So loops are over what is equal on all ranks.
* An element has the same type on both sides, that of the buffer; values are converted to it.
* It receives each element once.
* The kernel raises nothing: it could not be heard on a GPU, and is refused where it is seen.
* The function is defined once, at the level of a module: it is compiled for each function that is
  launched, and kept, and what it captures is a constant of the code.

Not allowed, and not noticed: a second send to the same slot and peer in one epoch (the peer gets
either); an epoch that leaves out a peer (the peer's data of two epochs later may overwrite what was
not read); threads that differ in their number of epochs (they wait until the deadline); receiving
from a slot that was not sent to in this epoch, after 2**32 epochs without it (its old flag is right
again).

What is received is right or the communicator breaks: a thread that has waited longer than the
deadline receives zeros from then on, sends nothing more, and the host raises. A loop whose end
depends on what is received must therefore ask `is_alive` as well.

Packets, buffers, sentinels and why slots may be written again: :mod:`shmemar.device.packet_buffer`.
Slots are emptied as they are read, and the fence that three epochs or more in one kernel need with
sentinel packets stands before the first receive of each epoch but the first: behind its sends,
where they come first, as they should.

Source: the device API of NCCL's symmetric LL kernels (``ncclLLA2ASession``).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from shmemar.device.elements import (
    as_element,
    element_from_words,
    packet_array,
    part_array,
    ranks_at_once,
    words_from_element,
)
from shmemar.device.packet import next_epoch
from shmemar.device.registry import device, device_methods
from shmemar.device.words import opaque, u32, word_array
from shmemar.layout import WORDS_PER_PACKET

if TYPE_CHECKING:
    from collections.abc import Callable

    from shmemar.device.packet_buffer import PacketBuffer

__all__ = ["ALIVE", "EPOCH", "STATE_WORDS", "LLBuffer", "elements_of"]

EPOCH, ALIVE, USED, UNFENCED = range(4)
STATE_WORDS = 4
"""A thread's state: its epoch, 1 until it gave up, 1 once the epoch was used, 1 where slots were
emptied and no fence stood since."""

MAX_ELEMENT_WORDS = 2 * WORDS_PER_PACKET
"""Words of the most packets of an element."""

device(ranks_at_once)


@device_methods(
    "current_epoch",
    "is_alive",
    "send",
    "bcast",
    "recv",
    "recv_unrolled",
    "recv_reduce",
    "advance_epoch",
)
class LLBuffer(NamedTuple):
    """A thread's exchange of elements with its peers.

    Attributes:
        rank: The own rank.
        size: Number of ranks.
        packets: The region.
        like: An element, whose type counts.
        npackets: Packets that carry an element.
        pitch: Slots from one of a thread's packets to the next.
        thread: The thread.
        state: Word array of `STATE_WORDS`.
    """

    rank: int
    size: int
    packets: PacketBuffer
    like: Any
    npackets: int
    pitch: int
    thread: int
    state: list[int]

    def current_epoch(self) -> int:
        """Return the epoch of what is sent and received: not 0, and for the thread to compare."""
        return self.state[EPOCH]

    def is_alive(self) -> bool:
        """Return False once this thread has waited longer than the deadline."""
        return self.state[ALIVE] != u32(0)

    def send(self, peer: int, slot: int, value: Any) -> None:
        """Send an element to a slot of one peer: one remote store, two above 8 bytes with LL.

        Args:
            peer: Another rank.
            slot: Less than the buffer's slots.
            value: What is sent, converted to the buffer's type. With sentinel packets a NaN that
                equals the sentinel arrives as another NaN.
        """
        words = word_array(WORDS_PER_PACKET)
        _encode(self, value, words)
        if self.state[ALIVE] != u32(0):
            self.state[USED] = u32(1)
            here = self.packets.at_epoch(self.state[EPOCH])
            for p in range(self.npackets):
                here.send_packet(peer, _index(self, slot, p), words, 2 * p)

    def bcast(self, slot: int, value: Any) -> None:
        """Send an element to a slot of every peer, beginning with the rank after this one."""
        words = word_array(WORDS_PER_PACKET)
        _encode(self, value, words)
        if self.state[ALIVE] != u32(0):
            self.state[USED] = u32(1)
            here = self.packets.at_epoch(self.state[EPOCH])
            for p in range(self.npackets):
                here.bcast_packet(_index(self, slot, p), words, 2 * p)

    def recv(self, peer: int, slot: int) -> Any:
        """Wait for the element that a peer sent to a slot in this epoch, and return it.

        Once: with sentinel packets it is gone then. From the own rank there is none, and 0 is
        returned.
        """
        packets = word_array(MAX_ELEMENT_WORDS)
        if peer == self.rank or not _receive(self, slot, packets, peer, peer + 1):
            return _zero(self)
        return _element(self, packets, 0)

    def recv_unrolled(self, slot: int, own: Any) -> Any:
        """Wait for a slot's elements from all peers, in one round of polls.

        Args:
            slot: The slot.
            own: What stands in the place of the own rank.

        Returns:
            A tuple of `size` elements in rank order.
        """
        words = word_array(WORDS_PER_PACKET)
        _encode(self, own, words)
        packets = packet_array(self.packets.peers, self.like)
        if not _receive(self, slot, packets, 0, self.size):
            for word in range(self.size * _step(self)):
                packets[word] = u32(0)
        return elements_of(self, packets, words, self.packets.peers)

    def recv_reduce(self, slot: int, own: Any, combine: Callable[[Any, Any], Any]) -> Any:
        """Wait for a slot's elements from all peers, in one round of polls, and reduce them.

        Args:
            slot: The slot.
            own: The own element, which takes part as a peer receives it.
            combine: ``combine(left, right)``: a lambda or a device function. It is called in rank
                order on every rank, so all ranks get the same bits; of two NaNs of float64 either.

        Returns:
            ``combine(... combine(combine(v0, v1), v2) ..., vN-1)``.
        """
        words = word_array(WORDS_PER_PACKET)
        _encode(self, own, words)
        packets = part_array(self.packets.peers, self.like)
        part = ranks_at_once(self.size)
        total = _zero(self)
        for source in range(0, self.size, part):
            end = min(self.size, source + part)
            if not _receive(self, slot, packets, source, end):
                return _zero(self)
            for r in range(source, end):
                value = _element_of(self, r, packets, _step(self) * (r - source), words)
                total = as_element(combine(total, value), self.like) if r > 0 else value
        return total

    def advance_epoch(self) -> None:
        """Go on to the next epoch, once everything of this one was received.

        Nothing changes where nothing was exchanged. A kernel's end advances by itself.
        """
        if self.state[USED] != u32(0):
            self.state[EPOCH] = next_epoch(self.state[EPOCH])
            self.state[USED] = u32(0)
            self.state[UNFENCED] = u32(1)


@device
def _zero(ll: LLBuffer) -> Any:
    return element_from_words(u32(0), u32(0), u32(0), u32(0), ll.like)


@device
def _step(ll: LLBuffer) -> int:
    return WORDS_PER_PACKET * ll.npackets


@device
def _index(ll: LLBuffer, slot: int, p: int) -> int:
    # Neighbouring threads have neighbouring packets.
    return u32((slot * ll.npackets + p) * ll.pitch + ll.thread)


@device
def _encode(ll: LLBuffer, value: Any, words: list[int]) -> None:
    parts = words_from_element(value, ll.like)
    # What is made of the own element must be made as peers make it of what they receive: a compiler
    # that knows where it comes from may fuse a multiplication with an addition on one rank alone.
    for word in range(WORDS_PER_PACKET):
        words[word] = opaque(parts[word])
    ll.packets.encode(words, 0)


@device
def _receive(ll: LLBuffer, slot: int, packets: list[int], source: int, end: int) -> bool:
    if ll.state[ALIVE] == u32(0):
        return False
    if ll.state[UNFENCED] != u32(0):
        ll.packets.fence_resets()
        ll.state[UNFENCED] = u32(0)
    here = ll.packets.at_epoch(ll.state[EPOCH])
    for p in range(ll.npackets):
        index = _index(ll, slot, p)
        at = WORDS_PER_PACKET * p
        if not here.recv_packets(index, packets, at, _step(ll), source, end):
            ll.state[ALIVE] = u32(0)
            return False
        here.reset(index, source, end)
    return True


@device
def _element(ll: LLBuffer, packets: list[int], at: int) -> Any:
    first, second, third, fourth = packets[at], packets[at + 1], packets[at + 2], packets[at + 3]
    if ll.packets.machine_word_nbytes == 0:
        second, third, fourth = third, u32(0), u32(0)
        if ll.npackets > 1:
            third, fourth = packets[at + 4], packets[at + 6]
    return element_from_words(first, second, third, fourth, ll.like)


@device
def _element_of(ll: LLBuffer, r: int, packets: list[int], at: int, own: list[int]) -> Any:
    if r == ll.rank:
        return element_from_words(own[0], own[1], own[2], own[3], ll.like)
    return _element(ll, packets, at)


def elements_of(ll: LLBuffer, packets: list[int], own: list[int], rest: tuple[int, ...]) -> Any:
    """Make a tuple of the elements of the last ranks, as many as `rest` is long."""
    if not rest:
        return ()
    r = ll.size - len(rest)
    value = _element_of(ll, r, packets, _step(ll) * r, own)
    return (value, *elements_of(ll, packets, own, rest[1:]))
