"""Inputs and results of checked all-reduces, against Python's integers."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from shmemar.dtypes import DTYPES, DType, ReduceOp, supported_ops
from shmemar.errors import ArgumentError
from shmemar.host.average import scale_to_average
from shmemar.host.exact import (
    COMBINE,
    exact_input,
    exact_limit,
    exact_result,
    largest_input,
    numpy_dtype,
)

NRANKS = 8
COMBINATIONS = [(dtype, op) for dtype in DTYPES.values() for op in supported_ops(dtype)]
REAL = [(dtype, op) for dtype, op in COMBINATIONS if not dtype.is_complex]
INTEGERS: dict[ReduceOp, Any] = {
    ReduceOp.SUM: sum,
    ReduceOp.PROD: math.prod,
    ReduceOp.MIN: min,
    ReduceOp.MAX: max,
}


def name_of(value: Any) -> str:
    return str(value.name).lower()


def wrapped(dtype: DType, value: int) -> int:
    """What is left of an integer in the bits of `dtype`."""
    info = np.iinfo(dtype.name)
    return (value - int(info.min)) % (int(info.max) - int(info.min) + 1) + int(info.min)


@pytest.mark.parametrize(("dtype", "op"), REAL, ids=name_of)
def test_the_result_of_eight_ranks_is_exact(dtype: DType, op: ReduceOp) -> None:
    inputs = [exact_input(dtype, op, 500, rank=rank, call=3) for rank in range(NRANKS)]
    result = exact_result(dtype, op, 500, nranks=NRANKS, call=3)
    assert {each.dtype for each in [*inputs, result]} == {numpy_dtype(dtype)}
    columns = zip(*([int(value) for value in each] for each in inputs), strict=True)
    if op is ReduceOp.AVG:  # an eighth of a sum is exact
        tops = [Fraction(sum(column), NRANKS) for column in columns]
        assert [Fraction(float(value)) for value in result] == tops
        return
    expected = [INTEGERS[op](column) for column in columns]
    if dtype.is_integer:
        expected = [wrapped(dtype, value) for value in expected]
    assert [int(value) for value in result] == expected


@pytest.mark.parametrize(("dtype", "op"), COMBINATIONS, ids=name_of)
def test_inputs_change_with_index_rank_and_call(dtype: DType, op: ReduceOp) -> None:
    here = exact_input(dtype, op, 100, rank=1, call=1)
    assert len(np.unique(here)) > 3
    assert (here != exact_input(dtype, op, 100, rank=2, call=1)).any()
    assert (here != exact_input(dtype, op, 100, rank=1, call=2)).any()


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=name_of)
def test_the_largest_input_leaves_room_for_eight_ranks(dtype: DType) -> None:
    limit = exact_limit(dtype)
    assert (limit is None) == dtype.is_integer
    assert limit is None or NRANKS * largest_input(dtype) <= limit


@pytest.mark.parametrize(("name", "limit"), [("float16", 2048), ("bfloat16", 256)])
def test_up_to_the_limit_every_integer_is_exact(name: str, limit: int) -> None:
    assert exact_limit(DTYPES[name]) == limit
    numbers = np.array([limit - 1, limit, limit + 1]).astype(numpy_dtype(DTYPES[name]))
    assert numbers.astype(np.float64).tolist() == [limit - 1, limit, limit]


def test_every_operator_is_one_of_numpys() -> None:
    assert set(COMBINE) == set(ReduceOp)


def test_an_average_of_complex_numbers_keeps_infinities_apart() -> None:
    total = np.array([complex(np.inf, 3), complex(-0.0, np.nan)], np.complex64)
    scale_to_average(total, 3)
    third = np.float32(1) / np.float32(3)
    assert total.real.tolist() == [np.inf, 0.0]
    assert np.signbit(total.real).tolist() == [False, True]
    assert total.imag[0] == np.float32(3) * third
    assert np.isnan(total.imag[1])


def test_bfloat16_without_ml_dtypes_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_such_type(name: str) -> None:
        raise TypeError(f"data type {name!r} not understood")

    monkeypatch.setattr("shmemar.host.exact.np.dtype", no_such_type)
    with pytest.raises(ArgumentError, match=r"dtype is bfloat16, .*pip install ml_dtypes"):
        numpy_dtype(DTYPES["bfloat16"])
