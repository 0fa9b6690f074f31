"""The seven-point Laplacian on a grid: slabs of ranks, exact eigenvalues, a start vector."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from shmemar.errors import ArgumentError

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["WHICH", "Grid", "Slab"]

WHICH = ("smallest", "largest")
"""Ends of the spectrum."""

NORM = 12.0
"""Above every eigenvalue, whatever the grid."""

SIMPLE = 1e-9
"""Wanted eigenvalues whose relative distance is less count as equal."""


@dataclass(frozen=True)
class Slab:
    """Planes of a grid that a rank has, ``[first, last)``.

    Attributes:
        rank: Whose they are.
        size: Number of ranks.
        nx: Points of a row.
        ny: Rows of a plane.
        first: The first plane.
        last: The one behind the last.
    """

    rank: int
    size: int
    nx: int
    ny: int
    first: int
    last: int

    @property
    def plane(self) -> int:
        """Points of a plane."""
        return self.nx * self.ny

    @property
    def npoints(self) -> int:
        """Points of the slab."""
        return (self.last - self.first) * self.plane


@dataclass(frozen=True)
class Grid:
    """An nx by ny by nz grid whose neighbours outside are zero (Dirichlet).

    The operator is 6 at a point and -1 at its six neighbours. Points are numbered with x fastest.

    Attributes:
        nx: Points along x.
        ny: Points along y.
        nz: Points along z.
    """

    nx: int
    ny: int
    nz: int

    @classmethod
    def parse(cls, text: str) -> Grid:
        """Read ``nx,ny,nz``.

        Raises:
            ArgumentError: Not three numbers from 1 on.
        """
        parts = text.split(",")
        if len(parts) != 3 or not all(part.isdecimal() and int(part) for part in parts):
            raise ArgumentError(f"grid is {text!r}; expected three extents such as 32,30,28.")
        return cls(*map(int, parts))

    @property
    def npoints(self) -> int:
        """Points of the grid."""
        return self.nx * self.ny * self.nz

    def slab(self, rank: int, size: int) -> Slab:
        """Planes of a rank: all ranks have as many, or one more.

        Raises:
            ArgumentError: There are fewer planes than ranks.
        """
        if self.nz < size:
            raise ArgumentError(
                f"grid has {self.nz} planes along z for {size} ranks; expected one a rank at "
                "least. Take a larger nz, or fewer ranks."
            )
        first, last = rank * self.nz // size, (rank + 1) * self.nz // size
        return Slab(rank, size, self.nx, self.ny, first, last)

    def eigenvalues(self, count: int, which: str) -> NDArray[np.float64]:
        """The `count` eigenvalues at one end, exact but for rounding, from that end inwards.

        They are sums over the axes of ``4 sin(pi i / (2 (n + 1)))**2``, i from 1 to n.
        """
        # The i-th of an axis is in no sum among the first i - 1.
        axes = []
        for n in (self.nx, self.ny, self.nz):
            nearest = np.arange(1, min(n, count) + 1)
            index = nearest if which == "smallest" else n + 1 - nearest
            axes.append(4 * np.sin(np.pi * index / (2 * (n + 1))) ** 2)
        x, y, z = axes
        sums = np.sort((z[:, None, None] + y[:, None] + x).ravel())
        return sums[:count] if which == "smallest" else sums[::-1][:count]

    def require_simple(self, count: int, which: str) -> None:
        """Refuse a grid some of whose `count` eigenvalues at one end are multiple.

        A Krylov space has one vector of each eigenspace.

        Raises:
            ArgumentError: They are, or there are not as many.
        """
        if self.npoints <= count:
            raise ArgumentError(
                f"wanted is {count} on a grid of {self.npoints} points; expected fewer than points."
            )
        values = self.eigenvalues(count + 1, which)
        near = np.flatnonzero(np.abs(np.diff(values)) <= SIMPLE * np.abs(values[1:]))
        if near.size:
            at = int(near[0]) + 1
            raise ArgumentError(
                f"grid is {self.nx},{self.ny},{self.nz}, whose {which} eigenvalues number {at} and "
                f"{at + 1} are equal ({values[at]:.6g}), of which Lanczos finds one vector; "
                "expected simple ones. Take three different extents."
            )

    def start(self, slab: Slab, seed: int) -> NDArray[np.float64]:
        """Random numbers in [-1, 1) on a slab's points, the same for any number of ranks.

        They are drawn by counter (Philox) from the point's number in the grid.
        """
        begin = slab.first * slab.plane
        bits: Any = np.random.Philox(key=seed)
        bits.advance(begin // 4)  # a step of the counter makes four numbers
        drawn = np.random.Generator(bits).random(begin % 4 + slab.npoints)
        return 2 * drawn[begin % 4 :] - 1
