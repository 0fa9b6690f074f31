"""Latency of collectives in a CUDA graph, for the tuner and for benchmarks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable

    from shmemar.host.communicator import Communicator

__all__ = ["Data", "Samples", "time_graph"]


@dataclass(frozen=True)
class Samples:
    """What a rank measured.

    Attributes:
        microseconds: Of one collective, sample by sample.
        other_us: `graph`: of an empty kernel in its place. `eager`: the host's time of a call.
        wrong: Wrong elements over all samples.
        registers: Registers a thread, where they are known.
        blocks: Blocks of the grid, where they are known.
    """

    microseconds: list[float]
    other_us: float | None
    wrong: int
    registers: int | None = None
    blocks: int | None = None


class Data(Protocol):
    """What the collectives of a sample work on."""

    def fill(self, sample: int) -> None:
        """Put in the inputs of a sample, and poison its outputs."""

    def count_wrong(self, sample: int, repeats: int, runs: int = 1) -> int:
        """Count what is wrong after `runs` runs of `repeats` calls."""


def time_graph(
    comm: Communicator,
    collective: Callable[[int, Any], None],
    nsamples: int,
    repeats: int,
    data: Data,
) -> Samples:
    """Time replays of a graph of `repeats` calls of ``collective(call, stream)``. Collective.

    Each was called once before.
    """
    import cupy

    cupy.cuda.Device().synchronize()
    stream = cupy.cuda.Stream(non_blocking=True)
    nothing = cupy.RawKernel('extern "C" __global__ void nothing() {}', "nothing")
    nothing((1,), (32,), ())

    def capture(body: Callable[[int, Any], Any]) -> Any:
        with stream:
            stream.begin_capture()
            for call in range(repeats):
                body(call, stream)
            return stream.end_capture()

    graph = capture(collective)
    empty = capture(lambda *_: nothing((1,), (32,), ()))
    start, end = cupy.cuda.Event(), cupy.cuda.Event()

    def replay(which: Any) -> float:
        comm.host_barrier()
        which.launch(stream)
        start.record(stream)
        which.launch(stream)
        end.record(stream)
        end.synchronize()
        return float(cupy.cuda.get_elapsed_time(start, end)) * 1e3 / repeats

    samples_us, empty_us, wrong = [], [], 0
    for sample in range(nsamples + 3):
        data.fill(sample)
        cupy.cuda.Device().synchronize()
        elapsed = replay(graph)
        apart = replay(empty)
        if sample >= 3:
            samples_us.append(elapsed)
            empty_us.append(apart)
        wrong += data.count_wrong(sample, repeats, runs=2)
    return Samples(samples_us, float(np.median(empty_us)), wrong)
