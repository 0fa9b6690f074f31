"""Between a user's array and the data words of packets.

The array is a run of components of 1, 2, 4 or 8 bytes, aligned to their size. Packet k carries the
words of it from word ``nwords * k`` on, where ``nwords`` is 2 with LL packets and 4 with sentinel
ones. Alignment of the array decides how the words are loaded and stored, never which packet carries
them: the first `nvectors` packets move by one access (:func:`shmemar.layout.vector_packets`), the
others component by component.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, NamedTuple

from shmemar.device.memory import (
    ld_b8,
    ld_b16,
    ld_b32,
    ld_no_allocate_v2_b32,
    ld_no_allocate_v4_b32,
    st_b8,
    st_b16,
    st_b32,
    st_v2_b32,
    st_v4_b32,
)
from shmemar.device.registry import device
from shmemar.device.words import u32, u64
from shmemar.errors import ArgumentError
from shmemar.layout import WORD_NBYTES

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["PayloadAccess", "payload_access"]


class PayloadAccess(NamedTuple):
    """Device functions for one width of component and one size of packet.

    Attributes:
        load: ``load(words, at, array, packet, nvectors, ncomponents)`` loads the data words of a
            packet to ``words[at]`` and on, zeros behind the end.
        store: ``store(words, at, array, packet, nvectors, ncomponents)`` stores them, nothing
            behind the end.
    """

    load: Callable[[list[int], int, int, int, int, int], None]
    store: Callable[[list[int], int, int, int, int, int], None]


@cache
def payload_access(component_nbytes: int, nwords: int) -> PayloadAccess:
    """Return the access for components of 1, 2, 4 or 8 bytes and packets of 2 or 4 data words."""
    if component_nbytes not in _WORD_ACCESS:
        raise ArgumentError(f"component_nbytes is {component_nbytes}; expected 1, 2, 4 or 8.")
    if nwords not in _VECTOR_ACCESS:
        raise ArgumentError(f"nwords is {nwords}; expected 2 or 4.")
    NWORDS, NBYTES = nwords, nwords * WORD_NBYTES
    # An array of 8-byte components is aligned to a packet of 8 bytes.
    ALWAYS = component_nbytes == NBYTES
    load_vector, store_vector = _VECTOR_ACCESS[nwords]
    load_word, store_word, STEP = _WORD_ACCESS[component_nbytes]

    @device
    def load(
        words: list[int], at: int, array: int, packet: int, nvectors: int, ncomponents: int
    ) -> None:
        if ALWAYS or packet < u32(nvectors):
            load_vector(words, at, array + u64(packet) * u64(NBYTES))
        else:
            for word in range(0, NWORDS, STEP):
                load_word(
                    words, at + word, array, u64(packet) * u64(NWORDS) + u64(word), ncomponents
                )

    @device
    def store(
        words: list[int], at: int, array: int, packet: int, nvectors: int, ncomponents: int
    ) -> None:
        if ALWAYS or packet < u32(nvectors):
            store_vector(words, at, array + u64(packet) * u64(NBYTES))
        else:
            for word in range(0, NWORDS, STEP):
                store_word(
                    words, at + word, array, u64(packet) * u64(NWORDS) + u64(word), ncomponents
                )

    return PayloadAccess(load, store)


@device
def _load_v2(words: list[int], at: int, address: int) -> None:
    words[at], words[at + 1] = ld_no_allocate_v2_b32(address)


@device
def _load_v4(words: list[int], at: int, address: int) -> None:
    words[at], words[at + 1], words[at + 2], words[at + 3] = ld_no_allocate_v4_b32(address)


@device
def _store_v2(words: list[int], at: int, address: int) -> None:
    st_v2_b32(address, words[at], words[at + 1])


@device
def _store_v4(words: list[int], at: int, address: int) -> None:
    st_v4_b32(address, words[at], words[at + 1], words[at + 2], words[at + 3])


# Word `index` of the array to or from words[at]; of 8-byte components that word and the next.


@device
def _load_word_of_1(words: list[int], at: int, array: int, index: int, ncomponents: int) -> None:
    word = u32(0)
    for part in range(4):
        component = u64(index * u64(4) + u64(part))
        if component < ncomponents:
            word = u32(word | u32(ld_b8(array + component) << u32(8 * part)))
    words[at] = word


@device
def _store_word_of_1(words: list[int], at: int, array: int, index: int, ncomponents: int) -> None:
    for part in range(4):
        component = u64(index * u64(4) + u64(part))
        if component < ncomponents:
            st_b8(array + component, u32(words[at] >> u32(8 * part)))


@device
def _load_word_of_2(words: list[int], at: int, array: int, index: int, ncomponents: int) -> None:
    word = u32(0)
    for part in range(2):
        component = u64(index * u64(2) + u64(part))
        if component < ncomponents:
            word = u32(word | u32(ld_b16(array + component * u64(2)) << u32(16 * part)))
    words[at] = word


@device
def _store_word_of_2(words: list[int], at: int, array: int, index: int, ncomponents: int) -> None:
    for part in range(2):
        component = u64(index * u64(2) + u64(part))
        if component < ncomponents:
            st_b16(array + component * u64(2), u32(words[at] >> u32(16 * part)))


@device
def _load_word_of_4(words: list[int], at: int, array: int, index: int, ncomponents: int) -> None:
    words[at] = ld_b32(array + index * u64(WORD_NBYTES)) if index < ncomponents else u32(0)


@device
def _store_word_of_4(words: list[int], at: int, array: int, index: int, ncomponents: int) -> None:
    if index < ncomponents:
        st_b32(array + index * u64(WORD_NBYTES), words[at])


@device
def _load_words_of_8(words: list[int], at: int, array: int, index: int, ncomponents: int) -> None:
    if index < ncomponents * u64(2):
        words[at], words[at + 1] = ld_no_allocate_v2_b32(array + index * u64(WORD_NBYTES))
    else:
        words[at], words[at + 1] = u32(0), u32(0)


@device
def _store_words_of_8(words: list[int], at: int, array: int, index: int, ncomponents: int) -> None:
    if index < ncomponents * u64(2):
        st_v2_b32(array + index * u64(WORD_NBYTES), words[at], words[at + 1])


_VECTOR_ACCESS = {2: (_load_v2, _store_v2), 4: (_load_v4, _store_v4)}
_WORD_ACCESS = {
    1: (_load_word_of_1, _store_word_of_1, 1),
    2: (_load_word_of_2, _store_word_of_2, 1),
    4: (_load_word_of_4, _store_word_of_4, 1),
    8: (_load_words_of_8, _store_words_of_8, 2),
}
