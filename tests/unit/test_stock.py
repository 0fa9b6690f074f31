"""What surrounds NVSHMEM's own all-reduce: its memory, its copies, its refusals."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from shmemar.dtypes import DTYPES, ReduceOp
from shmemar.errors import BackendUnavailableError, DeviceError
from shmemar.host import stock
from shmemar.host.runtime import NvshmemRuntime
from shmemar.host.stock import NVSHMEM_TYPES, StockArguments, StockReduction
from shmemar.layout import Grid
from shmemar.spec import Kernel, KernelSpec, Protocol, why_impossible

SPEC = KernelSpec(Kernel.STOCK, Protocol.STREAM, DTYPES["float64"], ReduceOp.SUM, 2)
STREAM = 77


def made(njob: int = 2, **bindings: Any) -> tuple[Any, ModuleType]:
    """A runtime of two ranks, and a module in the place of NVSHMEM's."""
    runtime: Any = object.__new__(NvshmemRuntime)
    runtime._bootstrap = SimpleNamespace(rank=1, size=2, together=lambda action, *_: action())
    runtime._job = SimpleNamespace(size=njob)
    runtime._peers = (1000, 2000)
    runtime._compile_timeout_s = 1.0
    runtime._setup_stream = SimpleNamespace(handle=STREAM, sync=lambda: calls.append("sync"))
    runtime.refuse_capture = lambda *_: None
    calls: list[Any] = []
    runtime.calls = calls
    module = ModuleType("nvshmem.bindings")
    for name, value in bindings.items():
        setattr(module, name, value)
    return runtime, module


def install(monkeypatch: pytest.MonkeyPatch, module: ModuleType) -> None:
    package = ModuleType("nvshmem")
    package.bindings = module  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "nvshmem", package)
    monkeypatch.setitem(sys.modules, "nvshmem.bindings", module)


def test_every_type_that_it_serves_has_a_name_at_nvshmem() -> None:
    for dtype in DTYPES.values():
        if why_impossible(Kernel.STOCK, Protocol.STREAM, dtype, ReduceOp.SUM, 2) is None:
            assert dtype.name in NVSHMEM_TYPES


def test_a_first_call_is_made_in_the_staging_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime, module = made()
    vars(module)["double_sum_reduce_on_stream"] = lambda *what: runtime.calls.append(what)
    install(monkeypatch, module)
    reduction = runtime._stock(SPEC, 0)
    runtime.try_stock(reduction, SimpleNamespace(addresses=(1512, 2512)))
    assert runtime.calls == [(0, 2528, 2512, 1, STREAM), "sync"]


def test_memory_at_other_places_on_other_ranks_is_refused() -> None:
    runtime, _ = made()
    with pytest.raises(BackendUnavailableError, match="needs memory at the same place on all"):
        runtime.try_stock(None, SimpleNamespace(addresses=(1512, 2768)))


def test_ranks_that_are_not_the_whole_job_have_none() -> None:
    assert made(njob=2)[0].why_no_stock() is None
    assert made(njob=3)[0].why_no_stock() == (
        "NVSHMEM's reduces over all 3 processes of the job, and the communicator has 2"
    )


def test_a_message_is_copied_there_and_back(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    monkeypatch.setattr(stock, "copy_on_stream", lambda *what: calls.append(what))
    reduction = StockReduction(lambda *what: calls.append(what), itemsize=8)
    reduction.launch(Grid(0, 0), StockArguments(500, 600, 100, 200, 3).flat(), STREAM)
    assert calls == [(500, 100, 24, STREAM), (600, 500, 3, STREAM), (200, 600, 24, STREAM)]


def test_what_nvshmem_refuses_is_a_device_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: int) -> None:
        raise RuntimeError("status 7")

    monkeypatch.setattr(stock, "copy_on_stream", lambda *_: None)
    reduction = StockReduction(refuse, itemsize=8)
    with pytest.raises(DeviceError, match=r"refused its all-reduce \(RuntimeError: status 7\)"):
        reduction.launch(Grid(0, 0), StockArguments(500, 600, 100, 200, 3).flat(), STREAM)


def test_nothing_is_gained_by_preparing_it() -> None:
    runtime, _ = made()
    runtime._gate = object()
    assert runtime.bind(None, Grid(0, 0), StockArguments(0, 0, 0, 0, 1)) is None
