"""Extents of the eigensolver's blocks of threads, and what its kernels call, for numba-cuda."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from numba import cuda

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy as np

__all__ = ["Parts", "Shape", "build_parts"]

F = TypeVar("F")


@dataclass(frozen=True)
class Shape:
    """Extents of blocks of threads.

    Attributes:
        rows: Rows of a block of steps 1, 2 and 5 and of `add_tiles`; a power of 2, 32 for whole
            lines.
        parts: Threads a row, which share its terms; a power of 2, of which `rows` is a multiple.
        tile_rows: Rows of a tile; it has two threads a row.
        tile_columns: Columns of a tile, of which ``2 * tile_rows`` is a multiple.
    """

    rows: int = 32
    parts: int = 8
    tile_rows: int = 64
    tile_columns: int = 32

    @property
    def row_threads(self) -> tuple[int, int]:
        """Threads of a row block."""
        return self.rows, self.parts

    @property
    def tile_threads(self) -> tuple[int, int]:
        """Threads of a tile."""
        return self.tile_rows, 2


class Parts(NamedTuple):
    """Functions of the device, which kernels take into their closures.

    Attributes:
        conj: Complex conjugate.
        square_of: Square of the modulus, real.
        is_real: Whether an element has no imaginary part.
        add_shares: Sum of what blocks have left, from one number to another, in every thread.
        leave_share: Sum of a block's values, left at its number.
        add_parts: Sum of what the threads of a row have found.
        column_of: Global number of an own column.
    """

    conj: Callable[..., Any]
    square_of: Callable[..., Any]
    is_real: Callable[..., Any]
    add_shares: Callable[..., Any]
    leave_share: Callable[..., None]
    add_parts: Callable[..., Any]
    column_of: Callable[..., Any]


def build_parts(dtype: np.dtype[Any], block: int, shape: Shape) -> Parts:
    """Make the functions for an element type, a block size, and extents of blocks of threads."""
    real_zero = dtype.type(0).real.dtype.type(0)
    ROWS, PARTS = shape.rows, shape.parts
    threads = ROWS * PARTS

    if dtype.kind == "c":

        @_device
        def conj(x: Any) -> Any:
            return x.conjugate()

        @_device
        def square_of(x: Any) -> Any:
            return x.real * x.real + x.imag * x.imag

        @_device
        def is_real(x: Any) -> Any:
            return x.imag == real_zero

    else:

        @_device
        def conj(x: Any) -> Any:
            return x

        @_device
        def square_of(x: Any) -> Any:
            return x * x

        @_device
        def is_real(x: Any) -> Any:
            return True

    @_device
    def add_up(buffer: Any, thread: Any, count: Any) -> None:
        """Leave the sum of `count` elements, a power of 2, in the first one."""
        width = count // 2
        while width > 0:
            if thread < width:
                buffer[thread] += buffer[thread + width]
            cuda.syncthreads()
            width //= 2

    @_device
    def add_shares(shares: Any, first: Any, stop: Any, buffer: Any, nothing: Any) -> Any:
        """The sum of what blocks left, in every thread."""
        thread = cuda.threadIdx.y * ROWS + cuda.threadIdx.x
        total = nothing
        at = first + thread
        while at < stop:
            total += shares[at]
            at += threads
        buffer[thread] = total
        cuda.syncthreads()
        add_up(buffer, thread, threads)
        total = buffer[0]
        cuda.syncthreads()
        return total

    @_device
    def leave_share(shares: Any, block_number: Any, value: Any, buffer: Any) -> None:
        """Add up a block's values, one of each thread with y 0, and leave the sum."""
        x, y = cuda.threadIdx.x, cuda.threadIdx.y
        if y == 0:
            buffer[x] = value
        cuda.syncthreads()
        add_up(buffer, y * ROWS + x, ROWS)
        if x == 0 and y == 0:
            shares[block_number] = buffer[0]

    @_device
    def add_parts(parts: Any, x: Any) -> Any:
        """The sum of a row's parts."""
        total = parts[0, x]
        for part in range(1, PARTS):
            total += parts[part, x]
        return total

    @_device
    def column_of(local: Any, rank: Any, size: Any) -> Any:
        """Global number of an own column."""
        return local // block * block * size + rank * block + local % block

    return Parts(conj, square_of, is_real, add_shares, leave_share, add_parts, column_of)


def _device(function: F) -> F:
    made: F = cuda.jit(device=True)(function)
    return made
