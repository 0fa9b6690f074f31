"""What the compiled kernels with barriers hold, for sm_90, without a GPU."""

from __future__ import annotations

import re

import pytest

from shmemar.config import Config
from shmemar.dtypes import DTYPES, ReduceOp
from shmemar.host.launch import compile_ptx
from shmemar.host.scratch import layout_for
from shmemar.spec import Kernel, KernelSpec, Protocol
from tests.ptx.assembler import Assembly, assemble

REGISTERS = {2: 48, 4: 56, 8: 72, 16: 88}
"""Budget by number of ranks."""

FLOAT, SUM = DTYPES["float32"], ReduceOp.SUM
VARIANTS = [
    (kernel, protocol)
    for kernel in Kernel
    if kernel.has_barriers and kernel.reduces
    for protocol in kernel.protocols
]
CASES = [
    KernelSpec(*variant, FLOAT, SUM, nranks)
    for variant in VARIANTS
    for nranks in ((2, 4, 8) if variant[1] is variant[0].default_protocol else (4, 8))
]
CASES += [
    KernelSpec(*variant, DTYPES[name], op, nranks)
    for variant, name, op, nranks in (
        (VARIANTS[0], "complex128", ReduceOp.PROD, 8),
        (VARIANTS[1], "int8", ReduceOp.MAX, 2),
        (VARIANTS[2], "bfloat16", ReduceOp.AVG, 8),
        (VARIANTS[3], "float64", ReduceOp.MIN, 2),
        (VARIANTS[2], "float32", SUM, 16),
    )
]


def compiled(spec: KernelSpec, *, rank: int = 1, looped: bool = False) -> Assembly:
    layout = layout_for(spec, Config())
    return assemble(compile_ptx(spec, layout, rank=rank, compute_capability=(9, 0), looped=looped))


def count_fences(assembly: Assembly) -> int:
    return len(re.findall(r"fence\.acq_rel\.sys;", assembly.ptx))


def accesses(spec: KernelSpec) -> tuple[int, int]:
    """Loads and stores of 16 bytes in a pass."""
    n, pushes = spec.nranks, spec.protocol is Protocol.PUSH
    if spec.kernel.is_two_shot:  # own input, a share, results; shares, a result, the output
        return 3 * n, n + (n if pushes else 1) + n
    return 1 + n, (n if pushes else 1) + 1


@pytest.mark.parametrize("spec", CASES, ids=lambda spec: spec.name)
def test_a_kernel_with_barriers_keeps_its_machine_code_contract(spec: KernelSpec) -> None:
    assembly = compiled(spec)
    barriers = 2 if spec.kernel.is_two_shot else 1
    loads, stores = accesses(spec)
    assert assembly.count("ld.global.L1::no_allocate.v4.b32") == loads
    assert assembly.count("st.global.v4.b32") == stores
    # No packet, and of each barrier a flag and polls of one.
    assert "v2.b64" not in assembly.ptx
    assert 2 * barriers == assembly.count("bar.red") + assembly.count("barrier.red")
    records = assembly.count("atom.relaxed.sys.global.exch.b32")
    # A flag is released and acquired; a failure's record alone has a fence.
    assert assembly.count("st.release.sys.global.b32") == barriers
    assert assembly.count("ld.acquire.sys.global.b32") in (barriers, 2 * barriers)
    assert count_fences(assembly) == records == barriers
    assert assembly.count("call") == 0
    assert ".local" not in assembly.ptx
    assert (assembly.stack_nbytes, assembly.spill_nbytes) == (0, 0)
    assert assembly.registers <= REGISTERS[spec.nranks]
    assert assembly.fused() == []


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda variant: f"{variant[0]}-{variant[1]}")
def test_peers_data_are_loaded_behind_the_polls(
    variant: tuple[Kernel, Protocol],
) -> None:
    spec = KernelSpec(*variant, FLOAT, SUM, 4)
    text = compiled(spec).ptx
    of_inputs = 4 if spec.kernel.is_two_shot else 1
    load = re.compile(r"ld\.global\.L1::no_allocate\.v4\.b32")
    poll = text.index("ld.acquire.sys.global.b32")
    before = [found for found in load.finditer(text) if found.start() < poll]
    assert len(before) == of_inputs


@pytest.mark.parametrize("nranks", [1, 2, 8, 64])
def test_a_barrier_alone_is_small(nranks: int) -> None:
    spec = KernelSpec(Kernel.BARRIER, Protocol.PUSH, DTYPES["uint32"], SUM, nranks)
    assembly = compiled(spec, rank=0)
    assert assembly.registers <= 32
    assert ".local" not in assembly.ptx
    assert (assembly.stack_nbytes, assembly.spill_nbytes) == (0, 0)
    assert assembly.count("call") == 0
    assert count_fences(assembly) == assembly.count("st.release") == int(nranks > 1)


def test_a_looped_body_meets_once_more() -> None:
    spec = KernelSpec(Kernel.BARRIER_ONE_SHOT, Protocol.PULL, FLOAT, SUM, 4)
    once, looped = (compiled(spec, looped=looped) for looped in (False, True))
    meetings = [each.count("bar.red") + each.count("barrier.red") for each in (once, looped)]
    assert meetings == [2, 3]
    assert (looped.stack_nbytes, looped.spill_nbytes, looped.count("call")) == (0, 0, 0)
