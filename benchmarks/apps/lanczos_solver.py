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
problem of m by m, and the basis is rotated to `kept` Ritz vectors, behind which q_m stands.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks.apps.lanczos_problem import NORM
from benchmarks.apps.silence import silent
from shmemar.errors import ArgumentError, MismatchError

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from benchmarks.apps.communicators import Communicator
    from benchmarks.apps.lanczos_local import LocalWork
    from benchmarks.apps.lanczos_problem import Slab

__all__ = ["Counted", "Lanczos", "Options", "Ritz", "Solution", "basis_nbytes", "projected"]

EXHAUSTED = 1e-12
"""A beta of less, relative to the operator's norm, means that the Krylov space has ended."""

SCALARS_PER_STEP = 2


@dataclass(frozen=True)
class Options:
    """What is solved, and how.

    Attributes:
        wanted: Eigenvalues.
        basis: Vectors of a full basis.
        kept: Ritz vectors that stay at a restart.
        tolerance: A Ritz value theta has converged when its residual is at most this times theta.
        which: ``smallest`` or ``largest``.
        restarts: The most restarts.
    """

    wanted: int
    basis: int
    tolerance: float
    which: str = "smallest"
    restarts: int = 1000

    def __post_init__(self) -> None:
        """Check them.

        Raises:
            ArgumentError: One is out of its range.
        """
        if self.wanted < 1:
            raise ArgumentError(f"wanted is {self.wanted}; expected 1 or more.")
        if self.basis < self.wanted + 3:
            raise ArgumentError(
                f"basis is {self.basis} for {self.wanted} wanted eigenvalues; expected "
                f"{self.wanted + 3} or more."
            )
        if not 1e-14 <= self.tolerance < 1:
            raise ArgumentError(f"tolerance is {self.tolerance}; expected 1e-14 to 1.")
        if self.restarts < 0:
            raise ArgumentError(f"restarts is {self.restarts}; expected 0 or more.")

    @property
    def kept(self) -> int:
        """Ritz vectors that stay: the wanted ones, and half of the others."""
        return self.wanted + (self.basis - self.wanted) // 2


@dataclass(frozen=True)
class Counted:
    """All-reduces of one cycle from an empty basis, as the communicator counted them.

    Attributes:
        steps: Steps of the cycle.
        scalars: All-reduces of projections.
        halos: All-reduces of planes.
        scalar_nbytes: Bytes of the former, over all steps.
        halo_nbytes: Bytes of the latter.
    """

    steps: int
    scalars: int
    halos: int
    scalar_nbytes: int
    halo_nbytes: int


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


@dataclass(frozen=True)
class Solution:
    """Result of a solve.

    Attributes:
        eigenvalues: From the wanted end inwards.
        residuals: Estimates of the norms of their residuals.
        iterations: Steps.
        restarts: Restarts.
        seconds: Of the steps of each cycle, without what the host does between them.
        steps: Steps of each cycle.
    """

    eigenvalues: NDArray[np.float64]
    residuals: NDArray[np.float64]
    iterations: int
    restarts: int
    seconds: list[float] = field(default_factory=list)
    steps: list[int] = field(default_factory=list)


def basis_nbytes(slab: Slab, options: Options) -> int:
    """Bytes of a solver's arrays on a rank, but for small ones."""
    vectors = options.basis + 1 + options.kept + 1  # the start vector
    planes = 2 * slab.size * slab.plane if slab.size > 1 else 0
    return 8 * (vectors * slab.npoints + planes)


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
        """Allocate. Collective.

        Args:
            comm: Sums scalars and planes.
            work: Of the slab, on arrays of `comm`.
            slab: The rank's.
            options: What is solved.
            start: The slab's part of the start vector, which need not be of norm 1.
        """
        self._comm, self._work, self._options = comm, work, options
        xp, m = work.xp, options.basis
        with work.context():
            self._start = xp.asarray(start)
            self._vectors = xp.zeros((m + 1, slab.npoints))
            self._rotated = xp.empty((options.kept, slab.npoints))
            self._alphas, self._betas = xp.zeros(m), xp.zeros(m)
        self._h = comm.empty((m,), "float64")
        self._g = comm.empty((m + 1,), "float64")
        self._planes = None
        if slab.size > 1:
            self._planes = comm.empty((2 * slab.size * slab.plane,), "float64")
        self._load()
        self.counted = self._count()
        self._runs = self._capture()

    def _load(self) -> None:
        """Run a cycle without sums: GPUs have loaded all kernels then. Collective."""
        comm, self._comm = self._comm, silent(self._comm)
        with self._work.context():
            self._begin()
            self._steps(0, self._options.basis)
            self._work.host(self._alphas)  # waits
        self._comm = comm
        comm.barrier()

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
            calls, nbytes = counts.calls["allreduce"], counts.nbytes["allreduce"]
            self._steps(0, m)
            self._work.host(self._alphas)  # waits
        calls, nbytes = counts.calls["allreduce"] - calls, counts.nbytes["allreduce"] - nbytes
        halos = 0 if self._planes is None else m
        halo_nbytes = 0 if self._planes is None else m * int(self._planes.nbytes)
        scalars = calls - halos
        if scalars != SCALARS_PER_STEP * m:
            raise AssertionError(
                f"{scalars} all-reduces of scalars in {m} steps; expected two a step"
            )
        return Counted(m, scalars, halos, nbytes - halo_nbytes, halo_nbytes)

    def _capture(self) -> tuple[Callable[[], None], Callable[[], None]]:
        """Steps before `kept`, which the first cycle alone has, and those behind it."""
        kept, m = self._options.kept, self._options.basis
        parts = lambda: self._steps(0, kept), lambda: self._steps(kept, m)
        if not self._comm.capturable:
            return parts
        with self._work.context():
            return self._work.capture(parts[0]), self._work.capture(parts[1])

    def solve(
        self,
        mpi_comm: Any,
        progress: Callable[[str], None] = lambda _: None,
        cycles: int | None = None,
    ) -> Solution:
        """Iterate until the wanted Ritz values have converged. Collective.

        Args:
            mpi_comm: Of the same ranks; to start together, and to compare.
            progress: Told where it is, a cycle.
            cycles: Run as many instead, whatever they give: for timing, with a communicator that
                does not sum.

        Returns:
            The same on all ranks, but for the seconds.

        Raises:
            ArgumentError: They have not converged within the restarts, or the Krylov space has
                ended, as it does on small grids; on every rank.
            MismatchError: The ranks' alphas or betas differ by a bit; on every rank.
        """
        options, work = self._options, self._work
        kept, m = options.kept, options.basis
        values, arrow = np.empty(0), np.empty(0)
        seconds, steps = [], []
        limit = options.restarts + 1 if cycles is None else cycles
        with work.context():
            self._begin()
            for cycle in range(limit):
                self._comm.barrier()
                seconds.append(work.time(self._first_cycle if cycle == 0 else self._runs[1]))
                steps.append(m if cycle == 0 else m - kept)
                alphas, betas = work.host(self._alphas), work.host(self._betas)
                if cycles is None:
                    _require_same(mpi_comm, alphas, betas)
                    _require_alive(betas, len(values))
                ritz = self._ritz(projected(values, arrow, alphas, betas), float(betas[-1]))
                bounds = options.tolerance * np.abs(ritz.values)
                converged = int(np.sum((ritz.residuals <= bounds)[: options.wanted]))
                progress(f"{sum(steps)} iterations, {converged} of {options.wanted} converged")
                if converged == options.wanted and cycles is None:
                    break
                if cycle < limit - 1:
                    self._restart(ritz)
                    values = ritz.values[:kept]
                    arrow = betas[-1] * ritz.vectors[-1, :kept]
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
            seconds,
            steps,
        )

    def _first_cycle(self) -> None:
        for run in self._runs:
            run()

    def _ritz(self, matrix: NDArray[np.float64], beta: float) -> Ritz:
        values, vectors = np.linalg.eigh(matrix)
        if self._options.which == "largest":
            values, vectors = values[::-1], vectors[:, ::-1]
        return Ritz(values, np.abs(beta * vectors[-1]), vectors)

    def _restart(self, ritz: Ritz) -> None:
        kept, m, xp = self._options.kept, self._options.basis, self._work.xp
        rotation = xp.asarray(np.ascontiguousarray(ritz.vectors[:, :kept].T))
        xp.matmul(rotation, self._vectors[:m], out=self._rotated)
        self._vectors[:kept] = self._rotated
        self._vectors[kept] = self._vectors[m]


def _require_same(mpi_comm: Any, alphas: NDArray[np.float64], betas: NDArray[np.float64]) -> None:
    digest = hashlib.sha256(alphas.tobytes() + betas.tobytes()).digest()
    everyone = mpi_comm.allgather(digest)
    others = [rank for rank, each in enumerate(everyone) if each != everyone[0]]
    if others:
        raise MismatchError(
            f"alphas and betas of ranks {', '.join(map(str, others))} differ from those of rank 0; "
            "expected the same bits, as the all-reduces' results have to be. Compare backends."
        )


def _require_alive(betas: NDArray[np.float64], first: int) -> None:
    ended = np.flatnonzero(~(betas[first:] > EXHAUSTED * NORM))
    if ended.size:
        raise ArgumentError(
            f"the Krylov space has ended behind {first + int(ended[0]) + 1} vectors; expected a "
            "larger grid, or one of less equal extents, for this basis. Take a smaller basis."
        )
