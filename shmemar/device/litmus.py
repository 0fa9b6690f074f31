"""A litmus test of lines: do the 128 bytes that 8 lanes add by one instruction arrive at once?

:mod:`shmemar.device.ll128` rests on that, and PTX does not promise it. So the kernel here, launched
on all ranks at once, looks for what must not be. The ranks exchange a packet, so that they start
together; then, again and again:

1. Each warp adds to its own four lines on every rank, beginning with the next one: 1 to the first
   element of a line, the *count*, and a multiple to each other one, of float32 i + 1 to element i.
   So every element of a whole line is that many times its count, however many ranks have added, and
   in whatever order.
2. It reads its four lines on the own rank, and four lines that another warp adds to.

A reading is that of :mod:`shmemar.device.ll128`: the first lane of a line loads the count, the warp
meets, and all 8 lanes load their 16 bytes. An element that is *older* than the count seen before
must not be: the kernels would take it. An element that does not fit the count of the same load is
*torn*: that happens where a load is not served at once, and nothing relies on it. A reading of an
own line is *contested* when a peer has added to it since the one before, which is what a test of
simultaneous additions should see often.

Lines hold sums of whole numbers that their type has exactly, so there is a kernel for each type
(its instruction is another one), and a launch ends where these end; lines are cleared by a launch
of their own before the next. There are as many on each rank as the launch has threads for, 8 a
line.

The planted kernels break the rule: they add the count by one instruction, read, and then add the
rest by another. A litmus test that does not find that would find nothing.

Where threads run one after another nothing is added and nothing read: there a line is whole because
one thread adds all of it, the count last.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from shmemar.device.groups import all_in_warp, from_lane_before, share_work
from shmemar.device.memory import (
    ld_relaxed_sys_b32,
    ld_relaxed_sys_v4_b32,
    red_line_relaxed_sys_add_bf16x2,
    red_line_relaxed_sys_add_f16x2,
    red_line_relaxed_sys_add_f32,
    st_b32,
    st_v4_b32,
)
from shmemar.device.narrow import two_bf16_from_word
from shmemar.device.registry import device
from shmemar.device.words import (
    f32_from_word,
    two_f16_from_word,
    u32,
    u64,
    word_array,
    word_from_f32,
)
from shmemar.dtypes import DTYPES
from shmemar.layout import (
    LINE_LANES,
    LINE_NBYTES,
    PACKET_NBYTES,
    WARP_LINES,
    WORD_NBYTES,
    WORDS_PER_PACKET,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from shmemar.device.ll_buffer import LLBuffer

__all__ = [
    "CONTESTED",
    "COUNT",
    "ELEMENT",
    "FIELDS",
    "KERNELS",
    "LINE",
    "MAX_COUNTS",
    "OLDER",
    "OLDER_ACROSS",
    "PLANTED_KERNELS",
    "READINGS",
    "TORN",
    "VALUE",
    "WRITES",
]

NO_COUNT = 0xFFFFFFFF
"""Bits that no sum of whole numbers has."""

MAX_COUNTS = MappingProxyType(
    {"float32": (1 << 24) // (LINE_NBYTES // WORD_NBYTES), "float16": 1 << 11, "bfloat16": 1 << 8}
)
"""The highest count whose multiples a type has all exactly."""

WRITES, READINGS, CONTESTED, OLDER, OLDER_ACROSS, TORN, LINE, COUNT, ELEMENT, VALUE = range(10)
FIELDS = 10
"""Words that a thread reports: its additions and readings, of 16 bytes each; how many of these were
contested; how many had an element older than the count, in lines of its own warp and of another
one; how many did not fit the count of the same load; and of the first that was older the line, the
bits of the count that was seen, the element, and the bits of its value, both as float32."""


class _Type(NamedTuple):
    """One type's instruction, and how to read what it leaves.

    Attributes:
        add: Adds 16 bytes of a line.
        values: The elements of a word, as float32.
        times: How many times the count an element is, by its number.
        bits: The word of a thread's 16 bytes that is added, and its part that is the count.
    """

    add: Callable[..., None]
    values: Callable[[int], Any]
    times: Callable[[int], Any]
    bits: Callable[[int], Any]


@device
def _one_f32(word: int) -> Any:
    return (f32_from_word(word),)


@device
def _number(element: int) -> Any:
    return np.float32(u32(element + 1))


@device
def _once(element: int) -> Any:
    return np.float32(1)


@device
def _f32_bits(element: int) -> Any:
    return word_from_f32(np.float32(u32(element + 1))), u32(0xFFFFFFFF)


@device
def _f16_bits(element: int) -> Any:
    return u32(0x3C003C00), u32(0xFFFF)


@device
def _bf16_bits(element: int) -> Any:
    return u32(0x3F803F80), u32(0xFFFF)


_TYPES = {
    "float32": _Type(red_line_relaxed_sys_add_f32, _one_f32, _number, _f32_bits),
    "float16": _Type(red_line_relaxed_sys_add_f16x2, two_f16_from_word, _once, _f16_bits),
    "bfloat16": _Type(red_line_relaxed_sys_add_bf16x2, two_bf16_from_word, _once, _bf16_bits),
}


def _kernel(name: str, *, planted: bool) -> Callable[..., None]:
    # Templated arguments.
    PLANTED, PARTS = planted, WORD_NBYTES // DTYPES[name].itemsize
    add_16_bytes, values_of, times_of, bits_of = _TYPES[name]

    @device
    def add(ll: LLBuffer, lines: Any, at: int, words: list[int]) -> None:
        for step in range(1, ll.size + 1):
            address = u64(lines[(ll.rank + step) % ll.size]) + u64(at)
            add_16_bytes(address, words[0], words[1], words[2], words[3])

    @device
    def judge(line: int, lane: int, kind: int, count: Any, words: list[int], seen: Any) -> None:
        count_now = values_of(from_lane_before(words[0], lane))[0]
        is_older = False
        is_torn = False
        for word in range(WORDS_PER_PACKET):
            element = (lane * WORDS_PER_PACKET + word) * PARTS
            for value in values_of(words[word]):
                times = times_of(element)
                if value < times * count:
                    if not is_older and seen[OLDER] == u32(0) and seen[OLDER_ACROSS] == u32(0):
                        seen[LINE] = u32(line)
                        seen[COUNT] = word_from_f32(count)
                        seen[ELEMENT] = u32(element)
                        seen[VALUE] = word_from_f32(value)
                    is_older = True
                if value != times * count_now:
                    is_torn = True
                element += 1
        seen[READINGS] = u32(seen[READINGS] + u32(1))
        if is_older:
            seen[kind] = u32(seen[kind] + u32(1))
        if is_torn:
            seen[TORN] = u32(seen[TORN] + u32(1))

    @device
    def read(lines: int, line: int, lane: int, kind: int, seen: Any) -> Any:
        """Read a line as the kernels do, judge what this lane got of it, and return its count."""
        address = u64(lines) + u64(line) * u64(LINE_NBYTES)
        bits = u32(0)
        if lane == 0:
            bits = ld_relaxed_sys_b32(address)
        bits = from_lane_before(bits, lane)
        count = values_of(bits)[0]
        # A vote on what was loaded, which is no NaN: the next load is made behind it.
        have_all = all_in_warp(bits != u32(NO_COUNT))
        if have_all:
            words = word_array(WORDS_PER_PACKET)
            own = address + u64(lane) * u64(PACKET_NBYTES)
            words[0], words[1], words[2], words[3] = ld_relaxed_sys_v4_b32(own)
            judge(line, lane, kind, count, words, seen)
        return count

    def litmus(
        ll: LLBuffer, thread: int, nthreads: int, lines: Any, found: Any, rounds: int
    ) -> None:
        if not share_work():
            return
        lane, line = thread % LINE_LANES, thread // LINE_LANES
        nlines = nthreads // LINE_LANES
        at = thread * PACKET_NBYTES
        if rounds == 0:
            st_v4_b32(u64(lines[ll.rank]) + u64(at), u32(0), u32(0), u32(0), u32(0))
            return
        seen = word_array(FIELDS)
        added, later = word_array(WORDS_PER_PACKET), word_array(WORDS_PER_PACKET)
        for word in range(WORDS_PER_PACKET):
            bits, count_part = bits_of(lane * WORDS_PER_PACKET + word)
            first = bits
            if PLANTED:
                first = u32(bits & count_part) if word == 0 and lane == 0 else u32(0)
            added[word] = first
            later[word] = u32(bits ^ first)
        ll.bcast(0, u32(1))
        ll.recv_reduce(0, u32(1), max)
        ll.advance_epoch()
        before = np.float32(0)
        for number in range(rounds):
            add(ll, lines, at, added)
            seen[WRITES] = u32(seen[WRITES] + u32(ll.size))
            count = read(lines[ll.rank], line, lane, OLDER, seen)
            if number > 0 and count > before + np.float32(1):
                seen[CONTESTED] = u32(seen[CONTESTED] + u32(1))
            before = count
            # Half of all lines further on or more, by whole warps of lines.
            shift = WARP_LINES * (number % max(nlines // (2 * WARP_LINES), 1))
            other = (line + nlines // 2 + shift) % nlines
            read(lines[ll.rank], other, lane, OLDER_ACROSS, seen)
            if PLANTED:
                add(ll, lines, at, later)
        report = u64(found[ll.rank]) + u64(thread) * u64(FIELDS * WORD_NBYTES)
        for field in range(FIELDS):
            st_b32(report + u64(field * WORD_NBYTES), seen[field])

    litmus.__name__ = litmus.__qualname__ = f"{'planted_' * planted}litmus_{name}"
    return litmus


KERNELS = MappingProxyType({name: _kernel(name, planted=False) for name in _TYPES})
"""By the name of the type: ``kernel(ll, thread, nthreads, lines, found, rounds)``, and of 0 rounds
one that clears the rank's lines."""

PLANTED_KERNELS = MappingProxyType({name: _kernel(name, planted=True) for name in _TYPES})
"""The same with the error planted."""
