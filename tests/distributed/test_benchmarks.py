"""The benchmarks catch what is wrong, and who ran something else than it says."""

from __future__ import annotations

import argparse
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import shmemar
from benchmarks.__main__ import _contenders
from benchmarks.buffers import Buffers, Case, empty_array
from benchmarks.contender import GRAPHS, Opened, ran_only
from benchmarks.contenders import Mpi, Ours, contender_of
from benchmarks.timing import MODES, measure, why_not
from shmemar.dtypes import DTYPES, ReduceOp
from shmemar.host.selector import CANDIDATES, Candidate
from shmemar.spec import Kernel, Protocol

if TYPE_CHECKING:
    from mpi4py import MPI

CASE = Case(DTYPES["float32"], ReduceOp.SUM, 256, samples=2, repeats=6)


class _Planted(Mpi):
    """A contender whose sums are one too large on the last rank, in their last element."""

    def open(self, comm: shmemar.Communicator, case: Case, data: Buffers | None) -> Opened:
        opened = super().open(comm, case, data)

        def call(number: int, stream: Any) -> None:
            opened.call(number, stream)
            if comm.rank == comm.size - 1:
                opened.data.destination(number)[-1] += 1

        return replace(opened, call=call)


def test_wrong_results_of_a_contender_are_caught(comm: shmemar.Communicator, agree: Any) -> None:
    right, wrong = measure(comm, "eager", CASE, [Mpi(), _Planted()])
    assert (right.wrong, right.failed) == (0, False)
    # One element of every sample, and of those before them.
    assert (wrong.wrong, wrong.failed) == (CASE.samples + 3, True)
    assert agree(wrong) == [wrong] * comm.size


class _Full(Ours):
    """A contender whose arrays the last rank has no room for; opening it is collective."""

    def make(self, comm: shmemar.Communicator, case: Case) -> Buffers | None:
        if comm.rank == comm.size - 1:
            raise MemoryError("there is\n none")
        return super().make(comm, case)


class _Refusing(Mpi):
    """A contender that the last rank can't open."""

    def open(self, comm: shmemar.Communicator, case: Case, data: Buffers | None) -> Opened:
        if comm.rank == comm.size - 1:
            raise RuntimeError("it is\n broken")
        return super().open(comm, case, data)


class _Picky(Mpi):
    """A contender that the last rank says not to have."""

    def why_not(self, comm: shmemar.Communicator, case: Case) -> str | None:
        return "it is not installed" if comm.rank == comm.size - 1 else None


def test_a_contender_that_one_rank_lacks_is_a_row_on_all(
    comm: shmemar.Communicator, agree: Any
) -> None:
    full, refusing, picky, right = measure(
        comm, "eager", CASE, [_Full(), _Refusing(), _Picky(), Mpi()]
    )
    last = comm.size - 1
    assert (full.median_us, full.note) == (None, f"rank {last}: MemoryError: there is none")
    assert (refusing.median_us, refusing.note) == (None, f"rank {last}: RuntimeError: it is broken")
    assert (picky.median_us, picky.note) == (None, "it is not installed")
    assert right.median_us is not None
    assert agree((full, refusing, picky)) == [(full, refusing, picky)] * comm.size


@pytest.mark.parametrize("candidate", CANDIDATES, ids=[each.name for each in CANDIDATES])
def test_each_of_our_kernels_is_measured_by_its_name(
    world: MPI.Intracomm, backend: str, candidate: Candidate
) -> None:
    if not candidate.kernel.has_code and world.size > 2:
        pytest.skip("of floats it serves more than two ranks only where it is pinned")
    with shmemar.init(world, backend=backend, determinism="not_guaranteed") as comm:
        table = comm.table
        (row,) = measure(comm, "eager", CASE, [Ours(candidate)])
        assert (row.kernel, row.wrong, row.note) == (candidate.name, 0, "")
        assert comm.table == table


def test_a_kernel_that_cannot_serve_is_a_row_with_the_reason(comm: shmemar.Communicator) -> None:
    case = replace(CASE, dtype=DTYPES["int32"])
    (row,) = measure(comm, "eager", case, [Ours(Candidate(Kernel.ONE_SHOT, Protocol.SENTINEL))])
    assert row.median_us is None
    assert row.note.startswith("protocol is sentinel, and dtype int32")
    assert row.kernel == "one_shot/sentinel"


def test_buffers_hold_what_comes_out_in_the_end(comm: shmemar.Communicator) -> None:
    data = Buffers(comm, CASE, partial(empty_array, comm.backend))
    data.fill(3)
    assert data.count_wrong(3, 6) > 0  # they are poisoned
    for number in range(data.nbuffers):
        comm.allreduce(data.source(number), out=data.destination(number))
    assert data.count_wrong(3, 6) == 0
    data.destination(2)[5] += 1
    assert data.count_wrong(3, 6) == 1


def test_a_mode_that_is_not_possible_is_refused(comm: shmemar.Communicator, backend: str) -> None:
    if backend == "emulated":
        assert why_not(comm, "graph") == "it needs GPUs"
        with pytest.raises(shmemar.ArgumentError, match="mode graph is not possible: it needs"):
            measure(comm, "graph", CASE, [Ours()])
    in_place = replace(CASE, in_place=True)
    with pytest.raises(shmemar.ArgumentError, match="is not possible"):
        measure(comm, "device", in_place, [Ours()])


def test_an_unknown_contender_is_refused() -> None:
    with pytest.raises(shmemar.ArgumentError, match="contenders have 'ring'; expected some of"):
        contender_of("ring")


@pytest.mark.parametrize(
    ("ran", "expected"),
    [
        (("ncclDevKernel_AllReduce_Sum",), True),
        (("node: wait_event", "ncclDevKernel_AllReduce_Sum"), True),
        (("ncclDevKernel_AllReduce_Sum", "other"), False),
        (("node: memcpy",), False),
        ((), False),
    ],
)
def test_kernels_are_known_by_their_names(ran: tuple[str, ...], expected: bool) -> None:
    assert ran_only(("ncclDevKernel",), ran) is expected


class _Lying(Ours):
    """Runs one kernel, and says that it is another."""

    def open(self, comm: shmemar.Communicator, case: Case, data: Buffers | None) -> Opened:
        opened = super().open(comm, case, data)
        other = Ours(Candidate(Kernel.TWO_SHOT, Protocol.LL)).open(comm, case, data)
        return replace(other, must_run=opened.must_run, kernel=opened.kernel)


@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["graph", "behind", "early"])
def test_a_contender_that_ran_another_kernel_is_caught(
    comm: shmemar.Communicator, backend: str, agree: Any, mode: str
) -> None:
    if backend != "nvshmem":
        pytest.skip("--backend is not nvshmem")
    candidate = Candidate(Kernel.ONE_SHOT, Protocol.LL)
    honest, lying = measure(comm, mode, CASE, [Ours(candidate), _Lying(candidate)])
    assert (honest.note, honest.failed) == ("", False)
    assert honest.ran == (f"one_shot_ll_float32_sum_{comm.size}",)
    assert lying.note == f"ran another kernel: two_shot_ll_float32_sum_{comm.size}"
    assert lying.failed
    assert (honest.wrong, lying.wrong) == (0, 0)
    assert agree(lying) == [lying] * comm.size


@pytest.mark.gpu
def test_every_mode_is_measured_on_a_gpu(comm: shmemar.Communicator, backend: str) -> None:
    if backend != "nvshmem":
        pytest.skip("--backend is not nvshmem")
    for mode in MODES:
        rows = measure(comm, mode, CASE, [Ours(pdl=True), Ours(pdl=False), contender_of("mpi")])
        assert all(row.wrong == 0 and np.isfinite(row.median_us or 0) for row in rows)
        assert len(rows) == (3 if mode == "eager" else 2)


def test_pdl_is_compared_in_graphs_alone() -> None:
    arguments = argparse.Namespace(contenders="shmemar", pdl="both", kernels=None, protocols=None)
    found = _contenders(arguments)
    assert [(each.name, each.modes) for each in found] == [
        ("shmemar", ("device", "eager")),
        ("shmemar-pdl", GRAPHS),
        ("shmemar-no-pdl", GRAPHS),
    ]
