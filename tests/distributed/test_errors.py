"""Wrong use is refused on every rank before anything is launched; the next call works."""

from __future__ import annotations

import os
import re
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

import shmemar
from shmemar.host import emulation, session
from shmemar.host.bootstrap import Bootstrap
from shmemar.host.runtime import why_no_gpu

ONES = np.ones(8, np.float32)
WHOLE = np.ones(16, np.float32)
READ_ONLY = np.frombuffer(bytes(32), "f4")
CASES: dict[str, tuple[Any, dict[str, Any], type[Exception], str]] = {
    "unknown dtype": (np.ones(3, np.int16), {}, TypeError, "int16.*float16, bfloat16, float32"),
    "avg of integers": (np.ones(3, np.int32), {"op": "avg"}, ValueError, "average of integers"),
    "not an array": ([1.0], {}, TypeError, "x is list; expected an? "),
    "unknown op": (ONES, {"op": "mean"}, ValueError, "op is 'mean'; expected one of sum, prod"),
    "max of complex": (np.ones(3, np.complex64), {"op": "max"}, ValueError, "complex.*sum, prod"),
    "other count": (ONES, {"out": np.ones(7, np.float32)}, ValueError, "7 elements.*x, 8"),
    "other dtype": (ONES, {"out": np.ones(8)}, ValueError, "out has dtype float64.*float32"),
    "strided": (np.ones(16, np.float32)[::2], {}, ValueError, "x has shape.*C-contiguous"),
    "fortran": (np.ones((3, 2), order="F"), {}, ValueError, "ascontiguousarray"),
    "read-only out": (ONES, {"out": READ_ONLY}, ValueError, "out is read-only"),
    "read-only in place": (READ_ONLY, {"out": READ_ONLY}, ValueError, "x is read-only"),
    "overlap": (WHOLE[:8], {"out": WHOLE[3:11]}, ValueError, "12 bytes from x and overlaps"),
    "stream": (ONES, {"stream": object()}, ValueError, "stream is .*expected None"),
}


@pytest.mark.parametrize("case", CASES)
def test_wrong_arguments_are_refused(comm: shmemar.Communicator, agree: Any, case: str) -> None:
    x, arguments, kind, message = CASES[case]
    with pytest.raises(kind, match=message) as caught:
        comm.allreduce(x, **arguments)
    assert isinstance(caught.value, shmemar.ShmemarError)
    right = bool((comm.allreduce(np.ones(5, np.int32)) == comm.size).all())
    assert agree(right) == [True] * comm.size


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"backend": "cuda"}, "backend is 'cuda'; expected one of 'auto', 'nvshmem', 'emulated'"),
        ({"determinism": "yes"}, "determinism is 'yes'; expected one of 'run_to_run', 'bitwise'"),
        ({"scratch_nbytes": 10**30}, "scratch_nbytes is 10+; expected 1099511627776 at most"),
        ({"scratch_nbytes": 100}, "scratch_nbytes is 100; expected at least [0-9]+ for"),
        ({"device": "0"}, "device is '0'; expected the ordinal of a GPU, or None"),
        ({"scratch_nbytes": 1e6}, r"scratch_nbytes is 1000000\.0; expected a whole number"),
    ],
)
def test_wrong_arguments_of_init_are_refused(
    world: MPI.Intracomm, arguments: dict[str, Any], message: str
) -> None:
    with pytest.raises(shmemar.ConfigurationError, match=message):
        shmemar.init(world, **arguments)


def test_init_wants_an_intracommunicator() -> None:
    with pytest.raises(shmemar.ArgumentTypeError, match="comm is int; expected an mpi4py"):
        shmemar.init(3)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("variable", "text", "message"),
    [
        (
            "SHMEMAR_KERNEL",
            "three_shot",
            "SHMEMAR_KERNEL is 'three_shot'; expected one of one_shot",
        ),
        ("SHMEMAR_PROTOCOL", "tcp", "SHMEMAR_PROTOCOL is 'tcp'; expected one of ll"),
        ("SHMEMAR_TIMEOUT_S", "-1", "SHMEMAR_TIMEOUT_S is '-1'; expected seconds"),
        ("SHMEMAR_SCRATCH_NBYTES", "4M", "SHMEMAR_SCRATCH_NBYTES is '4M'; expected a whole number"),
    ],
)
def test_one_ranks_bad_variable_is_an_error_on_every_rank(
    world: MPI.Intracomm,
    backend: str,
    agree: Any,
    monkeypatch: pytest.MonkeyPatch,
    variable: str,
    text: str,
    message: str,
) -> None:
    last = world.size - 1
    if world.rank == last:
        monkeypatch.setenv(variable, text)
    with pytest.raises(shmemar.ConfigurationError, match=re.escape(message)) as caught:
        shmemar.init(world, backend=backend)
    named = world.rank == last or f"on rank {last}: " in str(caught.value)
    assert agree(named) == [True] * world.size


@pytest.mark.parametrize(
    ("variable", "values"),
    [("SHMEMAR_TIMEOUT_S", ("30", "40")), ("SHMEMAR_KERNEL", ("", "one_shot"))],
)
def test_a_difference_between_ranks_is_named(
    world: MPI.Intracomm,
    backend: str,
    agree: Any,
    monkeypatch: pytest.MonkeyPatch,
    variable: str,
    values: tuple[str, str],
) -> None:
    if world.size == 1:
        pytest.skip("one rank differs from nobody")
    monkeypatch.setenv(variable, values[world.rank == 1])
    with pytest.raises(shmemar.ConfigurationError) as caught:
        shmemar.init(world, backend=backend)
    message = str(caught.value)
    named = f"{variable} differs between ranks" in message and "on rank 1" in message
    assert agree(named) == [True] * world.size


@pytest.mark.parametrize(
    ("call", "field"),
    [
        (lambda comm, odd: comm.allreduce(np.ones(4 + odd, np.float32)), "count"),
        (lambda comm, odd: comm.allreduce(np.ones(4, "i4" if odd else "f4")), "dtype"),
        (lambda comm, odd: comm.allreduce(ONES, op="max" if odd else "sum"), "op"),
    ],
)
def test_calls_that_differ_are_named_in_check_mode(
    world: MPI.Intracomm,
    backend: str,
    agree: Any,
    monkeypatch: pytest.MonkeyPatch,
    call: Any,
    field: str,
) -> None:
    if world.size == 1:
        pytest.skip("one rank differs from nobody")
    monkeypatch.setenv("SHMEMAR_CHECK", "1")
    with shmemar.init(world, backend=backend) as comm:
        with pytest.raises(shmemar.MismatchError, match=f"{field} differs.*on rank") as caught:
            call(comm, world.rank == 1)
        after = bool((comm.allreduce(ONES) == world.size).all())
    assert agree((after, "call 1" in str(caught.value))) == [(True, True)] * world.size


def test_another_collective_is_named(
    world: MPI.Intracomm, backend: str, agree: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    if world.size == 1:
        pytest.skip("one rank differs from nobody")
    monkeypatch.setenv("SHMEMAR_CHECK", "1")
    with shmemar.init(world, backend=backend) as comm:
        with pytest.raises(shmemar.MismatchError, match=r"different things.*gather.* on rank 1"):
            comm.host_allgather({}) if world.rank == 1 else comm.allreduce(ONES)
        after = bool((comm.allreduce(ONES) == world.size).all())
    assert agree(after) == [True] * world.size


def test_a_first_call_of_another_kernel_is_named(world: MPI.Intracomm, agree: Any) -> None:
    if world.size == 1:
        pytest.skip("one rank differs from nobody")
    with shmemar.init(world, backend="emulated") as comm:
        with pytest.raises(shmemar.MismatchError, match=r"compile one_shot_ll_int32.* on rank 1"):
            comm.allreduce(np.ones(4, "i4" if world.rank == 1 else "f4"))
        after = bool((comm.allreduce(ONES) == world.size).all())
    assert agree(after) == [True] * world.size


def test_a_kernel_that_rank_0_cannot_compile_is_an_error_on_all(
    world: MPI.Intracomm, agree: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: Any) -> None:
        raise RuntimeError("planted")

    with shmemar.init(world, backend="emulated") as comm:
        monkeypatch.setattr(emulation, "generate", fails)
        with pytest.raises((RuntimeError, shmemar.ShmemarError), match="planted") as caught:
            comm.allreduce(ONES)
        named = world.rank == 0 or "on rank 0: RuntimeError: planted" in str(caught.value)
        monkeypatch.undo()
        after = bool((comm.allreduce(ONES) == world.size).all())
    assert agree((named, after)) == [(True, True)] * world.size


def test_code_that_one_rank_cannot_load_is_an_error_on_all(
    world: MPI.Intracomm, agree: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    last = world.size - 1

    def fails(_: Any) -> None:
        raise RuntimeError("planted")

    with shmemar.init(world, backend="emulated") as comm:
        if world.rank == last:
            monkeypatch.setattr(emulation, "load", fails)
        with pytest.raises((RuntimeError, shmemar.ShmemarError), match="planted") as caught:
            comm.allreduce(ONES)
        named = world.rank == last or f"on rank {last}: RuntimeError" in str(caught.value)
        monkeypatch.undo()
        after = bool((comm.allreduce(ONES) == world.size).all())
    assert agree((named, after)) == [(True, True)] * world.size


def test_a_kernel_that_ends_early_breaks_the_communicator(
    world: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ends_early(*_: Any) -> None:
        raise MemoryError("the kernel ended early")

    monkeypatch.setattr(emulation, "load", lambda _: ends_early)
    monkeypatch.setattr(session, "leave_without_finalize", lambda: None)
    comm = shmemar.init(world, backend="emulated")
    with pytest.raises(shmemar.DeviceError, match=r"could not launch one_shot_ll.*ended early"):
        comm.allreduce(ONES)
    with pytest.raises(shmemar.DeviceError, match="ended early"):
        comm.check()
    comm.close()


def test_large_objects_are_gathered(comm: shmemar.Communicator, agree: Any) -> None:
    gathered = comm.host_allgather(bytes([comm.rank]) * 1_000_000)
    right = gathered == [bytes([rank]) * 1_000_000 for rank in range(comm.size)]
    assert agree(right) == [True] * comm.size


def test_the_null_communicator_is_refused(world: MPI.Intracomm) -> None:
    nobody: Any = world.Split(MPI.UNDEFINED)
    with pytest.raises(shmemar.ArgumentError, match=r"MPI\.COMM_NULL"):
        shmemar.init(nobody)


def test_one_ranks_other_error_is_raised_on_every_rank(
    world: MPI.Intracomm, agree: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    last = world.size - 1
    if world.rank == last:

        def full(_descriptor: int, _offset: int, _nbytes: int) -> None:
            raise MemoryError("planted")

        monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises((MemoryError, shmemar.ShmemarError), match="planted") as caught:
        shmemar.init(world, backend="emulated")
    named = world.rank == last or f"on rank {last}: MemoryError" in str(caught.value)
    assert agree(named) == [True] * world.size


def test_one_ranks_wrong_argument_is_raised_on_every_rank_in_check_mode(
    world: MPI.Intracomm, backend: str, agree: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHMEMAR_CHECK", "1")
    last = world.size - 1
    with shmemar.init(world, backend=backend) as comm:
        with pytest.raises(shmemar.ArgumentError, match="op is 'mean'") as caught:
            comm.allreduce(ONES, op="mean" if world.rank == last else "sum")
        after = bool((comm.allreduce(ONES) == world.size).all())
    named = world.rank == last or f"on rank {last}: " in str(caught.value)
    assert agree((after, named)) == [(True, True)] * world.size


def test_the_nvshmem_backend_is_refused_with_the_reason(world: MPI.Intracomm) -> None:
    reason = why_no_gpu()
    if reason is None:
        pytest.skip("there is a GPU and NVSHMEM")
    with pytest.raises(
        shmemar.BackendUnavailableError, match="or use backend='emulated'"
    ) as caught:
        shmemar.init(world, backend="nvshmem")
    assert str(caught.value) == reason


def test_auto_falls_back_to_emulation_and_says_why(
    world: MPI.Intracomm, caplog: pytest.LogCaptureFixture
) -> None:
    if why_no_gpu() is None:
        pytest.skip("there is a GPU and NVSHMEM")
    with shmemar.init(world) as comm:
        assert comm.backend.value == "emulated"
    said = [record.getMessage() for record in caplog.records if "emulated" in record.getMessage()]
    assert len(said) == (world.rank == 0)
    assert all("kernels run on the CPU, because no GPU" in text for text in said)


def test_emulated_ranks_on_different_hosts_are_refused(
    world: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Bootstrap, "shares_memory", lambda _: False)
    monkeypatch.setattr(Bootstrap, "hosts", lambda _: ["alpha", "beta"])
    with pytest.raises(shmemar.BackendUnavailableError, match=r"one host.*alpha, beta"):
        shmemar.init(world, backend="emulated")


def test_symmetric_allocations_of_different_size_are_refused(comm: shmemar.Communicator) -> None:
    if comm.size == 1:
        pytest.skip("one rank differs from nobody")
    with pytest.raises(shmemar.MismatchError, match="rank 0 64, rank 1 65"):
        comm._heap.allocate(64 + comm.rank)


def test_host_arrays_are_reduced_by_mpi(comm: shmemar.Communicator, agree: Any) -> None:
    x = np.arange(6.0).reshape(2, 3) + comm.rank
    out = np.empty(6)
    comm._bootstrap.allreduce_host(x, out, "sum")
    expected = comm.size * np.arange(6.0) + sum(range(comm.size))
    untouched = bool((x == np.arange(6.0).reshape(2, 3) + comm.rank).all())
    comm._bootstrap.allreduce_host(x, x, "max")
    right = bool((out == expected).all() and (x.ravel() == np.arange(6.0) + comm.size - 1).all())
    assert agree((right, untouched)) == [(True, True)] * comm.size
