"""The runs behind ``python -m shmemar check``: kernels by protocols by ranks, over processes."""

from __future__ import annotations

import time
from concurrent.futures import ProcessPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import reduce
from multiprocessing import get_context
from typing import TYPE_CHECKING

from shmemar.errors import ArgumentError
from shmemar.host.checker import PAIRS, check
from shmemar.host.checker.checked_run import EXHAUSTIVE, as_schedule_kind
from shmemar.host.checker.threads import load_greenlet
from shmemar.host.checker.verdict import CheckReport
from shmemar.spec import MAX_RANKS, Kernel, Protocol

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from concurrent.futures import Executor

__all__ = ["HEADER", "CheckRequest", "command_of", "line_of", "request", "run_checks"]

HEADER = (
    f"#{'kernel':>16}{'protocol':>10}{'ranks':>7}{'runs':>8}{'operations':>13}{'seconds':>9}"
    f"{'ops/s':>9}  found"
)
CHUNKS_PER_JOB = 4
"""Parts of the seeds that a process gets, so that none is left waiting for the last one."""


@dataclass(frozen=True)
class CheckRequest:
    """What is to be run.

    Attributes:
        pairs: Kernels and protocols.
        ranks: Numbers of ranks.
        seeds: Seeds, a run each.
        schedule: Kind of schedule; None for all in turn.
        jobs: Processes.
    """

    pairs: tuple[tuple[Kernel, Protocol], ...]
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

    Raises:
        ArgumentError: One of them.
    """
    pairs = tuple(
        (k, p) for k, p in PAIRS if kernel in (None, k.value) and protocol in (None, p.value)
    )
    if not pairs:
        names = ", ".join(f"{k.value} with {p.value}" for k, p in PAIRS)
        raise ArgumentError(
            f"kernel is {kernel}, and protocol {protocol}; expected one of {names}."
        )
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
    return CheckRequest(pairs, tuple(ranks), chosen, schedule, jobs)


def run_checks(wanted: CheckRequest) -> Iterator[CheckReport]:
    """Yield a report of each kernel, protocol and number of ranks, when all its seeds were run."""
    is_parallel = wanted.jobs > 1 and len(wanted.seeds) > 1
    # Not forked: what this process has loaded, such as MPI, may not survive that.
    spawn = get_context("spawn")
    pool = ProcessPoolExecutor(wanted.jobs, spawn) if is_parallel else nullcontext()
    with pool as executor:
        for nranks in wanted.ranks:
            for pair in wanted.pairs:
                yield _run_one(wanted, pair, nranks, executor)


def _run_one(
    wanted: CheckRequest, pair: tuple[Kernel, Protocol], nranks: int, executor: Executor | None
) -> CheckReport:
    start = time.perf_counter()
    # Numbers of a search can't be started from in the middle.
    if executor is None or wanted.schedule == EXHAUSTIVE:
        return check(*pair, nranks, wanted.seeds, wanted.schedule)
    nchunks = min(wanted.jobs * CHUNKS_PER_JOB, len(wanted.seeds))
    parts = [
        executor.submit(check, *pair, nranks, wanted.seeds[part::nchunks], wanted.schedule)
        for part in range(nchunks)
    ]
    joined = reduce(CheckReport.joined, (part.result() for part in parts))
    return replace(joined, seconds=time.perf_counter() - start)


def command_of(report: CheckReport, schedule: str | None) -> str:
    """The command that makes the run again that failed."""
    kernel, _, protocol = report.name.partition("/")
    words = f"--kernel {kernel} --protocol {protocol} --ranks {report.nranks}"
    if report.failure is not None:
        words += f" --seed {report.failure.seed}"
    return f"python -m shmemar check {words}" + (f" --schedule {schedule}" if schedule else "")


def line_of(report: CheckReport) -> str:
    """The report's line, as `HEADER` heads it."""
    kernel, _, protocol = report.name.partition("/")
    found = "nothing" if report.failure is None else report.failure.verdict.value
    speed = report.operations / report.seconds
    return (
        f"{kernel:>17}{protocol:>10}{report.nranks:>7}{report.runs:>8}{report.operations:>13}"
        f"{report.seconds:>9.1f}{speed:>9.0f}  {found}"
    )
