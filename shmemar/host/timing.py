"""Latency of collectives in CUDA graphs, for the tuner and for benchmarks."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from shmemar.host.communicator import Communicator

__all__ = ["AHEAD", "NO_KERNEL", "Data", "Entry", "Samples", "time_graph", "time_graphs"]

AHEAD = {"behind": False, "early": True}
"""Kernels of 3 us that each collective may stand behind, and whether it lets the next launch start
early, as programmatic dependent launch can."""

_AHEAD_US = 3.0

NO_KERNEL = "node: "
"""How the names of a graph's other nodes begin, such as ``node: memcpy``."""


@dataclass(frozen=True)
class Samples:
    """What a rank measured.

    Attributes:
        microseconds: Of one collective, sample by sample.
        other_us: `graph`: of an empty kernel in its place. `behind`, `early`: of the kernel ahead,
            which is subtracted. `eager`: the host's time of a call.
        wrong: Wrong elements over all samples.
        registers: Registers a thread, where they are known.
        blocks: Blocks of the grid, where they are known.
        ran: Names of the kernels in the graph, without that ahead, and what else it holds.
    """

    microseconds: list[float]
    other_us: float | None
    wrong: int
    registers: int | None = None
    blocks: int | None = None
    ran: tuple[str, ...] = ()


class Data(Protocol):
    """What the collectives of a sample work on."""

    def fill(self, sample: int) -> None:
        """Put in the inputs of a sample, and poison its outputs."""

    def count_wrong(self, sample: int, repeats: int, runs: int = 1) -> int:
        """Count what is wrong after `runs` runs of `repeats` calls."""


@dataclass(frozen=True)
class Entry:
    """What is timed.

    Attributes:
        collective: ``collective(call, stream)`` enqueues one; it was called once before.
        data: What it works on.
    """

    collective: Callable[[int, Any], None]
    data: Data


def time_graph(
    comm: Communicator,
    collective: Callable[[int, Any], None],
    nsamples: int,
    repeats: int,
    data: Data,
) -> Samples:
    """Time replays of a graph of `repeats` calls of ``collective(call, stream)``. Collective."""
    return time_graphs(comm, [Entry(collective, data)], nsamples, repeats)[0]


def time_graphs(
    comm: Communicator,
    entries: Sequence[Entry],
    nsamples: int,
    repeats: int,
    ahead: str | None = None,
) -> list[Samples]:
    """Time replays of graphs of `repeats` calls, one graph an entry, in turns. Collective.

    Args:
        comm: The ranks; for their barrier.
        entries: What is timed, alike on all ranks.
        nsamples: Samples of each.
        repeats: Calls in a graph.
        ahead: One of `AHEAD`, to stand in front of each call; its time is subtracted.
    """
    import cupy

    cupy.cuda.Device().synchronize()
    stream = cupy.cuda.Stream(non_blocking=True)
    nothing = cupy.RawKernel('extern "C" __global__ void nothing() {}', "nothing")
    nothing((1,), (32,), ())
    before = _kernel_ahead(ahead) if ahead else lambda: None

    def capture(body: Callable[[int, Any], Any]) -> tuple[Any, tuple[str, ...]]:
        with stream:
            stream.begin_capture()
            try:
                for call in range(repeats):
                    before()
                    body(call, stream)
                ran = _captured_kernels(stream.ptr)
            except BaseException:
                with suppress(Exception):
                    stream.end_capture()
                raise
            return stream.end_capture(), tuple(name for name in ran if name != _AHEAD_NAME)

    def alone(*_: Any) -> None:
        if not ahead:
            nothing((1,), (32,), ())

    graphs = [capture(entry.collective) for entry in entries]
    reference, _ = capture(alone)
    start, end = cupy.cuda.Event(), cupy.cuda.Event()

    def replay(which: Any) -> float:
        comm.host_barrier()
        which.launch(stream)
        start.record(stream)
        which.launch(stream)
        end.record(stream)
        end.synchronize()
        return float(cupy.cuda.get_elapsed_time(start, end)) * 1e3 / repeats

    times: list[list[float]] = [[] for _ in entries]
    apart_us: list[float] = []
    wrong = [0] * len(entries)
    for sample in range(nsamples + 3):
        for at, (entry, (graph, _)) in enumerate(zip(entries, graphs, strict=True)):
            entry.data.fill(sample)
            cupy.cuda.Device().synchronize()
            elapsed = replay(graph)
            apart = replay(reference)
            if sample >= 3:
                times[at].append(elapsed - apart if ahead else elapsed)
                apart_us.append(apart)
            wrong[at] += entry.data.count_wrong(sample, repeats, runs=2)
    other_us = float(np.median(apart_us))
    return [
        Samples(mine, other_us, mistakes, ran=ran)
        for mine, mistakes, (_, ran) in zip(times, wrong, graphs, strict=True)
    ]


_AHEAD_NAME = "shmemar_kernel_ahead"


def _kernel_ahead(kind: str) -> Callable[[], None]:
    """Launch a kernel of 3 us on the current stream."""
    import cupy

    from shmemar.device.ptx import TRIGGER

    trigger = f'asm volatile("{TRIGGER}");' if AHEAD[kind] else ""
    kernel = cupy.RawKernel(
        f'extern "C" __global__ void {_AHEAD_NAME}(long long cycles) {{ {trigger}'
        " long long end = clock64() + cycles; while (clock64() < end) {} }",
        _AHEAD_NAME,
    )
    kilohertz = cupy.cuda.Device().attributes["ClockRate"]
    cycles = np.int64(_AHEAD_US * kilohertz / 1e3)
    kernel((1,), (32,), (cycles,))
    return lambda: kernel((1,), (32,), (cycles,))


def _captured_kernels(stream: int) -> list[str]:
    """Names of the kernels that a stream's capture holds so far, each once."""
    from cuda.bindings import driver

    def checked(result: tuple[Any, ...]) -> tuple[Any, ...]:
        if result[0] != driver.CUresult.CUDA_SUCCESS:
            raise RuntimeError(f"CUDA refused a call: {result[0].name}")
        return result[1:]

    _, _, graph, *_ = checked(driver.cuStreamGetCaptureInfo(stream))
    _, count = checked(driver.cuGraphGetNodes(graph))
    nodes, _ = checked(driver.cuGraphGetNodes(graph, count))
    names: dict[str, None] = {}
    for node in nodes[:count]:
        (kind,) = checked(driver.cuGraphNodeGetType(node))
        name = NO_KERNEL + kind.name.removeprefix("CU_GRAPH_NODE_TYPE_").lower()
        if kind == driver.CUgraphNodeType.CU_GRAPH_NODE_TYPE_KERNEL:
            (parameters,) = checked(driver.cuGraphKernelNodeGetParams(node))
            if int(parameters.func):
                (name,) = checked(driver.cuFuncGetName(parameters.func))
            else:
                (name,) = checked(driver.cuKernelGetName(parameters.kern))
            name = name.decode() if isinstance(name, bytes) else str(name)
        names[name] = None
    return list(names)
