"""Lines of 128 bytes that all ranks add to, and that say themselves who has added.

A line is 8 lanes of one warp wide, 16 bytes each. Its first element is no data: rank r adds
``2**r`` there, its *mark*, by the same instruction that adds the lane's data. Sums of different
powers of two are exact in any order, so the line is whole when its first element is ``2**N - 1``,
and until then it tells which ranks are missing.

What this rests on. PTX promises that an element is added to at once, and no more. That the 128
bytes which 8 lanes add by one instruction arrive at once is what NVIDIA's GPUs of sm_90 were seen
to do, and what a litmus test has to show of a machine before it uses this. A reader that has seen
the last mark loads the line again, so nothing is asked of how a load of a line is served.

Why a line may be added to again. Epoch e is added up in accumulator e mod 2, and cleared by the
lanes that loaded it. A rank adds in epoch e + 2 only after it has received the result of epoch e +
1 from the line's owner, which sent that after it had cleared e and, with the fence or the end of a
kernel between, made that visible.

Source: "Every µs Matters: Achieving Near Speed-of-Light Latency in GPU Collectives" (2026), whose
count of ranks the marks take the place of; NCCL's LL128 protocol, for lines that arrive as a whole.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from shmemar.device.memory import (
    globaltimer_ns,
    ld_relaxed_sys_b32,
    ld_relaxed_sys_v4_b32,
    red_line_relaxed_sys_add_bf16x2,
    red_line_relaxed_sys_add_f16x2,
    red_line_relaxed_sys_add_f32,
    relax,
    st_relaxed_sys_v4_b32,
)
from shmemar.device.narrow import two_bf16_from_word
from shmemar.device.registry import device
from shmemar.device.watchdog import POLLS_PER_LOOK, Watchdog, report, should_give_up
from shmemar.device.words import f32_from_word, two_f16_from_word, u32, u64
from shmemar.layout import accumulator_offset

if TYPE_CHECKING:
    from collections.abc import Callable

    from shmemar.dtypes import DType
    from shmemar.layout import LLLayout

__all__ = ["Lines", "lines"]

device(accumulator_offset)


class Lines(NamedTuple):
    """Device functions for lines of one type and layout.

    Attributes:
        put_mark: ``put_mark(words, at, rank)`` puts a rank's mark in the place of the element in
            the lower bits of ``words[at]``.
        add: ``add(region, slot, epoch, words, at)`` adds four words to the 16 bytes of `slot`, on
            the rank whose region is at that address. The warp meets.
        wait: ``wait(region, slot, epoch, watchdog)`` waits until every rank has added to the line
            whose first slot it is; False when the deadline passed.
        take: ``take(region, slot, epoch, words)`` loads the 16 bytes of `slot`, and clears them.
    """

    put_mark: Callable[[list[int], int, int], None]
    add: Callable[[int, int, int, list[int], int], None]
    wait: Callable[[int, int, int, Watchdog], bool]
    take: Callable[[int, int, int, list[int]], None]


def lines(dtype: DType, nranks: int, layout: LLLayout) -> Lines:
    """Make them."""
    # Templated arguments.
    PACKETS_NBYTES, PITCH_NBYTES = layout.packets_nbytes, layout.pitch_nbytes
    EXPONENT_OF_ONE, SIGNIFICAND_BITS = _EXPONENTS[dtype.name]
    MARK_BITS = 0xFFFFFFFF if dtype.itemsize == 4 else 0xFFFF
    ALL_RANKS = (1 << nranks) - 1
    WHOLE = _bits_of(dtype.name, ALL_RANKS)
    add_16_bytes, value_of = _ADDITIONS[dtype.name], _VALUES[dtype.name]

    @device
    def put_mark(words: list[int], at: int, rank: int) -> None:
        mark = u32(u32(EXPONENT_OF_ONE + rank) << u32(SIGNIFICAND_BITS))
        words[at] = u32(u32(words[at] & u32(0xFFFFFFFF ^ MARK_BITS)) | mark)

    @device
    def address_of(region: int, slot: int, epoch: int) -> int:
        return region + u64(accumulator_offset(epoch, slot, PACKETS_NBYTES, PITCH_NBYTES))

    @device
    def add(region: int, slot: int, epoch: int, words: list[int], at: int) -> None:
        address = address_of(region, slot, epoch)
        add_16_bytes(address, words[at], words[at + 1], words[at + 2], words[at + 3])

    @device
    def wait(region: int, slot: int, epoch: int, watchdog: Watchdog) -> bool:
        address = address_of(region, slot, epoch)
        polls = u32(0)
        since_ns = u64(0)
        while True:
            marks = u32(ld_relaxed_sys_b32(address) & u32(MARK_BITS))
            if marks == u32(WHOLE):
                return True
            polls = u32(polls + u32(1))
            if polls & u32(POLLS_PER_LOOK - 1) == u32(0):
                if since_ns == u64(0):
                    since_ns = globaltimer_ns()
                if should_give_up(watchdog, since_ns):
                    missing = u64(u64(ALL_RANKS) & u64(u64(value_of(marks)) ^ u64(ALL_RANKS)))
                    peer = first_of(missing)
                    report(watchdog, peer, missing, slot, epoch, u32(WHOLE), marks)
                    return False
            relax()

    @device
    def first_of(missing: int) -> int:
        for rank in range(nranks):
            if u64(missing >> u64(rank)) & u64(1) != u64(0):
                return rank
        return 0

    @device
    def take(region: int, slot: int, epoch: int, words: list[int]) -> None:
        address = address_of(region, slot, epoch)
        words[0], words[1], words[2], words[3] = ld_relaxed_sys_v4_b32(address)
        st_relaxed_sys_v4_b32(address, u32(0), u32(0), u32(0), u32(0))

    return Lines(put_mark, add, wait, take)


@device
def _value_of_f32(marks: int) -> Any:
    return f32_from_word(marks)


@device
def _value_of_f16(marks: int) -> Any:
    return two_f16_from_word(marks)[0]


@device
def _value_of_bf16(marks: int) -> Any:
    return two_bf16_from_word(marks)[0]


_EXPONENTS = {"float32": (127, 23), "float16": (15, 10), "bfloat16": (127, 7)}
"""The exponent's bits of 1, and the bits below them."""

_ADDITIONS = {
    "float32": red_line_relaxed_sys_add_f32,
    "float16": red_line_relaxed_sys_add_f16x2,
    "bfloat16": red_line_relaxed_sys_add_bf16x2,
}
_VALUES = {"float32": _value_of_f32, "float16": _value_of_f16, "bfloat16": _value_of_bf16}


def _bits_of(name: str, value: int) -> int:
    """Bits of a whole number that the type holds exactly."""
    if name == "float16":
        return int(np.float16(value).view(np.uint16))
    bits = int(np.float32(value).view(np.uint32))
    return bits if name == "float32" else bits >> 16
