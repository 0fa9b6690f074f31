"""What the compiled kernels hold: every variant for sm_90, without a GPU."""

from __future__ import annotations

import re
from functools import cache
from itertools import product

import pytest
from numba import cuda, types

from shmemar.config import Config
from shmemar.device import memory, ptx
from shmemar.dtypes import DTYPES, ReduceOp, supported_ops
from shmemar.errors import ShmemarError
from shmemar.host.launch import compile_ptx
from shmemar.host.scratch import layout_for
from shmemar.layout import DEFAULT_SCRATCH_NBYTES, LLLayout, packet_count
from shmemar.spec import Kernel, KernelSpec, Protocol, why_impossible
from tests.ptx.assembler import Assembly, assemble

REGISTERS = {2: 48, 4: 48, 8: 64}
"""Budget by number of ranks. With 64 registers a multiprocessor holds 8 blocks of 128 threads, with
48 ten, which the product of float16 needs at 2 ranks."""

ONE_SHOT_PASSES = 2
"""The first pass of a one-shot kernel has code of its own, beside that of the loop."""

WIDE_REGISTERS = 88
"""Budget from 16 ranks on, of which 5 or 8 are received together: 5 blocks a multiprocessor."""

VARIANTS = [
    (kernel, protocol)
    for kernel in Kernel
    if kernel.reduces and kernel.has_code and not kernel.has_barriers
    for protocol in kernel.protocols
]
FLOAT, SUM = DTYPES["float32"], ReduceOp.SUM


def cases(*, every: bool) -> list[tuple[KernelSpec, int]]:
    """Specs, and the rank that is compiled for.

    Float32 sums of every kernel and protocol; every other type and operator with one of them in
    turn, at 2 ranks; with `every`, with all of them at 2, 4 and 8.
    """
    found = [
        (KernelSpec(*variant, FLOAT, SUM, nranks), 1)
        for variant in VARIANTS
        for nranks in ((2, 4, 8, 16, 32, 64) if every else (2, 4, 8, 16))
        if not why_impossible(*variant, FLOAT, SUM, nranks)
    ]
    found += [
        (KernelSpec(Kernel.ONE_SHOT, Protocol.LL, FLOAT, SUM, nranks), rank)
        for nranks, rank in ((1, 0), (3, 0), (3, 2), (8, 0), (8, 7), (19, 18), (64, 40))
    ]
    found += [
        (KernelSpec(Kernel.ONE_SHOT, Protocol.LL, DTYPES[name], op, nranks), rank)
        for name, op, nranks, rank in (
            ("complex128", ReduceOp.PROD, 33, 32),
            ("uint64", ReduceOp.MAX, 16, 15),
            ("int8", SUM, 64, 7),
        )
    ]
    found += [
        (KernelSpec(Kernel.BROADCAST, Protocol.LL, DTYPES[name], SUM, nranks), 1)
        for name, nranks in (("uint8", 2), ("float16", 4), ("uint32", 8), ("uint64", 16))
    ]
    pairs = [(dtype, op) for dtype in DTYPES.values() for op in supported_ops(dtype)]
    for number, (dtype, op) in enumerate(pairs):
        possible = [v for v in VARIANTS if not why_impossible(*v, dtype, op, 8)]
        turn = possible[number % len(possible)]
        chosen = product(possible, (2, 4, 8)) if every else [(turn, 2)]
        found += [(KernelSpec(*variant, dtype, op, n), 0) for variant, n in chosen]
    return found


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "case" in metafunc.fixturenames:
        found = cases(every=metafunc.config.getoption("--every-kernel"))
        metafunc.parametrize("case", found, ids=[f"{s.name}-rank{rank}" for s, rank in found])


@cache
def compiled(spec: KernelSpec, rank: int) -> Assembly:
    layout = spec.fit_layout(DEFAULT_SCRATCH_NBYTES)
    return assemble(compile_ptx(spec, layout, rank=rank, compute_capability=(9, 0)))


def test_a_kernel_keeps_its_machine_code_contract(case: tuple[KernelSpec, int]) -> None:
    spec, rank = case
    assembly = compiled(spec, rank)
    exchanges = 2 if spec.kernel is Kernel.TWO_SHOT else 1
    # A lane that shares its packets has a part of the ranks, which may be its own.
    peers = spec.nranks - 1 if spec.lanes == 1 else packet_count(spec.nranks, spec.lanes)
    packets = peers * spec.packets_per_thread * exchanges
    if spec.kernel is Kernel.ONE_SHOT and spec.lanes == 1:
        packets *= ONE_SHOT_PASSES
    resets = packets if spec.protocol is Protocol.SENTINEL else 0
    # Of the own line every lane's 16 bytes are loaded, and cleared.
    lines = 1 if spec.kernel is Kernel.LL128_ATOMIC else 0
    assert assembly.count("st.relaxed.sys.global.v2.b64") == packets + resets + lines
    # Of one peer the compiler may peel the first poll off the loop.
    most = 2 * packets if spec.nranks == 2 else packets
    assert packets <= assembly.count("ld.relaxed.sys.global.v2.b64") - lines <= most
    assert assembly.count("call") == 0
    assert (assembly.count("shfl") > 0) == (spec.lanes > 1)
    assert ".local" not in assembly.ptx
    assert (assembly.stack_nbytes, assembly.spill_nbytes) == (0, 0)
    budget = REGISTERS.get(spec.nranks, 48) if spec.nranks < 16 else WIDE_REGISTERS
    assert assembly.registers <= budget * (1.5 if spec.packets_per_thread == 2 else 1)
    # Ranks must round alike, so nothing may fuse a multiplication with an addition.
    assert assembly.fused() == []
    assert all("mul.rn.f" in line for line in assembly.lines("mul") if ".f32" in line)


@pytest.mark.parametrize("nranks", [2, 16])
@pytest.mark.parametrize(
    ("kernel", "protocol"), VARIANTS, ids=[f"{k.value}-{p.value}" for k, p in VARIANTS]
)
def test_resets_alone_are_fenced_and_that_on_the_own_gpu(
    kernel: Kernel, protocol: Protocol, nranks: int
) -> None:
    assembly = compiled(KernelSpec(kernel, protocol, FLOAT, SUM, nranks), 1)
    fences = 0 if protocol is Protocol.LL else 2 if kernel is Kernel.TWO_SHOT else 1
    assert len(re.findall(r"fence\.acq_rel\.gpu", assembly.ptx)) == fences


@pytest.mark.parametrize(
    ("name", "addition"),
    [
        ("float32", "red.relaxed.sys.global.add.v4.f32"),
        ("float16", "red.relaxed.sys.global.add.noftz.v4.f16x2"),
        ("bfloat16", "red.relaxed.sys.global.add.noftz.v4.bf16x2"),
    ],
)
@pytest.mark.parametrize("nranks", [2, 8])
def test_a_line_is_added_by_one_instruction_for_each_rank_behind_a_meeting_of_the_warp(
    name: str, addition: str, nranks: int
) -> None:
    spec = KernelSpec(Kernel.LL128_ATOMIC, Protocol.SENTINEL, DTYPES[name], SUM, nranks)
    assembly = compiled(spec, 1)
    behind_a_meeting = rf"bar\.warp\.sync 0xffffffff;\s*{re.escape(addition)} "
    assert len(re.findall(behind_a_meeting, assembly.ptx)) == nranks
    assert assembly.count("red") == nranks
    assert "ld.global.L1::no_allocate.v4.b32" in assembly.ptx
    assert "st.global.v4.b32" in assembly.ptx


@pytest.mark.parametrize(
    ("protocol", "name", "width"),
    [
        (Protocol.LL, "float32", "v2"),
        (Protocol.LL, "float16", "v2"),
        (Protocol.SENTINEL, "float32", "v4"),
        (Protocol.SENTINEL, "float64", "v4"),
        (Protocol.SENTINEL, "bfloat16", "v4"),
    ],
)
def test_an_aligned_payload_moves_by_one_access(protocol: Protocol, name: str, width: str) -> None:
    ptx_text = compiled(KernelSpec(Kernel.ONE_SHOT, protocol, DTYPES[name], SUM, 4), 1).ptx
    assert f"ld.global.L1::no_allocate.{width}.b32" in ptx_text
    assert f"st.global.{width}.b32" in ptx_text


def test_the_same_kernel_is_the_same_text_whatever_was_compiled_before() -> None:
    spec = KernelSpec(Kernel.ONE_SHOT, Protocol.LL, DTYPES["int64"], ReduceOp.MAX, 2)
    layout = LLLayout.fit(2, DEFAULT_SCRATCH_NBYTES)
    first, second = (compile_ptx(spec, layout, rank=0, compute_capability=(9, 0)) for _ in range(2))
    assert first == second
    assert f".entry {spec.name}(" in first


def test_every_float16_is_converted_by_one_instruction_and_rounded_once() -> None:
    assembly = compiled(KernelSpec(*VARIANTS[0], DTYPES["float16"], ReduceOp.AVG, 4), 1)
    assert len(re.findall(r"cvt\.f32\.f16 ", assembly.ptx)) == 4 * 4 * ONE_SHOT_PASSES
    assert len(re.findall(r"cvt\.rn\.f16\.f32 ", assembly.ptx)) == 4 * ONE_SHOT_PASSES
    assert len(re.findall(r"add\.f32 ", assembly.ptx)) == 3 * 4 * ONE_SHOT_PASSES


@pytest.mark.parametrize("rank", range(3))
def test_operands_of_float64_additions_have_places(rank: int) -> None:
    assembly = compiled(KernelSpec(*VARIANTS[0], DTYPES["float64"], SUM, 3), rank)
    assert assembly.count("fma") == 2 * ONE_SHOT_PASSES
    assert assembly.fused() == []
    assert not re.search(r"add(\.rn)?\.f64", assembly.ptx)


def test_the_looped_kernel_keeps_the_contract() -> None:
    spec = KernelSpec(Kernel.ONE_SHOT, Protocol.LL, DTYPES["float32"], ReduceOp.SUM, 4)
    layout = LLLayout.fit(4, DEFAULT_SCRATCH_NBYTES)
    text = compile_ptx(spec, layout, rank=1, compute_capability=(9, 0), looped=True)
    assembly = assemble(text)
    # One loop over all passes, behind whose polls the lanes of a warp meet again.
    assert assembly.count("st.relaxed.sys.global.v2.b64") == 3
    assert assembly.count("call") == 0
    assert ".local" not in text
    assert (assembly.stack_nbytes, assembly.spill_nbytes) == (0, 0)


PROGRAMMATIC = [*VARIANTS, *((k, k.default_protocol) for k in Kernel if k.has_barriers)]


@pytest.mark.parametrize(
    ("kernel", "protocol"), PROGRAMMATIC, ids=[f"{k.value}-{p.value}" for k, p in PROGRAMMATIC]
)
def test_a_programmatic_kernel_waits_before_it_touches_memory_and_triggers_behind_that(
    kernel: Kernel, protocol: Protocol
) -> None:
    spec = KernelSpec(kernel, protocol, FLOAT, SUM, 2)
    text = compile_ptx(
        spec,
        layout_for(spec, Config()),
        rank=1,
        compute_capability=(9, 0),
        programmatic=True,
    )
    wait, trigger = "griddepcontrol.wait;", "griddepcontrol.launch_dependents;"
    assert (text.count(wait), text.count(trigger)) == (1, 1)
    entry = text[text.index(".entry") :]
    before = entry[: entry.index(wait)]
    assert not re.search(r"\b(?:ld|st|atom|red|multimem)\.(?!param)", before)
    # Parameters are looked at, and what no launch passes would end the thread.
    assert len(re.findall(r"\bbra\b", before)) == 1
    assert len(set(re.findall(r"param_\d+", before[before.index("{") :]))) >= 7
    between = entry[entry.index(wait) + len(wait) : entry.index(trigger)]
    assert not re.search(r"[a-z]\S* [^/]*;", re.sub(r"//.*", "", between))
    assembly = assemble(text)
    assert (assembly.stack_nbytes, assembly.spill_nbytes) == (0, 0)
    assert assembly.count("call") == 0
    plain = compile_ptx(spec, layout_for(spec, Config()), rank=1, compute_capability=(9, 0))
    assert "griddepcontrol" not in plain
    assert assembly.registers <= assemble(plain).registers + 2


def test_a_kernel_is_not_looped_and_launched_programmatically() -> None:
    spec = KernelSpec(Kernel.ONE_SHOT, Protocol.LL, FLOAT, SUM, 2)
    with pytest.raises(ShmemarError, match="can't be both looped and launched programmatically"):
        compile_ptx(
            spec,
            layout_for(spec, Config()),
            rank=0,
            compute_capability=(9, 0),
            looped=True,
            programmatic=True,
        )


def test_no_fence_is_on_the_way_of_a_packet() -> None:
    assembly = compiled(KernelSpec(*VARIANTS[0], FLOAT, SUM, 4), 0)
    # The only fence orders the failure record, behind the exchange that claims it.
    found = re.findall(r"atom\.relaxed\.sys\.global\.exch|fence\.\S+?;", assembly.ptx)
    expected = ["atom.relaxed.sys.global.exch", "fence.acq_rel.sys;"]
    assert found == expected * ONE_SHOT_PASSES
    assert assembly.count("bar.sync") == 0


def test_input_epoch_and_broken_word_are_loaded_before_anything_waits_for_one_of_them() -> None:
    text = compiled(KernelSpec(*VARIANTS[0], FLOAT, SUM, 4), 0).ptx
    before_send = text[: text.index("st.relaxed.sys.global.v2.b64")]
    loads = [match.start() for match in re.finditer(r"ld\.global\.b32", before_send)]
    broken, epoch = loads[-2:]
    assert before_send.index("ld.global.L1::no_allocate.v2.b32") < broken < epoch
    # Between the two there is no branch, and the branch behind them needs both.
    assert "bra" not in before_send[broken:epoch]
    assert len(re.findall(r"bra", before_send[epoch:])) >= 1
    assert "or.pred" in before_send[epoch:]


def test_an_addition_is_one_reduction_of_system_scope() -> None:
    ptx.install()

    def add(address: int, value: int) -> None:
        memory.red_relaxed_sys_add_u32(address, value)

    signature = types.void(types.uint64, types.uint32)
    text, _ = cuda.compile(add, signature, device=False, abi="numba", cc=(9, 0))
    assembly = assemble(text)
    assert assembly.count("red") == 1
    assert assembly.lines("red")[0].startswith("red.relaxed.sys.global.add.u32")
