"""Runs kernels for a memory checker: all ranks in one process, a stream each, without NVSHMEM.

Instrumenting NVSHMEM's own modules takes longer than anybody waits. Here every region, epoch array
and user array is an allocation of its own besides, so that a byte too far is an error, which inside
the symmetric heap it would not be.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from shmemar.config import Config
from shmemar.device.kernels import KernelArguments
from shmemar.device.packet import SENTINEL
from shmemar.dtypes import DTYPES, ReduceOp
from shmemar.host.exact import count_wrong, exact_input, exact_result
from shmemar.host.launch import load_kernel
from shmemar.host.scratch import layout_for
from shmemar.layout import (
    FAILURE_DTYPE,
    WORD_NBYTES,
    BarrierLayout,
    LLLayout,
    StagingLayout,
    barrier_grid,
    grid_for,
)
from shmemar.spec import Kernel, KernelSpec, Protocol

COUNTS = 1, 2, 257, 1500
REDUCING = [kernel for kernel in Kernel if kernel.reduces and kernel.has_code]
CASES = [
    *(
        ("float32", ReduceOp.SUM, kernel, protocol)
        for kernel in REDUCING
        for protocol in kernel.protocols
    ),
    ("complex128", ReduceOp.PROD, Kernel.ONE_SHOT, Protocol.LL),
    ("complex128", ReduceOp.PROD, Kernel.TWO_SHOT, Protocol.SENTINEL),
    ("float16", ReduceOp.SUM, Kernel.TWO_SHOT, Protocol.SENTINEL),
    ("uint8", ReduceOp.SUM, Kernel.ONE_SHOT, Protocol.LL),
    ("bfloat16", ReduceOp.AVG, Kernel.LL128_ATOMIC, Protocol.SENTINEL),
]


def count_wrong_of(spec: KernelSpec, *, beyond: int) -> int:
    """Run a call of each count on all ranks; `beyond` is added to a count, to plant an error."""
    import cupy
    from cuda.core import Device

    dtype, op, nranks = spec.dtype, spec.op, spec.nranks
    nbytes = LLLayout(nranks, 256, spec.nbuffers, spec.accumulators).nbytes
    layout = layout_for(spec, Config(scratch_nbytes=nbytes, two_shot_scratch_nbytes=nbytes))
    device = Device()
    kernels = [load_kernel(spec, layout, rank=rank, device=device) for rank in range(nranks)]
    regions, epochs, broken, records = (
        [cupy.zeros(nbytes, np.uint8) for _ in range(nranks)]
        for nbytes in (layout.nbytes, layout.epochs_nbytes, 4, FAILURE_DTYPE.itemsize)
    )
    if spec.protocol is Protocol.SENTINEL:
        for region in regions:
            packets_nbytes = layout.nbytes - layout.zeroed_nbytes
            region.view(np.uint32)[: packets_nbytes // WORD_NBYTES] = SENTINEL
    streams = [cupy.cuda.Stream(non_blocking=True) for _ in range(nranks)]
    wrong = 0
    for call, count in enumerate(COUNTS):
        arrays: list[Any] = []
        for rank in range(nranks):
            # The first element is left out in every other call, so that both alignments occur.
            whole = cupy.zeros(count + call % 2, dtype.name)
            x = whole[call % 2 :]
            x.set(exact_input(dtype, op, count, rank=rank, call=call))
            arrays.append((x, cupy.zeros(count, dtype.name)))
        device.sync()
        ngroups = spec.group_count(count * dtype.itemsize)
        assert not isinstance(layout, StagingLayout)
        if isinstance(layout, BarrierLayout):
            grid = barrier_grid(ngroups, layout)
        else:
            grid = grid_for(
                ngroups, layout, packets_per_thread=spec.packets_per_thread, lanes=spec.lanes
            )
        for rank, (x, out) in enumerate(arrays):
            arguments = KernelArguments.of_message(
                spec,
                x.data.ptr,
                out.data.ptr,
                count + beyond,
                peers=tuple(region.data.ptr for region in regions),
                epochs=epochs[rank].data.ptr,
                broken=broken[rank].data.ptr,
                record=records[rank].data.ptr,
                timeout_ns=20_000_000_000,
            )
            kernels[rank].launch(grid, arguments.flat(), streams[rank].ptr)
        device.sync()
        expected = exact_result(dtype, op, count, nranks=nranks, call=call)
        wrong += sum(count_wrong(out.get(), expected) for _, out in arrays)
    return wrong


def main() -> None:
    import cupy
    from cuda.core import Device

    Device().set_current()
    cupy.cuda.set_allocator(None)
    beyond = 1 if "--plant" in sys.argv else 0
    for nranks in (1, 2, 4):
        for name, op, kernel, protocol in CASES:
            spec = KernelSpec(kernel, protocol, DTYPES[name], op, nranks)
            wrong = count_wrong_of(spec, beyond=beyond)
            print(f"{spec.name}: {wrong} wrong", flush=True)
            assert wrong == 0
    print("all results right", flush=True)


if __name__ == "__main__":
    main()
