"""Arrays of users to the data words of packets and back: never a byte outside of the array."""

from __future__ import annotations

import struct

import pytest

from shmemar.device.interpreter import Order, running
from shmemar.device.payload import payload_access
from shmemar.errors import ArgumentError
from shmemar.layout import vector_packets
from tests.unit.machines import RefusingMachine

BASE = 0x1000

# Width of a component, and the address: of 8-byte components never misaligned.
PLACES = [(4, BASE), (4, BASE + 4), (8, BASE), (8, BASE + 8)]
places = pytest.mark.parametrize(("component_nbytes", "address"), PLACES)
counts = pytest.mark.parametrize("ncomponents", range(1, 8))


class _ArrayMachine(RefusingMachine):
    """Memory that is one array: everything else faults, and so does what is misaligned."""

    def __init__(self, address: int, words: list[int]) -> None:
        self.address = address
        self.words = words
        self.widths: list[int] = []

    def _index(self, address: int, nwords: int, order: Order) -> int:
        index, rest = divmod(address - self.address, 4)
        if rest or not 0 <= index <= len(self.words) - nwords:
            raise IndexError(f"{nwords} words at {address:#x} are outside of the array")
        if address % (4 * nwords):
            raise ValueError(f"{nwords} words at {address:#x} are misaligned")
        assert order is Order.WEAK
        self.widths.append(nwords)
        return index

    def load(self, address: int, nwords: int, order: Order) -> tuple[int, ...]:
        index = self._index(address, nwords, order)
        return tuple(self.words[index : index + nwords])

    def store(self, address: int, words: tuple[int, ...], order: Order) -> None:
        index = self._index(address, len(words), order)
        self.words[index : index + len(words)] = words


def numbered(component_nbytes: int, ncomponents: int) -> list[int]:
    return list(range(1, 1 + ncomponents * component_nbytes // 4))


@places
@counts
def test_packets_carry_the_array_and_zeros_behind_it(
    component_nbytes: int, address: int, ncomponents: int
) -> None:
    words = numbered(component_nbytes, ncomponents)
    load = payload_access(component_nbytes).load
    nvectors = vector_packets(address, ncomponents * component_nbytes)
    npackets = -(-len(words) // 2)
    with running(_ArrayMachine(address, words)):
        packets = [load(address, packet, nvectors, ncomponents) for packet in range(npackets)]
    padded = words + [0] * (len(words) % 2)
    assert packets == list(zip(padded[::2], padded[1::2], strict=True))


@places
@counts
def test_storing_packets_fills_the_array(
    component_nbytes: int, address: int, ncomponents: int
) -> None:
    words = numbered(component_nbytes, ncomponents)
    store = payload_access(component_nbytes).store
    machine = _ArrayMachine(address, [0] * len(words))
    nvectors = vector_packets(address, ncomponents * component_nbytes)
    with running(machine):
        for packet in range(-(-len(words) // 2)):
            store(address, packet, nvectors, ncomponents, 2 * packet + 1, 2 * packet + 2)
    assert machine.words == words


@pytest.mark.parametrize(
    ("component_nbytes", "address", "ncomponents", "packet", "widths"),
    [
        (4, BASE, 3, 0, [2]),
        (4, BASE, 3, 1, [1]),
        (4, BASE + 4, 3, 0, [1, 1]),
        (4, BASE + 4, 3, 1, [1]),
        (8, BASE + 8, 2, 1, [2]),
    ],
)
def test_8_bytes_are_taken_at_once_only_where_they_are_aligned_and_whole(
    component_nbytes: int, address: int, ncomponents: int, packet: int, widths: list[int]
) -> None:
    access = payload_access(component_nbytes)
    machine = _ArrayMachine(address, numbered(component_nbytes, ncomponents))
    nvectors = vector_packets(address, ncomponents * component_nbytes)
    with running(machine):
        access.load(address, packet, nvectors, ncomponents)
        access.store(address, packet, nvectors, ncomponents, 1, 2)
    assert machine.widths == widths * 2


def test_words_lie_in_memory_order() -> None:
    number = 0x1122334455667788
    low, high = struct.unpack("<II", struct.pack("<Q", number))
    with running(_ArrayMachine(BASE, [low, high])):
        assert payload_access(8).load(BASE, 0, 1, 1) == (0x55667788, 0x11223344)


@pytest.mark.parametrize("component_nbytes", [4, 8])
def test_the_machine_here_faults_behind_the_array(component_nbytes: int) -> None:
    access = payload_access(component_nbytes)
    with running(_ArrayMachine(BASE, [1, 2])):
        with pytest.raises(IndexError):
            access.load(BASE, 1, 2, 4)
        with pytest.raises(IndexError):
            access.store(BASE, 1, 2, 4, 3, 4)


def test_the_machine_here_faults_on_misaligned_pairs() -> None:
    with running(_ArrayMachine(BASE + 4, [1, 2])), pytest.raises(ValueError, match="misaligned"):
        payload_access(8).load(BASE + 4, 0, 1, 1)


@pytest.mark.parametrize("component_nbytes", [0, 2, 16])
def test_other_widths_are_refused(component_nbytes: int) -> None:
    with pytest.raises(ArgumentError, match=f"component_nbytes is {component_nbytes}; expected 4"):
        payload_access(component_nbytes)
