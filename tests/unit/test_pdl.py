"""When kernels are launched programmatically."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from shmemar.config import Config
from shmemar.dtypes import DTYPES, ReduceOp
from shmemar.errors import ArgumentError, ConfigurationError
from shmemar.host.default_tables import default_table
from shmemar.host.kernel_set import KernelSet
from shmemar.host.launch import Capture, StreamOrder
from shmemar.host.runtime import NvshmemRuntime
from shmemar.host.scratch import layout_for
from shmemar.host.selector import Terms
from shmemar.host.session import Session
from shmemar.spec import Kernel, KernelSpec, Pdl, Protocol

SPEC = KernelSpec(Kernel.ONE_SHOT, Protocol.LL, DTYPES["float32"], ReduceOp.SUM, 2)


class Runtime:
    """Says where it can be, and writes down what is compiled."""

    def __init__(
        self, *, shares_gpu: bool = False, why: str | None = None, emulated: bool = False
    ) -> None:
        self.shares_gpu = shares_gpu
        self.is_synchronous = emulated
        self.why = why
        self.compiled: list[Pdl] = []

    def why_no_pdl(self) -> str | None:
        return self.why

    def refuse_capture(self, *_: Any) -> None:
        """Nothing is captured."""

    def compile(self, spec: Any, layout: Any, stream: int, *, pdl: Pdl) -> Any:
        self.compiled.append(pdl)
        return SimpleNamespace(max_blocks=40)


def kernels(
    monkeypatch: pytest.MonkeyPatch, runtime: Runtime, config: Config | None = None
) -> KernelSet:
    config = config or Config()
    nothing: Any = None
    terms = Terms(2, default_table(2, shares_gpu=runtime.shares_gpu))
    made = KernelSet(nothing, config, nothing, runtime, terms)  # type: ignore[arg-type]
    scratch = SimpleNamespace(layout=layout_for(SPEC, config))
    monkeypatch.setattr(made, "scratch_for", lambda _: scratch)
    return made


@pytest.mark.parametrize(
    ("runtime", "expected"),
    [
        (Runtime(), Pdl.BEHIND),
        (Runtime(shares_gpu=True), Pdl.NEVER),
        (Runtime(why="it is old"), Pdl.NEVER),
        (Runtime(emulated=True), Pdl.NEVER),
    ],
    ids=["own GPU", "shared GPU", "old GPU", "emulated"],
)
def test_a_gpu_of_their_own_has_it_behind_collectives(
    monkeypatch: pytest.MonkeyPatch, runtime: Runtime, expected: Pdl
) -> None:
    made = kernels(monkeypatch, runtime)
    prepared = made.prepare(SPEC, 0)
    assert prepared.pdl is expected
    assert made.prepare(SPEC, 0) is prepared
    assert runtime.compiled == [expected]
    assert made.explain(64, SPEC.dtype, SPEC.op).pdl == expected.value


@pytest.mark.parametrize("shares_gpu", [False, True])
@pytest.mark.parametrize(("wanted", "expected"), [(True, Pdl.ALWAYS), (False, Pdl.NEVER)])
def test_what_is_asked_for_is_done(
    monkeypatch: pytest.MonkeyPatch, wanted: bool, expected: Pdl, shares_gpu: bool
) -> None:
    runtime = Runtime(shares_gpu=shares_gpu)
    made = kernels(monkeypatch, runtime)
    assert made.prepare(SPEC, 0, pdl=wanted).pdl is expected
    pinned = kernels(monkeypatch, runtime, Config(pdl=wanted))
    assert pinned.prepare(SPEC, 0).pdl is expected
    assert runtime.compiled == [expected, expected]
    other = pinned.prepare(SPEC, 0, pdl=not wanted)
    assert other.pdl is not expected  # an argument goes first


def test_emulated_ranks_have_no_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    made = kernels(monkeypatch, Runtime(emulated=True))
    assert made.prepare(SPEC, 0, pdl=True).pdl is Pdl.NEVER


def test_a_gpu_that_is_too_old_is_named() -> None:
    made = NvshmemRuntime.__new__(NvshmemRuntime)
    made._oldest = 80
    why = made.why_no_pdl()
    assert why is not None
    assert "sm_80; expected sm_90" in why
    made._oldest = 90
    assert made.why_no_pdl() is None


@pytest.mark.parametrize(
    ("from_environment", "kind", "expected"),
    [
        (True, ConfigurationError, "SHMEMAR_PDL is 1, and it is old for .* Unset it, or set it to"),
        (False, ArgumentError, "pdl is True, and it is old for .* Use 'auto' or False"),
    ],
    ids=["variable", "argument"],
)
def test_what_cannot_be_launched_so_is_refused_with_the_remedy(
    from_environment: bool, kind: type[Exception], expected: str
) -> None:
    session: Any = Session.__new__(Session)
    session._is_closed = True
    session._runtime = Runtime(why="it is old")
    with pytest.raises(kind, match=expected):
        session._require_pdl(from_environment=from_environment)
    session._runtime = Runtime()
    session._require_pdl(from_environment=from_environment)


# Right behind one that triggers


class Order(StreamOrder):
    """Records nothing."""

    def __init__(self) -> None:
        self._triggering = None
        self._driver = SimpleNamespace(cuEventRecord=lambda *_: (0,))
        self._events = {False: 1, True: 2}


@pytest.fixture
def order(monkeypatch: pytest.MonkeyPatch) -> Any:
    from shmemar.host import launch

    made = Order()
    now: dict[str, Capture | None] = {"capture": None}
    monkeypatch.setattr(launch, "capture_of", lambda _: now["capture"])
    monkeypatch.setattr(launch, "_checked", lambda result: result)

    def captured(number: int, node: int, *, triggers: bool) -> None:
        now["capture"] = Capture(number, (node,))
        made.after_launch(5, Capture(number, ()), triggers=triggers)

    return SimpleNamespace(order=made, captured=captured)


def test_the_next_node_of_a_capture_is_behind_one_that_triggers(order: Any) -> None:
    order.captured(7, 100, triggers=True)
    assert order.order.is_behind_trigger(Capture(7, (100,)))


@pytest.mark.parametrize(
    "capture",
    [
        None,
        Capture(7, ()),
        Capture(7, (101,)),
        Capture(7, (100, 101)),
        Capture(8, (100,)),
    ],
    ids=["none", "first", "other node", "two nodes", "other capture"],
)
def test_another_node_is_not(order: Any, capture: Capture | None) -> None:
    order.captured(7, 100, triggers=True)
    assert not order.order.is_behind_trigger(capture)


def test_a_launch_that_does_not_trigger_is_not_overlapped(order: Any) -> None:
    order.captured(7, 100, triggers=True)
    order.captured(7, 101, triggers=False)
    assert not order.order.is_behind_trigger(Capture(7, (101,)))
    assert not order.order.is_behind_trigger(Capture(7, (100,)))


def test_a_launch_outside_of_captures_changes_nothing(order: Any) -> None:
    order.captured(7, 100, triggers=True)
    order.order.after_launch(5, None, triggers=True)
    assert order.order.is_behind_trigger(Capture(7, (100,)))
