"""The tuner: measures kernels, protocols and grids over the sizes, and makes a table of it.

On GPUs each is timed in CUDA graphs (:mod:`shmemar.host.timing`), which is how kernels are used
where latency matters; emulated ranks are timed call by call, which says nothing about a GPU. Every
sample is checked.
"""

from __future__ import annotations

import math
import time
from dataclasses import asdict, dataclass, replace
from functools import partial
from importlib.util import find_spec
from statistics import median
from typing import TYPE_CHECKING, Any

import numpy as np

from shmemar.errors import BackendUnavailableError, ShmemarError
from shmemar.host.arrays import Arrays
from shmemar.host.exact import count_wrong, exact_input, exact_result, numpy_dtype, poison
from shmemar.host.litmus import lines_verdict
from shmemar.host.selector import CANDIDATES, Band, Candidate, Table
from shmemar.host.timing import time_graph
from shmemar.spec import Backend, Determinism

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from shmemar.dtypes import DType, ReduceOp
    from shmemar.host.communicator import Communicator

__all__ = ["Effort", "Measured", "table_of", "tune"]

_BUFFERS = 4
_MANY_BLOCKS = 16
"""From so many blocks on fewer are tried, too."""


@dataclass(frozen=True)
class Effort:
    """How much is measured.

    Attributes:
        samples: Samples of each kernel, grid and size.
        repeats: Collectives in a graph.
    """

    samples: int = 10
    repeats: int = 50


@dataclass(frozen=True)
class Measured:
    """One kernel with one grid at one size.

    Attributes:
        nbytes: Bytes of the message.
        kernel: Kernel and protocol.
        max_blocks: Cap on the blocks; None for none.
        blocks: Blocks of the grid.
        median_us: Microseconds a collective: the largest median of the ranks.
        spread_us: From that rank's 20th to its 80th percentile.
        wrong: Wrong elements over all samples and ranks.
    """

    nbytes: int
    kernel: str
    max_blocks: int | None
    blocks: int
    median_us: float
    spread_us: float
    wrong: int

    def as_dict(self) -> dict[str, Any]:
        """The row for a file."""
        return asdict(self)


def tune(
    comm: Communicator,
    sizes: Sequence[int],
    dtype: DType,
    op: ReduceOp,
    effort: Effort,
    progress: Callable[[int, int, str], None],
) -> list[Measured]:
    """Measure everything that can serve `dtype` and `op`. Collective.

    The communicator chooses as before when this returns.

    Args:
        comm: The ranks; made with ``determinism="not_guaranteed"`` to have all kernels.
        sizes: Sizes in bytes, rising; whole elements.
        dtype: Element type.
        op: Operator.
        effort: How much is measured.
        progress: Hears ``(done, all, what)`` before each measurement.

    Raises:
        BackendUnavailableError: CuPy is missing, which times graphs, or a kernel's scratch has no
            room.
        ArgumentError: What is pinned can't serve `dtype` and `op`.
        ShmemarError: As of `Communicator.allreduce`.
    """
    if comm.backend is not Backend.EMULATED and find_spec("cupy") is None:
        raise BackendUnavailableError("the tuner times CUDA graphs with CuPy; install it.")
    with comm.keeping_table():
        if comm.backend is not Backend.EMULATED and comm.determinism is Determinism.NOT_GUARANTEED:
            verdict = lines_verdict(comm)
            comm.use_table(comm.table, why_no_lines="" if verdict.passed else verdict.text)
        # What is pinned and can't serve is said here.
        comm.explain(nbytes=dtype.itemsize, dtype=dtype.name, op=op)
        possible = [each for each in CANDIDATES if _can_serve(comm, each, dtype, op)]
        return _measure_all(comm, possible, sizes, dtype, op, effort, progress)


def _measure_all(
    comm: Communicator,
    possible: Sequence[Candidate],
    sizes: Sequence[int],
    dtype: DType,
    op: ReduceOp,
    effort: Effort,
    progress: Callable[[int, int, str], None],
) -> list[Measured]:
    total = len(sizes) * len(possible)
    rows: list[Measured] = []
    for at, nbytes in enumerate(sizes):
        make = partial(_Case, comm, nbytes, dtype, op, effort)
        case = comm.host_together(make, f"make arrays of {nbytes} bytes")
        for place, candidate in enumerate(possible):
            progress(at * len(possible) + place, total, f"{candidate.name}, {nbytes} bytes")
            first = case.measure(candidate)
            rows.append(first)
            if comm.backend is not Backend.EMULATED and first.blocks >= _MANY_BLOCKS:
                fewer = [replace(candidate, max_blocks=first.blocks // part) for part in (2, 4)]
                rows += [case.measure(each) for each in fewer]
    progress(total, total, "done")
    return rows


def table_of(rows: Sequence[Measured], origin: str, beyond: Table) -> Table:
    """Make a table of what was measured right.

    Between two sizes it changes at their geometric mean, as latencies are smooth in the logarithm
    of the size.

    Args:
        rows: What was measured.
        origin: Where it is known from.
        beyond: What holds for messages more than twice as large as the largest that was measured.
    """
    sizes = sorted({row.nbytes for row in rows})
    bands: list[Band] = []
    for nbytes, following in zip(sizes, [*sizes[1:], 4 * sizes[-1]], strict=True):
        best: dict[str, Measured] = {}
        for row in rows:
            known = best.get(row.kernel)
            is_right = row.nbytes == nbytes and not row.wrong
            if is_right and (known is None or row.median_us < known.median_us):
                best[row.kernel] = row
        ranked = sorted(best.values(), key=lambda row: row.median_us)
        up_to = math.isqrt(nbytes * following)
        bands.append(Band(up_to, tuple(_candidate(row) for row in ranked)))
    end = 2 * sizes[-1]
    return Table(origin, (*bands, *(b for b in beyond.bands if b.up_to is None or b.up_to > end)))


def _candidate(row: Measured) -> Candidate:
    named = next(each for each in CANDIDATES if each.name == row.kernel)
    return Candidate(named.kernel, named.protocol, row.max_blocks, row.median_us)


def _only(candidate: Candidate) -> Table:
    return Table("the tuner", (Band(None, (candidate,)),))


def _can_serve(comm: Communicator, candidate: Candidate, dtype: DType, op: ReduceOp) -> bool:
    """Ask whether a kernel is chosen where it alone is listed."""
    comm.use_table(_only(candidate))
    try:
        found = comm.explain(nbytes=dtype.itemsize, dtype=dtype.name, op=op)
    except ShmemarError:
        return False
    return found.kernel.removesuffix("/multicast") == candidate.name


class _Case:
    """A size: inputs and outputs for a few calls in turn, and what has to come out."""

    def __init__(
        self, comm: Communicator, nbytes: int, dtype: DType, op: ReduceOp, effort: Effort
    ) -> None:
        self.comm, self.nbytes, self.dtype, self.op, self.effort = comm, nbytes, dtype, op, effort
        self.count = nbytes // dtype.itemsize
        self.arrays = Arrays.of(comm.backend)
        blank = np.empty(self.count, numpy_dtype(dtype))
        poison(blank)
        self.blank = self.arrays.make(blank)
        self.inputs = [
            exact_input(dtype, op, self.count, rank=comm.rank, call=call)
            for call in range(2 * _BUFFERS)
        ]
        self.results = [
            exact_result(dtype, op, self.count, nranks=comm.size, call=call)
            for call in range(2 * _BUFFERS)
        ]
        self.pool = [self.arrays.make(each) for each in self.inputs]
        self.x = [self.arrays.make(blank) for _ in range(_BUFFERS)]
        self.out = [self.arrays.make(blank) for _ in range(_BUFFERS)]

    def fill(self, sample: int) -> None:
        """Put in the inputs of a sample, and poison the outputs."""
        for buffer in range(_BUFFERS):
            self.x[buffer][...] = self.pool[(sample + buffer) % len(self.pool)]
            self.out[buffer][...] = self.blank

    def count_wrong(self, sample: int, repeats: int, runs: int = 1) -> int:
        """Count the wrong elements of the last outputs."""
        del runs
        return sum(
            count_wrong(
                self.arrays.host(self.out[buffer]),
                self.results[(sample + buffer) % len(self.results)],
            )
            for buffer in range(min(repeats, _BUFFERS))
        )

    def measure(self, candidate: Candidate) -> Measured:
        """Measure a kernel. Collective."""
        comm = self.comm
        comm.use_table(_only(candidate))
        plans = [
            comm.plan_allreduce(x, out, op=self.op) for x, out in zip(self.x, self.out, strict=True)
        ]
        plans[0]()
        emulated = comm.backend is Backend.EMULATED
        microseconds, wrong = self._eager(plans) if emulated else self._graph(plans)
        spread = tuple(float(np.percentile(microseconds, p)) for p in (20, 80))
        everyone = comm.host_allgather((median(microseconds), spread, wrong))
        median_us, (low_us, high_us), _ = max(everyone)
        return Measured(
            nbytes=self.nbytes,
            kernel=candidate.name,
            max_blocks=candidate.max_blocks,
            blocks=plans[0].blocks,
            median_us=median_us,
            spread_us=high_us - low_us,
            wrong=sum(entry[2] for entry in everyone),
        )

    def _graph(self, plans: list[Any]) -> tuple[list[float], int]:
        def collective(call: int, stream: Any) -> None:
            plans[call % _BUFFERS](stream=stream)

        effort = self.effort
        found = time_graph(self.comm, collective, effort.samples, effort.repeats, self)
        return found.microseconds, found.wrong

    def _eager(self, plans: list[Any]) -> tuple[list[float], int]:
        microseconds, wrong = [], 0
        for sample in range(self.effort.samples):
            self.fill(sample)
            self.comm.host_barrier()
            start = time.perf_counter()
            for plan in plans:
                plan()
            microseconds.append((time.perf_counter() - start) * 1e6 / len(plans))
            wrong += self.count_wrong(sample, _BUFFERS)
        return microseconds, wrong
