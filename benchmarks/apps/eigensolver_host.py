"""Local work of the eigensolver on the CPU, with numpy and scipy.

`HostWork` has what :class:`benchmarks.apps.eigensolver_solve.Solver` asks of a rank. The column
step is LAPACK's xLATRD, lower, with the matrix-vector product summed over ranks:

1. `_reflect`: column j as it is by now, ``a = P - V W[j]^H - W V[j]^H``; its Householder vector v
   (xLARFG) goes to V
2. `_multiply`: the own columns' part of ``y = A v``, which the all-reduce sums
3. `_correct`: ``w = tau (y - V (W^H v) - W (V^H v))``, and ``w - tau/2 (w^H v) v`` goes to W

Steps 1 and 3 are the same on all ranks, with the same calls on arrays of the same alignment, so
that their bits are the same.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import numpy as np
from scipy import linalg

from shmemar.errors import ArgumentError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from benchmarks.apps.communicators import Communicator
    from benchmarks.apps.eigensolver_layout import Layout, Panel

__all__ = ["HostWork", "reflector"]

_ALIGNMENT = 64


class HostWork:
    """One rank's matrices, and what is done to them.

    Attributes:
        reflectors: Householder vectors, n x n, one a column, zero above them; on all ranks.
        tau: Their factors; 0, and a vector of zeros, for no reflection.
        d: Diagonal of the tridiagonal matrix.
        e: The elements beside it, real.
        captured: 0: no calls of collectives are captured on the CPU.
        capture_seconds: 0, likewise.
    """

    captured = 0
    capture_seconds = 0.0

    def __init__(self, layout: Layout, dtype: np.dtype[Any], comm: Communicator) -> None:
        """Allocate what is this rank's alone.

        Args:
            layout: Who has which columns.
            dtype: Element type.
            comm: Of numpy arrays.
        """
        n, block = layout.n, layout.block
        real = dtype.type(0).real.dtype
        self._layout, self._dtype, self._comm = layout, dtype, comm
        self._columns = _zeros((n, len(layout.own)), dtype)
        self.reflectors = _zeros((n, n), dtype)
        self._w = _zeros((n, block), dtype)
        self._panel: Any = None
        self._y: Any = None
        self.tau = np.zeros(n, dtype)
        self.d, self.e = np.zeros(n, real), np.zeros(n, real)
        self._nsums = layout.nsums(dtype)

    def share(self) -> None:
        """Allocate what is broadcast and summed. Collective."""
        n = self._layout.n
        self._panel = self._comm.empty(n * self._layout.block, self._dtype)
        self._panel[...] = 0
        self._y = self._comm.empty(n, self._dtype)

    def warm_up(self) -> None:
        """Nothing is loaded at its first call."""

    def prepare(self) -> None:
        """Compile what the sums run, where they are compiled. Collective."""
        if self._nsums:
            self._comm.prepare(self._dtype.name, self._y.nbytes)

    def capture(self) -> None:
        """Nothing is captured."""

    def context(self) -> AbstractContextManager[None]:
        """Where all work is done."""
        return nullcontext()

    def take(self, matrix: Any) -> NDArray[Any]:
        """A matrix as an array of numpy."""
        return np.asarray(matrix)

    def synchronize(self) -> None:
        """Nothing is under way."""

    def cholesky(self, b: NDArray[Any]) -> NDArray[Any]:
        """Factor ``B = L L^H``.

        Raises:
            ArgumentError: B is not positive definite.
        """
        try:
            return np.asarray(linalg.cholesky(b, lower=True, check_finite=False))
        except linalg.LinAlgError as error:
            raise ArgumentError(
                f"b is not positive definite ({error}); expected a matrix whose eigenvalues are "
                "all above 0. Check that a and b are not exchanged."
            ) from None

    def load_standard(self, a: NDArray[Any], lower: NDArray[Any]) -> None:
        """Take the own columns of ``C = L^-1 A L^-H``."""
        own = self._layout.own
        if not len(own):
            return
        unit = np.zeros((len(a), len(own)), self._dtype, order="F")
        unit[own, np.arange(len(own))] = 1
        y = _triangular(lower, unit, "C")
        self._columns[...] = _triangular(lower, a @ y, "N")

    def load(self, c: NDArray[Any]) -> None:
        """Take the own columns of C."""
        self._columns[...] = c[:, self._layout.own]

    def pack(self, panel: Panel) -> NDArray[Any]:
        """The panel's rows from its first column on, filled on the rank that has them."""
        part: NDArray[Any] = self._panel[: (self._layout.n - panel.start) * panel.width]
        if panel.owner == self._layout.rank:
            at = self._layout.own_before(panel.start)
            self._rows_of(panel)[...] = self._columns[panel.start :, at : at + panel.width]
        return part

    def _rows_of(self, panel: Panel) -> Any:
        rows = self._layout.n - panel.start
        return self._panel[: rows * panel.width].reshape(panel.width, rows).T

    def reduce(self, panel: Panel) -> None:
        """Eliminate the panel's columns, with an all-reduce for each that is reflected."""
        for i in range(panel.width):
            self._reflect(panel, i)
            j = panel.start + i
            if j < self._nsums:
                y = self._y[: self._layout.n - 1 - j]
                self._multiply(j, y)
                self._comm.allreduce(y)
                self._correct(panel, i, y)

    def _reflect(self, panel: Panel, i: int) -> None:
        j, k = panel.start + i, panel.start
        v, w = self.reflectors[:, k : panel.stop], self._w
        a = self._rows_of(panel)[i:, i]
        if i:
            a -= v[j:, :i] @ w[j, :i].conj()
            a -= w[j:, :i] @ v[j, :i].conj()
        self.d[j] = a[0].real
        if j == self._layout.n - 1:
            return
        rest = a[2:]
        beta, tau, scale = reflector(a[1], np.vdot(rest, rest).real)
        self.e[j], self.tau[j] = beta, tau
        v[j + 1, i] = 1 if tau else 0
        v[j + 2 :, i] = rest * scale
        w[j + 1 :, i] = 0

    def _multiply(self, j: int, y: NDArray[Any]) -> None:
        """Each stored element below the diagonal is used twice: in A v, and in A^H v."""
        layout, first = self._layout, j + 1
        v = self.reflectors[:, j]
        y[...] = 0
        for panel in layout.panels[first // layout.block :]:
            if panel.owner != layout.rank:
                continue
            start, stop = max(panel.start, first), panel.stop
            at = layout.own_before(start)
            columns = self._columns[:, at : at + stop - start]
            here, below = slice(start - first, stop - first), slice(stop - first, None)
            y[here] += columns[start:stop] @ v[start:stop]
            if stop < layout.n:
                y[below] += columns[stop:] @ v[start:stop]
                y[here] += (columns[stop:].T @ v[stop:].conj()).conj()

    def _correct(self, panel: Panel, i: int, y: NDArray[Any]) -> None:
        j = panel.start + i
        v = self.reflectors[j + 1 :, panel.start : panel.stop]
        w = self._w[j + 1 :]
        mine, tau = v[:, i], self.tau[j]
        if i:
            g = (w[:, :i].T @ mine.conj()).conj()
            h = (v[:, :i].T @ mine.conj()).conj()
            y -= v[:, :i] @ g
            y -= w[:, :i] @ h
        y *= tau
        half = self._dtype.type(0.5) * tau * np.vdot(y, mine)
        w[:, i] = y - half * mine

    def update(self, panel: Panel) -> None:
        """Subtract ``V W^H + W V^H`` from the own columns behind the panel, from each block on."""
        layout = self._layout
        v, w = self.reflectors[:, panel.start : panel.stop], self._w[:, : panel.width]
        for each in layout.panels[panel.stop // layout.block :]:
            if each.owner == layout.rank and each.start >= panel.stop:
                at, rows = layout.own_before(each.start), slice(each.start, each.stop)
                below = self._columns[each.start :, at : at + each.width]
                below -= v[each.start :] @ w[rows].conj().T
                below -= w[each.start :] @ v[rows].conj().T

    def tridiagonal(self) -> tuple[NDArray[Any], NDArray[Any]]:
        """Diagonal, and the elements beside it, as arrays of numpy."""
        return self.d.copy(), self.e[:-1].copy()

    def back(self, vectors: NDArray[Any]) -> NDArray[Any]:
        """Apply the reflectors to eigenvectors of the tridiagonal matrix, panel by panel.

        The reflectors of a panel are ``I - V T V^H``, with the inverse of T from V^H V alone
        (Joffrain, Low, Quintana-Orti, van de Geijn, Van Zee: Accumulating Householder
        transformations, revisited, 2006).
        """
        x = np.asfortranarray(vectors, self._dtype)
        if not x.size:
            return x
        for panel in reversed(self._layout.panels):
            v = self.reflectors[panel.start + 1 :, panel.start : panel.stop]
            if not len(v):
                continue
            part = x[panel.start + 1 :]
            tau = self.tau[panel.start : panel.stop]
            inverse = np.triu(v.conj().T @ v, 1) + np.diag(1 / np.where(tau == 0, 1, tau))
            part -= v @ _triangular(inverse, v.conj().T @ part, "N", lower=False)
        return x

    def solve_back(self, lower: NDArray[Any], x: NDArray[Any]) -> NDArray[Any]:
        """Turn eigenvectors of C into those of the problem: ``L^-H x``."""
        return _triangular(lower, x, "C") if x.size else x

    def close(self) -> None:
        """Nothing holds calls of the communicator."""


def reflector(alpha: Any, square: Any) -> tuple[Any, Any, Any]:
    """Find the Householder reflector of a vector, as LAPACK's xLARFG.

    ``(I - tau v v^H)^H (alpha, x) = (beta, 0)``, with ``v = (1, scale x)`` and beta real.

    Args:
        alpha: First element.
        square: Sum of the squares of the others' moduli.

    Returns:
        beta, tau and scale; where x is zero and alpha real, tau and scale are 0.
    """
    if square == 0 and alpha.imag == 0:
        return alpha.real, alpha * 0, alpha * 0
    norm = np.sqrt(alpha.real * alpha.real + alpha.imag * alpha.imag + square)
    beta = -np.copysign(norm, alpha.real)
    return beta, (beta - alpha) / beta, 1 / (alpha - beta)


def _triangular(
    matrix: NDArray[Any], right: NDArray[Any], trans: str, *, lower: bool = True
) -> NDArray[Any]:
    solved = linalg.solve_triangular(
        matrix, right, trans=trans, lower=lower, overwrite_b=True, check_finite=False
    )
    return np.asarray(solved)


def _zeros(shape: tuple[int, int], dtype: np.dtype[Any]) -> NDArray[Any]:
    """Columns side by side in memory, the first one aligned to a line on all ranks."""
    nbytes = shape[0] * shape[1] * dtype.itemsize
    memory = np.zeros(nbytes + _ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % _ALIGNMENT
    return memory[start : start + nbytes].view(dtype).reshape(shape[::-1]).T
