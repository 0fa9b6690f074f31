"""What the multicast forms become, for sm_90: compiled and assembled, and run nowhere."""

from __future__ import annotations

import re
from typing import Any

import pytest

from shmemar.config import Config
from shmemar.dtypes import DTYPES, ReduceOp
from shmemar.host.launch import compile_ptx
from shmemar.host.scratch import layout_for
from shmemar.spec import PACKET_PROTOCOLS, Kernel, KernelSpec, Protocol
from shmemar.user_spec import BufferSpec, UserKernelSpec
from tests.ptx.assembler import Assembly, assemble

FLOAT, SUM = DTYPES["float32"], ReduceOp.SUM
RANKS = pytest.mark.parametrize("nranks", [2, 4, 8])


def compiled(spec: KernelSpec, *, looped: bool = False) -> Assembly:
    layout = layout_for(spec, Config())
    return assemble(compile_ptx(spec, layout, rank=1, compute_capability=(9, 0), looped=looped))


def form(
    kernel: Kernel, protocol: Protocol, nranks: int, name: str = "float32", op: ReduceOp = SUM
) -> KernelSpec:
    return KernelSpec(kernel, protocol, DTYPES[name], op, nranks, multicast=True)


def stands_alone(assembly: Assembly) -> bool:
    in_registers = (assembly.stack_nbytes, assembly.spill_nbytes) == (0, 0)
    return in_registers and ".local" not in assembly.ptx and assembly.count("call") == 0


def count(text: str, assembly: Assembly) -> int:
    return len(re.findall(re.escape(text), assembly.ptx))


PACKET_STORE = "multimem.st.relaxed.sys.global.b64"
SIGNAL = "multimem.red.release.sys.global.add.u32"


@RANKS
@pytest.mark.parametrize("protocol", PACKET_PROTOCOLS)
def test_a_packet_goes_to_all_by_two_stores_and_to_nobody_by_another(
    protocol: Protocol, nranks: int
) -> None:
    assembly = compiled(form(Kernel.ONE_SHOT, protocol, nranks))
    # The first pass has code of its own.
    assert count(PACKET_STORE, assembly) == 2 * 2
    resets = 2 * (nranks - 1) if protocol is Protocol.SENTINEL else 0
    assert count("st.relaxed.sys.global.v2.b64", assembly) == resets
    fences = 1 if protocol is Protocol.SENTINEL else 0
    assert count("fence.acq_rel.gpu", assembly) == count("fence.proxy.alias", assembly) == fences
    assert stands_alone(assembly)
    assert assembly.registers <= {2: 40, 4: 48, 8: 64}[nranks]


def test_two_packets_a_thread_are_four_stores() -> None:
    spec = form(Kernel.ONE_SHOT, Protocol.LL, 4, "complex128", ReduceOp.PROD)
    assembly = compiled(spec)
    assert count(PACKET_STORE, assembly) == 2 * 4
    assert stands_alone(assembly)


@pytest.mark.parametrize(
    ("name", "op", "kind", "nranks"),
    [
        ("float32", SUM, "v4.f32", 2),
        ("float32", SUM, "v4.f32", 4),
        ("float32", ReduceOp.AVG, "v4.f32", 8),
        ("float16", SUM, "acc::f32.v4.f16x2", 4),
        ("bfloat16", ReduceOp.AVG, "acc::f32.v4.bf16x2", 2),
        ("bfloat16", SUM, "acc::f32.v4.bf16x2", 8),
    ],
)
def test_a_share_is_loaded_as_a_sum_and_its_result_stored_once(
    name: str, op: ReduceOp, kind: str, nranks: int
) -> None:
    assembly = compiled(form(Kernel.BARRIER_TWO_SHOT, Protocol.PULL, nranks, name, op))
    assert count(f"multimem.ld_reduce.weak.global.add.{kind}", assembly) == 1
    assert assembly.count("multimem.ld_reduce") == 1
    assert count("multimem.st.weak.global.v4.f32", assembly) == 1
    # The input and the results, of each share; stores of the staged input and of the output.
    assert assembly.count("ld.global.L1::no_allocate.v4.b32") == 2 * nranks
    assert assembly.count("st.global.v4.b32") == 2 * nranks
    assert count(SIGNAL, assembly) == 2
    assert count("fence.proxy.alias", assembly) == 4
    records = assembly.count("atom.relaxed.sys.global.exch.b32")
    assert count("fence.acq_rel.sys", assembly) == 2 + records
    assert stands_alone(assembly)


def test_a_looped_body_of_two_shot_meets_once_more() -> None:
    spec = form(Kernel.BARRIER_TWO_SHOT, Protocol.PULL, 4)
    once, looped = (compiled(spec, looped=looped) for looped in (False, True))
    meetings = [each.count("bar.red") + each.count("barrier.red") for each in (once, looped)]
    assert meetings == [4, 5]
    assert stands_alone(looped)


@RANKS
def test_a_barrier_adds_once_between_two_alias_fences(nranks: int) -> None:
    assembly = compiled(form(Kernel.BARRIER, Protocol.PUSH, nranks))
    order = re.findall(r"fence\.proxy\.alias|multimem\.red|ld\.relaxed\.sys", assembly.ptx)
    assert order[:4] == ["fence.proxy.alias", "multimem.red", "fence.proxy.alias", "ld.relaxed.sys"]
    assert count(SIGNAL, assembly) == 1
    # Behind the polls, and in the failure's record.
    assert count("fence.acq_rel.sys", assembly) == 2
    assert assembly.registers <= 32
    assert stands_alone(assembly)


def total(ll: Any, thread: int, nthreads: int, x: Any, y: Any) -> None:
    for i in range(thread, x.size, nthreads):
        ll.bcast(0, x[i])
        y[i] = ll.recv_reduce(0, x[i], lambda a, b: a + b)
        ll.advance_epoch()


def to_one_peer(ll: Any, thread: int, nthreads: int, x: Any, y: Any) -> None:
    for peer in range(ll.size):
        if peer != ll.rank:
            ll.send(peer, 0, x[thread])
    y[thread] = ll.recv_reduce(0, x[thread], lambda a, b: a + b)


@pytest.mark.parametrize("protocol", ["ll", "sentinel"])
@pytest.mark.parametrize(("dtype", "nranks"), [("float32", 2), ("complex128", 4), ("float32", 8)])
def test_a_users_broadcast_is_two_stores_a_packet(dtype: str, protocol: str, nranks: int) -> None:
    buffer = BufferSpec.of(nranks, dtype, threads=1000, slots=1, protocol=protocol, multicast=True)
    spec = UserKernelSpec(total, buffer, (f"{dtype}[:]", f"{dtype}[:]"))
    assembly = assemble(compile_ptx(spec, buffer.layout, rank=1, compute_capability=(9, 0)))
    assert count(PACKET_STORE, assembly) == 2 * buffer.npackets
    resets = buffer.npackets * (nranks - 1) if protocol == "sentinel" else 0
    assert count("st.relaxed.sys.global.v2.b64", assembly) == resets
    assert count("fence.proxy.alias", assembly) == (protocol == "sentinel")
    assert f".entry {spec.symbol}" in assembly.ptx
    assert stands_alone(assembly)


def test_a_packet_to_one_peer_is_one_store_to_it() -> None:
    buffer = BufferSpec.of(3, "float32", threads=1, slots=1, protocol="ll", multicast=True)
    spec = UserKernelSpec(to_one_peer, buffer, ("float32[:]", "float32[:]"))
    assembly = assemble(compile_ptx(spec, buffer.layout, rank=1, compute_capability=(9, 0)))
    assert "multimem" not in assembly.ptx
    assert count("st.relaxed.sys.global.v2.b64", assembly) == 2


@pytest.mark.parametrize(
    "kernel", [each for each in Kernel if each.has_code and each is not Kernel.LL128_ATOMIC]
)
def test_without_it_nothing_is_multicast(kernel: Kernel) -> None:
    spec = KernelSpec(kernel, kernel.default_protocol, FLOAT, SUM, 2)
    text = compile_ptx(spec, layout_for(spec, Config()), rank=1, compute_capability=(9, 0))
    assert "multimem" not in text
    assert "fence.proxy" not in text
