"""Making, closing and abandoning communicators."""

from __future__ import annotations

import gc
import os
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import shmemar
from shmemar.dtypes import DTYPES
from shmemar.host import emulation, session
from shmemar.host.bootstrap import Bootstrap
from shmemar.host.runtime import NvshmemRuntime
from shmemar.spec import Kernel, KernelSpec, Protocol

if TYPE_CHECKING:
    from mpi4py import MPI

    from shmemar.host.arrays import Arrays

ONES = np.ones(8, np.float32)


def test_a_closed_communicator_refuses_calls(world: MPI.Intracomm, backend: str) -> None:
    comm = shmemar.init(world, backend=backend)
    comm.allreduce(ONES)
    comm.close()
    comm.close()
    with pytest.raises(shmemar.ClosedError, match=r"closed; make a new one with shmemar\.init"):
        comm.allreduce(ONES)
    with pytest.raises(shmemar.ClosedError):
        comm.check()
    assert "closed" in repr(comm)


def test_check_says_nothing_of_a_whole_communicator(comm: shmemar.Communicator) -> None:
    comm.check()
    assert (
        repr(comm)
        == f"<shmemar.Communicator rank {comm.rank} of {comm.size}, {comm.backend.value}>"
    )


def test_a_launch_that_is_refused_breaks_the_communicator(
    world: MPI.Intracomm, backend: str, arrays: Arrays, agree: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> None:
        raise shmemar.DeviceError("CUDA refused a call: CUDA_ERROR_ILLEGAL_ADDRESS: so it says.")

    x = arrays.make(ONES)
    comm = shmemar.init(world, backend=backend)
    comm.allreduce(x)
    left: list[None] = []
    monkeypatch.setattr(session, "leave_without_finalize", lambda: left.append(None))
    monkeypatch.setattr(comm._runtime, "launch", refuse)
    comm._eager.clear()  # which launches a call like the one before by itself
    with pytest.raises(shmemar.DeviceError, match=r"could not launch one_shot.*ILLEGAL_ADDRESS"):
        comm.allreduce(x)
    monkeypatch.undo()
    with pytest.raises(shmemar.DeviceError, match=rf"rank {comm.rank} could not launch"):
        comm.allreduce(x)
    assert "broken" in repr(comm)
    comm.close()
    assert agree(len(left)) == [1] * world.size


@pytest.mark.parametrize("what", ["allocate_private", "allocate_control"])
@pytest.mark.parametrize("kind", [shmemar.BackendUnavailableError, MemoryError])
def test_memory_that_one_rank_lacks_is_an_error_on_all(
    world: MPI.Intracomm,
    backend: str,
    agree: Any,
    monkeypatch: pytest.MonkeyPatch,
    what: str,
    kind: type[Exception],
) -> None:
    def refuse(*_: Any) -> None:
        raise kind("out of memory")

    if world.rank == world.size - 1:
        for runtime in (emulation.EmulatedRuntime, NvshmemRuntime):
            monkeypatch.setattr(runtime, what, refuse)
    own = kind if world.rank == world.size - 1 else shmemar.ShmemarError
    with pytest.raises(own, match="out of memory"):
        shmemar.init(world, backend=backend)
    monkeypatch.undo()
    with shmemar.init(world, backend=backend) as comm:
        assert agree(comm.size) == [world.size] * world.size


def test_scratch_that_one_rank_lacks_leaves_nothing_behind(
    world: MPI.Intracomm, backend: str, agree: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of two-shot kernels it is allocated at the first call; broadcasts want the one-shot's."""
    monkeypatch.setenv("SHMEMAR_KERNEL", "two_shot")
    monkeypatch.setenv("SHMEMAR_TWO_SHOT_SCRATCH_NBYTES", str(2 * world.size * 256 * 16))

    def refuse(*_: Any) -> None:
        raise shmemar.BackendUnavailableError("out of memory")

    with shmemar.init(world, backend=backend) as comm:
        before = comm._heap.nbytes
        if world.rank == 0:
            monkeypatch.setattr(comm._runtime, "allocate_private", refuse)
        for _ in range(3):
            with pytest.raises(shmemar.BackendUnavailableError, match="out of memory"):
                comm._kernels.scratch_for(
                    KernelSpec(
                        Kernel.BROADCAST,
                        Protocol.LL,
                        DTYPES["uint32"],
                        shmemar.ReduceOp.SUM,
                        world.size,
                    )
                )
        assert agree(comm._heap.nbytes - before) == [0] * world.size
        monkeypatch.undo()


def test_many_communicators_leave_nothing_behind(
    world: MPI.Intracomm, backend: str, agree: Any
) -> None:
    def cycle() -> None:
        with shmemar.init(world, backend=backend) as comm:
            comm.allreduce(ONES)

    def held() -> tuple[int, int]:
        mapped = Path("/proc/self/maps").read_text().count("memfd:shmemar")
        return mapped, len(os.listdir("/proc/self/fd"))  # noqa: PTH208

    for _ in range(3):
        cycle()
    before = held()
    for _ in range(30):
        cycle()
    assert agree(held() == before) == [True] * world.size


def test_shared_memory_has_no_name(comm: shmemar.Communicator, agree: Any) -> None:
    if comm.backend.value != "emulated":
        pytest.skip("shared memory is the emulated backend's")
    maps = [
        line for line in Path("/proc/self/maps").read_text().splitlines() if "memfd:shmemar" in line
    ]
    assert agree(len(maps) >= comm.size) == [True] * comm.size
    assert agree(all(line.endswith("(deleted)") for line in maps)) == [True] * comm.size


def test_an_exception_in_the_body_abandons_the_communicator(
    world: MPI.Intracomm, backend: str
) -> None:
    with pytest.raises(KeyError), shmemar.init(world, backend=backend) as comm:
        raise KeyError("the body's own")
    with pytest.raises(shmemar.ClosedError):
        comm.allreduce(ONES)


def test_abandoned_communicators_leave_nothing_mapped(
    world: MPI.Intracomm, backend: str, agree: Any
) -> None:
    if backend != "emulated":
        pytest.skip("on GPUs peers may still store to what was abandoned")
    before = Path("/proc/self/maps").read_text().count("memfd:shmemar")
    comm = shmemar.init(world, backend=backend)
    during = Path("/proc/self/maps").read_text().count("memfd:shmemar")
    with pytest.raises(KeyError), comm:
        raise KeyError
    after = Path("/proc/self/maps").read_text().count("memfd:shmemar")
    assert agree((during > before, after == before)) == [(True, True)] * world.size


def test_closing_after_mpi_has_ended_is_not_collective(
    world: MPI.Intracomm, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    comm = shmemar.init(world, backend=backend)
    monkeypatch.setattr(Bootstrap, "is_alive", False)
    monkeypatch.setattr(Bootstrap, "allgather", None)
    comm.close()
    with pytest.raises(shmemar.ClosedError):
        comm.check()


def test_a_forgotten_communicator_warns_and_frees_nothing(
    world: MPI.Intracomm, backend: str
) -> None:
    comm = shmemar.init(world, backend=backend)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", ResourceWarning)
        del comm
        gc.collect()
    assert any("was not closed" in str(warning.message) for warning in caught)
