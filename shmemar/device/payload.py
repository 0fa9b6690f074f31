"""Between a user's array and the data words of packets.

The array is a run of components of 4 or 8 bytes, aligned to their size. Packet k carries 8 bytes of
it from byte 8k on. Alignment of the array decides how the words are loaded and stored, never
which packet carries them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from shmemar.device.memory import ld_b32, ld_v2_b32, st_b32, st_v2_b32
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
        load: ``load(array, packet, ncomponents)`` returns the data words of a packet, zeros behind
            the end.
        store: ``store(array, packet, ncomponents, low, high)`` stores them, nothing behind the end.
    """

    load: Callable[[int, int, int], Payload]
    store: Callable[[int, int, int, int, int], None]


def payload_access(component_nbytes: int) -> PayloadAccess:
    """Return the access for components of 4 or 8 bytes."""
    if component_nbytes == WORD_NBYTES:
        return PayloadAccess(_load_4, _store_4)
    if component_nbytes == PAYLOAD_NBYTES:
        return PayloadAccess(_load_8, _store_8)
    raise ArgumentError(f"component_nbytes is {component_nbytes}; expected 4 or 8.")


@device
def _is_aligned(array: int) -> bool:
    return u64(array) & u64(PAYLOAD_NBYTES - 1) == u64(0)


@device
def _load_4(array: int, packet: int, ncomponents: int) -> Payload:
    address = array + u64(packet) * u64(PAYLOAD_NBYTES)
    if 2 * packet + 1 < ncomponents:
        if _is_aligned(array):
            return ld_v2_b32(address)
        return ld_b32(address), ld_b32(address + u64(WORD_NBYTES))
    return ld_b32(address), u32(0)


@device
def _store_4(array: int, packet: int, ncomponents: int, low: int, high: int) -> None:
    address = array + u64(packet) * u64(PAYLOAD_NBYTES)
    whole = 2 * packet + 1 < ncomponents
    if whole and _is_aligned(array):
        st_v2_b32(address, low, high)
    else:
        st_b32(address, low)
        if whole:
            st_b32(address + u64(WORD_NBYTES), high)


@device
def _load_8(array: int, packet: int, ncomponents: int) -> Payload:
    return ld_v2_b32(array + u64(packet) * u64(PAYLOAD_NBYTES))


@device
def _store_8(array: int, packet: int, ncomponents: int, low: int, high: int) -> None:
    st_v2_b32(array + u64(packet) * u64(PAYLOAD_NBYTES), low, high)
