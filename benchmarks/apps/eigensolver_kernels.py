"""Kernels of the eigensolver's column step on a GPU, for numba-cuda.

Matrices are one-dimensional arrays of whole columns, element (r, c) at ``c * n + r``. The panel
begins with column k, column j of it is at hand, ``i = j - k``:

1. `form_column`: finishes column i - 1 of W, and makes column j as it is by now
2. `make_reflector`: the Householder vector v (xLARFG), and its products with V and W
3. `multiply`: tiles of the own columns, lower stored, times v
4. `add_tiles`: this rank's part of ``y = A v``; then comes the all-reduce
5. `correct`: ``z = tau (y - V (W^H v) - W (V^H v))``, of which W's next column is made in step 1

and `finish_panel` finishes the last column of W. Scalars stay on the device. Steps 3 and 4 are in
:mod:`benchmarks.apps.eigensolver_tiles`.

Everything is added up in a fixed order: where a sum crosses blocks, each block leaves its part, by
its number, and every reader adds all of them up. Steps 1, 2 and 5 depend on nothing but the panel
and the sums, with the same grid on all ranks, so that their results have the same bits there.

Row blocks have `Shape.rows` rows, block number b those from ``b * rows`` on.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple

from numba import cuda, from_dtype, int64, void

from benchmarks.apps.eigensolver_parts import build_parts
from benchmarks.apps.eigensolver_tiles import build_tiles

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy as np

    from benchmarks.apps.eigensolver_parts import Shape

__all__ = ["Kernels", "build"]


class Kernels(NamedTuple):
    """Kernels as Python functions, each with the types of its parameters, for numba."""

    form_column: tuple[Callable[..., None], Any]
    make_reflector: tuple[Callable[..., None], Any]
    multiply: tuple[Callable[..., None], Any]
    add_tiles: tuple[Callable[..., None], Any]
    correct: tuple[Callable[..., None], Any]
    finish_panel: tuple[Callable[..., None], Any]


def build(dtype: np.dtype[Any], block: int, shape: Shape) -> Kernels:
    """Make the kernels for an element type and a block size.

    Args:
        dtype: float32, float64, complex64 or complex128.
        block: Columns of a block of the matrix; not more than there are threads in a row block.
        shape: Extents of blocks of threads.
    """
    real_dtype = dtype.type(0).real.dtype
    T, R = from_dtype(dtype), from_dtype(real_dtype)
    zero, one = dtype.type(0), dtype.type(1)
    real_zero, real_one, half = real_dtype.type(0), real_dtype.type(1), real_dtype.type(0.5)
    pair = 2 * block
    ROWS, PARTS = shape.rows, shape.parts
    threads, stride = ROWS * PARTS, ROWS + 1
    made = build_parts(dtype, block, shape)
    conj, square_of, is_real = made.conj, made.square_of, made.is_real
    add_shares, leave_share, add_parts = made.add_shares, made.leave_share, made.add_parts
    tiles = build_tiles(dtype, block, shape, made)

    def form_column(
        panel: Any,
        v: Any,
        w: Any,
        z: Any,
        a: Any,
        squares: Any,
        shares: Any,
        tau: Any,
        d: Any,
        n: int,
        k: int,
        j: int,
    ) -> None:
        row_v = cuda.shared.array(block, T)
        row_w = cuda.shared.array(block, T)
        parts = cuda.shared.array((PARTS, ROWS), T)
        buffer = cuda.shared.array(threads, T)
        real_buffer = cuda.shared.array(ROWS, R)
        x, y = cuda.threadIdx.x, cuda.threadIdx.y
        thread = y * ROWS + x
        i, first, nblocks = j - k, j // ROWS, (n + ROWS - 1) // ROWS
        number = first + cuda.blockIdx.x
        r = number * ROWS + x
        alpha, before = zero, zero
        if i > 0:
            before = tau[j - 1]
            alpha = -half * before * add_shares(shares, first, nblocks, buffer, zero)
        if thread < i:
            value = zero
            if thread < i - 1:
                value = w[thread * n + j]
            elif before != zero:
                value = z[j] + alpha * v[(j - 1) * n + j]
            row_w[thread] = conj(value)
            row_v[thread] = conj(v[(k + thread) * n + j])
        cuda.syncthreads()
        total = zero
        if j <= r < n:
            at = y
            while at < i - 1:
                total += v[(k + at) * n + r] * row_w[at] + w[at * n + r] * row_v[at]
                at += PARTS
            if at == i - 1:
                left, value = v[(j - 1) * n + r], zero
                if before != zero:
                    value = z[r] + alpha * left
                w[at * n + r] = value
                total += left * row_w[at] + value * row_v[at]
        parts[y, x] = total
        cuda.syncthreads()
        square = real_zero
        if y == 0 and j <= r < n:
            value = panel[i * (n - k) + r - k] - add_parts(parts, x)
            a[r] = value
            if r == j:
                d[j] = value.real
            if r >= j + 2:
                square = square_of(value)
        leave_share(squares, number, square, real_buffer)

    def make_reflector(
        a: Any,
        v: Any,
        w: Any,
        squares: Any,
        dots: Any,
        tau: Any,
        e: Any,
        n: int,
        k: int,
        j: int,
    ) -> None:
        tile = cuda.shared.array((ROWS, stride), T)
        parts = cuda.shared.array((PARTS, ROWS), T)
        buffer = cuda.shared.array(threads, R)
        x, y = cuda.threadIdx.x, cuda.threadIdx.y
        thread = y * ROWS + x
        i, nblocks = j - k, (n + ROWS - 1) // ROWS
        square = add_shares(squares, j // ROWS, nblocks, buffer, real_zero)
        alpha = a[j + 1]
        beta, factor, scale = alpha.real, zero, zero
        reflects = square != real_zero or not is_real(alpha)
        if reflects:
            norm = math.sqrt(square_of(alpha) + square)
            beta = norm if alpha.real < real_zero else -norm
            factor = (beta - alpha) * (real_one / beta)
            scale = conj(alpha - beta) * (real_one / square_of(alpha - beta))
        number = (j + 1) // ROWS + cuda.blockIdx.x
        r = number * ROWS + x
        is_in = j < r < n
        value = zero
        if is_in and reflects:
            value = one
            if r > j + 1:
                value = a[r] * scale
        if is_in and y == 0:
            v[j * n + r] = value
            if r == j + 1:
                e[j] = beta
                tau[j] = factor
        # Products with W, and behind them with V: ROWS columns at a time, through a tile.
        start = 0
        while start < 2 * i:
            for row in range(y, ROWS, PARTS):
                at = start + row
                product = zero
                if is_in and at < i:
                    product = conj(w[at * n + r]) * value
                elif is_in and at < 2 * i:
                    product = conj(v[(k + at - i) * n + r]) * value
                tile[row, x] = product
            cuda.syncthreads()
            # PARTS threads a row of the tile.
            row, part = thread // PARTS, thread % PARTS
            total = zero
            for step in range(ROWS // PARTS):
                total += tile[row, part + step * PARTS]
            parts[part, row] = total
            cuda.syncthreads()
            if thread < ROWS and start + thread < 2 * i:
                dots[number * pair + start + thread] = add_parts(parts, thread)
            cuda.syncthreads()
            start += ROWS

    def correct(
        summed: Any,
        v: Any,
        w: Any,
        z: Any,
        products: Any,
        shares: Any,
        tau: Any,
        n: int,
        k: int,
        j: int,
    ) -> None:
        parts = cuda.shared.array((PARTS, ROWS), T)
        buffer = cuda.shared.array(ROWS, T)
        x, y = cuda.threadIdx.x, cuda.threadIdx.y
        i = j - k
        number = (j + 1) // ROWS + cuda.blockIdx.x
        r = number * ROWS + x
        total = zero
        if j < r < n:
            at = y
            while at < i:
                total += v[(k + at) * n + r] * products[at] + w[at * n + r] * products[i + at]
                at += PARTS
        parts[y, x] = total
        cuda.syncthreads()
        share = zero
        if y == 0 and j < r < n:
            value = tau[j] * (summed[r - j - 1] - add_parts(parts, x))
            z[r] = value
            share = conj(value) * v[j * n + r]
        leave_share(shares, number, share, buffer)

    def finish_panel(v: Any, w: Any, z: Any, shares: Any, tau: Any, n: int, k: int, j: int) -> None:
        buffer = cuda.shared.array(threads, T)
        first, nblocks = (j + 1) // ROWS, (n + ROWS - 1) // ROWS
        total = add_shares(shares, first, nblocks, buffer, zero)
        alpha = -half * tau[j] * total
        r = (first + cuda.blockIdx.x) * ROWS + cuda.threadIdx.x
        if cuda.threadIdx.y == 0 and j < r < n:
            value = zero
            if tau[j] != zero:
                value = z[r] + alpha * v[j * n + r]
            w[(j - k) * n + r] = value

    t, f, whole = T[::1], R[::1], int64
    return Kernels(
        (form_column, void(t, t, t, t, t, f, t, t, f, whole, whole, whole)),
        (make_reflector, void(t, t, t, f, t, t, f, whole, whole, whole)),
        *tiles,
        (correct, void(t, t, t, t, t, t, t, whole, whole, whole)),
        (finish_panel, void(t, t, t, t, t, whole, whole, whole)),
    )
