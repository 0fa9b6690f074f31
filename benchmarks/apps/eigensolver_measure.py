"""Problems for the eigensolver, and what is measured and checked of its solutions."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from scipy import linalg

from benchmarks.apps.eigensolver_agreement import require_room
from benchmarks.apps.eigensolver_layout import Layout, check_problem, needed
from benchmarks.apps.eigensolver_solve import PHASES, Solver
from benchmarks.apps.reporting import on_first

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from numpy.typing import NDArray

    from benchmarks.apps.communicators import Communicator
    from benchmarks.apps.eigensolver_solve import Solution

__all__ = [
    "FUSED",
    "LIMIT",
    "TIMED",
    "Case",
    "Result",
    "backend_of",
    "measure",
    "problem",
    "residuals",
]

FUSED = "shmemar-fused"
"""Name of shmemar where ranks sum in the kernel that adds up a product."""


def backend_of(name: str) -> str:
    """The backend under a name: that of `FUSED` is shmemar."""
    return "shmemar" if name == FUSED else name


TIMED = (*PHASES, "total")
"""Names of times."""

LIMIT = 10.0
"""What residuals and differences may be, in units of n times the type's rounding."""


@dataclass(frozen=True)
class Case:
    """What is solved.

    Attributes:
        n: Rows and columns.
        dtype: Element type.
        block: Columns of a block.
        repeat: Solves that are timed, behind one that is not; of the reference, too.
        checks: Whether residuals are computed.
        has_reference: Whether one rank solves it alone, with a library.
        tridiagonalises_only: Whether A is only made tridiagonal: without the rest, which takes
            longer at large n. In the place of reference and residuals trace and Frobenius norm are
            compared with A's, which does not prove that the matrices are similar.
    """

    n: int
    dtype: str
    block: int = 64
    repeat: int = 3
    checks: bool = True
    has_reference: bool = True
    tridiagonalises_only: bool = False


@dataclass(frozen=True)
class Result:
    """What one backend did with a case. Times are maxima over ranks, of those the medians.

    Attributes:
        backend: Its name.
        n: Rows and columns.
        dtype: Element type.
        block: Columns of a block.
        ranks: Number of ranks.
        captured: Whether the column loops were replayed as CUDA graphs, all-reduces with them.
        seconds: By phase, and ``total``; of a tridiagonalisation only ``tridiagonalise``.
        column_us: Microseconds of the tridiagonalisation, a column.
        compute_us: Likewise with collectives that do nothing: everything but the communication. Of
            `FUSED` that of shmemar: what its kernel saves counts as less communication.
            None where they were captured and the backend's were not: launches would count as
            communication.
        call_s: Seconds that the host was in calls of collectives, in the last solve. On GPUs most
            calls return before they are done, and captured ones are not called.
        capture_s: Seconds of capturing the graphs, before the first solve.
        allreduces: Of the last solve; in `trouble` where another one had others.
        broadcasts: Likewise.
        alike: Whether all ranks found the same bits of the tridiagonal matrix, each time.
        same_bits: Whether the first backend found them too.
        difference: Of the eigenvalues from the first backend's; in units of n times the rounding of
            the largest, as the following.
        reference_difference: Of the eigenvalues from the reference's; None without.
        residual: Largest ``||A x - lambda B x|| / ((||A|| + |lambda| ||B||) ||x||)``; None unless
            checked.
        orthogonality: Largest element of ``X^H B X - I``; likewise.
        reference_s: Median seconds of the reference on one rank, behind one that is not timed; None
            without.
        trouble: What is wrong; empty where nothing is.
    """

    backend: str
    n: int
    dtype: str
    block: int
    ranks: int
    captured: bool
    seconds: dict[str, float]
    column_us: float
    compute_us: float | None
    call_s: float
    capture_s: float
    allreduces: int
    broadcasts: int
    alike: bool
    same_bits: bool
    difference: float
    reference_difference: float | None
    residual: float | None
    orthogonality: float | None
    reference_s: float | None
    trouble: tuple[str, ...]

    @property
    def share(self) -> float | None:
        """Part of a column's time that is communication; None as `compute_us`."""
        return None if self.compute_us is None else 1 - self.compute_us / self.column_us

    def as_dict(self) -> dict[str, Any]:
        """The result for a JSON file."""
        return {**asdict(self), "share": self.share}


def problem(n: int, dtype: str, seed: int, *, has_b: bool = True) -> tuple[NDArray[Any], Any]:
    """Make A and B, the same on all ranks.

    Elements are uniform random numbers. The eigenvalues of B are above 0, and at large n between
    0.6 and 1.4.

    Args:
        n: Rows and columns.
        dtype: Element type.
        seed: Of the random numbers.
        has_b: False for None in the place of B.
    """
    generator = np.random.default_rng([seed, n])

    def hermitian() -> NDArray[Any]:
        x = generator.uniform(-1, 1, (n, n))
        if np.dtype(dtype).kind == "c":
            x = (x + 1j * generator.uniform(-1, 1, (n, n))) / np.sqrt(2)
        return (x + x.conj().T) / 2

    a = hermitian().astype(dtype)
    if not has_b:
        return a, None
    return a, (hermitian() / (3 * np.sqrt(n)) + np.eye(n)).astype(dtype)


def measure(
    mpi_comm: Any,
    comms: Mapping[str, Communicator],
    names: Sequence[str],
    case: Case,
    seed: int,
    progress: Callable[[str], None] = lambda _: None,
) -> list[Result]:
    """Solve a case over each communicator, the same problem. Collective.

    Args:
        mpi_comm: mpi4py's communicator of the ranks.
        comms: By name. One is ``self``, with which is timed what is not communication.
        names: Of those that solve it, the first of which the others are compared with. `FUSED` is
            over ``shmemar``.
        case: What is solved.
        seed: Of the problem.
        progress: Hears where it is.

    Returns:
        A result for each, the same on all ranks.

    Raises:
        ArgumentError: The case can't be, or its memory does not suffice; on every rank.
    """
    silent = comms["self"]
    if case.tridiagonalises_only:
        case = replace(case, checks=False, has_reference=False)
    check_problem(case.n, case.dtype, case.block)
    layout = Layout(case.n, case.block, silent.rank, silent.size)
    _require_room(silent, layout, case)
    made = problem(case.n, case.dtype, seed, has_b=not case.tridiagonalises_only)
    a, b = (None if each is None else silent.xp.asarray(each) for each in made)
    del made
    reference_s, expected = None, None
    if case.has_reference:
        progress(f"n {case.n}: reference on one rank")
        reference_s, expected = on_first(
            mpi_comm, lambda: _time_reference(silent.xp, a, b, case.repeat)
        )
    runs = [_run(mpi_comm, name, comms[backend_of(name)], case, (a, b), progress) for name in names]
    progress(f"n {case.n}: without communication")
    compute_us = _time_compute(mpi_comm, silent, case, a) / case.n * 1e6
    first = runs[0]
    results = []
    for run in runs:
        seconds = {
            name: float(np.median([each[name] for each in run.times])) for name in run.times[0]
        }
        found: dict[str, Any] = {
            "backend": run.name,
            "n": case.n,
            "dtype": case.dtype,
            "block": case.block,
            "ranks": run.comm.size,
            "captured": run.comm.capturable,
            "seconds": seconds,
            "column_us": seconds["tridiagonalise"] / case.n * 1e6,
            "compute_us": compute_us if run.comm.capturable == silent.capturable else None,
            "call_s": run.call_s,
            "capture_s": run.capture_s,
            "allreduces": run.counts[-1][0],
            "broadcasts": run.counts[-1][1],
            "alike": run.alike,
            "same_bits": all(map(np.array_equal, (run.d, run.e), (first.d, first.e))),
            "difference": _difference(run.values, first.values, case),
            "reference_difference": None,
            "residual": run.residual,
            "orthogonality": run.orthogonality,
            "reference_s": reference_s,
        }
        if expected is not None:
            found["reference_difference"] = _difference(run.values, expected, case)
        trouble = _inaccuracies(found)
        if case.tridiagonalises_only:
            trouble += _why_not_similar(a, run.d, run.e, case)
        trouble += _other_trouble(found, run.counts, layout, is_accurate=not trouble)
        results.append(Result(**found, trouble=trouble))
    everyone: list[list[Result]] = mpi_comm.allgather(results)
    return everyone[0]


@dataclass
class _Run:
    """Solves over one communicator."""

    name: str
    comm: Communicator
    capture_s: float
    times: list[dict[str, float]]
    alike: bool
    counts: list[tuple[int, int]]
    call_s: float
    values: NDArray[Any]
    d: NDArray[Any]
    e: NDArray[Any]
    residual: float | None
    orthogonality: float | None


def _require_room(comm: Communicator, layout: Layout, case: Case) -> None:
    matrix = case.n * case.n * np.dtype(case.dtype).itemsize
    wanted = needed(layout, case.dtype)
    arrays, host = wanted.arrays, wanted.host
    if case.has_reference and comm.rank == 0:  # with C, Cholesky's factor, LAPACK's workspace
        arrays = max(arrays, 7 * matrix)
    nmatrices = 1 if case.tridiagonalises_only else 2
    host = max(host, 2 * nmatrices * case.n * case.n * 16)  # where the problem is made
    if case.checks:  # all vectors, on all ranks, and what pickles them
        arrays, host = max(arrays, 5 * matrix), max(host, 3 * matrix)
    require_room(comm, nmatrices * matrix + arrays, host)


def _run(
    mpi_comm: Any,
    name: str,
    comm: Communicator,
    case: Case,
    problem_: tuple[Any, Any],
    progress: Callable[[str], None],
) -> _Run:
    def tell(text: str) -> None:
        progress(f"n {case.n}, {name}: {text}")

    times, counts = [], []
    alike = True
    fuses = name == FUSED
    with Solver(case.n, case.dtype, comm, block=case.block, fuses=fuses) as solver:
        capture_s = max(mpi_comm.allgather(solver.capture_seconds))
        for number in range(case.repeat + 1):
            comm.barrier()
            called_s = comm.counts.seconds
            start = time.perf_counter()
            if case.tridiagonalises_only:
                solution: Any = solver.tridiagonalise(problem_[0], progress=tell)
                taken = {"tridiagonalise": solution.seconds}
            else:
                solution = solver.solve(*problem_, progress=tell)
                taken = {**solution.timings, "total": time.perf_counter() - start}
            called_s = comm.counts.seconds - called_s
            alike = alike and solution.alike
            counts.append((solution.allreduces, solution.broadcasts))
            if number:
                everyone = mpi_comm.allgather(taken)
                times.append({each: max(mine[each] for mine in everyone) for each in taken})
    checked: tuple[float | None, float | None] = None, None
    if case.tridiagonalises_only:
        values = linalg.eigvalsh_tridiagonal(solution.d, solution.e)
    else:
        values = solution.eigenvalues
        if case.checks:
            checked = residuals(comm, *problem_, solution)
    return _Run(
        name,
        comm,
        capture_s,
        times,
        alike,
        counts,
        max(mpi_comm.allgather(called_s)),
        values,
        solution.d,
        solution.e,
        *checked,
    )


def _time_compute(mpi_comm: Any, silent: Communicator, case: Case, a: Any) -> float:
    """Seconds of a tridiagonalisation whose collectives do nothing."""
    with Solver(case.n, case.dtype, silent, block=case.block) as solver:
        times = [solver.time_reduction(a) for _ in range(case.repeat + 1)][1:]
    return float(np.median(np.max(mpi_comm.allgather(times), axis=0)))


def residuals(comm: Communicator, a: Any, b: Any, solution: Solution) -> tuple[float, float]:
    """Largest residual and deviation from B-orthogonality, as of `Result`. Collective."""
    xp, x = comm.xp, solution.own_vectors
    n, unit = len(a), len(a) * float(np.finfo(solution.d.dtype).eps)
    host = x if xp is np else x.get()
    whole = np.empty((n, n), host.dtype)
    for columns, vectors in comm.host_allgather((solution.own_columns, host)):
        whole[:, columns] = vectors
    mine = 0.0, 0.0
    if len(solution.own_columns):
        values = xp.asarray(solution.eigenvalues[solution.own_columns])
        bx = b @ x
        scale = xp.linalg.norm(a) + abs(values) * xp.linalg.norm(b)
        norms = xp.linalg.norm(a @ x - bx * values, axis=0)
        residual = norms / (scale * xp.linalg.norm(x, axis=0))
        gram = xp.asarray(whole).conj().T @ bx
        gram[xp.asarray(solution.own_columns), xp.arange(x.shape[1])] -= 1
        mine = float(residual.max()) / unit, float(abs(gram).max()) / unit
    everyone = comm.host_allgather(mine)
    return max(each for each, _ in everyone), max(each for _, each in everyone)


def _difference(values: NDArray[Any], expected: NDArray[Any], case: Case) -> float:
    unit = case.n * float(np.finfo(case.dtype).eps)
    largest = float(np.abs(expected).max())
    return float(np.abs(values - expected).max()) / (largest * unit) if largest else 0.0


def _why_not_similar(a: Any, d: NDArray[Any], e: NDArray[Any], case: Case) -> tuple[str, ...]:
    """Say where the tridiagonal matrix has not A's trace and Frobenius norm."""
    d, e = d.astype(np.float64), e.astype(np.float64)
    norm = float((abs(a).astype(np.float64) ** 2).sum()) ** 0.5
    sizes = {
        "trace": (float(a.diagonal().real.astype(np.float64).sum()), float(d.sum())),
        "Frobenius norm": (norm, float((d * d).sum() + 2 * (e * e).sum()) ** 0.5),
    }
    # The norm is sqrt(n) times an eigenvalue's size, whose rounding the unit is.
    allowed = LIMIT * case.n * float(np.finfo(case.dtype).eps) * norm / case.n**0.5
    return tuple(
        f"the tridiagonal matrix has {name} {found:.17g}; expected {expected:.17g}, that of A"
        for name, (expected, found) in sizes.items()
        if not abs(found - expected) <= allowed
    )


def _inaccuracies(found: dict[str, Any]) -> tuple[str, ...]:
    """Say where a result is too far off: from the first backend's where there is no reference."""
    judged = ["difference", "reference_difference", "residual", "orthogonality"]
    if found["reference_difference"] is not None:
        judged.remove("difference")
    return tuple(
        f"{name} is {found[name]:.3g} times n times the rounding; expected {LIMIT:g} at most"
        for name in judged
        if found[name] is not None and not found[name] <= LIMIT
    )


def _other_trouble(
    found: dict[str, Any],
    counts: Sequence[tuple[int, int]],
    layout: Layout,
    *,
    is_accurate: bool,
) -> tuple[str, ...]:
    """Say what else is wrong with a result, and what it may come from."""
    nsums, npanels = layout.nsums(found["dtype"]), len(layout.panels)
    trouble = [
        f"{allreduces} all-reduces and {broadcasts} broadcasts in solve {number}; expected "
        f"{nsums} and {npanels}"
        for number, (allreduces, broadcasts) in enumerate(counts)
        if (allreduces, broadcasts) != (nsums, npanels)
    ]
    if not found["alike"] and found["backend"] in ("shmemar", FUSED):
        trouble.append("the ranks found other bits, which shmemar's sums exclude")
    elif not found["alike"] and not is_accurate:
        trouble.append(
            "the ranks found other bits: this backend's sums are not the same on all ranks, which "
            "may be why it is wrong"
        )
    return tuple(trouble)


def _time_reference(xp: Any, a: Any, b: Any, repeat: int) -> tuple[float, NDArray[Any]]:
    """Median seconds of a library's solve, behind one that loads all of it; the eigenvalues."""
    times = []
    for _ in range(repeat + 1):
        start = time.perf_counter()
        if xp is np:
            values, _ = linalg.eigh(a, b)
        else:
            xp.cuda.Device().synchronize()
            start = time.perf_counter()
            found = _reference_on_gpu(xp, a, b)
            xp.cuda.Device().synchronize()
        times.append(time.perf_counter() - start)
    return float(np.median(times[1:])), values if xp is np else found.get()


def _reference_on_gpu(xp: Any, a: Any, b: Any) -> Any:
    """Eigenvalues, and vectors that are thrown away: cuSOLVER's potrf and syevd, cuBLAS's trsm."""
    from cupyx.scipy.linalg import solve_triangular

    lower = xp.asfortranarray(xp.linalg.cholesky(b))
    half = solve_triangular(lower, a, lower=True)
    c = solve_triangular(lower, half.conj().T, lower=True)
    values, vectors = xp.linalg.eigh(c)
    solve_triangular(lower, vectors, trans="C", lower=True)
    return values
