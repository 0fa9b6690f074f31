"""A job whose last rank is lost: ``lose_rank.py SIGNAL BACKEND PLACE``.

PLACE is ``loop`` (in the middle of a loop of all-reduces), ``first`` (before the first one),
``host`` (before a barrier on the host), ``mpi`` (before an all-reduce of MPI's own) or ``user``
(before a kernel of the user's, which loops until its sum is that of all).

The other ranks print what they catch, and end as a program does that lets the error through.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from typing import Any

import numpy as np
from mpi4py import MPI

import shmemar

LOST_CALL = 50


def until_all_have_come(ll: Any, thread: int, nthreads: int, x: Any) -> None:
    """Two exchanges; the end of the loop depends on what is received."""
    total, turns = 0, 0
    while total < 2 * ll.size and ll.is_alive():
        turns += 1
        ll.bcast(0, turns)
        total = ll.recv_reduce(0, turns, lambda a, b: a + b)
        ll.advance_epoch()
    x[thread] = total


def main() -> None:
    number, backend, place = getattr(signal, sys.argv[1]), sys.argv[2], sys.argv[3]
    world = MPI.COMM_WORLD
    lost = world.size - 1
    lost_call = 0 if place == "first" else LOST_CALL
    with shmemar.init(world, backend=backend) as comm:
        x = np.ones(1000, np.float32)
        if backend == "nvshmem":
            import cupy

            x = cupy.asarray(x)
        buffer = comm.ll_buffer("int32", threads=256)
        if place == "user":
            comm.launch(until_all_have_come, buffer, x)
        for call in range(10 * LOST_CALL):
            if comm.rank == lost and call == lost_call:
                os.kill(os.getpid(), number)
            start = time.monotonic()
            try:
                if place == "host" and call == lost_call:
                    comm.host_barrier()
                if place == "user" and call == lost_call:
                    comm.launch(until_all_have_come, buffer, x)
                if place == "mpi" and call == lost_call:
                    with comm._breaks_on_timeout():
                        comm._bootstrap.allreduce_host(x, x, "sum")
                if place != "user":
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
                # Some launchers end the job at the first exit, before the others have spoken.
                time.sleep(1)
                raise


if __name__ == "__main__":
    main()
