"""When kernels are launched programmatically."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from shmemar.config import Config
from shmemar.dtypes import DTYPES, ReduceOp
from shmemar.host.default_tables import default_table
from shmemar.host.kernel_set import KernelSet
from shmemar.host.launch import Capture, StreamOrder
from shmemar.host.runtime import NvshmemRuntime
from shmemar.host.scratch import layout_for
from shmemar.host.selector import Terms
from shmemar.spec import Kernel, KernelSpec, Pdl, Protocol

SPEC = KernelSpec(Kernel.ONE_SHOT, Protocol.LL, DTYPES["float32"], ReduceOp.SUM, 2)
BLOCK_NBYTES = 128 * 8
"""What a block of LL packets takes in one pass."""


class Runtime:
    """Compiles to the caps of a GPU that holds 40 blocks, which two ranks may share."""

    def __init__(self, *, shares_gpu: bool, why_no_pdl: str | None = None) -> None:
        self.shares_gpu = shares_gpu
        self.why = why_no_pdl
        self.compiled: list[Pdl] = []

    def why_no_pdl(self) -> str | None:
        return self.why

    def refuse_capture(self, *_: Any) -> None:
        pass

    def compile(self, spec: Any, layout: Any, stream: int, *, pdl: Pdl) -> Any:
        self.compiled.append(pdl)
        most = 40
        if self.shares_gpu:
            most //= 2 if pdl is Pdl.NEVER else 4
        return SimpleNamespace(max_blocks=most)


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
    ("nblocks", "shares_gpu", "expected"),
    [
        (1, False, Pdl.BEHIND),
        (1000, False, Pdl.BEHIND),
        (1, True, Pdl.BEHIND),
        (10, True, Pdl.BEHIND),
        (11, True, Pdl.NEVER),
        (1000, True, Pdl.NEVER),
    ],
)
def test_a_shared_gpu_has_it_where_half_of_the_blocks_are_enough(
    monkeypatch: pytest.MonkeyPatch, nblocks: int, shares_gpu: bool, expected: Pdl
) -> None:
    made = kernels(monkeypatch, Runtime(shares_gpu=shares_gpu))
    nbytes = nblocks * BLOCK_NBYTES
    prepared = made.prepare_for(SPEC, nbytes, 0)
    assert prepared.pdl is expected
    most = 40 if not shares_gpu else 10 if expected is Pdl.BEHIND else 20
    assert prepared.grid(nbytes).blocks == min(nblocks, most)
    assert made.prepare_for(SPEC, nbytes, 0) is prepared


def test_no_bytes_are_a_block(monkeypatch: pytest.MonkeyPatch) -> None:
    made = kernels(monkeypatch, Runtime(shares_gpu=True))
    assert made.prepare_for(SPEC, 0, 0).pdl is Pdl.BEHIND


@pytest.mark.parametrize("shares_gpu", [False, True])
@pytest.mark.parametrize(("wanted", "expected"), [(True, Pdl.ALWAYS), (False, Pdl.NEVER)])
def test_what_is_asked_for_is_done(
    monkeypatch: pytest.MonkeyPatch, wanted: bool, expected: Pdl, shares_gpu: bool
) -> None:
    runtime = Runtime(shares_gpu=shares_gpu)
    made = kernels(monkeypatch, runtime)
    assert made.prepare_for(SPEC, 1 << 20, 0, pdl=wanted).pdl is expected
    pinned = kernels(monkeypatch, runtime, Config(pdl=wanted))
    assert pinned.prepare_for(SPEC, 1 << 20, 0).pdl is expected
    assert runtime.compiled == [expected, expected]
    other = pinned.prepare_for(SPEC, 4, 0, pdl=not wanted)
    assert other.pdl is not expected  # an argument goes first


def test_an_older_gpu_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    made = kernels(monkeypatch, Runtime(shares_gpu=False, why_no_pdl="it is old"))
    assert made.prepare_for(SPEC, 4, 0).pdl is Pdl.NEVER


def test_a_gpu_that_is_too_old_is_named() -> None:
    made = NvshmemRuntime.__new__(NvshmemRuntime)
    made._oldest = 80
    why = made.why_no_pdl()
    assert why is not None
    assert "sm_80; expected sm_90" in why
    made._oldest = 90
    assert made.why_no_pdl() is None


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
