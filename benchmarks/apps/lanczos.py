"""Eigenvalues at one end of the spectrum of a 3-D Laplacian, by thick-restart Lanczos.

``mpirun -n N python -m benchmarks.apps.lanczos --grid 32,30,28 --wanted 8 --backend shmemar,mpi``
solves the same problem over each backend in turn, in one process set. Ranks have slabs along z.

An iteration has two all-reduces of scalars, of 8 to 8 (basis + 1) bytes, and, with more than one
rank, one of the slabs' outer planes, which is the exchange of halos and is counted apart. On GPUs
the iterations between restarts are one CUDA graph, and scalars stay on the device; ``mpi`` can't be
captured, and is called step by step. Results are compared with the exact eigenvalues.

Time in communication is found by running as many cycles with ``self``, whose collectives do
nothing, and taking the difference. What it computes then is thrown away. As ``self`` runs in graphs
on GPUs, the difference says nothing of ``mpi`` there, whose steps are launched one by one: then the
share of communication is not given (``-``, in JSON null).

Only shmemar promises all ranks the same bits, and alphas or betas that differ are an error of it.
With another backend rank 0's are taken for all, and the result says that they were not alike.
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks.apps.agreement import together
from benchmarks.apps.lanczos_local import local_work
from benchmarks.apps.lanczos_problem import NORM, WHICH, Grid
from benchmarks.apps.lanczos_solver import Lanczos
from benchmarks.apps.lanczos_terms import Options, basis_nbytes
from benchmarks.apps.reporting import (
    Progress,
    add_common_options,
    machine_facts,
    opened,
    print_facts,
    require_memory,
    require_summing,
    require_writable,
    run_program,
    side_by_side,
    write_json,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from benchmarks.apps.communicators import Communicator
    from benchmarks.apps.lanczos_terms import Counted

__all__ = ["Result", "main", "solve", "summarise", "time_alone"]

ROUNDING = 100 * np.finfo(np.float64).eps * NORM
"""What an eigenvalue may be off by rounding."""


@dataclass(frozen=True)
class Result:
    """What one backend did.

    Attributes:
        backend: Its name.
        is_captured: Whether the iterations were replayed as CUDA graphs.
        eigenvalues: From the wanted end inwards.
        errors: Relative to the exact ones.
        is_right: Whether each is at most the tolerance, or what rounding allows.
        iterations: Steps of Lanczos.
        restarts: Restarts.
        alike: Whether all ranks had the same bits in all alphas and betas.
        allreduces: Of the whole solve.
        solve_s: Seconds of the whole solve, restarts included, from when all ranks are ready;
            maximum over ranks.
        call_s: Seconds of it that the host was in calls of collectives; replayed ones are none.
            Maximum over ranks.
        microseconds: Of an iteration, cycle by cycle; maximum over ranks.
        counted: All-reduces of a whole cycle.
        alone_us: Of an iteration without communication, the median; None where not measured, or
            not in the same way: one captured, and the other not.
    """

    backend: str
    is_captured: bool
    eigenvalues: list[float]
    errors: list[float]
    is_right: bool
    iterations: int
    restarts: int
    alike: bool
    allreduces: int
    solve_s: float
    call_s: float
    microseconds: list[float]
    counted: Counted
    alone_us: float | None = None

    @property
    def median_us(self) -> float:
        """Median of `microseconds`."""
        return float(np.median(self.microseconds))

    @property
    def share(self) -> float | None:
        """Part of an iteration's time that is communication; None where it was not measured."""
        return None if self.alone_us is None else 1 - self.alone_us / self.median_us

    def beside(self, alone_us: float, *, is_captured: bool) -> Result:
        """Put in the time without communication, unless launches make up some of the difference.

        Args:
            alone_us: As of `time_alone`.
            is_captured: Whether that was of graphs.
        """
        return replace(self, alone_us=alone_us if is_captured == self.is_captured else None)


def solve(
    mpi_comm: Any,
    comm: Communicator,
    grid: Grid,
    options: Options,
    seed: int = 1,
    progress: Any = lambda _: None,
) -> Result:
    """Solve over one communicator, and compare with the exact eigenvalues. Collective.

    Args:
        mpi_comm: Of the same ranks.
        comm: What sums.
        grid: The problem.
        options: What is wanted of it.
        seed: Of the start vector.
        progress: Told where it is.

    Raises:
        ArgumentError: The grid has fewer planes than ranks or multiple eigenvalues, or as of
            `Lanczos.solve`; on every rank.
        MismatchError: As of `Lanczos.solve`.
    """
    grid.require_simple(options.wanted, options.which)
    solver = _solver(comm, grid, options, seed)
    comm.barrier()
    begin, calls_s = time.perf_counter(), comm.counts.seconds
    found = solver.solve(progress)
    seconds, calls_s = time.perf_counter() - begin, comm.counts.seconds - calls_s
    exact = grid.eigenvalues(options.wanted, options.which)
    errors = np.abs(found.eigenvalues - exact) / exact
    allowed = np.maximum(options.tolerance, ROUNDING / exact)
    return Result(
        backend=comm.name,
        is_captured=comm.capturable,
        eigenvalues=found.eigenvalues.tolist(),
        errors=errors.tolist(),
        is_right=bool(np.all(errors <= allowed)),
        iterations=found.iterations,
        restarts=found.restarts,
        alike=found.alike,
        allreduces=found.allreduces,
        solve_s=max(mpi_comm.allgather(seconds)),
        call_s=max(mpi_comm.allgather(calls_s)),
        microseconds=_microseconds(mpi_comm, found.seconds, found.steps),
        counted=solver.counted,
    )


def time_alone(
    mpi_comm: Any, comm: Communicator, grid: Grid, options: Options, cycles: int
) -> float:
    """Median microseconds of an iteration over `self`: maximum over ranks. Collective.

    Args:
        mpi_comm: Of the same ranks.
        comm: A communicator that does not sum.
        grid: The problem.
        options: What the others solve.
        cycles: How many of them, 1 or more.
    """
    found = _solver(comm, grid, options, 1).solve(cycles=cycles)
    return float(np.median(_microseconds(mpi_comm, found.seconds, found.steps)))


def _solver(comm: Communicator, grid: Grid, options: Options, seed: int) -> Lanczos:
    slab = grid.slab(comm.rank, comm.size)
    work, start = together(comm, lambda: (local_work(slab, comm.xp), grid.start(slab, seed)))
    return Lanczos(comm, work, slab, options, start)


def _microseconds(mpi_comm: Any, seconds: list[float], steps: list[int]) -> list[float]:
    slowest = np.max(mpi_comm.allgather(seconds), axis=0)
    return (1e6 * slowest / np.array(steps)).tolist()  # type: ignore[no-any-return]


def summarise(result: Result) -> dict[str, Any]:
    """The result for the table, by quantity."""
    spread = np.percentile(result.microseconds, [20, 80])
    counted = result.counted
    return {
        "iterations": result.iterations,
        "restarts": result.restarts,
        "captured in graphs": "yes" if result.is_captured else "no",
        "us an iteration": result.median_us,
        "  20th percentile": float(spread[0]),
        "  80th percentile": float(spread[1]),
        "us without communication": result.alone_us,
        "share of communication": result.share,
        "iterations/s of the solve": result.iterations / result.solve_s,
        "solve (s)": result.solve_s,
        "  host in collectives (s)": result.call_s,
        "scalar all-reduces an iteration": counted.scalars / counted.steps,
        "  bytes of one, mean": counted.scalar_nbytes / counted.scalars,
        "halo all-reduces an iteration": counted.halos / counted.steps,
        "  bytes of one": counted.halo_nbytes // counted.halos if counted.halos else 0,
        "all-reduces of the solve": result.allreduces,
        "same bits on all ranks": "yes" if result.alike else "no",
        "largest relative error": max(result.errors),
        "right": "yes" if result.is_right else "NO",
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; return 0, 1 when a result is wrong, or 2."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.apps.lanczos", description=__doc__)
    parser.add_argument("--grid", default="32,30,28", metavar="NX,NY,NZ", help="%(default)s")
    parser.add_argument("--wanted", default=8, type=int, help="eigenvalues; %(default)s")
    parser.add_argument("--basis", default=32, type=int, help="vectors; %(default)s")
    parser.add_argument("--tolerance", default=1e-10, type=float, help="%(default)s")
    parser.add_argument("--which", default="smallest", choices=WHICH)
    parser.add_argument("--restarts", default=1000, type=int, help="the most; %(default)s")
    parser.add_argument("--seed", default=1, type=int, help="of the start vector")
    add_common_options(parser)
    arguments = parser.parse_args(argv)
    return run_program(lambda world: _run(world, arguments))


def _run(world: Any, arguments: argparse.Namespace) -> int:
    grid = Grid.parse(arguments.grid)
    options = Options(
        arguments.wanted,
        arguments.basis,
        arguments.tolerance,
        arguments.which,
        arguments.restarts,
    )
    grid.require_simple(options.wanted, options.which)
    slab = grid.slab(world.rank, world.size)
    names = arguments.backend.split(",")
    require_summing(names, world.size)
    require_writable(world, arguments.json)
    others = ["self"] if world.size > 1 else []
    with opened(world, [*names, *others], arguments.run_on) as communicators:
        xp = communicators[names[0]].xp
        facts = machine_facts(world, xp)
        speaks = world.rank == 0
        if speaks:
            print_facts(facts)
            print(f"# {grid}, {options}", flush=True)
        # One solver at a time.
        advice = "Take a smaller grid or basis, or more GPUs."
        require_memory(world, xp, basis_nbytes(slab, options), advice)
        progress = Progress(world.rank)
        results = [
            solve(world, communicators[name], grid, options, arguments.seed, progress)
            for name in names
        ]
        if world.size > 1:
            cycles = results[0].restarts + 1
            alone = communicators["self"]
            alone_us = time_alone(world, alone, grid, options, cycles)
            results = [each.beside(alone_us, is_captured=alone.capturable) for each in results]
    difference = _largest_difference(results)
    is_right = all(each.is_right for each in results) and difference <= max(
        2 * options.tolerance, 2 * ROUNDING / min(map(abs, results[0].eigenvalues))
    )
    if speaks:
        print(side_by_side({each.backend: summarise(each) for each in results}))
        if world.size > 1 and any(each.alone_us is None for each in results):
            print("# no share of communication (-): called step by step, where self is in graphs")
        print(f"# largest relative difference between backends: {difference:.3g}")
        print("# all results right" if is_right else "# WRONG results", flush=True)
        if arguments.json:
            document = {
                **facts,
                "grid": asdict(grid),
                "options": {**asdict(options), "kept": options.kept},
                "exact": grid.eigenvalues(options.wanted, options.which),
                "difference": difference,
                "is_right": is_right,
                "backends": {each.backend: _document(each) for each in results},
            }
            write_json(arguments.json, "lanczos", document)
    return 0 if is_right else 1


def _document(result: Result) -> dict[str, Any]:
    return {**asdict(result), "median_us": result.median_us, "share": result.share}


def _largest_difference(results: Sequence[Result]) -> float:
    """Between eigenvalues of backends, relative to them."""
    values = np.array([each.eigenvalues for each in results])
    return float(np.max(np.ptp(values, axis=0) / np.abs(values).min(axis=0)))


if __name__ == "__main__":
    sys.exit(main())
