"""Arrays of an all-reduce that is measured: exact inputs that differ from call to call."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from shmemar.host.arrays import Arrays
from shmemar.host.exact import COMBINE, count_wrong, exact_input, exact_result, numpy_dtype
from shmemar.spec import Backend

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    import shmemar
    from shmemar.dtypes import DType, ReduceOp

__all__ = ["Buffers", "Case", "empty_array"]

MAX_BUFFERS, MIN_BUFFERS = 8, 4
"""Inputs that take turns. A slot is written again two calls later, so there must be more than 2."""

BUFFERS_NBYTES = 8 << 20
"""Inputs and outputs stay within this where they can, so that L2 holds those of all ranks."""


@dataclass(frozen=True)
class Case:
    """What is measured.

    Attributes:
        dtype: Element type.
        op: Operator.
        count: Elements.
        in_place: True to reduce in place.
        chained: True to make each call depend on the data of the one before (`device`, `graph`).
        samples: Samples; for `device` launches, for `graph` replays, for `eager` calls.
        repeats: Collectives a sample (`device` and `graph`).
    """

    dtype: DType
    op: ReduceOp
    count: int
    in_place: bool = False
    chained: bool = False
    samples: int = 30
    repeats: int = 200

    @property
    def nbytes(self) -> int:
        """Bytes of the message."""
        return self.count * self.dtype.itemsize


class Buffers:
    """Inputs and outputs: call i of a sample uses number ``i % nbuffers``.

    Attributes:
        case: What they are for.
        nbuffers: How many there are of each.
        stride_nbytes: Bytes from one to the next.
    """

    def __init__(
        self,
        comm: shmemar.Communicator,
        case: Case,
        empty: Callable[[tuple[int, ...], str], Any],
    ) -> None:
        """Make them.

        Args:
            comm: The ranks.
            case: What they are for.
            empty: ``empty(shape, dtype)`` makes the arrays that are reduced.
        """
        self.case = case
        self._arrays = Arrays.of(comm.backend)
        self.stride_nbytes = -(-case.nbytes // 128) * 128
        fits = 2 * MAX_BUFFERS * self.stride_nbytes <= BUFFERS_NBYTES
        self.nbuffers = MAX_BUFFERS if fits else MIN_BUFFERS
        self.npool = 2 * self.nbuffers
        self._is_head = case.chained and comm.rank == 0
        self._reduce = COMBINE[case.op]
        rows = self.npool, case.count
        self._pool = []
        self._results = np.empty(rows, numpy_dtype(case.dtype))
        self._others = np.empty(rows, numpy_dtype(case.dtype))
        for call in range(self.npool):
            what = case.dtype, case.op, case.count
            mine = exact_input(*what, rank=comm.rank, call=call)
            self._pool.append(self._arrays.make(mine))
            self._results[call] = exact_result(*what, nranks=comm.size, call=call)
            if case.chained:
                self._others[call] = self._all_but_the_head(comm.size, call)
        padded = self.nbuffers, self.stride_nbytes // case.dtype.itemsize
        self._x = empty(padded, case.dtype.name)
        self._out = self._x if case.in_place else empty(padded, case.dtype.name)

    def source(self, call: int) -> Any:
        """What call number `call` of a sample reduces."""
        return self._x[0 if self._is_head else call % self.nbuffers, : self.case.count]

    def destination(self, call: int) -> Any:
        """Where it goes."""
        if self._is_head:
            return self.source(call)
        return self._out[call % self.nbuffers, : self.case.count]

    @property
    def source_stride(self) -> int:
        """Bytes from one input to the next."""
        return 0 if self._is_head else self.stride_nbytes

    @property
    def destination_stride(self) -> int:
        """Bytes from one output to the next."""
        return 0 if self._is_head else self.stride_nbytes

    def fill(self, sample: int) -> None:
        """Put in the inputs of a sample, and poison the outputs."""
        if not self.case.in_place:
            self._out.view(np.uint8)[...] = 0xA5
        for buffer in range(self.nbuffers):
            self._x[buffer, : self.case.count] = self._pool[(sample + buffer) % self.npool]

    def count_wrong(self, sample: int, repeats: int, runs: int = 1) -> int:
        """Count the wrong elements that `runs` runs of `repeats` calls have left."""
        if not self.case.chained:
            return sum(
                count_wrong(
                    self._arrays.host(self.destination(buffer)),
                    self._results[(sample + buffer) % self.npool],
                )
                for buffer in range(min(repeats, self.nbuffers))
            )
        total = self._first_of_the_head(sample)
        left: dict[int, NDArray[Any]] = {}
        for call in [*range(repeats)] * runs:
            buffer = call % self.nbuffers
            total = self._reduce(total, self._others[(sample + buffer) % self.npool])
            left[0 if self._is_head else buffer] = total
        return sum(
            count_wrong(self._arrays.host(self.destination(buffer)), expected)
            for buffer, expected in left.items()
        )

    def _first_of_the_head(self, sample: int) -> NDArray[Any]:
        case = self.case
        call = sample % self.npool
        return exact_input(case.dtype, case.op, case.count, rank=0, call=call)

    def _all_but_the_head(self, nranks: int, call: int) -> NDArray[Any]:
        case = self.case
        if nranks == 1:
            return np.full(case.count, 0, case.dtype.name)
        total = exact_input(case.dtype, case.op, case.count, rank=1, call=call)
        for rank in range(2, nranks):
            mine = exact_input(case.dtype, case.op, case.count, rank=rank, call=call)
            total = self._reduce(total, mine)
        return total


def empty_array(backend: Backend, shape: tuple[int, ...], dtype: str) -> Any:
    """An array of the backend's library: CuPy's, or numpy's of emulated ranks."""
    if backend is Backend.EMULATED:
        return np.empty(shape, dtype)
    import cupy

    return cupy.empty(shape, dtype)
