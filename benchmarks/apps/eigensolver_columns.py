"""The column loop of a panel on a GPU: which kernels are launched, over which rows and tiles."""

from __future__ import annotations

import warnings
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

from numba import cuda

from benchmarks.apps.eigensolver_kernels import build
from benchmarks.apps.eigensolver_parts import Shape

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import numpy as np

    from benchmarks.apps.eigensolver_layout import Layout, Panel

__all__ = ["ColumnArrays", "ColumnLoop", "array_sizes"]


class ColumnArrays(NamedTuple):
    """One-dimensional arrays that the kernels work on; `array_sizes` has their elements.

    Attributes:
        columns: The own columns, whole ones side by side; of them what is below the diagonal.
        v: Reflectors, n x n.
        w: n x block.
        panel: The panel's columns from its first row on.
        summed: This rank's part of A v, and then the sum of all ranks', from element 0 on.
        a: The column at hand.
        z: W's next column, unfinished.
        tau: Factors of the reflectors.
        d: Diagonal; real.
        e: Beside it; real.
        squares: Shares of the row blocks in a norm; real.
        shares: Their shares in ``z^H v``.
        dots: Their shares in the products of v with W and V.
        products: These products.
        across: Shares of the tiles in A v, a row for each tile of columns.
        along: Shares of the tiles in A^H v, a row for each tile of rows.
    """

    columns: Any
    v: Any
    w: Any
    panel: Any
    summed: Any
    a: Any
    z: Any
    tau: Any
    d: Any
    e: Any
    squares: Any
    shares: Any
    dots: Any
    products: Any
    across: Any
    along: Any


REAL = ("d", "e", "squares")
"""Arrays of real numbers; the others are of the matrix's type."""


def array_sizes(layout: Layout, shape: Shape | None = None) -> dict[str, int]:
    """Elements of each of `ColumnArrays`, 1 at least."""
    shape = shape or Shape()
    n, nown, block = layout.n, len(layout.own), layout.block
    nblocks = -(-n // shape.rows)
    sizes = {
        "columns": n * nown,
        "v": n * n,
        "w": n * block,
        "panel": n * block,
        "across": -(-nown // shape.tile_columns) * n,
        "along": -(-n // shape.tile_rows) * nown,
        "squares": nblocks,
        "shares": nblocks,
        "dots": nblocks * 2 * block,
        "products": 2 * block,
    }
    return {name: max(sizes.get(name, n), 1) for name in ColumnArrays._fields}


@cache
def _compiled(dtype: np.dtype[Any], block: int, shape: Shape) -> dict[str, Any]:
    """The kernels by name, compiled once a process."""
    made = build(dtype, block, shape)._asdict()
    return {name: cuda.jit(signature)(function) for name, (function, signature) in made.items()}


class ColumnLoop:
    """Launches the kernels of one column after the other."""

    def __init__(
        self,
        layout: Layout,
        dtype: np.dtype[Any],
        arrays: ColumnArrays,
        stream: Any = 0,
        shape: Shape | None = None,
    ) -> None:
        """Compile the kernels for the current GPU.

        Args:
            layout: Who has which columns.
            dtype: Element type.
            arrays: What they work on, as numba takes arrays.
            stream: numba's stream.
            shape: Extents of blocks of threads.
        """
        self._layout, self._arrays, self._stream = layout, arrays, stream
        self._shape = shape or Shape()
        self._nsums = layout.nsums(dtype)
        self._kernels = _compiled(dtype, layout.block, self._shape)

    def run(
        self, panel: Panel, fused: Callable[[int, int, int], None] | None = None
    ) -> Iterator[int]:
        """Enqueue a panel's columns.

        Args:
            panel: Which.
            fused: ``fused(k, j, first_tile)`` enqueues what takes the place of `add_tiles` and of
                the sum over the ranks. Nothing is yielded then.

        Yields:
            The elements of `summed` that are to be added up over the ranks, once they are enqueued.
            What is enqueued behind needs their sum.
        """
        layout, n, k = self._layout, self._layout.n, panel.start
        nown, tile_columns = len(layout.own), self._shape.tile_columns
        ntiles = -(-nown // tile_columns)
        names: tuple[str, ...]
        for j in range(k, panel.stop):
            names = "panel", "v", "w", "z", "a", "squares", "shares", "tau", "d"
            self._launch("form_column", self._blocks_from(j), names, n, k, j)
            if j == n - 1:
                return
            below = self._blocks_from(j + 1)
            names = "a", "v", "w", "squares", "dots", "tau", "e"
            self._launch("make_reflector", below, names, n, k, j)
            if j >= self._nsums:
                continue
            before = layout.own_before(j + 1)
            # Where no own column is left, there are no tiles: what they left before is not read.
            first_tile = before // tile_columns if before < nown else ntiles
            where = nown, layout.rank, layout.size, first_tile
            if first_tile < ntiles:
                along = -(-n // self._shape.tile_rows) - (j + 1) // self._shape.tile_rows
                names = "columns", "v", "across", "along"
                self._launch("multiply", (ntiles - first_tile, along), names, n, j, *where)
            if fused is not None:
                fused(k, j, first_tile)
            else:
                names = "across", "along", "dots", "products", "summed"
                behind = -(-2 * (j - k) // self._shape.rows)
                self._launch("add_tiles", below + behind, names, n, k, j, *where)
                yield n - 1 - j
            names = "summed", "v", "w", "z", "products", "shares", "tau"
            self._launch("correct", below, names, n, k, j)
        if panel.stop < n:
            names, j = ("v", "w", "z", "shares", "tau"), panel.stop - 1
            self._launch("finish_panel", self._blocks_from(j + 1), names, n, k, j)

    def _blocks_from(self, row: int) -> int:
        """Row blocks from that of a row on."""
        return -(-self._layout.n // self._shape.rows) - row // self._shape.rows

    def _launch(
        self, name: str, grid: int | tuple[int, int], arrays: tuple[str, ...], *numbers: int
    ) -> None:
        shape = self._shape
        threads = shape.tile_threads if name == "multiply" else shape.row_threads
        given = [getattr(self._arrays, each) for each in arrays]
        with warnings.catch_warnings():
            # Near the end of a matrix there is no work for many blocks.
            warnings.filterwarnings("ignore", ".*Grid size .*under-utilization")
            self._kernels[name][grid, threads, self._stream](*given, *numbers)
