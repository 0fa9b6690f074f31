"""Kernels that multiply a rank's own columns, lower stored, with a vector, for numba-cuda.

A tile is 64 rows of 32 own columns. Its elements are loaded once, into registers, and used twice:

    A v      a sum along a row of the tile; across the tiles of a row it goes on in `add_tiles`
    A^H v    a sum along a column of it, through shared memory

so that a product reads half of the matrix. Whole columns would need no second sum, and twice the
traffic of memory, which is what the time of a large problem is.

Each tile leaves its sums by its number, and `add_tiles` adds them up in a fixed order.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from numba import cuda, from_dtype, int64, void

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy as np

    from benchmarks.apps.eigensolver_parts import Parts, Shape

__all__ = ["TileKernels", "build_sums", "build_tiles"]


class TileKernels(NamedTuple):
    """Kernels as Python functions, each with the types of its parameters, for numba."""

    multiply: tuple[Callable[..., None], Any]
    add_tiles: tuple[Callable[..., None], Any]


def build_sums(
    dtype: np.dtype[Any], block: int, shape: Shape
) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Make the functions that add up what blocks have left, for any of numba's compilers.

    Each thread that shares a sum adds up every ``shape.parts``-th term, from its part on.

    Returns:
        ``row_sum(across, along, n, nown, rank, size, first_tile, r, part)``, a part of row r of
        this rank's ``A v``, and ``product_sum(dots, n, j, at, part)``, of product `at`.
    """
    zero = dtype.type(0)
    pair = 2 * block
    ROWS, PARTS = shape.rows, shape.parts
    TILE_ROWS, TILE_COLUMNS = shape.tile_rows, shape.tile_columns

    def row_sum(
        across: Any,
        along: Any,
        n: int,
        nown: int,
        rank: int,
        size: int,
        first_tile: int,
        r: int,
        part: int,
    ) -> Any:
        total = zero
        # Tiles that begin above the diagonal of this row's tiles, and so were multiplied.
        along_tile = r // TILE_ROWS
        behind = along_tile * TILE_ROWS + TILE_ROWS
        rest = behind % (block * size) - rank * block
        nbefore = behind // (block * size) * block + min(max(rest, 0), block)
        ntiles = (min(nbefore, nown) + TILE_COLUMNS - 1) // TILE_COLUMNS
        tile = first_tile + part
        while tile < ntiles:
            total += across[tile * n + r]
            tile += PARTS
        if r // block % size == rank:
            local = r // block // size * block + r % block
            tile = along_tile + part
            while tile * TILE_ROWS < n:
                total += along[tile * nown + local]
                tile += PARTS
        return total

    def product_sum(dots: Any, n: int, j: int, at: int, part: int) -> Any:
        total = zero
        number, nblocks = (j + 1) // ROWS + part, (n + ROWS - 1) // ROWS
        while number < nblocks:
            total += dots[number * pair + at]
            number += PARTS
        return total

    return row_sum, product_sum


def build_tiles(dtype: np.dtype[Any], block: int, shape: Shape, made: Parts) -> TileKernels:
    """Make the kernels; arguments are those of :func:`benchmarks.apps.eigensolver_kernels.build`.

    ``multiply`` leaves the sum along row r of tile t of columns at ``across[t * n + r]``, and that
    along own column c of tile t of rows at ``along[t * nown + c]``: of tiles that reach below the
    diagonal, from `first_tile` and from the row behind j on.
    """
    conj, add_parts, column_of = made.conj, made.add_parts, made.column_of
    row_sum, product_sum = (cuda.jit(device=True)(each) for each in build_sums(dtype, block, shape))
    T, zero = from_dtype(dtype), dtype.type(0)
    ROWS, PARTS = shape.rows, shape.parts
    TILE_ROWS, TILE_COLUMNS = shape.tile_rows, shape.tile_columns
    # Columns of a tile are apart by so much that threads read from different banks.
    tile_stride, tile_half = TILE_ROWS + 4, TILE_COLUMNS // 2
    quarters = TILE_ROWS * 2 // TILE_COLUMNS

    def multiply(
        c: Any,
        v: Any,
        across: Any,
        along: Any,
        n: int,
        j: int,
        nown: int,
        rank: int,
        size: int,
        first_tile: int,
    ) -> None:
        tile = cuda.shared.array((TILE_COLUMNS, tile_stride), T)
        halves = cuda.shared.array((2, TILE_ROWS), T)
        parts = cuda.shared.array((TILE_COLUMNS, quarters), T)
        columns = cuda.shared.array(TILE_COLUMNS, int64)
        factors = cuda.shared.array(TILE_COLUMNS, T)
        x, y = cuda.threadIdx.x, cuda.threadIdx.y
        thread = y * TILE_ROWS + x
        across_tile = first_tile + cuda.blockIdx.x
        along_tile = (j + 1) // TILE_ROWS + cuda.blockIdx.y
        if along_tile * TILE_ROWS + TILE_ROWS - 1 < column_of(
            across_tile * TILE_COLUMNS, rank, size
        ):
            return  # all of it is above the diagonal
        if thread < TILE_COLUMNS:
            local = across_tile * TILE_COLUMNS + thread
            column, factor = n, zero
            if local < nown:
                column = column_of(local, rank, size)
                if column > j:
                    factor = v[j * n + column]
                else:
                    column = n
            columns[thread] = column
            factors[thread] = factor
        cuda.syncthreads()
        r = along_tile * TILE_ROWS + x
        # All loads before the first use, so that they are under way together; of what is not
        # there, of any element.
        elements = cuda.local.array(tile_half, T)
        row = min(r, n - 1)
        local = across_tile * TILE_COLUMNS + y * tile_half
        for each in range(tile_half):
            elements[each] = c[min(local + each, nown - 1) * n + row]
        value = zero
        if j < r < n:
            value = v[j * n + r]
        total = zero
        for each in range(tile_half):
            at = y * tile_half + each
            product = zero
            if j < r < n and columns[at] <= r:
                total += elements[each] * factors[at]
                if columns[at] < r:
                    product = conj(elements[each]) * value
            tile[at, x] = product
        halves[y, x] = total
        cuda.syncthreads()
        if y == 0 and r < n:
            across[across_tile * n + r] = halves[0, x] + halves[1, x]
        at, part = thread // quarters, thread % quarters
        total = zero
        for step in range(TILE_ROWS // quarters):
            total += tile[at, part + step * quarters]
        parts[at, part] = total
        cuda.syncthreads()
        local = across_tile * TILE_COLUMNS + thread
        if thread < TILE_COLUMNS and local < nown:
            total = parts[thread, 0]
            for each in range(1, quarters):
                total += parts[thread, each]
            along[along_tile * nown + local] = total

    def add_tiles(
        across: Any,
        along: Any,
        dots: Any,
        products: Any,
        out: Any,
        n: int,
        k: int,
        j: int,
        nown: int,
        rank: int,
        size: int,
        first_tile: int,
    ) -> None:
        parts = cuda.shared.array((PARTS, ROWS), T)
        x, y = cuda.threadIdx.x, cuda.threadIdx.y
        first, nblocks = (j + 1) // ROWS, (n + ROWS - 1) // ROWS
        at_dots = cuda.blockIdx.x - (nblocks - first)
        total = zero
        if at_dots >= 0:
            # The blocks behind add up the products of v with W and V.
            at = at_dots * ROWS + x
            if at < 2 * (j - k):
                total = product_sum(dots, n, j, at, y)
            parts[y, x] = total
            cuda.syncthreads()
            if y == 0 and at < 2 * (j - k):
                products[at] = add_parts(parts, x)
            return
        r = (first + cuda.blockIdx.x) * ROWS + x
        if j < r < n:
            total = row_sum(across, along, n, nown, rank, size, first_tile, r, y)
        parts[y, x] = total
        cuda.syncthreads()
        if y == 0 and j < r < n:
            out[r - j - 1] = add_parts(parts, x)

    t, whole = T[::1], int64
    return TileKernels(
        (multiply, void(t, t, t, t, *[whole] * 6)),
        (add_tiles, void(t, t, t, t, t, *[whole] * 7)),
    )
