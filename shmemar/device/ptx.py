"""Primitives as PTX, for numba-cuda. All PTX text of the project stands here.

Sources: PTX ISA 8.x, "Memory Consistency Model" (scopes, relaxed operations, proxies), ``ld``,
``st``, ``atom``, ``multimem``, ``membar/fence``. Every intrinsic has side effects and clobbers
memory, else a poll would be hoisted out of its loop.

Scope of what peers write and read is ``.sys``. Polls are ``ld.relaxed.sys``, but for a barrier's:
an acquire drops L1 at every poll, and a packet needs none, because its flag travels with its data.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

from llvmlite import ir
from numba import cuda, types
from numba.cuda import extending

from shmemar.device import groups, memory, programmatic, words
from shmemar.device.lowering import U32, U64, instruction, lower_elements, lower_words
from shmemar.device.registry import Compiler
from shmemar.layout import BLOCK_THREADS

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["TRIGGER", "install"]

TRIGGER = "griddepcontrol.launch_dependents;"
"""Lets the next programmatic launch start."""

_TYPES = {
    "r": (U32, ir.IntType(32)),
    "l": (U64, ir.IntType(64)),
    "f": (types.float32, ir.FloatType()),
    "d": (types.float64, ir.DoubleType()),
}


@cache
def install() -> Compiler:
    """Register the lowerings and every device function with numba-cuda."""
    compiler = Compiler("cuda", extending, (types.NamedTuple, types.NamedUniTuple))
    lower_words(compiler)
    lower_elements(compiler, _local_array)
    _lower_memory(compiler)
    _lower_arrays(compiler)
    _lower_groups(compiler)
    _lower_launches(compiler)
    _lower_arithmetic(compiler)
    compiler.install()
    return compiler


def _ptx(
    compiler: Compiler, text: str, operands: str = "", results: str = "", *, pure: bool = False
) -> Callable[..., Any]:
    """Make an intrinsic of one instruction.

    Args:
        compiler: Whose intrinsic it is.
        text: The instruction.
        operands: A constraint letter each: r, l, f, d.
        results: Likewise.
        pure: True where nothing but the operands decides the result.
    """
    operand_types = tuple(_TYPES[letter][0] for letter in operands)
    result_types = [_TYPES[letter] for letter in results]
    if not results:
        result, llvm = types.void, ir.VoidType()
    elif len(results) == 1:
        result, llvm = result_types[0]
    else:
        result = types.UniTuple(result_types[0][0], len(results))
        llvm = ir.LiteralStructType([item for _, item in result_types])
    constraints = ",".join(
        [*(f"={c}" for c in results), *operands, *(() if pure else ("~{memory}",))]
    )
    function = ir.FunctionType(llvm, [_TYPES[letter][1] for letter in operands])

    def emit(builder: Any, *args: Any) -> Any:
        assembly = ir.InlineAsm(function, text, constraints, side_effect=not pure)
        value = builder.call(assembly, args)
        if not results:
            return None
        if len(results) == 1:
            return value
        return [builder.extract_value(value, i) for i in range(len(results))]

    return instruction(compiler, result, operand_types, emit)


def _lower_memory(compiler: Compiler) -> None:
    ld_b32 = _ptx(compiler, "ld.global.b32 $0, [$1];", "l", "r")
    ld_b8 = _ptx(compiler, "ld.global.u8 $0, [$1];", "l", "r")
    st_b8 = _ptx(compiler, "st.global.u8 [$0], $1;", "lr")
    ld_b16 = _ptx(compiler, "{.reg .b16 a; ld.global.b16 a, [$1]; cvt.u32.u16 $0, a;}", "l", "r")
    st_b16 = _ptx(compiler, "{.reg .b16 a; cvt.u16.u32 a, $1; st.global.b16 [$0], a;}", "lr")
    ld_v4 = _ptx(compiler, "ld.global.L1::no_allocate.v4.b32 {$0, $1, $2, $3}, [$4];", "l", "rrrr")
    st_v4 = _ptx(compiler, "st.global.v4.b32 [$0], {$1, $2, $3, $4};", "lrrrr")
    ld_v2 = _ptx(compiler, "ld.global.L1::no_allocate.v2.b32 {$0, $1}, [$2];", "l", "rr")
    st_b32 = _ptx(compiler, "st.global.b32 [$0], $1;", "lr")
    st_v2 = _ptx(compiler, "st.global.v2.b32 [$0], {$1, $2};", "lrr")
    ld_sys = _ptx(compiler, "ld.relaxed.sys.global.b32 $0, [$1];", "l", "r")
    st_sys = _ptx(compiler, "st.relaxed.sys.global.b32 [$0], $1;", "lr")
    # 16 bytes as two accesses of 64 bits, which the memory model keeps whole; of .v4.b32 it would
    # keep words only. The moves are renamed registers and cost no instruction.
    ld_sys_v4 = _ptx(
        compiler,
        "{.reg .b64 a, b; ld.relaxed.sys.global.v2.b64 {a, b}, [$4]; "
        "mov.b64 {$0, $1}, a; mov.b64 {$2, $3}, b;}",
        "l",
        "rrrr",
    )
    st_sys_v4 = _ptx(
        compiler,
        "{.reg .b64 a, b; mov.b64 a, {$1, $2}; mov.b64 b, {$3, $4}; "
        "st.relaxed.sys.global.v2.b64 [$0], {a, b};}",
        "lrrrr",
    )
    # The lanes meet in the same text, so that nothing parts them again before they add.
    meet = "bar.warp.sync 0xffffffff;"
    red_line_f32 = _ptx(
        compiler,
        "{.reg .f32 a, b, c, d; mov.b32 a, $1; mov.b32 b, $2; mov.b32 c, $3; mov.b32 d, $4; "
        f"{meet} red.relaxed.sys.global.add.v4.f32 [$0], {{a, b, c, d}};}}",
        "lrrrr",
    )
    red_line_f16, red_line_bf16 = (
        _ptx(
            compiler,
            f"{{{meet} red.relaxed.sys.global.add.noftz.v4.{name} [$0], {{$1, $2, $3, $4}};}}",
            "lrrrr",
        )
        for name in ("f16x2", "bf16x2")
    )
    multimem_st_two = _ptx(
        compiler,
        "{.reg .b64 a, b; mov.b64 a, {$1, $2}; mov.b64 b, {$3, $4}; "
        "multimem.st.relaxed.sys.global.b64 [$0], a; "
        "multimem.st.relaxed.sys.global.b64 [$0+8], b;}",
        "lrrrr",
    )
    multimem_st = _ptx(compiler, "multimem.st.weak.global.v4.f32 [$0], {$1, $2, $3, $4};", "lrrrr")
    multimem_red = _ptx(compiler, "multimem.red.release.sys.global.add.u32 [$0], $1;", "lr")
    load_sum_f32, load_sum_f16, load_sum_bf16 = (
        _ptx(
            compiler,
            f"multimem.ld_reduce.weak.global.add.{kind} {{$0, $1, $2, $3}}, [$4];",
            "l",
            "rrrr",
        )
        for kind in ("v4.f32", "acc::f32.v4.f16x2", "acc::f32.v4.bf16x2")
    )
    fence_alias = _ptx(compiler, "fence.proxy.alias;")
    exch_sys = _ptx(compiler, "atom.relaxed.sys.global.exch.b32 $0, [$1], $2;", "lr", "r")
    red_sys = _ptx(compiler, "red.relaxed.sys.global.add.u32 [$0], $1;", "lr")
    ld_sys_64 = _ptx(compiler, "ld.relaxed.sys.global.b64 $0, [$1];", "l", "l")
    ld_acquire = _ptx(compiler, "ld.acquire.sys.global.b32 $0, [$1];", "l", "r")
    st_release = _ptx(compiler, "st.release.sys.global.b32 [$0], $1;", "lr")
    st_release_64 = _ptx(compiler, "st.release.sys.global.b64 [$0], $1;", "ll")
    red_release_64 = _ptx(compiler, "red.release.sys.global.add.u64 [$0], $1;", "ll")
    fence_sc = _ptx(compiler, "fence.sc.gpu;")
    fence_gpu = _ptx(compiler, "fence.acq_rel.gpu;")
    fence_sys = _ptx(compiler, "fence.acq_rel.sys;")
    globaltimer = _ptx(compiler, "mov.u64 $0, %globaltimer;", "", "l")

    lower = compiler.lower
    lower(memory.ld_b32)(lambda address: lambda address: ld_b32(address))
    lower(memory.ld_b8)(lambda address: lambda address: ld_b8(address))
    lower(memory.st_b8)(lambda address, word: lambda address, word: st_b8(address, word))
    lower(memory.ld_b16)(lambda address: lambda address: ld_b16(address))
    lower(memory.st_b16)(lambda address, word: lambda address, word: st_b16(address, word))
    lower(memory.ld_no_allocate_v2_b32)(lambda address: lambda address: ld_v2(address))
    lower(memory.ld_no_allocate_v4_b32)(lambda address: lambda address: ld_v4(address))
    lower(memory.st_v4_b32)(
        lambda address, first, second, third, fourth: (
            lambda address, first, second, third, fourth: st_v4(
                address, first, second, third, fourth
            )
        )
    )
    lower(memory.st_b32)(lambda address, word: lambda address, word: st_b32(address, word))
    lower(memory.st_v2_b32)(
        lambda address, first, second: lambda address, first, second: st_v2(address, first, second)
    )
    lower(memory.ld_relaxed_sys_b32)(lambda address: lambda address: ld_sys(address))
    lower(memory.st_relaxed_sys_b32)(
        lambda address, word: lambda address, word: st_sys(address, word)
    )
    lower(memory.ld_acquire_sys_b32)(lambda address: lambda address: ld_acquire(address))
    lower(memory.st_release_sys_b32)(
        lambda address, word: lambda address, word: st_release(address, word)
    )
    lower(memory.ld_relaxed_sys_v4_b32)(lambda address: lambda address: ld_sys_v4(address))
    lower(memory.st_relaxed_sys_v4_b32)(
        lambda address, first, second, third, fourth: (
            lambda address, first, second, third, fourth: st_sys_v4(
                address, first, second, third, fourth
            )
        )
    )
    for primitive, red_line in (
        (memory.red_line_relaxed_sys_add_f32, red_line_f32),
        (memory.red_line_relaxed_sys_add_f16x2, red_line_f16),
        (memory.red_line_relaxed_sys_add_bf16x2, red_line_bf16),
    ):
        lower(primitive)(_store_four(red_line))
    lower(memory.exch_relaxed_sys_b32)(
        lambda address, word: lambda address, word: exch_sys(address, word)
    )
    lower(memory.red_relaxed_sys_add_u32)(
        lambda address, value: lambda address, value: red_sys(address, value)
    )
    lower(memory.ld_relaxed_sys_b64)(lambda address: lambda address: ld_sys_64(address))
    lower(memory.st_release_sys_b64)(
        lambda address, value: lambda address, value: st_release_64(address, value)
    )
    lower(memory.red_release_sys_add_u64)(
        lambda address, value: lambda address, value: red_release_64(address, value)
    )
    lower(memory.multimem_st_relaxed_sys_two_b64)(_store_four(multimem_st_two))
    lower(memory.multimem_st_v4_f32)(_store_four(multimem_st))
    lower(memory.multimem_red_release_sys_add_u32)(
        lambda address, value: lambda address, value: multimem_red(address, value)
    )
    lower(memory.multimem_ld_reduce_add_v4_f32)(_load_sum(load_sum_f32))
    lower(memory.multimem_ld_reduce_add_v4_f16x2)(_load_sum(load_sum_f16))
    lower(memory.multimem_ld_reduce_add_v4_bf16x2)(_load_sum(load_sum_bf16))
    lower(memory.fence_proxy_alias)(lambda: lambda: fence_alias())
    lower(memory.fence_sc_gpu)(lambda: lambda: fence_sc())
    lower(memory.fence_acq_rel_gpu)(lambda: lambda: fence_gpu())
    lower(memory.fence_acq_rel_sys)(lambda: lambda: fence_sys())
    lower(memory.globaltimer_ns)(lambda: lambda: globaltimer())
    lower(memory.relax)(lambda: lambda: None)


def _store_four(store: Callable[..., Any]) -> Callable[..., Any]:
    return lambda address, first, second, third, fourth: (
        lambda address, first, second, third, fourth: store(address, first, second, third, fourth)
    )


def _load_sum(load: Callable[..., Any]) -> Callable[..., Any]:
    return lambda address: lambda address: load(address)


def _local_array(length: int) -> Callable[..., Any]:
    return lambda peers, like: cuda.local.array(length, U32)


def _lower_arrays(compiler: Compiler) -> None:
    def word_array(length: types.Type) -> Callable[..., Any] | None:
        if not isinstance(length, types.IntegerLiteral):
            return None
        constant = length.literal_value
        return lambda length: cuda.local.array(constant, U32)

    compiler.lower(words.word_array, prefer_literal=True, inline="always")(word_array)


def _lower_launches(compiler: Compiler) -> None:
    wait = _ptx(compiler, "griddepcontrol.wait;")
    launch_dependents = _ptx(compiler, TRIGGER)
    compiler.lower(programmatic.wait_for_launch)(lambda: lambda: wait())
    compiler.lower(programmatic.trigger)(lambda: lambda: launch_dependents())


def _lower_groups(compiler: Compiler) -> None:
    every_lane, threads, int32 = 0xFFFFFFFF, BLOCK_THREADS, types.int32
    before = groups.from_lane_before

    # A vote orders no memory, so the lanes meet before and after it.
    def all_in_warp(value: Any) -> Any:
        cuda.syncwarp(every_lane)
        votes = U32(cuda.ballot_sync(every_lane, value))
        cuda.syncwarp(every_lane)
        return votes == U32(every_lane)

    def any_in_warp(value: Any) -> Any:
        cuda.syncwarp(every_lane)
        votes = U32(cuda.ballot_sync(every_lane, value))
        cuda.syncwarp(every_lane)
        return votes != U32(0)

    def all_in_block(value: Any) -> Any:
        return cuda.syncthreads_count(int32(value)) == threads

    def any_in_block(value: Any) -> Any:
        return cuda.syncthreads_count(int32(value)) > 0

    def only_item(value: Any, distance: int) -> Any:
        return (before(value[0], distance),)

    def items(value: Any, distance: int) -> Any:
        return (before(value[0], distance), *before(value[1:], distance))

    def from_lane_before(value: types.Type, distance: types.Type) -> Callable[..., Any]:
        if isinstance(value, types.BaseTuple):
            return only_item if value.count == 1 else items
        signed = {U32: types.int32, U64: types.int64}.get(value, value)  # what numba shuffles
        own = value
        return lambda value, distance: own(cuda.shfl_up_sync(every_lane, signed(value), distance))

    compiler.lower(groups.share_work)(lambda: lambda: True)
    compiler.lower(groups.all_in_warp)(lambda value: all_in_warp)
    compiler.lower(groups.any_in_warp)(lambda value: any_in_warp)
    compiler.lower(groups.all_in_block)(lambda value: all_in_block)
    compiler.lower(groups.any_in_block)(lambda value: any_in_block)
    compiler.lower(groups.from_lane_before)(from_lane_before)


def _lower_arithmetic(compiler: Compiler) -> None:
    # The assembler exchanges the operands of an addition, but not what is multiplied by 1 with what
    # is added (machine code of CUDA 13.0, sm_90). Both are rounded once.
    one = "0d3FF0000000000000"
    add_f64 = _ptx(compiler, f"fma.rn.f64 $0, $1, {one}, $2;", "dd", "d", pure=True)
    mul_f32 = _ptx(compiler, "mul.rn.f32 $0, $1, $2;", "ff", "f", pure=True)
    mul_f64 = _ptx(compiler, "mul.rn.f64 $0, $1, $2;", "dd", "d", pure=True)
    two_f16 = _ptx(
        compiler,
        "{.reg .b16 a, b; mov.b32 {a, b}, $2; cvt.f32.f16 $0, a; cvt.f32.f16 $1, b;}",
        "r",
        "ff",
        pure=True,
    )
    join_f16 = _ptx(
        compiler,
        "{.reg .b16 a, b; cvt.rn.f16.f32 a, $1; cvt.rn.f16.f32 b, $2; mov.b32 $0, {a, b};}",
        "ff",
        "r",
        pure=True,
    )

    def add_ordered(left: Any, right: Any) -> Callable[..., Any] | None:
        # Of float32 there is one NaN that any operation gives.
        if left == types.float64 and right == types.float64:
            return lambda left, right: add_f64(left, right)
        return lambda left, right: left + right

    def mul_rn(left: Any, right: Any) -> Callable[..., Any] | None:
        if left == types.float32 and right == types.float32:
            return lambda left, right: mul_f32(left, right)
        if left == types.float64 and right == types.float64:
            return lambda left, right: mul_f64(left, right)
        return None

    keep = _ptx(compiler, "mov.b32 $0, $1;", "r", "r")
    compiler.lower(words.opaque)(lambda word: lambda word: keep(word))
    compiler.lower(words.add_ordered)(add_ordered)
    compiler.lower(words.mul_rn)(mul_rn)
    compiler.lower(words.two_f16_from_word)(lambda word: lambda word: two_f16(word))
    compiler.lower(words.word_from_two_f16)(lambda low, high: lambda low, high: join_f16(low, high))
