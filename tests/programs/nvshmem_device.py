"""Put and signal round a ring through NVSHMEM's own device API, into symmetric arrays of shmemar.

The way for peers that no address reaches. It needs cffi, and takes NVSHMEM's headers through NVRTC.
"""

from __future__ import annotations

from typing import Any

import cupy
import nvshmem.core.device.numba as device
from mpi4py import MPI
from numba import cuda
from nvshmem.core import ComparisonType, SignalOp

import shmemar

COUNT = 3000
SET, AT_LEAST = int(SignalOp.SIGNAL_SET), int(ComparisonType.CMP_GE)


@cuda.jit  # type: ignore[untyped-decorator]
def ring(inbox: Any, outbox: Any, signals: Any, right: int, value: int) -> None:
    """One block: put to the right neighbour, and wait for the left one."""
    device.put_signal_block(inbox, outbox, signals, value, SET, right)
    if cuda.threadIdx.x == 0:
        device.signal_wait(signals, AT_LEAST, value)


def main() -> None:
    world = MPI.COMM_WORLD
    wrong = 0
    with shmemar.init(world, backend="nvshmem") as comm:
        inbox, outbox = (comm.symmetric_array(COUNT, "int32").array for _ in range(2))
        signals = comm.symmetric_array(1, "uint64").array
        for call in range(1, 6):
            outbox[...] = cupy.arange(COUNT) + 1000 * comm.rank + call
            inbox[...] = -1
            cupy.cuda.Device().synchronize()
            comm.host_barrier()
            ring[1, 128](inbox, outbox, signals, (comm.rank + 1) % comm.size, call)
            cuda.synchronize()
            left = (comm.rank - 1) % comm.size
            wrong += int((inbox != cupy.arange(COUNT) + 1000 * left + call).sum())
    assert world.allreduce(wrong) == 0, wrong
    print("all results right", flush=True)


if __name__ == "__main__":
    main()
