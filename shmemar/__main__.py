"""``python -m shmemar``: ``allreduce``, ``tune``, ``floor``, ``check`` or ``doctor``."""

from __future__ import annotations

import argparse
import os
import sys
from contextlib import suppress
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from shmemar import __version__
from shmemar.dtypes import DTYPES, ReduceOp, as_dtype, as_reduce_op
from shmemar.errors import ArgumentError, CollectiveTimeoutError, DeviceError, ShmemarError
from shmemar.spec import Backend, Kernel, Protocol

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
        description=(
            "Exit status 0: the backend that auto picks works here; 1: it does not. On GPUs a "
            "litmus test of 128-byte lines is run; start it under mpirun to have all ranks in it."
        ),
    )
    _add_floor(commands)
    _add_tune(commands)
    _add_check(commands)
    arguments = parser.parse_args(argv)
    if arguments.command == "doctor":
        return _doctor()
    if arguments.command == "check":
        try:
            return _controls() if arguments.controls else _check(arguments)
        except ShmemarError as error:
            print(f"shmemar: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
            return 2
    try:
        run = {"tune": _tune, "floor": _floor, "allreduce": _allreduce}[arguments.command]
        return run(arguments)
    except ShmemarError as error:
        return _refuse(error)


def _add_floor(commands: Any) -> None:
    floor = commands.add_parser(
        "floor",
        help="measure what no all-reduce can be faster than: L2 round trips and a store to a peer",
        description="Start it under mpirun: mpirun -n 2 python -m shmemar floor",
    )
    floor.add_argument("-n", "--rounds", default=1000, type=int, help="of each loop; default: 1000")
    floor.add_argument("--backend", default=None, choices=[backend.value for backend in Backend])
    floor.add_argument("--json", metavar="FILE", help="write it here, too")


def _add_tune(commands: Any) -> None:
    tune = commands.add_parser(
        "tune",
        help="measure which kernel is fastest at which size, and keep the table for this machine",
        description=(
            "Start it under mpirun: mpirun -n 8 python -m shmemar tune. The table is kept beside "
            "the compiled kernels; shmemar.init finds it there, for the same GPU, number of ranks, "
            "ranks on a GPU and MPS. SHMEMAR_TABLE=none ignores it. With --draw a table that was "
            "kept is drawn, without mpirun, and nothing is measured."
        ),
    )
    tune.add_argument("-b", "--smallest", default="128", metavar="SIZE", help="default: 128")
    tune.add_argument("-e", "--largest", default="8M", metavar="SIZE", help="default: 8M")
    tune.add_argument("-f", "--factor", default=4, type=int, help="between sizes; default: 4")
    tune.add_argument("-d", "--dtype", default="float32", choices=DTYPES)
    tune.add_argument("-o", "--op", default="sum", choices=[op.value for op in ReduceOp])
    tune.add_argument("-n", "--samples", default=10, type=int, help="of each; default: 10")
    tune.add_argument("-r", "--repeats", default=50, type=int, help="calls in a graph; default: 50")
    tune.add_argument("--backend", default=None, choices=[backend.value for backend in Backend])
    tune.add_argument("--output", metavar="FILE", help="keep the table here instead")
    tune.add_argument("--plot", metavar="FILE", help="draw it, too (.svg, .png; needs matplotlib)")
    tune.add_argument("--draw", metavar="TABLE", help="draw this table to --plot, and do no more")


def _add_check(commands: Any) -> None:
    check = commands.add_parser(
        "check",
        help="run kernels as plain Python under hostile schedules, and look for races",
        description=(
            "Run it without mpirun. A failure prints its seed, which makes the same run again: "
            "python -m shmemar check --kernel one_shot --protocol ll --ranks 2 --seed 7"
        ),
    )
    checkable = [kernel.value for kernel in Kernel if kernel.has_code]
    check.add_argument("--kernel", choices=checkable, help="default: all")
    check.add_argument(
        "--protocol",
        choices=[each.value for each in Protocol if each is not Protocol.STREAM],
        help="default: all",
    )
    check.add_argument(
        "--multicast",
        action="store_true",
        help="multicast forms alone; default: also, where no kernel or protocol is named",
    )
    check.add_argument("--ranks", type=int, nargs="+", default=[2, 3, 4, 8], metavar="N")
    check.add_argument("--seeds", type=int, default=200, help="runs of each; default: 200")
    check.add_argument("--seed", type=int, default=None, help="run this one seed")
    check.add_argument(
        "--schedule", default=None, help="a kind of schedule, or exhaustive; default: all in turn"
    )
    check.add_argument(
        "--jobs", type=int, default=len(os.sched_getaffinity(0)), help="processes; default: CPUs"
    )
    check.add_argument(
        "--controls",
        action="store_true",
        help="instead, take out what guards the kernels, and print how that is found",
    )


def _check(arguments: argparse.Namespace) -> int:
    from shmemar.host.checker.check_runs import HEADER, command_of, line_of, request, run_checks

    wanted = request(
        kernel=arguments.kernel,
        protocol=arguments.protocol,
        ranks=arguments.ranks,
        seeds=arguments.seeds,
        seed=arguments.seed,
        schedule=arguments.schedule,
        jobs=arguments.jobs,
        multicast=arguments.multicast,
    )
    print(f"# shmemar {__version__}, kernels as plain Python under hostile schedules")
    print(HEADER, flush=True)
    failures = 0
    for report in run_checks(wanted):
        print(line_of(report), flush=True)
        if report.failure is not None:
            failures += 1
            print(f"  {report.failure}")
            print(f"  again: {command_of(report, wanted.schedule)}", flush=True)
    print(f"# {failures} failed" if failures else "# nothing found", flush=True)
    return 1 if failures else 0


def _controls() -> int:
    from shmemar.host.checker.controls import control_table
    from shmemar.host.checker.guards import CONTROLS
    from shmemar.host.checker.threads import load_greenlet

    load_greenlet()
    is_right = True
    for line, is_found in control_table(CONTROLS):
        print(line, flush=True)
        is_right = is_right and is_found
    return 0 if is_right else 1


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
    from shmemar.host.survey import launched_rank

    diagnosis = diagnose()
    # Under mpirun one rank speaks, and those that have something else to say.
    if launched_rank() == 0 or diagnosis.exit_status:
        print(render(diagnosis), flush=True)
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


def _floor(arguments: argparse.Namespace) -> int:
    import json
    from pathlib import Path

    import shmemar
    from shmemar.host.bootstrap import load_mpi
    from shmemar.host.files import write_whole
    from shmemar.host.speed_of_light import measure_floor, render, time_barrier

    mpi = load_mpi()
    world = mpi.COMM_WORLD
    started = datetime.now(UTC).isoformat(timespec="seconds")
    with shmemar.init(world, backend=arguments.backend) as comm:
        progress = _progress if comm.rank == 0 else lambda *_: None
        floor = measure_floor(comm, rounds=arguments.rounds, progress=progress)
        barriers = {comm.size: time_barrier(comm)} if comm.size > 1 else {}
        for nranks in (n for n in (2, 4, 8, 16, 32) if n < comm.size):
            part = world.Split(0 if comm.rank < nranks else mpi.UNDEFINED)
            if comm.rank < nranks:
                with shmemar.init(part, backend=comm.backend.value) as some:
                    barriers[nranks] = time_barrier(some)
                part.Free()
            comm.host_barrier()
        if comm.rank:
            return 0
        description = comm.describe()
    known = {n: us for n, us in barriers.items() if us is not None}
    for name, value in description.items():
        print(f"# {name}: {value}")
    print(render(floor, known), flush=True)
    if arguments.json:
        document = {
            "date": started,
            **description,
            **floor.as_dict(),
            "barrier_us": {str(n): us for n, us in sorted(known.items())},
        }
        write_whole(Path(arguments.json), json.dumps(document, indent=1) + "\n")
    return 0


def _tune(arguments: argparse.Namespace) -> int:
    from pathlib import Path

    from shmemar.config import set_variable
    from shmemar.host.bootstrap import load_mpi
    from shmemar.host.plotting import draw, read_table, require_matplotlib
    from shmemar.host.sweep import message_sizes, parse_nbytes
    from shmemar.host.tables import facts_of, kept_path, table_document, write_table
    from shmemar.host.tuning import Effort, table_of, tune

    if arguments.draw:
        if not arguments.plot:
            raise ArgumentError("--draw is given without --plot; expected the file to draw to.")
        draw(read_table(Path(arguments.draw)), Path(arguments.plot))
        return 0
    dtype = as_dtype(arguments.dtype)
    op = as_reduce_op(arguments.op, dtype)
    sizes = message_sizes(
        parse_nbytes(arguments.smallest), parse_nbytes(arguments.largest), arguments.factor
    )
    sizes = sorted({max(nbytes // dtype.itemsize, 1) * dtype.itemsize for nbytes in sizes})
    for name in ("samples", "repeats"):
        if getattr(arguments, name) < 1:
            raise ArgumentError(f"{name} is {getattr(arguments, name)}; expected 1 or more.")

    _refuse_to_keep(arguments)
    if arguments.plot:
        require_matplotlib()

    import shmemar

    # A table is not measured by means of another.
    set_variable("SHMEMAR_TABLE", "none")
    world = load_mpi().COMM_WORLD
    started = datetime.now(UTC).isoformat(timespec="seconds")
    with shmemar.init(world, backend=arguments.backend, determinism="not_guaranteed") as comm:
        progress = _progress if comm.rank == 0 else lambda *_: None
        effort = Effort(arguments.samples, arguments.repeats)
        rows = tune(comm, sizes, dtype, op, effort, progress)
        if comm.rank:
            return int(any(row.wrong for row in rows))
        description, beyond = comm.describe(), comm.table
    facts = facts_of(description)
    path = Path(arguments.output) if arguments.output else kept_path(facts)
    table = table_of(rows, str(path), beyond)
    print(f"{'#size':>12}{'up to':>12}  fastest first, microseconds")
    for nbytes, band in zip(sizes, table.bands, strict=False):
        listed = ", ".join(f"{each.name} {each.latency_us:.2f}" for each in band.candidates)
        print(f"{nbytes:>12}{band.up_to:>12}  {listed}")
    wrong = sum(row.wrong for row in rows)
    if wrong:
        print(f"# {wrong} wrong; no table is kept", flush=True)
        return 1
    document = table_document(
        table,
        facts,
        date=started,
        dtype=dtype.name,
        op=op.value,
        mode="eager" if comm.backend is Backend.EMULATED else "graph",
        described=description,
        rows=[row.as_dict() for row in rows],
    )
    write_table(path, document)
    print(f"# all results right; kept in {path}", flush=True)
    if comm.backend is Backend.EMULATED:
        print("# CPU times of an emulation: they are used where SHMEMAR_TABLE names the file.")
    if arguments.plot:
        draw(document, Path(arguments.plot))
    return 0


def _refuse_to_keep(arguments: argparse.Namespace) -> None:
    """Refuse what would make a table for special use the one of the machine."""
    from shmemar.config import Config

    if arguments.output:
        return
    config = Config.from_environment()
    special = {
        f"SHMEMAR_{name.upper()}": getattr(config, name) != getattr(Config(), name)
        for name in ("kernel", "protocol", "multicast", "max_blocks")
    }
    special |= {
        f"--dtype {arguments.dtype}": arguments.dtype != "float32",
        f"--op {arguments.op}": arguments.op != "sum",
    }
    found = [name for name, is_special in special.items() if is_special]
    if found:
        raise ArgumentError(
            f"{', '.join(found)} would make a table for that alone the one of this machine; "
            "expected --output with it. Name a file there, and SHMEMAR_TABLE where it is to be "
            "used."
        )


def _progress(done: int, total: int, what: str) -> None:
    width = 30
    bar = "#" * (width * done // total)
    end = "\n" if done == total else ""
    print(f"\r[{bar:<{width}}] {done}/{total} {what:<44}", end=end, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
