"""NCCL as a contender: as it is, and with arrays in a window that it is told of."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks.buffers import Buffers
from benchmarks.contender import GRAPHS, Opened, Turns, as_it_is, ordinary, ran_only
from shmemar.dtypes import ReduceOp
from shmemar.errors import ShmemarError
from shmemar.spec import Backend

if TYPE_CHECKING:
    import shmemar
    from benchmarks.buffers import Case

__all__ = ["Nccl", "NcclLibrary", "NcclWindow"]


@dataclass
class Nccl:
    """NCCL through CuPy's bindings, out of place."""

    name: str = "nccl"
    modes: tuple[str, ...] = (*GRAPHS, "eager")
    _communicators: dict[Any, Any] = field(default_factory=dict)

    during_eager = staticmethod(as_it_is)

    def why_not(self, comm: shmemar.Communicator, case: Case) -> str | None:
        """Where ranks share a GPU, which it refuses, or it is not there."""
        if comm.backend is Backend.EMULATED:
            return "the emulated backend has no GPUs"
        if comm._runtime.shares_gpu:
            return "NCCL refuses ranks that share a GPU"
        try:
            from cupy.cuda import nccl
        except ImportError as error:
            return f"CuPy has no NCCL ({error})"
        if not nccl.available:
            return "CuPy was built without NCCL, or finds none"
        if self._type(nccl, case) is None or case.op is ReduceOp.AVG:
            return f"CuPy's NCCL has no {case.op.value} of {case.dtype.name}"
        return None

    @staticmethod
    def _type(nccl: Any, case: Case) -> Any:
        return getattr(nccl, f"NCCL_{case.dtype.name.upper()}", None)

    def make(self, comm: shmemar.Communicator, case: Case) -> Buffers | None:
        """In ordinary memory."""
        return ordinary(comm, case)

    def open(self, comm: shmemar.Communicator, case: Case, data: Buffers | None) -> Opened:
        """Make its communicator, once."""
        assert data is not None
        from cupy.cuda import nccl

        if comm not in self._communicators:
            identity = comm.host_allgather(nccl.get_unique_id() if comm.rank == 0 else None)[0]
            made = nccl.NcclCommunicator(comm.size, identity, comm.rank)
            self._communicators[comm] = made
        made = self._communicators[comm]
        kind, op = self._type(nccl, case), getattr(nccl, f"NCCL_{case.op.value.upper()}")

        def call(number: int, stream: Any) -> None:
            source, destination = data.source(number), data.destination(number)
            made.allReduce(source.data.ptr, destination.data.ptr, case.count, kind, op, stream.ptr)

        version = nccl.get_version()
        is_its_own = partial(ran_only, ("ncclDevKernel_AllReduce",))
        return Opened(call, data, f"NCCL {version}", is_its_own)


_SYMMETRIC = 1
"""``NCCL_WIN_COLL_SYMMETRIC`` of nccl.h."""


class _UniqueId(ctypes.Structure):
    _fields_ = (("internal", ctypes.c_byte * 128),)


_FUNCTIONS = ("ncclCommInitRank", "ncclMemAlloc", "ncclCommWindowRegister", "ncclAllReduce")


def _library() -> ctypes.CDLL:
    """The library that CuPy has loaded.

    Raises:
        OSError: There is none of that name.
        AttributeError: It lacks a function.
    """
    found = ctypes.CDLL("libnccl.so.2")
    for name in _FUNCTIONS:
        getattr(found, name)
    found.ncclGetErrorString.restype = ctypes.c_char_p
    return found


class NcclLibrary:
    """The functions of NCCL's C interface that CuPy lacks, and a communicator for them."""

    def __init__(self, size: int, rank: int, identity: tuple[int, ...]) -> None:
        """Meet the other ranks. Collective."""
        self._nccl = _library()
        self._comm = ctypes.c_void_p()
        at = ctypes.byref(self._comm)
        self._call("ncclCommInitRank", at, size, _UniqueId((ctypes.c_byte * 128)(*identity)), rank)

    def _call(self, function: str, *arguments: Any) -> None:
        status = getattr(self._nccl, function)(*arguments)
        if status:
            text = self._nccl.ncclGetErrorString(status).decode()
            raise ShmemarError(f"{function} failed: {text}")

    def allocate(self, nbytes: int) -> int:
        """Address of memory that may be in a window. Not collective."""
        address = ctypes.c_void_p()
        self._call("ncclMemAlloc", ctypes.byref(address), ctypes.c_size_t(nbytes))
        return int(address.value or 0)

    def register(self, address: int, nbytes: int) -> bool:
        """Put memory into a window; False where NCCL makes none of it. Collective."""
        window = ctypes.c_void_p()
        there = ctypes.c_void_p(address), ctypes.c_size_t(nbytes), ctypes.byref(window)
        self._call("ncclCommWindowRegister", self._comm, *there, _SYMMETRIC)
        return bool(window.value)

    def allreduce(
        self, source: int, destination: int, count: int, kind: int, op: int, stream: int
    ) -> None:
        """Enqueue an all-reduce."""
        pointers = ctypes.c_void_p(source), ctypes.c_void_p(destination), ctypes.c_size_t(count)
        self._call("ncclAllReduce", *pointers, kind, op, self._comm, ctypes.c_void_p(stream))


@dataclass
class NcclWindow(Nccl):
    """NCCL with its arrays in symmetric windows, for which it has kernels of their own."""

    name: str = "nccl-window"
    _turns: Turns = field(default_factory=Turns)

    def why_not(self, comm: shmemar.Communicator, case: Case) -> str | None:
        """As `Nccl`, and where its version has no windows, or no kernel for them."""
        why = super().why_not(comm, case)
        if why is not None:
            return why
        if case.op is not ReduceOp.SUM or case.dtype.name not in _WINDOW_TYPES:
            return f"NCCL's windows have no {case.op.value} of {case.dtype.name}"
        from cupy.cuda import nccl

        version = nccl.get_version()
        if version < _WINDOWS_SINCE:
            return f"NCCL {version} has no windows"
        try:
            _library()
        except (OSError, AttributeError) as error:
            return f"NCCL's library can't be used ({error})"
        return None

    def make(self, comm: shmemar.Communicator, case: Case) -> Buffers | None:
        """Nothing: all ranks meet for a window."""
        return None

    def open(self, comm: shmemar.Communicator, case: Case, data: Buffers | None) -> Opened:
        """Make its communicator, once, and put the arrays into windows."""
        from cupy.cuda import nccl

        if comm not in self._communicators:
            own = nccl.get_unique_id() if comm.rank == 0 else ()
            identity: tuple[int, ...] = comm.host_allgather(own)[0]
            self._communicators[comm] = NcclLibrary(comm.size, comm.rank, identity)
        library = self._communicators[comm]
        data = Buffers(comm, case, partial(self._array, comm, library))
        kind, op = self._type(nccl, case), getattr(nccl, f"NCCL_{case.op.value.upper()}")

        def call(number: int, stream: Any) -> None:
            source, destination = data.source(number), data.destination(number)
            addresses = source.data.ptr, destination.data.ptr
            library.allreduce(*addresses, case.count, kind, op, stream.ptr)

        is_its_own = partial(ran_only, _WINDOW_KERNELS)
        return Opened(call, data, f"NCCL {nccl.get_version()} window", is_its_own)

    def _array(
        self, comm: shmemar.Communicator, library: NcclLibrary, shape: tuple[int, ...], dtype: str
    ) -> Any:
        import cupy

        nbytes = int(np.prod(shape)) * np.dtype(dtype).itemsize
        address = self._turns.next((comm, nbytes), lambda: self._window(comm, library, nbytes))
        memory = cupy.cuda.UnownedMemory(address, nbytes, library)
        return cupy.ndarray(shape, dtype, cupy.cuda.MemoryPointer(memory, 0))

    @staticmethod
    def _window(comm: shmemar.Communicator, library: NcclLibrary, nbytes: int) -> int:
        address = comm.host_together(lambda: library.allocate(nbytes), "allocate for NCCL")
        made = comm.host_together(
            lambda: library.register(address, nbytes), "register a window of NCCL's"
        )
        if not all(comm.host_allgather(made)):
            raise ShmemarError("NCCL made no window; expected memory that the GPUs can share.")
        return address


_WINDOWS_SINCE = 22700

_WINDOW_TYPES = ("float32", "float16", "bfloat16")
"""For others NCCL takes the kernels that it has without windows."""

_WINDOW_KERNELS = ("ncclSymkDevKernel_AllReduce", "ncclSymDevKernel_AllReduce")
"""What is in the names of NCCL's kernels for windows, of 2.28 and of 2.27."""
