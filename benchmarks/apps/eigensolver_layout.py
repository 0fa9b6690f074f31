"""Which rank has which columns of the matrix, and what a solve needs of memory.

Columns are dealt in blocks, in turn: block b is of rank ``b % size``. A rank keeps its columns side
by side, in rising order:

    global   | block 0 | block 1 | block 2 | block 3 |      size 2, block 4, n 14
    column    0  ..  3  4  ..  7  8  .. 11  12 .. 13
    rank           0         1         0         1
    local     0  ..  3  0  ..  3  4  ..  7   4 ..  5
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from shmemar.errors import ArgumentError

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["DTYPES", "MAX_BLOCK", "Layout", "Needed", "Panel", "check_problem", "needed"]

DTYPES = ("float32", "float64", "complex64", "complex128")
"""Element types of a problem."""

MAX_BLOCK = 128
"""Columns of a block at most: kernels keep a row of V and W in shared memory."""


@dataclass(frozen=True)
class Panel:
    """A block of columns that is eliminated at once.

    Attributes:
        start: Its first column.
        width: Its columns.
        owner: The rank that has them.
    """

    start: int
    width: int
    owner: int

    @property
    def stop(self) -> int:
        """The column behind its last one."""
        return self.start + self.width


@dataclass(frozen=True)
class Layout:
    """Block-cyclic columns of an n x n matrix, as one rank sees them.

    There may be fewer columns than ranks: ranks without columns take part in everything else.

    Attributes:
        n: Rows and columns.
        block: Columns of a block; the last one may have fewer.
        rank: The own rank.
        size: Number of ranks.
    """

    n: int
    block: int
    rank: int
    size: int

    @cached_property
    def own(self) -> NDArray[np.int64]:
        """The own columns, in rising order."""
        columns = np.arange(self.n)
        own: NDArray[np.int64] = columns[columns // self.block % self.size == self.rank]
        return own

    @cached_property
    def panels(self) -> tuple[Panel, ...]:
        """All blocks, in the order in which they are eliminated."""
        starts = range(0, self.n, self.block)
        return tuple(
            Panel(start, min(self.block, self.n - start), start // self.block % self.size)
            for start in starts
        )

    def own_before(self, column: int) -> int:
        """How many of the own columns are left of `column`: its local number, if it is own."""
        cycles, rest = divmod(column, self.block * self.size)
        return cycles * self.block + min(max(rest - self.rank * self.block, 0), self.block)

    def nsums(self, dtype: Any) -> int:
        """All-reduces of a tridiagonalisation: one for each column that is reflected.

        A real column of one element below the diagonal is reduced already; a complex one is not,
        as that element has to become real.
        """
        return max(self.n - (1 if np.dtype(dtype).kind == "c" else 2), 0)


@dataclass(frozen=True)
class Needed:
    """Memory of one rank, in bytes, beside the matrices A and B.

    Attributes:
        arrays: Where the arrays are: on the GPU, or on the host.
        host: On the host for the tridiagonal eigenproblem.
    """

    arrays: int
    host: int


def needed(layout: Layout, dtype: Any) -> Needed:
    """Say what a solver takes at most, workspace of libraries left out.

    Whole matrices: the reflectors, Cholesky's factor and a copy of it. Own columns: those of C, two
    on the way there, and two of the eigenvectors; a twentieth of them for shares of sums. On the
    host: eigenvectors of the tridiagonal matrix, and as much workspace of LAPACK's stevd.
    """
    n, nown, itemsize = layout.n, len(layout.own), np.dtype(dtype).itemsize
    elements = 3 * n * n + 5 * n * nown + n * nown // 20 + 4 * n * layout.block
    return Needed(elements * itemsize, 2 * n * n * 8)


def check_problem(n: Any, dtype: Any, block: Any) -> np.dtype[Any]:
    """Check size, type and block of a problem.

    Returns:
        The element type.

    Raises:
        ArgumentError: One of them can't be.
    """
    for name, value, most in (("n", n, None), ("block", block, MAX_BLOCK)):
        if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < 1:
            raise ArgumentError(f"{name} is {value!r}; expected a whole number of 1 or more.")
        if most is not None and value > most:
            raise ArgumentError(f"{name} is {value}; expected {most} at most.")
    try:
        found: np.dtype[Any] = np.dtype(dtype)
    except TypeError:
        found = np.dtype(object)
    if found.name not in DTYPES:
        raise ArgumentError(f"dtype is {dtype}; expected one of {', '.join(DTYPES)}.")
    return found
