"""Ways to time a collective, never mixed in one column.

* `device`: a loop of collectives inside one kernel, launch excluded. Inputs come from L2, outputs
  are stored. A sample is the mean of one launch's repeats, on the slowest block.
* `graph`: collectives captured in one CUDA graph and replayed; CUDA events around a replay, gaps
  between kernels included; beside it the same graph of empty kernels. An unmeasured replay goes
  before, so that the ranks start together and the host's launch is hidden behind it.
* `behind`: likewise, each behind an ordinary kernel of 3 us, whose time is subtracted.
* `early`: likewise, behind one that lets the next launch start early.
* `eager`: one call at a time, from the call to its result, host included, right behind an
  unmeasured one; and the host's own time of a call that is only enqueued.

Contenders take turns within a sample, but in modes `device` and `eager`. Inputs are exact and
differ from call to call, outputs are poisoned, and every sample is checked: of graphs and loops the
last outputs of a sample. `chained`, rank 0 reduces in place what its call before left, so that no
call can start before that has ended, and whatever it received late, twice or never in any call
shows in the end. Which kernels ran is read from the graph, by their names.
The figure is the maximum over ranks of each rank's median; the spread is that rank's.
"""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass, replace
from functools import lru_cache, partial
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks.buffers import Buffers, Case, empty_array
from benchmarks.contender import GRAPHS, OTHER_KERNEL
from benchmarks.contenders import Ours, call_once, open_together
from shmemar.dtypes import ReduceOp
from shmemar.errors import ArgumentError
from shmemar.host.exact import exact_limit, largest_input
from shmemar.host.timing import AHEAD, Entry, Samples, time_graphs
from shmemar.spec import Backend

if TYPE_CHECKING:
    from collections.abc import Sequence

    import shmemar
    from benchmarks.contender import Contender, Opened
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

MODES = ("device", "graph", "behind", "early", "eager")


@dataclass(frozen=True)
class Result:
    """One row. Figures are None of a contender that did not run, and `note` says why.

    Attributes:
        mode: One of `MODES`.
        nbytes: Bytes of the message.
        count: Elements.
        dtype: Element type.
        op: Operator.
        kernel: Kernel and protocol that ran, or what a contender says that it runs.
        blocks: Blocks of its grid, where they are known.
        registers: Registers a thread, of the kernel that ran; None where that is not known.
        in_place: True when reduced in place.
        chained: True when each call depended on the one before.
        median_us: Microseconds a collective: the largest median of the ranks.
        p20_us: Its 20th percentile.
        p80_us: Its 80th.
        p99_us: Its 99th.
        other_us: As of :class:`shmemar.host.timing.Samples`.
        wrong: Wrong elements over all samples and ranks.
        collective: Its name.
        contender: Who ran it.
        pdl: When by programmatic dependent launch, of our kernels.
        ran: Names of the kernels in the graph.
        xsol: Latency over the floor, where that was measured.
        note: What else is to be said.
    """

    mode: str
    nbytes: int
    count: int
    dtype: str
    op: str
    kernel: str
    blocks: int | None
    registers: int | None
    in_place: bool
    chained: bool
    median_us: float | None
    p20_us: float | None
    p80_us: float | None
    p99_us: float | None
    other_us: float | None
    wrong: int
    collective: str = "allreduce"
    contender: str = "shmemar"
    pdl: str | None = None
    ran: tuple[str, ...] = ()
    xsol: float | None = None
    note: str = ""

    def as_dict(self) -> dict[str, Any]:
        """The row for a JSON file."""
        return asdict(self)

    @property
    def failed(self) -> bool:
        """True of wrong results, and of a contender that ran another kernel than it says."""
        return bool(self.wrong) or self.note.startswith(OTHER_KERNEL)


def why_not(comm: shmemar.Communicator, mode: str) -> str | None:
    """Say why a mode can't be measured here; None when it can."""
    if mode == "eager":
        return None
    if comm.backend is Backend.EMULATED:
        return "it needs GPUs"
    return None if find_spec("cupy") else "it needs CuPy, which is not installed"


def measure(
    comm: shmemar.Communicator, mode: str, case: Case, contenders: Sequence[Contender]
) -> list[Result]:
    """Measure one case. Collective.

    Args:
        comm: The ranks.
        mode: One of `MODES`.
        case: What is reduced.
        contenders: Who reduces it.

    Returns:
        A row for each contender that has the mode, on every rank; all but notes are the same.

    Raises:
        ArgumentError: The mode can't be measured here, or the case's results would not be exact.
    """
    reason = why_not(comm, mode) or _why_not_exact(mode, case, comm.size)
    if reason:
        raise ArgumentError(f"mode {mode} is not possible: {reason}.")
    rows: list[Result | None] = []
    ready: list[tuple[int, Contender, Opened]] = []
    for contender in (each for each in contenders if mode in each.modes):
        opened, why = open_together(comm, contender, case)
        if opened is not None and mode in GRAPHS:
            why = call_once(comm, opened)
            opened = None if why else opened
        if opened is not None and mode == "device" and opened.prepared is None:
            why = f"{opened.kernel} has no code of ours to loop over"
            opened = None
        if opened is not None:
            ready.append((len(rows), contender, opened))
        rows.append(None if opened is not None else _absent(mode, case, contender, why))
    if mode in ("device", "eager"):
        timed = {"device": _device, "eager": _eager}[mode]
        samples = [timed(comm, case, *each[1:]) for each in ready]
    else:
        entries = [Entry(opened.call, opened.data) for *_, opened in ready]
        ahead = mode if mode in AHEAD else None
        samples = time_graphs(comm, entries, case.samples, case.repeats, ahead) if ready else []
    for (at, contender, opened), found in zip(ready, samples, strict=True):
        rows[at] = _row_of(comm, mode, case, contender, opened, found)
    return [row for row in rows if row is not None]


def _what(mode: str, case: Case) -> dict[str, Any]:
    return {
        "mode": mode,
        "nbytes": case.nbytes,
        "count": case.count,
        "dtype": case.dtype.name,
        "op": case.op.value,
        "in_place": case.in_place,
        "chained": case.chained,
    }


def _absent(mode: str, case: Case, contender: Contender, why: str) -> Result:
    candidate = contender.candidate if isinstance(contender, Ours) else None
    return Result(
        **_what(mode, case),
        kernel=candidate.name if candidate else "-",
        blocks=None,
        registers=None,
        median_us=None,
        p20_us=None,
        p80_us=None,
        p99_us=None,
        other_us=None,
        wrong=0,
        contender=contender.name,
        note=why,
    )


def _row_of(
    comm: shmemar.Communicator,
    mode: str,
    case: Case,
    contender: Contender,
    opened: Opened,
    samples: Samples,
) -> Result:
    prepared = opened.prepared
    blocks = samples.blocks
    if prepared is not None:
        kernel: Any = prepared.kernel
        registers = samples.registers or getattr(kernel, "registers", None)
        samples = replace(samples, registers=registers)
        blocks = blocks or prepared.grid(case.nbytes).blocks
    other = samples.ran and not opened.must_run(samples.ran)
    everyone = comm.host_allgather(bool(other))
    note = f"{OTHER_KERNEL}: {', '.join(samples.ran)}" if any(everyone) else ""
    return as_result(
        comm,
        samples,
        **_what(mode, case),
        kernel=opened.kernel,
        blocks=blocks,
        contender=contender.name,
        pdl=opened.pdl if prepared is not None else None,
        ran=samples.ran,
        note=note,
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


def _eager(comm: shmemar.Communicator, case: Case, contender: Contender, opened: Opened) -> Samples:
    data, samples_us, host_us, wrong = opened.data, [], [], 0
    emulated = comm.backend is Backend.EMULATED
    stream = None if emulated else _current_stream()

    def synchronize() -> None:
        if not emulated:
            import cupy

            cupy.cuda.Device().synchronize()

    if isinstance(contender, Ours):  # the call that a user makes, not a plan

        def call(number: int) -> None:
            comm.allreduce(data.source(number), out=data.destination(number), op=case.op)
    else:

        def call(number: int) -> None:
            opened.call(number, stream)

    with contender.during_eager(comm):
        for sample in range(case.samples + 3):
            data.fill(sample)
            synchronize()
            comm.host_barrier()
            # The ranks leave the barrier at different times; behind a collective they are together.
            call(1)
            synchronize()
            start = time.perf_counter()
            call(0)
            enqueued = time.perf_counter()
            synchronize()
            done = time.perf_counter()
            if sample >= 3:
                host_us.append((enqueued - start) * 1e6)
                samples_us.append((done - start) * 1e6)
            wrong += data.count_wrong(sample, 1)
    host = None if emulated else float(np.median(host_us))
    return Samples(samples_us, host, wrong)


def _current_stream() -> Any:
    import cupy

    return cupy.cuda.get_current_stream()


@lru_cache
def _looped_kernel(spec: KernelSpec, layout: AnyLayout, rank: int, device: Any) -> CudaKernel:
    from shmemar.host.launch import load_kernel

    return load_kernel(spec, layout, rank=rank, device=device, looped=True)


def _device(
    comm: shmemar.Communicator, case: Case, contender: Contender, opened: Opened
) -> Samples:
    prepared = opened.prepared
    if prepared is None:
        raise ArgumentError(f"{contender.name} has no mode device.")
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
    buffers = Buffers(comm, case, partial(empty_array, comm.backend))
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
