"""The applications' communicators, as far as one process shows them."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from mpi4py import MPI

from benchmarks.apps.communicator_backends import BACKENDS, most_summed_alike
from benchmarks.apps.communicators import NAMES, Communicator, Counts, alone, open_communicators
from shmemar.dtypes import DTYPES
from shmemar.errors import ArgumentError, ArgumentTypeError, BackendUnavailableError, ClosedError
from shmemar.host.interop import Operand

if TYPE_CHECKING:
    from collections.abc import Iterator

ON_CPU = ["shmemar", "mpi", "self"]


@pytest.fixture(scope="module")
def opened() -> Iterator[dict[str, Communicator]]:
    made = open_communicators(MPI.COMM_SELF, ON_CPU, backend="emulated")
    yield made
    for each in made.values():
        each.close()


@pytest.mark.parametrize("name", ["mpi", "self"])
def test_one_rank_sums_to_itself_and_counts(opened: dict[str, Communicator], name: str) -> None:
    comm = opened[name]
    assert (comm.name, comm.rank, comm.size, comm.xp) == (name, 0, 1, np)
    assert not comm.capturable
    comm.counts.clear()
    x = comm.empty((3, 5), "float64")
    x[...] = np.arange(15).reshape(3, 5)
    comm.allreduce(x)
    comm.allreduce(x[1])
    comm.broadcast(x, 0)
    comm.barrier()
    assert np.array_equal(x, np.arange(15).reshape(3, 5))
    assert comm.counts.calls == {"allreduce": 2, "broadcast": 1}
    assert comm.counts.nbytes == {"allreduce": 160, "broadcast": 120}
    assert comm.counts.seconds > 0
    assert comm.host_allgather("x") == ["x"]


@pytest.mark.parametrize("name", ["shmemar", "mpi"])
def test_what_cannot_be_summed_is_refused(opened: dict[str, Communicator], name: str) -> None:
    comm = opened[name]
    before = dict(comm.counts.calls)
    with pytest.raises(ArgumentTypeError, match=r"x is list; expected a numpy\.ndarray"):
        comm.allreduce([1.0])
    with pytest.raises(ArgumentError, match="expected a C-contiguous array"):
        comm.allreduce(np.ones((4, 4))[:, 1])
    assert comm.counts.calls == before


def test_counts_begin_again() -> None:
    counts = Counts()
    counts.add("allreduce", 8, 0.5)
    counts.add("allreduce", 16, 0.25)
    assert (counts.calls, counts.nbytes) == ({"allreduce": 2}, {"allreduce": 24})
    assert counts.seconds == 0.75
    counts.clear()
    assert counts == Counts()


def test_a_process_without_mpi_is_a_communicator_too() -> None:
    comm = alone()
    x = comm.empty(4, "complex64")
    x[...] = 1j
    comm.allreduce(x)
    comm.broadcast(x, 0)
    comm.barrier()
    assert np.array_equal(x, np.full(4, 1j, "complex64"))
    assert comm.counts.calls == {"allreduce": 1, "broadcast": 1}
    with pytest.raises(ArgumentError, match="root is 1; expected 0"):
        comm.broadcast(x, 1)


def test_the_last_of_them_to_close_closes_what_is_behind() -> None:
    made = open_communicators(MPI.COMM_SELF, ["mpi", "self"], backend="emulated")
    made["mpi"].close()
    made["mpi"].close()
    assert made["self"].host_allgather(1) == [1]
    made["self"].close()
    with pytest.raises(ClosedError):
        made["self"].barrier()


def test_what_was_opened_before_an_error_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    """An error of another class than shmemar's, too."""
    jobs: list[Any] = []

    def fail(job: Any) -> None:
        jobs.append(job)
        raise ValueError("no such library")

    monkeypatch.setattr(BACKENDS["self"], "settle", fail)
    with pytest.raises(ValueError, match="no such library"):
        open_communicators(MPI.COMM_SELF, ["mpi", "self"], backend="emulated")
    assert jobs[0].users == 0
    with pytest.raises(ClosedError):
        jobs[0].ours.host_barrier()


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["ring"], "backends have 'ring'; expected some of shmemar, nvshmem, nccl, mpi, self"),
        ([], "backends have none; expected some of"),
        (["mpi", "self", "mpi"], "backends are mpi, self, mpi; expected each once"),
    ],
)
def test_names_that_cannot_be_opened_are_refused(names: list[str], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        open_communicators(MPI.COMM_SELF, names, backend="emulated")


def test_ranks_that_name_different_ones_are_refused() -> None:
    def allgather(own: Any) -> list[Any]:
        return [own, ("mpi",)]

    ranks: Any = SimpleNamespace(allgather=allgather)
    with pytest.raises(ArgumentError, match="differ between ranks: mpi, self on rank 0, mpi on"):
        open_communicators(ranks, ["mpi", "self"])


@pytest.mark.parametrize("name", [name for name in NAMES if name not in ON_CPU])
def test_what_needs_gpus_is_refused_without(name: str) -> None:
    with pytest.raises(BackendUnavailableError, match=f"backend {name} needs GPUs"):
        open_communicators(MPI.COMM_SELF, ["mpi", name], backend="emulated")


class _Reductions:
    """NVSHMEM's bindings, which take notes: where to, where from, how many."""

    def __init__(self) -> None:
        self.calls: list[tuple[int, int, int]] = []

    def double_sum_reduce_on_stream(
        self, team: int, to: int, at: int, count: int, stream: int
    ) -> None:
        self.calls.append((to, at, count))


STAGED, REDUCED, GIVEN = 1 << 21, 1 << 22, 1 << 20


def _sum_over_nvshmem(
    monkeypatch: pytest.MonkeyPatch, size: int, operand: Operand, *, shares_gpu: bool
) -> tuple[list[tuple[int, int, int]], list[tuple[int, ...]]]:
    """Its calls of reductions, and of copies."""
    bindings, moves = _Reductions(), []
    monkeypatch.setitem(sys.modules, "nvshmem", SimpleNamespace(bindings=bindings))
    monkeypatch.setitem(sys.modules, "nvshmem.bindings", bindings)
    ours = SimpleNamespace(rank=0, size=size, _runtime=SimpleNamespace(shares_gpu=shares_gpu))
    job: Any = SimpleNamespace(
        ours=ours, xp=np, on_gpus=True, users=0, operand=lambda _: (operand, 7)
    )
    comm: Any = BACKENDS["nvshmem"](job, list(range(size)))
    comm._buffers = lambda operand, stream: (STAGED, REDUCED)
    comm._move = lambda *arguments: moves.append(arguments)
    comm.allreduce(SimpleNamespace(nbytes=operand.nbytes))
    return bindings.calls, moves


@pytest.mark.parametrize(
    ("size", "count", "counts"),
    [
        (1, 10_000, [10_000]),
        (2, 10_000, [10_000]),
        (3, 10_000, [10_000]),
        (6, 10_000, [10_000]),
        (4, 0, []),
        (4, 4672, [4672]),
        (4, 4673, [4672, 1]),
        (4, 9344, [4672, 4672]),
        (8, 10_000, [3264, 3264, 3264, 208]),
    ],
)
def test_ranks_that_share_a_gpu_sum_over_nvshmem_in_parts(
    monkeypatch: pytest.MonkeyPatch, size: int, count: int, counts: list[int]
) -> None:
    operand = Operand(GIVEN, count, DTYPES["float64"])
    calls, moves = _sum_over_nvshmem(monkeypatch, size, operand, shares_gpu=True)
    starts = [8 * sum(counts[:i]) for i in range(len(counts))]
    assert calls == [
        (REDUCED + start, STAGED + start, part) for start, part in zip(starts, counts, strict=True)
    ]
    assert moves == [(GIVEN, REDUCED, 8 * count, 7)]


def test_parts_of_complex_numbers_are_of_their_components(monkeypatch: pytest.MonkeyPatch) -> None:
    operand = Operand(GIVEN, 2500, DTYPES["complex128"])
    calls, moves = _sum_over_nvshmem(monkeypatch, 4, operand, shares_gpu=True)
    assert calls == [
        (REDUCED, STAGED, 4672),
        (REDUCED + 8 * 4672, STAGED + 8 * 4672, 5000 - 4672),
    ]
    assert moves == [(GIVEN, REDUCED, 40_000, 7)]


@pytest.mark.parametrize(
    ("disables", "nparts"), [("", 1), ("0", 1), ("false", 1), ("1", 3), ("true", 3)]
)
def test_ranks_with_gpus_of_their_own_leave_whole_sums_to_nccl(
    monkeypatch: pytest.MonkeyPatch, disables: str, nparts: int
) -> None:
    monkeypatch.setenv("NVSHMEM_DISABLE_NCCL", disables)
    operand = Operand(GIVEN, 10_000, DTYPES["float64"])
    calls, _ = _sum_over_nvshmem(monkeypatch, 4, operand, shares_gpu=False)
    assert len(calls) == nparts


@pytest.mark.parametrize(("nranks", "messages"), [(4, 7), (8, 10), (16, 13)])
def test_a_part_fits_into_nvshmems_scratch_memory(nranks: int, messages: int) -> None:
    most = most_summed_alike(nranks)
    assert messages * most <= (512 * 1024 // 2) // 8 < messages * (most + 64)
    assert most % 64 == 0
