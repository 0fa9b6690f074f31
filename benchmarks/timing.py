"""Three ways to time a collective, never mixed in one column.

* `device`: a loop of collectives inside one kernel, launch excluded. The input comes from L2, the
  output is stored. A sample is the mean of one launch's repeats, on the slowest block.
* `graph`: collectives captured in one CUDA graph and replayed; CUDA events around a replay, gaps
  between kernels included; beside it the same graph of empty kernels.
* `eager`: one call at a time, from the call to its result, host included; and the host's own time
  of a call that is only enqueued.

Inputs are exact and differ at every sample, outputs are poisoned, and every sample is checked. The
figure is the maximum over ranks of each rank's median; the spread is that rank's.
"""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from shmemar.host.arrays import Arrays
from shmemar.host.exact import count_wrong, exact_input, exact_result, poison
from shmemar.spec import Backend

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    import shmemar
    from shmemar.dtypes import DType, ReduceOp

__all__ = ["MODES", "Case", "Result", "measure"]

MODES = ("device", "graph", "eager")

L2_NBYTES = 16 << 20
"""Inputs of a loop are spread over this, which is more than L1 and less than L2 of any GPU here."""


@dataclass(frozen=True)
class Case:
    """What is measured.

    Attributes:
        dtype: Element type.
        op: Operator.
        count: Elements.
        in_place: True to reduce in place (`graph` and `eager`).
        samples: Samples; for `device` launches, for `graph` replays, for `eager` calls.
        repeats: Collectives a sample (`device` and `graph`).
    """

    dtype: DType
    op: ReduceOp
    count: int
    in_place: bool = False
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
        in_place: True when reduced in place.
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
    in_place: bool
    median_us: float
    p20_us: float
    p80_us: float
    p99_us: float
    other_us: float | None
    wrong: int

    def as_dict(self) -> dict[str, Any]:
        """The row for a JSON file."""
        return asdict(self)


def measure(comm: shmemar.Communicator, mode: str, case: Case) -> Result | None:
    """Measure one case. Collective.

    Returns:
        The row, the same on every rank; None when the backend has no such mode: an emulation has
        `eager` only.
    """
    if comm.backend is Backend.EMULATED and mode != "eager":
        return None
    samples_us, other_us, wrong = {"device": _device, "graph": _graph, "eager": _eager}[mode](
        comm, case
    )
    percentiles = [float(np.percentile(samples_us, p)) for p in (50, 20, 80, 99)]
    everyone = comm.host_allgather((percentiles, other_us, wrong))
    median_us, p20_us, p80_us, p99_us = max(entry[0] for entry in everyone)
    others = [entry[1] for entry in everyone if entry[1] is not None]
    spec = comm._spec(case.dtype, case.op)
    source = comm._runtime.operand("x", _inputs(comm, case, 0)[0], 0, writeable=False)
    kernel = comm._runtime.compile(spec, comm._scratch.layout, 0)
    return Result(
        mode=mode,
        nbytes=case.nbytes,
        count=case.count,
        dtype=case.dtype.name,
        op=case.op.value,
        kernel=comm.kernel_for(case.dtype, case.op),
        blocks=comm._grid(source, spec, kernel).blocks,
        in_place=case.in_place,
        median_us=median_us,
        p20_us=p20_us,
        p80_us=p80_us,
        p99_us=p99_us,
        other_us=max(others) if others else None,
        wrong=sum(entry[2] for entry in everyone),
    )


Samples = tuple[list[float], "float | None", int]


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
    samples_us, host_us, wrong = [], [], 0
    for sample in range(case.samples + 3):
        x, out, expected = _inputs(comm, case, sample)
        arrays.synchronize()
        comm.host_barrier()
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
    return samples_us, host, wrong


def _graph(comm: shmemar.Communicator, case: Case) -> Samples:
    import cupy

    x, out, _ = _inputs(comm, case, 0)
    comm.allreduce(x, out=out, op=case.op)
    stream = cupy.cuda.Stream(non_blocking=True)
    nothing = cupy.RawKernel('extern "C" __global__ void nothing() {}', "nothing")
    nothing((1,), (32,), ())

    def capture(body: Callable[[], Any]) -> Any:
        with stream:
            stream.begin_capture()
            for _ in range(case.repeats):
                body()
            return stream.end_capture()

    graph = capture(lambda: comm.allreduce(x, out=out, op=case.op, stream=stream))
    empty = capture(lambda: nothing((1,), (32,), ()))
    start, end = cupy.cuda.Event(), cupy.cuda.Event()

    def replay(which: Any) -> float:
        comm.host_barrier()
        start.record(stream)
        which.launch(stream)
        end.record(stream)
        end.synchronize()
        return float(cupy.cuda.get_elapsed_time(start, end)) * 1e3 / case.repeats

    samples_us, empty_us, wrong = [], [], 0
    host = Arrays("cupy")
    for sample in range(case.samples + 3):
        # In place a replay reduces what the one before it left: only min and max stay exact.
        fresh, blank, expected = _inputs(comm, case, sample)
        x[...] = fresh
        if not case.in_place:
            out[...] = blank
        cupy.cuda.Device().synchronize()
        elapsed = replay(graph)
        apart = replay(empty)
        if sample >= 3:
            samples_us.append(elapsed)
            empty_us.append(apart)
        wrong += count_wrong(host.host(out), expected)
    return samples_us, float(np.median(empty_us)), wrong


def _device(comm: shmemar.Communicator, case: Case) -> Samples:
    import cupy

    from shmemar.host.launch import load_kernel

    spec, layout = comm._spec(case.dtype, case.op), comm._scratch.layout
    runtime: Any = comm._runtime
    kernel = load_kernel(spec, layout, rank=comm.rank, device=runtime._device, looped=True)
    resident = comm.host_allgather(kernel.resident_blocks // runtime._job.ranks_per_gpu)
    kernel.max_blocks = max(min(resident), 1)

    stride = -(-case.nbytes // 128) * 128
    nbuffers = 1 << max(min(L2_NBYTES // stride, 2048), 1).bit_length() - 1
    per_buffer = stride // case.dtype.itemsize
    out = cupy.empty(case.count, case.dtype.name)
    warmups = case.repeats // 5
    samples_us, wrong = [], 0
    for sample in range(case.samples + 2):
        x = np.zeros(per_buffer, case.dtype.name)
        x[: case.count] = exact_input(case.dtype, case.op, case.count, rank=comm.rank, call=sample)
        inputs = cupy.tile(cupy.asarray(x), nbuffers)
        blank = np.empty(case.count, case.dtype.name)
        poison(blank)
        out.set(blank)
        source = runtime.operand("x", inputs[: case.count], 0, writeable=False)
        destination = runtime.operand("out", out, 0, writeable=True)
        grid = comm._grid(source, spec, kernel)
        times = cupy.zeros(grid.blocks, np.uint64)
        loop = (case.repeats, warmups, stride, nbuffers - 1, times.data.ptr)
        cupy.cuda.Device().synchronize()
        comm.host_barrier()
        kernel.launch(grid, [*comm._arguments(source, destination).flat(), *loop], 0)
        cupy.cuda.Device().synchronize()
        comm.check()
        if sample >= 2:
            samples_us.append(float(times.get().max()) / 1e3 / (case.repeats - warmups))
        expected = exact_result(case.dtype, case.op, case.count, nranks=comm.size, call=sample)
        wrong += count_wrong(out.get(), expected)
    return samples_us, None, wrong
