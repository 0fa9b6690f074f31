"""What a call costs the host: plans, eager calls, and what they are to be compared with.

Each contender enqueues its launches without waiting for them; the host's time of a call is that of
the loop divided by its calls. Contenders take turns, sample by sample. All ranks do the same at the
same time; the figure is the maximum over ranks of each rank's median.

* ``loop``: ``cuLaunchKernel`` in a loop of machine code, as a C program has it: an empty kernel
  with as many parameters.
* ``plan``: a call of a plan.
* ``eager``: ``comm.allreduce`` with ``out=``, on CuPy's current stream.
* ``numba``: numba-cuda's own dispatch of such an empty kernel.
"""

from __future__ import annotations

import ctypes
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from shmemar.host.exact import count_wrong, exact_input, exact_result

if TYPE_CHECKING:
    from collections.abc import Callable

    import shmemar
    from shmemar.dtypes import DType, ReduceOp

__all__ = ["CONTENDERS", "HostTime", "compile_loop", "driver_launch", "measure_launches"]

CONTENDERS = ("loop", "plan", "eager", "numba")


@dataclass(frozen=True)
class HostTime:
    """One contender.

    Attributes:
        contender: One of `CONTENDERS`.
        median_us: Host microseconds a call: the largest median of the ranks.
        p20_us: Its 20th percentile.
        p80_us: Its 80th.
        of_loop: The median over that of ``loop``.
        wrong: Wrong elements over all ranks, of the last call.
    """

    contender: str
    median_us: float
    p20_us: float
    p80_us: float
    of_loop: float
    wrong: int


def driver_launch() -> Any:
    """``cuLaunchKernel``, of the driver's library."""
    launch_kernel = ctypes.CDLL("libcuda.so.1").cuLaunchKernel
    word, number = ctypes.c_uint64, ctypes.c_uint32
    launch_kernel.argtypes = [word, *[number] * 7, word, word, word]
    launch_kernel.restype = ctypes.c_int32
    return launch_kernel


def compile_loop(launch_kernel: Any) -> Callable[[int, int, int, int], int]:
    """Compile ``loop(function, parameters, stream, calls)``, which returns the last status.

    Args:
        launch_kernel: `driver_launch`, or what stands in for it.
    """
    from numba import njit, types

    one, none, threads = np.uint32(1), np.uint32(0), np.uint32(128)

    def loop(function: int, parameters: int, stream: int, calls: int) -> int:
        status = 0
        for _ in range(calls):
            status = launch_kernel(
                function, one, one, one, threads, one, one, none, stream, parameters, 0
            )
        return status

    word = types.uint64
    compiled: Callable[[int, int, int, int], int] = njit(
        types.int64(word, word, word, types.int64)
    )(loop)
    return compiled


def measure_launches(
    comm: shmemar.Communicator,
    dtype: DType,
    op: ReduceOp,
    count: int,
    samples: int,
    calls: int,
) -> list[HostTime]:
    """Measure all contenders. Collective; on GPUs, with CuPy and numba-cuda.

    Args:
        comm: The communicator.
        dtype: Element type.
        op: Operator.
        count: Elements of the message.
        samples: Samples of each.
        calls: Calls a sample: few enough that the GPU keeps up, or is waited for.
    """
    import cupy

    given = exact_input(dtype, op, count, rank=comm.rank, call=1)
    expected = exact_result(dtype, op, count, nranks=comm.size, call=1)
    x, out = cupy.asarray(given), cupy.empty(count, dtype.name)
    stream = cupy.cuda.Stream(non_blocking=True)
    plan = comm.plan_allreduce(x, out, op=op)
    cupy.cuda.Device().synchronize()

    def repeat(body: Callable[[], Any]) -> Callable[[], None]:
        def run() -> None:
            for _ in range(calls):
                body()

        return run

    runs = {
        "loop": _looped(stream.ptr, calls),
        "plan": repeat(lambda: plan(stream=stream)),
        "eager": repeat(lambda: comm.allreduce(x, out=out, op=op)),
        "numba": repeat(_dispatched(stream.ptr)),
    }
    times: dict[str, list[float]] = {name: [] for name in runs}
    wrong = dict.fromkeys(runs, 0)
    for sample in range(samples + 2):
        for name, run in runs.items():
            if name in ("plan", "eager"):
                out.view(np.uint8)[...] = 0xA5
            cupy.cuda.Device().synchronize()
            comm.host_barrier()
            with stream:
                start = time.perf_counter()
                run()
                elapsed_us = (time.perf_counter() - start) * 1e6 / calls
            stream.synchronize()
            if sample >= 2:
                times[name].append(elapsed_us)
            if name in ("plan", "eager"):
                wrong[name] += count_wrong(out.get(), expected)
    percentiles = {
        name: tuple(float(np.percentile(each, p)) for p in (50, 20, 80))
        for name, each in times.items()
    }
    everyone = comm.host_allgather((percentiles, wrong))
    slowest = {name: max(entry[0][name] for entry in everyone) for name in runs}
    return [
        HostTime(
            contender=name,
            median_us=found[0],
            p20_us=found[1],
            p80_us=found[2],
            of_loop=found[0] / slowest["loop"][0],
            wrong=sum(entry[1][name] for entry in everyone),
        )
        for name, found in slowest.items()
    ]


_NPARAMETERS = 14


def _looped(stream: int, calls: int) -> Callable[[], None]:
    import cupy

    names = ", ".join(f"unsigned long long p{number}" for number in range(_NPARAMETERS))
    kernel = cupy.RawKernel(f'extern "C" __global__ void empty({names}) {{}}', "empty")
    values = np.zeros(_NPARAMETERS, np.uint64)
    pointers = values.ctypes.data + 8 * np.arange(_NPARAMETERS, dtype=np.uint64)
    kernel((1,), (128,), tuple(values))  # which loads it
    function, loop = int(kernel.kernel.ptr), compile_loop(driver_launch())

    def run(_: Any = (kernel, values)) -> None:
        status = loop(function, pointers.ctypes.data, stream, calls)
        if status:
            raise RuntimeError(f"cuLaunchKernel returned {status}")

    return run


def _dispatched(stream: int) -> Callable[[], None]:
    from numba import cuda, types

    names = ", ".join(f"p{number}" for number in range(_NPARAMETERS))
    made: dict[str, Any] = {}
    exec(f"def empty({names}):\n    return", made)  # noqa: S102 - one parameter after the other
    empty = cuda.jit(types.void(*[types.uint64] * _NPARAMETERS))(made["empty"])
    external = cuda.external_stream(stream)
    values = [np.uint64(0)] * _NPARAMETERS
    configured = empty[1, 128, external]
    return lambda: configured(*values)
