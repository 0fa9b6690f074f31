"""What a barrier costs: alone, and in the kernels that have them.

A barrier alone is timed in the three modes of :mod:`benchmarks.timing`. Every sample is checked to
have had as many barriers as it should; that nobody leaves one early is for the tests. A kernel with
barriers is timed in mode `device` as it is, and once more without them, on the same grid: the
threads of a block still meet, the ranks do not, so what is left is the time in which data move. Its
results mean nothing, and are not looked at; its code is compiled anew, and may have more registers.
"""

from __future__ import annotations

import time
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import numpy as np

from benchmarks.timing import (
    as_result,
    prepare,
    resident_blocks,
    time_launches,
    time_loop,
)
from shmemar.device.barrier import block_barrier
from shmemar.device.groups import all_in_block
from shmemar.device.kernels import BUILDERS
from shmemar.device.registry import device
from shmemar.dtypes import DTYPES, ReduceOp
from shmemar.host.kernel_set import name_of
from shmemar.host.timing import Samples, time_graph
from shmemar.layout import BLOCK_THREADS, Grid
from shmemar.spec import Backend, Kernel, KernelSpec, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import shmemar
    from benchmarks.timing import Case, Result
    from shmemar.device.barrier import BlockBarrier, BlockThread
    from shmemar.host.launch import CudaKernel
    from shmemar.layout import AnyLayout, BarrierLayout

__all__ = ["Share", "measure_barrier", "measure_share"]


@dataclass(frozen=True)
class Share:
    """One kernel at one size, in mode `device`.

    Attributes:
        kernel: Kernel and protocol.
        nbytes: Bytes of the message.
        blocks: Blocks of its grid.
        median_us: Microseconds a collective, as it is.
        data_us: Without barriers.
        share: By what part of the time it is faster without.
        wrong: Wrong elements, as it is.
    """

    kernel: str
    nbytes: int
    blocks: int
    median_us: float
    data_us: float
    share: float
    wrong: int


def measure_barrier(comm: shmemar.Communicator, mode: str, samples: int, repeats: int) -> Result:
    """Measure ``comm.barrier()`` in one mode. Collective."""
    spec = KernelSpec(Kernel.BARRIER, Protocol.PUSH, DTYPES["uint32"], ReduceOp.SUM, comm.size)
    comm.barrier()  # which compiles it
    epochs = _Epochs(comm, spec)
    timed = {"device": _device, "graph": _graph, "eager": _eager}[mode]
    found = timed(comm, spec, samples, repeats, epochs)
    return as_result(
        comm,
        found,
        mode=mode,
        nbytes=0,
        count=0,
        dtype="-",
        op="-",
        kernel="barrier",
        blocks=1,
        in_place=False,
        chained=False,
        collective="barrier",
    )


def measure_share(comm: shmemar.Communicator, case: Case) -> Share:
    """Measure the pinned kernel, which has barriers, with and without them. Collective."""
    prepared = prepare(comm, case)
    spec, layout = prepared.spec, prepared.scratch.layout
    runtime: Any = comm._runtime

    def load() -> CudaKernel:
        from shmemar.host.launch import load_kernel

        return load_kernel(spec, layout, rank=comm.rank, device=runtime._device, looped=True)

    with runtime.active():
        whole = load()
        with _without_barriers():
            alone = load()
    max_blocks = min(resident_blocks(comm, kernel) for kernel in (whole, alone))
    samples = [time_loop(comm, prepared, kernel, case, max_blocks) for kernel in (whole, alone)]
    medians = [float(np.median(each.microseconds)) for each in samples]
    everyone = comm.host_allgather((medians, samples[0].wrong))
    median_us, data_us = (max(entry[0][which] for entry in everyone) for which in (0, 1))
    return Share(
        kernel=name_of(spec),
        nbytes=case.nbytes,
        blocks=samples[0].blocks or 0,
        median_us=median_us,
        data_us=data_us,
        share=1 - data_us / median_us,
        wrong=sum(entry[1] for entry in everyone),
    )


class _Epochs:
    """The epoch word of the barrier, which is all that it leaves."""

    def __init__(self, comm: shmemar.Communicator, spec: KernelSpec) -> None:
        self._comm = comm
        self._words = comm._kernels.scratch_for(spec).epochs
        self._before = 0

    def read(self) -> int:
        """How many barriers there were."""
        if self._comm.backend is Backend.EMULATED:
            words: Any = self._words
            return int(words.view(0).view(np.uint32)[0])
        from shmemar.host.launch import copy_to_host

        runtime: Any = self._comm._runtime
        ordinal = int(runtime._device.device_id)
        return int(copy_to_host(self._words.addresses[0], 4, ordinal).view(np.uint32)[0])

    def fill(self, sample: int) -> None:
        """Note how many there were before a sample."""
        del sample
        self._before = self.read()

    def count_wrong(self, sample: int, repeats: int, runs: int = 1) -> int:
        """1 when there were fewer or more since."""
        del sample
        return int(self.read() - self._before != repeats * runs)


def _device(
    comm: shmemar.Communicator, spec: KernelSpec, samples: int, repeats: int, epochs: _Epochs
) -> Samples:
    from shmemar.host.interop import Operand
    from shmemar.host.launch import load_kernel

    runtime: Any = comm._runtime
    prepared = comm._prepare(spec, 0)
    scratch = prepared.scratch
    with runtime.active():
        kernel = load_kernel(
            spec, scratch.layout, rank=comm.rank, device=runtime._device, looped=True
        )
    nothing = Operand(0, 0, spec.dtype)
    arguments = comm._arguments(prepared, nothing, nothing).flat()
    launch = kernel, Grid(1, BLOCK_THREADS), arguments, (0, 0, 0)
    return time_launches(comm, launch, samples, repeats, epochs)


def _graph(
    comm: shmemar.Communicator, spec: KernelSpec, samples: int, repeats: int, epochs: _Epochs
) -> Samples:
    del spec
    return time_graph(comm, lambda _, stream: comm.barrier(stream=stream), samples, repeats, epochs)


def _eager(
    comm: shmemar.Communicator, spec: KernelSpec, samples: int, repeats: int, epochs: _Epochs
) -> Samples:
    del spec, repeats
    microseconds, host_us, wrong = [], [], 0
    for sample in range(samples + 3):
        epochs.fill(sample)
        comm.host_barrier()
        # The ranks leave that one at different times; behind a barrier they are together.
        with comm._runtime.active():
            comm.barrier()
            comm._runtime.synchronize()
            start = time.perf_counter()
            comm.barrier()
            enqueued = time.perf_counter()
            comm._runtime.synchronize()
            done = time.perf_counter()
        if sample >= 3:
            host_us.append((enqueued - start) * 1e6)
            microseconds.append((done - start) * 1e6)
        wrong += epochs.count_wrong(sample, 2)
    host = None if comm.backend is Backend.EMULATED else float(np.median(host_us))
    return Samples(microseconds, host, wrong)


@contextmanager
def _without_barriers() -> Iterator[None]:
    """Let kernels be built whose blocks meet nobody."""

    def alone(layout: BarrierLayout, kernel: int) -> BlockBarrier:
        @device
        def meet_nobody(me: BlockThread, epoch: int, ready: bool) -> bool:  # noqa: FBT001
            return all_in_block(ready)

        return block_barrier(layout, kernel)._replace(meet_peers=meet_nobody)

    def build(spec: KernelSpec, layout: AnyLayout, *, looped: bool) -> Callable[..., Any]:
        return BUILDERS[spec.kernel](spec, layout, looped=looped)

    def not_kept(what: tuple[object, ...], make: Callable[[], str]) -> str:
        return make()

    kernels = "shmemar.device.kernels"
    with (
        patch(f"{kernels}.barrier_one_shot.block_barrier", alone),
        patch(f"{kernels}.barrier_two_shot.block_barrier", alone),
        patch("shmemar.host.launch.build", build),
        patch("shmemar.host.launch.kept_ptx", not_kept),
    ):
        yield
