"""What a rank computes on its own slab, on the CPU and on the GPU.

Per step, of vectors q of the basis and the new one w, which stands behind them:

1. `pack`: the slab's outer planes into the array of all ranks' planes, zeros elsewhere
2. `stencil`: w = A q, with the neighbours' planes
3. `project` and `subtract`, twice: classical Gram-Schmidt
4. `normalise`: alpha, beta and w / beta, from the projections
"""

from __future__ import annotations

import math
import time
import warnings
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable

    from benchmarks.apps.lanczos_problem import Slab

__all__ = ["CpuWork", "GpuWork", "LocalWork", "local_work"]

MOST_BLOCKS = 256
"""Blocks that share a row of a projection."""


class LocalWork(Protocol):
    """Work on a slab. Arrays are float64, one-dimensional and contiguous but for `rows`.

    Attributes:
        xp: Module of the arrays.
    """

    xp: Any

    def pack(self, x: Any, planes: Any) -> None:
        """Put the first and last plane of `x` at ``[rank, 0]`` and ``[rank, 1]`` of `planes`."""

    def stencil(self, x: Any, planes: Any, out: Any) -> None:
        """Apply the operator; `planes` has the neighbours' planes, and may be None of one rank."""

    def project(self, rows: Any, x: Any, out: Any) -> None:
        """Scalar products of all `rows` with `x`."""

    def subtract(self, rows: Any, coefficients: Any, x: Any) -> None:
        """Take from `x` the `rows` times `coefficients`."""

    def normalise(self, x: Any, h: Any, g: Any, alphas: Any, betas: Any, step: int) -> None:
        """Divide `x` by its norm, and keep alpha and beta of a step.

        Args:
            x: The vector behind the second Gram-Schmidt pass.
            h: Projections of the first pass, `step` + 1 of them at least.
            g: Those of the second, and behind them the square of the norm before it.
            alphas: Where ``h[step] + g[step]`` goes, at `step`.
            betas: Where the norm goes, at `step`; `x` is zeroed where it is zero.
            step: Number of the step, from 0.
        """

    def context(self) -> AbstractContextManager[Any]:
        """The context in which all work is enqueued."""

    def capture(self, body: Callable[[], None]) -> Callable[[], None]:
        """What repeats `body`, which was run once before."""

    def time(self, body: Callable[[], None]) -> float:
        """Run `body`, and return its seconds, to the end of what it enqueued."""

    def host(self, array: Any) -> np.ndarray[Any, Any]:
        """Copy to numpy."""


class CpuWork:
    """Work with numpy."""

    xp: Any = np

    def __init__(self, slab: Slab) -> None:
        """Keep the slab's shape."""
        self._slab = slab

    def pack(self, x: Any, planes: Any) -> None:
        """As of `LocalWork`."""
        size, plane = self._slab.size, self._slab.plane
        each = planes.reshape(size, 2, plane)
        each[...] = 0.0
        each[self._slab.rank, 0] = x[:plane]
        each[self._slab.rank, 1] = x[-plane:]

    def stencil(self, x: Any, planes: Any, out: Any) -> None:
        """As of `LocalWork`."""
        slab = self._slab
        shape = -1, slab.ny, slab.nx
        u, w = x.reshape(shape), out.reshape(shape)
        np.multiply(u, 6.0, out=w)
        w[:, :, 1:] -= u[:, :, :-1]
        w[:, :, :-1] -= u[:, :, 1:]
        w[:, 1:] -= u[:, :-1]
        w[:, :-1] -= u[:, 1:]
        w[1:] -= u[:-1]
        w[:-1] -= u[1:]
        if slab.size > 1:
            each = planes.reshape(slab.size, 2, slab.ny, slab.nx)
            if slab.rank > 0:
                w[0] -= each[slab.rank - 1, 1]
            if slab.rank < slab.size - 1:
                w[-1] -= each[slab.rank + 1, 0]

    def project(self, rows: Any, x: Any, out: Any) -> None:
        """As of `LocalWork`."""
        np.dot(rows, x, out=out)

    def subtract(self, rows: Any, coefficients: Any, x: Any) -> None:
        """As of `LocalWork`."""
        x -= coefficients @ rows

    def normalise(self, x: Any, h: Any, g: Any, alphas: Any, betas: Any, step: int) -> None:
        """As of `LocalWork`."""
        square = g[step + 1]
        for j in range(step + 1):
            square = square - g[j] * g[j]
        beta = math.sqrt(max(square, 0.0))
        alphas[step], betas[step] = h[step] + g[step], beta
        x *= 1 / beta if beta > 0 else 0.0

    def context(self) -> AbstractContextManager[Any]:
        """As of `LocalWork`: none."""
        return nullcontext()

    def capture(self, body: Callable[[], None]) -> Callable[[], None]:
        """As of `LocalWork`: `body` itself."""
        return body

    def time(self, body: Callable[[], None]) -> float:
        """As of `LocalWork`."""
        begin = time.perf_counter()
        body()
        return time.perf_counter() - begin

    def host(self, array: Any) -> np.ndarray[Any, Any]:
        """As of `LocalWork`."""
        return np.array(array)


class GpuWork:
    """Work with a few kernels of numba-cuda, on a stream of its own."""

    def __init__(self, slab: Slab, xp: Any) -> None:
        """Make the stream, on the current GPU.

        Args:
            slab: The rank's.
            xp: CuPy.
        """
        from numba import cuda
        from numba.cuda.core.errors import NumbaPerformanceWarning

        from benchmarks.apps import lanczos_kernels

        self.xp = xp
        self._performance_warning = NumbaPerformanceWarning
        self._slab = slab
        self._kernels = lanczos_kernels
        self._as_cuda_array = cuda.as_cuda_array
        self._stream = xp.cuda.Stream(non_blocking=True)
        self._numba_stream = cuda.external_stream(self._stream.ptr)
        self._blocks = min(-(-slab.npoints // lanczos_kernels.THREADS), MOST_BLOCKS)
        self._partial = xp.empty(0)

    def _launch(self, kernel: Any, nthreads: int, *arguments: Any) -> None:
        self._launch_grid(kernel, -(-nthreads // self._kernels.THREADS), *arguments)

    def _launch_grid(self, kernel: Any, blocks: Any, *arguments: Any) -> None:
        # Not synchronised: all work is on one stream, which a capture forbids to wait for.
        taken = [
            self._as_cuda_array(each, sync=False) if isinstance(each, self.xp.ndarray) else each
            for each in arguments
        ]
        with warnings.catch_warnings():
            # A small grid is what it is.
            warnings.simplefilter("ignore", self._performance_warning)
            kernel[blocks, self._kernels.THREADS, self._numba_stream](*taken)

    def pack(self, x: Any, planes: Any) -> None:
        """As of `LocalWork`."""
        slab = self._slab
        self._launch(self._kernels.pack, planes.size, x, planes, slab.plane, slab.rank)

    def stencil(self, x: Any, planes: Any, out: Any) -> None:
        """As of `LocalWork`."""
        slab = self._slab
        given = x if planes is None else planes  # of one rank it is not read
        shape = slab.nx, slab.ny, slab.rank, slab.size
        self._launch(self._kernels.stencil, x.size, x, given, out, *shape)

    def project(self, rows: Any, x: Any, out: Any) -> None:
        """As of `LocalWork`."""
        nrows, blocks = len(rows), self._blocks
        if self._partial.size < nrows * blocks:
            # Of the most rows at once, outside of a capture: `Lanczos` runs all sizes before.
            self._partial = self.xp.empty(nrows * blocks)
        self._launch_grid(self._kernels.project, (blocks, nrows), rows, x, self._partial)
        self._launch_grid(self._kernels.gather, nrows, self._partial, blocks, out)

    def subtract(self, rows: Any, coefficients: Any, x: Any) -> None:
        """As of `LocalWork`."""
        self._launch(self._kernels.subtract, x.size, rows, coefficients, x)

    def normalise(self, x: Any, h: Any, g: Any, alphas: Any, betas: Any, step: int) -> None:
        """As of `LocalWork`."""
        self._launch(self._kernels.normalise, x.size, x, h, g, alphas, betas, step)

    def context(self) -> AbstractContextManager[Any]:
        """As of `LocalWork`: CuPy's current stream is this one."""
        return self._stream  # type: ignore[no-any-return]

    def capture(self, body: Callable[[], None]) -> Callable[[], None]:
        """As of `LocalWork`: a CUDA graph of it."""
        self._stream.synchronize()
        self._stream.begin_capture()
        try:
            body()
        except BaseException:
            with suppress(Exception):
                self._stream.end_capture()
            raise
        graph = self._stream.end_capture()
        graph.upload(self._stream)  # or the first replay would
        self._stream.synchronize()
        return lambda: graph.launch(self._stream)

    def time(self, body: Callable[[], None]) -> float:
        """As of `LocalWork`, by CUDA events."""
        begin, end = self.xp.cuda.Event(), self.xp.cuda.Event()
        begin.record(self._stream)
        body()
        end.record(self._stream)
        end.synchronize()
        return float(self.xp.cuda.get_elapsed_time(begin, end)) / 1e3

    def host(self, array: Any) -> np.ndarray[Any, Any]:
        """As of `LocalWork`, behind what is enqueued."""
        return np.asarray(array.get(stream=self._stream))


def local_work(slab: Slab, xp: Any) -> LocalWork:
    """Choose by the module of the arrays: numpy or CuPy."""
    return CpuWork(slab) if xp is np else GpuWork(slab, xp)
