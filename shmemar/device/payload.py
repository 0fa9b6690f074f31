"""Between a user's array and the data words of packets.

The array is a run of components of 4 or 8 bytes, aligned to their size. Packet k carries 8 bytes of
it from byte 8k on. Alignment of the array decides how the words are loaded and stored, never
which packet carries them: the first `nvectors` packets move by one access of 8 bytes
(:func:`shmemar.layout.vector_packets`), the others component by component.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from shmemar.device.memory import ld_b32, ld_no_allocate_v2_b32, st_b32, st_v2_b32
from shmemar.device.registry import device
from shmemar.device.words import Payload, u32, u64
from shmemar.errors import ArgumentError
from shmemar.layout import PAYLOAD_NBYTES, WORD_NBYTES

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["PayloadAccess", "payload_access"]


class PayloadAccess(NamedTuple):
    """Device functions for one width of component.

    Attributes:
        load: ``load(array, packet, nvectors, ncomponents)`` returns the data words of a packet,
            zeros behind the end.
        store: ``store(array, packet, nvectors, ncomponents, low, high)`` stores them, nothing
            behind the end.
    """

    load: Callable[[int, int, int, int], Payload]
    store: Callable[[int, int, int, int, int, int], None]


def payload_access(component_nbytes: int) -> PayloadAccess:
    """Return the access for components of 4 or 8 bytes."""
    if component_nbytes == WORD_NBYTES:
        return PayloadAccess(_load_4, _store_4)
    if component_nbytes == PAYLOAD_NBYTES:
        return PayloadAccess(_load_8, _store_8)
    raise ArgumentError(f"component_nbytes is {component_nbytes}; expected 4 or 8.")


@device
def _load_4(array: int, packet: int, nvectors: int, ncomponents: int) -> Payload:
    address = array + u64(packet) * u64(PAYLOAD_NBYTES)
    if packet < u32(nvectors):
        return ld_no_allocate_v2_b32(address)
    if _is_whole(packet, ncomponents):
        return ld_b32(address), ld_b32(address + u64(WORD_NBYTES))
    return ld_b32(address), u32(0)


@device
def _store_4(array: int, packet: int, nvectors: int, ncomponents: int, low: int, high: int) -> None:
    address = array + u64(packet) * u64(PAYLOAD_NBYTES)
    if packet < u32(nvectors):
        st_v2_b32(address, low, high)
    else:
        st_b32(address, low)
        if _is_whole(packet, ncomponents):
            st_b32(address + u64(WORD_NBYTES), high)


@device
def _is_whole(packet: int, ncomponents: int) -> bool:
    return u64(packet) * u64(2) + u64(1) < ncomponents


@device
def _load_8(array: int, packet: int, nvectors: int, ncomponents: int) -> Payload:
    return ld_no_allocate_v2_b32(array + u64(packet) * u64(PAYLOAD_NBYTES))


@device
def _store_8(array: int, packet: int, nvectors: int, ncomponents: int, low: int, high: int) -> None:
    st_v2_b32(array + u64(packet) * u64(PAYLOAD_NBYTES), low, high)
