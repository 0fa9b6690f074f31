"""Primitives as machine code of the CPU, for numba's njit: ranks are processes that share memory.

What peers write and read goes through atomic loads and stores of 8 bytes with acquire and release
order, which is at least as strong as what the GPU promises.
"""

from __future__ import annotations

import inspect
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np
from llvmlite import ir
from numba import errors, extending, njit, types

from shmemar.device import additions, groups, memory, words
from shmemar.device.float16 import f16_from_f32, f32_from_f16
from shmemar.device.lowering import U32, U64, instruction, lower_elements, lower_words
from shmemar.device.registry import Compiler

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["install"]

_CLOCK_MONOTONIC = 1
_I32, _I64 = ir.IntType(32), ir.IntType(64)
_UNSIGNED = {1: types.uint8, 2: types.uint16, 4: U32, 8: U64}
_MULTICAST = (
    memory.multimem_ld_reduce_add_v4_bf16x2,
    memory.multimem_ld_reduce_add_v4_f16x2,
    memory.multimem_ld_reduce_add_v4_f32,
    memory.multimem_red_release_sys_add_u32,
    memory.multimem_st_relaxed_sys_two_b64,
    memory.multimem_st_v4_f32,
    memory.fence_proxy_alias,
)
"""What only GPUs with multicast have."""

_sched_yield = types.ExternalFunction("sched_yield", types.int32())
_clock_gettime = types.ExternalFunction("clock_gettime", types.int32(types.int32, types.voidptr))


@cache
def install() -> Compiler:
    """Register the lowerings and every device function with njit."""
    namedtuples = types.NamedTuple, types.NamedUniTuple
    # Nothing calls these functions from C; a quarter of the compilation would go into it.
    compiler = Compiler("cpu", extending, namedtuples, {"no_cfunc_wrapper": True})
    lower_words(compiler)
    lower_elements(compiler, _local_array)
    _lower_memory(compiler)
    _lower_rest(compiler)
    compiler.install()
    return compiler


def _local_array(length: int) -> Callable[..., Any]:
    return lambda peers, like: np.zeros(length, np.uint32)


def _load(compiler: Compiler, nbytes: int, order: str | None) -> Callable[..., Any]:
    bits = ir.IntType(8 * nbytes)

    def emit(builder: Any, address: Any) -> Any:
        pointer = builder.inttoptr(address, bits.as_pointer())
        if order is None:
            return builder.load(pointer, align=nbytes)
        return builder.load_atomic(pointer, order, nbytes)

    return instruction(compiler, _UNSIGNED[nbytes], (U64,), emit)


def _store(compiler: Compiler, nbytes: int, order: str | None) -> Callable[..., Any]:
    bits = ir.IntType(8 * nbytes)

    def emit(builder: Any, address: Any, value: Any) -> None:
        pointer = builder.inttoptr(address, bits.as_pointer())
        if order is None:
            builder.store(value, pointer, align=nbytes)
        else:
            builder.store_atomic(value, pointer, order, nbytes)

    return instruction(compiler, types.void, (U64, _UNSIGNED[nbytes]), emit)


def _lower_memory(compiler: Compiler) -> None:
    ld_8, st_8 = _load(compiler, 1, None), _store(compiler, 1, None)
    ld_16, st_16 = _load(compiler, 2, None), _store(compiler, 2, None)
    ld_b32, st_b32 = _load(compiler, 4, None), _store(compiler, 4, None)
    ld_b64, st_b64 = _load(compiler, 8, None), _store(compiler, 8, None)
    ld_acquire_b32, st_release_b32 = _load(compiler, 4, "acquire"), _store(compiler, 4, "release")
    ld_acquire_b64, st_release_b64 = _load(compiler, 8, "acquire"), _store(compiler, 8, "release")

    def emit_exchange(builder: Any, address: Any, word: Any) -> Any:
        pointer = builder.inttoptr(address, _I32.as_pointer())
        return builder.atomic_rmw("xchg", pointer, word, "seq_cst")

    def emit_add(builder: Any, address: Any, value: Any) -> None:
        pointer = builder.inttoptr(address, _I32.as_pointer())
        builder.atomic_rmw("add", pointer, value, "seq_cst")

    def emit_add_64(builder: Any, address: Any, value: Any) -> None:
        pointer = builder.inttoptr(address, _I64.as_pointer())
        builder.atomic_rmw("add", pointer, value, "seq_cst")

    def emit_exchange_if_equal(builder: Any, address: Any, expected: Any, word: Any) -> Any:
        pointer = builder.inttoptr(address, _I32.as_pointer())
        pair = builder.cmpxchg(pointer, expected, word, "seq_cst", "seq_cst")
        return builder.extract_value(pair, 0)

    exchange_if_equal = instruction(compiler, U32, (U64, U32, U32), emit_exchange_if_equal)

    def red_line(add_words: Callable[[int, int], int]) -> Callable[..., Any]:
        def add_word(address: int, word: int) -> None:
            before = ld_acquire_b32(address)
            while True:
                seen = exchange_if_equal(address, before, add_words(before, U32(word)))
                if seen == before:
                    return
                before = seen

        add_word = njit(add_word)

        def add_to_line(address: int, first: int, second: int, third: int, fourth: int) -> None:
            add_word(address + U64(12), fourth)
            add_word(address + U64(8), third)
            add_word(address + U64(4), second)
            # Last, as it says that the others are there.
            add_word(address, first)

        return lambda address, first, second, third, fourth: add_to_line

    add = instruction(compiler, types.void, (U64, U32), emit_add)
    add_64 = instruction(compiler, types.void, (U64, U64), emit_add_64)
    exchange = instruction(compiler, U32, (U64, U32), emit_exchange)
    fence = instruction(compiler, types.void, (), lambda builder: builder.fence("seq_cst") and None)

    def ld_v2(address: int) -> tuple[int, int]:
        bits = ld_b64(address)
        return U32(bits), U32(bits >> U64(32))

    def ld_sys_v4(address: int) -> tuple[int, int, int, int]:
        low = ld_acquire_b64(address)
        high = ld_acquire_b64(address + U64(8))
        return U32(low), U32(low >> U64(32)), U32(high), U32(high >> U64(32))

    def ld_v4(address: int) -> tuple[int, int, int, int]:
        low, high = ld_b64(address), ld_b64(address + U64(8))
        return U32(low), U32(low >> U64(32)), U32(high), U32(high >> U64(32))

    def st_v4(address: int, first: int, second: int, third: int, fourth: int) -> None:
        st_b64(address, U64(U32(first)) | (U64(U32(second)) << U64(32)))
        st_b64(address + U64(8), U64(U32(third)) | (U64(U32(fourth)) << U64(32)))

    def st_v2(address: int, first: int, second: int) -> None:
        st_b64(address, U64(U32(first)) | (U64(U32(second)) << U64(32)))

    def st_sys_v4(address: int, first: int, second: int, third: int, fourth: int) -> None:
        st_release_b64(address, U64(U32(first)) | (U64(U32(second)) << U64(32)))
        st_release_b64(address + U64(8), U64(U32(third)) | (U64(U32(fourth)) << U64(32)))

    lower = compiler.lower
    lower(memory.ld_b32)(lambda address: lambda address: ld_b32(address))
    lower(memory.ld_b8)(lambda address: lambda address: U32(ld_8(address)))
    lower(memory.st_b8)(lambda address, word: lambda address, word: st_8(address, word))
    lower(memory.ld_b16)(lambda address: lambda address: U32(ld_16(address)))
    lower(memory.st_b16)(lambda address, word: lambda address, word: st_16(address, word))
    lower(memory.ld_no_allocate_v2_b32)(lambda address: ld_v2)
    lower(memory.ld_no_allocate_v4_b32)(lambda address: ld_v4)
    lower(memory.st_v4_b32)(lambda address, first, second, third, fourth: st_v4)
    lower(memory.st_b32)(lambda address, word: lambda address, word: st_b32(address, word))
    lower(memory.st_v2_b32)(lambda address, first, second: st_v2)
    lower(memory.ld_relaxed_sys_b32)(lambda address: lambda address: ld_acquire_b32(address))
    lower(memory.st_relaxed_sys_b32)(
        lambda address, word: lambda address, word: st_release_b32(address, word)
    )
    lower(memory.ld_acquire_sys_b32)(lambda address: lambda address: ld_acquire_b32(address))
    lower(memory.st_release_sys_b32)(
        lambda address, word: lambda address, word: st_release_b32(address, word)
    )
    lower(memory.ld_relaxed_sys_v4_b32)(lambda address: ld_sys_v4)
    lower(memory.st_relaxed_sys_v4_b32)(lambda address, first, second, third, fourth: st_sys_v4)
    lower(memory.exch_relaxed_sys_b32)(
        lambda address, word: lambda address, word: exchange(address, word)
    )
    lower(memory.red_line_relaxed_sys_add_f32)(red_line(additions.add_f32))
    lower(memory.red_line_relaxed_sys_add_f16x2)(red_line(additions.add_two_f16))
    lower(memory.red_line_relaxed_sys_add_bf16x2)(red_line(additions.add_two_bf16))
    lower(memory.red_relaxed_sys_add_u32)(
        lambda address, value: lambda address, value: add(address, value)
    )
    lower(memory.ld_relaxed_sys_b64)(lambda address: lambda address: ld_acquire_b64(address))
    lower(memory.st_release_sys_b64)(
        lambda address, value: lambda address, value: st_release_b64(address, value)
    )
    lower(memory.red_release_sys_add_u64)(
        lambda address, value: lambda address, value: add_64(address, value)
    )
    for primitive in _MULTICAST:
        lower(primitive)(_no_multicast(primitive))
    lower(memory.fence_sc_gpu)(lambda: lambda: fence())
    lower(memory.fence_acq_rel_gpu)(lambda: lambda: fence())
    lower(memory.fence_acq_rel_sys)(lambda: lambda: fence())


def _no_multicast(primitive: Callable[..., Any]) -> Callable[..., Any]:
    """Make the typing function of what a CPU has nothing like."""

    def refuse(*_: Any) -> None:
        raise errors.TypingError(
            f"{primitive.__name__} needs multicast, which the emulated backend has none of; "
            "expected a kernel without it (KernelSpec.multicast)."
        )

    refuse.__signature__ = inspect.signature(primitive)  # type: ignore[attr-defined]
    return refuse


def _lower_rest(compiler: Compiler) -> None:
    def clock_ns() -> Any:
        time = np.empty(2, np.int64)
        _clock_gettime(_CLOCK_MONOTONIC, time.ctypes)
        return U64(time[0]) * U64(1_000_000_000) + U64(time[1])

    def give_way() -> None:
        _sched_yield()

    def two_f16(word: int) -> Any:
        return f32_from_f16(U32(word & U32(0xFFFF))), f32_from_f16(U32(word >> U32(16)))

    def join_f16(low: Any, high: Any) -> Any:
        return U32(f16_from_f32(low) | U32(f16_from_f32(high) << U32(16)))

    compiler.lower(memory.globaltimer_ns)(lambda: clock_ns)
    compiler.lower(memory.relax)(lambda: give_way)
    compiler.lower(groups.share_work)(lambda: lambda: False)
    for meet in (groups.all_in_warp, groups.any_in_warp, groups.all_in_block, groups.any_in_block):
        compiler.lower(meet)(lambda value: lambda value: value)
    # Never run, but compiled, where a kernel asks `share_work` first.
    compiler.lower(groups.from_lane_before)(lambda value, distance: lambda value, distance: value)
    # Nothing is fused on the CPU, whatever is known.
    compiler.lower(words.opaque)(lambda word: lambda word: word)
    compiler.lower(words.word_array)(lambda length: lambda length: np.zeros(length, np.uint32))
    compiler.lower(words.add_ordered)(lambda left, right: lambda left, right: left + right)
    compiler.lower(words.mul_rn)(lambda left, right: lambda left, right: left * right)
    compiler.lower(words.two_f16_from_word)(lambda word: two_f16)
    compiler.lower(words.word_from_two_f16)(lambda low, high: join_f16)
