"""Thick-restart Lanczos over slabs (Wu and Simon, SIAM J. Matrix Anal. Appl. 22, 602, 2000).

A cycle fills the basis q_0 .. q_m. Step j, two all-reduces beside the exchange of planes:

1. w = A q_j; the outer planes of all slabs go through one all-reduce of an array that is zero
   where another rank's planes are. It is counted apart. (A point-to-point exchange would send less;
   the communicators have none, and x + 0 is exact.)
2. h = [q_0 .. q_j]^T w                 all-reduce of 8 (j + 1) bytes
3. w -= [q_0 .. q_j] h                  classical Gram-Schmidt, first pass
4. g = [q_0 .. q_j, w]^T w              all-reduce of 8 (j + 2) bytes
5. w -= [q_0 .. q_j] g[:-1]             second pass
6. alpha_j = h_j + g_j, beta_j^2 = g[-1] - g[:-1]^T g[:-1], q_{j+1} = w / beta_j

Two passes keep the basis orthogonal to rounding ("twice is enough", Giraud, Langou and Rozloznik
2005). The norm behind the second pass comes by Pythagoras from the norm before it: what that pass
takes away is of the size of rounding, so nothing cancels. alpha, beta and all projections stay in
device memory. At the end of a cycle the host gets the alphas and betas, solves the projected
problem of m by m, and the basis is rotated to `kept` Ritz vectors, behind which q_m stands. All
ranks take rank 0's alphas, betas and Ritz vectors, so that they rotate and stop alike.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks.apps.agreement import of_first, together
from benchmarks.apps.lanczos_problem import NORM
from benchmarks.apps.lanczos_terms import Counted, Solution
from benchmarks.apps.silence import silent
from shmemar.errors import ArgumentError

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from benchmarks.apps.communicators import Communicator
    from benchmarks.apps.lanczos_local import LocalWork
    from benchmarks.apps.lanczos_problem import Slab
    from benchmarks.apps.lanczos_terms import Options

__all__ = ["Lanczos", "Ritz", "projected"]

EXHAUSTED = 1e-12
"""A beta of less, relative to the operator's norm, means that the Krylov space has ended."""

SCALARS_PER_STEP = 2


@dataclass(frozen=True)
class Ritz:
    """What the projected problem of a cycle gave, from the wanted end inwards.

    Attributes:
        values: All Ritz values.
        residuals: Norms of their residuals.
        vectors: Their coefficients in the basis, as columns.
    """

    values: NDArray[np.float64]
    residuals: NDArray[np.float64]
    vectors: NDArray[np.float64]


def projected(
    values: NDArray[np.float64],
    arrow: NDArray[np.float64],
    alphas: NDArray[np.float64],
    betas: NDArray[np.float64],
) -> NDArray[np.float64]:
    """The operator in the basis: an arrow of kept Ritz values, and a tridiagonal behind it.

    Args:
        values: Kept Ritz values, k of them; none in the first cycle.
        arrow: Their coupling to q_k.
        alphas: All m; the first k are not used.
        betas: Likewise.

    Returns:
        A symmetric matrix, m by m.
    """
    k, m = len(values), len(alphas)
    matrix = np.zeros((m, m))
    diagonal = np.arange(m)
    matrix[diagonal, diagonal] = np.concatenate([values, alphas[k:]])
    matrix[:k, k] = matrix[k, :k] = arrow
    behind = np.arange(k, m - 1)
    matrix[behind, behind + 1] = matrix[behind + 1, behind] = betas[k : m - 1]
    return matrix


class Lanczos:
    """A solver over one communicator. All ranks make the same calls."""

    def __init__(
        self,
        comm: Communicator,
        work: LocalWork,
        slab: Slab,
        options: Options,
        start: NDArray[np.float64],
    ) -> None:
        """Allocate, load kernels, count the all-reduces of a cycle, and capture. Collective.

        When it returns, all ranks have done so, and a solve waits for nothing but its sums.

        Args:
            comm: Sums scalars and planes.
            work: Of the slab, on arrays of `comm`.
            slab: The rank's.
            options: What is solved.
            start: The slab's part of the start vector, which need not be of norm 1.

        Raises:
            ShmemarError: A rank could not allocate or load; on every rank.
        """
        self._comm, self._work, self._options = comm, work, options
        m = options.basis
        self._vectors: Any = None
        together(comm, lambda: self._allocate(slab, start))
        self._h = comm.empty((m,), "float64")
        self._g = comm.empty((m + 1,), "float64")
        self._planes: Any = None
        largest = self._g.nbytes
        if slab.size > 1:
            self._planes = comm.empty((2 * slab.size * slab.plane,), "float64")
            largest = max(largest, self._planes.nbytes)
        together(comm, self._load)
        comm.barrier()
        with work.context():
            comm.prepare("float64", int(largest))
        comm.barrier()
        self.counted = self._count()
        comm.barrier()
        # Of the steps before `kept`, which the first cycle alone has, and of those behind it.
        self._graphs: tuple[Callable[[], None], ...] | None = None
        if comm.capturable:
            parts = (0, options.kept), (options.kept, m)
            self._graphs = tuple(self._capture(first, last) for first, last in parts)
        self._replayed = 0
        comm.barrier()

    def _allocate(self, slab: Slab, start: NDArray[np.float64]) -> None:
        xp, m, kept = self._work.xp, self._options.basis, self._options.kept
        with self._work.context():
            self._start = xp.asarray(start)
            self._vectors = xp.zeros((m + 1, slab.npoints))
            self._rotated = xp.empty((kept, slab.npoints))
            self._alphas, self._betas = xp.zeros(m), xp.zeros(m)

    def _load(self) -> None:
        """Run a cycle without sums, and a restart: GPUs have loaded all kernels then."""
        m, kept = self._options.basis, self._options.kept
        comm, self._comm = self._comm, silent(self._comm)
        try:
            with self._work.context():
                for each in (self._h, self._g, self._planes):
                    if each is not None:
                        each.fill(0)
                self._begin()
                self._steps(0, m)
                self._restart(np.eye(m, kept))
                self._work.host(self._alphas)  # waits
        finally:
            self._comm = comm

    def _step(self, j: int) -> None:
        comm, work, vectors = self._comm, self._work, self._vectors
        basis, q, w = vectors[: j + 1], vectors[j], vectors[j + 1]
        if self._planes is not None:
            work.pack(q, self._planes)
            comm.allreduce(self._planes)
        work.stencil(q, self._planes, w)
        h, g = self._h[: j + 1], self._g[: j + 2]
        work.project(basis, w, h)
        comm.allreduce(h)
        work.subtract(basis, h, w)
        work.project(vectors[: j + 2], w, g)
        comm.allreduce(g)
        work.subtract(basis, g[: j + 1], w)
        work.normalise(w, h, g, self._alphas, self._betas, j)

    def _steps(self, first: int, last: int) -> None:
        for j in range(first, last):
            self._step(j)

    def _begin(self) -> None:
        """Put in the start vector, of norm 1; one all-reduce."""
        work, vectors = self._work, self._vectors
        vectors[0] = self._start
        work.project(vectors[:1], vectors[0], self._g[:1])
        self._comm.allreduce(self._g[:1])
        vectors[0] /= work.xp.sqrt(self._g[0])

    def _count(self) -> Counted:
        """Run a cycle, which also makes ready what a capture needs, and count its all-reduces."""
        counts, m = self._comm.counts, self._options.basis
        with self._work.context():
            self._begin()
            # The first all-reduce has been made, so the name is there.
            calls, nbytes = self._calls(), counts.nbytes["allreduce"]
            self._steps(0, m)
            self._work.host(self._alphas)  # waits
        self._require_calls(self._calls() - calls, m)
        nbytes = counts.nbytes["allreduce"] - nbytes
        halos = 0 if self._planes is None else m
        halo_nbytes = 0 if self._planes is None else m * int(self._planes.nbytes)
        return Counted(m, SCALARS_PER_STEP * m, halos, nbytes - halo_nbytes, halo_nbytes)

    def _calls(self) -> int:
        return self._comm.counts.calls.get("allreduce", 0)

    def _require_calls(self, calls: int, steps: int, others: int = 0) -> None:
        """Check the all-reduces of steps, and `others` beside."""
        each = SCALARS_PER_STEP + (self._planes is not None)
        if calls != steps * each + others:
            raise AssertionError(
                f"{calls} all-reduces in {steps} steps; expected {each} a step, and {others} more"
            )

    def _capture(self, first: int, last: int) -> Callable[[], None]:
        """A graph of steps, whose all-reduces are counted as it is captured."""
        before = self._calls()
        with self._work.context():
            graph = self._work.capture(partial(self._steps, first, last))
        self._require_calls(self._calls() - before, last - first)
        return graph

    def solve(
        self,
        progress: Callable[[str], None] = lambda _: None,
        cycles: int | None = None,
    ) -> Solution:
        """Iterate until the wanted Ritz values have converged. Collective.

        Args:
            progress: Told where it is, a cycle.
            cycles: Run as many instead, whatever they give: for timing, with a communicator that
                does not sum.

        Returns:
            The same on all ranks, but for the seconds.

        Raises:
            ArgumentError: They have not converged within the restarts, or the Krylov space has
                ended, as it does on small grids; on every rank.
            MismatchError: The ranks' alphas or betas differ by a bit, and the communicator is
                shmemar's, which promises that they don't; on every rank.
        """
        options, work = self._options, self._work
        kept, m = options.kept, options.basis
        values, arrow = np.empty(0), np.empty(0)
        seconds, steps, alike = [], [], True
        calls, self._replayed = self._calls(), 0
        limit = options.restarts + 1 if cycles is None else cycles
        with work.context():
            self._begin()
            for cycle in range(limit):
                self._comm.barrier()
                seconds.append(work.time(self._first_cycle if cycle == 0 else self._next_cycle))
                steps.append(m if cycle == 0 else m - kept)
                alphas, betas = work.host(self._alphas), work.host(self._betas)
                if cycles is None:
                    (alphas, betas), same = of_first(self._comm, "alphas and betas", alphas, betas)
                    alike = alike and same
                    _require_alive(betas, len(values))
                ritz = self._ritz(projected(values, arrow, alphas, betas), float(betas[-1]))
                if cycles is None:
                    ritz = self._of_first(ritz)
                bounds = options.tolerance * np.abs(ritz.values)
                converged = int(np.sum((ritz.residuals <= bounds)[: options.wanted]))
                progress(f"{sum(steps)} iterations, {converged} of {options.wanted} converged")
                if converged == options.wanted and cycles is None:
                    break
                if cycle < limit - 1:
                    self._restart(ritz.vectors[:, :kept])
                    values = ritz.values[:kept]
                    arrow = betas[-1] * ritz.vectors[-1, :kept]
        calls = self._calls() - calls + self._replayed
        self._require_calls(calls, sum(steps), 1)  # of the start vector
        if cycles is None and converged < options.wanted:
            raise ArgumentError(
                f"restarts is {options.restarts}, within which {converged} of {options.wanted} "
                f"eigenvalues converged to {options.tolerance:g}; expected all. Allow more, or "
                "take a larger basis."
            )
        return Solution(
            ritz.values[: options.wanted],
            ritz.residuals[: options.wanted],
            sum(steps),
            len(steps) - 1,
            calls,
            alike,
            seconds,
            steps,
        )

    def _first_cycle(self) -> None:
        self._run(0, self._options.kept)
        self._next_cycle()

    def _next_cycle(self) -> None:
        self._run(self._options.kept, self._options.basis)

    def _run(self, first: int, last: int) -> None:
        if self._graphs is None:
            self._steps(first, last)
            return
        self._graphs[1 if first else 0]()
        self._replayed += (last - first) * (SCALARS_PER_STEP + (self._planes is not None))

    def _of_first(self, ritz: Ritz) -> Ritz:
        """Rank 0's, as LAPACK need not give the same bits on all hosts. Collective."""
        everyone: list[Any] = self._comm.host_allgather(ritz if self._comm.rank == 0 else None)
        first: Ritz = everyone[0]
        return first

    def _ritz(self, matrix: NDArray[np.float64], beta: float) -> Ritz:
        values, vectors = np.linalg.eigh(matrix)
        if self._options.which == "largest":
            values, vectors = values[::-1], vectors[:, ::-1]
        return Ritz(values, np.abs(beta * vectors[-1]), vectors)

    def _restart(self, coefficients: NDArray[np.float64]) -> None:
        """Rotate the basis to as many vectors as `coefficients` has columns; q_m stands behind."""
        kept, m, xp = self._options.kept, self._options.basis, self._work.xp
        rotation = xp.asarray(np.ascontiguousarray(coefficients.T))
        xp.matmul(rotation, self._vectors[:m], out=self._rotated)
        self._vectors[:kept] = self._rotated
        self._vectors[kept] = self._vectors[m]


def _require_alive(betas: NDArray[np.float64], first: int) -> None:
    ended = np.flatnonzero(~(betas[first:] > EXHAUSTED * NORM))
    if ended.size:
        raise ArgumentError(
            f"the Krylov space has ended behind {first + int(ended[0]) + 1} vectors; expected a "
            "larger grid, or one of less equal extents, for this basis. Take a smaller basis."
        )
