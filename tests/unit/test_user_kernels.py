"""Elements, buffers and arguments of kernels that users write, without a job."""

from __future__ import annotations

from dis import get_instructions
from functools import partial
from typing import Any

import numpy as np
import pytest
from numba import njit

import shmemar
from shmemar.device import elements, native
from shmemar.dtypes import DTYPES
from shmemar.errors import ArgumentError, ArgumentTypeError
from shmemar.host import user_kernels
from shmemar.host.interop import Operand
from shmemar.host.scratch import Scratch
from shmemar.host.user_kernels import LLScratch
from shmemar.layout import LLLayout
from shmemar.spec import Kernel, KernelSpec, Protocol
from shmemar.user_spec import BufferSpec, UserKernelSpec, describe_code

SCALARS = [
    *("int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64"),
    *("float32", "float64", "complex64", "complex128"),
]
TUPLES: list[Any] = [
    *(("float32", length) for length in (2, 3, 4)),
    *(("int64", 2), ("float64", 2), ("uint32", 3)),
]
of = partial(BufferSpec.of, threads=1, slots=1, protocol="ll")


def values_of(name: str) -> list[Any]:
    """Values at the ends of a type's range, and every bit set."""
    scalar = np.dtype(name).type
    if np.dtype(name).kind in "iu":
        limits = np.iinfo(name)
        return [scalar(value) for value in (limits.min, limits.max, 0, 1, limits.max // 3)]
    patterns = np.arange(64, dtype=np.uint8) * 37 % 251
    few = np.frombuffer(patterns.tobytes(), name)[:3].tolist()
    return [scalar(value) for value in (-0.0, 1.5, np.inf, np.nan, *few)]


def bits(value: Any) -> bytes:
    return np.array(value).tobytes()


@pytest.mark.parametrize("dtype", [*SCALARS, *TUPLES], ids=str)
def test_an_element_goes_to_words_and_back_interpreted_and_compiled(dtype: Any) -> None:
    native.install()
    like = of(2, dtype).like
    first = values_of(dtype if isinstance(dtype, str) else dtype[0])
    # Not beside each other in a tuple: the same value twice would hide a swap.
    length = len(like) if isinstance(like, tuple) else 1
    turns = [tuple(np.roll(first, -i)[:length]) for i in range(len(first))]
    given = [turn if length > 1 else turn[0] for turn in turns]
    split = njit(lambda value: elements.words_from_element(value, like))
    join = njit(lambda a, b, c, d: elements.element_from_words(a, b, c, d, like))
    convert = njit(lambda value: elements.as_element(value, like))
    for value in given:
        packet = elements.words_from_element(value, like)
        assert tuple(split(value)) == packet
        contents = np.array(packet, np.uint32).tobytes()
        assert contents == bits(value).ljust(16, b"\0")
        found = elements.element_from_words(*packet, like)
        compiled = join(*map(np.uint32, packet))
        assert bits(found) == bits(value)
        assert bits(np.array(compiled, bits_dtype(dtype))) == bits(value)
        assert bits(np.array(convert(value), bits_dtype(dtype))) == bits(value)


def bits_dtype(dtype: Any) -> Any:
    return dtype if isinstance(dtype, str) else dtype[0]


def test_values_are_converted_to_the_buffers_type() -> None:
    native.install()
    like = of(2, "float32").like
    convert = njit(lambda value: elements.as_element(value, like))
    for value in (3, 1e-3, np.int8(-4)):
        assert convert(value) == elements.as_element(value, like) == np.float32(value)
    for name in ("int8", "int16", "int32", "int64", "uint8"):
        whole = of(2, name).like
        convert = njit(lambda value, whole=whole: elements.as_element(value, whole))
        some: list[Any] = [-3.5, 7.9, -1.0, 3, np.int64(-100)]
        for value in some:
            if name != "uint8" or value > 0:
                assert convert(value) == elements.as_element(value, whole) == int(value)
    pair = of(2, ("float32", 2)).like
    convert = njit(lambda value: elements.as_element(value, pair))
    assert tuple(convert((1, 2.5))) == elements.as_element((1, 2.5), pair) == (1.0, 2.5)


@pytest.mark.parametrize(
    ("nranks", "at_once"), [(1, 1), (8, 8), (15, 15), (16, 8), (64, 8)], ids=str
)
def test_arrays_hold_the_packets_of_the_ranks_received_at_once(nranks: int, at_once: int) -> None:
    peers = (0,) * nranks
    for dtype, packets in (("float32", 1), ("complex64", 1), ("complex128", 2), (("f4", 3), 2)):
        like = of(2, dtype).like
        assert len(elements.packet_array(peers, like)) == 4 * packets * nranks
        assert len(elements.part_array(peers, like)) == 4 * packets * at_once


@pytest.mark.parametrize(
    ("dtype", "ll", "sentinel", "word"),
    [
        ("float32", 1, 1, 4),
        ("complex64", 1, 1, 4),
        ("float64", 1, 1, 8),
        ("complex128", 2, 1, 8),
        (("float32", 3), 2, 1, 4),
        (("float64", 2), 2, 1, 8),
    ],
    ids=str,
)
def test_packets_of_an_element(dtype: Any, ll: int, sentinel: int, word: int) -> None:
    plain = of(3, dtype, threads=129, slots=2)
    assert (plain.npackets, plain.machine_word_nbytes, plain.nthreads) == (ll, 0, 256)
    assert plain.layout == LLLayout(3, 256 * 2 * ll, 2)
    empty = of(3, dtype, threads=129, slots=2, protocol="sentinel")
    assert (empty.npackets, empty.machine_word_nbytes) == (sentinel, word)
    assert empty.layout == LLLayout(3, 256 * 2 * sentinel, 3)


def test_scratch_nbytes_counts_buffers_ranks_threads_slots_and_packets() -> None:
    assert shmemar.scratch_nbytes(4, "float32", threads=1000) == 2 * 4 * 1024 * 16
    wide = shmemar.scratch_nbytes(4, ("f8", 2), threads=128, slots=3)
    assert wide == 2 * 4 * 128 * 3 * 2 * 16
    empty = shmemar.scratch_nbytes(4, ("f8", 2), threads=128, slots=3, protocol="sentinel")
    assert empty == 3 * 4 * 128 * 3 * 16
    with pytest.raises(ArgumentError, match=r"nranks is 65; expected 1 to 64"):
        shmemar.scratch_nbytes(65, "float32", threads=1)


@pytest.mark.parametrize(
    "dtype",
    [
        *("float16", "bool", "U3", ">f4", ("f4", 5), ("int8", 4), ("complex64", 2)),
        *(("f4", (2, 2)), np.dtype([("a", "f4")]), "datetime64[s]", ("f4", 1), "longdouble"),
    ],
    ids=str,
)
def test_what_is_no_element_is_refused(dtype: Any) -> None:
    with pytest.raises(ArgumentTypeError, match=r"dtype is .*; expected an integer of 8 to 64"):
        of(2, dtype)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        *(
            ({"dtype": dtype}, ArgumentTypeError, "which numpy does not know")
            for dtype in (("f4", -1), ("f4", "x"), {"names": ["a"]}, "f4,,")
        ),
        ({"dtype": None}, ArgumentTypeError, "dtype is None; expected one"),
        ({"dtype": "flaot32"}, ArgumentTypeError, "dtype is 'flaot32', which numpy does not know"),
        ({"threads": 0}, ArgumentError, "threads is 0; expected a positive integer"),
        ({"threads": 1.5}, ArgumentError, "threads is 1.5"),
        ({"slots": True}, ArgumentError, "slots is True"),
        ({"slots": -1}, ArgumentError, "slots is -1"),
        (
            {"dtype": "complex128", "threads": 1 << 20, "slots": 1025},
            ArgumentError,
            "threads is 1048576 and slots 1025, of 2 packets each; expected at most 2147483648",
        ),
        ({"protocol": "ll128"}, ArgumentError, "protocol is 'll128'; expected one of ll, sentinel"),
        ({"protocol": "pull"}, ArgumentError, "protocol is 'pull'; expected one of ll, sentinel"),
        (
            {"dtype": "int32", "protocol": "sentinel"},
            ArgumentError,
            "sentinel, and dtype int32, in which every value may be data",
        ),
    ],
    ids=str,
)
def test_other_arguments_of_a_buffer_are_refused(
    arguments: dict[str, Any], error: type[Exception], message: str
) -> None:
    call = {"dtype": "float32", "threads": 1, "slots": 1, "protocol": "ll", **arguments}
    with pytest.raises(error, match=message):
        BufferSpec.of(2, call.pop("dtype"), **call)


def a_buffer(dtype: Any = "float32") -> LLScratch:
    spec = of(2, dtype, threads=300, slots=2)
    return LLScratch(spec, Scratch(spec.layout, None, None))  # type: ignore[arg-type]


def test_a_buffer_says_what_it_is() -> None:
    buffer = a_buffer(("float32", 2))
    assert (buffer.threads, buffer.slots) == (384, 2)
    assert buffer.dtype == np.dtype(("float32", (2,)))
    assert buffer.nbytes == shmemar.scratch_nbytes(2, ("float32", 2), threads=300, slots=2)
    assert repr(buffer) == f"<shmemar.LLScratch float32x2/ll, 384 threads x 2 slots, {49152} bytes>"
    assert a_buffer().dtype == np.dtype("float32")


def nothing(ll: Any, thread: int, nthreads: int) -> None:
    """A kernel."""


def test_what_is_launched_is_checked() -> None:
    mine, other = a_buffer(), a_buffer()
    user_kernels.check_kernel(nothing, mine, [mine])
    for kernel in ("f", np.sum, njit(nothing), None):
        with pytest.raises(ArgumentTypeError, match=r"kernel is \w+; expected a plain Python func"):
            user_kernels.check_kernel(kernel, mine, [mine])

    def asserts(ll: Any, thread: int, nthreads: int) -> None:
        assert thread < nthreads

    def raises(ll: Any, thread: int, nthreads: int) -> None:
        def inner() -> None:
            raise ValueError

        inner()

    for kernel in (asserts, raises):
        with pytest.raises(ArgumentError, match=f"kernel {kernel.__name__} has a raise or an asse"):
            user_kernels.check_kernel(kernel, mine, [mine])
    with pytest.raises(ArgumentTypeError, match="buffer is ndarray; expected what ll_buffer"):
        user_kernels.check_kernel(nothing, np.zeros(3), [mine])
    with pytest.raises(ArgumentError, match="buffer is another communicator's"):
        user_kernels.check_kernel(nothing, other, [mine])


def test_a_kernel_is_looked_through_once_and_again_when_its_code_is_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[Any] = []

    def count(code: Any) -> Any:
        seen.append(code)
        return get_instructions(code)

    def first(ll: Any, thread: int, nthreads: int) -> None:
        """Nothing."""

    def second(ll: Any, thread: int, nthreads: int) -> None:
        raise ValueError

    monkeypatch.setattr(user_kernels, "get_instructions", count)
    user_kernels.check_function(first)
    user_kernels.check_function(first)
    assert seen == [first.__code__]
    first.__code__ = second.__code__
    for _ in range(2):
        with pytest.raises(ArgumentError, match="kernel first has a raise or an assert"):
            user_kernels.check_function(first)


@pytest.mark.parametrize(
    ("threads", "max_blocks", "blocks"),
    [
        (None, None, 3),
        (1, None, 1),
        (129, None, 2),
        (384, None, 3),
        (384, 2, 2),
        (np.int8(3), 5, 1),
    ],
)
def test_the_grid_has_whole_blocks(threads: Any, max_blocks: int | None, blocks: int) -> None:
    assert user_kernels.grid_of(threads, a_buffer().spec, max_blocks).blocks == blocks


@pytest.mark.parametrize("threads", [0, 385, 2.0, True, "3"])
def test_more_threads_than_the_buffer_has_are_refused(threads: Any) -> None:
    with pytest.raises(ArgumentError, match=r"threads is .*; expected 1 to 384"):
        user_kernels.grid_of(threads, a_buffer().spec, None)


def test_numbers_become_what_kernels_take() -> None:
    as_scalar = partial(user_kernels.as_scalar, "arguments[0]")
    for value in (3, -(2**63), True, np.uint8(7), np.True_):
        got = as_scalar(value)
        assert type(got) is np.int64
        assert got == value
    for real in (0.5, np.float32(0.25)):
        assert type(as_scalar(real)) is np.float64
    assert as_scalar(np.zeros(3)) is None
    with pytest.raises(
        ArgumentError, match=r"arguments\[0\] is 9223372036854775808; expected an i"
    ):
        as_scalar(2**63)
    with pytest.raises(
        ArgumentTypeError, match=r"arguments\[0\] is complex; expected an array, an"
    ):
        as_scalar(1j)


def test_arguments_are_described_viewed_and_taken_apart() -> None:
    array = Operand(0x1000, 6, DTYPES["float32"])
    half = Operand(0x2000, 4, DTYPES["bfloat16"])
    assert user_kernels.type_of(array) == "float32[:]"
    assert user_kernels.type_of(half) == "uint16[:]"
    assert user_kernels.type_of(np.int64(3)) == "int64"
    assert user_kernels.leaves_of(array) == [0, 0, 6, 4, 0x1000, 6, 4]
    assert user_kernels.leaves_of(np.float64(1.0)) == [0x3FF0000000000000]
    assert user_kernels.leaves_of(np.int64(-1)) == [2**64 - 1]
    table = np.arange(6, dtype=np.float16).reshape(2, 3)
    seen = user_kernels.view_of(table)
    assert (seen.shape, seen.dtype) == ((6,), np.dtype(np.uint16))
    seen[0] = 0x3C00
    assert table[0, 0] == 1.0
    assert user_kernels.view_of(np.zeros((2, 2))).dtype == np.dtype(np.float64)


def test_a_failure_records_word_names_a_users_kernel() -> None:
    def add(ll: Any, thread: int, nthreads: int) -> None:
        """A kernel whose name is an instruction's."""

    buffer = of(2, "float32", protocol="sentinel")
    spec = UserKernelSpec(add, buffer, ("float32[:]",))
    assert describe_code(spec.code) == ("add", Protocol.SENTINEL, 128)
    assert spec.code == UserKernelSpec(add, buffer, ()).code
    assert (spec.symbol, spec.nranks) == ("user_add", 2)
    other = UserKernelSpec(lambda ll, thread, nthreads: None, of(2, "int8"), ())
    assert other.code != spec.code
    assert describe_code(other.code) == ("<lambda>", Protocol.LL, 128)
    assert other.symbol == "user__lambda_"
    plain = KernelSpec(
        Kernel.ONE_SHOT, Protocol.LL, DTYPES["float32"], shmemar.ReduceOp.SUM, nranks=2
    )
    assert describe_code(plain.code) == (plain.name, Protocol.LL, 1)


def test_numbas_error_of_a_users_kernel_is_the_users() -> None:
    from numba.core.errors import TypingError

    def fail() -> None:
        raise TypingError("no such thing")

    spec = UserKernelSpec(nothing, of(2, "int8"), ())
    with pytest.raises(ArgumentError, match=r"kernel nothing could not be compiled.*\n?no such"):
        user_kernels.compiled(fail, spec)
    own = KernelSpec(
        Kernel.ONE_SHOT, Protocol.LL, DTYPES["float32"], shmemar.ReduceOp.SUM, nranks=2
    )
    with pytest.raises(TypingError):
        user_kernels.compiled(fail, own)
    assert user_kernels.compiled(lambda: 3, spec) == 3
