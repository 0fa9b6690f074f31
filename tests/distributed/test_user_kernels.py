"""Kernels over an LLBuffer on every rank, emulated or on GPUs."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from mpi4py import MPI

import shmemar
from shmemar.device.packet import SENTINEL, TWIN
from shmemar.device.registry import device

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from shmemar.host.arrays import Arrays

README = Path(__file__).parents[2] / "README.md"

TYPES: list[tuple[str, int, str]] = [
    ("float32", 1, "ll"),
    ("float32", 1, "sentinel"),
    ("int8", 1, "ll"),
    ("complex128", 1, "sentinel"),
    ("uint64", 1, "ll"),
    ("float64", 2, "sentinel"),
    ("complex64", 1, "ll"),
    ("float64", 1, "sentinel"),
    ("float32", 4, "ll"),
    ("float32", 3, "sentinel"),
    ("complex128", 1, "ll"),
    ("complex64", 1, "sentinel"),
    ("int32", 2, "ll"),
]
"""Scalar, scalars of an element, protocol."""


def one_shot(ll: Any, thread: int, nthreads: int, x: Any, y: Any) -> None:
    for i in range(thread, x.size, nthreads):
        ll.bcast(0, x[i])
        y[i] = ll.recv_reduce(0, x[i], lambda a, b: a + b)
        ll.advance_epoch()


def one_shot_of_2(ll: Any, thread: int, nthreads: int, x: Any, y: Any) -> None:
    for i in range(thread, x.size // 2, nthreads):
        value = x[2 * i], x[2 * i + 1]
        ll.bcast(0, value)
        total = ll.recv_reduce(0, value, lambda a, b: (a[0] + b[0], a[1] + b[1]))
        y[2 * i], y[2 * i + 1] = total[0], total[1]
        ll.advance_epoch()


@device
def add_3(a: Any, b: Any) -> Any:
    return a[0] + b[0], a[1] + b[1], a[2] + b[2]


def one_shot_of_3(ll: Any, thread: int, nthreads: int, x: Any, y: Any) -> None:
    for i in range(thread, x.size // 3, nthreads):
        value = x[3 * i], x[3 * i + 1], x[3 * i + 2]
        ll.bcast(0, value)
        total = ll.recv_reduce(0, value, add_3)
        y[3 * i], y[3 * i + 1], y[3 * i + 2] = total[0], total[1], total[2]
        ll.advance_epoch()


def one_shot_of_4(ll: Any, thread: int, nthreads: int, x: Any, y: Any) -> None:
    for i in range(thread, x.size // 4, nthreads):
        value = x[4 * i], x[4 * i + 1], x[4 * i + 2], x[4 * i + 3]
        ll.bcast(0, value)
        values = ll.recv_unrolled(0, value)
        for part in range(4):
            y[4 * i + part] = values[0][part]
        for r in range(1, ll.size):
            for part in range(4):
                y[4 * i + part] += values[r][part]
        ll.advance_epoch()


KERNEL_OF = {1: one_shot, 2: one_shot_of_2, 3: one_shot_of_3, 4: one_shot_of_4}


def exact(name: str, count: int, rank: int, call: int) -> NDArray[Any]:
    draw = np.random.default_rng((rank, call, count))
    values: NDArray[Any] = draw.integers(-15, 15, count).astype(name)
    if values.dtype.kind == "c":
        values += 1j * draw.integers(-15, 15, count)
    return values


def chosen(nranks: int) -> list[tuple[str, int, str]]:
    """A third of the types by number of ranks, because each kernel takes seconds to compile."""
    return TYPES[:2] + TYPES[2:][nranks % 3 :: 3]


def test_every_type_of_element_is_summed_exactly(
    comm: shmemar.Communicator, arrays: Arrays, agree: Any, pytestconfig: pytest.Config
) -> None:
    types = TYPES if pytestconfig.getoption("--every-kernel") else chosen(comm.size)
    for name, length, protocol in types:
        element = name if length == 1 else (name, length)
        buffer = comm.ll_buffer(element, threads=200, protocol=protocol)
        wrong = 0
        for call, (elements, threads) in enumerate([(1, 1), (256, None), (700, 129), (3, None)]):
            count = elements * length
            x = arrays.make(exact(name, count, comm.rank, call))
            y = arrays.make(np.full(count, 77, name))
            comm.launch(KERNEL_OF[length], buffer, x, y, threads=threads)
            total = sum(exact(name, count, rank, call) for rank in range(comm.size))
            wrong += int(np.count_nonzero(arrays.host(y) != total))
        assert agree(wrong) == [0] * comm.size, (name, length, protocol)


def test_the_loop_in_the_readme_is_an_allreduce(
    world: MPI.Intracomm,
    backend: str,
    arrays: Arrays,
    agree: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("SHMEMAR_BACKEND", backend)
    blocks = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)
    (block,) = (block for block in blocks if "ll_buffer" in block)
    assert len([line for line in block.splitlines() if line]) <= 10
    x = arrays.make(exact("float32", 5000, world.rank, 0))
    y = arrays.make(np.full(5000, np.nan, "f4"))
    exec(block, {"x": x, "y": y, "MPI": MPI, "shmemar": shmemar})  # noqa: S102 - what the README says
    total = sum(exact("float32", 5000, rank, 0) for rank in range(world.size))
    assert agree(int(np.count_nonzero(arrays.host(y) != total))) == [0] * world.size


def to_the_right(ll: Any, thread: int, nthreads: int, x: Any, y: Any, turns: int) -> None:
    """Pass elements round a ring; the other peers get an empty answer in another slot."""
    right, left = (ll.rank + 1) % ll.size, (ll.rank - 1) % ll.size
    for i in range(thread, x.size, nthreads):
        passed = x[i]
        for _ in range(turns):
            for peer in range(ll.size):
                if peer != ll.rank:
                    ll.send(peer, 1 if peer == right else 0, passed)
            for peer in range(ll.size):
                if peer not in (ll.rank, left):
                    ll.recv(peer, 0)
            if ll.size > 1:
                passed = ll.recv(left, 1)
            ll.advance_epoch()
        y[i] = passed


@pytest.mark.parametrize("protocol", ["ll", "sentinel"])
def test_elements_go_to_single_peers_in_slots(
    comm: shmemar.Communicator, arrays: Arrays, agree: Any, protocol: str
) -> None:
    buffer = comm.ll_buffer("float64", threads=128, slots=2, protocol=protocol)
    wrong = 0
    for turns in range(5):
        x = arrays.make(exact("float64", 300, comm.rank, turns))
        y = arrays.make(np.zeros(300))
        comm.launch(to_the_right, buffer, x, y, turns)
        expected = exact("float64", 300, (comm.rank - turns) % comm.size, turns)
        wrong += int(np.count_nonzero(arrays.host(y) != expected))
    assert agree(wrong) == [0] * comm.size


def fused(
    ll: Any, thread: int, nthreads: int, x: Any, y: Any, bits: Any, scale: float, shift: int
) -> None:
    for i in range(thread, x.size, nthreads):
        mine = np.float32(x[i] * scale + shift)
        ll.bcast(0, mine)
        y[i] = ll.recv_reduce(0, mine, max)
        bits[i] = ll.current_epoch() & 0xFFFF if ll.is_alive() else 0
        ll.advance_epoch()


def test_scalars_are_passed_and_epochs_count(
    comm: shmemar.Communicator, arrays: Arrays, agree: Any
) -> None:
    """Between all-reduces, which have scratch of their own; 16-bit floats are seen as bits."""
    buffer = comm.ll_buffer(np.float32, threads=128)
    wrong = 0
    for call in range(4):
        x = arrays.make(exact("float32", 128 * 3, comm.rank, call))
        y, bits = arrays.make(np.zeros(384, "f4")), arrays.make(np.zeros(384, "f2"))
        comm.allreduce(x, out=y)
        comm.launch(fused, buffer, x, y, bits, 0.5, call)
        everyone = [exact("float32", 384, rank, call) * 0.5 + call for rank in range(comm.size)]
        wrong += int(np.count_nonzero(arrays.host(y) != np.max(everyone, axis=0)))
        epochs = np.repeat(np.arange(1, 4, dtype="u2") + 3 * call, 128)
        wrong += int(np.count_nonzero(arrays.host(bits).view("u2") != epochs))
    assert agree(wrong) == [0] * comm.size


def gather(ll: Any, thread: int, nthreads: int, x: Any, y: Any) -> None:
    for i in range(thread, x.size, nthreads):
        ll.bcast(0, x[i])
        values = ll.recv_unrolled(0, x[i])
        for r in range(ll.size):
            y[r * x.size + i] = values[r]
        ll.advance_epoch()


@pytest.mark.parametrize("protocol", ["ll", "sentinel"])
def test_every_bit_arrives_but_the_sentinels(
    comm: shmemar.Communicator, arrays: Arrays, agree: Any, protocol: str
) -> None:
    """Of all ranks twice in a row; the own element is given back as the peers get it."""
    buffer = comm.ll_buffer("float32", threads=128, protocol=protocol)
    patterns = [SENTINEL, TWIN, 0, 1 << 31, 1, 0x7F800000, 0x7FC00001, 0xFFFFFFFF, 0xFFFAFFF9]
    wrong = 0
    for call in range(2):
        bits = np.array([np.roll(patterns, r + call) for r in range(comm.size)], np.uint32)
        y = arrays.make(np.zeros(bits.size, "f4"))
        comm.launch(gather, buffer, arrays.make(bits[comm.rank].view("f4")), y)
        expected = bits.reshape(-1).copy()
        if protocol == "sentinel":
            expected[expected == SENTINEL] = TWIN
        wrong += int(np.count_nonzero(arrays.host(y).view("u4") != expected))
    assert agree(wrong) == [0] * comm.size


def test_launches_that_differ_between_ranks_are_named(
    world: MPI.Intracomm, backend: str, arrays: Arrays, monkeypatch: pytest.MonkeyPatch
) -> None:
    if world.size == 1:
        pytest.skip("one rank agrees with itself")
    monkeypatch.setenv("SHMEMAR_CHECK", "1")
    x = arrays.make(np.ones(4, "f4"))
    with shmemar.init(world, backend=backend, scratch_nbytes=1 << 20) as other:
        buffers = [other.ll_buffer("float32", threads=256) for _ in range(2)]
        for call, message in (
            (lambda r: (buffers[0], (x, x), 128 + 128 * (r % 2)), "threads differs between ranks"),
            (lambda r: (buffers[r % 2], (x, x), 128), "buffer differs between ranks"),
            (lambda r: (buffers[0], (x, x) if r else (x, 1), 128), "arguments differs between"),
        ):
            buffer, arguments, threads = call(world.rank)
            with pytest.raises(shmemar.MismatchError, match=message):
                other.launch(one_shot, buffer, *arguments, threads=threads)
        with pytest.raises(shmemar.MismatchError, match="kernel differs between ranks"):
            other.launch(one_shot if world.rank else gather, buffers[0], x, x)


def cannot_be_compiled(ll: Any, thread: int, nthreads: int) -> None:
    ll.send_everything()


def test_what_cannot_be_launched_is_refused(
    comm: shmemar.Communicator, arrays: Arrays, world: MPI.Intracomm, backend: str
) -> None:
    buffer = comm.ll_buffer("float32", threads=128)
    x = arrays.make(np.ones(4, "f4"))
    refused: list[tuple[tuple[Any, ...], dict[str, Any], type[Exception], str]] = [
        (("one_shot", buffer, x, x), {}, TypeError, "kernel is str"),
        ((one_shot, x, x), {}, TypeError, "buffer is"),
        ((one_shot, buffer, x, "y"), {}, TypeError, r"arguments\[1\] is str"),
        ((one_shot, buffer, x, 1j), {}, TypeError, r"arguments\[1\] is complex"),
        ((one_shot, buffer, x, 1 << 64), {}, ValueError, r"arguments\[1\] is 18446744073709551616"),
        ((one_shot, buffer, x, x), {"threads": 129}, ValueError, "threads is 129; expected 1 to"),
        ((cannot_be_compiled, buffer), {}, ValueError, "kernel cannot_be_compiled could not be"),
        ((one_shot, buffer, x), {}, ValueError, "kernel one_shot could not be compiled"),
    ]
    for arguments, options, error, message in refused:
        with pytest.raises(error, match=message):
            comm.launch(*arguments, **options)
    with (
        shmemar.init(world, backend=backend, scratch_nbytes=1 << 20) as other,
        pytest.raises(ValueError, match="buffer is another communicator's"),
    ):
        other.launch(one_shot, buffer, x, x)
    with pytest.raises(TypeError, match="dtype is float16; expected an integer of 8"):
        comm.ll_buffer("float16", threads=1)
    # It is whole after all that.
    y = arrays.make(np.zeros(4, "f4"))
    comm.launch(one_shot, buffer, x, y)
    assert arrays.host(y).tolist() == [comm.size] * 4


def test_buffers_that_differ_between_ranks_are_an_error_on_all(
    comm: shmemar.Communicator,
) -> None:
    if comm.size == 1:
        pytest.skip("one rank agrees with itself")
    message = r"buffer differs between ranks in ll_buffer.*256, 1\)"
    with pytest.raises(shmemar.MismatchError, match=message):
        comm.ll_buffer("float32", threads=128 + comm.rank)
    with pytest.raises(shmemar.MismatchError, match="buffer differs between ranks"):
        comm.ll_buffer("float32", threads=128, slots=1 + comm.rank % 2)
    with pytest.raises(ValueError, match=r"threads is 0|of rank 0"):
        comm.ll_buffer("float32", threads=comm.rank)


def test_a_buffer_that_does_not_fit_is_an_error_on_all(
    comm: shmemar.Communicator, backend: str
) -> None:
    if backend != "nvshmem":
        pytest.skip("memory of the host has no limit that is known before")
    with pytest.raises(shmemar.BackendUnavailableError):
        comm.ll_buffer("float32", threads=1 << 24)
    comm.ll_buffer("float32", threads=1)
