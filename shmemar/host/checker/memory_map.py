"""Which memory there is in a run of the checker, whose it is, and who may touch it.

An address is ``(rank + 1) << 48 | area << 32 | offset``: areas are far apart, so what misses one
hits none. An area of symmetric memory has the same number on all ranks. Without the rank it is a
multicast address, which stands for the same place on all of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from shmemar.host.checker.packet_log import PacketLog

__all__ = ["Area", "MemoryMap", "Rights", "Span", "rank_of"]

AREA_SHIFT, RANK_SHIFT = 32, 48
LOCATION_SHIFT = 3
ALIGNMENT = 256


@dataclass(frozen=True, eq=False)
class Area:
    """Memory of one rank.

    Attributes:
        name: What it is, for messages.
        rank: Whose it is.
        address: Where it begins.
        nbytes: How long it is.
        fill: What each 8 bytes hold at first.
        log: Who hears of its packets; None where there are none.
        zeroed_nbytes: How many bytes at its end hold zeros at first, and no packets.
    """

    name: str
    rank: int
    address: int
    nbytes: int
    fill: int = 0
    log: PacketLog | None = None
    zeroed_nbytes: int = 0

    def log_of(self, address: int) -> PacketLog | None:
        """Who hears of a packet at an address of the area."""
        return self.log if address < self.address + self.nbytes - self.zeroed_nbytes else None

    def initial(self, address: int) -> int:
        """What the 8 bytes at an address of the area hold at first."""
        return self.fill if address < self.address + self.nbytes - self.zeroed_nbytes else 0


class Span:
    """What a launch may do with an area.

    Attributes:
        area: The area.
        low: First address.
        high: The address behind the last one.
        may_load: True where it may load.
        may_store: True where it may store.
        is_shared: True where threads of other ranks, or others of this one, touch it too.
    """

    __slots__ = ("area", "high", "is_shared", "low", "may_load", "may_store")

    def __init__(self, area: Area, access: str, *, is_shared: bool = False) -> None:
        """Give access, of the letters r and w."""
        self.area = area
        self.low = area.address
        self.high = area.address + area.nbytes
        self.may_load = "r" in access
        self.may_store = "w" in access
        self.is_shared = is_shared


Rights: TypeAlias = Mapping[int, Span]
"""What a launch may touch, by the upper bits of addresses."""


def rank_of(location: int) -> int:
    """The rank whose memory a location is in."""
    return (location >> RANK_SHIFT - LOCATION_SHIFT) - 1


class MemoryMap:
    """All areas of a run."""

    def __init__(self, nranks: int) -> None:
        """Begin with none."""
        self._areas: dict[int, Area] = {}
        self._next = [1] * nranks

    def add(
        self,
        name: str,
        rank: int,
        nbytes: int,
        *,
        offset: int = 0,
        fill: int = 0,
        log: PacketLog | None = None,
        zeroed_nbytes: int = 0,
    ) -> Area:
        """Add an area of a rank, `offset` bytes behind a multiple of `ALIGNMENT`."""
        base = (rank + 1) << RANK_SHIFT | self._next[rank] << AREA_SHIFT
        self._next[rank] += 1
        area = Area(name, rank, base + ALIGNMENT + offset, nbytes, fill, log, zeroed_nbytes)
        self._areas[base >> AREA_SHIFT] = area
        return area

    @staticmethod
    def window(parts: list[Area]) -> int:
        """The multicast address of symmetric memory, of which a rank has a part each."""
        (address,) = {part.address % (1 << RANK_SHIFT) for part in parts}
        return address

    def copies(self, address: int) -> list[int]:
        """Addresses of what a multicast address stands for on each rank; none of another one."""
        if address >> RANK_SHIFT:
            return []
        return [rank + 1 << RANK_SHIFT | address for rank in range(len(self._next))]

    def at(self, address: int) -> Area | None:
        """The area that an address is in or beside; None of no area."""
        return self._areas.get(address >> AREA_SHIFT)

    def named(self, start: str, rank: int) -> list[Area]:
        """A rank's areas whose names start so."""
        areas = self._areas.values()
        return [area for area in areas if area.rank == rank and area.name.startswith(start)]

    def initial(self, location: int) -> int:
        """What a location holds at first."""
        area = self.at(location << LOCATION_SHIFT)
        return area.initial(location << LOCATION_SHIFT) if area is not None else 0

    def describe(self, address: int) -> str:
        """Say where an address is."""
        area = self.at(address)
        if area is None and self.copies(address):
            area = self.at(self.copies(address)[0])
            if area is not None:
                return (
                    f"all ranks' {area.name} + {address - area.address % (1 << RANK_SHIFT)} bytes"
                )
        if area is None:
            return f"{address:#x}, which is no memory"
        at = address - area.address
        log = area.log_of(address)
        if log is not None and 0 <= at < area.nbytes:
            return f"rank {area.rank}'s {area.name}, {log.describe(at)}"
        return f"rank {area.rank}'s {area.name} + {at} of {area.nbytes} bytes"

    @staticmethod
    def rights(spans: list[Span]) -> dict[int, Span]:
        """Collect what a launch may touch."""
        return {span.low >> AREA_SHIFT: span for span in spans}
