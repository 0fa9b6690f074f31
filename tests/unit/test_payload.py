"""Arrays of users to the data words of packets and back: never a byte outside of the array."""

from __future__ import annotations

import struct

import pytest

from shmemar.device.interpreter import Order, running
from shmemar.device.payload import payload_access
from shmemar.errors import ArgumentError
from shmemar.layout import packet_count, vector_packets
from tests.unit.machines import RefusingMachine

BASE = 0x1000

# Width of a component, and the address: of 8-byte components never misaligned.
PLACES = [
    *((1, BASE + offset) for offset in (0, 1, 2, 7, 8)),
    *((2, BASE + offset) for offset in (0, 2, 8)),
    *((4, BASE + offset) for offset in (0, 4, 8, 12)),
    *((8, BASE + offset) for offset in (0, 8)),
]
places = pytest.mark.parametrize(("component_nbytes", "address"), PLACES)
counts = pytest.mark.parametrize("ncomponents", [*range(1, 12), 16, 31, 32, 33])
widths = pytest.mark.parametrize("nwords", [2, 4])


class _ArrayMachine(RefusingMachine):
    """Memory that is one array: everything else faults, and so does what is misaligned."""

    def __init__(self, address: int, contents: bytes) -> None:
        self.address = address
        self.contents = bytearray(contents)
        self.widths: list[int] = []

    def load(self, address: int, nwords: int, order: Order) -> tuple[int, ...]:
        assert order is Order.WEAK
        part = self._slice(address, 4 * nwords)
        return struct.unpack(f"<{nwords}I", self.contents[part])

    def store(self, address: int, words: tuple[int, ...], order: Order) -> None:
        assert order is Order.WEAK
        self.contents[self._slice(address, 4 * len(words))] = struct.pack(f"<{len(words)}I", *words)

    def load_part(self, address: int, nbytes: int) -> int:
        return int.from_bytes(self.contents[self._slice(address, nbytes)], "little")

    def store_part(self, address: int, nbytes: int, value: int) -> None:
        self.contents[self._slice(address, nbytes)] = value.to_bytes(nbytes, "little")

    def _slice(self, address: int, nbytes: int) -> slice:
        start = address - self.address
        if not 0 <= start <= len(self.contents) - nbytes:
            raise IndexError(f"{nbytes} bytes at {address:#x} are outside of the array")
        if address % nbytes:
            raise ValueError(f"{nbytes} bytes at {address:#x} are misaligned")
        self.widths.append(nbytes)
        return slice(start, start + nbytes)


def numbered(nbytes: int) -> bytes:
    return bytes(1 + i % 255 for i in range(nbytes))


@places
@counts
@widths
def test_packets_carry_the_array_and_zeros_behind_it(
    component_nbytes: int, address: int, ncomponents: int, nwords: int
) -> None:
    contents = numbered(ncomponents * component_nbytes)
    load = payload_access(component_nbytes, nwords).load
    npackets = packet_count(len(contents), 4 * nwords)
    nvectors = vector_packets(address, len(contents), 4 * nwords)
    words = [0xBAD] * (npackets * nwords)
    with running(_ArrayMachine(address, contents)):
        for packet in range(npackets):
            load(words, nwords * packet, address, packet, nvectors, ncomponents)
    padded = contents.ljust(npackets * nwords * 4, b"\0")
    assert struct.pack(f"<{len(words)}I", *words) == padded


@places
@counts
@widths
def test_storing_packets_fills_the_array(
    component_nbytes: int, address: int, ncomponents: int, nwords: int
) -> None:
    contents = numbered(ncomponents * component_nbytes)
    store = payload_access(component_nbytes, nwords).store
    machine = _ArrayMachine(address, bytes(len(contents)))
    npackets = packet_count(len(contents), 4 * nwords)
    nvectors = vector_packets(address, len(contents), 4 * nwords)
    padded = contents.ljust(npackets * nwords * 4, b"\0")
    words = list(struct.unpack(f"<{npackets * nwords}I", padded))
    with running(machine):
        for packet in range(npackets):
            store(words, nwords * packet, address, packet, nvectors, ncomponents)
    assert machine.contents == contents


@pytest.mark.parametrize(
    ("component_nbytes", "address", "ncomponents", "packet", "nwords", "widths"),
    [
        (4, BASE, 3, 0, 2, [8]),
        (4, BASE, 3, 1, 2, [4]),
        (4, BASE + 4, 3, 0, 2, [4, 4]),
        (8, BASE + 8, 2, 1, 2, [8]),
        (8, BASE + 8, 2, 0, 4, [8, 8]),
        (8, BASE, 3, 0, 4, [16]),
        (8, BASE, 3, 1, 4, [8]),
        (2, BASE, 9, 0, 4, [16]),
        (2, BASE, 9, 1, 4, [2]),
        (1, BASE + 1, 3, 0, 2, [1, 1, 1]),
    ],
)
def test_a_payload_is_taken_at_once_only_where_it_is_aligned_and_whole(
    component_nbytes: int,
    address: int,
    ncomponents: int,
    packet: int,
    nwords: int,
    widths: list[int],
) -> None:
    access = payload_access(component_nbytes, nwords)
    machine = _ArrayMachine(address, numbered(ncomponents * component_nbytes))
    nvectors = vector_packets(address, len(machine.contents), 4 * nwords)
    words = [0] * nwords
    with running(machine):
        access.load(words, 0, address, packet, nvectors, ncomponents)
        access.store(words, 0, address, packet, nvectors, ncomponents)
    assert machine.widths == widths * 2


def test_words_lie_in_memory_order() -> None:
    words = [0, 0]
    with running(_ArrayMachine(BASE, struct.pack("<Q", 0x1122334455667788))):
        payload_access(8, 2).load(words, 0, BASE, 0, 1, 1)
    assert words == [0x55667788, 0x11223344]


@pytest.mark.parametrize("component_nbytes", [4, 8])
def test_the_machine_here_faults_behind_the_array(component_nbytes: int) -> None:
    access = payload_access(component_nbytes, 2)
    with running(_ArrayMachine(BASE, bytes(8))):
        with pytest.raises(IndexError):
            access.load([0, 0], 0, BASE, 1, 2, 4)
        with pytest.raises(IndexError):
            access.store([3, 4], 0, BASE, 1, 2, 4)


def test_the_machine_here_faults_on_misaligned_pairs() -> None:
    machine = _ArrayMachine(BASE + 4, bytes(8))
    with running(machine), pytest.raises(ValueError, match="misaligned"):
        payload_access(8, 2).load([0, 0], 0, BASE + 4, 0, 1, 1)


@pytest.mark.parametrize("component_nbytes", [0, 3, 16])
def test_other_widths_are_refused(component_nbytes: int) -> None:
    with pytest.raises(ArgumentError, match=f"component_nbytes is {component_nbytes}; expected 1"):
        payload_access(component_nbytes, 2)


@pytest.mark.parametrize("nwords", [0, 1, 3])
def test_other_packets_are_refused(nwords: int) -> None:
    with pytest.raises(ArgumentError, match=f"nwords is {nwords}; expected 2 or 4"):
        payload_access(4, nwords)
