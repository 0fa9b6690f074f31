"""Command line: ``python -m shmemar allreduce``, under ``mpirun``, and ``doctor``, without."""

from __future__ import annotations

import argparse
import sys
from contextlib import suppress
from typing import TYPE_CHECKING

from shmemar import __version__
from shmemar.dtypes import DTYPES, ReduceOp, as_dtype, as_reduce_op
from shmemar.errors import ArgumentError, CollectiveTimeoutError, DeviceError, ShmemarError
from shmemar.spec import Backend

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; return the exit status: 0, 1 for wrong results, 2 for an error.

    Args:
        argv: Arguments after the program's name; those of the process by default.
    """
    parser = argparse.ArgumentParser(
        prog="python -m shmemar", description="Low-latency collectives"
    )
    parser.add_argument("--version", action="version", version=f"shmemar {__version__}")
    commands = parser.add_subparsers(dest="command", required=True)
    allreduce = commands.add_parser(
        "allreduce",
        help="sweep all-reduce over sizes, check every element, and print a table",
        description="Start it under mpirun: mpirun -n 4 python -m shmemar allreduce",
    )
    allreduce.add_argument("-b", "--smallest", default="8", metavar="SIZE", help="default: 8")
    allreduce.add_argument("-e", "--largest", default="1M", metavar="SIZE", help="default: 1M")
    allreduce.add_argument("-f", "--factor", default=2, type=int, help="between sizes; default: 2")
    allreduce.add_argument("-d", "--dtype", default="float32", choices=DTYPES)
    allreduce.add_argument("-o", "--op", default="sum", choices=[op.value for op in ReduceOp])
    allreduce.add_argument("-n", "--calls", default=20, type=int, help="timed calls a size")
    allreduce.add_argument("-w", "--warmups", default=2, type=int, help="calls before them")
    allreduce.add_argument("--in-place", action="store_true", help="reduce in place")
    allreduce.add_argument(
        "--backend", default=None, choices=[backend.value for backend in Backend]
    )
    commands.add_parser(
        "doctor",
        help="say what this machine has, which backends work, and what to do about the rest",
        description="Exit status 0: the backend that auto picks works here; 1: it does not.",
    )
    arguments = parser.parse_args(argv)
    if arguments.command == "doctor":
        return _doctor()
    try:
        return _allreduce(arguments)
    except ShmemarError as error:
        return _refuse(error)


def _refuse(error: ShmemarError) -> int:
    """Print an error, of those that all ranks have on the first one only."""
    from shmemar.host.bootstrap import leave_without_finalize, load_mpi

    speaks = True
    if isinstance(error, CollectiveTimeoutError | DeviceError):
        leave_without_finalize(2)
    else:
        with suppress(ShmemarError):
            speaks = load_mpi().COMM_WORLD.rank == 0
    if speaks:
        print(f"shmemar: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
    return 2


def _doctor() -> int:
    from shmemar.host.doctor import diagnose, render

    diagnosis = diagnose()
    print(render(diagnosis))
    return diagnosis.exit_status


def _allreduce(arguments: argparse.Namespace) -> int:
    from shmemar.host.bootstrap import load_mpi
    from shmemar.host.sweep import HEADER, message_sizes, parse_nbytes, sweep

    dtype = as_dtype(arguments.dtype)
    op = as_reduce_op(arguments.op, dtype)
    sizes = message_sizes(
        parse_nbytes(arguments.smallest), parse_nbytes(arguments.largest), arguments.factor
    )
    for name, least in (("calls", 1), ("warmups", 0)):
        if getattr(arguments, name) < least:
            raise ArgumentError(f"{name} is {getattr(arguments, name)}; expected {least} or more.")

    import shmemar

    wrong = 0
    with shmemar.init(load_mpi().COMM_WORLD, backend=arguments.backend) as comm:
        speaks = comm.rank == 0
        if speaks:
            print(f"# shmemar {__version__}, all-reduce, {comm.size} ranks, {comm.backend.value}")
            if comm.backend is Backend.EMULATED:
                print("# Times are CPU times of an emulation: they say nothing about a GPU.")
            print("# time: from a call to its result; maximum over ranks of each rank's median.")
            print("# Every element of every call is checked.")
            print(HEADER, flush=True)
        for row in sweep(
            comm,
            sizes,
            dtype,
            op,
            ncalls=arguments.calls,
            nwarmups=arguments.warmups,
            in_place=arguments.in_place,
        ):
            wrong += row.wrong
            if speaks:
                print(row, flush=True)
        if speaks:
            print(f"# {wrong} wrong" if wrong else "# all results right", flush=True)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
