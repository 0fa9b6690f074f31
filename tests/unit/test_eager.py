"""Eager calls that are found again, on libraries of arrays that are made up."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from shmemar.host import eager
from shmemar.host.eager import EagerCalls


@dataclass
class Flags:
    """Of a CuPy array."""

    c_contiguous: bool = True


class CupyArray:
    """As much of ``cupy.ndarray`` as is asked for."""

    def __init__(self, address: int, size: int = 8, dtype: str = "f4", gpu: int = 0) -> None:
        self.data = SimpleNamespace(ptr=address, device_id=gpu)
        self.size = size
        self.dtype = {"f4": F4, "i8": I8}[dtype]
        self.flags = Flags()


@dataclass(frozen=True)
class NumpyType:
    """As much of ``numpy.dtype`` as is asked for."""

    name: str
    itemsize: int


F4, I8 = NumpyType("float32", 4), NumpyType("int64", 8)


@dataclass
class Tensor:
    """As much of ``torch.Tensor`` as is asked for."""

    address: int
    size: int = 8
    requires_grad: bool = False
    gpu: int = 0
    lazy: bool = False
    dtype: str = "torch.float32"
    layout: str = field(default="strided")

    def data_ptr(self) -> int:
        if self.layout != "strided":
            raise RuntimeError("no storage")
        return self.address

    def numel(self) -> int:
        return self.size

    def element_size(self) -> int:
        return 4

    def is_contiguous(self) -> bool:
        return True

    def is_conj(self) -> bool:
        return self.lazy

    def is_neg(self) -> bool:
        return False

    def get_device(self) -> int:
        return self.gpu


class Libraries:
    """CuPy and torch, with a current stream each."""

    def __init__(self) -> None:
        self.current = 3
        self.made: list[CupyArray] = []
        self.cupy = SimpleNamespace(
            ndarray=CupyArray,
            cuda=SimpleNamespace(get_current_stream=lambda: SimpleNamespace(ptr=self.current)),
            empty_like=self.empty_like,
        )
        self.torch = SimpleNamespace(
            Tensor=Tensor,
            _C=SimpleNamespace(_cuda_getCurrentRawStream=lambda gpu: 30 + gpu),
            empty_like=lambda x: Tensor(0x9000, x.size),
        )

    def empty_like(self, x: CupyArray) -> CupyArray:
        self.made.append(CupyArray(0x8000 + 0x100 * len(self.made), x.size))
        return self.made[-1]


@pytest.fixture
def libraries(monkeypatch: pytest.MonkeyPatch) -> Libraries:
    found = Libraries()
    monkeypatch.setitem(sys.modules, "cupy", found.cupy)
    monkeypatch.setitem(sys.modules, "torch", found.torch)
    return found


def bound(*_: int) -> bool:
    return True


def knowing(x: Any, out: Any, op: str = "sum") -> EagerCalls:
    calls = EagerCalls()
    calls.remember(x, out, op, "kernel", lambda: bound)
    return calls


X, OUT = 0x1000, 0x2000


@pytest.mark.usefixtures("libraries")
def test_a_call_of_arrays_that_agree_is_found_with_its_own_addresses() -> None:
    calls = knowing(CupyArray(X), CupyArray(OUT))
    other = CupyArray(0x3000)
    found = calls.find(CupyArray(0x5010 - 16), other, "sum", None)
    assert found == (bound, "kernel", 3, 3, 0x5000, 0x3000, other)
    in_place = CupyArray(0x3000)
    assert calls.find(in_place, in_place, "sum", None) is not None


@pytest.mark.usefixtures("libraries")
@pytest.mark.parametrize(
    ("x", "out", "op"),
    [
        (CupyArray(X, 9), CupyArray(OUT, 9), "sum"),
        (CupyArray(X, dtype="i8"), CupyArray(OUT, dtype="i8"), "sum"),
        (CupyArray(X + 4), CupyArray(OUT), "sum"),
        (CupyArray(X), CupyArray(OUT + 8), "sum"),
        (CupyArray(X, gpu=1), CupyArray(OUT), "sum"),
        (CupyArray(X), CupyArray(OUT), "min"),
        (CupyArray(X), CupyArray(OUT), ["sum"]),
        (CupyArray(X), CupyArray(X + 16), "sum"),
        (CupyArray(X + 16), CupyArray(X), "sum"),
        (CupyArray(X), Tensor(OUT), "sum"),
        (Tensor(X), Tensor(OUT), "sum"),
        (CupyArray(X), "out", "sum"),
        ("x", CupyArray(OUT), "sum"),
    ],
    ids=range(13),
)
def test_another_call_goes_the_long_way(x: Any, out: Any, op: Any) -> None:
    calls = knowing(CupyArray(X), CupyArray(OUT))
    assert calls.find(x, out, op, None) is None


@pytest.mark.usefixtures("libraries")
def test_an_array_that_is_not_contiguous_goes_the_long_way() -> None:
    calls = knowing(CupyArray(X), CupyArray(OUT))
    x = CupyArray(X)
    x.flags = Flags(c_contiguous=False)
    assert calls.find(x, CupyArray(OUT), "sum", None) is None


@pytest.mark.usefixtures("libraries")
@pytest.mark.parametrize(
    "x",
    [Tensor(X, requires_grad=True), Tensor(X, lazy=True), Tensor(X, gpu=-1)],
    ids=["gradient", "lazy", "host"],
)
def test_a_tensor_that_is_refused_goes_the_long_way(x: Tensor) -> None:
    calls = knowing(Tensor(X), Tensor(OUT))
    assert calls.find(Tensor(X), Tensor(OUT), "sum", None) is not None
    assert calls.find(x, Tensor(OUT), "sum", None) is None
    assert calls.find(Tensor(X, layout="sparse"), Tensor(OUT), "sum", None) is None


@pytest.mark.usefixtures("libraries")
def test_a_subclass_goes_the_long_way() -> None:
    class Derived(CupyArray):
        """May be anything."""

    calls = knowing(CupyArray(X), CupyArray(OUT))
    assert calls.find(Derived(X), CupyArray(OUT), "sum", None) is None
    assert calls.find(CupyArray(X), Derived(OUT), "sum", None) is None
    calls.remember(Derived(X), Derived(OUT), "sum", "kernel", lambda: bound)
    assert calls.find(Derived(X), Derived(OUT), "sum", None) is None


def test_a_result_is_made_on_the_current_stream_alone(libraries: Libraries) -> None:
    calls = knowing(CupyArray(X), CupyArray(OUT))
    found = calls.find(CupyArray(X), None, "sum", None)
    assert found is not None
    assert found.out is libraries.made[0]
    assert found.destination == 0x8000
    assert calls.find(CupyArray(X), None, "sum", libraries.current) is not None
    assert calls.find(CupyArray(X), None, "sum", 99) is None
    assert len(libraries.made) == 2
    assert calls.find(CupyArray(X, 9), None, "sum", None) is None
    assert len(libraries.made) == 2  # of an input that is not known none is made
    tensors = knowing(Tensor(X), Tensor(OUT))
    assert tensors.find(Tensor(X), None, "sum", None) is not None
    assert tensors.find(Tensor(X), None, "sum", 30) is not None
    assert tensors.find(Tensor(X), None, "sum", 99) is None


def test_a_cupy_array_is_waited_for_and_a_tensor_is_not(libraries: Libraries) -> None:
    found = knowing(CupyArray(X), CupyArray(OUT)).find(CupyArray(X), CupyArray(OUT), "sum", 99)
    assert found is not None
    assert (found.stream, found.producer) == (99, libraries.current)
    tensors = knowing(Tensor(X), Tensor(OUT))
    found = tensors.find(Tensor(X), Tensor(OUT), "sum", 99)
    assert found is not None
    assert (found.stream, found.producer) == (99, 99)
    found = tensors.find(Tensor(X), Tensor(OUT), "sum", None)
    assert found is not None
    assert (found.stream, found.producer) == (30, 30)


@pytest.mark.usefixtures("libraries")
def test_a_stream_that_is_none_goes_the_long_way() -> None:
    calls = knowing(CupyArray(X), CupyArray(OUT))
    assert calls.find(CupyArray(X), CupyArray(OUT), "sum", "fast") is None


@pytest.mark.usefixtures("libraries")
def test_what_is_chosen_otherwise_is_forgotten() -> None:
    calls = knowing(CupyArray(X), CupyArray(OUT))
    stream = SimpleNamespace(ptr=7)
    assert calls.find(CupyArray(X), CupyArray(OUT), "sum", stream) is not None
    calls.clear()
    assert calls.find(CupyArray(X), CupyArray(OUT), "sum", None) is None
    assert calls.find(CupyArray(X), None, "sum", None) is None
    assert calls._stream is None


@pytest.mark.usefixtures("libraries")
def test_where_nothing_is_gained_nothing_is_remembered() -> None:
    calls = EagerCalls()
    calls.remember(CupyArray(X), CupyArray(OUT), "sum", "kernel", lambda: None)
    assert calls.find(CupyArray(X), CupyArray(OUT), "sum", None) is None


@pytest.mark.usefixtures("libraries")
def test_memory_does_not_grow_with_the_kinds_of_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(eager, "MANY_CALLS", 10)
    calls = EagerCalls()
    for size in range(1, 100):
        x, out = CupyArray(X, size), CupyArray(OUT, size)
        calls.remember(x, out, "sum", "kernel", lambda: bound)
        assert calls.find(x, out, "sum", None) is not None
        assert len(calls._known) <= 10
