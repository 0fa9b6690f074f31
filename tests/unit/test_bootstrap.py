"""MPI's all-reduce of host arrays: what MPI is given, and what is made of its answer."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from shmemar.dtypes import DTYPES, DType, ReduceOp, supported_ops
from shmemar.host.bootstrap import Bootstrap
from shmemar.host.exact import COMBINE, exact_input, exact_result, numpy_dtype

NRANKS = 3
COMBINATIONS = [(dtype, op) for dtype in DTYPES.values() for op in supported_ops(dtype)]


class Comm:
    """Rank 0 of a communicator whose other ranks bring the inputs of `exact_input`."""

    def __init__(self, dtype: DType, op: ReduceOp, count: int) -> None:
        self.others = [
            exact_input(dtype, op, count, rank=rank, call=1) for rank in range(1, NRANKS)
        ]

    def Iallreduce(self, in_place: str, out: Any, *, op: str) -> Any:  # noqa: N802 - mpi4py's name
        assert in_place == "in place"
        assert out.dtype.itemsize >= 4, "MPI has no 16-bit floats, and bytes saturate in Open MPI"
        for other in self.others:
            shaped = other.astype(out.dtype).reshape(out.shape)
            out[...] = COMBINE[ReduceOp(op.lower())](out, shaped)
        return SimpleNamespace(Test=lambda: True)


def bootstrap_over(comm: Any) -> Bootstrap:
    made = object.__new__(Bootstrap)
    operators = {name: name for name in ("SUM", "PROD", "MIN", "MAX")}
    made._mpi = SimpleNamespace(IN_PLACE="in place", **operators)
    made._comm = comm
    made._timeout_s = 1.0
    made.rank, made.size = 0, NRANKS
    return made


@pytest.mark.parametrize("is_in_place", [False, True])
@pytest.mark.parametrize("shape", [(12,), (3, 4), ()])
@pytest.mark.parametrize(("dtype", "op"), COMBINATIONS, ids=lambda each: each.name.lower())
def test_mpi_reduces_every_type_and_operator(
    dtype: DType, op: ReduceOp, shape: tuple[int, ...], *, is_in_place: bool
) -> None:
    count = int(np.prod(shape, dtype=int))
    x = exact_input(dtype, op, count, rank=0, call=1).reshape(shape)
    before = x.copy()
    out = x if is_in_place else np.zeros(shape, numpy_dtype(dtype))
    with np.errstate(over="ignore"):
        bootstrap_over(Comm(dtype, op, count)).allreduce_host(x, out, op.value)
    expected = exact_result(dtype, op, count, nranks=NRANKS, call=1)
    assert out.tobytes() == expected.tobytes()
    assert is_in_place or x.tobytes() == before.tobytes()
