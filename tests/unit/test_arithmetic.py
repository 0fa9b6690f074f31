"""Reduction operators on data words, against numpy."""

from __future__ import annotations

import functools
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shmemar.device.arithmetic import arithmetic
from shmemar.dtypes import DTYPES, DType, Kind, ReduceOp, supported_ops
from shmemar.layout import WORDS_PER_PACKET
from shmemar.spec import Kernel, KernelSpec, Protocol

FLAG = 0xDEADBEEF
COMBINATIONS = [(dtype, op) for dtype in DTYPES.values() for op in supported_ops(dtype)]
ORDERED = [(dtype, op) for dtype, op in COMBINATIONS if op in (ReduceOp.MIN, ReduceOp.MAX)]
FLOAT_ORDERED = [(dtype, op) for dtype, op in ORDERED if dtype.kind is Kind.FLOAT]
UFUNCS = {
    ReduceOp.SUM: np.add,
    ReduceOp.PROD: np.multiply,
    ReduceOp.MIN: np.minimum,
    ReduceOp.MAX: np.maximum,
}


def name_of(value: Any) -> str:
    return str(value.name).lower()


def group_nbytes(dtype: DType, op: ReduceOp) -> int:
    """Data bytes that one thread reduces together."""
    spec = KernelSpec(Kernel.ONE_SHOT, Protocol.LL, dtype, op, 2)
    return 4 * spec.unit_words


def component(dtype: DType) -> np.dtype[Any]:
    return np.dtype(f"<{dtype.kind.value[0]}{dtype.component_nbytes}")


def special_components(dtype: DType) -> list[bytes]:
    """Bytes of components where rounding, order and wrapping are at their worst."""
    numpys = component(dtype)
    if dtype.kind is Kind.INT:
        info = np.iinfo(numpys)
        return [numpys.type(v).tobytes() for v in (0, 1, -1, 2, info.min, info.max, info.max - 1)]
    limits = np.finfo(numpys)
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
    functions = arithmetic(dtype, op)
    packets = [word for data in ranks for word in as_packets(data)]
    step = group_nbytes(dtype, op) // 8 * WORDS_PER_PACKET
    with np.errstate(all="ignore"):
        values = [functions.unpack(packets, step * rank, 2) for rank in range(len(ranks))]
        total = functools.reduce(functions.combine, values)
    return np.array(functions.pack(total), "<u4").tobytes()


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
        return functools.reduce(multiplied if is_complex_product else UFUNCS[op], rows)


@pytest.mark.parametrize(("dtype", "op"), COMBINATIONS, ids=name_of)
@given(data=st.data())
def test_a_lone_ranks_bits_come_back(dtype: DType, op: ReduceOp, data: st.DataObject) -> None:
    own = data.draw(groups(dtype, op))
    assert reduced(dtype, op, [own]) == own


@pytest.mark.parametrize(("dtype", "op"), COMBINATIONS, ids=name_of)
@given(data=st.data())
def test_results_are_numpys_in_rank_order(dtype: DType, op: ReduceOp, data: st.DataObject) -> None:
    ranks = data.draw(st.lists(groups(dtype, op), min_size=2, max_size=5))
    result = np.frombuffer(reduced(dtype, op, ranks), component(dtype))
    expected = by_numpy(dtype, op, ranks)
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


@pytest.mark.parametrize("name", ["int32", "int64"])
@pytest.mark.parametrize(
    ("op", "factor", "wrapped"), [(ReduceOp.SUM, 1, "min"), (ReduceOp.PROD, 2, "minus two")]
)
def test_integers_wrap(name: str, op: ReduceOp, factor: int, wrapped: str) -> None:
    dtype = DTYPES[name]
    info = np.iinfo(component(dtype))
    count = 8 // dtype.component_nbytes
    left = np.full(count, info.max, component(dtype))
    right = np.full(count, factor, component(dtype))
    result = np.frombuffer(reduced(dtype, op, [left.tobytes(), right.tobytes()]), component(dtype))
    assert result.tolist() == [{"min": info.min, "minus two": -2}[wrapped]] * count


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
