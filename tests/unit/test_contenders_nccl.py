"""NCCL's C interface as the window contender calls it, against one that only listens."""

from __future__ import annotations

import ctypes
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.contender import Turns
from benchmarks.contenders_nccl import NcclLibrary, NcclWindow
from shmemar.dtypes import DTYPES, ReduceOp
from shmemar.errors import ShmemarError
from shmemar.spec import Backend


class Listening:
    """Functions that note what they get, and fill in the pointers that they are to fill."""

    def __init__(self, *, fails: str = "") -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.fails = fails
        self.ncclGetErrorString = lambda status: b"invalid usage"

    def __getattr__(self, name: str) -> Any:
        def function(*arguments: Any) -> int:
            self.calls.append((name, *arguments))
            if name in ("ncclCommInitRank", "ncclMemAlloc"):
                ctypes.cast(arguments[0], ctypes.POINTER(ctypes.c_void_p))[0] = 4096
            return 5 if name == self.fails else 0

        return function


@pytest.fixture
def listening(monkeypatch: pytest.MonkeyPatch) -> Listening:
    made = Listening()
    monkeypatch.setattr(ctypes, "CDLL", lambda name: made if name == "libnccl.so.2" else None)
    return made


def test_a_window_is_allocated_and_registered_as_symmetric(listening: Listening) -> None:
    library = NcclLibrary(2, 1, (-1, 2) + (0,) * 126)
    assert library.allocate(256) == 4096
    assert library.register(4096, 256) is False  # as nothing has filled in the window
    library.allreduce(8, 16, 3, 7, 0, 9)
    initialised, allocated, registered, reduced = listening.calls
    assert initialised[0] == "ncclCommInitRank"
    assert (initialised[2], initialised[4]) == (2, 1)
    assert bytes(initialised[3])[:3] == b"\xff\x02\x00"
    assert len(bytes(initialised[3])) == 128
    assert (allocated[0], allocated[2].value) == ("ncclMemAlloc", 256)
    name, comm, address, nbytes, _, flags = registered
    assert (name, comm.value, address.value, nbytes.value, flags) == (
        "ncclCommWindowRegister",
        4096,
        4096,
        256,
        1,
    )
    name, source, destination, count, kind, op, comm, stream = reduced
    assert name == "ncclAllReduce"
    assert (source.value, destination.value, count.value, kind, op) == (8, 16, 3, 7, 0)
    assert (comm.value, stream.value) == (4096, 9)


CASES = {
    ("float32", "sum", 22809): None,
    ("float64", "sum", 22809): "NCCL's windows have no sum of float64",
    ("float32", "max", 22809): "NCCL's windows have no max of float32",
    ("float32", "sum", 22600): "NCCL 22600 has no windows",
}


@pytest.mark.parametrize(("dtype", "op", "version"), CASES)
def test_what_windows_can_not_do_is_said(
    listening: Listening, monkeypatch: pytest.MonkeyPatch, dtype: str, op: str, version: int
) -> None:
    names = {f"NCCL_{name}": 0 for name in ("FLOAT32", "FLOAT64", "SUM", "MAX")}
    nccl = SimpleNamespace(available=True, get_version=lambda: version, **names)
    monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "cupy.cuda", SimpleNamespace(nccl=nccl))
    runtime = SimpleNamespace(shares_gpu=False)
    comm: Any = SimpleNamespace(backend=Backend.NVSHMEM, _runtime=runtime)
    case: Any = SimpleNamespace(dtype=DTYPES[dtype], op=ReduceOp(op))
    assert NcclWindow().why_not(comm, case) == CASES[dtype, op, version]


def test_a_library_without_windows_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def none(name: str) -> Any:
        raise OSError(f"{name}: cannot open")

    monkeypatch.setattr(ctypes, "CDLL", none)
    with pytest.raises(OSError, match="cannot open"):
        NcclLibrary(1, 0, (0,) * 128)


@pytest.mark.parametrize("error", [OSError("cannot open"), AttributeError("no such function")])
def test_a_contender_whose_library_fails_is_a_reason(
    monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def fail(_: str) -> Any:
        raise error

    names = {"NCCL_FLOAT32": 7, "NCCL_SUM": 0}
    nccl = SimpleNamespace(available=True, get_version=lambda: 22809, **names)
    monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "cupy.cuda", SimpleNamespace(nccl=nccl))
    monkeypatch.setattr(ctypes, "CDLL", fail)
    runtime = SimpleNamespace(shares_gpu=False)
    comm: Any = SimpleNamespace(backend=Backend.NVSHMEM, _runtime=runtime)
    case: Any = SimpleNamespace(dtype=DTYPES["float32"], op=ReduceOp.SUM)
    assert NcclWindow().why_not(comm, case) == f"NCCL's library can't be used ({error})"


@pytest.mark.parametrize("others", [[True, True], [True, False]])
def test_a_window_that_one_rank_has_not_got_is_an_error_on_all(others: list[bool]) -> None:
    library: Any = SimpleNamespace(
        allocate=lambda nbytes: 4096 + nbytes, register=lambda address, nbytes: True
    )
    comm: Any = SimpleNamespace(
        host_together=lambda action, name: action(), host_allgather=lambda made: others
    )
    if all(others):
        assert NcclWindow._window(comm, library, 256) == 4096 + 256
        return
    with pytest.raises(ShmemarError, match="NCCL made no window"):
        NcclWindow._window(comm, library, 256)


def test_two_of_a_kind_take_turns() -> None:
    turns, made = Turns(), iter(range(10))
    assert [turns.next(kind, lambda: next(made)) for kind in "aabaab"] == [0, 1, 2, 0, 1, 3]


def test_what_nccl_says_is_in_the_error(listening: Listening) -> None:
    listening.fails = "ncclCommWindowRegister"
    library = NcclLibrary(2, 0, (0,) * 128)
    with pytest.raises(ShmemarError, match="ncclCommWindowRegister failed: invalid usage"):
        library.register(4096, 64)
