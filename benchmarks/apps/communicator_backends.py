"""What is behind the applications' communicators, one class a backend."""

from __future__ import annotations

import math
import sys
import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from benchmarks.apps.communicator_base import Counting, Fusing, Job
from benchmarks.steering import nvshmem_may_use_nccl
from shmemar.dtypes import DTYPES
from shmemar.errors import ArgumentError, BackendUnavailableError
from shmemar.host.exact import numpy_dtype
from shmemar.host.runtime import TEAM_WORLD
from shmemar.host.stock import NVSHMEM_TYPES

if TYPE_CHECKING:
    from collections.abc import Mapping

    from shmemar.host.interop import Operand

__all__ = ["BACKENDS", "most_summed_alike", "require"]

T = TypeVar("T")


class _Shmemar(Counting):
    """shmemar's collectives."""

    name = "shmemar"

    def __init__(self, job: Job, settled: Any) -> None:
        super().__init__(job, settled)
        self.fusing = Fusing(job.ours, self.counts)

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

    def __init__(self, job: Job, settled: Any) -> None:
        super().__init__(job, settled)
        self.capturable = False
        self._pinned: Any = np.empty(0, np.uint8)
        self._stream: int | None = None

    def _sum(self, x: Any) -> None:
        operand, stream = self._job.operand(x)
        mpi = self._job.ours._bootstrap
        with self._job.ours._breaks_on_timeout():
            host = self._to_host(x, operand, stream)
            mpi.allreduce_host(host, host, "sum")
            self._from_host(host, operand, stream)

    def _copy(self, x: Any, root: int) -> None:
        operand, stream = self._job.operand(x)
        with self._job.ours._breaks_on_timeout():
            host = self._to_host(x, operand, stream, is_read=self.rank == root)
            self._job.ours._bootstrap.broadcast_host(host, root)
            if self.rank != root:
                self._from_host(host, operand, stream)

    def _to_host(self, x: Any, operand: Operand, stream: int, *, is_read: bool = True) -> Any:
        """An array of numpy with what is in `x`, or, unless it is read, with anything."""
        if not self._job.on_gpus:
            return x
        runtime = self.xp.cuda.runtime
        host = self._buffer(operand.nbytes, stream)
        if is_read:
            there = host.ctypes.data, operand.address, operand.nbytes
            runtime.memcpyAsync(*there, runtime.memcpyDeviceToHost, stream)
        # Also what was copied from there before has to be done.
        runtime.streamSynchronize(stream)
        return host.view(numpy_dtype(operand.dtype))

    def _from_host(self, host: Any, operand: Operand, stream: int) -> None:
        if self._job.on_gpus:
            runtime = self.xp.cuda.runtime
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


_FLAG_NBYTES = 16


class _Loan:
    """What an array holds while it lies in a part of the symmetric heap."""

    __slots__ = ("__weakref__",)


@dataclass
class _Part:
    """A part of the symmetric heap.

    Attributes:
        address: Of this rank's.
        nbytes: Its bytes.
        loan: Finds what an array or its parts still hold; None once they are gone.
    """

    address: int
    nbytes: int
    loan: weakref.ref[_Loan]


def most_summed_alike(nranks: int) -> int:
    """Elements up to which NVSHMEM 3.8's own sums have the same bits on all of 4, 8, ... ranks.

    It has ranks exchange all they have, log2 times, both of a pair adding the same two numbers. Its
    scratch memory has to hold 1 + 3 log2 messages for that, as if elements had 8 bytes. Longer ones
    every rank adds up in an order of its own (``nvshmemi_gpu_rdxn_threadgroup`` in NVSHMEM's
    reduce.cuh, where it has no multicast).

    Args:
        nranks: A power of two. With 2 there is one order, whatever the size.

    Returns:
        A multiple of `_ALIGNED`, so that parts of a message are aligned as it is.
    """
    most = _SCRATCH_NBYTES // 2 // 8 // (1 + 3 * (nranks.bit_length() - 1))
    return most // _ALIGNED * _ALIGNED


_SCRATCH_NBYTES = 512 * 1024
"""NVSHMEM's scratch memory for reductions, by default. With a smaller NVSHMEM_REDUCE_SCRATCH_SIZE
sums differ between ranks all the same."""

_ALIGNED = 64


class _Nvshmem(Counting):
    """NVSHMEM's own collectives on a stream, in arrays of its symmetric heap.

    They go from one buffer to another, as NVSHMEM 3.8 gives wrong sums in place from 4 ranks and
    some 12,000 float32 on; then the result is copied to where it is wanted. With 4, 8, ... ranks
    sums go in parts that are `most_summed_alike`, as applications do the same on all ranks with
    what should be the same sums. With 3, 5, 6, ... ranks sums may differ; and where ranks have GPUs
    of their own NVSHMEM is taken to hand over to NCCL, whole, unless NVSHMEM_DISABLE_NCCL is set. A
    sum of one integer goes before each broadcast, so that all ranks are ready for it.
    """

    name = "nvshmem"

    @classmethod
    def settle(cls, job: Job) -> Any:
        """NVSHMEM's numbers of the ranks."""
        runtime: Any = job.ours._runtime
        return job.ours.host_allgather(runtime._job.pe)

    def __init__(self, job: Job, settled: Any) -> None:
        super().__init__(job, settled)
        import nvshmem.bindings

        self._bindings = nvshmem.bindings
        self._pes: list[int] = settled
        runtime: Any = job.ours._runtime
        is_own = runtime.shares_gpu or not nvshmem_may_use_nccl()
        exchanges = self.size > 2 and self.size.bit_count() == 1
        self._most = most_summed_alike(self.size) if is_own and exchanges else sys.maxsize
        self._parts: list[_Part] = []
        self._flags = self._staged = self._reduced = _Part(0, 0, weakref.ref(_Loan()))

    def empty(self, shape: int | tuple[int, ...], dtype: Any) -> Any:
        """Make an array in the symmetric heap, in a part of this size that nobody has any more."""
        extents = shape if isinstance(shape, tuple) else (shape,)
        kind = np.dtype(dtype)
        nbytes = math.prod(extents) * kind.itemsize
        self._job.synchronize()
        free = [
            number
            for number, part in enumerate(self._parts)
            if part.nbytes == nbytes and part.loan() is None
        ]
        # Ranks drop arrays at different times.
        agreed = set(free).intersection(*self.host_allgather(free))
        if not agreed:
            self._parts.append(self._allocate(nbytes))
        part = self._parts[min(agreed) if agreed else -1]
        self._reserve(reduced=nbytes)
        loan = _Loan()
        part.loan = weakref.ref(loan)
        cuda = self.xp.cuda
        memory = cuda.UnownedMemory(part.address, nbytes, loan)
        return self.xp.ndarray(extents, kind, cuda.MemoryPointer(memory, 0))

    def prepare(self, dtype: str, nbytes: int) -> None:
        """Make room for arrays that are not in the heap, too, and a call of that size."""
        self._reserve(staged=nbytes, reduced=nbytes)
        super().prepare(dtype, nbytes)

    def _reserve(self, *, staged: int = 0, reduced: int = 0) -> None:
        """Have buffers of this many bytes at least. Collective."""
        wanted = {"_flags": 2 * _FLAG_NBYTES, "_staged": staged, "_reduced": reduced}
        for name, nbytes in wanted.items():
            if getattr(self, name).nbytes < nbytes:
                setattr(self, name, self._allocate(nbytes))

    def _allocate(self, nbytes: int) -> _Part:
        """Take a part of the heap, which stays until the end: graphs may use it. Collective."""
        made = self._job.ours.symmetric_array((nbytes,), np.uint8)
        runtime: Any = self._job.ours._runtime
        places = {at - base for at, base in zip(made.addresses, runtime._peers, strict=True)}
        if len(places) > 1:
            raise BackendUnavailableError(
                "backend nvshmem needs memory at the same place on all ranks, and other "
                "communicators of some of the ranks have divided the heap unevenly. Open it before "
                "them."
            )
        return _Part(made.addresses[self.rank], nbytes, weakref.ref(_Loan()))

    def _sum(self, x: Any) -> None:
        operand, stream = self._job.operand(x)
        operand, name = _as_type_of(NVSHMEM_TYPES, operand)
        reduce = getattr(self._bindings, f"{name}_sum_reduce_on_stream")
        source, result = self._buffers(operand, stream)
        for start in range(0, operand.count, self._most):
            at, count = start * operand.dtype.itemsize, min(self._most, operand.count - start)
            reduce(TEAM_WORLD, result + at, source + at, count, stream)
        self._move(operand.address, result, operand.nbytes, stream)

    def _copy(self, x: Any, root: int) -> None:
        operand, stream = self._job.operand(x)
        broadcast = self._bindings.uint8_broadcast_on_stream
        source, result = self._buffers(operand, stream)
        # The root's data would come while others still copy what was there before.
        flag = self._flags.address
        self._bindings.int32_sum_reduce_on_stream(TEAM_WORLD, flag + _FLAG_NBYTES, flag, 1, stream)
        broadcast(TEAM_WORLD, result, source, operand.nbytes, self._pes[root], stream)
        if self.rank != root:
            self._move(operand.address, result, operand.nbytes, stream)

    def _buffers(self, operand: Operand, stream: int) -> tuple[int, int]:
        """Addresses in the heap: of the array, or of a copy of it, and of room for a result."""
        nbytes, start = operand.nbytes, operand.address
        in_heap = any(
            part.address <= start and start + nbytes <= part.address + part.nbytes
            for part in self._parts
        )
        if self._reduced.nbytes < nbytes or (not in_heap and self._staged.nbytes < nbytes):
            if self.xp.cuda.runtime.streamIsCapturing(stream):
                raise ArgumentError(
                    f"x has {nbytes} bytes, for which there is no room in the symmetric heap, and "
                    "the stream is being captured; expected a call of prepare with this size "
                    "before."
                )
            self._reserve(staged=0 if in_heap else nbytes, reduced=nbytes)
        if in_heap:
            return start, self._reduced.address
        self._move(self._staged.address, start, nbytes, stream)
        return self._staged.address, self._reduced.address

    def _move(self, to: int, at: int, nbytes: int, stream: int) -> None:
        runtime = self.xp.cuda.runtime
        runtime.memcpyAsync(to, at, nbytes, runtime.memcpyDeviceToDevice, stream)


class _Nccl(Counting):
    """NCCL through CuPy's bindings."""

    name = "nccl"

    @classmethod
    def settle(cls, job: Job) -> Any:
        """NCCL's name of this set of ranks."""
        return job.ours.host_allgather(job.ours.host_together(lambda: _nccl_id(job), "use NCCL"))[0]

    def __init__(self, job: Job, settled: Any) -> None:
        super().__init__(job, settled)
        from cupy.cuda import nccl

        self._nccl = nccl.NcclCommunicator(job.ours.size, settled, job.ours.rank)

    def _sum(self, x: Any) -> None:
        operand, stream = self._job.operand(x)
        operand, kind = _as_type_of(_NCCL_TYPES, operand)
        at = operand.address
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


def _nccl_id(job: Job) -> Any:
    if job.ours.rank:
        return None
    from cupy.cuda import nccl

    return nccl.get_unique_id()


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

_COMPONENTS = {"complex64": "float32", "complex128": "float64"}


def _as_type_of(types: Mapping[str, T], operand: Operand) -> tuple[Operand, T]:
    """Find what a library calls a type; complex numbers are summed as pairs of real ones.

    Raises:
        ArgumentError: It has none.
    """
    name = operand.dtype.name
    if name in _COMPONENTS:
        name = _COMPONENTS[name]
        operand = operand.as_components(DTYPES[name])
    if name not in types:
        raise ArgumentError(f"x is of {name}; expected one of {', '.join(types)}, or complex.")
    return operand, types[name]


class _Self(Counting):
    """No communication: what is left is the rest of the application's time."""

    name = "self"

    def prepare(self, dtype: str, nbytes: int) -> None:
        """Nothing is to be loaded."""

    def _sum(self, x: Any) -> None:
        pass

    def _copy(self, x: Any, root: int) -> None:
        pass


BACKENDS: dict[str, type[Counting]] = {
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
