"""The litmus test of lines under hostile schedules: silent while lines are whole, and only then."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from shmemar.device import litmus as module
from shmemar.device.litmus import (
    CONTESTED,
    FIELDS,
    KERNELS,
    OLDER,
    OLDER_ACROSS,
    PLANTED_KERNELS,
    READINGS,
    WRITES,
)
from shmemar.host.checker import CheckReport, Symmetric, Verdict, check_kernel
from shmemar.host.checker.checked_kernels import UserProgram
from shmemar.host.checker.checked_run import Program, run_seeds
from shmemar.host.checker.weak_memory import WeakMemory
from shmemar.layout import LINE_LANES, LINE_NBYTES, WORD_NBYTES, WORDS_PER_PACKET
from shmemar.spec import Protocol
from shmemar.user_spec import BufferSpec, UserKernelSpec

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from shmemar.host.checker.hostile_machine import HostileMachine
    from shmemar.host.checker.threads import Launch

ROUNDS, NLINES, LINE_WORDS = 3, 2, LINE_NBYTES // WORD_NBYTES
JUDGED = (WRITES, READINGS, OLDER, OLDER_ACROSS)


def judged(
    kernel: Callable[..., None],
    nranks: int,
    seeds: Iterable[int],
    *,
    lanes: int = LINE_LANES,
    share_work: bool = True,
    contests: bool = False,
) -> CheckReport:
    """Launch it twice, one after another; expect additions and readings, and none of an older.

    With `contests`, expect instead that no reading was contested.
    """
    fields = (CONTESTED,) if contests else JUDGED
    nthreads = lanes * (NLINES * LINE_LANES // lanes or 1)

    def run(
        ll: Any, thread: int, nthreads: int, lines: Any, found: Any, all_of_it: Any, verdict: Any
    ) -> None:
        kernel(ll, thread, nthreads, lines, found, ROUNDS)
        for place, field in enumerate(fields):
            verdict[thread * len(fields) + place] = all_of_it[thread * FIELDS + field]

    def arguments(rank: int, launch: int) -> tuple[Any, ...]:
        lines = Symmetric(np.zeros(nthreads // LINE_LANES * LINE_WORDS, np.uint32))
        found = Symmetric(np.zeros(nthreads * FIELDS, np.uint32))
        verdict = np.full(nthreads * len(fields), 77, np.uint32)
        return lines, found, found.array, verdict

    def expected(rank: int, launch: int) -> tuple[Any, ...]:
        is_run = int(share_work)
        of_thread = [is_run * ROUNDS * nranks, is_run * 2 * ROUNDS, 0, 0]
        if contests:
            of_thread = [0]
        return None, None, None, np.tile(np.array(of_thread, np.uint32), nthreads)

    buffer = BufferSpec.of(nranks, "uint32", threads=nthreads, slots=1, protocol=Protocol.LL)
    user = UserProgram(UserKernelSpec(run, buffer, ()), nthreads, 2, 400_000, arguments, expected)

    def prepare(machine: HostileMachine, seed: int) -> list[Iterator[Launch]]:
        machine.use_warps_of(lanes)
        machine.share_work = share_work
        return user.prepare(machine, seed)

    return run_seeds(Program(kernel.__name__, nranks, prepare), seeds)


CASES = [("float32", 1), ("float32", 2), ("float32", 3), ("float16", 2), ("bfloat16", 2)]


@pytest.mark.parametrize(("name", "nranks"), CASES)
def test_no_schedule_shows_an_element_that_is_older_than_its_count(name: str, nranks: int) -> None:
    report = judged(KERNELS[name], nranks, range(24 if name == "float32" else 8))
    assert report.passed, str(report)


def test_a_warp_as_wide_as_on_a_gpu_has_four_lines() -> None:
    report = judged(KERNELS["float32"], 2, [3], lanes=32)
    assert report.passed, str(report)


@pytest.mark.parametrize(("name", "nranks"), CASES)
def test_a_count_that_comes_before_the_rest_is_found(name: str, nranks: int) -> None:
    assert finds_an_older_element(judged(PLANTED_KERNELS[name], nranks, [0]))


def test_lines_that_arrive_in_parts_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(WeakMemory, "perform_at_once", lambda *_: None)
    assert finds_an_older_element(judged(KERNELS["float32"], 2, range(24)))


def test_lines_that_are_loaded_again_before_the_warp_has_met_are_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "all_in_warp", lambda value: value)
    assert finds_an_older_element(judged(KERNELS["float32"], 2, range(24)))


def finds_an_older_element(report: CheckReport) -> bool:
    if report.failure is None or report.failure.verdict is not Verdict.WRONG_VALUE:
        return False
    place = re.search(r"for element (\d+) of argument 3", report.failure.message)
    return place is not None and JUDGED[int(place[1]) % len(JUDGED)] in (OLDER, OLDER_ACROSS)


def test_readings_are_contested_by_peers_alone() -> None:
    assert judged(KERNELS["float32"], 1, range(24), contests=True).passed
    report = judged(KERNELS["float32"], 2, range(24), contests=True)
    assert report.failure is not None
    assert report.failure.verdict is Verdict.WRONG_VALUE


@pytest.mark.parametrize("name", KERNELS)
def test_a_launch_of_no_rounds_clears_the_lines(name: str) -> None:
    one = {"float32": 0x3F800000, "float16": 0x3C003C00, "bfloat16": 0x3F803F80}[name]

    def arguments(rank: int, launch: int) -> tuple[Any, ...]:
        lines = Symmetric(np.full(LINE_LANES * WORDS_PER_PACKET, one, np.uint32))
        return lines, Symmetric(np.zeros(LINE_LANES * FIELDS, np.uint32)), lines.array, 0

    def expected(rank: int, launch: int) -> tuple[Any, ...]:
        return None, None, np.zeros(LINE_LANES * WORDS_PER_PACKET, np.uint32), None

    def run(
        ll: Any, thread: int, nthreads: int, lines: Any, found: Any, own: Any, rounds: int
    ) -> None:
        KERNELS[name](ll, thread, nthreads, lines, found, rounds)

    report = check_kernel(
        run, arguments, expected, nranks=1, dtype=np.uint32, threads=8, launches=1, seeds=range(3)
    )
    assert report.passed, str(report)


def test_threads_that_run_one_after_another_add_nothing() -> None:
    report = judged(KERNELS["float32"], 2, [0], share_work=False)
    assert report.passed, str(report)
