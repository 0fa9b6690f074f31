"""GPU kernels of Lanczos, a thread an element: what :class:`CpuWork` does with numpy.

They are compiled at their first launch. Integers are 64 bits wide, numbers float64, arrays
one-dimensional, but for the basis, (vectors, elements). Sums are made in a fixed order: `project`
leaves one of each block, and `gather` adds them. (CuPy's cuBLAS can't be captured into a graph.)
Under NUMBA_ENABLE_CUDASIM=1 they run on numpy's arrays.
"""

from __future__ import annotations

import math
from typing import Any

from numba import cuda, float64

__all__ = ["THREADS", "gather", "normalise", "pack", "project", "stencil", "subtract"]

THREADS = 256
"""Threads of a block: a power of two, for sums are made in pairs."""


def _pack(x: Any, planes: Any, plane: Any, rank: Any) -> None:
    """Outer planes of a slab into the array of all ranks' planes, zeros elsewhere."""
    i = cuda.grid(1)
    if i < planes.size:
        which = i // plane - 2 * rank
        value = 0.0
        if which == 0:
            value = x[i % plane]
        elif which == 1:
            value = x[x.size - plane + i % plane]
        planes[i] = value


def _stencil(x: Any, planes: Any, out: Any, nx: Any, ny: Any, rank: Any, size: Any) -> None:
    """The operator on a slab, between planes of its neighbours."""
    i = cuda.grid(1)
    if i < x.size:
        plane = nx * ny
        column, row = i % nx, i // nx % ny
        total = 6.0 * x[i]
        if column > 0:
            total -= x[i - 1]
        if column < nx - 1:
            total -= x[i + 1]
        if row > 0:
            total -= x[i - nx]
        if row < ny - 1:
            total -= x[i + nx]
        if i >= plane:
            total -= x[i - plane]
        elif rank > 0:  # the last plane of the rank before
            total -= planes[(2 * rank - 1) * plane + i]
        if i + plane < x.size:
            total -= x[i + plane]
        elif rank < size - 1:  # the first plane of the rank behind
            total -= planes[(2 * rank + 2) * plane + i % plane]
        out[i] = total


def _normalise(x: Any, h: Any, g: Any, alphas: Any, betas: Any, step: Any) -> None:
    """Each thread finds the same norm, out of the projections."""
    square = g[step + 1]
    for j in range(step + 1):
        square -= g[j] * g[j]
    beta, scale = 0.0, 0.0
    if square > 0.0:
        beta = math.sqrt(square)
        scale = 1.0 / beta
    i = cuda.grid(1)
    if i < x.size:
        x[i] *= scale
    if i == 0:
        alphas[step] = h[step] + g[step]
        betas[step] = beta


def _sum_block(value: Any, sums: Any) -> Any:
    """Add the threads' values in pairs; right in the first thread."""
    lane = cuda.threadIdx.x
    sums[lane] = value
    cuda.syncthreads()
    half = THREADS // 2
    while half > 0:
        if lane < half:
            sums[lane] += sums[lane + half]
        cuda.syncthreads()
        half //= 2
    return sums[0]


sum_block = cuda.jit(_sum_block, device=True)


def _project(rows: Any, x: Any, partial: Any) -> None:
    """Block (b, r) adds its part of the product of row r and `x`."""
    sums = cuda.shared.array(THREADS, float64)
    row, total = cuda.blockIdx.y, 0.0
    for i in range(cuda.grid(2)[0], x.size, cuda.gridsize(2)[0]):
        total += rows[row, i] * x[i]
    total = sum_block(total, sums)
    if cuda.threadIdx.x == 0:
        partial[row * cuda.gridDim.x + cuda.blockIdx.x] = total


def _gather(partial: Any, each: Any, out: Any) -> None:
    """Block r adds the `each` sums of row r."""
    sums = cuda.shared.array(THREADS, float64)
    row, total = cuda.blockIdx.x, 0.0
    for i in range(cuda.threadIdx.x, each, THREADS):
        total += partial[row * each + i]
    total = sum_block(total, sums)
    if cuda.threadIdx.x == 0:
        out[row] = total


def _subtract(rows: Any, coefficients: Any, x: Any) -> None:
    """Rows times their coefficients, from `x`."""
    i = cuda.grid(1)
    if i < x.size:
        value = x[i]
        for row in range(rows.shape[0]):
            value -= coefficients[row] * rows[row, i]
        x[i] = value


pack = cuda.jit(_pack)
project = cuda.jit(_project)
gather = cuda.jit(_gather)
subtract = cuda.jit(_subtract)
stencil = cuda.jit(_stencil)
normalise = cuda.jit(_normalise)
