"""Primitives that touch memory or time. The name says width, order and scope.

Addresses are unsigned 64-bit integers, words unsigned 32-bit ones. The Python bodies are what the
checker runs; :mod:`shmemar.device.ptx` and :mod:`shmemar.device.native` lower them.

What begins with ``multimem`` takes a *multicast address*, which stands for the same place in every
rank's symmetric memory, the own one included; nothing else may be given one, and these nothing
else. Two addresses of the same memory are *aliases*. PTX orders accesses by one of them against
accesses by the other only where an alias proxy fence stands along the path of causality between
them, or the end of a kernel; and it promises of no pair of them that they are performed whole, as
it does of strong accesses by one address ("morally strong" wants the same proxy). So words that are
stored by the multicast address and polled at home rest on the hardware, which has one copy of them
in the L2 cache of each GPU; NVIDIA's own libraries poll so. None of these was run on a GPU here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from shmemar.device.additions import add_f32, add_two_bf16, add_two_f16
from shmemar.device.interpreter import Order, Scope, current
from shmemar.device.meetings import meeting

if TYPE_CHECKING:
    from shmemar.device.words import Packet

__all__ = [
    "exch_relaxed_sys_b32",
    "fence_acq_rel_gpu",
    "fence_acq_rel_sys",
    "fence_proxy_alias",
    "fence_sc_gpu",
    "globaltimer_ns",
    "ld_acquire_sys_b32",
    "ld_b8",
    "ld_b16",
    "ld_b32",
    "ld_no_allocate_v2_b32",
    "ld_no_allocate_v4_b32",
    "ld_relaxed_sys_b32",
    "ld_relaxed_sys_b64",
    "ld_relaxed_sys_v4_b32",
    "multimem_ld_reduce_add_v4_bf16x2",
    "multimem_ld_reduce_add_v4_f16x2",
    "multimem_ld_reduce_add_v4_f32",
    "multimem_red_release_sys_add_u32",
    "multimem_st_relaxed_sys_two_b64",
    "multimem_st_v4_f32",
    "red_line_relaxed_sys_add_bf16x2",
    "red_line_relaxed_sys_add_f16x2",
    "red_line_relaxed_sys_add_f32",
    "red_relaxed_sys_add_u32",
    "red_release_sys_add_u64",
    "relax",
    "st_b8",
    "st_b16",
    "st_b32",
    "st_relaxed_sys_b32",
    "st_relaxed_sys_v4_b32",
    "st_release_sys_b32",
    "st_release_sys_b64",
    "st_v2_b32",
    "st_v4_b32",
]


def ld_b8(address: int) -> int:
    """Load a byte, as a word."""
    return current().load_part(address, 1)


def ld_b16(address: int) -> int:
    """Load two aligned bytes, as a word."""
    return current().load_part(address, 2)


def st_b8(address: int, word: int) -> None:
    """Store the lowest byte of a word."""
    current().store_part(address, 1, word & 0xFF)


def st_b16(address: int, word: int) -> None:
    """Store the lower half of a word to two aligned bytes."""
    current().store_part(address, 2, word & 0xFFFF)


def ld_b32(address: int) -> int:
    """Load a word."""
    return current().load(address, 1, Order.WEAK)[0]


def st_b32(address: int, word: int) -> None:
    """Store a word."""
    current().store(address, (word,), Order.WEAK)


def ld_no_allocate_v2_b32(address: int) -> tuple[int, int]:
    """Load two words from 8 aligned bytes that no thread reads again: nothing stays in L1."""
    first, second = current().load(address, 2, Order.WEAK)
    return first, second


def st_v2_b32(address: int, first: int, second: int) -> None:
    """Store two words to 8 aligned bytes."""
    current().store(address, (first, second), Order.WEAK)


def ld_no_allocate_v4_b32(address: int) -> Packet:
    """Load four words from 16 aligned bytes that no thread reads again: nothing stays in L1."""
    first, second, third, fourth = current().load(address, 4, Order.WEAK)
    return first, second, third, fourth


def st_v4_b32(address: int, first: int, second: int, third: int, fourth: int) -> None:
    """Store four words to 16 aligned bytes."""
    current().store(address, (first, second, third, fourth), Order.WEAK)


def ld_relaxed_sys_b32(address: int) -> int:
    """Load a word that others may be writing."""
    return current().load(address, 1, Order.RELAXED_SYS)[0]


def st_relaxed_sys_b32(address: int, word: int) -> None:
    """Store a word that others may be reading."""
    current().store(address, (word,), Order.RELAXED_SYS)


def ld_acquire_sys_b32(address: int) -> int:
    """Load a word that others may be writing.

    What its writer released with it can be seen by what follows.
    """
    return current().load(address, 1, Order.ACQUIRE_SYS)[0]


def st_release_sys_b32(address: int, word: int) -> None:
    """Store a word, behind everything that the thread has done or seen done."""
    current().store(address, (word,), Order.RELEASE_SYS)


def ld_relaxed_sys_v4_b32(address: int) -> Packet:
    """Load four words from 16 aligned bytes that a peer may be writing; each 8 bytes are whole."""
    first, second, third, fourth = current().load(address, 4, Order.RELAXED_SYS)
    return first, second, third, fourth


def st_relaxed_sys_v4_b32(address: int, first: int, second: int, third: int, fourth: int) -> None:
    """Store four words to 16 aligned bytes that a peer may be reading; each 8 bytes are whole."""
    current().store(address, (first, second, third, fourth), Order.RELAXED_SYS)


def ld_relaxed_sys_b64(address: int) -> int:
    """Load 8 aligned bytes that others may be writing, as one 64-bit integer."""
    low, high = current().load(address, 2, Order.RELAXED_SYS)
    return high << 32 | low


def st_release_sys_b64(address: int, value: int) -> None:
    """Store a 64-bit integer, behind everything that the thread has done or seen done."""
    current().store(address, (value & 0xFFFFFFFF, value >> 32), Order.RELEASE_SYS)


def red_release_sys_add_u64(address: int, value: int) -> None:
    """Add to a 64-bit integer, which wraps, behind everything that the thread has done or seen."""
    current().add_b64(address, value, Order.RELEASE_SYS)


def exch_relaxed_sys_b32(address: int, word: int) -> int:
    """Store a word and return the one that stood there, as one operation."""
    return current().exchange(address, word)


def red_relaxed_sys_add_u32(address: int, value: int) -> None:
    """Add to a word that others may be adding to; it wraps."""
    current().add(address, value)


@meeting
def red_line_relaxed_sys_add_f32(
    address: int, first: int, second: int, third: int, fourth: int
) -> None:
    """Add four float32, given by their bits, to 16 aligned bytes of a line.

    The warp meets, and its lanes add in one instruction: 8 lanes that have a line's 128 bytes are
    to add to it at once. Where threads run one after another, the first word is added last.
    """
    current().add_to_line(address, (first, second, third, fourth), add_f32)


@meeting
def red_line_relaxed_sys_add_f16x2(
    address: int, first: int, second: int, third: int, fourth: int
) -> None:
    """Add eight float16, two a word, likewise."""
    current().add_to_line(address, (first, second, third, fourth), add_two_f16)


@meeting
def red_line_relaxed_sys_add_bf16x2(
    address: int, first: int, second: int, third: int, fourth: int
) -> None:
    """Add eight bfloat16, two a word, likewise."""
    current().add_to_line(address, (first, second, third, fourth), add_two_bf16)


def multimem_st_relaxed_sys_two_b64(
    address: int, first: int, second: int, third: int, fourth: int
) -> None:
    """Store four words to 16 aligned bytes of every rank; each 8 bytes are whole.

    Two instructions: those of 16 bytes promise each element alone, and none has elements of 8.
    """
    current().store_to_all(address, (first, second, third, fourth), Order.RELAXED_SYS)


def multimem_st_v4_f32(address: int, first: int, second: int, third: int, fourth: int) -> None:
    """Store four words, of whatever type, to 16 aligned bytes of every rank; weak."""
    current().store_to_all(address, (first, second, third, fourth), Order.WEAK)


def multimem_red_release_sys_add_u32(address: int, value: int) -> None:
    """Add to a word of every rank, which wraps, behind everything that the thread did or saw."""
    current().add_to_all(address, value)


def multimem_ld_reduce_add_v4_f32(address: int) -> Packet:
    """Load four float32 of every rank and add them up, in an order that nobody is told; weak."""
    first, second, third, fourth = current().load_sum(address, add_f32)
    return first, second, third, fourth


def multimem_ld_reduce_add_v4_f16x2(address: int) -> Packet:
    """Add up eight float16, two a word, likewise; at least in float32, and rounded in the end."""
    first, second, third, fourth = current().load_sum(address, add_two_f16)
    return first, second, third, fourth


def multimem_ld_reduce_add_v4_bf16x2(address: int) -> Packet:
    """Add up eight bfloat16, two a word, likewise."""
    first, second, third, fourth = current().load_sum(address, add_two_bf16)
    return first, second, third, fourth


def fence_proxy_alias() -> None:
    """Order the thread's accesses by multicast addresses against those by others.

    It stands wherever the path of causality passes; by itself it orders nothing for other threads.
    """
    current().fence_aliases()


def fence_acq_rel_gpu() -> None:
    """Order the thread's memory operations around it, as observers on its own GPU see them."""
    current().fence(Scope.GPU)


def fence_acq_rel_sys() -> None:
    """Order the thread's memory operations before the fence against those after it."""
    current().fence(Scope.SYS)


def fence_sc_gpu() -> None:
    """``__threadfence()``: as `fence_acq_rel_gpu`, and in one order with other such fences."""
    current().fence(Scope.GPU)


def globaltimer_ns() -> int:
    """Nanoseconds of a clock that never goes back."""
    return current().clock_ns()


def relax() -> None:
    """Let others run after a poll that found nothing; no instruction on a GPU."""
    current().relax()
