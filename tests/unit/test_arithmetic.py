"""Reduction operators on data words, against numpy."""

from __future__ import annotations

import functools
import math
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shmemar.device.arithmetic import arithmetic
from shmemar.dtypes import DTYPES, DType, ReduceOp, supported_ops
from shmemar.host.average import scale_to_average
from shmemar.host.exact import numpy_dtype
from shmemar.layout import WORDS_PER_PACKET
from shmemar.spec import Kernel, KernelSpec, Protocol
from tests.unit.rounding import beside_halfway

FLAG = 0xDEADBEEF
COMBINATIONS = [(dtype, op) for dtype in DTYPES.values() for op in supported_ops(dtype)]
ORDERED = [(dtype, op) for dtype, op in COMBINATIONS if op in (ReduceOp.MIN, ReduceOp.MAX)]
FLOAT_ORDERED = [(dtype, op) for dtype, op in ORDERED if not dtype.is_integer]
NARROW = ["float16", "bfloat16"]
UFUNCS = {
    ReduceOp.SUM: np.add,
    ReduceOp.PROD: np.multiply,
    ReduceOp.MIN: np.minimum,
    ReduceOp.MAX: np.maximum,
    ReduceOp.AVG: np.add,
}
QUIET = {"float16": 1 << 9, "bfloat16": 1 << 6, "float32": 1 << 22, "float64": 1 << 51}


def name_of(value: Any) -> str:
    return str(value.name).lower()


def group_nbytes(dtype: DType, op: ReduceOp) -> int:
    """Data bytes that one thread reduces together."""
    spec = KernelSpec(Kernel.ONE_SHOT, Protocol.LL, dtype, op, 2)
    return 4 * spec.unit_words


def component(dtype: DType) -> np.dtype[Any]:
    if dtype.name == "bfloat16":
        return numpy_dtype(dtype)
    return np.dtype(f"<{dtype.kind.value[0]}{dtype.component_nbytes}")


def special_components(dtype: DType) -> list[bytes]:
    """Bytes of components where rounding, order and wrapping are at their worst."""
    numpys = component(dtype)
    if dtype.is_integer:
        info, width = np.iinfo(numpys), dtype.component_nbytes
        worst = (0, 1, -1, 2, info.min, info.max, info.max - 1, info.max // 2)
        return [(v % (1 << 8 * width)).to_bytes(width, "little") for v in worst]
    limits = ml_dtypes.finfo(numpys)
    plain = (0.0, -0.0, 1.0, -1.5, math.inf, -math.inf, limits.max, limits.smallest_subnormal)
    quiet = np.array([math.nan], numpys).view(f"<u{numpys.itemsize}")
    nans = (quiet[0], quiet[0] | 5, quiet[0] | 6)
    return [*(numpys.type(v).tobytes() for v in plain), *(bits.tobytes() for bits in nans)]


def groups(dtype: DType, op: ReduceOp) -> st.SearchStrategy[bytes]:
    """Data of one rank for one thread."""
    width = dtype.component_nbytes
    one = st.binary(min_size=width, max_size=width) | st.sampled_from(special_components(dtype))
    count = group_nbytes(dtype, op) // width
    return st.lists(one, min_size=count, max_size=count).map(b"".join)


def as_packets(data: bytes) -> list[int]:
    """Words of the packets that carry `data`."""
    pairs = np.frombuffer(data, "<u4").reshape(-1, 2).tolist()
    return [word for low, high in pairs for word in (low, FLAG, high, FLAG)]


def reduced(dtype: DType, op: ReduceOp, ranks: list[bytes]) -> bytes:
    """Reduce in rank order with the device functions, as a kernel does."""
    functions = arithmetic(dtype, op, len(ranks))
    packets = [word for data in ranks for word in as_packets(data)]
    step = group_nbytes(dtype, op) // 8 * WORDS_PER_PACKET
    with np.errstate(all="ignore"):
        values = [functions.unpack(packets, step * rank, 2) for rank in range(len(ranks))]
        total = functools.reduce(functions.combine, values)
        return np.array(functions.pack(functions.finish(total)), "<u4").tobytes()


def multiplied(left: Any, right: Any) -> Any:
    """Multiply complex numbers by the textbook formula: numpy's may fuse."""
    real = left[0::2] * right[0::2] - left[1::2] * right[1::2]
    imag = left[0::2] * right[1::2] + left[1::2] * right[0::2]
    return np.stack([real, imag], axis=-1).ravel()


def by_numpy(dtype: DType, op: ReduceOp, ranks: list[bytes]) -> Any:
    """Reduce the components in rank order with numpy."""
    rows = [np.frombuffer(data, component(dtype)) for data in ranks]
    is_complex_product = dtype.is_complex and op is ReduceOp.PROD
    with np.errstate(all="ignore"):
        if dtype.name in NARROW:
            rows = [row.astype(np.float32) for row in rows]
        total = functools.reduce(multiplied if is_complex_product else UFUNCS[op], rows)
        if op is ReduceOp.AVG:
            total = total.copy()
            scale_to_average(total, len(ranks))
        return total.astype(component(dtype))


def quieted(dtype: DType, data: bytes) -> bytes:
    """The same numbers, every NaN a quiet one."""
    numbers = np.frombuffer(data, component(dtype))
    bits = numbers.view(f"<u{dtype.component_nbytes}").copy()
    with np.errstate(invalid="ignore"):
        bits[np.isnan(numbers)] |= bits.dtype.type(QUIET[component(dtype).name])
    return bits.tobytes()


@pytest.mark.parametrize(("dtype", "op"), COMBINATIONS, ids=name_of)
@given(data=st.data())
def test_a_lone_ranks_bits_come_back(dtype: DType, op: ReduceOp, data: st.DataObject) -> None:
    own = data.draw(groups(dtype, op))
    is_calculated = dtype.name in NARROW or op is ReduceOp.AVG
    assert reduced(dtype, op, [own]) == (quieted(dtype, own) if is_calculated else own)


@pytest.mark.parametrize(("dtype", "op"), COMBINATIONS, ids=name_of)
@given(data=st.data())
def test_results_are_numpys_in_rank_order(dtype: DType, op: ReduceOp, data: st.DataObject) -> None:
    ranks = data.draw(st.lists(groups(dtype, op), min_size=2, max_size=5))
    result = np.frombuffer(reduced(dtype, op, ranks), component(dtype))
    expected = by_numpy(dtype, op, ranks)
    if dtype.name == "bfloat16":  # whose NaNs numpy's testing does not know
        result, expected = result.astype(np.float32), expected.astype(np.float32)
    np.testing.assert_array_equal(result, expected, strict=True)
    if (dtype, op) not in ORDERED:  # numpy's order of -0 and +0 is not defined
        numbers = expected == expected  # noqa: PLR0124
        assert result[numbers].tobytes() == expected[numbers].tobytes()


def lowest(values: list[Any]) -> Any:
    """Return the first NaN, or else the lowest, -0 being below +0."""
    nans = [value for value in values if value != value]  # noqa: PLR0124
    return nans[0] if nans else min(values, key=lambda value: (value, not np.signbit(value)))


def highest(values: list[Any]) -> Any:
    nans = [value for value in values if value != value]  # noqa: PLR0124
    return nans[0] if nans else max(values, key=lambda value: (value, not np.signbit(value)))


@pytest.mark.parametrize(("dtype", "op"), ORDERED, ids=name_of)
@given(data=st.data())
def test_min_and_max_take_one_operands_bits(
    dtype: DType, op: ReduceOp, data: st.DataObject
) -> None:
    ranks = data.draw(st.lists(groups(dtype, op), min_size=2, max_size=5))
    columns = zip(*(np.frombuffer(row, component(dtype)) for row in ranks), strict=True)
    choose = lowest if op is ReduceOp.MIN else highest
    expected = b"".join(choose(list(column)).tobytes() for column in columns)
    if dtype.name in NARROW:
        expected = quieted(dtype, expected)
    assert reduced(dtype, op, ranks) == expected


@pytest.mark.parametrize(("dtype", "op"), FLOAT_ORDERED, ids=name_of)
@pytest.mark.parametrize("is_swapped", [False, True])
def test_minus_zero_is_below_plus_zero(dtype: DType, op: ReduceOp, *, is_swapped: bool) -> None:
    count = 8 // dtype.component_nbytes
    negative, positive = (np.full(count, zero, component(dtype)).tobytes() for zero in (-0.0, 0.0))
    ranks = [positive, negative] if is_swapped else [negative, positive]
    assert reduced(dtype, op, ranks) == (negative if op is ReduceOp.MIN else positive)


@pytest.mark.parametrize(("dtype", "op"), FLOAT_ORDERED, ids=name_of)
@pytest.mark.parametrize("nnumbers", [0, 1, 2])
def test_the_first_nan_in_rank_order_is_the_result(
    dtype: DType, op: ReduceOp, nnumbers: int
) -> None:
    number, *_, first, second = special_components(dtype)
    ranks = [one * (8 // len(one)) for one in [*[number] * nnumbers, first, number, second]]
    assert reduced(dtype, op, ranks) == ranks[nnumbers]


@pytest.mark.parametrize("name", [name for name, each in DTYPES.items() if each.is_integer])
@pytest.mark.parametrize(
    ("op", "factor", "wrapped"), [(ReduceOp.SUM, 1, "min"), (ReduceOp.PROD, 2, "less two")]
)
def test_integers_wrap(name: str, op: ReduceOp, factor: int, wrapped: str) -> None:
    dtype = DTYPES[name]
    info = np.iinfo(component(dtype))
    count = 8 // dtype.component_nbytes
    left = np.full(count, info.max, component(dtype))
    right = np.full(count, factor, component(dtype))
    result = np.frombuffer(reduced(dtype, op, [left.tobytes(), right.tobytes()]), component(dtype))
    less_two = info.max - 1 if info.min == 0 else -2
    assert result.tolist() == [{"min": info.min, "less two": less_two}[wrapped]] * count


@pytest.mark.parametrize(("name", "largest"), [("uint8", 255), ("uint32", 2**32 - 1)])
@pytest.mark.parametrize("op", [ReduceOp.MIN, ReduceOp.MAX])
def test_numbers_without_a_sign_are_ordered_so(name: str, largest: int, op: ReduceOp) -> None:
    dtype = DTYPES[name]
    ones, many = (np.full(8 // dtype.itemsize, v, name).tobytes() for v in (1, largest))
    assert reduced(dtype, op, [ones, many]) == (ones if op is ReduceOp.MIN else many)


@pytest.mark.parametrize("name", NARROW)
def test_every_16_bit_float_comes_back(name: str) -> None:
    patterns = np.arange(1 << 16, dtype="<u2").tobytes()
    dtype = DTYPES[name]
    groups = [patterns[at : at + 8] for at in range(0, len(patterns), 8)]
    got = b"".join(reduced(dtype, ReduceOp.SUM, [group]) for group in groups)
    assert got == quieted(dtype, patterns)


@pytest.mark.parametrize("name", NARROW)
def test_every_16_bit_float_is_unpacked_to_its_float32(name: str) -> None:
    patterns = np.arange(1 << 16, dtype="<u2")
    unpack = arithmetic(DTYPES[name], ReduceOp.SUM, 1).unpack
    packets = as_packets(patterns.tobytes())
    got = np.array([value for at in range(0, len(packets), 4) for value in unpack(packets, at, 2)])
    assert got.dtype == np.float32
    expected = patterns.view(component(DTYPES[name])).astype(np.float32)
    numbers = ~np.isnan(expected)
    assert got[numbers].tobytes() == expected[numbers].tobytes()
    assert np.isnan(got[~numbers]).all()


@pytest.mark.parametrize("name", NARROW)
def test_sums_are_rounded_to_16_bits_as_numpy_rounds(name: str) -> None:
    numpys = component(DTYPES[name])
    values = beside_halfway(numpys)
    pack = arithmetic(DTYPES[name], ReduceOp.SUM, 1).pack
    packed = [pack(values[at : at + 4]) for at in range(0, len(values), 4)]
    with np.errstate(all="ignore"):
        expected = values.astype(numpys)
    assert np.array(packed, "<u4").tobytes() == expected.tobytes()


@pytest.mark.parametrize("name", NARROW)
@pytest.mark.parametrize("bits", [0x7F800001, 0x7FFFFFFF, 0xFF801000, 0xFFC00000])
def test_a_nan_is_rounded_to_a_quiet_nan(name: str, bits: int) -> None:
    dtype = DTYPES[name]
    nan = np.uint32(bits).view(np.float32)
    packed = arithmetic(dtype, ReduceOp.SUM, 1).pack((nan,) * 4)
    got = np.array(packed, "<u4").view(component(dtype))
    assert np.isnan(got).all()
    assert got.tobytes() == quieted(dtype, got.tobytes())
    assert np.signbit(got).tolist() == [bool(bits >> 31)] * 4


@pytest.mark.parametrize(("name", "large"), [("float16", 2048), ("bfloat16", 256)])
def test_a_sum_of_16_bit_floats_is_rounded_once(name: str, large: int) -> None:
    ranks = [np.full(4, v, component(DTYPES[name])).tobytes() for v in (large, 1, 1)]
    result = np.frombuffer(reduced(DTYPES[name], ReduceOp.SUM, ranks), component(DTYPES[name]))
    assert result.astype(np.float32).tolist() == [large + 2] * 4  # large + 1 would round to large


def test_an_average_of_large_16_bit_floats_does_not_overflow() -> None:
    ranks = [np.full(4, 65504, np.float16).tobytes()] * 3
    assert reduced(DTYPES["float16"], ReduceOp.AVG, ranks) == ranks[0]


@pytest.mark.parametrize("name", ["float32", "complex64"])
def test_an_average_is_the_sum_times_the_rounded_reciprocal(name: str) -> None:
    ranks = [np.full(8 // DTYPES[name].itemsize, v, name).tobytes() for v in (5, 0, 0, 0, 0)]
    result = np.frombuffer(reduced(DTYPES[name], ReduceOp.AVG, ranks), np.float32)
    assert result[0] == np.float32(5) * np.float32(0.2)


@pytest.mark.parametrize("name", ["complex64", "complex128"])
def test_a_complex_product_is_exact_on_small_integers(name: str) -> None:
    values = [np.array([z], name) for z in (1 + 2j, 3 - 1j, -2 + 5j)]
    result = reduced(DTYPES[name], ReduceOp.PROD, [value.tobytes() for value in values])
    assert np.frombuffer(result, name).tolist() == [(1 + 2j) * (3 - 1j) * (-2 + 5j)]


@pytest.mark.parametrize(("name", "bits"), [("complex64", 24), ("complex128", 53)])
def test_a_complex_product_rounds_both_products_alike(name: str, bits: int) -> None:
    x = 1 + 2.0 ** (1 - bits)  # x * x is not exact: a fused multiply-add would leave its error
    value = np.array([complex(x, x)], name)
    result = reduced(DTYPES[name], ReduceOp.PROD, [value.tobytes()] * 2)
    assert np.frombuffer(result, name).real.tolist() == [0.0]
