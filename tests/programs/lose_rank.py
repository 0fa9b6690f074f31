"""A job whose last rank is lost in the middle of a loop: ``lose_rank.py SIGNAL BACKEND``.

The other ranks print what they catch, and end as a program does that lets the error through.
"""

from __future__ import annotations

import os
import signal
import sys
import time

import numpy as np
from mpi4py import MPI

import shmemar

LOST_CALL = 50


def main() -> None:
    number = getattr(signal, sys.argv[1])
    world = MPI.COMM_WORLD
    lost = world.size - 1
    backend = sys.argv[2]
    with shmemar.init(world, backend=backend) as comm:
        x = np.ones(1000, np.float32)
        if backend == "nvshmem":
            import cupy

            x = cupy.asarray(x)
        for call in range(10 * LOST_CALL):
            if comm.rank == lost and call == LOST_CALL:
                os.kill(os.getpid(), number)
            start = time.monotonic()
            try:
                comm.allreduce(x)
                if backend == "nvshmem":
                    cupy.cuda.get_current_stream().synchronize()
                    comm.check()
            except shmemar.CollectiveTimeoutError as error:
                waited_s = time.monotonic() - start
                print(
                    f"CAUGHT rank {comm.rank} call {call} missing {error.missing} after "
                    f"{waited_s:.1f} s: {error}",
                    flush=True,
                )
                try:
                    comm.check()
                except shmemar.CollectiveTimeoutError:
                    print(f"STILL BROKEN rank {comm.rank}", flush=True)
                raise


if __name__ == "__main__":
    main()
