"""The litmus test's verdict: what is counted, what is refused without a test, what is kept."""

from __future__ import annotations

import ctypes
import json
import logging
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import pytest

from shmemar.config import Config
from shmemar.device import packet
from shmemar.device.litmus import FIELDS, MAX_COUNTS, OLDER
from shmemar.errors import (
    ArgumentError,
    CollectiveTimeoutError,
    ConfigurationError,
    DeviceError,
)
from shmemar.host import files, gpus, launch, litmus, startup
from shmemar.host.communicator import Communicator
from shmemar.host.default_tables import default_table
from shmemar.host.gpus import GpuFacts, facts_of
from shmemar.host.litmus import (
    LinesVerdict,
    LitmusReport,
    Tally,
    gather_facts,
    launches_for,
    lines_verdict,
    recall,
    remember,
    report_of,
    run_litmus,
    tally_of,
    total_of,
    why_no_lines,
)
from shmemar.spec import Backend, Determinism, Kernel, Pdl

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from shmemar.host.selector import Table

H200 = GpuFacts("NVIDIA H200", "GPU-0", (9, 0), {"GPU-1": True, "GPU-2": True})
SECOND = replace(H200, uuid="GPU-1", atomics={"GPU-0": True, "GPU-2": True})
A100 = GpuFacts("NVIDIA A100", "GPU-9", (8, 0))
PASSED = LitmusReport(
    2, made=4096, observed=4096, readings=512, contested=0.25, torn=3, seconds=0.5
)


# What keeps a machine from lines


@pytest.mark.parametrize(
    "facts",
    [
        [H200],
        [H200, H200],
        [H200, SECOND, H200, SECOND],
        [replace(H200, compute_capability=(10, 0))],
        # Of a GPU that this process does not see nothing is known, so the test has to say.
        [replace(H200, atomics={}), SECOND],
    ],
)
def test_nothing_is_known_against_linked_gpus(facts: list[GpuFacts | None]) -> None:
    assert why_no_lines(facts) is None


@pytest.mark.parametrize(
    ("facts", "reason"),
    [
        (
            [H200, A100, A100],
            (
                "the GPU of ranks 1, 2 (NVIDIA A100) has compute capability 8.0, and lines need "
                "9.0 or newer"
            ),
        ),
        (
            [H200, H200, replace(SECOND, atomics={"GPU-0": False})],
            (
                "the GPU of rank 2 (NVIDIA H200) has no native atomic operations on that of "
                "ranks 0, 1: no NVLink joins them"
            ),
        ),
        (
            [replace(H200, atomics={"GPU-1": False}), SECOND],
            (
                "the GPU of rank 0 (NVIDIA H200) has no native atomic operations on that of "
                "rank 1: no NVLink joins them"
            ),
        ),
        ([None, None], "no GPU runs the kernels of ranks 0, 1"),
    ],
)
def test_what_keeps_a_machine_from_lines_is_said_with_its_ranks(
    facts: list[GpuFacts | None], reason: str
) -> None:
    assert why_no_lines(facts) == reason


def test_the_driver_is_asked_about_every_other_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    from cuda.bindings import driver

    success, unknown = driver.CUresult.CUDA_SUCCESS, driver.CUresult.CUDA_ERROR_INVALID_DEVICE
    answers = {(1, 0): (success, 1), (1, 2): (success, 0), (1, 3): (unknown, None)}
    native = driver.CUdevice_P2PAttribute.CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED

    def answer(attribute: Any, source: int, target: int) -> Any:
        assert attribute == native
        return answers[source, target]

    visible = [
        SimpleNamespace(device_id=i, uuid=f"GPU-{i}", name="a GPU", compute_capability=(9, 0))
        for i in range(4)
    ]
    monkeypatch.setattr(gpus, "visible_gpus", lambda: visible)
    monkeypatch.setattr(driver, "cuDeviceGetP2PAttribute", answer)
    expected = GpuFacts("a GPU", "GPU-1", (9, 0), {"GPU-0": True, "GPU-2": False})
    assert facts_of(visible[1]) == expected


def test_memory_is_copied_from_its_own_gpu_once_it_is_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    from cuda.bindings import driver

    calls: list[tuple[Any, ...]] = []
    current = [5]

    def play(name: str, *results: Any) -> None:
        def call(*arguments: Any) -> tuple[Any, ...]:
            calls.append((name, *arguments, current[0]))
            return driver.CUresult.CUDA_SUCCESS, *results

        monkeypatch.setattr(driver, name, call)

    def copy(target: int, source: int, nbytes: int) -> tuple[Any, ...]:
        calls.append(("cuMemcpyDtoH", source, nbytes, current[0]))
        ctypes.memset(target, 3, nbytes)
        return (driver.CUresult.CUDA_SUCCESS,)

    play("cuDeviceGet", 1)
    play("cuDevicePrimaryCtxRetain", 77)
    play("cuCtxSynchronize")
    play("cuDevicePrimaryCtxRelease")
    monkeypatch.setattr(driver, "cuMemcpyDtoH", copy)
    monkeypatch.setattr(launch, "current_context_handle", lambda: current[0])
    monkeypatch.setattr(
        launch, "set_current_context", lambda context: current.__setitem__(0, context)
    )
    assert launch.copy_to_host(0x1000, 6, 1).tolist() == [3] * 6
    assert calls == [
        ("cuDeviceGet", 1, 5),
        ("cuDevicePrimaryCtxRetain", 1, 5),
        ("cuCtxSynchronize", 77),
        ("cuMemcpyDtoH", 0x1000, 6, 77),
        ("cuDevicePrimaryCtxRelease", 1, 5),
    ]


# Counting


def words(*rows: list[int]) -> Any:
    found = np.zeros((len(rows), FIELDS), np.uint32)
    for row, given in zip(found, rows, strict=True):
        row[: len(given)] = given
    return found


def whole(*counts: int, name: str = "float32") -> Any:
    """Lines that have so many additions, as words."""
    ones = np.array(counts, np.float32)[:, None] * np.ones(64, np.float32)
    if name == "float16":
        return ones.astype(np.float16).view(np.uint32)
    if name == "bfloat16":
        return (ones.view(np.uint32) >> np.uint32(16)).astype(np.uint16).view(np.uint32)
    times = np.arange(1, 33, dtype=np.float32)
    return (np.array(counts, np.float32)[:, None] * times).view(np.uint32)


def bits(value: float) -> int:
    return int(np.float32(value).view(np.uint32))


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("float32", "of float32, and then 60 for element 9, expected 70 or more"),
        ("float16", "of float16, and then 60 for element 9, expected 7 or more"),
        ("bfloat16", "of bfloat16, and then 60 for element 9, expected 7 or more"),
    ],
)
def test_a_rank_counts_what_its_threads_report(name: str, said: str) -> None:
    found = words(*[[8, 16, 4]] * 15, [8, 16, 4, 1, 2, 5, 3, bits(7), 9, bits(60)])
    tally = tally_of(4, name, found, whole(4, 12, name=name), 0.25)
    assert tally == Tally(
        16, 16, 0, 32, 8, 14, 3, 2, 5, 0.25, f"rank 4 saw the count 7 in line 3 {said}"
    )


@pytest.mark.parametrize("name", MAX_COUNTS)
def test_elements_that_do_not_fit_at_the_end_are_counted(name: str) -> None:
    lines = whole(4, 4, name=name)
    assert tally_of(0, name, words([8, 8]), lines, 0.0).wrong == 0
    lines[1, 5] ^= 1 << 24
    lines[0, 31] = 0
    assert tally_of(0, name, words([8, 8]), lines, 0.0).wrong == (2 if name == "float32" else 3)


def test_a_rank_adds_up_its_launches() -> None:
    first = Tally(1, 2, 3, 4, 5, 6, 7, 8, 9, 0.5)
    assert total_of([first, replace(first, example="x"), replace(first, example="y")]) == Tally(
        3, 6, 9, 12, 15, 18, 21, 24, 27, 1.5, "x"
    )


RANKS = [Tally(16, 17, 0, 40, 15, 20, 0, 0, 2, 0.5), Tally(16, 15, 0, 40, 5, 20, 0, 0, 0, 0.75)]


def test_a_report_adds_up_the_ranks() -> None:
    report = report_of([[RANKS[0]], [RANKS[1]]])
    assert report == LitmusReport(
        2, made=32, observed=32, readings=80, contested=0.25, torn=2, seconds=0.75
    )
    assert report.passed
    assert str(report) == (
        "passed: 32 line writes of float32, float16, bfloat16 by 2 ranks, 80 line readings (25% or "
        "more of a rank's own contested), 0 parts older than their count (0 across warps), 2 torn "
        "in a single load, 0.75 s"
    )


def test_ranks_that_do_not_write_at_once_test_nothing() -> None:
    apart = replace(PASSED, contested=0.009)
    assert not apart.passed
    assert "the ranks have not written at once" in str(apart)
    assert replace(apart, contested=0.01).passed
    assert replace(apart, ranks=1, contested=0.0).passed


@pytest.mark.parametrize(("rank", "of_type"), [(0, 0), (0, 1), (1, 1)])
def test_each_type_must_be_contested_on_each_rank(rank: int, of_type: int) -> None:
    everyone = [[RANKS[0], RANKS[0]], [RANKS[1], RANKS[1]]]
    assert report_of(everyone).is_contested
    everyone[rank][of_type] = replace(RANKS[rank], contested=0)
    assert not report_of(everyone).passed


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"older": 2, "example": "rank 1 saw the count 7"}, "2 parts older than their count"),
        ({"older": 2, "example": "rank 1 saw the count 7"}, "; rank 1 saw the count 7"),
        ({"observed": 14}, "by 2 ranks, of which 31 arrived"),
        ({"wrong": 1}, "; 1 elements wrong at the end"),
    ],
)
def test_one_rank_that_sees_it_fails_all(changes: dict[str, Any], said: str) -> None:
    report = report_of([[RANKS[0]], [replace(RANKS[1], **changes)]])
    assert not report.passed
    assert str(report).startswith("FAILED: ")
    assert said in str(report)


def test_the_planted_error_is_named() -> None:
    report = report_of([[replace(RANKS[0], older=1, observed=16)]], planted=True)
    assert str(report).startswith("FAILED, with the error planted: 16 line writes")


def test_what_was_not_run_did_not_pass() -> None:
    report = LitmusReport(2, why_not_run="no GPU")
    assert not report.passed
    assert not LitmusReport(2).passed
    assert str(report) == "not run: no GPU"


def test_launches_make_the_lines_in_parts_that_a_type_can_count() -> None:
    assert [launches_for(lines, 256, 30) for lines in (1, 17 * 256, 17 * 256 + 1)] == [
        [16],
        [16],
        [17],
    ]
    assert launches_for(20 * 256, 256, 9) == [9, 9, 1]
    assert launches_for(19 * 256, 256, 9) == [9, 9]


@pytest.mark.parametrize("lines", [0, -1, True, 1e6, "many"])
def test_lines_must_be_a_number(lines: Any) -> None:
    with pytest.raises(ArgumentError, match=r"lines is .*; expected a positive integer"):
        run_litmus(FakeComm(), lines)  # type: ignore[arg-type]


# A run, with the GPUs played


class FakeComm:
    """The first of two ranks that do the same; all of its readings that can be are contested."""

    backend = Backend.NVSHMEM
    rank, size = 0, 2

    def __init__(self, backend: Backend = Backend.NVSHMEM, *, older: int = 0) -> None:
        self.backend = backend
        self.lines = ""
        self.launches: list[tuple[str, int, int, int]] = []
        self.older = older

    def host_allgather(self, item: Any) -> list[Any]:
        return [item, item]

    def host_barrier(self) -> None:
        pass

    def ll_buffer(self, dtype: str, *, threads: int) -> Any:
        return SimpleNamespace(dtype=dtype, threads=threads)

    def symmetric_array(self, shape: tuple[int, ...], dtype: str) -> Any:
        held = np.zeros(shape, dtype)
        return SimpleNamespace(held=held, copy_to_host=held.copy)

    def launch(
        self, kernel: Any, buffer: Any, memory: Any, found: Any, rounds: int, *, stream: int
    ) -> None:
        self.launches.append((kernel.__name__, buffer.threads, rounds, stream))
        if not rounds:
            memory.held[...] = 0
            return
        assert not memory.held.any(), "lines are cleared before they are added to"
        name = kernel.__name__.rpartition("_")[2]
        assert 2 * rounds <= MAX_COUNTS[name], "a type counts no further"
        memory.held[...] = whole(*[2 * rounds] * len(memory.held), name=name)
        found.held[...] = 0
        found.held[:, :3] = 2 * rounds, 2 * rounds, rounds - 1
        found.held[0, OLDER] = self.older if rounds > 1 else 0


def test_a_run_makes_the_lines_of_each_type_in_launches_that_it_can_count() -> None:
    comm = FakeComm()
    report = run_litmus(comm, 128 * 600)  # type: ignore[arg-type]
    made = [(name, rounds) for name, threads, rounds, stream in comm.launches if rounds]
    assert made == [
        *(("litmus_float32", 1), ("litmus_float32", 299)),
        *(("litmus_float16", 1), ("litmus_float16", 299)),
        *(("litmus_bfloat16", 1), ("litmus_bfloat16", 128), ("litmus_bfloat16", 128)),
        ("litmus_bfloat16", 43),
    ]
    assert {each[1:] for each in comm.launches if not each[2]} == {(1024, 0, 0)}
    assert (report.made, report.observed) == (6 * 128 * 600, 6 * 128 * 600)
    assert (report.readings, report.contested) == (report.made, 1)
    assert report.passed
    assert comm.lines == str(report)


def test_a_planted_run_says_nothing_of_the_machine() -> None:
    comm = FakeComm(older=5)
    report = run_litmus(comm, 10_000, planted=True)  # type: ignore[arg-type]
    assert {each[0] for each in comm.launches} == {f"planted_litmus_{name}" for name in MAX_COUNTS}
    assert (report.older, report.passed, report.planted) == (30, False, True)
    assert comm.lines == ""


def test_a_run_of_one_type_says_nothing_of_the_machine() -> None:
    comm = FakeComm()
    report = run_litmus(comm, 10_000, types=["float16"])  # type: ignore[arg-type]
    assert {each[0] for each in comm.launches} == {"litmus_float16"}
    assert report.passed
    assert comm.lines == ""


def test_emulated_ranks_run_nothing_and_say_so() -> None:
    comm = FakeComm(Backend.EMULATED)
    report = run_litmus(comm)  # type: ignore[arg-type]
    assert comm.launches == []
    assert not report.passed
    assert "not run: the emulated backend" in str(report)


# What is kept


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], list[Path]]:
    """Keep verdicts in a directory of the test's; a machine with one GPU."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(litmus, "bound_gpu", lambda: H200)
    monkeypatch.setattr(litmus, "facts_of", lambda gpu: gpu)
    monkeypatch.setattr(litmus, "kernel_driver", lambda: "580.95")
    folder = files.cache_directory("litmus")
    assert folder == tmp_path / "shmemar" / "litmus"
    return lambda: sorted(folder.iterdir()) if folder.exists() else []


def test_a_failure_is_not_kept(kept: Callable[[], list[Path]]) -> None:
    for _ in range(2):
        comm = FakeComm(older=1)
        assert not lines_verdict(comm).passed  # type: ignore[arg-type]
        assert comm.launches
    assert kept() == []


def test_a_pass_is_kept_for_the_same_machine(kept: Callable[[], list[Path]]) -> None:
    first, second = FakeComm(), FakeComm()
    verdict = lines_verdict(first)  # type: ignore[arg-type]
    again = lines_verdict(second)  # type: ignore[arg-type]
    assert verdict.passed
    assert again.passed
    (path,) = kept()
    assert again.text == f"{verdict.text} (of an earlier run, kept in {path})"
    assert first.launches
    assert second.launches == []


@pytest.mark.parametrize(
    "change",
    ["kernel_driver", "bound_gpu", "device_litmus", "installed"],
)
def test_another_driver_gpu_or_test_is_another_machine(
    kept: Callable[[], list[Path]], monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    lines_verdict(FakeComm())  # type: ignore[arg-type]
    others: dict[str, Any] = {
        "kernel_driver": lambda: "590.1",
        "bound_gpu": lambda: SECOND,
        "device_litmus": packet,
        "installed": lambda *_: "another version",
    }
    monkeypatch.setattr(litmus, change, others[change])
    comm = FakeComm()
    lines_verdict(comm)  # type: ignore[arg-type]
    assert comm.launches
    assert len(kept()) == 2


def test_a_machine_that_may_not_is_not_tested(
    kept: Callable[[], list[Path]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(litmus, "bound_gpu", lambda: A100)
    comm = FakeComm()
    verdict = lines_verdict(comm)  # type: ignore[arg-type]
    assert not verdict.passed
    assert "compute capability 8.0" in verdict.text
    assert (comm.launches, kept()) == ([], [])


@pytest.mark.parametrize(
    "contents",
    [
        "",
        "{",
        "[]",
        "{}",
        '{"key": "k", "report": 3}',
        '{"key": "k", "report": {"ranks": 2, "x": 1}}',
        '{"key": "other", "report": {"ranks": 2}}',
        '{"key": "k", "report": {"ranks": 2, "planted": true}}',
        '{"key": "k", "report": {"ranks": 2, "made": "many"}}',
        "\xff",
    ],
)
def test_what_cannot_be_read_is_left_aside_with_a_reason(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, contents: str
) -> None:
    path = tmp_path / "verdict.json"
    path.write_bytes(contents.encode("latin-1"))
    assert recall(path, "k") is None
    assert "the litmus test runs again" in caplog.text


def test_what_was_written_is_read_and_nothing_else_is_left(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "verdict.json"
    remember(path, "k", PASSED)
    assert list(path.parent.iterdir()) == [path]
    assert json.loads(path.read_text())["report"]["made"] == 4096
    verdict = recall(path, "k")
    assert verdict == LinesVerdict(
        passed=True, text=f"{PASSED} (of an earlier run, kept in {path})"
    )


def test_a_missing_file_is_no_news(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert recall(tmp_path / "verdict.json", "k") is None
    assert caplog.records == []


def test_a_directory_that_cannot_be_written_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    with caplog.at_level(logging.WARNING):
        remember(tmp_path / "file" / "verdict.json", "k", PASSED)
    assert "the litmus test will run again next time" in caplog.text


# What init makes of it


class Made:
    """A communicator, as far as it is asked."""

    backend = Backend.NVSHMEM
    determinism = Determinism.NOT_GUARANTEED

    def __init__(self) -> None:
        self.lines = ""
        self.table = default_table(2, shares_gpu=False)
        self.why_no_lines: str | None = None
        self.is_closed = self.is_abandoned = False

    def use_table(self, table: Table, *, why_no_lines: str) -> None:
        self.table, self.why_no_lines = table, why_no_lines

    def close(self) -> None:
        self.is_closed = True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        self.is_abandoned = kind is not None
        if not self.is_abandoned:
            self.close()


class Init:
    """`init` behind the making of a communicator, where the test says or raises what is given."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.made, self.other = Made(), Made()
        self.config = Config()
        self.outcome: LinesVerdict | Exception = LinesVerdict(passed=True, text="passed: 9")
        self.is_known = False
        patch.setattr(startup, "_communicator", self._communicator)
        patch.setattr(startup, "Bootstrap", lambda *_: None)
        patch.setattr(startup, "lines_verdict", self._verdict)

    def _communicator(self, _: Any, config: Config, *__: Any) -> Made:
        self.config = config
        return self.other

    def _verdict(self, comm: Made, test_on: Callable[[], Made]) -> LinesVerdict:
        assert comm is self.made
        if not self.is_known:
            with test_on() as other:
                assert other is self.other
        if isinstance(self.outcome, Exception):
            raise self.outcome
        return self.outcome

    def run(self) -> None:
        made: Any = self.made
        comm: Any = None
        startup._settle(made, comm, Config(kernel=Kernel.LL128_ATOMIC, table="none"), None)


@pytest.fixture
def init(monkeypatch: pytest.MonkeyPatch) -> Init:
    return Init(monkeypatch)


def test_a_pass_is_in_the_description(init: Init) -> None:
    init.run()
    assert init.made.lines == "passed: 9"
    assert init.made.why_no_lines == ""
    assert (init.made.is_closed, init.other.is_closed) == (False, True)
    assert (init.config.kernel, init.config.table) == (None, "none")


def test_what_is_known_needs_no_other_communicator(init: Init) -> None:
    init.is_known = True
    init.run()
    assert init.made.lines == "passed: 9"
    assert (init.made.is_closed, init.other.is_closed) == (False, False)


def test_the_test_runs_on_the_communicator_that_is_made_for_it(
    kept: Callable[[], list[Path]],
) -> None:
    comm, other = FakeComm(), FakeComm()
    closed = []

    @contextmanager
    def make() -> Iterator[FakeComm]:
        yield other
        closed.append(other)

    for _ in range(2):
        assert lines_verdict(comm, make).passed  # type: ignore[arg-type]
    assert comm.launches == []
    assert other.launches
    assert closed == [other]
    assert len(kept()) == 1


def test_a_failure_says_which_kernel_to_pin_instead(init: Init) -> None:
    init.outcome = LinesVerdict(passed=False, text="FAILED: 9 line writes")
    message = (
        r"SHMEMAR_KERNEL is ll128_atomic, which can't be relied on here; .*: FAILED: 9 line "
        r"writes\. Pin two_shot instead\."
    )
    with pytest.raises(ConfigurationError, match=message):
        init.run()


@pytest.mark.parametrize(
    ("outcome", "error", "closes"),
    [
        (LinesVerdict(passed=False, text="FAILED"), ConfigurationError, True),
        (ArgumentError("something"), ArgumentError, True),
        (CollectiveTimeoutError("", rank=0, missing=(1,)), CollectiveTimeoutError, False),
    ],
)
def test_all_ranks_close_what_was_made_unless_one_is_missing(
    init: Init, outcome: LinesVerdict | Exception, error: type[Exception], closes: bool
) -> None:
    init.outcome = outcome
    with pytest.raises(error):
        init.run()
    assert (init.made.is_closed, init.made.is_abandoned) == (closes, not closes)


def test_a_rank_that_cannot_look_at_its_gpu_is_an_error_on_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fails(gpu: Any) -> GpuFacts:
        raise OSError("no driver")

    monkeypatch.setattr(litmus, "bound_gpu", lambda: H200)
    monkeypatch.setattr(litmus, "facts_of", fails)
    with pytest.raises(DeviceError, match=r"rank 0 could not look.*OSError: no driver"):
        gather_facts(FakeComm())  # type: ignore[arg-type]


def test_a_description_has_the_verdict_once_it_is_known() -> None:
    comm: Any = object.__new__(Communicator)
    comm.size, comm.backend, comm.lines, comm.multicast = 2, Backend.NVSHMEM, "", ""
    comm._is_closed = True
    comm._runtime = SimpleNamespace(describe=dict)
    terms = SimpleNamespace(table=default_table(2, shares_gpu=True))
    comm._kernels = SimpleNamespace(terms=terms, pdl=lambda: Pdl.NEVER)
    assert "LL128 lines" not in comm.describe()
    comm.lines = "passed"
    assert comm.describe()["LL128 lines"] == "passed"
