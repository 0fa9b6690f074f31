"""Lanczos over communicators: the same eigenvalues from each, and the collectives it makes."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from benchmarks.apps.communicators import open_communicators
from benchmarks.apps.lanczos import main, solve, time_alone
from benchmarks.apps.lanczos_problem import Grid
from benchmarks.apps.lanczos_solver import Lanczos
from benchmarks.apps.lanczos_terms import Options
from shmemar.errors import ArgumentError, MismatchError, ShmemarError
from tests.distributed.app_programs import AppProgram, is_told_apart

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from mpi4py import MPI

    from benchmarks.apps.communicators import Communicator

GRID = Grid(9, 8, 10)
OPTIONS = Options(4, 16, 1e-10)


@pytest.fixture(scope="module")
def communicators(world: MPI.Intracomm, backend: str) -> Iterator[dict[str, Communicator]]:
    made = open_communicators(world, ["shmemar", "mpi", "self"], backend=backend)
    yield made
    for each in made.values():
        each.close()


@pytest.mark.parametrize("which", ["smallest", "largest"])
def test_backends_converge_to_the_exact_values(
    world: MPI.Intracomm, communicators: dict[str, Communicator], agree: Any, which: str
) -> None:
    options = Options(4, 16, 1e-10, which)
    results = [solve(world, communicators[name], GRID, options) for name in ("shmemar", "mpi")]
    exact = GRID.eigenvalues(4, which)
    for result in results:
        np.testing.assert_allclose(result.eigenvalues, exact, rtol=1e-10)
        assert result.is_right
        assert result.restarts > 0
        assert result.alike
        assert result.allreduces == result.iterations * (3 if world.size > 1 else 2) + 1
        assert len(result.microseconds) == result.restarts + 1
        counted = result.counted
        assert (counted.steps, counted.scalars) == (16, 32)
        assert counted.scalar_nbytes == sum(8 * (j + 1) + 8 * (j + 2) for j in range(16))
        assert counted.halos == (16 if world.size > 1 else 0)
        assert counted.halo_nbytes == counted.halos * 8 * 2 * world.size * 9 * 8
    # The same bits on all ranks.
    assert len(set(agree(repr([each.eigenvalues for each in results])))) == 1


def test_without_sums_as_many_cycles_are_timed(
    world: MPI.Intracomm, communicators: dict[str, Communicator]
) -> None:
    assert time_alone(world, communicators["self"], GRID, OPTIONS, 3) > 0


class _Differing:
    """A communicator whose sums are one bit off on the last rank, from the 50th on."""

    def __init__(self, comm: Communicator, name: str) -> None:
        self._comm, self._calls, self.name = comm, 0, name

    def __getattr__(self, name: str) -> Any:
        return getattr(self._comm, name)

    def allreduce(self, x: Any) -> None:
        self._comm.allreduce(x)
        self._calls += 1
        if self._calls > 50 and self._comm.rank == self._comm.size - 1:
            x[-1] *= 1 + 2.0**-52


def test_ranks_whose_scalars_differ_by_a_bit_are_an_error_of_shmemar_alone(
    world: MPI.Intracomm, communicators: dict[str, Communicator], agree: Any
) -> None:
    comm: Any = _Differing(communicators["mpi"], "mpi")
    result = solve(world, comm, GRID, OPTIONS)
    assert result.is_right
    assert result.alike == (world.size == 1)
    assert len(set(agree(repr((result.eigenvalues, result.iterations))))) == 1
    comm = _Differing(communicators["mpi"], "shmemar")
    if world.size == 1:
        assert solve(world, comm, GRID, OPTIONS).alike
        return
    with pytest.raises(MismatchError, match=rf"of ranks {world.size - 1} differ"):
        solve(world, comm, GRID, OPTIONS)


def test_a_rank_that_can_not_allocate_is_told_by_all(
    world: MPI.Intracomm,
    communicators: dict[str, Communicator],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(*_: Any) -> None:
        raise MemoryError("no room")

    if world.rank == world.size - 1:
        monkeypatch.setattr(Lanczos, "_allocate", fail)
    expected = MemoryError if world.rank == world.size - 1 else ShmemarError
    with pytest.raises(expected, match="no room"):
        solve(world, communicators["mpi"], GRID, OPTIONS)


def test_more_ranks_than_planes_are_refused(
    world: MPI.Intracomm, communicators: dict[str, Communicator]
) -> None:
    flat = Grid(40, 9, world.size - 1) if world.size > 1 else Grid(6, 6, 5)
    with pytest.raises(ArgumentError, match=r"planes along z for|are equal"):
        solve(world, communicators["mpi"], flat, OPTIONS)


@pytest.fixture
def program(world: MPI.Intracomm, backend: str, capfd: pytest.CaptureFixture[str]) -> AppProgram:
    return AppProgram(main, world, backend, capfd)


def test_the_program_prints_and_keeps_results(
    world: MPI.Intracomm,
    backend: str,
    program: AppProgram,
    tmp_path: Path,
) -> None:
    file = tmp_path / "lanczos.json"
    given = ("--grid", "7,6,8", "--wanted", "2", "--basis", "10", "--json", str(file))
    status, told, _ = program.run(*given, "--backend", "shmemar,mpi")
    assert status == 0
    if world.rank:
        assert not told
        return
    assert "# all results right" in told
    assert "#" in told.splitlines()[0]
    document = json.loads(file.read_text(encoding="utf-8"))
    assert document["ranks"] == str(world.size)
    assert list(document["backends"]) == ["shmemar", "mpi"]
    for name, result in document["backends"].items():
        np.testing.assert_allclose(result["eigenvalues"], document["exact"], rtol=1e-10)
        is_known = world.size > 1 and is_told_apart(name, backend)
        assert (result["alone_us"] is not None) == is_known
        assert result["median_us"] > 0


def test_self_is_refused_where_there_is_something_to_sum(
    world: MPI.Intracomm, program: AppProgram
) -> None:
    if world.size == 1:
        pytest.skip("one rank sums nothing")
    program.assert_refused("--backend", "mpi,self", message="which it does not sum")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--grid", "8,8,9"), "are equal"),
        (("--grid", "8"), "grid is '8'"),
        (("--basis", "4"), "basis is 4 for 8"),
        (("--backend", "ring"), "backends have 'ring'"),
        (("--json", "/proc/nowhere/file"), "can't be written"),
        (("--grid", "3000,2999,2998"), "GiB of memory are needed by"),
        (("--restarts", "0"), "restarts is 0, within which"),
    ],
)
def test_wrong_arguments_are_one_line_of_rank_0(
    program: AppProgram, arguments: tuple[str, ...], message: str
) -> None:
    program.assert_refused("--backend", "mpi", *arguments, message=message)
