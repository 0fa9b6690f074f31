"""Ranks that share a GPU leave room on it for what a late peer has yet to run."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import shmemar

if TYPE_CHECKING:
    from mpi4py import MPI

pytestmark = pytest.mark.gpu

SHARED_NBYTES = 100 << 10
"""Of 228 KiB that a multiprocessor of an H200 can be set up with."""

LATE_S = 0.2

SOURCE = r"""
extern "C" __global__ void fill(float *x, int count, float value) {
    extern __shared__ float staged[];
    staged[threadIdx.x] = value;
    __syncthreads();
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < count) x[i] = staged[threadIdx.x ^ 1];
}
"""


@pytest.mark.parametrize("nbytes", [512 << 10, 8 << 20])
def test_a_late_peers_kernel_with_shared_memory_runs_while_the_others_wait(
    world: MPI.Intracomm, backend: str, comm: shmemar.Communicator, agree: Any, nbytes: int
) -> None:
    if backend != "nvshmem":
        pytest.skip("--backend is not nvshmem")
    if not comm._runtime.shares_gpu:
        pytest.skip("each rank has a GPU of its own")
    import cupy

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SHMEMAR_TIMEOUT_S", "5")
        own = shmemar.init(world, backend=backend)
    count = nbytes // 4
    x, out = cupy.zeros(count, "float32"), cupy.zeros(count, "float32")
    fill = cupy.RawKernel(SOURCE, "fill")
    fill.max_dynamic_shared_size_bytes = SHARED_NBYTES

    def run(value: float) -> None:
        arguments = x, np.int32(count), np.float32(value)
        fill((-(-count // 128),), (128,), arguments, shared_mem=SHARED_NBYTES)

    # Everything is loaded before any rank waits, and the blocks of the wait are everywhere.
    run(0)
    own.allreduce(x, out=out)
    cupy.cuda.Device().synchronize()
    sums = []
    for late in range(own.size):
        own.host_barrier()
        if own.rank == late:
            time.sleep(LATE_S)
        run(late + own.rank)
        own.allreduce(x, out=out)
        sums.append(sorted(set(out.get().tolist())))
    ranks = range(own.size)
    assert agree(sums) == [[[sum(late + r for r in ranks)] for late in ranks]] * own.size
    own.close()
