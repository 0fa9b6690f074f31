"""What stands against the nvshmem backend is said with the reason and the next step."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from shmemar.errors import ArgumentError, BackendUnavailableError, ShmemarError
from shmemar.host import gpus, launch, runtime
from shmemar.host.arena import Arena
from shmemar.host.runtime import NvshmemRuntime, nvshmem_version, why_no_gpu


def gpu(ordinal: int = 0, capability: tuple[int, int] = (9, 0)) -> Any:
    return SimpleNamespace(
        device_id=ordinal,
        name="a GPU",
        compute_capability=capability,
        set_current=lambda: None,
    )


@pytest.fixture
def _two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (gpus, runtime):
        monkeypatch.setattr(module, "visible_gpus", lambda: [gpu(0), gpu(1)])


def test_no_visible_gpu_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    import cuda.core

    monkeypatch.setattr(cuda.core, "Device", SimpleNamespace(get_all_devices=list))
    reason = why_no_gpu()
    assert reason is not None
    assert "no GPU is visible; check CUDA_VISIBLE_DEVICES" in reason


def test_a_driver_that_cannot_be_loaded_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    import cuda.core

    def fail() -> None:
        raise RuntimeError("no driver")

    monkeypatch.setattr(cuda.core, "Device", SimpleNamespace(get_all_devices=fail))
    reason = why_no_gpu()
    assert reason is not None
    assert "no GPU can be used (RuntimeError: no driver)" in reason
    assert "or use backend='emulated'" in reason


@pytest.mark.usefixtures("_two_gpus")
def test_nothing_against_it_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime, "nvshmem_version", lambda: "3.8.0")
    assert why_no_gpu() is None


@pytest.mark.usefixtures("_two_gpus")
@pytest.mark.parametrize("version", ["3.3.24", "2.11.0"])
def test_an_older_nvshmem_is_refused(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    monkeypatch.setattr(runtime, "nvshmem_version", lambda: version)
    assert why_no_gpu() == (
        f"NVSHMEM is {version}; expected 3.4 or newer. Upgrade nvidia-nvshmem-cu13."
    )


def test_a_missing_nvshmem_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "nvshmem", None)
    with pytest.raises(BackendUnavailableError, match=r"could not be loaded.*shmemar\[cu13\]"):
        nvshmem_version()


@pytest.mark.usefixtures("_two_gpus")
@pytest.mark.parametrize(
    ("local_rank", "ordinal", "bound"), [(0, None, 0), (3, None, 1), (0, 1, 1)]
)
def test_the_gpu_is_that_of_the_local_rank_or_the_one_asked_for(
    local_rank: int, ordinal: int | None, bound: int
) -> None:
    assert gpus.bind_gpu(ordinal, local_rank, None).device_id == bound


@pytest.mark.usefixtures("_two_gpus")
def test_a_second_communicator_keeps_the_gpu() -> None:
    bound = gpu(1)
    assert gpus.bind_gpu(None, 0, bound).device_id == 1
    with pytest.raises(BackendUnavailableError, match="device is 0; expected 1, the GPU that"):
        gpus.bind_gpu(0, 0, bound)


@pytest.mark.usefixtures("_two_gpus")
@pytest.mark.parametrize("ordinal", [-1, 2])
def test_a_gpu_that_is_not_there_is_refused(ordinal: int) -> None:
    with pytest.raises(BackendUnavailableError, match=f"device is {ordinal}; expected 0 to 1"):
        gpus.bind_gpu(ordinal, 0, None)


def test_an_older_gpu_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpus, "visible_gpus", lambda: [gpu(0, (6, 1))])
    with pytest.raises(
        BackendUnavailableError, match=r"compute capability \(6, 1\); expected \(7, 0\) or newer"
    ):
        gpus.bind_gpu(None, 0, None)


def unreached(bad: int) -> Any:
    made: Any = object.__new__(NvshmemRuntime)
    made._bootstrap = SimpleNamespace(rank=0)
    made._job = SimpleNamespace(address_at=lambda pe: 0 if pe == bad else 0x1000 * (pe + 1))
    return made


def test_a_peer_out_of_reach_is_named_with_its_host() -> None:
    with pytest.raises(
        BackendUnavailableError,
        match=r"rank 0 on alpha can't store to the memory of rank 1 on beta: .*no peer access",
    ):
        unreached(bad=7)._reach_peers(["alpha", "beta"], [5, 7])


def test_reachable_peers_give_their_addresses() -> None:
    assert unreached(bad=9)._reach_peers(["alpha", "alpha"], [1, 0]) == (0x2000, 0x1000)


def test_a_heap_that_nvshmem_cannot_give_is_refused_with_both_variables(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("NVSHMEM_SYMMETRIC_SIZE", "1M")
    job: Any = object.__new__(runtime._Job)
    job._bindings = SimpleNamespace(calloc=lambda _count, _nbytes: 0)
    with pytest.raises(
        BackendUnavailableError,
        match=r"NVSHMEM_SYMMETRIC_SIZE is 1M\) has no room for 4096 bytes.*SHMEMAR_HEAP_NBYTES",
    ):
        job._take(4096)


class FakeJob:
    """A job whose GPU and NVSHMEM record what is asked of them."""

    def __init__(self, *, gpu_fails: bool) -> None:
        self.calls: list[str] = []

        def sync() -> None:
            if gpu_fails:
                raise RuntimeError("an illegal address")
            self.calls.append("sync")

        self.made: Any = object.__new__(runtime._Job)
        self.made.device = SimpleNamespace(set_current=lambda: None, sync=sync)
        self.made.arena = Arena(0x1000, 4096)
        self.made._bindings = SimpleNamespace(free=lambda _: self.calls.append("free"))
        core = ModuleType("nvshmem.core")
        core.finalize = lambda: self.calls.append("finalize")  # type: ignore[attr-defined]
        package = ModuleType("nvshmem")
        package.core = core  # type: ignore[attr-defined]
        self.modules = {"nvshmem": package, "nvshmem.core": core}


@pytest.mark.parametrize(
    ("gpu_fails", "leaves", "calls"),
    [
        (False, False, ["sync", "free", "finalize"]),
        (False, True, []),
        (True, False, []),
    ],
)
def test_nvshmem_ends_after_the_gpu_is_done_and_only_when_all_can_take_part(
    monkeypatch: pytest.MonkeyPatch, *, gpu_fails: bool, leaves: bool, calls: list[str]
) -> None:
    left: list[None] = []
    job = FakeJob(gpu_fails=gpu_fails)
    for name, module in job.modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(runtime, "leaves_without_finalize", lambda: leaves)
    monkeypatch.setattr(runtime, "leave_without_finalize", lambda: left.append(None))
    job.made._finalize()
    assert job.calls == calls
    assert len(left) == gpu_fails


def test_an_output_of_an_unknown_library_must_be_given() -> None:
    with pytest.raises(ArgumentError, match=r"x is types\.SimpleNamespace; expected out="):
        object.__new__(NvshmemRuntime).empty_like(SimpleNamespace(), 0)


class FakeDriver:
    """Records event calls. `captures` numbers the captures of streams, -1 for an invalid one."""

    CUresult = SimpleNamespace(CUDA_SUCCESS=0)
    CUstreamCaptureStatus = SimpleNamespace(
        CU_STREAM_CAPTURE_STATUS_NONE=0, CU_STREAM_CAPTURE_STATUS_ACTIVE=1
    )
    CUevent_flags = SimpleNamespace(CU_EVENT_DISABLE_TIMING=2)

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.ids: dict[int, int] = {}
        self.captures: dict[int, int] = {}
        self.context = 0
        self.nevents = 0

    def cuCtxGetCurrent(self) -> tuple[int, int]:  # noqa: N802
        return 0, self.context

    def cuCtxSetCurrent(self, context: int) -> tuple[int]:  # noqa: N802
        assert context != self.context
        self.context = context
        return (0,)

    def cuEventCreate(self, flags: int) -> tuple[int, str]:  # noqa: N802
        self.nevents += 1
        return 0, f"event {self.nevents}"

    def cuStreamIsCapturing(self, stream: int) -> tuple[int, int]:  # noqa: N802
        return 0, int(stream in self.captures)

    def cuStreamGetCaptureInfo(self, stream: int) -> tuple[Any, ...]:  # noqa: N802
        number = self.captures[stream]
        return 0, 2 if number < 0 else 1, number, None, [], [], 0

    def cuStreamWaitEvent(self, stream: int, event: str, flags: int) -> tuple[int]:  # noqa: N802
        self.calls.append(("wait", stream, event, flags))
        return (0,)

    def cuStreamGetId(self, stream: int) -> tuple[int, int]:  # noqa: N802
        return 900 * (stream in self.captures), self.ids.get(stream, stream)

    def cuEventRecord(self, event: str, stream: int) -> tuple[int]:  # noqa: N802
        self.calls.append(("record", stream, event))
        return (0,)


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeDriver:
    import cuda.bindings

    driver = FakeDriver()
    monkeypatch.setattr(cuda.bindings, "driver", driver)
    return driver


def launches(order: launch.StreamOrder, *streams: int) -> None:
    for stream in streams:
        capture = launch.capture_of(stream)
        order.before_launch(stream, capture)
        order.after_launch(stream, capture)


def test_a_launch_on_another_stream_waits_for_the_one_before_it(fake: FakeDriver) -> None:
    launches(launch.StreamOrder(), 5, 5, 6)
    assert fake.calls == [
        ("record", 5, "event 1"),
        ("record", 5, "event 1"),
        ("wait", 6, "event 1", 0),
        ("record", 6, "event 1"),
    ]


def test_a_stream_that_got_the_handle_of_a_destroyed_one_waits(fake: FakeDriver) -> None:
    order = launch.StreamOrder()
    for number in (100, 101):
        fake.ids[5] = number
        launches(order, 5)
    assert [call[0] for call in fake.calls] == ["record", "wait", "record"]


def test_streams_of_one_capture_are_ordered_apart_from_what_is_eager(fake: FakeDriver) -> None:
    fake.captures = {7: 1, 8: 1, 9: 2}
    launches(launch.StreamOrder(), 5, 7, 8, 8, 5, 9)
    assert fake.calls == [
        ("record", 5, "event 1"),
        ("record", 7, "event 2"),
        ("wait", 8, "event 2", 0),
        ("record", 8, "event 2"),
        ("record", 8, "event 2"),
        ("record", 5, "event 1"),
        ("record", 9, "event 2"),
    ]


def test_an_invalidated_capture_is_refused(fake: FakeDriver) -> None:
    fake.captures = {7: -1}
    with pytest.raises(ArgumentError, match=r"the capture of stream 0x7.*was invalidated"):
        launch.capture_of(7)


@pytest.mark.parametrize("before", [7, 3, 0])
@pytest.mark.parametrize("left", [7, 5, 0])
def test_the_runtimes_context_is_current_for_its_calls_and_the_callers_afterwards(
    fake: FakeDriver, before: int, left: int
) -> None:
    def call() -> None:
        with launch.current_context(7):
            assert fake.context == 7
            fake.context = left
            raise KeyError

    fake.context = before
    with pytest.raises(KeyError):
        call()
    assert fake.context == before


def test_ptx_without_an_entry_is_an_error() -> None:
    with pytest.raises(ShmemarError, match="the PTX of a_kernel has no entry"):
        launch._tidy(".version 9.0\n", "a_kernel")


def test_a_start_that_nvshmem_refuses_says_what_to_look_at() -> None:
    def fail() -> None:
        raise ValueError("Status code 7")

    with pytest.raises(BackendUnavailableError, match=r"ValueError: Status code 7.*on each GPU\?"):
        runtime._start(fail)
    runtime._start(lambda: None)
