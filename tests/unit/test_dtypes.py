"""Element types and operators."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from shmemar.dtypes import DTYPES, DType, Kind, ReduceOp, as_dtype, as_reduce_op, supported_ops
from shmemar.errors import ArgumentError, ArgumentTypeError

every_dtype = pytest.mark.parametrize("dtype", DTYPES.values(), ids=lambda dtype: dtype.name)


def test_six_types_are_supported() -> None:
    assert set(DTYPES) == {"float32", "float64", "int32", "int64", "complex64", "complex128"}


@every_dtype
def test_a_dtype_agrees_with_numpys_of_that_name(dtype: DType) -> None:
    numpys = np.dtype(dtype.name)
    assert dtype.itemsize == numpys.itemsize
    assert dtype.is_complex == (numpys.kind == "c")
    assert (dtype.kind is Kind.INT) == (numpys.kind == "i")
    assert dtype.component_nbytes in (4, 8)


@every_dtype
def test_a_dtype_is_found_by_its_name(dtype: DType) -> None:
    assert as_dtype(dtype.name) is dtype


def test_the_table_of_dtypes_is_read_only() -> None:
    with pytest.raises(TypeError):
        DTYPES["float16"] = DTYPES["float32"]  # type: ignore[index]


@pytest.mark.parametrize("name", ["float16", "bool", "uint32", "object", "Float32", ""])
def test_an_unknown_dtype_is_refused_with_the_list_of_known_ones(name: str) -> None:
    with pytest.raises(ArgumentTypeError) as caught:
        as_dtype(name)
    assert f"dtype is {name}" in str(caught.value)
    assert ", ".join(DTYPES) in str(caught.value)


@every_dtype
def test_complex_numbers_have_no_order(dtype: DType) -> None:
    ordered = {ReduceOp.MIN, ReduceOp.MAX}
    assert set(ReduceOp) - set(supported_ops(dtype)) == (ordered if dtype.is_complex else set())


@pytest.mark.parametrize("op", ReduceOp)
def test_an_operator_is_found_by_name_and_by_member(op: ReduceOp) -> None:
    assert as_reduce_op(op.value, DTYPES["int32"]) is op
    assert as_reduce_op(op, DTYPES["int32"]) is op


@pytest.mark.parametrize("op", ["mean", "SUM", "", None, 0, []])
def test_an_unknown_operator_is_refused_with_the_list_of_known_ones(op: Any) -> None:
    with pytest.raises(ArgumentError) as caught:
        as_reduce_op(op, DTYPES["float64"])
    assert f"op is {op!r}" in str(caught.value)
    assert "sum, prod, min, max for float64" in str(caught.value)


@pytest.mark.parametrize("name", ["complex64", "complex128"])
@pytest.mark.parametrize("op", ["min", "max"])
def test_an_operator_that_the_dtype_lacks_is_refused_with_those_it_has(name: str, op: str) -> None:
    with pytest.raises(ArgumentError) as caught:
        as_reduce_op(op, DTYPES[name])
    assert f"op is {op!r}, which {name} does not define" in str(caught.value)
    assert "sum, prod." in str(caught.value)
