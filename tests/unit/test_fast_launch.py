"""Prepared launches, on a driver that writes down what it is asked."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from benchmarks.launches import compile_loop
from shmemar.errors import DeviceError
from shmemar.host import runtime
from shmemar.host.fast_launch import (
    NOT_AS_USUAL,
    DriverCalls,
    Gate,
    compile_launch,
    launch_words,
)
from shmemar.host.runtime import NvshmemRuntime
from shmemar.layout import FAILURE_DTYPE, Grid

WORD, NUMBER, STATUS = ctypes.c_uint64, ctypes.c_uint32, ctypes.c_int32
CONTEXT, EVENT, FUNCTION, PARAMETERS = 0x7F0000001000, 0x7F0000002000, 0x7F0000003000, 0x7F00000040


class Driver:
    """What `DriverCalls` calls. Statuses are 0 unless a test says otherwise."""

    def __init__(self) -> None:
        self.context = CONTEXT
        self.captured: set[int] = set()
        self.status: dict[str, int] = {}
        self.calls: list[tuple[Any, ...]] = []

    def _answer(self, name: str, address: int, ctype: Any, value: int) -> int:
        if self.status.get(name):
            return self.status[name]
        ctype.from_address(address).value = value
        return 0

    def ctx_get_current(self, address: int) -> int:
        return self._answer("context", address, WORD, self.context)

    def stream_is_capturing(self, stream: int, address: int) -> int:
        return self._answer("capturing", address, NUMBER, int(stream in self.captured))

    def stream_get_id(self, stream: int, address: int) -> int:
        return self._answer("id", address, WORD, stream + 100)

    def launch_kernel(self, *arguments: int) -> int:
        self.calls.append(("launch", *arguments))
        return self.status.get("launch", 0)

    def event_record(self, event: int, stream: int) -> int:
        self.calls.append(("record", event, stream))
        return self.status.get("record", 0)

    @property
    def functions(self) -> DriverCalls:
        def made(method: Any, *types: Any) -> Any:
            return ctypes.CFUNCTYPE(STATUS, *types)(method)

        return DriverCalls(
            made(self.ctx_get_current, WORD),
            made(self.stream_is_capturing, WORD, WORD),
            made(self.stream_get_id, WORD, WORD),
            made(self.launch_kernel, WORD, *[NUMBER] * 7, WORD, WORD, WORD),
            made(self.event_record, WORD, WORD),
        )


class Launcher:
    """A communicator's gate, and one launch of 7 blocks behind it."""

    def __init__(self) -> None:
        self.driver = Driver()
        self.functions = self.driver.functions
        self.record = np.zeros(FAILURE_DTYPE.itemsize // 4, np.uint32)
        self.last_stream = np.array([105], np.uint64)
        self.gate = Gate(CONTEXT, EVENT, self.record, self.last_stream)
        self.prepared = launch_words(FUNCTION, 7, 128, PARAMETERS)
        self.launch = compile_launch(self.functions)

    def __call__(self, stream: int = 5) -> int:
        gate = self.gate
        return self.launch(gate.words, gate.record, gate.last_stream, self.prepared, stream)


@pytest.fixture(scope="module")
def launcher() -> Launcher:
    return Launcher()


@pytest.fixture(autouse=True)
def _as_usual(launcher: Launcher) -> None:
    driver = launcher.driver
    driver.context, driver.captured, driver.status = CONTEXT, set(), {}
    driver.calls.clear()
    launcher.record[:] = 0
    launcher.last_stream[0] = 105
    launcher.gate.words[0] = 1


def test_a_launch_is_one_of_the_driver_and_an_event(launcher: Launcher) -> None:
    for _ in range(2):
        assert launcher() == 0
    launched = ("launch", FUNCTION, 7, 1, 1, 128, 1, 1, 0, 5, PARAMETERS, 0)
    assert launcher.driver.calls == [launched, ("record", EVENT, 5)] * 2


def _shut(launcher: Launcher) -> None:
    launcher.gate.shut()


def _fail(launcher: Launcher) -> None:
    launcher.record[0] = 1


def _switch_context(launcher: Launcher) -> None:
    launcher.driver.context = CONTEXT + 1


def _capture(launcher: Launcher) -> None:
    launcher.driver.captured.add(5)


def _launch_elsewhere(launcher: Launcher) -> None:
    launcher.last_stream[0] = 106


def _refuse(name: str) -> Any:
    def refuse(launcher: Launcher) -> None:
        launcher.driver.status[name] = 400

    return refuse


@pytest.mark.parametrize(
    "change",
    [
        _shut,
        _fail,
        _switch_context,
        _capture,
        _launch_elsewhere,
        *map(_refuse, ("context", "capturing", "id")),
    ],
    ids=["shut", "failed", "context", "capture", "stream", "no context", "no status", "no id"],
)
def test_what_is_not_as_usual_launches_nothing(launcher: Launcher, change: Any) -> None:
    assert launcher() == 0
    change(launcher)
    assert launcher() == NOT_AS_USUAL
    assert len(launcher.driver.calls) == 2


@pytest.mark.parametrize(("name", "ncalls"), [("launch", 1), ("record", 2)])
def test_what_the_driver_refuses_is_returned(launcher: Launcher, name: str, ncalls: int) -> None:
    launcher.driver.status[name] = 700
    assert launcher() == 700
    assert len(launcher.driver.calls) == ncalls


def test_a_capture_that_has_ended_is_none(launcher: Launcher) -> None:
    launcher.driver.captured.add(5)
    assert launcher() == NOT_AS_USUAL
    launcher.driver.captured.clear()
    assert launcher() == 0


def test_a_loop_launches_as_often_as_it_says(launcher: Launcher) -> None:
    loop = compile_loop(launcher.functions)
    assert loop(FUNCTION, PARAMETERS, 5, 3) == 0
    launched = ("launch", FUNCTION, 1, 1, 1, 128, 1, 1, 0, 5, PARAMETERS, 0)
    assert launcher.driver.calls == [launched] * 3
    launcher.driver.status["launch"] = 700
    assert loop(FUNCTION, PARAMETERS, 5, 1) == 700


# What the runtime makes of it


def bound_of(
    monkeypatch: pytest.MonkeyPatch, launch: Any, arguments: list[int]
) -> tuple[NvshmemRuntime, Any]:
    made = NvshmemRuntime.__new__(NvshmemRuntime)
    record, last = np.zeros(12, np.uint32), np.zeros(1, np.uint64)
    made._gate = Gate(CONTEXT, EVENT, record, last)
    made._launch_plan = launch
    kernel = SimpleNamespace(function=FUNCTION)
    passed: Any = SimpleNamespace(flat=lambda: arguments)
    return made, made.bind(kernel, Grid(3, 128), passed)


def test_arguments_are_where_the_driver_looks_for_them(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []

    def launch(words: Any, record: Any, last: Any, prepared: Any, stream: int) -> int:
        pointers = (WORD * 3).from_address(int(prepared[3]))
        values = [WORD.from_address(pointer).value for pointer in pointers]
        seen.append((list(map(int, prepared[:3])), values, stream))
        return 0

    _, bound = bound_of(monkeypatch, launch, [11, 2**64 - 1, 13])
    assert bound(9) is True
    assert seen == [([FUNCTION, 3, 128], [11, 2**64 - 1, 13], 9)]


def test_a_bound_launch_says_when_it_has_launched_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    made, bound = bound_of(monkeypatch, lambda words, *_: 0 if words[0] else NOT_AS_USUAL, [1])
    assert bound(9) is True
    made.shut()
    assert bound(9) is False


def test_a_bound_launch_that_is_refused_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    _, bound = bound_of(monkeypatch, lambda *_: 700, [1])

    def refuse(status: int) -> None:
        raise DeviceError(f"status {status}")

    monkeypatch.setattr(runtime, "raise_refusal", refuse)
    with pytest.raises(DeviceError, match="status 700"):
        bound(9)


def test_without_a_gate_nothing_is_bound() -> None:
    made = NvshmemRuntime.__new__(NvshmemRuntime)
    made._gate = None
    nothing: Any = None
    assert made.bind(nothing, Grid(1, 128), nothing) is None
    made.shut()
