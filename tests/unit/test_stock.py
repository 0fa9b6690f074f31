"""What surrounds NVSHMEM's own all-reduce: its memory, its copies, its refusals."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from shmemar.dtypes import DTYPES, ReduceOp
from shmemar.errors import BackendUnavailableError, CollectiveTimeoutError, DeviceError
from shmemar.host import launch, session, stock
from shmemar.host import runtime as runtime_module
from shmemar.host.communicator import Communicator
from shmemar.host.runtime import NvshmemRuntime
from shmemar.host.stock import NVSHMEM_TYPES, StockArguments, StockReduction
from shmemar.layout import Grid
from shmemar.spec import Kernel, KernelSpec, Protocol, why_impossible

SPEC = KernelSpec(Kernel.STOCK, Protocol.STREAM, DTYPES["float64"], ReduceOp.SUM, 2)
STREAM = 77
STAGING = SimpleNamespace(addresses=(1512, 2512))


def made(njob: int = 2) -> Any:
    """A runtime of two ranks, which keeps what is called in `calls`."""
    runtime: Any = object.__new__(NvshmemRuntime)
    runtime._bootstrap = SimpleNamespace(
        rank=1, size=2, together=lambda action, *_: action(), allgather=lambda *_: None
    )
    runtime.calls = calls = []
    order = SimpleNamespace(
        before_launch=lambda *what: calls.append(("before", *what)),
        after_launch=lambda *what: calls.append(("after", *what)),
    )
    runtime._job = SimpleNamespace(size=njob, stock_order=order)
    runtime._peers = (1000, 2000)
    runtime._compile_timeout_s = 0.01
    runtime._setup_stream = SimpleNamespace(handle=STREAM)
    runtime.refuse_capture = lambda *_: None
    return runtime


def install(monkeypatch: pytest.MonkeyPatch, module: ModuleType) -> None:
    package = ModuleType("nvshmem")
    package.bindings = module  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "nvshmem", package)
    monkeypatch.setitem(sys.modules, "nvshmem.bindings", module)


def test_every_type_that_it_serves_has_a_name_at_nvshmem() -> None:
    for dtype in DTYPES.values():
        if why_impossible(Kernel.STOCK, Protocol.STREAM, dtype, ReduceOp.SUM, 2) is None:
            assert dtype.name in NVSHMEM_TYPES


def test_first_calls_are_made_in_the_staging_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime, module = made(), ModuleType("nvshmem.bindings")
    vars(module)["double_sum_reduce_on_stream"] = lambda *what: runtime.calls.append(what)
    install(monkeypatch, module)
    answers = iter([False, False, True])
    monkeypatch.setattr(runtime_module, "is_done", lambda _: next(answers))
    reduction = runtime._stock(SPEC, 0)
    runtime.try_stock(reduction, STAGING, 64)
    assert runtime.calls == [
        ("before", STREAM, None),
        (0, 2576, 2512, 1, STREAM),
        (0, 2576, 2512, 8, STREAM),
        ("after", STREAM, None),
    ]
    assert list(answers) == []


def test_a_reduction_that_nvshmem_has_not_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, ModuleType("nvshmem.bindings"))
    with pytest.raises(BackendUnavailableError, match="has no double_sum_reduce_on_stream"):
        made()._stock(SPEC, 0)


def test_a_first_call_that_does_not_end_is_a_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime_module, "is_done", lambda _: False)
    reduction = StockReduction(lambda *_: None, itemsize=8)
    with pytest.raises(CollectiveTimeoutError, match=r"rank 1 waited more than 0.01 s for NVSHM"):
        made().try_stock(reduction, STAGING, 64)


def test_memory_at_other_places_on_other_ranks_is_refused() -> None:
    with pytest.raises(BackendUnavailableError, match="needs memory at the same place on all"):
        made().try_stock(None, SimpleNamespace(addresses=(1512, 2768)), 64)


def test_ranks_that_are_not_the_whole_job_have_none() -> None:
    assert made(njob=2).why_no_stock() is None
    assert made(njob=3).why_no_stock() == (
        "NVSHMEM's reduces over all 3 processes of the job, and the communicator has 2"
    )


RESULTS = SimpleNamespace(
    CUDA_SUCCESS=SimpleNamespace(name="CUDA_SUCCESS"),
    CUDA_ERROR_NOT_READY=SimpleNamespace(name="CUDA_ERROR_NOT_READY"),
    CUDA_ERROR_LAUNCH_FAILED=SimpleNamespace(name="CUDA_ERROR_LAUNCH_FAILED"),
)


def answer(monkeypatch: pytest.MonkeyPatch, result: str) -> list[Any]:
    """Put a driver in the place of CUDA's that answers so, and return what it is called with."""
    import cuda.bindings

    calls: list[Any] = []

    def call(*what: Any) -> tuple[Any]:
        calls.append(what)
        return (getattr(RESULTS, result),)

    driver = SimpleNamespace(
        CUresult=RESULTS,
        cuMemcpyAsync=call,
        cuStreamQuery=call,
        cuGetErrorString=lambda _: (RESULTS.CUDA_SUCCESS, b"it failed"),
    )
    monkeypatch.setattr(cuda.bindings, "driver", driver, raising=False)
    return calls


def test_a_copy_to_the_same_place_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = answer(monkeypatch, "CUDA_SUCCESS")
    launch.copy_on_stream(100, 100, 8, STREAM)
    launch.copy_on_stream(100, 200, 8, STREAM)
    assert calls == [(100, 200, 8, STREAM)]


@pytest.mark.parametrize(
    ("result", "done"), [("CUDA_SUCCESS", True), ("CUDA_ERROR_NOT_READY", False)]
)
def test_a_stream_is_asked_whether_it_is_done(
    monkeypatch: pytest.MonkeyPatch, result: str, done: bool
) -> None:
    assert answer(monkeypatch, result) == []
    assert launch.is_done(STREAM) is done


def test_what_the_driver_refuses_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = answer(monkeypatch, "CUDA_ERROR_LAUNCH_FAILED")
    with pytest.raises(DeviceError, match="CUDA_ERROR_LAUNCH_FAILED: it failed"):
        launch.is_done(STREAM)
    with pytest.raises(DeviceError, match="CUDA_ERROR_LAUNCH_FAILED: it failed"):
        launch.copy_on_stream(100, 200, 8, STREAM)
    assert len(calls) == 2


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
    runtime = made()
    runtime._gate = object()
    assert runtime.bind(None, Grid(0, 0), StockArguments(0, 0, 0, 0, 1)) is None


@pytest.mark.parametrize("kernel", [Kernel.STOCK, Kernel.ONE_SHOT])
def test_a_first_call_that_is_refused_breaks_the_communicator(
    monkeypatch: pytest.MonkeyPatch, kernel: Kernel
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise DeviceError("NVSHMEM refused.")

    monkeypatch.setattr(session, "leave_without_finalize", lambda: None)
    comm: Any = object.__new__(Communicator)
    comm._is_closed, comm._failure = True, None
    comm._kernels = SimpleNamespace(prepare=refuse)
    comm._shut = lambda: None
    spec = KernelSpec(kernel, kernel.default_protocol, DTYPES["float64"], ReduceOp.SUM, 2)
    with pytest.raises(DeviceError, match="NVSHMEM refused"):
        comm._prepare(spec, 0)
    assert (comm._failure is not None) == (kernel is Kernel.STOCK)


@pytest.mark.parametrize("is_stock", [True, False])
@pytest.mark.parametrize("error", [KeyboardInterrupt, CollectiveTimeoutError])
def test_what_ends_mpis_all_reduce_breaks_the_communicator(
    monkeypatch: pytest.MonkeyPatch, error: type[BaseException], *, is_stock: bool
) -> None:
    def end(*_: Any) -> None:
        if error is KeyboardInterrupt:
            raise KeyboardInterrupt
        raise CollectiveTimeoutError("nobody came", rank=0, missing=(1,))

    monkeypatch.setattr(session, "leave_without_finalize", lambda: None)
    comm: Any = object.__new__(Communicator)
    comm.rank, comm._is_closed, comm._failure = 0, True, None
    comm._runtime = SimpleNamespace(is_synchronous=True, launch=end)
    comm._shut = lambda: None
    arguments = StockArguments(0, 0, 0, 0, 1) if is_stock else SimpleNamespace()
    with pytest.raises(error):
        comm._enqueue(SPEC, None, Grid(0, 0), arguments, 0)
    assert (comm._failure is not None) == is_stock
