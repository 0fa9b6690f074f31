"""The litmus test of lines on every rank: it passes on GPUs, and finds what is planted."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

import shmemar
from shmemar.config import Config
from shmemar.device.litmus import KERNELS
from shmemar.host import startup
from shmemar.host.litmus import (
    LONG_LINES,
    SHORT_LINES,
    LinesVerdict,
    gather_facts,
    lines_verdict,
    run_litmus,
    why_no_lines,
)
from shmemar.spec import Kernel

if TYPE_CHECKING:
    from pathlib import Path

    from mpi4py import MPI


@pytest.fixture
def _lines(comm: shmemar.Communicator, backend: str) -> None:
    """Skip where lines can't be used anyway: on all ranks, as the reason is made of all facts."""
    if backend != "nvshmem":
        pytest.skip("emulated ranks have no lines to test")
    why = why_no_lines(gather_facts(comm))
    if why is not None:
        pytest.skip(why)


def test_emulated_ranks_run_nothing(comm: shmemar.Communicator, backend: str, agree: Any) -> None:
    if backend == "nvshmem":
        pytest.skip("ranks run on GPUs")
    report = run_litmus(comm)
    assert agree(report) == [report] * comm.size
    assert str(report).startswith("not run: the emulated backend")
    assert why_no_lines(gather_facts(comm)) is not None
    assert not lines_verdict(comm).passed


def test_a_machine_that_fails_is_an_error_on_all_ranks(
    world: MPI.Intracomm, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    verdict = LinesVerdict(passed=False, text="FAILED: what was played")
    monkeypatch.setattr(startup, "lines_verdict", lambda *_: verdict)
    made = shmemar.init(world, backend=backend, scratch_nbytes=1 << 20)
    monkeypatch.setattr(startup, "_may_use_lines", lambda *_: True)
    pinned = Config(kernel=Kernel.LL128_ATOMIC, scratch_nbytes=1 << 20)
    with pytest.raises(shmemar.ConfigurationError, match=r"FAILED: what was played\. Pin two_shot"):
        startup._settle(made, world, pinned, None)
    with pytest.raises(shmemar.ClosedError):
        made.check()


@pytest.mark.usefixtures("_lines")
def test_a_million_lines_of_each_rank_arrive_as_a_whole(
    comm: shmemar.Communicator, agree: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    report = run_litmus(comm)
    with capsys.disabled():
        if comm.rank == 0:
            print(f"\nlitmus test of lines: {report}", flush=True)  # noqa: T201
    assert agree(report) == [report] * comm.size
    assert report.made >= len(KERNELS) * LONG_LINES * comm.size
    assert report.readings > 0
    assert report.passed, str(report)
    assert comm.describe()["LL128 lines"] == str(report)


@pytest.mark.usefixtures("_lines")
@pytest.mark.parametrize("name", KERNELS)
def test_a_count_that_comes_before_the_rest_is_found(
    comm: shmemar.Communicator, agree: Any, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    report = run_litmus(comm, SHORT_LINES, planted=True, types=[name])
    with capsys.disabled():
        if comm.rank == 0:
            print(f"\nlitmus test of lines: {report}", flush=True)  # noqa: T201
    assert agree(report) == [report] * comm.size
    assert report.older > 0
    assert report.example
    # What was planted comes in the end: no line is lost.
    assert (report.observed, report.wrong) == (report.made, 0)
    assert not report.passed


@pytest.mark.usefixtures("_lines")
def test_a_verdict_is_the_same_on_all_ranks_and_is_kept(
    comm: shmemar.Communicator, agree: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    first = lines_verdict(comm)
    again = lines_verdict(comm)
    assert isinstance(first, LinesVerdict)
    assert agree((first, again)) == [(first, again)] * comm.size
    assert first.passed, first.text
    assert again.passed
    assert again.text.startswith(f"{first.text} (of an earlier run, kept in ")


@pytest.mark.usefixtures("_lines")
def test_init_asks_for_the_verdict_where_the_kernel_is_pinned(
    world: MPI.Intracomm, backend: str, agree: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("SHMEMAR_KERNEL", "ll128_atomic")
    monkeypatch.setenv("SHMEMAR_TWO_SHOT_SCRATCH_NBYTES", str(2 << 20))
    said = []
    for _ in range(2):
        with shmemar.init(world, backend=backend, determinism="not_guaranteed") as other:
            said.append(other.describe()["LL128 lines"])
    assert agree(said) == [said] * world.size
    assert said[0].startswith("passed: ")
    assert said[1].startswith(f"{said[0]} (of an earlier run")
