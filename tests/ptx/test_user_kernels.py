"""What kernels over an LLBuffer become: as lean as the library's own."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from benchmarks.apps.eigensolver_fused import fused_kernel
from benchmarks.apps.eigensolver_parts import Shape
from shmemar.device import signal
from shmemar.host.launch import compile_ptx
from shmemar.user_spec import ADDRESSES, BufferSpec, UserKernelSpec
from tests.ptx.assembler import Assembly, assemble

if TYPE_CHECKING:
    from collections.abc import Callable

REGISTERS = {2: 48, 4: 64, 8: 96}


def one_shot(ll: Any, thread: int, nthreads: int, x: Any, y: Any) -> None:
    for i in range(thread, x.size, nthreads):
        ll.bcast(0, x[i])
        y[i] = ll.recv_reduce(0, x[i], lambda a, b: a + b)
        ll.advance_epoch()


def gather_4(ll: Any, thread: int, nthreads: int, x: Any, y: Any) -> None:
    for i in range(thread, x.size // 4, nthreads):
        value = x[4 * i], x[4 * i + 1], x[4 * i + 2], x[4 * i + 3]
        ll.bcast(0, value)
        values = ll.recv_unrolled(0, value)
        for r in range(ll.size):
            for part in range(4):
                y[4 * (r * (x.size // 4) + i) + part] = values[r][part]
        ll.advance_epoch()


def right_and_left(ll: Any, thread: int, nthreads: int, x: Any, y: Any) -> None:
    right = ll.rank + 1 if ll.rank + 1 < ll.size else 0
    left = ll.rank - 1 if ll.rank > 0 else ll.size - 1
    ll.send(right, 0, x[thread])
    y[thread] = ll.recv(left, 0)


def compiled(
    kernel: Callable[..., None], dtype: Any, protocol: str, nranks: int, array: str
) -> tuple[BufferSpec, Assembly]:
    buffer = BufferSpec.of(nranks, dtype, threads=1000, slots=1, protocol=protocol)
    spec = UserKernelSpec(kernel, buffer, (array, array))
    text = compile_ptx(spec, buffer.layout, rank=1, compute_capability=(9, 0))
    return buffer, assemble(text)


@pytest.mark.parametrize("protocol", ["ll", "sentinel"])
@pytest.mark.parametrize("nranks", [2, 4, 8])
@pytest.mark.parametrize(
    ("kernel", "dtype", "array"),
    [
        (one_shot, "float32", "float32[:]"),
        (one_shot, "complex128", "complex128[:]"),
        (gather_4, ("float32", 4), "float32[:]"),
    ],
    ids=["one_shot-float32", "one_shot-complex128", "gather-4xfloat32"],
)
def test_a_users_kernel_has_one_store_a_packet_and_no_local_memory(
    kernel: Callable[..., None], dtype: Any, array: str, nranks: int, protocol: str
) -> None:
    buffer, assembly = compiled(kernel, dtype, protocol, nranks, array)
    packets = (nranks - 1) * buffer.npackets
    resets = packets if protocol == "sentinel" else 0
    assert assembly.count("st.relaxed.sys.global.v2.b64") == packets + resets
    polls = assembly.count("ld.relaxed.sys.global.v2.b64")
    assert polls in ({packets, 2 * packets} if nranks == 2 else {packets})
    fences = len(re.findall(r"fence\.acq_rel\.gpu", assembly.ptx))
    assert fences == (1 if protocol == "sentinel" else 0)
    assert assembly.count("call") == 0
    assert ".local" not in assembly.ptx
    assert (assembly.stack_nbytes, assembly.spill_nbytes) == (0, 0)
    assert assembly.registers <= REGISTERS[nranks]


@pytest.mark.parametrize("protocol", ["ll", "sentinel"])
@pytest.mark.parametrize("dtype", ["int8", "float32", "complex128"])
def test_one_element_to_one_peer_is_one_store(dtype: str, protocol: str) -> None:
    if protocol == "sentinel" and dtype == "int8":
        pytest.skip("integers have no sentinel")
    buffer, assembly = compiled(right_and_left, dtype, protocol, 3, f"{dtype}[:]")
    resets = buffer.npackets if protocol == "sentinel" else 0
    assert assembly.count("st.relaxed.sys.global.v2.b64") == buffer.npackets + resets
    assert assembly.count("call") == 0
    assert ".local" not in assembly.ptx
    assert (assembly.stack_nbytes, assembly.spill_nbytes) == (0, 0)


def test_a_launch_has_a_parameter_of_64_bits_for_each_word_that_is_passed() -> None:
    def kernel(ll: Any, thread: int, nthreads: int, x: Any, scale: float, shift: int) -> None:
        x[thread] = scale * shift

    buffer = BufferSpec.of(3, "float32", threads=1, slots=1, protocol="ll")
    spec = UserKernelSpec(kernel, buffer, ("float32[:]", "float64", "int64"))
    text = compile_ptx(spec, buffer.layout, rank=0, compute_capability=(9, 0))
    entry = text[text.index(".entry user_kernel(") :].partition(")")[0]
    # Three addresses and four words of ours, seven of the array, and two scalars.
    assert len(re.findall(r"\.param \.[busf]64", entry)) == entry.count(".param") == 3 + 4 + 7 + 2


def exchange(scope: str) -> Callable[..., None]:
    put, wait = getattr(signal, f"put_signal{scope}"), getattr(signal, f"signal_wait{scope}")

    def kernel(ll: Any, thread: int, nthreads: int, box: Any, signals: Any, nbytes: int) -> None:
        put(ll, box[1], box[0], nbytes, signals[1], 1, signal.SIGNAL_ADD)
        wait(ll, 1, signals[0], 1)

    return kernel


@pytest.mark.parametrize(
    ("scope", "meet", "times"),
    [("", r"vote|bar[r.]", 0), ("_warp", r"bar\.warp\.sync", 6), ("_block", r"bar[r.]", 3)],
)
def test_a_signal_is_released_once_and_acquired_by_one_fence(
    scope: str, meet: str, times: int
) -> None:
    """The threads meet before the copy, before the signal, and behind the wait."""
    buffer = BufferSpec.of(2, "int32", threads=128, slots=1, protocol="ll")
    spec = UserKernelSpec(exchange(scope), buffer, (ADDRESSES, ADDRESSES, "int64"))
    text = compile_ptx(spec, buffer.layout, rank=0, compute_capability=(9, 0))
    assembly = assemble(text)
    assert len(re.findall(r"red\.release\.sys\.global\.add\.u64", text)) == 1
    assert len(re.findall(r"ld\.relaxed\.sys\.global\.b64", text)) == 1
    assert "ld.acquire" not in text
    # One behind the poll, and one for the failure record.
    assert len(re.findall(r"fence\.acq_rel\.sys", text)) == 2
    assert len(re.findall(r"ld\.global\.L1::no_allocate\.v4\.b32", text)) >= 1
    assert len(re.findall(meet, text)) == times
    assert assembly.count("call") == 0
    assert ".local" not in text
    assert (assembly.stack_nbytes, assembly.spill_nbytes) == (0, 0)


def squares(ll: Any, thread: int, nthreads: int, x: Any, y: Any) -> None:
    for i in range(thread, x.size, nthreads):
        value = x[i]
        x[i] = value * value
        ll.bcast(0, value)
        y[i] = ll.recv_reduce(0, value, lambda a, b: a + b * b)
        ll.advance_epoch()


@pytest.mark.parametrize("protocol", ["ll", "sentinel"])
def test_every_rank_rounds_what_is_made_of_the_own_element_alike(protocol: str) -> None:
    """The square of the own element is at hand, so that it could stay unfused on its rank alone."""
    buffer = BufferSpec.of(3, "float32", threads=1, slots=1, protocol=protocol)
    spec = UserKernelSpec(squares, buffer, ("float32[:]", "float32[:]"))
    fused = []
    for rank in range(3):
        text = compile_ptx(spec, buffer.layout, rank=rank, compute_capability=(9, 0))
        fused.append([len(re.findall(rf"{op}\S*\.f32", text)) for op in ("fma", "mul", "add")])
    assert fused == [[2, 1, 0]] * 3


@pytest.mark.parametrize(("name", "registers"), [("float64", 56), ("complex64", 56)])
def test_the_eigensolvers_kernel_that_adds_up_and_sums_is_lean(name: str, registers: int) -> None:
    kernel = fused_kernel(np.dtype(name), 64, Shape())
    buffer = BufferSpec.of(4, name, threads=1000, slots=1, protocol="ll")
    spec = UserKernelSpec(kernel, buffer, (f"{name}[:]",) * 5 + ("int64",) * 5)
    text = compile_ptx(spec, buffer.layout, rank=1, compute_capability=(9, 0))
    assembly = assemble(text)
    assert assembly.count("st.relaxed.sys.global.v2.b64") == 3
    assert (assembly.stack_nbytes, assembly.spill_nbytes) == (0, 0)
    assert ".local" not in text
    assert assembly.count("call") == 0
    assert assembly.registers <= registers
