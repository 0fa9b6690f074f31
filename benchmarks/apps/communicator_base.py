"""What all of the applications' communicators share: the ranks behind them, counts, the host."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from shmemar.dtypes import as_dtype
from shmemar.errors import BackendUnavailableError
from shmemar.host.interop import host_operand, stream_handle
from shmemar.spec import Backend

if TYPE_CHECKING:
    from collections.abc import Callable

    import shmemar
    from shmemar.host.interop import Operand
    from shmemar.host.user_kernels import LLScratch

__all__ = ["Counting", "Counts", "Fusing", "Job"]

T = TypeVar("T")


@dataclass
class Counts:
    """What was asked of a communicator. Calls that are captured count once, when captured.

    Attributes:
        calls: Calls by the collective's name, ``allreduce`` or ``broadcast``.
        nbytes: Bytes of their arrays, likewise.
        seconds: Time that the host spent in them. On GPUs most return before they are done.
    """

    calls: dict[str, int] = field(default_factory=dict)
    nbytes: dict[str, int] = field(default_factory=dict)
    seconds: float = 0.0

    def add(self, name: str, nbytes: int, seconds: float) -> None:
        """Count a call."""
        self.calls[name] = self.calls.get(name, 0) + 1
        self.nbytes[name] = self.nbytes.get(name, 0) + nbytes
        self.seconds += seconds

    def clear(self) -> None:
        """Begin again."""
        self.calls.clear()
        self.nbytes.clear()
        self.seconds = 0.0


class Job:
    """The ranks behind all communicators that were opened together. The last one closes it."""

    def __init__(self, ours: shmemar.Communicator) -> None:
        self.ours = ours
        self.on_gpus = ours.backend is not Backend.EMULATED
        self.xp: Any = np
        self.users = 0
        if self.on_gpus:
            self.xp = ours.host_together(self._cupy, "load CuPy")

    def _cupy(self) -> Any:
        try:
            import cupy
        except ImportError as error:
            raise BackendUnavailableError(
                f"CuPy could not be loaded ({error}), whose arrays applications use on GPUs; "
                "install it, or use backend 'emulated'."
            ) from error
        runtime: Any = self.ours._runtime
        cupy.cuda.Device(runtime._device.device_id).use()
        return cupy

    def operand(self, x: Any) -> tuple[Operand, int]:
        """Check an array; return it with the handle of its library's current stream."""
        if not self.on_gpus:
            return host_operand("x", x, writeable=True), 0
        runtime: Any = self.ours._runtime
        stream = stream_handle(None, x)
        return runtime.operand("x", x, stream, writeable=True), stream

    def synchronize(self) -> None:
        """Wait until everything on this rank's GPU has ended."""
        if self.on_gpus:
            runtime: Any = self.ours._runtime
            runtime.synchronize()

    def leave(self) -> None:
        """Close what is behind, when nobody uses it any more."""
        self.users -= 1
        if not self.users:
            self.ours.close()


class Fusing:
    """An application's own kernels, in which shmemar's ranks sum (`shmemar.Communicator.launch`).

    Each launch counts as an all-reduce.
    """

    def __init__(self, ours: shmemar.Communicator, counts: Counts) -> None:
        self._ours, self._counts = ours, counts
        self._buffers: list[LLScratch] = []

    def buffer(self, dtype: np.dtype[Any], threads: int) -> LLScratch:
        """Return memory for exchanges of a type, by so many threads at least. Collective.

        What was made before is used again: it lasts as long as the communicator.
        """
        for each in self._buffers:
            if each.dtype == dtype and each.threads >= threads:
                return each
        self._buffers.append(self._ours.ll_buffer(dtype.name, threads=threads))
        return self._buffers[-1]

    def launch(
        self,
        kernel: Callable[..., None],
        buffer: LLScratch,
        *arguments: Any,
        nbytes: int,
        threads: int,
        stream: Any,
    ) -> None:
        """Launch a kernel that sums `nbytes` bytes of each rank. Collective."""
        start = time.perf_counter()
        self._ours.launch(kernel, buffer, *arguments, threads=threads, stream=stream)
        self._counts.add("allreduce", nbytes, time.perf_counter() - start)


class Counting(ABC):
    """What all communicators share: they count, and meet on the host."""

    name: str

    @classmethod
    def settle(cls, job: Job) -> Any:
        """What ranks exchange before each makes its own; its second argument. Collective."""
        return None

    def __init__(self, job: Job, settled: Any) -> None:
        self._job = job
        self._is_closed = False
        self.rank = job.ours.rank
        self.size = job.ours.size
        self.xp = job.xp
        self.capturable = job.on_gpus
        self.fusing: Fusing | None = None
        self.counts = Counts()
        job.users += 1

    def empty(self, shape: int | tuple[int, ...], dtype: Any) -> Any:
        """Make an array in ordinary memory."""
        return self._job.ours.host_together(lambda: self.xp.empty(shape, dtype), "make an array")

    def prepare(self, dtype: str, nbytes: int) -> None:
        """Make a call of that size, whose libraries load what they need."""
        if not self._job.on_gpus:
            return
        x = self.empty(max(nbytes // as_dtype(dtype).itemsize, 1), dtype)
        x.fill(0)
        self._sum(x)
        self.barrier()
        self._copy(x, 0)
        self.barrier()

    def allreduce(self, x: Any) -> None:
        """Sum in place."""
        start = time.perf_counter()
        self._sum(x)
        self.counts.add("allreduce", int(x.nbytes), time.perf_counter() - start)

    def broadcast(self, x: Any, root: int) -> None:
        """Copy in place."""
        start = time.perf_counter()
        self._copy(x, root)
        self.counts.add("broadcast", int(x.nbytes), time.perf_counter() - start)

    @abstractmethod
    def _sum(self, x: Any) -> None: ...

    @abstractmethod
    def _copy(self, x: Any, root: int) -> None: ...

    def barrier(self) -> None:
        """Wait for the own GPU, and then for the others."""
        self._job.synchronize()
        self._job.ours.host_barrier()

    def host_allgather(self, item: T) -> list[T]:
        """Gather over MPI."""
        return self._job.ours.host_allgather(item)

    def close(self) -> None:
        """Leave the others."""
        if not self._is_closed:
            self._is_closed = True
            self._job.leave()
