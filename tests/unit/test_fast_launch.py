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
    PreparedLaunch,
    compile_launch,
)
from shmemar.host.runtime import NvshmemRuntime
from shmemar.layout import FAILURE_DTYPE, Grid
from shmemar.spec import Pdl

WORD, NUMBER, STATUS = ctypes.c_uint64, ctypes.c_uint32, ctypes.c_int32
CONTEXT, EVENT, PRODUCERS, FUNCTION = 0x7F0000001000, 0x7F0000002000, 0x7F00000028, 0x7F0000003000


def launched(config: int, parameters: int) -> dict[str, Any]:
    """Read what the driver is given, as its own headers lay it out."""
    numbers = (NUMBER * 14).from_address(config)
    stream, attributes = (WORD.from_address(config + at).value for at in (32, 40))
    kinds = [NUMBER.from_address(attributes + 72 * at).value for at in range(numbers[12])]
    pointers = (WORD * 4).from_address(parameters)
    return {
        "grid": tuple(numbers[:3]),
        "block": tuple(numbers[3:6]),
        "shared": numbers[6],
        "stream": stream,
        "attributes": [(kind, NUMBER.from_address(attributes + 8).value) for kind in kinds],
        "values": [WORD.from_address(pointer).value for pointer in pointers],
    }


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

    def launch_kernel(self, config: int, function: int, parameters: int, extra: int) -> int:
        assert (function, extra) == (FUNCTION, 0)
        self.calls.append(("launch", launched(config, parameters)))
        return self.status.get("launch", 0)

    def event_record(self, event: int, stream: int) -> int:
        self.calls.append(("record", event, stream))
        return self.status.get("record", 0)

    def stream_wait_event(self, stream: int, event: int, flags: int) -> int:
        self.calls.append(("wait", stream, event, flags))
        return self.status.get("wait", 0)

    @property
    def functions(self) -> DriverCalls:
        def made(method: Any, *types: Any) -> Any:
            return ctypes.CFUNCTYPE(STATUS, *types)(method)

        return DriverCalls(
            made(self.ctx_get_current, WORD),
            made(self.stream_is_capturing, WORD, WORD),
            made(self.stream_get_id, WORD, WORD),
            made(self.launch_kernel, WORD, WORD, WORD, WORD),
            made(self.event_record, WORD, WORD),
            made(self.stream_wait_event, WORD, WORD, NUMBER),
        )


class Launcher:
    """A communicator's gate, and one launch of 7 blocks and four parameters behind it."""

    def __init__(self) -> None:
        self.driver = Driver()
        self.functions = self.driver.functions
        self.record = np.zeros(FAILURE_DTYPE.itemsize // 4, np.uint32)
        self.last_stream = np.array([105], np.uint64)
        self.gate = Gate(CONTEXT, EVENT, PRODUCERS, self.record, self.last_stream)
        self.prepared = self.prepare(is_programmatic=False)
        self.launch = compile_launch(self.functions)

    def prepare(self, *, is_programmatic: bool) -> PreparedLaunch:
        made = PreparedLaunch(
            FUNCTION, 4, is_programmatic=is_programmatic, gate=self.gate.address, source_at=1
        )
        made.values[:] = 11, 0, 0, 2**64 - 1
        made.set_grid(7, 128)
        return made

    def __call__(self, stream: int = 5, producer: int = 5) -> int:
        return self.launch(self.prepared.address, stream, producer, 77, 78)


LAUNCHED = {
    "grid": (7, 1, 1),
    "block": (128, 1, 1),
    "shared": 0,
    "stream": 5,
    "attributes": [],
    "values": [11, 77, 78, 2**64 - 1],
}


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
    assert launcher.driver.calls == [("launch", LAUNCHED), ("record", EVENT, 5)] * 2


def test_a_programmatic_launch_says_so_to_the_driver(launcher: Launcher) -> None:
    made = launcher.prepare(is_programmatic=True)
    assert launcher.launch(made.address, 5, 5, 77, 78) == 0
    serialization = 6  # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
    expected = {**LAUNCHED, "attributes": [(serialization, 1)]}
    assert launcher.driver.calls[0] == ("launch", expected)


def test_a_launch_waits_for_the_stream_that_has_written_its_arrays(launcher: Launcher) -> None:
    assert launcher(5, producer=9) == 0
    assert launcher.driver.calls == [
        ("record", PRODUCERS, 9),
        ("wait", 5, PRODUCERS, 0),
        ("launch", LAUNCHED),
        ("record", EVENT, 5),
    ]


def test_the_legacy_default_stream_is_a_stream_like_others(launcher: Launcher) -> None:
    launcher.last_stream[0] = 100
    assert launcher(0, producer=0) == 0
    assert launcher.driver.calls[1] == ("record", EVENT, 0)
    launcher.last_stream[0] = 105
    assert launcher(5, producer=0) == 0
    assert launcher.driver.calls[2] == ("record", PRODUCERS, 0)


def test_a_producer_that_is_being_captured_launches_nothing(launcher: Launcher) -> None:
    launcher.driver.captured.add(9)
    assert launcher(5, producer=9) == NOT_AS_USUAL
    assert launcher.driver.calls == []


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


@pytest.mark.parametrize(("name", "ncalls"), [("record", 1), ("wait", 2)])
def test_what_is_refused_before_the_launch_launches_nothing(
    launcher: Launcher, name: str, ncalls: int
) -> None:
    launcher.driver.status[name] = 700
    assert launcher(5, producer=9) == NOT_AS_USUAL
    assert len(launcher.driver.calls) == ncalls


def test_a_capture_that_has_ended_is_none(launcher: Launcher) -> None:
    launcher.driver.captured.add(5)
    assert launcher() == NOT_AS_USUAL
    launcher.driver.captured.clear()
    assert launcher() == 0


def test_a_loop_launches_as_often_as_it_says() -> None:
    calls: list[Any] = []
    kind = ctypes.CFUNCTYPE(STATUS, WORD, *[NUMBER] * 7, WORD, WORD, WORD)
    statuses = iter([0, 0, 0, 700])

    def launch_kernel(*arguments: int) -> int:
        calls.append(arguments)
        return next(statuses)

    loop = compile_loop(kind(launch_kernel))
    assert loop(FUNCTION, 0x7F00000040, 5, 3) == 0
    assert calls == [(FUNCTION, 1, 1, 1, 128, 1, 1, 0, 5, 0x7F00000040, 0)] * 3
    assert loop(FUNCTION, 0x7F00000040, 5, 1) == 700


# What the runtime makes of it


def bound_of(
    monkeypatch: pytest.MonkeyPatch, launch: Any, arguments: list[int]
) -> tuple[NvshmemRuntime, Any]:
    made = NvshmemRuntime.__new__(NvshmemRuntime)
    record, last = np.zeros(12, np.uint32), np.zeros(1, np.uint64)
    made._gate = Gate(CONTEXT, EVENT, PRODUCERS, record, last)
    monkeypatch.setattr(runtime, "_fast_launch", lambda: launch)
    kernel = SimpleNamespace(function=FUNCTION, pdl=Pdl.ALWAYS)
    passed: Any = SimpleNamespace(flat=lambda: arguments, peers=(1,))
    return made, made.bind(kernel, Grid(3, 128), passed)


def test_arguments_are_where_the_driver_looks_for_them(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []

    def launch(prepared: int, stream: int, producer: int, source: int, destination: int) -> int:
        _, config, function, parameters, arrays, _ = (WORD * 6).from_address(prepared)
        given = launched(config, parameters)
        seen.append((function, given["grid"], given["attributes"], given["values"]))
        second = WORD.from_address((WORD * 4).from_address(parameters)[1])
        seen.append((ctypes.addressof(second) == arrays, stream, producer, source, destination))
        return 0

    _, bound = bound_of(monkeypatch, launch, [11, 2**64 - 1, 13, 14])
    assert bound(9, 10, 77, 78) is True
    assert seen == [
        (FUNCTION, (3, 1, 1), [(6, 1)], [11, 2**64 - 1, 13, 14]),
        (True, 9, 10, 77, 78),
    ]


def test_a_bound_launch_says_when_it_has_launched_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def launch(prepared: int, *_: int) -> int:
        gate = WORD.from_address(prepared).value
        return 0 if WORD.from_address(gate).value else NOT_AS_USUAL

    made, bound = bound_of(monkeypatch, launch, [1, 2, 3])
    assert bound(9, 9, 0, 0) is True
    made.shut()
    assert bound(9, 9, 0, 0) is False


def test_a_bound_launch_that_is_refused_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    _, bound = bound_of(monkeypatch, lambda *_: 700, [1, 2, 3])

    def refuse(status: int) -> None:
        raise DeviceError(f"status {status}")

    monkeypatch.setattr(runtime, "raise_refusal", refuse)
    with pytest.raises(DeviceError, match="status 700"):
        bound(9, 9, 0, 0)


def test_without_a_gate_nothing_is_bound() -> None:
    made = NvshmemRuntime.__new__(NvshmemRuntime)
    made._gate = None
    nothing: Any = None
    assert made.bind(nothing, Grid(1, 128), nothing) is None
    made.shut()
