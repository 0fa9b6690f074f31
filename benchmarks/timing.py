"""Three ways to time a collective, never mixed in one column.

* `device`: a loop of collectives inside one kernel, launch excluded. Inputs come from L2, outputs
  are stored. A sample is the mean of one launch's repeats, on the slowest block.
* `graph`: collectives captured in one CUDA graph and replayed; CUDA events around a replay, gaps
  between kernels included; beside it the same graph of empty kernels. An unmeasured replay goes
  before, so that the ranks start together and the host's launch is hidden behind it.
* `eager`: one call at a time, from the call to its result, host included, right behind an
  unmeasured one; and the host's own time of a call that is only enqueued.

Inputs are exact and differ from call to call, outputs are poisoned, and every sample is checked: of
`device` and `graph` the last outputs of a sample. `chained`, rank 0 reduces in place what its call
before left, so that no call can start before that has ended, and whatever it received late, twice
or never in any call shows in the end.
The figure is the maximum over ranks of each rank's median; the spread is that rank's.
"""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import numpy as np

from shmemar.dtypes import ReduceOp
from shmemar.errors import ArgumentError
from shmemar.host.arrays import Arrays
from shmemar.host.exact import (
    COMBINE,
    count_wrong,
    exact_input,
    exact_limit,
    exact_result,
    largest_input,
    poison,
)
from shmemar.host.kernel_set import name_of
from shmemar.host.timing import Samples, time_graph
from shmemar.spec import Backend

if TYPE_CHECKING:
    from numpy.typing import NDArray

    import shmemar
    from shmemar.dtypes import DType
    from shmemar.host.kernel_set import Prepared
    from shmemar.host.launch import CudaKernel
    from shmemar.host.timing import Data
    from shmemar.layout import AnyLayout, Grid
    from shmemar.spec import KernelSpec

__all__ = [
    "MODES",
    "Case",
    "Result",
    "as_result",
    "measure",
    "prepare",
    "resident_blocks",
    "time_launches",
    "time_loop",
    "why_not",
]

MODES = ("device", "graph", "eager")

MAX_BUFFERS, MIN_BUFFERS = 8, 4
"""Inputs that take turns. A slot is written again two calls later, so there must be more than 2."""

BUFFERS_NBYTES = 8 << 20
"""Inputs and outputs stay within this where they can, so that L2 holds those of all ranks."""


@dataclass(frozen=True)
class Case:
    """What is measured.

    Attributes:
        dtype: Element type.
        op: Operator.
        count: Elements.
        in_place: True to reduce in place.
        chained: True to make each call depend on the data of the one before (`device`, `graph`).
        samples: Samples; for `device` launches, for `graph` replays, for `eager` calls.
        repeats: Collectives a sample (`device` and `graph`).
    """

    dtype: DType
    op: ReduceOp
    count: int
    in_place: bool = False
    chained: bool = False
    samples: int = 30
    repeats: int = 200

    @property
    def nbytes(self) -> int:
        """Bytes of the message."""
        return self.count * self.dtype.itemsize


@dataclass(frozen=True)
class Result:
    """One row.

    Attributes:
        mode: One of `MODES`.
        nbytes: Bytes of the message.
        count: Elements.
        dtype: Element type.
        op: Operator.
        kernel: Kernel and protocol that ran.
        blocks: Blocks of its grid.
        registers: Registers a thread, of the kernel that ran; None where it is emulated.
        in_place: True when reduced in place.
        chained: True when each call depended on the one before.
        median_us: Microseconds a collective: the largest median of the ranks.
        p20_us: Its 20th percentile.
        p80_us: Its 80th.
        p99_us: Its 99th.
        other_us: `graph`: an empty kernel in its place. `eager`: the host's time of a call.
        wrong: Wrong elements over all samples and ranks.
    """

    mode: str
    nbytes: int
    count: int
    dtype: str
    op: str
    kernel: str
    blocks: int
    registers: int | None
    in_place: bool
    chained: bool
    median_us: float
    p20_us: float
    p80_us: float
    p99_us: float
    other_us: float | None
    wrong: int

    def as_dict(self) -> dict[str, Any]:
        """The row for a JSON file."""
        return asdict(self)


def why_not(comm: shmemar.Communicator, mode: str) -> str | None:
    """Say why a mode can't be measured here; None when it can."""
    if mode == "eager":
        return None
    if comm.backend is Backend.EMULATED:
        return "it needs GPUs"
    return None if find_spec("cupy") else "it needs CuPy, which is not installed"


def measure(comm: shmemar.Communicator, mode: str, case: Case) -> Result:
    """Measure one case. Collective.

    Returns:
        The row, the same on every rank.

    Raises:
        ArgumentError: The mode can't be measured here, or the case's results would not be exact.
    """
    reason = why_not(comm, mode) or _why_not_exact(mode, case, comm.size)
    if reason:
        raise ArgumentError(f"mode {mode} is not possible: {reason}.")
    samples = {"device": _device, "graph": _graph, "eager": _eager}[mode](comm, case)
    prepared = prepare(comm, case)
    return as_result(
        comm,
        samples,
        mode=mode,
        nbytes=case.nbytes,
        count=case.count,
        dtype=case.dtype.name,
        op=case.op.value,
        kernel=name_of(prepared.spec),
        blocks=samples.blocks or prepared.grid(case.nbytes).blocks,
        in_place=case.in_place,
        chained=case.chained,
    )


def prepare(comm: shmemar.Communicator, case: Case) -> Prepared:
    """Compile what serves a case. Collective when it is asked for first."""
    choice = comm._kernels.choose(case.nbytes, case.dtype, case.op)
    return comm._prepare(choice.spec, 0, choice.candidate.max_blocks)


def as_result(comm: shmemar.Communicator, samples: Samples, **what: Any) -> Result:
    """Make the row of what every rank measured. Collective."""
    percentiles = [float(np.percentile(samples.microseconds, p)) for p in (50, 20, 80, 99)]
    everyone = comm.host_allgather((percentiles, samples))
    median_us, p20_us, p80_us, p99_us = max(entry[0] for entry in everyone)
    others = [entry[1].other_us for entry in everyone if entry[1].other_us is not None]
    registers = [entry[1].registers for entry in everyone if entry[1].registers is not None]
    return Result(
        **what,
        registers=max(registers, default=None),
        median_us=median_us,
        p20_us=p20_us,
        p80_us=p80_us,
        p99_us=p99_us,
        other_us=max(others) if others else None,
        wrong=sum(entry[1].wrong for entry in everyone),
    )


def _why_not_exact(mode: str, case: Case, nranks: int) -> str | None:
    repeatable = case.op in (ReduceOp.MIN, ReduceOp.MAX)
    if mode == "eager":
        return "a chained call is not eager" if case.chained else None
    if case.in_place and not repeatable:
        return f"in place, {case.op.value} does not repeat; expected op min or max"
    if not case.chained:
        return None
    if case.in_place or case.op is not ReduceOp.SUM:
        return "chained needs op sum, and not in place"
    largest = 2 * case.repeats * nranks * largest_input(case.dtype)
    limit = exact_limit(case.dtype)
    if limit is not None and largest >= limit:
        return (
            f"{case.repeats} chained sums of {nranks} ranks are not exact in {case.dtype.name}; "
            "expected fewer repeats, or a wider type"
        )
    return None


def _inputs(comm: shmemar.Communicator, case: Case, call: int) -> tuple[Any, Any, NDArray[Any]]:
    """Input and poisoned output of the backend's library, and what must come out."""
    arrays = Arrays.of(comm.backend)
    x = arrays.make(exact_input(case.dtype, case.op, case.count, rank=comm.rank, call=call))
    blank = np.empty(case.count, case.dtype.name)
    poison(blank)
    out = x if case.in_place else arrays.make(blank)
    expected = exact_result(case.dtype, case.op, case.count, nranks=comm.size, call=call)
    return x, out, expected


def _eager(comm: shmemar.Communicator, case: Case) -> Samples:
    arrays = Arrays.of(comm.backend)
    unmeasured, samples_us, host_us, wrong = _inputs(comm, case, 0)[0], [], [], 0
    for sample in range(case.samples + 3):
        x, out, expected = _inputs(comm, case, sample)
        comm.host_barrier()
        # The ranks leave the barrier at different times; behind a collective they are together.
        comm.allreduce(unmeasured, out=unmeasured, op=case.op)
        arrays.synchronize()
        start = time.perf_counter()
        comm.allreduce(x, out=out, op=case.op)
        enqueued = time.perf_counter()
        arrays.synchronize()
        done = time.perf_counter()
        if sample >= 3:
            host_us.append((enqueued - start) * 1e6)
            samples_us.append((done - start) * 1e6)
        wrong += count_wrong(arrays.host(out), expected)
    host = None if comm.backend is Backend.EMULATED else float(np.median(host_us))
    return Samples(samples_us, host, wrong)


class _Buffers:
    """Inputs and outputs on the GPU: call i of a sample uses number ``i % nbuffers``."""

    def __init__(self, comm: shmemar.Communicator, case: Case) -> None:
        import cupy

        self.case = case
        self.stride_nbytes = -(-case.nbytes // 128) * 128
        fits = 2 * MAX_BUFFERS * self.stride_nbytes <= BUFFERS_NBYTES
        self.nbuffers = MAX_BUFFERS if fits else MIN_BUFFERS
        self.npool = 2 * self.nbuffers
        self._is_head = case.chained and comm.rank == 0
        self._reduce = COMBINE[case.op]
        rows = self.npool, case.count
        self._pool = cupy.empty(rows, case.dtype.name)
        self._results = np.empty(rows, case.dtype.name)
        self._others = np.empty(rows, case.dtype.name)
        for call in range(self.npool):
            what = case.dtype, case.op, case.count
            self._pool[call] = cupy.asarray(exact_input(*what, rank=comm.rank, call=call))
            self._results[call] = exact_result(*what, nranks=comm.size, call=call)
            if case.chained:
                self._others[call] = self._all_but_the_head(comm.size, call)
        padded = self.nbuffers, self.stride_nbytes // case.dtype.itemsize
        self._x = cupy.empty(padded, case.dtype.name)
        self._out = self._x if case.in_place else cupy.empty(padded, case.dtype.name)

    def source(self, call: int) -> Any:
        """What call number `call` of a sample reduces."""
        return self._x[0 if self._is_head else call % self.nbuffers, : self.case.count]

    def destination(self, call: int) -> Any:
        """Where it goes."""
        if self._is_head:
            return self.source(call)
        return self._out[call % self.nbuffers, : self.case.count]

    @property
    def source_stride(self) -> int:
        """Bytes from one input to the next."""
        return 0 if self._is_head else self.stride_nbytes

    @property
    def destination_stride(self) -> int:
        """Bytes from one output to the next."""
        return 0 if self._is_head else self.stride_nbytes

    def fill(self, sample: int) -> None:
        """Put in the inputs of a sample, and poison the outputs."""
        if not self.case.in_place:
            self._out.view(np.uint8)[...] = 0xA5
        for buffer in range(self.nbuffers):
            self._x[buffer, : self.case.count] = self._pool[(sample + buffer) % self.npool]

    def count_wrong(self, sample: int, repeats: int, runs: int = 1) -> int:
        """Count the wrong elements that `runs` runs of `repeats` calls have left."""
        if not self.case.chained:
            return sum(
                count_wrong(
                    self.destination(buffer).get(), self._results[(sample + buffer) % self.npool]
                )
                for buffer in range(min(repeats, self.nbuffers))
            )
        total = self._first_of_the_head(sample)
        left: dict[int, NDArray[Any]] = {}
        for call in [*range(repeats)] * runs:
            buffer = call % self.nbuffers
            total = self._reduce(total, self._others[(sample + buffer) % self.npool])
            left[0 if self._is_head else buffer] = total
        return sum(
            count_wrong(self.destination(buffer).get(), expected)
            for buffer, expected in left.items()
        )

    def _first_of_the_head(self, sample: int) -> NDArray[Any]:
        case = self.case
        call = sample % self.npool
        return exact_input(case.dtype, case.op, case.count, rank=0, call=call)

    def _all_but_the_head(self, nranks: int, call: int) -> NDArray[Any]:
        case = self.case
        if nranks == 1:
            return np.full(case.count, 0, case.dtype.name)
        total = exact_input(case.dtype, case.op, case.count, rank=1, call=call)
        for rank in range(2, nranks):
            mine = exact_input(case.dtype, case.op, case.count, rank=rank, call=call)
            total = self._reduce(total, mine)
        return total


def _graph(comm: shmemar.Communicator, case: Case) -> Samples:
    buffers = _Buffers(comm, case)
    buffers.fill(0)
    comm.allreduce(buffers.source(0), out=buffers.destination(0), op=case.op)

    def collective(call: int, stream: Any) -> None:
        source, destination = buffers.source(call), buffers.destination(call)
        comm.allreduce(source, out=destination, op=case.op, stream=stream)

    samples = time_graph(comm, collective, case.samples, case.repeats, buffers)
    kernel: Any = prepare(comm, case).kernel
    return replace(samples, registers=kernel.registers)


@lru_cache
def _looped_kernel(spec: KernelSpec, layout: AnyLayout, rank: int, device: Any) -> CudaKernel:
    from shmemar.host.launch import load_kernel

    return load_kernel(spec, layout, rank=rank, device=device, looped=True)


def _device(comm: shmemar.Communicator, case: Case) -> Samples:
    prepared = prepare(comm, case)
    runtime: Any = comm._runtime
    with runtime.active():
        kernel = _looped_kernel(prepared.spec, prepared.scratch.layout, comm.rank, runtime._device)
    return time_loop(comm, prepared, kernel, case, resident_blocks(comm, kernel))


def resident_blocks(comm: shmemar.Communicator, kernel: CudaKernel) -> int:
    """Blocks of a kernel that all ranks can run at once. Collective."""
    runtime: Any = comm._runtime
    resident = comm.host_allgather(kernel.resident_blocks // runtime._job.ranks_per_gpu)
    return int(max(min(resident), 1))


def time_loop(
    comm: shmemar.Communicator,
    prepared: Prepared,
    kernel: CudaKernel,
    case: Case,
    max_blocks: int,
) -> Samples:
    """Time launches of a looped all-reduce kernel, of so many blocks at most. Collective."""
    runtime: Any = comm._runtime
    kernel.max_blocks = max_blocks
    buffers = _Buffers(comm, case)
    source = runtime.operand("x", buffers.source(0), 0, writeable=False)
    destination = runtime.operand("out", buffers.destination(0), 0, writeable=True)
    arguments = comm._arguments(prepared, source, destination).flat()
    most = comm._kernels.max_blocks(kernel, prepared.max_blocks)
    grid = replace(prepared, max_blocks=most).grid(case.nbytes)
    strides = buffers.source_stride, buffers.destination_stride, buffers.nbuffers - 1
    launch = (kernel, grid, [*arguments], strides)
    return time_launches(comm, launch, case.samples, case.repeats, buffers)


def time_launches(
    comm: shmemar.Communicator,
    launch: tuple[CudaKernel, Grid, list[int], tuple[int, int, int]],
    nsamples: int,
    repeats: int,
    data: Data,
) -> Samples:
    """Time launches of a looped kernel: grid, arguments, and how its buffers follow. Collective."""
    import cupy

    kernel, grid, arguments, strides = launch
    times = cupy.zeros(grid.blocks, np.uint64)
    warmups = repeats // 5
    loop = repeats, warmups, *strides, times.data.ptr
    samples_us, wrong = [], 0
    for sample in range(nsamples + 2):
        data.fill(sample)
        cupy.cuda.Device().synchronize()
        comm.host_barrier()
        kernel.launch(grid, [*arguments, *loop], 0)
        cupy.cuda.Device().synchronize()
        comm.check()
        if sample >= 2:
            samples_us.append(float(times.get().max()) / 1e3 / (repeats - warmups))
        wrong += data.count_wrong(sample, repeats)
    return Samples(samples_us, None, wrong, kernel.registers, grid.blocks)
