"""What an all-reduce is measured beside: our kernels, and what a user would run instead.

A contender is opened for one case: it takes or copies the case's inputs, and enqueues one
all-reduce a call. Where it can't run, it says why, and that is its row.
"""

from __future__ import annotations

import socket
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from benchmarks.buffers import Buffers
from benchmarks.contender import GRAPHS, Opened, Turns, as_it_is, ordinary, ran_only
from benchmarks.contenders_nccl import Nccl, NcclWindow
from benchmarks.steering import nvshmem_may_use_nccl
from shmemar.dtypes import ReduceOp
from shmemar.errors import ArgumentError, CollectiveTimeoutError, DeviceError, MismatchError
from shmemar.host.kernel_set import name_of
from shmemar.host.litmus import lines_verdict
from shmemar.host.selector import Band, Candidate, Table
from shmemar.host.stock import NVSHMEM_TYPES
from shmemar.spec import Backend, Kernel

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import shmemar
    from benchmarks.buffers import Case
    from benchmarks.contender import Contender

__all__ = [
    "CONTENDERS",
    "Mpi",
    "Ours",
    "call_once",
    "contender_of",
    "open_together",
]

T = TypeVar("T")


@dataclass(frozen=True)
class Ours:
    """One of our kernels, or what is chosen by size.

    Attributes:
        candidate: The kernel; None for what is chosen.
        pdl: As of `plan_allreduce`.
    """

    candidate: Candidate | None = None
    pdl: Any = "auto"
    modes: tuple[str, ...] = ("device", *GRAPHS, "eager")

    def make(self, comm: shmemar.Communicator, case: Case) -> Buffers | None:
        """In ordinary memory."""
        return ordinary(comm, case)

    @property
    def name(self) -> str:
        """``shmemar``, with ``-pdl`` or ``-no-pdl`` where that is asked for."""
        return "shmemar" + {True: "-pdl", False: "-no-pdl"}.get(self.pdl, "")

    def _table(self) -> Table | None:
        if self.candidate is None:
            return None
        return Table("the benchmark", (Band(None, (self.candidate,)),))

    @contextmanager
    def during_eager(self, comm: shmemar.Communicator) -> Iterator[None]:
        """Choose the kernel, and no other."""
        with comm.keeping_table():
            table = self._table()
            if table is not None:
                comm.use_table(table, why_no_lines=self._why_no_lines(comm))
            yield

    def _why_no_lines(self, comm: shmemar.Communicator) -> str | None:
        if self.candidate is None or self.candidate.kernel is not Kernel.LL128_ATOMIC:
            return None
        if comm.backend is Backend.EMULATED:
            return ""
        verdict = lines_verdict(comm)
        return "" if verdict.passed else verdict.text

    def why_not(self, comm: shmemar.Communicator, case: Case) -> str | None:
        """Ask what would be chosen."""
        if self.candidate is None:
            return None
        with self.during_eager(comm):
            found = comm.explain(nbytes=case.nbytes, dtype=case.dtype.name, op=case.op)
        if found.kernel.removesuffix("/multicast") == self.candidate.name:
            return None
        return dict(found.others)[self.candidate.name]

    def open(self, comm: shmemar.Communicator, case: Case, data: Buffers | None) -> Opened:
        """Plan a call of each buffer."""
        assert data is not None
        with self.during_eager(comm):
            plans = [
                comm.plan_allreduce(
                    data.source(number), data.destination(number), op=case.op, pdl=self.pdl
                )
                for number in range(data.nbuffers)
            ]
            choice = comm._kernels.choose(case.nbytes, case.dtype, case.op)
            most, wanted = choice.candidate.max_blocks, None if self.pdl == "auto" else self.pdl
            prepared = comm._prepare(choice.spec, 0, most, pdl=wanted)

        def call(number: int, stream: Any) -> None:
            plans[number % data.nbuffers](stream=stream)

        symbol = prepared.spec.symbol
        kernel, pdl = name_of(prepared.spec), plans[0].pdl
        if not prepared.spec.kernel.has_code:
            return Opened(call, data, kernel, partial(ran_only, _STOCK_KERNELS))
        return Opened(call, data, kernel, lambda ran: ran == (symbol,), prepared, pdl)


_STOCK_KERNELS = ("rdxn_on_stream", "ncclDevKernel")
"""What is in the names of NVSHMEM's kernels: its own, and NCCL's."""


@dataclass
class Nvshmem:
    """NVSHMEM's own all-reduce on a stream, on arrays in its symmetric heap."""

    name: str = "nvshmem"
    modes: tuple[str, ...] = (*GRAPHS, "eager")
    _turns: Turns = field(default_factory=Turns)

    during_eager = staticmethod(as_it_is)

    def why_not(self, comm: shmemar.Communicator, case: Case) -> str | None:
        """Where there is no NVSHMEM, or it has no such reduction."""
        if comm.backend is Backend.EMULATED:
            return "the emulated backend has no NVSHMEM"
        if case.dtype.name not in NVSHMEM_TYPES or case.op in (ReduceOp.AVG, ReduceOp.PROD):
            return f"it has no {case.op.value} of {case.dtype.name}"
        runtime: Any = comm._runtime
        if comm.size != runtime._job.size:
            return "it reduces over all processes of the job"
        return None

    def make(self, comm: shmemar.Communicator, case: Case) -> Buffers | None:
        """Nothing: the heap is divided by all ranks together."""
        return None

    def open(self, comm: shmemar.Communicator, case: Case, data: Buffers | None) -> Opened:
        """Put the arrays into the heap."""
        import nvshmem.bindings

        from shmemar.host.runtime import TEAM_WORLD

        reduce = getattr(
            nvshmem.bindings,
            f"{NVSHMEM_TYPES[case.dtype.name]}_{case.op.value}_reduce_on_stream",
        )
        data = Buffers(comm, case, partial(self._array, comm))

        def call(number: int, stream: Any) -> None:
            source, destination = data.source(number), data.destination(number)
            reduce(TEAM_WORLD, destination.data.ptr, source.data.ptr, case.count, stream.ptr)

        is_its_own = partial(ran_only, _STOCK_KERNELS)
        return Opened(call, data, self._how(), is_its_own)

    @staticmethod
    def _how() -> str:
        return "own or NCCL" if nvshmem_may_use_nccl() else "own"

    def _array(self, comm: shmemar.Communicator, shape: tuple[int, ...], dtype: str) -> Any:
        """An array of the heap."""
        import cupy

        nbytes = int(np.prod(shape)) * np.dtype(_plain(dtype)).itemsize
        memory = self._turns.next((comm, nbytes), lambda: comm.symmetric_array(nbytes, "uint8"))
        return cupy.asarray(memory).view(dtype).reshape(shape)


def _plain(dtype: str) -> str:
    return "uint16" if dtype == "bfloat16" else dtype


@dataclass
class TorchSymmetric:
    """torch's symmetric memory: its one-shot or its two-shot all-reduce.

    Attributes:
        shots: ``one`` or ``two``.
    """

    shots: str
    modes: tuple[str, ...] = (*GRAPHS, "eager")
    _arrays: dict[Any, Any] = field(default_factory=dict)
    _turns: Turns = field(default_factory=Turns)

    during_eager = staticmethod(as_it_is)

    @property
    def name(self) -> str:
        """``torch-one-shot`` or ``torch-two-shot``."""
        return f"torch-{self.shots}-shot"

    def why_not(self, comm: shmemar.Communicator, case: Case) -> str | None:
        """Where torch is missing, or ranks share a GPU, which it refuses."""
        if comm.backend is Backend.EMULATED:
            return "the emulated backend has no GPUs"
        if comm._runtime.shares_gpu:
            return "torch's symmetric memory refuses ranks that share a GPU"
        if find_spec("torch") is None:
            return "torch is not installed"
        if case.op is not ReduceOp.SUM or case.dtype.name not in ("float32", "bfloat16"):
            return "it sums float32 and bfloat16"
        return None

    def make(self, comm: shmemar.Communicator, case: Case) -> Buffers | None:
        """Nothing: all ranks meet for symmetric memory."""
        return None

    def open(self, comm: shmemar.Communicator, case: Case, data: Buffers | None) -> Opened:
        """Start torch's process group, once, and put the arrays into its symmetric memory."""
        import torch

        group = self._start(comm)
        data = Buffers(comm, case, partial(self._array, comm, group))
        one_shot = torch.ops.symm_mem.one_shot_all_reduce_out
        two_shot = torch.ops.symm_mem.two_shot_all_reduce_
        is_one_shot = self.shots == "one"
        tensors = [
            (self._tensor(data.source(number)), self._tensor(data.destination(number)))
            for number in range(data.nbuffers)
        ]

        def call(number: int, stream: Any) -> None:
            source, destination = tensors[number % data.nbuffers]
            with torch.cuda.stream(torch.cuda.ExternalStream(stream.ptr)):
                if is_one_shot:
                    one_shot(source, "sum", group, destination)
                else:  # which reduces in place
                    destination.copy_(source)
                    two_shot(destination, "sum", group)

        kernel = f"{self.shots}_shot_all_reduce"
        is_its_own = partial(ran_only, (kernel,))
        return Opened(call, data, kernel + " + copy" * (not is_one_shot), is_its_own)

    def _start(self, comm: shmemar.Communicator) -> str:
        import torch
        import torch.distributed as dist

        if not dist.is_initialized():
            with socket.socket() as free:
                free.bind(("127.0.0.1", 0))
                port = free.getsockname()[1]
            port = comm.host_allgather(port)[0]
            torch.cuda.set_device(comm._runtime._device.device_id)  # type: ignore[attr-defined]
            dist.init_process_group(
                "gloo", f"tcp://127.0.0.1:{port}", rank=comm.rank, world_size=comm.size
            )
        return str(dist.group.WORLD.group_name)

    def _array(
        self, comm: shmemar.Communicator, group: str, shape: tuple[int, ...], dtype: str
    ) -> Any:
        import cupy
        import torch
        import torch.distributed._symmetric_memory as symmetric

        def make() -> Any:
            place = f"cuda:{torch.cuda.current_device()}"
            made = symmetric.empty(shape, dtype=getattr(torch, dtype), device=place)
            symmetric.rendezvous(made, group)
            return made

        tensor = self._turns.next((comm, shape, dtype), make)
        plain = tensor.view(torch.uint16) if dtype == "bfloat16" else tensor
        array = cupy.asarray(plain).view(dtype)
        self._arrays[array.data.ptr] = tensor
        return array

    def _tensor(self, array: Any) -> Any:
        """The part of a symmetric tensor that an array is a view of."""
        import torch

        for start, tensor in self._arrays.items():
            offset = (array.data.ptr - start) // tensor.element_size()
            if 0 <= offset < tensor.numel():
                return torch.as_strided(tensor, (array.size,), (1,), offset)
        raise AssertionError("no symmetric tensor")


@dataclass
class Mpi:
    """Copies to the host, MPI's all-reduce, and copies back."""

    name: str = "mpi"
    modes: tuple[str, ...] = ("eager",)

    during_eager = staticmethod(as_it_is)

    def why_not(self, comm: shmemar.Communicator, case: Case) -> str | None:
        """Where MPI has no such type."""
        if case.dtype.name in ("float16", "bfloat16"):
            return f"MPI has no {case.dtype.name}"
        return None

    def make(self, comm: shmemar.Communicator, case: Case) -> Buffers | None:
        """In ordinary memory."""
        return ordinary(comm, case)

    def open(self, comm: shmemar.Communicator, case: Case, data: Buffers | None) -> Opened:
        """Make arrays on the host."""
        assert data is not None
        given = np.empty(case.count, case.dtype.name)
        result = np.empty_like(given)
        on_host = comm.backend is Backend.EMULATED

        def call(number: int, stream: Any) -> None:
            source, destination = data.source(number), data.destination(number)
            if on_host:
                given[...] = source
            else:
                stream.synchronize()
                source.get(out=given)
            comm._bootstrap.allreduce_host(given, result, case.op.value)
            destination[...] = result if on_host else _on_gpu(result)

        return Opened(call, data, "staged through the host")


def _on_gpu(array: Any) -> Any:
    import cupy

    return cupy.asarray(array)


CONTENDERS: dict[str, Callable[[], Contender]] = {
    "nvshmem": Nvshmem,
    "nccl": Nccl,
    "nccl-window": NcclWindow,
    "torch-one-shot": lambda: TorchSymmetric("one"),
    "torch-two-shot": lambda: TorchSymmetric("two"),
    "mpi": Mpi,
}
"""By name, beside `Ours`."""


def contender_of(name: str) -> Contender:
    """Make one of `CONTENDERS`.

    Raises:
        ArgumentError: There is none of that name.
    """
    if name not in CONTENDERS:
        expected = ", ".join(["shmemar", *CONTENDERS])
        raise ArgumentError(f"contenders have {name!r}; expected some of {expected}, or all.")
    return CONTENDERS[name]()


def open_together(
    comm: shmemar.Communicator, contender: Contender, case: Case
) -> tuple[Opened | None, str]:
    """Open a contender on all ranks, or on none, and then say why. Collective."""
    reasons = comm.host_allgather(contender.why_not(comm, case))
    why = next((each for each in reasons if each is not None), None)
    if why is not None:
        return None, why
    data, why = _together(comm, lambda: contender.make(comm, case))
    if why:
        return None, why
    return _together(comm, lambda: contender.open(comm, case, data))


def call_once(comm: shmemar.Communicator, opened: Opened) -> str:
    """Make the first call, which loads what is not loaded; say why it failed. Collective."""
    import cupy

    def attempt() -> None:
        opened.data.fill(0)
        stream = cupy.cuda.Stream(non_blocking=True)
        with stream:
            opened.call(0, stream)
        stream.synchronize()

    return _together(comm, attempt)[1]


def _together(comm: shmemar.Communicator, action: Callable[[], T]) -> tuple[T | None, str]:
    """Run what each rank does by itself, or all do alike; say why it failed on one. Collective.

    A rank that fails in the middle of something collective is waited for until the deadline.
    """
    result, why = None, ""
    try:
        result = action()
    except (CollectiveTimeoutError, DeviceError, MismatchError):
        raise
    except Exception as error:  # noqa: BLE001 - whatever a library raises becomes a row
        text = " ".join(str(error).split())[:200]
        why = f"rank {comm.rank}: {type(error).__name__}: {text}"
    reasons = [each for each in comm.host_allgather(why) if each]
    return (None, reasons[0]) if reasons else (result, "")
