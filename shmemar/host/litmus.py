"""May this machine use lines of 128 bytes? A litmus test on all ranks, and its verdict.

`why_no_lines` knows the machines that may not, without a test. `run_litmus` runs the test of
:mod:`shmemar.device.litmus`; `lines_verdict` runs it once a machine, and remembers what it said.

A pass is no proof: nothing was seen in so many line writes, by a test that sees the error where it
is planted.
"""

from __future__ import annotations

import hashlib
import json
import logging
import time
from contextlib import nullcontext
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from shmemar.device import litmus as device_litmus
from shmemar.device.litmus import (
    CONTESTED,
    COUNT,
    ELEMENT,
    FIELDS,
    KERNELS,
    LINE,
    MAX_COUNTS,
    OLDER,
    OLDER_ACROSS,
    PLANTED_KERNELS,
    READINGS,
    TORN,
    VALUE,
    WRITES,
)
from shmemar.errors import ArgumentError, DeviceError
from shmemar.host.files import kept_file, write_whole
from shmemar.host.gpus import GpuFacts, facts_of
from shmemar.host.ranks import name_ranks
from shmemar.host.runtime import bound_gpu
from shmemar.host.survey import installed, kernel_driver
from shmemar.layout import LINE_LANES, LINE_NBYTES, WORD_NBYTES
from shmemar.spec import Backend

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from contextlib import AbstractContextManager

    from numpy.typing import NDArray

    from shmemar.host.communicator import Communicator

__all__ = [
    "LONG_LINES",
    "SHORT_LINES",
    "LinesVerdict",
    "LitmusReport",
    "Tally",
    "gather_facts",
    "launches_for",
    "lines_verdict",
    "report_of",
    "run_litmus",
    "tally_of",
    "why_no_lines",
]

logger = logging.getLogger(__name__)

LONG_LINES = 10_000_000
SHORT_LINES = 2_000_000
"""Line writes of each rank and type; the short form is for `shmemar.init`."""

MIN_ROUNDS = 16
"""Of the long launches of a type together, however few lines are asked for."""

MIN_CONTESTED = 0.01
"""Part of a rank's readings of its own lines of a type that must be contested. Where ranks write
one after another, as without MPS on one GPU, the test says nothing."""

MIN_COMPUTE_CAPABILITY = (9, 0)
"""The first whose additions to memory are 16 bytes wide."""

LINE_WORDS = LINE_NBYTES // WORD_NBYTES

NTHREADS = 1024
"""Of a rank, 8 a line: few blocks, so that all ranks write at once also where they share a GPU."""


@dataclass(frozen=True)
class Tally:
    """What one rank has added, read and found, in one launch or several.

    Attributes:
        made: Additions of lines that it made, on all ranks together.
        observed: Additions that its own lines hold at the end.
        wrong: Elements of its own lines that don't fit the line's count at the end.
        readings: Lines that it read, half of them its own.
        contested: Those of its own to which a peer had added since the reading before.
        could_be_contested: Those of its own but for the first of each line in a launch.
        older: Parts of 16 bytes of them that had an element older than the count seen before.
        older_across: As many of these as were in lines that another warp adds to.
        torn: Parts of 16 bytes that did not fit the count of the same load.
        seconds: From launches to their ends.
        example: One element that was older, in words; empty where there was none.
    """

    made: int
    observed: int
    wrong: int
    readings: int
    contested: int
    could_be_contested: int
    older: int
    older_across: int
    torn: int
    seconds: float
    example: str = ""

    @property
    def part_contested(self) -> float:
        """Part of the readings of own lines that were contested, of those that could be."""
        return self.contested / max(self.could_be_contested, 1)


@dataclass(frozen=True)
class LitmusReport:
    """What a litmus test has seen, on all ranks together; the same on every one.

    Attributes:
        ranks: Ranks that took part.
        made: Line writes: additions to 128 bytes by one instruction, of all ranks.
        observed: Line writes that the lines held at the end.
        wrong: Elements that did not fit their line's count at the end.
        readings: Readings of lines while all ranks wrote, half of them of a rank's own ones.
        contested: The least part, of any rank and type, of the readings of own lines to which a
            peer had added since the reading before.
        older: Violations: parts of 16 bytes, loaded after the count was seen, with an element that
            the count says more of.
        older_across: As many of these as were in lines that another warp of the rank adds to.
        torn: Parts of 16 bytes that did not fit the count of the same load; no kernel relies on it.
        seconds: Of the slowest rank.
        example: A violation, in words; empty where there was none.
        planted: True when the error was planted.
        why_not_run: Why nothing was run; empty when it was.
    """

    ranks: int
    made: int = 0
    observed: int = 0
    wrong: int = 0
    readings: int = 0
    contested: float = 0.0
    older: int = 0
    older_across: int = 0
    torn: int = 0
    seconds: float = 0.0
    example: str = ""
    planted: bool = False
    why_not_run: str = ""

    @property
    def passed(self) -> bool:
        """True when it ran on all ranks at once, no line was seen in parts, and none was lost."""
        has_run = not self.why_not_run and self.made > 0 and self.is_contested
        return has_run and not (self.older or self.wrong) and self.observed == self.made

    @property
    def is_contested(self) -> bool:
        """True when ranks have added to the same lines at once, each of them, of each type."""
        return self.ranks == 1 or self.contested >= MIN_CONTESTED

    def __str__(self) -> str:
        """One line: the verdict and the numbers."""
        if self.why_not_run:
            return f"not run: {self.why_not_run}"
        verdict = "passed" if self.passed else "FAILED"
        planted = ", with the error planted" if self.planted else ""
        lost = "" if self.observed == self.made else f", of which {self.observed:,} arrived"
        wrong = f"; {self.wrong:,} elements wrong at the end" if self.wrong else ""
        example = f"; {self.example}" if self.example else ""
        alone = (
            ""
            if self.is_contested
            else "; the ranks have not written at once, as they must to be tested: is MPS running?"
        )
        return (
            f"{verdict}{planted}: {self.made:,} line writes of {', '.join(KERNELS)} by "
            f"{self.ranks} ranks{lost}, {self.readings:,} line readings ({self.contested:.0%} or "
            f"more of a rank's own contested), {self.older:,} parts older than their count "
            f"({self.older_across:,} across warps), {self.torn:,} torn in a single load, "
            f"{self.seconds:.2f} s{wrong}{example}{alone}"
        )


def run_litmus(
    comm: Communicator,
    lines: int = LONG_LINES,
    *,
    planted: bool = False,
    types: Sequence[str] = tuple(KERNELS),
) -> LitmusReport:
    """Let all ranks write lines to one another, and look for one that does not arrive as a whole.

    Collective. The symmetric memory that it takes, half a MiB at 8 ranks, stays the communicator's.

    Emulated ranks run nothing, and the report says so: a line is whole there because one thread
    adds all of it, the count last.

    Args:
        comm: The ranks.
        lines: Line writes of each rank and type, at least.
        planted: True to plant the error that is looked for: the count is added before the rest. The
            test is worth something where that does not pass.
        types: Names of element types, each with an instruction of its own.

    Raises:
        ArgumentError: That is no positive integer.
        ShmemarError: As of `Communicator.launch`.
    """
    if isinstance(lines, bool) or not isinstance(lines, int) or lines < 1:
        raise ArgumentError(f"lines is {lines!r}; expected a positive integer.")
    if comm.backend is Backend.EMULATED:
        why = "the emulated backend, where one thread adds a line, its count last"
        return LitmusReport(comm.size, planted=planted, why_not_run=why)
    buffer = comm.ll_buffer("uint32", threads=NTHREADS)
    memory = comm.symmetric_array((NTHREADS // LINE_LANES, LINE_WORDS), "uint32")
    found = comm.symmetric_array((NTHREADS, FIELDS), "uint32")

    def run(name: str, rounds: int) -> Tally:
        kernel = (PLANTED_KERNELS if planted else KERNELS)[name]
        comm.launch(kernel, buffer, memory, found, 0, stream=0)
        found.copy_to_host()  # the lines are clear
        comm.host_barrier()
        start = time.perf_counter()
        comm.launch(kernel, buffer, memory, found, rounds, stream=0)
        words = found.copy_to_host()
        seconds = time.perf_counter() - start
        comm.host_barrier()  # everyone's additions are there
        return tally_of(comm.rank, name, words, memory.copy_to_host(), seconds)

    of_types = []
    for name in types:
        # One round first: it compiles, and says how many lines a round has on this machine.
        tallies = [run(name, 1)]
        rounds = launches_for(lines, tallies[0].made, MAX_COUNTS[name] // comm.size)
        of_types.append(total_of(tallies + [run(name, each) for each in rounds]))
    report = report_of(comm.host_allgather(of_types), planted=planted)
    if not planted and set(types) == set(KERNELS):
        comm.lines = str(report)
    return report


def launches_for(lines: int, a_round: int, limit: int) -> list[int]:
    """How many rounds each launch has, `limit` at most, that together make so many line writes.

    The first round, with `a_round` line writes, was made. At least `MIN_ROUNDS`.
    """
    rounds = max(-(-lines // a_round) - 1, MIN_ROUNDS)
    return [min(limit, rounds - done) for done in range(0, rounds, limit)]


def tally_of(
    rank: int, name: str, words: NDArray[np.uint32], memory: NDArray[np.uint32], seconds: float
) -> Tally:
    """Count what a rank's threads report of a launch, and what its lines hold at the end.

    Args:
        rank: The rank.
        name: The type of the elements.
        words: Each thread's `FIELDS`.
        memory: The lines, as words.
        seconds: What the launch took.
    """
    totals = words.sum(axis=0, dtype=np.int64)
    nthreads = int(np.count_nonzero(words[:, READINGS]))
    elements = _as_floats(memory, name)
    counts = elements[:, :1]
    times = np.arange(1, LINE_WORDS + 1) if name == "float32" else 1
    return Tally(
        made=int(totals[WRITES]) // LINE_LANES,
        observed=int(counts.sum()),
        wrong=int(np.count_nonzero(elements != counts * times)),
        readings=int(totals[READINGS]) // LINE_LANES,
        contested=int(totals[CONTESTED]) // LINE_LANES,
        could_be_contested=max(int(totals[READINGS]) // 2 - nthreads, 0) // LINE_LANES,
        older=int(totals[OLDER] + totals[OLDER_ACROSS]),
        older_across=int(totals[OLDER_ACROSS]),
        torn=int(totals[TORN]),
        seconds=seconds,
        example=_example(rank, name, words),
    )


def total_of(tallies: Sequence[Tally]) -> Tally:
    """Add up what was found."""
    numbers = [field.name for field in fields(Tally) if field.name != "example"]
    totals: dict[str, Any] = {
        name: sum(getattr(tally, name) for tally in tallies) for name in numbers
    }
    example = next((tally.example for tally in tallies if tally.example), "")
    return Tally(**totals, example=example)


def _as_floats(words: NDArray[np.uint32], name: str) -> NDArray[np.float64]:
    if name == "bfloat16":
        bits = words.view(np.uint16).astype(np.uint32) << np.uint32(16)
        return bits.view(np.float32).astype(np.float64)
    return words.view(name).astype(np.float64)


def _example(rank: int, name: str, words: NDArray[np.uint32]) -> str:
    saw = np.flatnonzero(words[:, OLDER] | words[:, OLDER_ACROSS])
    if not saw.size:
        return ""
    first = words[saw[0]]
    count, value = (float(first[field : field + 1].view(np.float32)[0]) for field in (COUNT, VALUE))
    element = int(first[ELEMENT])
    expected = count * (element + 1 if name == "float32" else 1)
    return (
        f"rank {rank} saw the count {count:.0f} in line {first[LINE]} of {name}, and then "
        f"{value:.0f} for element {element}, expected {expected:.0f} or more"
    )


def report_of(everyone: Sequence[Sequence[Tally]], *, planted: bool = False) -> LitmusReport:
    """Add up what each rank has found of each type."""
    whole = total_of([tally for tallies in everyone for tally in tallies])
    return LitmusReport(
        ranks=len(everyone),
        made=whole.made,
        observed=whole.observed,
        wrong=whole.wrong,
        readings=whole.readings,
        contested=min(tally.part_contested for tallies in everyone for tally in tallies),
        older=whole.older,
        older_across=whole.older_across,
        torn=whole.torn,
        seconds=max(total_of(tallies).seconds for tallies in everyone),
        example=whole.example,
        planted=planted,
    )


def why_no_lines(facts: Sequence[GpuFacts | None]) -> str | None:
    """Say why ranks can't use lines of 128 bytes, whatever a test would see; None for no reason.

    Args:
        facts: Of each rank's GPU, in rank order; None of a rank without one.
    """
    without = [rank for rank, gpu in enumerate(facts) if gpu is None]
    if without:
        return f"no GPU runs the kernels of {name_ranks(without)}"
    gpus = [gpu for gpu in facts if gpu is not None]
    old = [rank for rank, gpu in enumerate(gpus) if gpu.compute_capability < MIN_COMPUTE_CAPABILITY]
    if old:
        gpu = gpus[old[0]]
        major, minor = gpu.compute_capability
        return (
            f"the GPU of {name_ranks(old)} ({gpu.name}) has compute capability {major}.{minor}, "
            "and lines need 9.0 or newer"
        )
    for rank, gpu in enumerate(gpus):
        # Of a GPU that is hidden from this process nothing is known: the test has to say.
        apart = [peer for peer, other in enumerate(gpus) if gpu.atomics.get(other.uuid) is False]
        if apart:
            return (
                f"the GPU of rank {rank} ({gpu.name}) has no native atomic operations on that of "
                f"{name_ranks(apart)}: no NVLink joins them"
            )
    return None


def gather_facts(comm: Communicator) -> list[GpuFacts | None]:
    """Tell one another which GPUs the ranks run on. Collective."""
    gpu = None if comm.backend is Backend.EMULATED else bound_gpu()
    own, trouble = None, ""
    try:
        own = None if gpu is None else facts_of(gpu)
    except Exception as error:  # noqa: BLE001 - every rank hears of it, and raises
        trouble = f"{type(error).__name__}: {error}"
    everyone = comm.host_allgather((own, trouble))
    for rank, (_, theirs) in enumerate(everyone):
        if theirs:
            raise DeviceError(f"rank {rank} could not look at its GPU ({theirs}). Run the doctor.")
    return [facts for facts, _ in everyone]


@dataclass(frozen=True)
class LinesVerdict:
    """Whether lines of 128 bytes may be used.

    Attributes:
        passed: They may.
        text: Why, in a line.
    """

    passed: bool
    text: str


def lines_verdict(
    comm: Communicator, test_on: Callable[[], AbstractContextManager[Communicator]] | None = None
) -> LinesVerdict:
    """Decide, for all ranks alike, whether their machine may use lines of 128 bytes.

    Collective. Rank 0 looks for what it remembers of the same GPUs, driver and test; else all ranks
    run the short test, and rank 0 remembers it.

    Args:
        comm: The ranks.
        test_on: Makes a communicator of the same ranks for the test, whose memory is free again
            when it closes; by default it is `comm`.
    """
    facts = gather_facts(comm)
    why = why_no_lines(facts)
    if why is not None:
        return LinesVerdict(passed=False, text=why)
    key = _key([gpu for gpu in facts if gpu is not None], kernel_driver())
    path = kept_file("litmus", key)
    known = comm.host_allgather(recall(path, key) if comm.rank == 0 else None)[0]
    if known is not None:
        return known
    with test_on() if test_on else nullcontext(comm) as other:
        report = run_litmus(other, SHORT_LINES)
    verdict = LinesVerdict(report.passed, str(report))
    if comm.rank == 0 and report.passed:
        remember(path, key, report)
    # Rank 0 decides, as for every choice that something measured goes into.
    return comm.host_allgather(verdict)[0]


def _key(gpus: Sequence[GpuFacts], driver: str) -> str:
    # What is tested is the test, its instructions, and what compiles them.
    source = Path(device_litmus.__file__)
    files = source, source.with_name("ptx.py"), Path(__file__)
    parts = [file.read_text() for file in files]
    parts.append(str(installed("numba_cuda", ("numba-cuda",))))
    code = hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]
    ranks = [[gpu.name, gpu.uuid] for gpu in gpus]
    return json.dumps({"ranks": ranks, "driver": driver, "code": code}, sort_keys=True)


def recall(path: Path, key: str) -> LinesVerdict | None:
    """Read the verdict that was remembered of a machine; None where there is none to be read."""
    try:
        document: Any = json.loads(path.read_text(encoding="utf-8"))
        report = LitmusReport(**document["report"])
        if document["key"] != key or report.planted or report.why_not_run:
            raise ValueError("it is of something else")
        verdict = LinesVerdict(report.passed, f"{report} (of an earlier run, kept in {path})")
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        logger.warning("the litmus test runs again, as %s can't be used: %r", path, error)
        return None
    return verdict


def remember(path: Path, key: str, report: LitmusReport) -> None:
    """Write a report, so that another process finds all of it or nothing."""
    text = json.dumps({"key": key, "report": asdict(report)}, indent=1)
    try:
        write_whole(path, text)
    except OSError as error:
        logger.warning("the litmus test will run again next time: %s", error)
