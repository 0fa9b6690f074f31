"""Element types and operators."""

from __future__ import annotations

from typing import Any

import pytest

from shmemar.dtypes import DTYPES, DType, Kind, ReduceOp, as_dtype, as_reduce_op, supported_ops
from shmemar.errors import ArgumentError, ArgumentTypeError
from shmemar.host.exact import numpy_dtype

every_dtype = pytest.mark.parametrize("dtype", DTYPES.values(), ids=lambda dtype: dtype.name)


def test_twelve_types_are_supported() -> None:
    floats = {"float16", "bfloat16", "float32", "float64", "complex64", "complex128"}
    assert set(DTYPES) == floats | {"int8", "int32", "int64", "uint8", "uint32", "uint64"}


@every_dtype
def test_a_dtype_agrees_with_numpys_of_that_name(dtype: DType) -> None:
    numpys = numpy_dtype(dtype)
    assert dtype.itemsize == numpys.itemsize
    assert dtype.is_complex == (numpys.kind == "c")
    assert (dtype.kind is Kind.INT) == (numpys.kind == "i")
    assert (dtype.kind is Kind.UINT) == (numpys.kind == "u")
    assert dtype.is_integer == (numpys.kind in "iu")
    assert dtype.component_nbytes in (1, 2, 4, 8)


@every_dtype
def test_a_dtype_is_found_by_its_name(dtype: DType) -> None:
    assert as_dtype(dtype.name) is dtype


def test_the_table_of_dtypes_is_read_only() -> None:
    with pytest.raises(TypeError):
        DTYPES["float8"] = DTYPES["float32"]  # type: ignore[index]


@pytest.mark.parametrize("name", ["float8", "bool", "uint16", "object", "Float32", ""])
def test_an_unknown_dtype_is_refused_with_the_list_of_known_ones(name: str) -> None:
    with pytest.raises(ArgumentTypeError) as caught:
        as_dtype(name)
    assert f"dtype is {name}" in str(caught.value)
    assert ", ".join(DTYPES) in str(caught.value)


@every_dtype
def test_complex_numbers_have_no_order_and_integers_no_average(dtype: DType) -> None:
    missing = {ReduceOp.MIN, ReduceOp.MAX} if dtype.is_complex else set()
    missing |= {ReduceOp.AVG} if dtype.is_integer else set()
    assert set(ReduceOp) - set(supported_ops(dtype)) == missing


@pytest.mark.parametrize("op", ReduceOp)
def test_an_operator_is_found_by_name_and_by_member(op: ReduceOp) -> None:
    assert as_reduce_op(op.value, DTYPES["float32"]) is op
    assert as_reduce_op(op, DTYPES["float32"]) is op


@pytest.mark.parametrize("op", ["mean", "SUM", "", None, 0, []])
def test_an_unknown_operator_is_refused_with_the_list_of_known_ones(op: Any) -> None:
    with pytest.raises(ArgumentError) as caught:
        as_reduce_op(op, DTYPES["float64"])
    assert f"op is {op!r}" in str(caught.value)
    assert "sum, prod, min, max, avg for float64" in str(caught.value)


@pytest.mark.parametrize("name", ["complex64", "complex128"])
@pytest.mark.parametrize("op", ["min", "max"])
def test_an_operator_that_the_dtype_lacks_is_refused_with_those_it_has(name: str, op: str) -> None:
    with pytest.raises(ArgumentError) as caught:
        as_reduce_op(op, DTYPES[name])
    assert f"op is {op!r}, which {name} does not define" in str(caught.value)
    assert "(complex numbers have no order); expected one of sum, prod, avg." in str(caught.value)


@pytest.mark.parametrize("name", [name for name, each in DTYPES.items() if each.is_integer])
def test_an_average_of_integers_is_refused_with_the_reason(name: str) -> None:
    with pytest.raises(ArgumentError) as caught:
        as_reduce_op("avg", DTYPES[name])
    assert f"op is 'avg', which {name} does not define" in str(caught.value)
    assert "(an average of integers is seldom an integer)" in str(caught.value)
    assert "expected one of sum, prod, min, max." in str(caught.value)
