"""The runs behind ``python -m shmemar check``: kernels by protocols by ranks, over processes."""

from __future__ import annotations

import time
from concurrent.futures import ProcessPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial, reduce
from multiprocessing import get_context
from typing import TYPE_CHECKING

from shmemar.dtypes import DTYPES, ReduceOp
from shmemar.errors import ArgumentError
from shmemar.host.checker import MULTICAST_PAIRS, PAIRS, check
from shmemar.host.checker.checked_run import EXHAUSTIVE, as_schedule_kind
from shmemar.host.checker.threads import load_greenlet
from shmemar.host.checker.verdict import CheckReport
from shmemar.spec import MAX_RANKS, Kernel, Protocol, why_impossible

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from concurrent.futures import Executor

__all__ = ["HEADER", "CheckRequest", "command_of", "line_of", "request", "run_checks"]

HEADER = (
    f"#{'kernel':>16}{'protocol':>19}{'ranks':>7}{'runs':>8}{'operations':>13}{'seconds':>9}"
    f"{'ops/s':>9}  found"
)
CHUNKS_PER_JOB = 4
"""Parts of the seeds that a process gets, so that none is left waiting for the last one."""


@dataclass(frozen=True)
class CheckRequest:
    """What is to be run.

    Attributes:
        forms: Kernels, protocols, and whether it is the multicast form.
        ranks: Numbers of ranks.
        seeds: Seeds, a run each.
        schedule: Kind of schedule; None for all in turn.
        jobs: Processes.
    """

    forms: tuple[tuple[Kernel, Protocol, bool], ...]
    ranks: tuple[int, ...]
    seeds: range
    schedule: str | None
    jobs: int


def request(
    *,
    kernel: str | None,
    protocol: str | None,
    ranks: Sequence[int],
    seeds: int,
    seed: int | None,
    schedule: str | None,
    jobs: int,
    multicast: bool = False,
) -> CheckRequest:
    """Check the arguments of the command.

    Args:
        kernel: Name of a kernel; None for all.
        protocol: Name of a protocol; None for all.
        ranks: Numbers of ranks.
        seeds: How many seeds, from 0 on.
        seed: One seed instead; None for none.
        schedule: Name of a kind of schedule; None for all in turn.
        jobs: Processes.
        multicast: True for multicast forms alone; where no kernel or protocol is named they are
            run anyway, for as many ranks as they can have.

    Raises:
        ArgumentError: One of them.
    """
    known = [(*pair, False) for pair in PAIRS if not multicast]
    if multicast or (kernel is None and protocol is None):
        known += [(*pair, True) for pair in MULTICAST_PAIRS]
    forms = tuple(
        (k, p, m) for k, p, m in known if kernel in (None, k.value) and protocol in (None, p.value)
    )
    if not forms:
        names = ", ".join(f"{k.value} with {p.value}" for k, p, _ in known)
        what = f"kernel is {kernel}, and protocol {protocol}" + ", and multicast True" * multicast
        raise ArgumentError(f"{what}; expected one of {names}.")
    for nranks in ranks:
        if not 1 <= nranks <= MAX_RANKS:
            raise ArgumentError(f"ranks has {nranks}; expected 1 to {MAX_RANKS}.")
    for name, value, least in (("seeds", seeds, 1), ("seed", seed or 0, 0), ("jobs", jobs, 1)):
        if value < least:
            raise ArgumentError(f"{name} is {value}; expected {least} or more.")
    if schedule not in (None, EXHAUSTIVE):
        as_schedule_kind(str(schedule), EXHAUSTIVE)
    load_greenlet()
    chosen = range(seeds) if seed is None else range(seed, seed + 1)
    for form in forms if multicast else ():
        for nranks in ranks:
            why = _why_impossible(form, nranks)
            if why is not None:
                raise ArgumentError(why)
    return CheckRequest(forms, tuple(ranks), chosen, schedule, jobs)


def run_checks(wanted: CheckRequest) -> Iterator[CheckReport]:
    """Yield a report of each kernel, protocol and number of ranks, when all its seeds were run."""
    is_parallel = wanted.jobs > 1 and len(wanted.seeds) > 1
    # Not forked: what this process has loaded, such as MPI, may not survive that.
    spawn = get_context("spawn")
    pool = ProcessPoolExecutor(wanted.jobs, spawn) if is_parallel else nullcontext()
    with pool as executor:
        for nranks in wanted.ranks:
            for form in wanted.forms:
                if not form[2] or _why_impossible(form, nranks) is None:
                    yield _run_one(wanted, form, nranks, executor)


def _why_impossible(form: tuple[Kernel, Protocol, bool], nranks: int) -> str | None:
    kernel, protocol, multicast = form
    what = DTYPES["float32"], ReduceOp.SUM, nranks
    return why_impossible(kernel, protocol, *what, multicast=multicast)


def _run_one(
    wanted: CheckRequest,
    form: tuple[Kernel, Protocol, bool],
    nranks: int,
    executor: Executor | None,
) -> CheckReport:
    kernel, protocol, multicast = form
    run = partial(check, kernel, protocol, nranks, schedule=wanted.schedule, multicast=multicast)
    start = time.perf_counter()
    # Numbers of a search can't be started from in the middle.
    if executor is None or wanted.schedule == EXHAUSTIVE:
        return run(seeds=wanted.seeds)
    nchunks = min(wanted.jobs * CHUNKS_PER_JOB, len(wanted.seeds))
    parts = [executor.submit(run, seeds=wanted.seeds[part::nchunks]) for part in range(nchunks)]
    joined = reduce(CheckReport.joined, (part.result() for part in parts))
    return replace(joined, seconds=time.perf_counter() - start)


def command_of(report: CheckReport, schedule: str | None) -> str:
    """The command that makes the run again that failed."""
    kernel, protocol, *form = report.name.split("/")
    words = f"--kernel {kernel} --protocol {protocol} --ranks {report.nranks}"
    words += "".join(f" --{word}" for word in form)
    if report.failure is not None:
        words += f" --seed {report.failure.seed}"
    return f"python -m shmemar check {words}" + (f" --schedule {schedule}" if schedule else "")


def line_of(report: CheckReport) -> str:
    """The report's line, as `HEADER` heads it."""
    kernel, _, protocol = report.name.partition("/")
    found = "nothing" if report.failure is None else report.failure.verdict.value
    speed = report.operations / report.seconds
    return (
        f"{kernel:>17}{protocol:>19}{report.nranks:>7}{report.runs:>8}{report.operations:>13}"
        f"{report.seconds:>9.1f}{speed:>9.0f}  {found}"
    )
