"""Local work of the eigensolver on a GPU: CuPy for whole matrices, kernels for the column loop.

The columns of a panel are captured into a CUDA graph, all-reduces with them, once: a solver that is
used again only replays. Where a communicator's all-reduce can't be captured, the graph is cut at
each of them, and it is called between the pieces.

Matrices are of whole columns, as cuBLAS takes them; it is called with addresses, as CuPy would copy
parts of them.
"""

from __future__ import annotations

import time
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

import cupy
import cupyx
import numpy as np
from cupy.cuda import cublas, device
from cupyx.scipy.linalg import solve_triangular
from numba import cuda

from benchmarks.apps.eigensolver_columns import REAL, ColumnArrays, ColumnLoop, array_sizes
from benchmarks.apps.eigensolver_fused import fused_kernel, fused_threads
from benchmarks.apps.eigensolver_parts import Shape
from shmemar.errors import ArgumentError

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from benchmarks.apps.communicators import Communicator
    from benchmarks.apps.eigensolver_layout import Layout, Panel

__all__ = ["DeviceWork"]

_SHARED = ("panel", "summed")

_GEMM = {"f": "sgemm", "d": "dgemm", "F": "cgemm", "D": "zgemm"}


class DeviceWork:
    """One rank's matrices on its GPU; attributes and methods are those of `HostWork`.

    Attributes:
        reflectors: As of `HostWork`, on the GPU.
        tau: Likewise.
        captured: All-reduces of a solve that are in graphs.
        capture_seconds: Time that capturing took.
    """

    def __init__(
        self, layout: Layout, dtype: np.dtype[Any], comm: Communicator, *, fuses: bool = False
    ) -> None:
        """Allocate what is this rank's alone.

        Args:
            layout: Who has which columns.
            dtype: Element type.
            comm: Of CuPy's arrays.
            fuses: Whether ranks sum in the kernel that adds up a product: `comm` is shmemar's then.
        """
        self._layout, self._dtype, self._comm = layout, dtype, comm
        self._fusing = comm.fusing if fuses else None
        self._shape = Shape()
        self._stream = cupy.cuda.Stream(non_blocking=True)
        self._graphs: dict[int, list[Callable[[], None]]] = {}
        self.captured, self.capture_seconds = 0, 0.0
        self._real = dtype.type(0).real.dtype
        with self._stream:
            self._made = {
                name: self._zeros(cupy.empty, name, size)
                for name, size in array_sizes(layout).items()
                if name not in _SHARED
            }
            self._own = cupy.asarray(layout.own)
        self._stream.synchronize()

    def _zeros(self, empty: Callable[..., Any], name: str, size: int) -> Any:
        made = empty(size, self._real if name in REAL else self._dtype)
        made.fill(0)
        return made

    def share(self) -> None:
        """Allocate what is broadcast and summed, where the communicator wants it. Collective."""
        sizes = array_sizes(self._layout)
        with self._stream:
            for name in _SHARED:
                self._made[name] = self._zeros(self._comm.empty, name, sizes[name])
        self._stream.synchronize()
        if self._fusing is not None:
            most = fused_threads(self._layout.n, 2 * self._layout.block, self._shape)
            self._buffer = self._fusing.buffer(self._dtype, most)

    def warm_up(self) -> None:
        """Compile, and run what a solve runs between the first sum and the last.

        What runs first is loaded, which may wait for kernels that spin for a peer: so all ranks
        load before any rank sums. The matrix is zero, and stays so.
        """
        n = self._layout.n
        self._arrays = ColumnArrays(**self._made)
        self.reflectors = self._arrays.v.reshape(n, n).T
        self.tau = self._arrays.tau
        # numba would wait for CuPy's stream at each launch, which a capture forbids.
        seen = ColumnArrays(*(cuda.as_cuda_array(each, sync=False) for each in self._arrays))
        self._loop = ColumnLoop(
            self._layout, self._dtype, seen, cuda.external_stream(self._stream.ptr)
        )
        with self._stream:
            for _ in self._loop.run(self._layout.panels[0]):
                pass
            for panel in self._layout.panels:  # cuBLAS's kernels depend on the extents
                self.pack(panel)
                self.update(panel)
        self._stream.synchronize()

    def prepare(self) -> None:
        """Load what the sums run. Collective."""
        if not self._layout.nsums(self._dtype):
            return
        with self._stream:
            if self._fusing is None:
                self._comm.prepare(self._dtype.name, self._arrays.summed.nbytes)
            else:
                self._add_and_sum(0, 0, 0)
        self._stream.synchronize()

    def _add_and_sum(self, k: int, j: int, first_tile: int) -> None:
        """Launch what takes the place of `add_tiles` and the all-reduce."""
        assert self._fusing is not None
        arrays, layout = self._arrays, self._layout
        nrows = layout.n - 1 - j
        self._fusing.launch(
            fused_kernel(self._dtype, layout.block, self._shape),
            self._buffer,
            *(arrays.across, arrays.along, arrays.dots, arrays.products, arrays.summed),
            *(layout.n, k, j, len(self._own), first_tile),
            nbytes=nrows * self._dtype.itemsize,
            threads=fused_threads(nrows, 2 * (j - k), self._shape),
            stream=self._stream,
        )

    def capture(self) -> None:
        """Capture the column loops of all panels."""
        start, before = time.perf_counter(), self._comm.counts.calls.get("allreduce", 0)
        with self._stream:
            for panel in self._layout.panels:
                self._graphs[panel.start] = self._capture(panel)
        self._stream.synchronize()
        self.capture_seconds = time.perf_counter() - start
        self.captured = self._comm.counts.calls.get("allreduce", 0) - before

    def _capture(self, panel: Panel) -> list[Callable[[], None]]:
        """The steps of a panel's column loop: graphs, and what could not be captured."""
        steps: list[Callable[[], None]] = []

        def end() -> None:
            graph = self._stream.end_capture()
            graph.upload(self._stream)
            steps.append(partial(graph.launch, self._stream))

        self._stream.begin_capture()
        try:
            for count in self._loop.run(panel, self._add_and_sum if self._fusing else None):
                summed = self._arrays.summed[:count]
                if self._comm.capturable:
                    self._comm.allreduce(summed)
                else:
                    end()
                    steps.append(partial(self._comm.allreduce, summed))
                    self._stream.begin_capture()
        except BaseException:
            with suppress(Exception):
                self._stream.end_capture()
            raise
        end()
        return steps

    def context(self) -> Any:
        """The stream on which all work is enqueued."""
        return self._stream

    def synchronize(self) -> None:
        """Wait for what was enqueued."""
        self._stream.synchronize()

    def take(self, matrix: Any) -> Any:
        """A matrix as an array of CuPy."""
        return cupy.asarray(matrix)

    def cholesky(self, b: Any) -> Any:
        """Factor ``B = L L^H``.

        Raises:
            ArgumentError: B is not positive definite.
        """
        try:
            with cupyx.errstate(linalg="raise"):
                lower = cupy.linalg.cholesky(b)
            problem = "" if bool(cupy.isfinite(lower.diagonal()).all()) else "no finite factor"
        except np.linalg.LinAlgError as error:
            problem = str(error)
        if problem:
            raise ArgumentError(
                f"b is not positive definite ({problem}); expected a matrix whose eigenvalues are "
                "all above 0. Check that a and b are not exchanged."
            )
        return cupy.asfortranarray(lower)

    def load_standard(self, a: Any, lower: Any) -> None:
        """Take the own columns of ``C = L^-1 A L^-H``."""
        nown = len(self._own)
        if not nown:
            return
        y = cupy.zeros((self._layout.n, nown), self._dtype, order="F")
        y[self._own, cupy.arange(nown)] = 1
        y = _triangular(lower, y, "C")
        c = _triangular(lower, cupy.asfortranarray(a @ y), "N")
        self._arrays.columns.reshape(nown, -1).T[...] = c

    def load(self, c: Any) -> None:
        """Take the own columns of C."""
        if len(self._own):
            self._arrays.columns.reshape(len(self._own), -1).T[...] = c[:, self._own]

    def pack(self, panel: Panel) -> Any:
        """The panel's rows from its first column on, filled on the rank that has them."""
        n = self._layout.n
        part = self._arrays.panel[: (n - panel.start) * panel.width]
        if panel.owner == self._layout.rank:
            at = self._layout.own_before(panel.start)
            columns = self._arrays.columns.reshape(-1, n)[at : at + panel.width, panel.start :]
            part.reshape(panel.width, -1)[...] = columns
        return part

    def reduce(self, panel: Panel) -> None:
        """Eliminate the panel's columns, with an all-reduce for each that is reflected."""
        for step in self._graphs[panel.start]:
            step()

    def update(self, panel: Panel) -> None:
        """Subtract ``V W^H + W V^H`` from the own columns behind the panel.

        Whole columns from the first row behind the panel on, with what is above the diagonal: two
        products of matrices are faster than many small ones.
        """
        n, start, stop, width = self._layout.n, panel.start, panel.stop, panel.width
        at = self._layout.own_before(stop)
        ncolumns = len(self._own) - at
        if not ncolumns:
            return
        v, w = self.reflectors[:, start:stop], self._arrays.w.reshape(-1, n).T[:, :width]
        into = self._at(self._arrays.columns, at * n + stop)
        for left, first, right in ((self._arrays.v, start * n, w), (self._arrays.w, 0, v)):
            rows = cupy.ascontiguousarray(right[self._own[at:]].conj())
            extents = n - stop, ncolumns, width
            pair = (self._at(left, first + stop), n, "N"), (rows.data.ptr, width, "N")
            self._multiply(extents, -1, *pair, 1, (into, n))

    def tridiagonal(self) -> tuple[NDArray[Any], NDArray[Any]]:
        """Diagonal, and the elements beside it, as arrays of numpy."""
        return self._arrays.d.get(), self._arrays.e.get()[:-1]

    def back(self, vectors: NDArray[Any]) -> Any:
        """Apply the reflectors to eigenvectors of the tridiagonal matrix; see `HostWork.back`."""
        x = cupy.asfortranarray(cupy.asarray(vectors).astype(self._dtype))
        n, nown = x.shape
        if not nown:
            return x
        for panel in reversed(self._layout.panels):
            rows, width = n - panel.start - 1, panel.width
            if not rows:
                continue
            v = self._at(self._arrays.v, panel.start * n + panel.start + 1)
            part = self._at(x, panel.start + 1)
            gram = cupy.empty((width, width), self._dtype, order="F")
            own = cupy.empty((width, nown), self._dtype, order="F")
            left = v, n, "C"
            self._multiply((width, width, rows), 1, left, (v, n, "N"), 0, (gram.data.ptr, width))
            self._multiply((width, nown, rows), 1, left, (part, n, "N"), 0, (own.data.ptr, width))
            tau = self.tau[panel.start : panel.stop]
            inverse = cupy.triu(gram, 1) + cupy.diag(1 / cupy.where(tau == 0, 1, tau))
            own = _triangular(cupy.asfortranarray(inverse), own, "N", lower=False)
            right = own.data.ptr, width, "N"
            self._multiply((rows, nown, width), -1, (v, n, "N"), right, 1, (part, n))
        return x

    def solve_back(self, lower: Any, x: Any) -> Any:
        """Turn eigenvectors of C into those of the problem: ``L^-H x``."""
        return _triangular(lower, x, "C") if x.size else x

    def close(self) -> None:
        """Destroy the graphs."""
        self._stream.synchronize()
        self._graphs.clear()

    def _at(self, array: Any, element: int) -> int:
        """Address of an element of an array whose first one begins its memory."""
        return int(array.data.ptr) + element * self._dtype.itemsize

    def _multiply(
        self,
        extents: tuple[int, int, int],
        alpha: float,
        a: tuple[int, int, str],
        b: tuple[int, int, str],
        beta: float,
        c: tuple[int, int],
    ) -> None:
        """``C = alpha A B + beta C`` by cuBLAS.

        Args:
            extents: Rows of C, columns of C, and what A and B share.
            alpha: Factor of the product.
            a: Address, elements from one column to the next, and ``"N"``, or ``"C"`` for its
                conjugate transpose.
            b: Likewise.
            beta: Factor of what is in C.
            c: Address, and elements from one column to the next.
        """
        operations = {"N": cublas.CUBLAS_OP_N, "C": cublas.CUBLAS_OP_C}
        factors = np.array([alpha, beta], self._dtype)
        at = factors.ctypes.data
        getattr(cublas, _GEMM[self._dtype.char])(
            device.get_cublas_handle(),
            operations[a[2]],
            operations[b[2]],
            *extents,
            *(at, a[0], a[1], b[0], b[1]),
            *(at + self._dtype.itemsize, c[0], c[1]),
        )


def _triangular(matrix: Any, right: Any, trans: str, *, lower: bool = True) -> Any:
    return solve_triangular(matrix, right, trans=trans, lower=lower, overwrite_b=True)
