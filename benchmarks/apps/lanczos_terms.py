"""What a Lanczos solver is asked for, the memory that it takes, and what it gives."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from shmemar.errors import ArgumentError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from benchmarks.apps.lanczos_problem import Slab

__all__ = ["Counted", "Options", "Solution", "basis_nbytes"]


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
class Solution:
    """Result of a solve.

    Attributes:
        eigenvalues: From the wanted end inwards.
        residuals: Estimates of the norms of their residuals.
        iterations: Steps.
        restarts: Restarts.
        allreduces: Of the solve, with those in graphs.
        alike: Whether all ranks had the same bits in all alphas and betas.
        seconds: Of the steps of each cycle, without what the host does between them.
        steps: Steps of each cycle.
    """

    eigenvalues: NDArray[np.float64]
    residuals: NDArray[np.float64]
    iterations: int
    restarts: int
    allreduces: int
    alike: bool
    seconds: list[float] = field(default_factory=list)
    steps: list[int] = field(default_factory=list)


def basis_nbytes(slab: Slab, options: Options) -> int:
    """Bytes of a solver's arrays on a rank, but for small ones."""
    vectors = options.basis + 1 + options.kept + 1  # the start vector
    planes = 2 * slab.size * slab.plane if slab.size > 1 else 0
    return 8 * (vectors * slab.npoints + planes)
