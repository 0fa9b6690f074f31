"""What the compiled kernels hold: every variant for sm_90, without a GPU."""

from __future__ import annotations

import re

import pytest
from numba import cuda, types

from shmemar.device import memory, ptx
from shmemar.dtypes import DTYPES, ReduceOp, supported_ops
from shmemar.host.launch import compile_ptx
from shmemar.layout import DEFAULT_SCRATCH_NBYTES, LLLayout
from shmemar.spec import Kernel, KernelSpec, Protocol
from tests.ptx.assembler import Assembly, assemble

REGISTERS = {2: 40, 4: 48, 8: 64}
"""Budget by number of ranks. With 64 registers a multiprocessor holds 8 blocks of 128 threads."""

# Every type and operator at 2, 4 and 8 ranks, and every rank for float32 sums.
VARIANTS = [
    *(
        (name, op, nranks, 1)
        for name, dtype in DTYPES.items()
        for op in supported_ops(dtype)
        for nranks in (2, 4, 8)
    ),
    *(("float32", ReduceOp.SUM, n, rank) for n in (1, 3, 4, 8) for rank in range(n) if rank != 1),
]


def compiled(name: str, op: ReduceOp, nranks: int, rank: int) -> Assembly:
    spec = KernelSpec(Kernel.ONE_SHOT, Protocol.LL, DTYPES[name], op, nranks)
    layout = LLLayout.fit(nranks, DEFAULT_SCRATCH_NBYTES)
    return assemble(compile_ptx(spec, layout, rank=rank, compute_capability=(9, 0)))


@pytest.mark.parametrize(
    ("name", "op", "nranks", "rank"),
    VARIANTS,
    ids=[f"{name}-{op.value}-{n}ranks-rank{rank}" for name, op, n, rank in VARIANTS],
)
def test_kernel_keeps_its_machine_code_contract(
    name: str, op: ReduceOp, nranks: int, rank: int
) -> None:
    assembly = compiled(name, op, nranks, rank)
    packets = 2 if (name, op) == ("complex128", ReduceOp.PROD) else 1
    assert assembly.count("st.relaxed.sys.global.v2.b64") == (nranks - 1) * packets
    assert assembly.count("ld.relaxed.sys.global.v2.b64") == (nranks - 1) * packets
    assert assembly.count("call") == 0
    assert ".local" not in assembly.ptx
    assert (assembly.stack_nbytes, assembly.spill_nbytes) == (0, 0)
    wide = 1.5 if packets == 2 else 1
    assert assembly.registers <= REGISTERS.get(nranks, 48) * wide
    # Ranks must round alike, so nothing may fuse a multiplication with an addition.
    assert assembly.count("fma") == 0
    assert all("mul.rn.f" in line for line in assembly.lines("mul") if ".f32" in line)


def test_the_same_kernel_is_the_same_text_whatever_was_compiled_before() -> None:
    spec = KernelSpec(Kernel.ONE_SHOT, Protocol.LL, DTYPES["int64"], ReduceOp.MAX, 2)
    layout = LLLayout.fit(2, DEFAULT_SCRATCH_NBYTES)
    first, second = (compile_ptx(spec, layout, rank=0, compute_capability=(9, 0)) for _ in range(2))
    assert first == second
    assert f".entry {spec.name}(" in first


def test_the_looped_kernel_keeps_the_contract() -> None:
    spec = KernelSpec(Kernel.ONE_SHOT, Protocol.LL, DTYPES["float32"], ReduceOp.SUM, 4)
    layout = LLLayout.fit(4, DEFAULT_SCRATCH_NBYTES)
    text = compile_ptx(spec, layout, rank=1, compute_capability=(9, 0), looped=True)
    assembly = assemble(text)
    assert assembly.count("st.relaxed.sys.global.v2.b64") == 3
    assert assembly.count("call") == 0
    assert ".local" not in text
    assert (assembly.stack_nbytes, assembly.spill_nbytes) == (0, 0)


def test_no_fence_is_on_the_way_of_a_packet() -> None:
    assembly = compiled("float32", ReduceOp.SUM, 4, 0)
    # The one fence orders the failure record, behind the exchange that claims it.
    text = assembly.ptx
    assert assembly.count("fence") == 1
    assert text.index("atom.relaxed.sys.global.exch") < text.index("fence.acq_rel.sys")
    assert assembly.count("bar.sync") == 0


def test_input_epoch_and_broken_word_are_loaded_before_anything_waits_for_one_of_them() -> None:
    text = compiled("float32", ReduceOp.SUM, 4, 0).ptx
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
