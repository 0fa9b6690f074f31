"""Generalised eigenproblems ``A x = lambda B x`` over ranks, one all-reduce a column.

``mpirun -n N python -m benchmarks.apps.eigensolver --n 512,1024 --backend shmemar,mpi`` solves the
same problems over each backend in turn, in one process set, and compares the answers; how it solves
is in :mod:`benchmarks.apps.eigensolver_solve`, and docs/eigensolver.md says how to use it.

Times are maxima over ranks, of those medians. On GPUs a panel's columns are one CUDA graph, made
before the first solve. Time in communication is found by running the same graphs with ``self``,
whose collectives do nothing, in the place of the backend, and taking the difference. Where a
backend's calls can't be captured, ``mpi`` on GPUs, it is not given: more is launched there. The
reference is one rank alone: scipy.linalg.eigh, or on GPUs cuSOLVER's through CuPy. Backend
``shmemar-fused``, on GPUs, sums over the ranks in the solver's own kernel that adds up a product.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.apps.eigensolver_layout import DTYPES, check_problem
from benchmarks.apps.eigensolver_measure import FUSED, TIMED, Case, backend_of, measure
from benchmarks.apps.eigensolver_plot import check_plot, draw
from benchmarks.apps.eigensolver_solve import (
    Solution,
    Solver,
    Tridiagonal,
    generalised_eigh,
    tridiagonalise,
)
from benchmarks.apps.reporting import (
    Progress,
    add_common_options,
    machine_facts,
    opened,
    print_facts,
    require_summing,
    require_writable,
    run_program,
    side_by_side,
    write_json,
)
from shmemar.errors import ArgumentError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from benchmarks.apps.eigensolver_measure import Result

__all__ = [
    "Solution",
    "Solver",
    "Tridiagonal",
    "generalised_eigh",
    "main",
    "summarise",
    "tridiagonalise",
]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; return 0, 1 when a result is wrong, or 2."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.apps.eigensolver", description=__doc__
    )
    parser.add_argument("--n", default="256", metavar="N,...", help="sizes; %(default)s")
    parser.add_argument(
        "--dtype", default="float64", metavar="TYPE,...", help=f"of {', '.join(DTYPES)}"
    )
    parser.add_argument("--block", default=64, type=int, help="columns of a block; %(default)s")
    parser.add_argument("--repeat", default=3, type=int, help="solves that are timed; %(default)s")
    parser.add_argument("--seed", default=1, type=int, help="of the problems")
    parser.add_argument("--check", action="store_true", help="compute residuals too")
    parser.add_argument(
        "--no-reference", action="store_true", help="leave out the solve on one rank"
    )
    parser.add_argument(
        "--tridiagonalise-only",
        action="store_true",
        help="make A tridiagonal, and leave out the rest",
    )
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw time per column over n")
    add_common_options(parser, FUSED)
    arguments = parser.parse_args(argv)
    return run_program(lambda world: _run(world, arguments))


def _run(world: Any, arguments: argparse.Namespace) -> int:
    cases = _cases(arguments)
    if arguments.plot:
        check_plot(arguments.plot)
    names = arguments.backend.split(",")
    require_summing(names, world.size)
    require_writable(world, arguments.json, arguments.plot)
    if len(set(names)) < len(names):
        raise ArgumentError(f"backends are {', '.join(names)}; expected each once.")
    needed = dict.fromkeys(map(backend_of, (*names, "self")))
    with opened(world, list(needed), arguments.run_on) as comms:
        if FUSED in names and not comms["self"].capturable:
            raise ArgumentError(
                f"backend {FUSED} needs GPUs, and these ranks are emulated; leave it out."
            )
        facts = machine_facts(world, comms["self"].xp)
        speaks = world.rank == 0
        if speaks:
            print_facts(facts)
            print("# times: maxima over ranks, medians of solves behind the first", flush=True)
        results: list[Result] = []
        for case in cases:
            found = measure(world, comms, names, case, arguments.seed, Progress(world.rank))
            results += found
            if speaks:
                print(f"\n# n {case.n}, {case.dtype}, block {case.block}, {world.size} ranks")
                print(side_by_side({each.backend: summarise(each) for each in found}), flush=True)
                # Now, so that what was measured is kept when a later size does not end.
                _keep(arguments, facts, results)
    trouble = _troubles(results)
    if speaks:
        for text in trouble:
            print(f"# WRONG: {text}")
        print("# WRONG results" if trouble else "# all results right", flush=True)
    return 1 if trouble else 0


def _troubles(results: Sequence[Result]) -> list[str]:
    return [
        f"n {each.n}, {each.dtype}, {each.backend}: {text}"
        for each in results
        for text in each.trouble
    ]


def _keep(
    arguments: argparse.Namespace, facts: Mapping[str, Any], results: Sequence[Result]
) -> None:
    """Write the files that were asked for."""
    rows = [row.as_dict() for row in results]
    document = {**facts, "is_right": not _troubles(results), "rows": rows}
    if arguments.json:
        write_json(arguments.json, "eigensolver", document)
    # Without any right result there is nothing to draw, and what is wrong is told at the end.
    if arguments.plot and any(not each.trouble for each in results):
        draw(document, arguments.plot)


def _cases(arguments: argparse.Namespace) -> list[Case]:
    sizes = []
    for text in arguments.n.split(","):
        if not text.isdecimal():
            raise ArgumentError(f"n is {text!r}; expected whole numbers of 1 or more.")
        sizes.append(int(text))
    if arguments.repeat < 1:
        raise ArgumentError(f"repeat is {arguments.repeat}; expected 1 or more.")
    cases = [
        Case(
            n,
            dtype,
            arguments.block,
            arguments.repeat,
            checks=arguments.check,
            has_reference=not arguments.no_reference,
            tridiagonalises_only=arguments.tridiagonalise_only,
        )
        for dtype in arguments.dtype.split(",")
        for n in sizes
    ]
    for case in cases:
        check_problem(case.n, case.dtype, case.block)
    return cases


def summarise(result: Result) -> dict[str, Any]:
    """The result for the table, by quantity."""
    rounding = "  (n eps)"
    return {
        "us a column": result.column_us,
        "  without communication": result.compute_us,
        "  share of communication": result.share,
        "host in collectives (s)": result.call_s,
        "captured in graphs": "yes" if result.captured else "no",
        "capturing, once (s)": result.capture_s,
        **{f"{name} (s)": result.seconds.get(name) for name in TIMED},
        "reference on one rank (s)": result.reference_s,
        "all-reduces": result.allreduces,
        "broadcasts": result.broadcasts,
        "d, e alike on all ranks": "yes" if result.alike else "no",
        "d, e as of the first backend": "yes" if result.same_bits else "no",
        "eigenvalues from the first" + rounding: result.difference,
        "eigenvalues from the reference" + rounding: result.reference_difference,
        "residual" + rounding: result.residual,
        "B-orthogonality" + rounding: result.orthogonality,
        "right": "NO" if result.trouble else "yes",
    }


if __name__ == "__main__":
    sys.exit(main())
