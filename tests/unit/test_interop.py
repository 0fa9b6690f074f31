"""Arrays of users: what is taken, and what is refused in which words."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest

from shmemar.dtypes import DTYPES
from shmemar.errors import ArgumentError, ArgumentTypeError
from shmemar.host import interop
from shmemar.host.exact import numpy_dtype
from shmemar.host.interop import Operand, check_pair, host_operand


def address_of(array: Any) -> int:
    return int(array.__array_interface__["data"][0])


def read_only(array: Any) -> Any:
    array.flags.writeable = False
    return array


def misaligned(dtype: str, nbytes: int) -> Any:
    """Return an array of `dtype` that starts `nbytes` behind an address that it may start at."""
    return np.zeros(64, np.uint8)[nbytes : nbytes + 32].view(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(5,), (2, 3), (1, 1, 1), (), (0,), (3, 0)])
@pytest.mark.parametrize("writeable", [False, True])
def test_a_contiguous_array_is_described(
    dtype: str, shape: tuple[int, ...], *, writeable: bool
) -> None:
    array = np.zeros(shape, numpy_dtype(DTYPES[dtype]))
    operand = host_operand("x", array, writeable=writeable)
    assert operand == Operand(address_of(array), array.size, DTYPES[dtype])
    assert operand.nbytes == array.nbytes


def test_a_view_is_described_from_its_own_start() -> None:
    base = np.zeros(10, np.float32)
    operand = host_operand("x", base[3:7], writeable=True)
    assert (operand.address, operand.count) == (address_of(base) + 12, 4)


@pytest.mark.parametrize(
    ("start", "length", "expected"), [(0, 4, (64, 4)), (4, 4, (96, 4)), (8, 4, (128, 2))]
)
def test_a_part_of_an_array_is_described(
    start: int, length: int, expected: tuple[int, int]
) -> None:
    part = Operand(64, 10, DTYPES["float64"]).part(start, length)
    assert (part.address, part.count) == expected


def test_a_read_only_input_is_taken() -> None:
    assert host_operand("x", read_only(np.zeros(3, np.int32)), writeable=False).count == 3


def test_an_array_of_complex128_may_be_aligned_to_its_components() -> None:
    assert host_operand("x", misaligned("complex128", 8), writeable=True).count == 2


BAD = {
    "list": (
        [1.0, 2.0],
        ArgumentTypeError,
        ["is list", "expected a numpy.ndarray", "numpy.asarray"],
    ),
    "none": (None, ArgumentTypeError, ["is NoneType", "expected a numpy.ndarray"]),
    "numpy scalar": (np.float32(1), ArgumentTypeError, ["is float32", "expected a numpy.ndarray"]),
    "longdouble": (np.zeros(3, np.longdouble), ArgumentTypeError, ["dtype is float", *DTYPES]),
    "bool": (np.zeros(3, np.bool_), ArgumentTypeError, ["dtype is bool", *DTYPES]),
    "uint16": (np.zeros(3, np.uint16), ArgumentTypeError, ["dtype is uint16", *DTYPES]),
    "object": (np.array([None]), ArgumentTypeError, ["dtype is object", *DTYPES]),
    "structured": (np.zeros(2, "f4,f4"), ArgumentTypeError, ["dtype is void64", *DTYPES]),
    "byte-swapped": (
        np.zeros(3, np.dtype(np.float32).newbyteorder("S")),
        ArgumentError,
        ["byte order '>'", "expected native byte order", "newbyteorder"],
    ),
    "Fortran order": (
        np.zeros((2, 3), np.float32, order="F"),
        ArgumentError,
        ["shape (2, 3) and strides (4, 8)", "C-contiguous", "numpy.ascontiguousarray"],
    ),
    "every other": (
        np.zeros(6, np.float64)[::2],
        ArgumentError,
        ["strides (16,)", "C-contiguous"],
    ),
    "reversed": (np.zeros(6, np.int64)[::-1], ArgumentError, ["strides (-8,)", "C-contiguous"]),
    "misaligned float32": (
        misaligned("float32", 2),
        ArgumentError,
        ["starts at address 0x", "expected a multiple of 4 for float32", "copy()"],
    ),
    "misaligned int64": (
        misaligned("int64", 4),
        ArgumentError,
        ["starts at address 0x", "expected a multiple of 8 for int64", "copy()"],
    ),
}


@pytest.mark.parametrize(("array", "kind", "parts"), BAD.values(), ids=BAD)
@pytest.mark.parametrize("name", ["x", "out"])
def test_an_array_that_kernels_cannot_take_is_refused(
    array: Any, kind: type[Exception], parts: list[str], name: str
) -> None:
    with pytest.raises(kind) as caught:
        host_operand(name, array, writeable=False)
    message = str(caught.value)
    assert message.startswith(name)
    assert [part for part in parts if part not in message] == []


def test_a_read_only_output_is_refused() -> None:
    with pytest.raises(ArgumentError) as caught:
        host_operand("out", read_only(np.zeros(3, np.float32)), writeable=True)
    assert "out is read-only; expected an array that can be written to" in str(caught.value)


def operand(start: int, count: int = 8, dtype: str = "float32") -> Operand:
    return Operand(0x1000 + start, count, DTYPES[dtype])


@pytest.mark.parametrize("start", [0, 32, -32, 4096, -4096])
def test_the_same_memory_or_none_of_it_is_taken(start: int) -> None:
    check_pair(operand(0), operand(start))


@pytest.mark.parametrize("start", [0, 16, 32])
def test_an_output_without_elements_overlaps_nothing(start: int) -> None:
    check_pair(operand(0, 0), operand(start, 0))


@pytest.mark.parametrize("start", [4, 28, -4, -28])
def test_a_partial_overlap_is_refused(start: int) -> None:
    with pytest.raises(ArgumentError) as caught:
        check_pair(operand(0), operand(start))
    assert f"out starts {start} bytes from x and overlaps it" in str(caught.value)
    assert "expected the same memory as x (in place) or none of it" in str(caught.value)


def test_an_output_of_another_dtype_is_refused() -> None:
    with pytest.raises(ArgumentError, match=r"out has dtype int32; expected that of x, float32"):
        check_pair(operand(0), operand(0, dtype="int32"))


def test_an_output_of_another_count_is_refused() -> None:
    with pytest.raises(ArgumentError, match=r"out has 7 elements; expected as many as x, 8"):
        check_pair(operand(0), operand(64, 7))


def test_an_output_of_another_shape_but_the_same_count_is_taken() -> None:
    x, out = np.zeros((2, 3), np.float32), np.zeros(6, np.float32)
    check_pair(host_operand("x", x, writeable=False), host_operand("out", out, writeable=True))


class _Lazy:
    """A torch tensor whose conjugation is only noted."""

    __cuda_array_interface__: ClassVar[dict[str, Any]] = {}

    def is_conj(self) -> bool:
        return True


def test_a_lazy_conjugate_is_refused() -> None:
    with pytest.raises(ArgumentError, match=r"lazy view of torch \(is_conj\).*x\.resolve_conj"):
        interop.device_operand("x", _Lazy(), 0, device=0, writeable=False)


def device_view(dtype: Any) -> Any:
    """What cuda.core says of a contiguous array of 6 elements on GPU 3."""
    return SimpleNamespace(
        is_device_accessible=True,
        device_id=3,
        dtype=dtype,
        shape=(2, 3),
        strides=None,
        ptr=0x1002,
        readonly=False,
    )


class _NamelessView:
    """What cuda.core makes of bfloat16 that came by DLPack, where ml_dtypes is not installed."""

    def __getattr__(self, name: str) -> Any:
        if name == "dtype":
            raise NotImplementedError
        return getattr(device_view(None), name)


class _TorchDtype:
    def __str__(self) -> str:
        return "torch.bfloat16"


@pytest.mark.parametrize("own", [_TorchDtype(), numpy_dtype(DTYPES["bfloat16"])], ids=str)
@pytest.mark.parametrize("view", [device_view(np.dtype("V2")), _NamelessView()], ids=["V2", "none"])
def test_a_bfloat16_array_on_a_gpu_says_its_type_itself(
    own: Any, view: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(interop, "_device_view", lambda *_: view)
    array = SimpleNamespace(dtype=own)
    operand = interop.device_operand("x", array, 0, device=3, writeable=True)
    assert operand == Operand(0x1002, 6, DTYPES["bfloat16"])


@pytest.mark.parametrize("array", [object(), SimpleNamespace(dtype="torch.float16")])
def test_of_another_array_on_a_gpu_cuda_core_says_the_type(
    array: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(interop, "_device_view", lambda *_: device_view(np.dtype(np.float16)))
    operand = interop.device_operand("x", array, 0, device=3, writeable=True)
    assert operand.dtype is DTYPES["float16"]


@pytest.mark.parametrize(("status", "ordinal", "found"), [(0, 1, 1), (1, 1, 3), (0, -2, 3)])
def test_where_an_array_is_that_does_not_say_it_cuda_is_asked(
    status: int, ordinal: int, found: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    import cuda.bindings

    runtime = SimpleNamespace(
        cudaError_t=SimpleNamespace(cudaSuccess=0),
        cudaPointerGetAttributes=lambda _: (status, SimpleNamespace(device=ordinal)),
    )
    monkeypatch.setattr(cuda.bindings, "runtime", runtime, raising=False)
    monkeypatch.setattr(interop, "_device_view", lambda *_: device_view(np.dtype(np.float16)))
    interop.device_operand("x", object(), 0, device=found, writeable=True)
    with pytest.raises(ArgumentError, match=rf"x is on device {found}; expected GPU 7"):
        interop.device_operand("x", object(), 0, device=7, writeable=True)


class _OnGpu:
    """An array that says by DLPack where it is, whatever cuda.core reads."""

    def __init__(self, kind: int, ordinal: int) -> None:
        self.where = kind, ordinal

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.where


@pytest.mark.parametrize(("where", "found"), [((2, 1), 1), ((2, 3), 3), ((13, 1), 3), ((3, 0), 3)])
def test_an_arrays_own_word_says_its_gpu(
    where: tuple[int, int], found: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(interop, "_device_view", lambda *_: device_view(np.dtype(np.float16)))
    interop.device_operand("x", _OnGpu(*where), 0, device=found, writeable=True)
    with pytest.raises(ArgumentError, match=rf"x is on device {found}; expected GPU 7"):
        interop.device_operand("x", _OnGpu(*where), 0, device=7, writeable=True)


def test_two_bytes_of_unknown_type_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interop, "_device_view", lambda *_: device_view(np.dtype("V2")))
    with pytest.raises(ArgumentTypeError, match=r"x: dtype is \|V2; expected one of"):
        interop.device_operand("x", object(), 0, device=3, writeable=True)


def test_a_class_derived_from_a_librarys_is_of_that_library() -> None:
    tensor = type("Tensor", (), {"__module__": "torch"})
    derived = type("Parameter", (tensor,), {"__module__": "my_model"})
    assert interop.library_of(derived()) == "torch"
    assert interop.library_of(np.empty(1)) is None


@pytest.mark.parametrize(
    ("stream", "handle"),
    [
        (7, 7),
        (SimpleNamespace(__cuda_stream__=lambda: (0, 8)), 8),
        (SimpleNamespace(cuda_stream=9), 9),
        (SimpleNamespace(ptr=10), 10),
        (SimpleNamespace(handle=SimpleNamespace(value=11)), 11),
        (SimpleNamespace(handle=SimpleNamespace(value=None)), 0),
        (None, 0),
    ],
)
def test_streams_of_every_library_have_a_handle(stream: Any, handle: int) -> None:
    assert interop.stream_handle(stream, np.empty(1)) == handle


@pytest.mark.parametrize("stream", ["fast", True, 1.5])
def test_what_is_no_stream_is_refused(stream: Any) -> None:
    with pytest.raises(
        ArgumentError, match=r"expected a stream of CuPy, torch, numba or cuda.core"
    ):
        interop.stream_handle(stream, np.empty(1))


@pytest.mark.parametrize(
    ("shape", "strides", "expected"),
    [
        ((2, 3), (3, 1), True),
        ((2, 3), (1, 2), False),
        ((2, 1, 3), (3, 99, 1), True),
        ((4,), (2,), False),
        ((0, 3), (7, 7), True),
        ((), (), True),
    ],
)
def test_contiguity_is_judged_by_shape_and_strides(
    shape: tuple[int, ...], strides: tuple[int, ...], expected: bool
) -> None:
    assert interop._is_c_contiguous(shape, strides) is expected
