"""What is behind the applications' communicators, one class a backend."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from shmemar.dtypes import DTYPES, as_dtype
from shmemar.errors import ArgumentError, BackendUnavailableError
from shmemar.host.exact import numpy_dtype
from shmemar.host.interop import host_operand, stream_handle
from shmemar.host.runtime import TEAM_WORLD
from shmemar.spec import Backend

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import shmemar
    from shmemar.host.interop import Operand

__all__ = ["BACKENDS", "Counting", "Counts", "Job", "require"]

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


class Counting(ABC):
    """What all communicators share: they count, and meet on the host."""

    name: str

    def __init__(self, job: Job) -> None:
        self._job = job
        self._is_closed = False
        self.rank = job.ours.rank
        self.size = job.ours.size
        self.xp = job.xp
        self.capturable = job.on_gpus
        self.counts = Counts()
        job.users += 1

    def empty(self, shape: int | tuple[int, ...], dtype: Any) -> Any:
        """Make an array in ordinary memory."""
        return self.xp.empty(shape, dtype)

    def prepare(self, dtype: str, nbytes: int) -> None:
        """Make a call of that size, whose libraries load what they need."""
        if not self._job.on_gpus:
            return
        x = self.empty(max(nbytes // as_dtype(dtype).itemsize, 1), dtype)
        x.fill(0)
        self._sum(x)
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

    def describe(self) -> dict[str, str]:
        """Say what it runs on, as `shmemar.Communicator.describe` does."""
        return self._job.ours.describe()

    def close(self) -> None:
        """Leave the others."""
        if not self._is_closed:
            self._is_closed = True
            self._job.leave()


class _Shmemar(Counting):
    """shmemar's collectives."""

    name = "shmemar"

    def prepare(self, dtype: str, nbytes: int) -> None:
        """Compile and load the kernels."""
        self._job.ours.prepare(dtype=dtype, op="sum", nbytes=nbytes)
        if self._job.on_gpus:
            super().prepare(dtype, nbytes)

    def _sum(self, x: Any) -> None:
        self._job.ours.allreduce(x, out=x)

    def _copy(self, x: Any, root: int) -> None:
        self._job.ours.broadcast(x, root=root)


class _Mpi(Counting):
    """MPI's collectives on the host; arrays of GPUs are copied there and back."""

    name = "mpi"

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        self.capturable = False
        self._pinned: Any = np.empty(0, np.uint8)
        self._stream: int | None = None

    def _sum(self, x: Any) -> None:
        with self._on_host(x) as host:
            self._job.ours._bootstrap.allreduce_host(host, host, "sum")

    def _copy(self, x: Any, root: int) -> None:
        with self._on_host(x) as host:
            self._job.ours._bootstrap.broadcast_host(host, root)

    @contextmanager
    def _on_host(self, x: Any) -> Iterator[Any]:
        operand, stream = self._job.operand(x)
        with self._job.ours._breaks_on_timeout():
            if not self._job.on_gpus:
                yield x
                return
            runtime = self.xp.cuda.runtime
            host = self._buffer(operand.nbytes, stream)
            there = host.ctypes.data, operand.address, operand.nbytes
            runtime.memcpyAsync(*there, runtime.memcpyDeviceToHost, stream)
            runtime.streamSynchronize(stream)
            yield host.view(numpy_dtype(operand.dtype))
            back = operand.address, host.ctypes.data, operand.nbytes
            runtime.memcpyAsync(*back, runtime.memcpyHostToDevice, stream)

    def _buffer(self, nbytes: int, stream: int) -> Any:
        """Pinned memory, which no copy back on another stream uses any more."""
        if self._stream not in (None, stream) or self._pinned.nbytes < nbytes:
            self._job.synchronize()
        self._stream = stream
        if self._pinned.nbytes < nbytes:
            memory = self.xp.cuda.alloc_pinned_memory(nbytes)
            self._pinned = np.frombuffer(memory, np.uint8, nbytes)
        return self._pinned[:nbytes]


class _Nvshmem(Counting):
    """NVSHMEM's own collectives on a stream, in arrays of its symmetric heap."""

    name = "nvshmem"

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        import nvshmem.bindings

        self._bindings = nvshmem.bindings
        self._parts: list[tuple[int, int]] = []
        self._stage: Any = None

    def empty(self, shape: int | tuple[int, ...], dtype: Any) -> Any:
        """Make an array in the symmetric heap."""
        array = self.xp.asarray(self._job.ours.symmetric_array(shape, dtype))
        self._parts.append((array.data.ptr, array.nbytes))
        return array

    def _sum(self, x: Any) -> None:
        operand, stream = self._job.operand(x)
        name = operand.dtype.name
        if name in ("complex64", "complex128"):
            name = {"complex64": "float32", "complex128": "float64"}[name]
            operand = operand.as_components(DTYPES[name])
        if name not in _NVSHMEM_TYPES:
            expected = ", ".join(_NVSHMEM_TYPES)
            raise ArgumentError(f"x is of {name}; expected one of {expected}, or complex.")
        reduce = getattr(self._bindings, f"{_NVSHMEM_TYPES[name]}_sum_reduce_on_stream")
        with self._in_heap(operand, stream) as at:
            reduce(TEAM_WORLD, at, at, operand.count, stream)

    def _copy(self, x: Any, root: int) -> None:
        operand, stream = self._job.operand(x)
        broadcast = self._bindings.uint8_broadcast_on_stream
        with self._in_heap(operand, stream) as at:
            broadcast(TEAM_WORLD, at, at, operand.nbytes, root, stream)

    @contextmanager
    def _in_heap(self, operand: Operand, stream: int) -> Iterator[int]:
        """Address of the array in the heap, or of a copy, which is copied back."""
        for start, nbytes in self._parts:
            if start <= operand.address and operand.address + operand.nbytes <= start + nbytes:
                yield operand.address
                return
        if self._stage is None or self._stage.nbytes < operand.nbytes:
            self._job.synchronize()
            self._stage = self.empty(max(operand.nbytes, 1), np.uint8)
        runtime, at = self.xp.cuda.runtime, self._stage.data.ptr
        kind = runtime.memcpyDeviceToDevice
        runtime.memcpyAsync(at, operand.address, operand.nbytes, kind, stream)
        yield at
        runtime.memcpyAsync(operand.address, at, operand.nbytes, kind, stream)


_NVSHMEM_TYPES = {
    "float16": "half",
    "bfloat16": "bfloat16",
    "float32": "float",
    "float64": "double",
    "int32": "int32",
    "int64": "int64",
}


class _Nccl(Counting):
    """NCCL through CuPy's bindings."""

    name = "nccl"

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        from cupy.cuda import nccl

        ours = job.ours
        identity = ours.host_allgather(nccl.get_unique_id() if ours.rank == 0 else None)[0]
        self._nccl = nccl.NcclCommunicator(ours.size, identity, ours.rank)

    def _sum(self, x: Any) -> None:
        operand, stream = self._job.operand(x)
        name = operand.dtype.name
        if name in ("complex64", "complex128"):
            name = {"complex64": "float32", "complex128": "float64"}[name]
            operand = operand.as_components(DTYPES[name])
        if name not in _NCCL_TYPES:
            expected = ", ".join(_NCCL_TYPES)
            raise ArgumentError(f"x is of {name}; expected one of {expected}, or complex.")
        at, kind = operand.address, _NCCL_TYPES[name]
        self._nccl.allReduce(at, at, operand.count, kind, _NCCL_SUM, stream)

    def _copy(self, x: Any, root: int) -> None:
        operand, stream = self._job.operand(x)
        self._nccl.bcast(operand.address, operand.nbytes, _NCCL_TYPES["uint8"], root, stream)

    def close(self) -> None:
        """Destroy NCCL's communicator, and leave the others."""
        if not self._is_closed:
            self._job.synchronize()
            self._nccl.destroy()
        super().close()


_NCCL_SUM = 0
_NCCL_TYPES = {
    "int8": 0,
    "uint8": 1,
    "int32": 2,
    "uint32": 3,
    "int64": 4,
    "uint64": 5,
    "float16": 6,
    "float32": 7,
    "float64": 8,
    "bfloat16": 9,
}
"""``ncclDataType_t`` of nccl.h, as CuPy has no name for bfloat16."""


class _Self(Counting):
    """No communication: what is left is the rest of the application's time."""

    name = "self"

    def prepare(self, dtype: str, nbytes: int) -> None:
        """Nothing is to be loaded."""

    def _sum(self, x: Any) -> None:
        pass

    def _copy(self, x: Any, root: int) -> None:
        pass


BACKENDS: dict[str, Callable[[Job], Counting]] = {
    "shmemar": _Shmemar,
    "nvshmem": _Nvshmem,
    "nccl": _Nccl,
    "mpi": _Mpi,
    "self": _Self,
}


def require(job: Job, name: str) -> None:
    """Refuse what can't run here. Not collective; ranks may differ in what is installed.

    Raises:
        BackendUnavailableError: It says why.
    """
    if name not in ("nvshmem", "nccl"):
        return
    if not job.on_gpus:
        raise BackendUnavailableError(
            f"backend {name} needs GPUs, and these ranks are emulated on the CPU; use shmemar, mpi "
            "or self."
        )
    runtime: Any = job.ours._runtime
    if name == "nvshmem" and job.ours.size != runtime._job.size:
        raise BackendUnavailableError(
            f"backend nvshmem sums over all {runtime._job.size} processes of the job, and these "
            f"are {job.ours.size} of them; use another one."
        )
    if name == "nccl":
        if runtime.shares_gpu:
            raise BackendUnavailableError(
                "backend nccl refuses ranks that share a GPU; give each rank one of its own, or "
                "leave it out."
            )
        try:
            from cupy.cuda import nccl
        except ImportError as error:
            raise BackendUnavailableError(f"CuPy has no NCCL ({error}); leave nccl out.") from error
        if not nccl.available:
            raise BackendUnavailableError("CuPy finds no NCCL; install it, or leave nccl out.")
