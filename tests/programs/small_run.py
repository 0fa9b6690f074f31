"""A few all-reduces on GPUs, for a memory checker to watch."""

from __future__ import annotations

from mpi4py import MPI

import shmemar
from shmemar.dtypes import DTYPES, ReduceOp
from shmemar.host.exact import count_wrong, exact_input, exact_result


def main() -> None:
    import cupy

    wrong = 0
    world = MPI.COMM_WORLD
    with shmemar.init(world, backend="nvshmem", scratch_nbytes=2 * world.size * 256 * 16) as comm:
        for name, op in (("float32", ReduceOp.SUM), ("complex128", ReduceOp.PROD)):
            dtype = DTYPES[name]
            for call, count in enumerate((1, 2, 257, 1500)):
                whole = cupy.zeros(count + 1, name)
                x = whole[call % 2 :][:count]
                x.set(exact_input(dtype, op, count, rank=comm.rank, call=call))
                got = comm.allreduce(x, op=op).get()
                expected = exact_result(dtype, op, count, nranks=comm.size, call=call)
                wrong += count_wrong(got, expected)
    assert world.allreduce(wrong) == 0, wrong
    print("all results right", flush=True)


if __name__ == "__main__":
    main()
