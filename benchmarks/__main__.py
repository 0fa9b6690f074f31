"""Command line of the benchmarks.

``mpirun -n N python -m benchmarks allreduce`` measures latency, also that of what users would run
instead, ``barrier`` what barriers take of it, ``launches`` the host's time of a call. Without
``mpirun``, ``compare`` sets two result files side by side, ``plot`` draws one, and ``machine-code``
says what the compilers made of the kernels.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from dataclasses import asdict, replace
from datetime import UTC, datetime
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import shmemar
from benchmarks.barriers import measure_barrier, measure_share
from benchmarks.compare import compare, load, render
from benchmarks.contender import GRAPHS
from benchmarks.contenders import CONTENDERS, Ours, contender_of
from benchmarks.launches import measure_launches
from benchmarks.machine_code import disassemble
from benchmarks.plots import draw
from benchmarks.steering import steering_variables
from benchmarks.timing import MODES, Case, measure, why_not
from shmemar.dtypes import DTYPES, ReduceOp, as_dtype, as_reduce_op
from shmemar.errors import ArgumentError, ShmemarError
from shmemar.host.bootstrap import load_mpi
from shmemar.host.selector import CANDIDATES
from shmemar.host.speed_of_light import measure_floor
from shmemar.host.sweep import message_sizes, parse_nbytes
from shmemar.spec import Backend, Kernel, KernelSpec, Protocol, why_impossible

if TYPE_CHECKING:
    from collections.abc import Sequence

    from benchmarks.barriers import Share
    from benchmarks.contender import Contender
    from benchmarks.timing import Result
    from shmemar.host.selector import Candidate

HEADER = (
    f"#{'size':>9}{'count':>10}{'type':>11}{'redop':>6}{'mode':>8}{'who':>16}{'kernel':>24}"
    f"{'blocks':>7}{'time':>9}{'p20':>9}{'p80':>9}{'p99':>9}{'other':>9}{'algbw':>8}{'busbw':>8}"
    f"{'xSoL':>7}{'#wrong':>8}\n"
    f"#{'(B)':>9}{'(elems)':>10}{'':>11}{'':>6}{'':>8}{'':>16}{'':>24}{'':>7}"
    f"{'(us)':>9}{'(us)':>9}{'(us)':>9}{'(us)':>9}{'(us)':>9}{'(GB/s)':>8}{'(GB/s)':>8}"
)
OSU_HEADER = f"# {'Size':<10}{'Avg Latency(us)':>18}  who, mode"
FORMATS = ("nccl", "osu", "json")
SHARE_HEADER = (
    "# Mode device; data: without barriers, on the same grid; less: by what part that is faster.\n"
    f"#{'size':>9}{'kernel':>24}{'blocks':>7}{'time':>9}{'data':>9}{'less':>9}{'#wrong':>8}\n"
    f"#{'(B)':>9}{'':>24}{'':>7}{'(us)':>9}{'(us)':>9}"
)
_WITH_BARRIERS = [each.value for each in Kernel if each.has_barriers and each.reduces]


def main(argv: Sequence[str] | None = None) -> int:
    """Run a benchmark; return 0, or 1 when any result was wrong."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    allreduce = commands.add_parser("allreduce", help="latency of all-reduce by size and mode")
    allreduce.add_argument("-b", "--smallest", default="128", metavar="SIZE")
    allreduce.add_argument("-e", "--largest", default="256K", metavar="SIZE")
    allreduce.add_argument("-f", "--factor", default=8, type=int)
    allreduce.add_argument("--sizes", metavar="SIZE,...", help="these, instead of a range")
    allreduce.add_argument("-d", "--dtype", default="float32", choices=DTYPES)
    allreduce.add_argument("-o", "--op", default="sum", choices=[op.value for op in ReduceOp])
    allreduce.add_argument(
        "-m", "--modes", default="device,graph,eager", help=f"of {', '.join(MODES)}"
    )
    allreduce.add_argument("-n", "--samples", default=30, type=int, help="samples a row")
    allreduce.add_argument("-r", "--repeats", default=200, type=int, help="collectives a sample")
    allreduce.add_argument("--in-place", action="store_true")
    allreduce.add_argument(
        "--chained", action="store_true", help="make each call depend on the data of the last"
    )
    allreduce.add_argument(
        "--kernels", metavar="NAME,...", help="pin a kernel, or measure several one by one"
    )
    allreduce.add_argument(
        "--protocols", metavar="NAME,...", help="likewise; those that a kernel has"
    )
    allreduce.add_argument(
        "--contenders",
        default="shmemar",
        metavar="NAME,...",
        help=f"who takes turns: shmemar, {', '.join(CONTENDERS)}, or all; default: shmemar",
    )
    allreduce.add_argument(
        "--pdl",
        default="auto",
        choices=["auto", "on", "off", "both"],
        help="programmatic dependent launch of our kernels; default: auto",
    )
    allreduce.add_argument(
        "--floor", action="store_true", help="measure the floor too, and say how far above it"
    )
    allreduce.add_argument("--format", default="nccl", choices=FORMATS, help="of the table")
    allreduce.add_argument("--backend", default=None, choices=[b.value for b in Backend])
    allreduce.add_argument("--json", type=Path, metavar="FILE", help="write the rows here too")
    barrier = commands.add_parser(
        "barrier", help="latency of a barrier, and what part of a kernel's time its barriers take"
    )
    barrier.add_argument("-m", "--modes", default="device,graph,eager", help="default: %(default)s")
    barrier.add_argument("-n", "--samples", default=30, type=int, help="samples a row")
    barrier.add_argument("-r", "--repeats", default=200, type=int, help="barriers a sample")
    barrier.add_argument("--sizes", default="128,64K,1M,8M", metavar="SIZE,...", help="of messages")
    barrier.add_argument("-d", "--dtype", default="float32", choices=DTYPES)
    barrier.add_argument(
        "--kernels", default="", metavar="NAME,...", help="measure the share of barriers in these"
    )
    barrier.add_argument("--protocols", metavar="NAME,...", help="of those that a kernel has")
    barrier.add_argument("--backend", default=None, choices=[b.value for b in Backend])
    barrier.add_argument("--json", type=Path, metavar="FILE", help="write the rows here too")
    launches = commands.add_parser(
        "launches",
        help="the host's time of a call: of plans, eager calls, a loop in C",
    )
    launches.add_argument("--size", default="128", help="of the message; default: 128")
    launches.add_argument("-d", "--dtype", default="float32", choices=DTYPES)
    launches.add_argument("-o", "--op", default="sum", choices=[op.value for op in ReduceOp])
    launches.add_argument("-n", "--samples", default=30, type=int, help="samples of each")
    launches.add_argument("-r", "--repeats", default=200, type=int, help="calls a sample")
    launches.add_argument("--backend", default=None, choices=[b.value for b in Backend])
    launches.add_argument("--json", type=Path, metavar="FILE", help="write the rows here too")
    code = commands.add_parser(
        "machine-code", help="registers, spills and instructions of each kernel, on a GPU host"
    )
    code.add_argument("--ranks", default="2,4,8", metavar="N,...")
    code.add_argument("--kernels", default="one_shot,two_shot", metavar="NAME,...")
    code.add_argument("--protocols", default="ll,sentinel", metavar="NAME,...")
    code.add_argument("-d", "--dtype", default="float32", choices=DTYPES)
    code.add_argument("-o", "--op", default="sum", choices=[op.value for op in ReduceOp])
    code.add_argument("--json", type=Path, metavar="FILE", help="write it here too")
    compare_files = commands.add_parser("compare", help="two result files, side by side")
    compare_files.add_argument("before", type=Path)
    compare_files.add_argument("after", type=Path)
    plot = commands.add_parser("plot", help="draw a result file (needs matplotlib)")
    plot.add_argument("results", type=Path)
    plot.add_argument("output", type=Path, help=".svg or .png")
    plot.add_argument("-m", "--mode", default="graph", choices=MODES)
    arguments = parser.parse_args(argv)
    if arguments.command in ("compare", "plot"):
        return _compare(arguments) if arguments.command == "compare" else _plot(arguments)
    is_code = arguments.command == "machine-code"
    for option, names in (
        ("--kernels", [each.value for each in Kernel if each.has_code or not is_code]),
        ("--protocols", [each.value for each in Protocol]),
    ):
        given = getattr(arguments, option[2:], None)
        strange = [name for name in given.split(",") if name not in names] if given else []
        if strange:
            parser.error(f"{option} has {strange[0]!r}; expected some of {', '.join(names)}")
    if arguments.command == "machine-code":
        return _machine_code(arguments)
    if arguments.command == "launches":
        if arguments.samples < 1 or arguments.repeats < 1:
            parser.error("--samples and --repeats must be 1 or more")
        return _launches(arguments)
    modes = arguments.modes.split(",")
    unknown = [mode for mode in modes if mode not in MODES]
    if unknown:
        parser.error(f"--modes has {unknown[0]!r}; expected some of {', '.join(MODES)}")
    if arguments.samples < 1 or arguments.repeats < 5:
        parser.error("--samples must be 1 or more, and --repeats 5 or more")
    if arguments.command == "barrier":
        unknown = [mode for mode in modes if mode not in ("device", "graph", "eager")]
        if unknown:
            parser.error(f"--modes has {unknown[0]!r}; expected some of device, graph, eager")
        names = arguments.kernels.split(",") if arguments.kernels else []
        unknown = [name for name in names if name not in _WITH_BARRIERS]
        if unknown:
            expected = ", ".join(_WITH_BARRIERS)
            parser.error(f"--kernels has {unknown[0]!r}; expected some of {expected}")
        pairs = _pairs(arguments.kernels, arguments.protocols) if names else []
        if not pairs and arguments.protocols:
            parser.error("--protocols names none of a kernel in --kernels")
        return _barrier(arguments, modes, pairs)
    repeating = modes != ["eager"]
    if arguments.in_place and repeating and arguments.op not in ("min", "max"):
        parser.error("--in-place needs --op min or max, or -m eager: other calls don't repeat")
    if arguments.chained and ("eager" in modes or arguments.in_place or arguments.op != "sum"):
        parser.error("--chained needs -m device,graph, --op sum, and no --in-place")
    try:
        contenders = _contenders(arguments)
    except ArgumentError as error:
        parser.error(f"--{error}")
    return _allreduce(arguments, modes, contenders)


def _contenders(arguments: argparse.Namespace) -> list[Contender]:
    """Who takes turns, in the order of the table."""
    given = arguments.contenders.split(",")
    names = ["shmemar", *CONTENDERS] if given == ["all"] else given
    choices: dict[str, list[Any]] = {
        "auto": ["auto"],
        "on": [True],
        "off": [False],
        "both": [True, False],
    }
    pdls = choices[arguments.pdl]
    found: list[Contender] = []
    for name in names:
        if name != "shmemar":
            found.append(contender_of(name))
            continue
        for kernel, protocol in _pairs(arguments.kernels, arguments.protocols):
            if kernel is None and protocol is None:
                candidates: list[Candidate | None] = [None]
            else:
                candidates = [
                    each
                    for each in CANDIDATES
                    if kernel in (None, each.kernel.value)
                    and protocol in (None, each.protocol.value)
                ]
            for candidate in candidates:
                if candidate is not None and not candidate.kernel.has_code:
                    found.append(Ours(candidate, modes=(*GRAPHS, "eager")))
                    continue
                if pdls == ["auto"]:
                    found.append(Ours(candidate))
                    continue
                # It is for graphs; of the other modes there is one row.
                found.append(Ours(candidate, modes=("device", "eager")))
                found += [Ours(candidate, pdl, GRAPHS) for pdl in pdls]
    return found


def _allreduce(arguments: argparse.Namespace, modes: list[str], contenders: list[Contender]) -> int:
    dtype = as_dtype(arguments.dtype)
    op = as_reduce_op(arguments.op, dtype)
    if arguments.sizes:
        sizes = [parse_nbytes(text) for text in arguments.sizes.split(",")]
    else:
        smallest, largest = parse_nbytes(arguments.smallest), parse_nbytes(arguments.largest)
        sizes = message_sizes(smallest, largest, arguments.factor)
    cases = [
        Case(
            dtype=dtype,
            op=op,
            count=max(nbytes // dtype.itemsize, 1),
            in_place=arguments.in_place,
            chained=arguments.chained,
            samples=arguments.samples,
            repeats=arguments.repeats,
        )
        for nbytes in sizes
    ]
    rows: list[Result] = []
    world = load_mpi().COMM_WORLD
    with shmemar.init(world, backend=arguments.backend, determinism="not_guaranteed") as comm:
        where: dict[str, Any] = dict(comm.describe())
        speaks = comm.rank == 0
        table = _Table(arguments.format, comm.size) if speaks else None
        if table:
            table.head(where)
        if arguments.floor:
            floor = measure_floor(comm)
            where["floor"] = floor.as_dict()
            if table and comm.size > 1:
                table.say(f"floor: L_SoL {floor.l_sol_ns:.0f} ns, as `python -m shmemar floor`")
        for mode in modes:
            reason = why_not(comm, mode)
            if reason:
                if table:
                    table.say(f"{mode}: not run, {reason}")
                continue
            for case in cases:
                for row in measure(comm, mode, case, contenders):
                    if arguments.floor and comm.size > 1 and row.median_us is not None:
                        row = replace(row, xsol=row.median_us / floor.l_sol_ns * 1e3)  # noqa: PLW2901
                    rows.append(row)
                    if table:
                        table.row(row)
        if table:
            variables = steering_variables()
            document = {**where, **variables, "rows": [row.as_dict() for row in rows]}
            table.end(document)
            if arguments.json:
                _write_json(arguments.json, document)
    return 1 if any(row.failed for row in rows) else 0


class _Table:
    """Prints rows as they come."""

    def __init__(self, form: str, nranks: int) -> None:
        self.form, self.nranks = form, nranks

    def head(self, where: dict[str, Any]) -> None:
        if self.form == "json":
            return
        for name, text in where.items():
            print(f"# {name}: {text}")
        print("# time: maximum over ranks of each rank's median. other: graph: an empty kernel")
        print("# in the collective's place; behind, early: the kernel ahead, which is subtracted;")
        print("# eager: the host's time of a call. xSoL: times the floor.")
        print(HEADER if self.form == "nccl" else OSU_HEADER, flush=True)

    def say(self, text: str) -> None:
        print(f"# {text}", flush=True, file=sys.stderr if self.form == "json" else sys.stdout)

    def row(self, row: Result) -> None:
        if self.form == "nccl":
            print(_line(row, self.nranks), flush=True)
        elif self.form == "osu":
            if row.median_us is not None:
                print(
                    f"  {row.nbytes:<10}{row.median_us:>18.2f}  {row.contender} {row.kernel}, "
                    f"{row.mode}",
                    flush=True,
                )
        else:
            print(f"{row.mode}, {row.nbytes} bytes, {row.contender}", file=sys.stderr, flush=True)

    def end(self, document: dict[str, Any]) -> None:
        if self.form == "json":
            print(json.dumps(document, indent=1), flush=True)


def _compare(arguments: argparse.Namespace) -> int:
    try:
        found = compare(load(arguments.before), load(arguments.after))
    except ArgumentError as error:
        print(f"benchmarks: {error}", file=sys.stderr, flush=True)
        return 2
    print(render(found), flush=True)
    return 1 if found.regressed else 0


def _plot(arguments: argparse.Namespace) -> int:
    try:
        draw(load(arguments.results), arguments.output, arguments.mode)
    except ShmemarError as error:
        print(f"benchmarks: {error}", file=sys.stderr, flush=True)
        return 2
    return 0


def _barrier(
    arguments: argparse.Namespace, modes: list[str], pairs: list[tuple[str | None, str | None]]
) -> int:
    dtype = as_dtype(arguments.dtype)
    sizes = [parse_nbytes(text) for text in arguments.sizes.split(",")]
    rows: list[Result] = []
    shares: list[Share] = []
    with shmemar.init(load_mpi().COMM_WORLD, backend=arguments.backend) as comm:
        where = comm.describe()
        if comm.rank == 0:
            _print_head(where)
        for mode in modes:
            if _is_possible(comm, mode):
                rows.append(measure_barrier(comm, mode, arguments.samples, arguments.repeats))
                if comm.rank == 0:
                    print(_line(rows[-1], comm.size), flush=True)
        if pairs and _is_possible(comm, "device"):
            if comm.rank == 0:
                print(SHARE_HEADER, flush=True)
            for kernel, protocol in pairs:
                with _pinned(kernel, protocol, arguments.backend) as pinned:
                    for nbytes in sizes:
                        count = max(nbytes // dtype.itemsize, 1)
                        case = Case(
                            dtype,
                            ReduceOp.SUM,
                            count,
                            samples=arguments.samples,
                            repeats=arguments.repeats,
                        )
                        shares.append(measure_share(pinned, case))
                        if comm.rank == 0:
                            print(_share_line(shares[-1]), flush=True)
        if comm.rank == 0 and arguments.json:
            found = {
                "rows": [row.as_dict() for row in rows],
                "shares": [asdict(share) for share in shares],
            }
            _write_json(arguments.json, {**where, **found})
    wrong = [row.wrong for row in rows] + [share.wrong for share in shares]
    return 1 if any(wrong) else 0


def _launches(arguments: argparse.Namespace) -> int:
    dtype = as_dtype(arguments.dtype)
    op = as_reduce_op(arguments.op, dtype)
    count = max(parse_nbytes(arguments.size) // dtype.itemsize, 1)
    with shmemar.init(load_mpi().COMM_WORLD, backend=arguments.backend) as comm:
        reason = why_not(comm, "graph")
        if reason:
            if comm.rank == 0:
                print(f"launches: not run, {reason}", file=sys.stderr, flush=True)
            return 2
        where = comm.describe()
        what = dtype, op, count, arguments.samples, arguments.repeats
        rows = measure_launches(comm, *what)
        if comm.rank == 0:
            for name, text in where.items():
                print(f"# {name}: {text}")
            print(f"# host microseconds a call, {count * dtype.itemsize} bytes, {dtype.name}")
            print(f"#{'':>9}{'time':>9}{'p20':>9}{'p80':>9}{'of loop':>9}{'#wrong':>8}")
            for row in rows:
                print(
                    f"{row.contender:>10}{row.median_us:>9.2f}{row.p20_us:>9.2f}"
                    f"{row.p80_us:>9.2f}{row.of_loop:>9.2f}{row.wrong:>8}"
                )
            if arguments.json:
                _write_json(arguments.json, {**where, "rows": [asdict(row) for row in rows]})
    return 1 if any(row.wrong for row in rows) else 0


def _print_head(where: dict[str, str]) -> None:
    for name, text in where.items():
        print(f"# {name}: {text}")
    print("# time: maximum over ranks of each rank's median. other: graph: an empty kernel")
    print("# in the collective's place; eager: the host's time of a call.")
    print(HEADER, flush=True)


def _is_possible(comm: shmemar.Communicator, mode: str) -> bool:
    reason = why_not(comm, mode)
    if reason and comm.rank == 0:
        print(f"# {mode}: not run, {reason}", flush=True)
    return not reason


def _pairs(kernels: str | None, protocols: str | None) -> list[tuple[str | None, str | None]]:
    """Kernels with those of the protocols that they have; None for what is not pinned."""
    names: list[str | None] = [*kernels.split(",")] if kernels else [None]
    pairs: list[tuple[str | None, str | None]] = []
    for name in names:
        possible = [each.value for each in Kernel(name or Kernel.ONE_SHOT).protocols]
        wanted = protocols.split(",") if protocols else [None]
        pairs += [(name, each) for each in wanted if each is None or each in possible]
    return pairs


def _pinned(kernel: str | None, protocol: str | None, backend: str | None) -> shmemar.Communicator:
    """Make a communicator as SHMEMAR_KERNEL and SHMEMAR_PROTOCOL would pin it."""
    for variable, value in (("SHMEMAR_KERNEL", kernel), ("SHMEMAR_PROTOCOL", protocol)):
        if value is not None:
            os.environ[variable] = value
        else:
            os.environ.pop(variable, None)
    comm = load_mpi().COMM_WORLD
    return shmemar.init(comm, backend=backend, determinism="not_guaranteed")


def _machine_code(arguments: argparse.Namespace) -> int:
    dtype = as_dtype(arguments.dtype)
    op = as_reduce_op(arguments.op, dtype)
    found = []
    ranks = map(int, arguments.ranks.split(","))
    pairs = _pairs(arguments.kernels, arguments.protocols)
    for (kernel, protocol), nranks in product(pairs, ranks):
        wanted = Kernel(kernel), Protocol(protocol), dtype, op, nranks
        if why_impossible(*wanted):
            continue
        spec = KernelSpec(*wanted)
        for looped in (False, True):
            found.append(disassemble(spec, looped=looped))
            print(found[-1], flush=True)
    if arguments.json:
        _write_json(arguments.json, {"kernels": [asdict(code) for code in found]})
    return 0


def _write_json(file: Path, contents: dict[str, Any]) -> None:
    document = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": " ".join(["python -m benchmarks", *sys.argv[1:]]),
        **contents,
    }
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(document, indent=1) + "\n")


def _share_line(row: Share) -> str:
    return (
        f"{row.nbytes:>10}{row.kernel:>24}{row.blocks:>7}{row.median_us:>9.2f}{row.data_us:>9.2f}"
        f"{row.share:>9.0%}{row.wrong:>8}"
    )


def _line(row: Result, nranks: int) -> str:
    def number(value: float | None, width: int = 9) -> str:
        return f"{'-':>{width}}" if value is None else f"{value:>{width}.2f}"

    what = f"{row.nbytes:>10}{row.count:>10}{row.dtype:>11}{row.op:>6}{row.mode:>8}"
    who = f"{row.contender:>16}{row.kernel:>24}"
    if row.median_us is None:
        return f"{what}{who}  not run: {row.note}"
    algbw = row.nbytes / row.median_us / 1e3
    busbw = algbw * 2 * (nranks - 1) / nranks
    times = (row.median_us, row.p20_us, row.p80_us, row.p99_us, row.other_us)
    cells = [
        f"{what}{who}{'-' if row.blocks is None else row.blocks:>7}",
        *map(number, times),
        f"{algbw:>8.2f}{busbw:>8.2f}{number(row.xsol, 7)}{row.wrong:>8}",
        f"  {row.note}" * bool(row.note),
    ]
    return "".join(cells)


if __name__ == "__main__":
    sys.exit(main())
