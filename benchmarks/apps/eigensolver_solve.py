"""The generalised eigenproblem ``A x = lambda B x``, over ranks that share small sums.

A is Hermitian and B Hermitian and positive definite; all ranks have both. One stage, columns dealt
in blocks (:mod:`benchmarks.apps.eigensolver_layout`), panels on all ranks:

1. cholesky: ``B = L L^H``, on every rank
2. standard form: the own columns of ``C = L^-1 A L^-H``; no communication
3. tridiagonalise: ``Q^H C Q = T``. Each panel is broadcast once; every rank forms the Householder
   vectors and keeps V and W, as LAPACK's xLATRD; one all-reduce a column sums the products of the
   own columns, lower stored, with v; then each rank updates its own columns, rank 2 x block
4. tridiagonal: eigenvalues and vectors of T by LAPACK's stevd, in float64, on every rank
5. back: ``x = L^-H Q z`` of the own vectors; no communication

As panels and sums have the same bits on all ranks, so have T and the reflectors: no rank tells
another one what it found.
"""

from __future__ import annotations

import math
import time
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

import numpy as np
from scipy import linalg

from benchmarks.apps.agreement import together
from benchmarks.apps.eigensolver_agreement import (
    agreed,
    compare,
    require_room,
    require_room_for,
    same_pairs,
)
from benchmarks.apps.eigensolver_host import HostWork
from benchmarks.apps.eigensolver_layout import Layout, check_problem, needed
from shmemar.errors import ArgumentError, ArgumentTypeError, ShmemarError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from numpy.typing import NDArray

    from benchmarks.apps.communicators import Communicator

    Tell = Callable[[str], None]

__all__ = [
    "PHASES",
    "Solution",
    "Solver",
    "Tridiagonal",
    "generalised_eigh",
    "tridiagonalise",
]

PHASES = ("check", "cholesky", "standard form", "tridiagonalise", "tridiagonal", "back")
"""What a solve is timed by; `check` looks at the arguments."""


@dataclass(frozen=True)
class Tridiagonal:
    """A Hermitian matrix C in tridiagonal form, ``Q^H C Q = T``.

    Reflectors and factors are the solver's own arrays, not copies: its next call overwrites them.

    Attributes:
        d: Diagonal of T, n real numbers; on all ranks.
        e: What is beside it, n - 1 real numbers; on all ranks.
        reflectors: n x n, in column j the vector of ``H_j = I - tau_j v v^H``, with
            ``Q = H_0 H_1 ...``; on all ranks.
        tau: Their n factors.
        alike: Whether the ranks found the same bits of d and e. Where not, these are rank 0's.
        seconds: Time of the reduction.
        allreduces: All-reduces that were made.
        broadcasts: Broadcasts that were made.
    """

    d: NDArray[Any]
    e: NDArray[Any]
    reflectors: Any
    tau: Any
    alike: bool
    seconds: float
    allreduces: int
    broadcasts: int


@dataclass(frozen=True)
class Solution:
    """All eigenvalues, and the own part of the eigenvectors.

    Attributes:
        eigenvalues: n real numbers, rising; on all ranks.
        own_vectors: n x own; ``x^H B x = 1``, an array as the communicator takes them.
        own_columns: Which eigenvalues they are of.
        d: As of `Tridiagonal`.
        e: As of `Tridiagonal`.
        alike: As of `Tridiagonal`.
        timings: Seconds by `PHASES`.
        allreduces: All-reduces that were made.
        broadcasts: Broadcasts that were made.
    """

    eigenvalues: NDArray[Any]
    own_vectors: Any
    own_columns: NDArray[np.int64]
    d: NDArray[Any]
    e: NDArray[Any]
    alike: bool
    timings: dict[str, float]
    allreduces: int
    broadcasts: int


def generalised_eigh(a: Any, b: Any, comm: Communicator, *, block: int = 32) -> Solution:
    """Solve ``A x = lambda B x`` for all eigenvalues and eigenvectors. Collective.

    Who solves many problems of a size makes a `Solver` once.

    Args:
        a: Hermitian matrix, n x n, of float32, float64, complex64 or complex128; the same on all
            ranks, which is not compared. An array of numpy, or of the communicator's library.
        b: Hermitian positive definite matrix like it.
        comm: The ranks; n may be smaller than their number.
        block: Columns of a block, 1 to 128; the same on all ranks.

    Raises:
        ArgumentTypeError: `a` or `b` is no such array; on every rank.
        ArgumentError: Shapes, types, `block`, an element that is not finite, a matrix that is not
            Hermitian, or `b` is not positive definite, or there is not enough memory; on every
            rank, before any sum is started.
        MismatchError: The ranks' problems differ in size, type or block; on every rank.

    Example::

        x = generalised_eigh(a, b, comm)
        print(x.eigenvalues[0], x.own_columns)
    """
    n, dtype = _size_of(comm, a, block)
    with Solver(n, dtype, comm, block=block) as solver:
        return solver.solve(a, b)


def tridiagonalise(c: Any, comm: Communicator, *, block: int = 32) -> Tridiagonal:
    """Reduce a Hermitian matrix to tridiagonal form. Collective.

    Arguments and errors are those of `generalised_eigh`.
    """
    n, dtype = _size_of(comm, c, block)
    with Solver(n, dtype, comm, block=block) as solver:
        return solver.tridiagonalise(c)


class Solver:
    """Memory, kernels and graphs for problems of one size, to be solved many times. Collective.

    Close it before the communicator, or use it in a ``with`` statement.

    Attributes:
        layout: Who has which columns.
        dtype: Element type.
        comm: The ranks.
        capture_seconds: Time that it took to capture the CUDA graphs; 0 on the CPU.
    """

    def __init__(
        self, n: int, dtype: Any, comm: Communicator, *, block: int = 64, fuses: bool = False
    ) -> None:
        """Allocate, compile, capture.

        Args:
            n: Rows and columns.
            dtype: As of `generalised_eigh`.
            comm: The ranks.
            block: As of `generalised_eigh`.
            fuses: Whether ranks sum in the kernel that adds up a product, in the place of one of
                their own; for shmemar on GPUs.

        Raises:
            ArgumentError: An argument, or the memory does not suffice; on every rank.
            MismatchError: The ranks' arguments differ; on every rank.
        """
        self.comm = comm
        self.dtype = together(comm, lambda: check_problem(n, dtype, block))
        compare(comm, {"n": int(n), "dtype": self.dtype.name, "block": int(block), "fuses": fuses})
        if fuses and (comm.fusing is None or comm.xp is np):
            where = "numpy arrays" if comm.xp is np else "GPUs"
            raise ArgumentError(
                f"fuses is True over backend {comm.name} on {where}; expected shmemar on GPUs."
            )
        self._fuses = fuses
        self.layout = Layout(int(n), int(block), comm.rank, comm.size)
        wanted = needed(self.layout, self.dtype)
        require_room(comm, wanted.arrays, wanted.host)
        # Steps of one rank alone, in which it may fail, and collective ones take turns.
        self._work: Any = together(comm, self._make_work)
        self._work.share()
        together(comm, self._work.warm_up)
        self._work.prepare()
        comm.barrier()
        together(comm, self._work.capture)
        comm.barrier()
        self.capture_seconds: float = self._work.capture_seconds

    def _make_work(self) -> Any:
        if self.comm.xp is np:
            return HostWork(self.layout, self.dtype, self.comm)
        from benchmarks.apps.eigensolver_device import DeviceWork

        return DeviceWork(self.layout, self.dtype, self.comm, fuses=self._fuses)

    def solve(self, a: Any, b: Any, *, progress: Tell = lambda _: None) -> Solution:
        """Solve a problem; `generalised_eigh` has arguments and errors. Collective.

        Args:
            a: Hermitian matrix.
            b: Hermitian positive definite matrix.
            progress: Hears a line after each panel.
        """
        comm, work = self.comm, self._work
        timings: dict[str, float] = {}
        comm.barrier()
        with work.context():
            with self._phase(timings, "check"):
                require_room_for(comm, self.layout, self.dtype, a, b)
                a, a_power = together(comm, lambda: self._checked("a", a))
                b, b_power = together(comm, lambda: self._checked("b", b))
                b_power += b_power % 2
            with self._phase(timings, "cholesky"):
                lower = together(comm, lambda: work.cholesky(_scaled(b, b_power)))
            with self._phase(timings, "standard form"):
                together(comm, lambda: work.load_standard(_scaled(a, a_power), lower))
            found = self._reduce(progress)
            timings["tridiagonalise"] = found.seconds
            with self._phase(timings, "tridiagonal"):
                values, vectors = together(comm, lambda: _solve_tridiagonal(found.d, found.e))
                values, vectors = same_pairs(comm, values, vectors)
            with self._phase(timings, "back"):
                own = work.back(vectors[:, self.layout.own])
                del vectors
                own = work.solve_back(lower, own)
        power = a_power - b_power
        return Solution(
            np.ldexp(values, power).astype(found.d.dtype),
            _scaled(own, b_power // 2),
            self.layout.own,
            np.ldexp(found.d, power),
            np.ldexp(found.e, power),
            found.alike,
            timings,
            found.allreduces,
            found.broadcasts,
        )

    def tridiagonalise(self, c: Any, *, progress: Tell = lambda _: None) -> Tridiagonal:
        """Reduce a Hermitian matrix; `generalised_eigh` has arguments and errors. Collective.

        What it returns has the solver's own reflectors and factors, which its next call overwrites.
        """
        work = self._work
        self.comm.barrier()
        with work.context():
            require_room_for(self.comm, self.layout, self.dtype, c)
            c, power = together(self.comm, lambda: self._checked("c", c))
            together(self.comm, lambda: work.load(_scaled(c, power)))
            found = self._reduce(progress)
        d, e = np.ldexp(found.d, power), np.ldexp(found.e, power)
        return Tridiagonal(
            d,
            e,
            found.reflectors,
            found.tau,
            found.alike,
            found.seconds,
            found.allreduces,
            found.broadcasts,
        )

    def time_reduction(self, c: Any) -> float:
        """Seconds of a reduction of which only the time counts. Collective.

        With a communicator that sums nothing, it is the time of all but the communication.
        """
        work = self._work
        with work.context(), np.errstate(all="ignore"):
            work.load(work.take(c))
            return self._run(lambda _: None)[0]

    def _reduce(self, progress: Tell) -> Tridiagonal:
        work = self._work
        seconds, allreduces, broadcasts = self._run(progress)
        d, e, alike = agreed(self.comm, *work.tridiagonal())
        if not (np.isfinite(d).all() and np.isfinite(e).all()):
            raise ArgumentError(
                f"the tridiagonal matrix is not finite; expected a problem that {self.dtype} can "
                "hold. Is b close to singular?"
            )
        return Tridiagonal(d, e, work.reflectors, work.tau, alike, seconds, allreduces, broadcasts)

    def _run(self, progress: Tell) -> tuple[float, int, int]:
        """Reduce what is loaded: seconds, all-reduces, broadcasts."""
        comm, work, n = self.comm, self._work, self.layout.n
        comm.barrier()
        before = dict(comm.counts.calls)
        start = time.perf_counter()
        for panel in self.layout.panels:
            comm.broadcast(work.pack(panel), panel.owner)
            work.reduce(panel)
            if panel.stop < n:
                work.update(panel)
            progress(f"tridiagonalise: column {panel.stop} of {n}")
        work.synchronize()
        seconds = time.perf_counter() - start
        made = {
            name: comm.counts.calls.get(name, 0) - before.get(name, 0)
            for name in ("allreduce", "broadcast")
        }
        return seconds, made["allreduce"] + work.captured, made["broadcast"]

    def _checked(self, name: str, matrix: Any) -> tuple[Any, int]:
        """A matrix in the own library's memory, and the power of 2 that it is to be divided by."""
        n = self.layout.n
        xp = self.comm.xp
        if not isinstance(matrix, (np.ndarray, xp.ndarray)):
            raise ArgumentTypeError(
                f"{name} is {type(matrix).__name__}; expected an array of {xp.__name__} or numpy."
            )
        if matrix.shape != (n, n) or matrix.dtype != self.dtype:
            raise ArgumentError(
                f"{name} is {matrix.dtype} {matrix.shape}; expected {self.dtype} {(n, n)}. Make a "
                "and b alike."
            )
        matrix = self._work.take(matrix)
        largest = float(abs(matrix).max())
        if not math.isfinite(largest):
            raise ArgumentError(f"{name} has elements that are not finite; expected numbers.")
        uneven = float(abs(matrix - matrix.conj().T).max())
        info = np.finfo(self.dtype)
        if uneven > n * float(info.eps) * largest:
            raise ArgumentError(
                f"{name} is not {'Hermitian' if self.dtype.kind == 'c' else 'symmetric'}: an "
                f"element and its mirror image differ by {uneven:.2g}, where the largest is "
                f"{largest:.2g}; expected at most {n * float(info.eps) * largest:.2g}. Take half "
                "the sum of it and its conjugate transpose, if that is what is meant."
            )
        # As LAPACK's xSYEVD: squares neither overflow nor vanish between these.
        least = math.sqrt(float(info.tiny) / float(info.eps))
        if largest == 0 or least <= largest <= 1 / least:
            return matrix, 0
        return matrix, math.frexp(largest)[1]

    @contextmanager
    def _phase(self, timings: dict[str, float], name: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self._work.synchronize()
        timings[name] = time.perf_counter() - start

    def close(self) -> None:
        """Destroy the graphs, which hold calls of the communicator; a second call does nothing."""
        self._work.close()

    def __enter__(self) -> Self:
        """Return the solver itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close it."""
        self.close()


def _size_of(comm: Communicator, matrix: Any, block: Any) -> tuple[int, Any]:
    """Size and type of a problem, which `Solver` checks."""

    def find() -> tuple[int, Any]:
        shape = getattr(matrix, "shape", None)
        if not isinstance(shape, tuple) or len(shape) != 2 or shape[0] != shape[1]:
            got = type(matrix).__name__ if shape is None else f"of shape {shape}"
            raise ArgumentError(f"a matrix is {got}; expected n rows and columns.")
        check_problem(shape[0], matrix.dtype, block)
        return shape[0], matrix.dtype

    return together(comm, find)


def _scaled(matrix: Any, power: int) -> Any:
    """Divide by a power of 2, exactly; the array itself where there is nothing to do."""
    # In two steps, as its inverse need not be a number of the type.
    half = power // 2
    for part in (half, power - half):
        if part:
            matrix = matrix * matrix.dtype.type(2.0**-part)
    return matrix


def _solve_tridiagonal(d: NDArray[Any], e: NDArray[Any]) -> tuple[NDArray[Any], NDArray[Any]]:
    try:
        values, vectors = linalg.eigh_tridiagonal(
            d.astype(np.float64), e.astype(np.float64), lapack_driver="stevd", check_finite=False
        )
    except linalg.LinAlgError as error:
        raise ShmemarError(f"LAPACK's stevd did not converge: {error}") from error
    return values, vectors
