"""Lanczos on one rank, without MPI, and its GPU kernels in numba's simulator and compiled."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import weakref
from hashlib import sha256
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from benchmarks.apps.agreement import of_first
from benchmarks.apps.communicators import alone
from benchmarks.apps.lanczos import Result, summarise
from benchmarks.apps.lanczos_local import CpuWork
from benchmarks.apps.lanczos_problem import Grid
from benchmarks.apps.lanczos_solver import Lanczos, projected
from benchmarks.apps.lanczos_terms import Counted, Options, basis_nbytes
from benchmarks.apps.reporting import require_memory, side_by_side
from shmemar.errors import ArgumentError, MismatchError
from tests.launcher import ROOT

if TYPE_CHECKING:
    from collections.abc import Callable

    from benchmarks.apps.communicators import Communicator
    from benchmarks.apps.lanczos_problem import Slab


class _OneRank:
    """What is asked of mpi4py, of one rank."""

    size = 1
    rank = 0

    @staticmethod
    def allgather(item: Any) -> list[Any]:
        return [item]


def dense(grid: Grid) -> np.ndarray[Any, Any]:
    """The operator as a matrix, of Kronecker products."""

    def axis(n: int) -> np.ndarray[Any, Any]:
        return 2 * np.eye(n) - np.eye(n, k=1) - np.eye(n, k=-1)

    x, y, z = (np.eye(n) for n in (grid.nx, grid.ny, grid.nz))
    return np.asarray(
        np.kron(np.kron(z, y), axis(grid.nx))
        + np.kron(np.kron(z, axis(grid.ny)), x)
        + np.kron(np.kron(axis(grid.nz), y), x)
    )


def solver_of(grid: Grid, options: Options) -> Lanczos:
    slab = grid.slab(0, 1)
    return Lanczos(alone(), CpuWork(slab), slab, options, grid.start(slab, 1))


@pytest.mark.parametrize("which", ["smallest", "largest"])
@pytest.mark.parametrize("shape", [(5, 4, 3), (1, 7, 2), (6, 1, 1)])
def test_exact_eigenvalues_are_those_of_the_matrix(which: str, shape: tuple[int, int, int]) -> None:
    grid = Grid(*shape)
    values = np.linalg.eigvalsh(dense(grid))
    expected = values[:5] if which == "smallest" else values[::-1][:5]
    np.testing.assert_allclose(grid.eigenvalues(5, which), expected, rtol=1e-12)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_slabs_apply_the_whole_operator(size: int) -> None:
    grid = Grid(5, 4, 7)
    x = np.random.default_rng(0).standard_normal(grid.npoints)
    slabs = [grid.slab(rank, size) for rank in range(size)]
    plane = slabs[0].plane
    parts = [x[each.first * plane : each.last * plane] for each in slabs]
    planes = np.zeros(2 * size * plane)
    for slab, part in zip(slabs, parts, strict=True):
        own = np.full_like(planes, np.nan)  # `pack` overwrites all
        CpuWork(slab).pack(part, own)
        planes += own
    found = []
    for slab, part in zip(slabs, parts, strict=True):
        out = np.empty_like(part)
        CpuWork(slab).stencil(part, planes, out)
        found.append(out)
    np.testing.assert_allclose(np.concatenate(found), dense(grid) @ x, rtol=0, atol=1e-13)


@pytest.mark.parametrize("size", [2, 3, 5])
def test_the_start_vector_does_not_depend_on_the_number_of_ranks(size: int) -> None:
    grid = Grid(5, 3, 7)  # planes of 15: the counter's steps of 4 are cut
    whole = grid.start(grid.slab(0, 1), 3)
    parts = [grid.start(grid.slab(rank, size), 3) for rank in range(size)]
    np.testing.assert_array_equal(np.concatenate(parts), whole)
    assert not np.array_equal(whole, grid.start(grid.slab(0, 1), 4))


@pytest.mark.parametrize("which", ["smallest", "largest"])
@pytest.mark.parametrize(("wanted", "basis"), [(1, 4), (4, 12), (6, 20)])
def test_lanczos_converges_to_the_exact_values(which: str, wanted: int, basis: int) -> None:
    grid = Grid(9, 7, 6)
    options = Options(wanted, basis, 1e-10, which)
    solver = solver_of(grid, options)
    found = solver.solve()
    np.testing.assert_allclose(found.eigenvalues, grid.eigenvalues(wanted, which), rtol=1e-10)
    assert found.restarts > 0
    assert found.iterations == basis + found.restarts * (basis - options.kept)
    # The residuals that are estimated are those of the vectors, to rounding.
    assert (found.residuals <= 1e-10 * found.eigenvalues).all()
    assert (solver.counted.scalars, solver.counted.halos) == (2 * basis, 0)
    assert found.allreduces == 2 * found.iterations + 1
    assert found.alike
    nbytes = sum(8 * (j + 1) + 8 * (j + 2) for j in range(basis))
    assert solver.counted.scalar_nbytes == nbytes


def test_the_basis_stays_orthonormal_and_the_matrix_is_the_operators_in_it() -> None:
    grid = Grid(9, 7, 6)
    options = Options(3, 12, 1e-10)
    solver = solver_of(grid, options)
    solver.solve(cycles=4)
    basis = solver._vectors[: options.basis + 1]
    np.testing.assert_allclose(basis @ basis.T, np.eye(options.basis + 1), atol=1e-13)
    matrix = basis[:-1] @ dense(grid) @ basis[:-1].T
    kept = options.kept
    values, arrow = np.diag(matrix)[:kept], matrix[:kept, kept]
    built = projected(values, arrow, solver._alphas, solver._betas)
    np.testing.assert_allclose(matrix, built, atol=1e-12)


def test_a_solver_frees_its_vectors_when_nobody_has_it() -> None:
    solver = solver_of(Grid(5, 4, 3), Options(1, 6, 1e-10))
    solver.solve()
    gone = weakref.ref(solver)
    gc.disable()
    try:
        del solver
        assert gone() is None
    finally:
        gc.enable()


def test_collectives_that_are_left_out_are_noticed() -> None:
    solver = solver_of(Grid(5, 4, 3), Options(1, 6, 1e-10))
    solver._steps = lambda first, last: None  # type: ignore[method-assign]
    with pytest.raises(AssertionError, match="1 all-reduces in 6 steps; expected 2 a step, and 1"):
        solver.solve(cycles=1)


class _Capturing(CpuWork):
    """Captures as GPUs do: what is counted is the capture, and not the replays."""

    def __init__(self, slab: Slab, comm: Communicator) -> None:
        super().__init__(slab)
        self._comm, self.replays = comm, 0

    def capture(self, body: Callable[[], None]) -> Callable[[], None]:
        def replay() -> None:
            self.replays += 1
            calls = dict(self._comm.counts.calls)
            body()
            self._comm.counts.calls = calls

        body()
        return replay


def test_allreduces_of_graphs_are_counted() -> None:
    comm = alone()
    comm.capturable = True
    grid, options = Grid(9, 7, 6), Options(4, 12, 1e-10)
    slab = grid.slab(0, 1)
    work = _Capturing(slab, comm)
    solver = Lanczos(comm, work, slab, options, grid.start(slab, 1))
    for solves in (1, 2):
        found = solver.solve()
        np.testing.assert_allclose(found.eigenvalues, grid.eigenvalues(4, "smallest"), rtol=1e-10)
        assert found.allreduces == 2 * found.iterations + 1
        assert work.replays == solves * (found.restarts + 2)


class _Ranks:
    """A communicator of which it is asked only what ranks have."""

    rank = 0

    def __init__(self, name: str, items: list[Any]) -> None:
        self.name, self._items = name, items

    def host_allgather(self, item: Any) -> list[Any]:
        return [item, *self._items]


def test_only_shmemar_has_to_give_all_ranks_the_same_bits() -> None:
    mine = np.array([1.0, 2.0])
    other = np.nextafter(mine, 3)
    same, differs = ((sha256(each.tobytes()).digest(), ()) for each in (mine, other))
    for name in ("shmemar", "mpi"):
        comm: Any = _Ranks(name, [same, same])
        (found,), alike = of_first(comm, "numbers", mine)
        assert alike
        np.testing.assert_array_equal(found, mine)
    comm = _Ranks("mpi", [same, differs])
    (found,), alike = of_first(comm, "numbers", mine)
    assert not alike
    np.testing.assert_array_equal(found, mine)
    comm = _Ranks("shmemar", [same, differs])
    with pytest.raises(MismatchError, match="numbers of ranks 2 differ from those of rank 0"):
        of_first(comm, "numbers", mine)


@pytest.mark.parametrize("is_captured", [False, True])
def test_no_share_of_communication_where_launches_are_part_of_it(*, is_captured: bool) -> None:
    counted = Counted(1, 2, 0, 24, 0)
    made = Result(
        backend="mpi",
        is_captured=is_captured,
        eigenvalues=[1.0],
        errors=[0.0],
        is_right=True,
        iterations=1,
        restarts=0,
        alike=True,
        allreduces=3,
        solve_s=1.0,
        call_s=0.5,
        microseconds=[10.0],
        counted=counted,
    )
    alike = made.beside(4.0, is_captured=is_captured)
    assert alike.alone_us == 4.0
    assert alike.share == pytest.approx(0.6)
    unlike = made.beside(4.0, is_captured=not is_captured)
    assert (unlike.alone_us, unlike.share) == (None, None)
    assert summarise(unlike)["share of communication"] is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("4,4", "grid is '4,4'; expected three extents"),
        ("4,0,4", "grid is '4,0,4'; expected three extents"),
        ("4,x,4", "grid is '4,x,4'; expected three extents"),
    ],
)
def test_a_wrong_grid_is_refused(text: str, message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        Grid.parse(text)


def test_grids_that_do_not_serve_are_refused() -> None:
    with pytest.raises(ArgumentError, match="3 planes along z for 4 ranks"):
        Grid(8, 8, 3).slab(0, 4)
    with pytest.raises(ArgumentError, match="eigenvalues number 2 and 3 are equal"):
        Grid(6, 6, 5).require_simple(3, "smallest")
    with pytest.raises(ArgumentError, match="wanted is 8 on a grid of 8 points"):
        Grid(2, 2, 2).require_simple(8, "smallest")
    Grid(6, 5, 4).require_simple(3, "smallest")


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"wanted": 0}, "wanted is 0"),
        ({"basis": 5}, "basis is 5 for 3 wanted eigenvalues; expected 6"),
        ({"tolerance": 0.0}, "tolerance is 0.0"),
        ({"which": "smallest", "restarts": -1}, "restarts is -1"),
    ],
)
def test_wrong_options_are_refused(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        Options(**{"wanted": 3, "basis": 12, "tolerance": 1e-10, **changed})


def test_what_does_not_converge_is_said() -> None:
    solver = solver_of(Grid(9, 8, 7), Options(4, 12, 1e-10, restarts=2))
    with pytest.raises(ArgumentError, match=r"restarts is 2, within which [0-3] of 4"):
        solver.solve()


def test_a_krylov_space_that_ends_is_said() -> None:
    # 27 points with 7 different eigenvalues.
    solver = solver_of(Grid(3, 3, 3), Options(1, 16, 1e-10))
    with pytest.raises(ArgumentError, match="the Krylov space has ended behind 7 vectors"):
        solver.solve()


def test_too_little_memory_is_said_with_the_amount() -> None:
    slab = Grid(2000, 2000, 2000).slab(0, 1)
    nbytes = basis_nbytes(slab, Options(8, 32, 1e-10))
    assert nbytes == 8 * 8_000_000_000 * (33 + 20 + 1)
    with pytest.raises(ArgumentError, match=r"3218\.65 GiB of memory are needed .* Buy more\."):
        require_memory(_OneRank(), np, nbytes, "Buy more.")
    require_memory(_OneRank(), np, 1, "")


def test_results_stand_side_by_side() -> None:
    text = side_by_side({"mpi": {"steps": 3, "us": 1.23456}, "self": {"steps": 12, "x": None}})
    assert text.splitlines() == [
        "#        mpi  self",
        "steps      3    12",
        "us     1.235     -",
        "x          -     -",
    ]


SIMULATED = """
import numpy as np
from benchmarks.apps import lanczos_kernels as kernels
from benchmarks.apps.lanczos_local import CpuWork
from benchmarks.apps.lanczos_problem import Grid
kernels.THREADS = 32  # of a block here: each is a thread of Python's
grid = Grid(4, 3, 3)
random = np.random.default_rng(0)
for size in (1, 3):
    for rank in range(size):
        slab = grid.slab(rank, size)
        work = CpuWork(slab)
        x = random.standard_normal(slab.npoints)
        planes = random.standard_normal(2 * size * slab.plane)
        packed, expected = np.full((2, planes.size), np.nan)
        work.pack(x, expected)
        kernels.pack[3, 32](x, packed, slab.plane, rank)
        assert np.array_equal(packed, expected)
        out, expected = np.full((2, x.size), np.nan)
        work.stencil(x, planes, expected)
        kernels.stencil[2, 32](x, planes, out, 4, 3, rank, size)
        assert np.allclose(out, expected, rtol=0, atol=1e-13)
for step in (0, 3):
    h, g = random.standard_normal((2, step + 2))
    for square in (100.0, 0.0):
        g[step + 1] = square
        x = random.standard_normal(40)
        mine, theirs = [np.zeros(9), np.zeros(9)], [np.zeros(9), np.zeros(9)]
        y = x.copy()
        CpuWork(slab).normalise(x, h, g, *mine, step)
        kernels.normalise[2, 32](y, h, g, *theirs, step)
        assert np.allclose(x, y, rtol=1e-15, atol=0)
        assert np.array_equal(mine, theirs)
        assert (mine[1][step] > 0) == (square > 0)
for n in (1, 90):
    rows, x = random.standard_normal((3, n)), random.standard_normal(n)
    out, expected = np.full((2, 3), np.nan)
    work.project(rows, x, expected)
    partial = np.full(3 * 2, np.nan)
    kernels.project[(2, 3), kernels.THREADS](rows, x, partial)
    kernels.gather[3, kernels.THREADS](partial, 2, out)
    assert np.allclose(out, expected, rtol=0, atol=1e-12)
    y = x.copy()
    work.subtract(rows, out, y)
    kernels.subtract[3, kernels.THREADS](rows, out, x)
    assert np.allclose(x, y, rtol=0, atol=1e-12)
print("ALL SAME")
"""


def test_gpu_kernels_compute_what_numpy_does_in_the_simulator() -> None:
    done = subprocess.run(
        [sys.executable, "-c", SIMULATED],
        env={**os.environ, "NUMBA_ENABLE_CUDASIM": "1", "PYTHONPATH": str(ROOT)},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.stdout == "ALL SAME\n", done.stderr


@pytest.mark.parametrize("name", ["pack", "stencil", "normalise", "project", "gather", "subtract"])
def test_gpu_kernels_compile_for_sm_90(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import numba.cuda.dispatcher
    from numba import float64, int64

    from benchmarks.apps import lanczos_kernels

    device = SimpleNamespace(compute_capability=(9, 0))
    monkeypatch.setattr(numba.cuda.dispatcher, "get_current_device", lambda: device)
    array, rows = float64[::1], float64[:, ::1]
    signatures = {
        "pack": (array, array, int64, int64),
        "stencil": (array, array, array, int64, int64, int64, int64),
        "normalise": (array, array, array, array, array, int64),
        "project": (rows, array, array),
        "gather": (array, int64, array),
        "subtract": (rows, array, array),
    }
    kernel = getattr(lanczos_kernels, name).py_func
    ptx, _ = numba.cuda.compile_ptx(kernel, signatures[name], cc=(9, 0))
    assert ".target sm_90" in ptx
    assert "st.global" in ptx
