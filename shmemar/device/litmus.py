"""A litmus test of lines: do the 128 bytes that 8 lanes add by one instruction arrive at once?

:mod:`shmemar.device.ll128` rests on that, and PTX does not promise it. So the kernel here, launched
on all ranks at once, looks for what must not be. By steps, again and again:

1. Each warp adds to its own four lines on every rank, beginning with the next one: 1 to the first
   element of a line, the *count*, and i + 1 to element i. So element i of a whole line is i + 1
   times its count, however many ranks have added, and in whatever order.
2. It reads its four lines on the own rank, and four lines that another warp adds to.

A reading is that of :mod:`shmemar.device.ll128`: the first lane of a line loads the count, the warp
meets, and all 8 lanes load their 16 bytes. An element that is *older* than the count seen before
must not be: the kernels would take it. An element that does not fit the count of the same load is
*torn*: that happens where a load is not served at once, and nothing relies on it.

Lines hold sums of integers below 2**24, which float32 has exactly. There are as many on each rank
as the launch has threads for, 8 a line; the counts go on from launch to launch.

`planted_litmus` breaks the rule: it adds the count by one instruction, reads, and then adds the
rest by another. A litmus test that does not find that would find nothing.

Where threads run one after another nothing is added and nothing read: there a line is whole because
one thread adds all of it, the count last.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from shmemar.device.groups import all_in_warp, from_lane_before, share_work
from shmemar.device.memory import (
    ld_relaxed_sys_b32,
    ld_relaxed_sys_v4_b32,
    red_line_relaxed_sys_add_f32,
    st_b32,
)
from shmemar.device.registry import device
from shmemar.device.words import f32_from_word, u32, u64, word_array, word_from_f32
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
    "COUNT",
    "ELEMENT",
    "FIELDS",
    "LINE",
    "LINE_ELEMENTS",
    "MAX_COUNT",
    "OLDER",
    "OLDER_ACROSS",
    "READINGS",
    "TORN",
    "VALUE",
    "WRITES",
    "litmus",
    "planted_litmus",
]

LINE_ELEMENTS = LINE_NBYTES // WORD_NBYTES
"""Elements of a line."""

NO_COUNT = 0xFFFFFFFF
"""Bits that no sum of integers has."""

MAX_COUNT = (1 << 24) // LINE_ELEMENTS
"""The highest count whose multiples float32 has all exactly."""

WRITES, READINGS, OLDER, OLDER_ACROSS, TORN, LINE, COUNT, ELEMENT, VALUE = range(9)
FIELDS = 9
"""Words that a thread reports: its additions and readings, of 16 bytes each; how many of these had
an element older than the count, in lines of its own warp and of another one; how many did not fit
the count of the same load; and of the first that was older the line, the bits of the count that
was seen, the element, and the bits of its value."""


@device
def _times(lane: int, word: int) -> Any:
    """How many times its line's count an element is: one of the lane's 16 bytes."""
    return np.float32(u32(u32(lane) * u32(WORDS_PER_PACKET) + u32(word + 1)))


@device
def _add(ll: LLBuffer, lines: Any, at: int, words: list[int]) -> None:
    """Add to the same 16 bytes on every rank, beginning with the one after this."""
    for step in range(1, ll.size + 1):
        address = u64(lines[(ll.rank + step) % ll.size]) + u64(at)
        red_line_relaxed_sys_add_f32(address, words[0], words[1], words[2], words[3])


@device
def _read(lines: int, line: int, lane: int, kind: int, seen: list[int]) -> None:
    """Read a line as the kernels do, and judge what this lane got of it."""
    address = u64(lines) + u64(line) * u64(LINE_NBYTES)
    bits = u32(0)
    if lane == 0:
        bits = ld_relaxed_sys_b32(address)
    count_bits = from_lane_before(bits, lane)
    count = f32_from_word(count_bits)
    # A vote on what was loaded, which is no NaN: the next load is made behind it.
    if not all_in_warp(count_bits != u32(NO_COUNT)):
        return
    words = word_array(WORDS_PER_PACKET)
    own = address + u64(lane) * u64(PACKET_NBYTES)
    words[0], words[1], words[2], words[3] = ld_relaxed_sys_v4_b32(own)
    count_now = f32_from_word(from_lane_before(words[0], lane))
    is_older = False
    is_torn = False
    for word in range(WORDS_PER_PACKET):
        times = _times(lane, word)
        value = f32_from_word(words[word])
        if value < times * count:
            if not is_older and seen[OLDER] == u32(0) and seen[OLDER_ACROSS] == u32(0):
                seen[LINE] = u32(line)
                seen[COUNT] = count_bits
                seen[ELEMENT] = u32(u32(lane) * u32(WORDS_PER_PACKET) + u32(word))
                seen[VALUE] = words[word]
            is_older = True
        if value != times * count_now:
            is_torn = True
    seen[READINGS] = u32(seen[READINGS] + u32(1))
    if is_older:
        seen[kind] = u32(seen[kind] + u32(1))
    if is_torn:
        seen[TORN] = u32(seen[TORN] + u32(1))


def _kernel(*, planted: bool) -> Callable[..., None]:
    # Templated arguments.
    PLANTED = planted

    def litmus(
        ll: LLBuffer,
        thread: int,
        nthreads: int,
        lines: Any,
        found: Any,
        first_round: int,
        rounds: int,
    ) -> None:
        if not share_work():
            return
        lane, line = thread % LINE_LANES, thread // LINE_LANES
        nlines = nthreads // LINE_LANES
        at = thread * PACKET_NBYTES
        seen = word_array(FIELDS)
        added, later = word_array(WORDS_PER_PACKET), word_array(WORDS_PER_PACKET)
        for word in range(WORDS_PER_PACKET):
            bits = word_from_f32(_times(lane, word))
            is_first = not PLANTED or (word == 0 and lane == 0)
            added[word] = bits if is_first else u32(0)
            later[word] = u32(0) if is_first else bits
        for number in range(first_round, first_round + rounds):
            _add(ll, lines, at, added)
            seen[WRITES] = u32(seen[WRITES] + u32(ll.size))
            _read(lines[ll.rank], line, lane, OLDER, seen)
            # Half of all lines further on or more, by whole warps of lines.
            shift = WARP_LINES * (number % max(nlines // (2 * WARP_LINES), 1))
            other = (line + nlines // 2 + shift) % nlines
            _read(lines[ll.rank], other, lane, OLDER_ACROSS, seen)
            if PLANTED:
                _add(ll, lines, at, later)
        report = u64(found[ll.rank]) + u64(thread) * u64(FIELDS * WORD_NBYTES)
        for field in range(FIELDS):
            st_b32(report + u64(field * WORD_NBYTES), seen[field])

    return litmus


litmus = _kernel(planted=False)
planted_litmus = _kernel(planted=True)
planted_litmus.__name__ = planted_litmus.__qualname__ = "planted_litmus"
litmus.__qualname__ = "litmus"
