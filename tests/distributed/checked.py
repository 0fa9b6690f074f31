"""Calls whose results are known, and inputs that show the order of a sum."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from shmemar.dtypes import DTYPES
from shmemar.host.exact import count_wrong, exact_input, exact_result, poison

if TYPE_CHECKING:
    from numpy.typing import NDArray

    import shmemar
    from shmemar.dtypes import ReduceOp
    from shmemar.host.arrays import Arrays


class Checked:
    """Calls all-reduce with exact inputs that differ at every call, and counts what is wrong."""

    def __init__(self, comm: shmemar.Communicator, arrays: Arrays) -> None:
        self.comm = comm
        self.arrays = arrays
        self.call = 0
        self.wrong: list[tuple[int, int]] = []

    def __call__(
        self, name: str, op: ReduceOp, count: int, *, offset: int = 0, in_place: bool = False
    ) -> None:
        """Reduce `count` elements that start `offset` elements into an aligned array."""
        self.call += 1
        dtype, comm = DTYPES[name], self.comm
        expected = exact_result(dtype, op, count, nranks=comm.size, call=self.call)
        given = exact_input(dtype, op, count, rank=comm.rank, call=self.call)
        values = np.zeros(count + offset + 1, given.dtype)
        values[offset : offset + count] = given
        whole = self.arrays.make(values)
        x = whole[offset : offset + count]
        frame = np.empty(count + 3, given.dtype)
        poison(frame)
        guarded = self.arrays.make(frame)
        out = x if in_place else guarded[1 : 1 + count]
        comm.allreduce(x, out=out, op=op)
        wrong = count_wrong(self.arrays.host(out), expected)
        if not in_place:
            wrong += count_wrong(self.arrays.host(whole), values)
            around = np.r_[0, count + 1 : count + 3]
            wrong += self.arrays.host(guarded)[around].tobytes() != frame[around].tobytes()
        if wrong:
            self.wrong.append((self.call, wrong))


def random_floats(name: str, count: int, rank: int) -> NDArray[Any]:
    """Numbers of many magnitudes, whose sums depend on order."""
    draw = np.random.default_rng(100 + rank)
    values: NDArray[Any] = draw.standard_normal(count) * 2.0 ** draw.integers(-20, 20, count)
    if DTYPES[name].is_complex:
        values = values + 1j * draw.standard_normal(count)
    return values.astype(name)
