"""Kernels on GPUs, data in NVSHMEM's symmetric heap. The only module that imports nvshmem."""

from __future__ import annotations

import atexit
import ctypes
import logging
import math
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache, cached_property
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

import numpy as np

from shmemar.config import environment, set_default
from shmemar.errors import (
    ArgumentError,
    BackendUnavailableError,
    CollectiveTimeoutError,
    DeviceError,
)
from shmemar.host.arena import Arena
from shmemar.host.bootstrap import leave_without_finalize, leaves_without_finalize
from shmemar.host.contract import Control
from shmemar.host.fast_launch import (
    NOT_AS_USUAL,
    DriverCalls,
    Gate,
    PreparedLaunch,
    compile_launch,
)
from shmemar.host.gpus import bind_gpu, has_multicast, is_under_mps, visible_gpus
from shmemar.host.interop import (
    current_stream_of,
    current_streams,
    device_operand,
    library_of,
    stream_handle,
)
from shmemar.host.launch import (
    CudaKernel,
    StreamOrder,
    capture_of,
    current_context,
    current_context_handle,
    is_capturing,
    is_done,
    load_kernel,
    raise_refusal,
    set_current_context,
)
from shmemar.host.multicast import DISABLE_NVLS, MulticastFacts, why_no_multicast
from shmemar.host.ranks import group_ranks, list_groups
from shmemar.host.stock import NVSHMEM_TYPES, StockArguments, StockReduction
from shmemar.host.symmetric import DeviceSymmetricArray
from shmemar.host.user_kernels import compiled
from shmemar.layout import FAILURE_DTYPE, WORD_NBYTES
from shmemar.spec import Backend, KernelSpec, Pdl

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from contextlib import AbstractContextManager

    from shmemar.device.kernels import AnyArguments, KernelArguments
    from shmemar.host.bootstrap import Bootstrap
    from shmemar.host.contract import BoundLaunch, CompiledKernel, Memory
    from shmemar.host.interop import Operand
    from shmemar.host.symmetric import SymmetricArray
    from shmemar.layout import AnyLayout, Grid
    from shmemar.user_spec import AnyKernelSpec

__all__ = ["NvshmemRuntime", "bound_gpu", "nvshmem_version", "why_no_gpu"]

logger = logging.getLogger(__name__)


def nvshmem_version() -> str:
    """Version of the NVSHMEM library that this process loads, such as ``"3.8.0"``.

    Raises:
        BackendUnavailableError: nvshmem4py or the library is missing.
    """
    try:
        import nvshmem.core

        return str(nvshmem.core.get_version().libnvshmem_version)
    except Exception as error:
        raise BackendUnavailableError(
            f"NVSHMEM could not be loaded ({type(error).__name__}: {error}); install it with "
            "`pip install shmemar[cu13]`, or use backend='emulated'."
        ) from error


def why_no_gpu() -> str | None:
    """Say why the nvshmem backend can't run in this process; None when nothing is against it.

    Looks for what is installed and visible, and starts nothing.
    """
    try:
        visible_gpus()
        _check_nvshmem()
    except BackendUnavailableError as error:
        return str(error)
    return None


def bound_gpu() -> Any | None:
    """The GPU that this process's NVSHMEM runs on, as a cuda.core device; None before it runs."""
    return _Job.current.device if _Job.current else None


_kept: list[Any] = []
"""What abandoned communicators leave: kernels that wait may still use it."""

MIN_NVSHMEM = (3, 4)

MIN_PDL_ARCH = 90
"""The first architecture with programmatic dependent launch."""

TEAM_WORLD = 0
"""NVSHMEM's handle of the team of all processes, ``NVSHMEM_TEAM_WORLD``."""


class _Job:
    """NVSHMEM as this process runs it: started once, for the ranks of the first communicator.

    Attributes:
        identity: Bytes that only ranks of this job share.
        pe: This process's number in the job.
        size: Processes of the job.
        device: This process's GPU.
        ranks_per_gpu: The most processes of the job that share a GPU.
        arena: Symmetric memory that communicators divide.
    """

    current: _Job | None = None

    def __init__(self, bootstrap: Bootstrap, device: Any, ranks_per_gpu: int) -> None:
        import nvshmem.bindings
        import nvshmem.core

        # All processes are on one host, and several may share a GPU under MPS.
        set_default("NVSHMEM_REMOTE_TRANSPORT", "none")
        set_default("NVSHMEM_IGNORE_CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", "1")
        identifier = bootstrap.together(
            lambda: nvshmem.core.get_unique_id(empty=bootstrap.rank != 0), "start NVSHMEM"
        )
        words = identifier._data.view(np.uint8)  # noqa: SLF001 - as nvshmem4py's own example does
        self.identity: bytes = bootstrap.allgather(words.tobytes(), "join NVSHMEM")[0]
        words[:] = np.frombuffer(self.identity, np.uint8).reshape(words.shape)
        _start(
            lambda: nvshmem.core.init(
                device=device,
                uid=identifier,
                rank=bootstrap.rank,
                nranks=bootstrap.size,
                initializer_method="uid",
            )
        )
        self.pe = bootstrap.rank
        self.size = bootstrap.size
        self.device = device
        self.ranks_per_gpu = ranks_per_gpu
        self._bindings = nvshmem.bindings
        self.arena = Arena(0, 0)
        # Before MPI's own end, which runs after Python's exit handlers.
        atexit.register(self._finalize)

    @cached_property
    def stock_order(self) -> StreamOrder:
        """Orders NVSHMEM's own collectives, of which a job may run one at a time."""
        return StreamOrder()

    def take_heap(self, bootstrap: Bootstrap, nbytes: int) -> None:
        """Take the arena from NVSHMEM's heap, unless it was taken. Collective of the job."""
        if not self.arena.nbytes:
            base = bootstrap.together(lambda: self._take(nbytes), "take the symmetric heap")
            self.arena = Arena(base, nbytes)

    def address_at(self, pe: int) -> int:
        """Address in this process of the arena of `pe`; 0 when it can't be reached."""
        return int(self._bindings.ptr(self.arena.base, pe))

    def window_at(self, offset: int, nbytes: int) -> int:
        """Multicast address of a part of the arena, on all processes of the job.

        Raises:
            BackendUnavailableError: NVSHMEM gives none.
        """
        ask = getattr(self._bindings, "mc_ptr", None)
        if ask is None:
            raise BackendUnavailableError(
                "nvshmem.bindings has no mc_ptr, which says a multicast address; upgrade nvshmem4py"
            )
        first = self.arena.base + offset
        try:
            window, last = (int(ask(TEAM_WORLD, at)) for at in (first, first + nbytes - 1))
        except Exception as error:
            raise BackendUnavailableError(
                f"NVSHMEM was asked for a multicast address ({type(error).__name__}: {error})"
            ) from error
        if not window or last - window != nbytes - 1:
            raise BackendUnavailableError(
                f"NVSHMEM gives no multicast address of {nbytes} bytes of its heap"
            )
        return window

    def _take(self, nbytes: int) -> int:
        try:
            base = int(self._bindings.calloc(1, nbytes))
        except Exception as error:
            raise self._no_room(nbytes) from error
        if not base:
            raise self._no_room(nbytes)
        return base

    @staticmethod
    def _no_room(nbytes: int) -> BackendUnavailableError:
        size = environment("NVSHMEM_SYMMETRIC_SIZE") or "its default, 1 GiB"
        return BackendUnavailableError(
            f"NVSHMEM's heap (NVSHMEM_SYMMETRIC_SIZE is {size}) has no room for {nbytes} bytes; "
            "raise that variable, or lower SHMEMAR_HEAP_NBYTES."
        )

    def _finalize(self) -> None:
        import nvshmem.core

        if leaves_without_finalize():
            return
        try:
            self.device.set_current()
            self.device.sync()
        except Exception as error:  # noqa: BLE001 - whatever CUDA says, this GPU is done for
            logger.error("the GPU failed (%s); this process leaves without its peers", error)
            leave_without_finalize()
            return
        if self.arena.nbytes_used:
            logger.warning("%d bytes of symmetric memory were not freed", self.arena.nbytes_used)
        if self.arena.nbytes:
            self._bindings.free(self.arena.base)
        nvshmem.core.finalize()


@dataclass(frozen=True)
class _SymmetricMemory:
    nbytes: int
    addresses: tuple[int, ...]
    free: Callable[[], None]
    window: int = 0

    def abandon(self) -> None:
        """Keep it: peers may store to it."""


@dataclass(frozen=True)
class _DeviceMemory:
    buffer: Any
    window: int = 0

    @property
    def nbytes(self) -> int:
        return int(self.buffer.size)

    @property
    def addresses(self) -> tuple[int, ...]:
        return (int(self.buffer.handle),)

    def free(self) -> None:
        """Return it to the device's pool."""
        self.buffer.close()

    def abandon(self) -> None:
        """Keep it: a kernel that waits may still use it."""


class NvshmemRuntime:
    """Kernels on GPUs, data in NVSHMEM's symmetric heap. Collective.

    Raises:
        BackendUnavailableError: No GPU, NVSHMEM missing or too old, an older GPU, ranks on
            different hosts, or a peer that can't be reached; on every rank.
    """

    backend = Backend.NVSHMEM
    is_synchronous = False

    @property
    def shares_gpu(self) -> bool:
        """True where ranks of the job run on the same GPU."""
        return self._job.ranks_per_gpu > 1

    def __init__(
        self,
        bootstrap: Bootstrap,
        compile_timeout_s: float,
        heap_nbytes: int,
        device: int | None,
    ) -> None:
        """Bind a GPU, start NVSHMEM if it is not running, and look up the peers.

        Args:
            bootstrap: The ranks.
            compile_timeout_s: Deadline for the peers to compile a kernel; 0 for none.
            heap_nbytes: Symmetric memory of the process, when NVSHMEM is started here.
            device: Ordinal of the GPU; by default the local rank, modulo the number of GPUs.
        """
        self._bootstrap = bootstrap
        self._compile_timeout_s = compile_timeout_s
        self._kernels: dict[tuple[AnyKernelSpec, AnyLayout, Pdl], CudaKernel] = {}
        self._has_multicast = False
        local_rank = bootstrap.local_rank()
        self._device = bootstrap.together(
            lambda: bind_gpu(device, local_rank, _Job.current and _Job.current.device), "bind a GPU"
        )
        self._context = current_context_handle()
        bootstrap.together(_check_nvshmem, "load NVSHMEM")
        self._compare_versions()
        self._job = self._join_job(heap_nbytes)
        hosts, pes = bootstrap.hosts(), bootstrap.allgather(self._job.pe, "exchange PEs")
        self._peers = bootstrap.together(lambda: self._reach_peers(hosts, pes), "reach the peers")
        self._setup_stream = self._device.create_stream()
        self._order = StreamOrder()
        self._gate: Gate | None = None
        older = bootstrap.allgather(int(self._device.arch), "compare GPUs")
        self._oldest = min(older)
        # The caller's next array is to be made on this rank's GPU.
        set_current_context(self._context)

    def allocate_symmetric(self, nbytes: int, word: int, zeroed_nbytes: int = 0) -> Memory:
        """Carve from the arena. Collective of the communicator's ranks alone."""
        arena = self._job.arena
        offset = self._bootstrap.together(
            lambda: arena.allocate(nbytes), "divide the symmetric heap"
        )
        from cuda.core import Buffer

        part = Buffer.from_handle(arena.base + offset, nbytes)
        part.fill(word.to_bytes(WORD_NBYTES, "little") if word else 0, stream=self._setup_stream)
        if word and zeroed_nbytes:
            end = Buffer.from_handle(arena.base + offset + nbytes - zeroed_nbytes, zeroed_nbytes)
            end.fill(0, stream=self._setup_stream)
        self._setup_stream.sync()
        # All parts are filled when this returns, before any peer can store to them.
        offsets = self._bootstrap.allgather(offset, "exchange addresses")
        addresses = tuple(base + theirs for base, theirs in zip(self._peers, offsets, strict=True))
        window = self._window(offsets, nbytes) if self._has_multicast else 0
        return _SymmetricMemory(nbytes, addresses, lambda: arena.free(offset), window)

    def _window(self, offsets: Sequence[int], nbytes: int) -> int:
        """Multicast address of what was allocated; 0 on all ranks if one has none. Collective."""
        window = 0
        if len(set(offsets)) == 1:  # of communicators of some ranks, parts may lie anywhere
            with suppress(BackendUnavailableError):
                window = self._job.window_at(offsets[0], nbytes)
        everyone = self._bootstrap.allgather(window, "exchange multicast addresses")
        return window if all(everyone) else 0

    def allocate_private(self, nbytes: int) -> Memory:
        """Allocate device memory.

        Raises:
            BackendUnavailableError: CUDA has none.
        """
        try:
            buffer = self._device.allocate(nbytes, stream=self._setup_stream)
            buffer.fill(0, stream=self._setup_stream)
            self._setup_stream.sync()
        except Exception as error:
            raise BackendUnavailableError(
                f"{nbytes} bytes could not be allocated on GPU {self._device.device_id} of rank "
                f"{self._bootstrap.rank} ({type(error).__name__}: {error}). Free memory there."
            ) from error
        return _DeviceMemory(buffer)

    def allocate_control(self) -> Control:
        """Allocate the broken word on the device, and the record where the host reads it."""
        from cuda.core import LegacyPinnedMemoryResource

        broken = self.allocate_private(WORD_NBYTES)
        record = LegacyPinnedMemoryResource().allocate(FAILURE_DTYPE.itemsize)
        host = (ctypes.c_uint8 * FAILURE_DTYPE.itemsize).from_address(int(record.handle))
        ctypes.memset(host, 0, FAILURE_DTYPE.itemsize)

        words = np.ctypeslib.as_array(host).view(np.uint32)
        order = self._order
        self._gate = Gate(self._context, order.event, order.producers, words, order.last_stream)
        _fast_launch()  # which takes a while, and not at a first call

        def free() -> None:
            broken.free()
            record.close()

        return Control(broken.addresses[0], int(record.handle), lambda: bytes(host), free)

    def refuse_capture(self, name: str, stream: int) -> None:
        """Refuse what a capture forbids.

        Raises:
            ArgumentError: `stream` is being captured.
        """
        for each in (stream, *current_streams()):
            if _may_be_captured(each):
                raise ArgumentError(
                    f"{name} is called for the first time while stream {each:#x} is being captured "
                    "into a CUDA graph; expected a call before the capture, which loads the kernel "
                    "and allocates its scratch. Make the same call once outside of it, or call "
                    "prepare() before."
                )

    def why_no_pdl(self) -> str | None:
        """Say that a GPU is too old."""
        if self._oldest >= MIN_PDL_ARCH:
            return None
        return f"the oldest GPU of the ranks is sm_{self._oldest}; expected sm_{MIN_PDL_ARCH}"

    def compile(
        self, spec: AnyKernelSpec, layout: AnyLayout, stream: int, *, pdl: Pdl = Pdl.NEVER
    ) -> CompiledKernel:
        """Compile to a cubin and load it. Collective.

        Raises:
            ArgumentError: `stream` is being captured, which forbids loading.
        """
        key = spec, layout, pdl
        if isinstance(spec, KernelSpec) and not spec.kernel.has_code:
            return self._stock(spec, stream)
        if key not in self._kernels:
            self.refuse_capture(spec.name, stream)
            kernel = self._bootstrap.together(
                lambda: compiled(lambda: self._load(spec, layout, pdl), spec),
                f"compile {spec.name}",
                self._compile_timeout_s,
            )
            # A rank's next launch may be resident beside this one, and would keep out a peer's.
            launches = 2 if pdl is not Pdl.NEVER and self.shares_gpu else 1
            resident = kernel.resident_blocks // (self._job.ranks_per_gpu * launches)
            everyones = self._bootstrap.allgather(resident, "agree on the grid")
            kernel.max_blocks = max(min(everyones), 1)
            self._kernels[key] = kernel
        return self._kernels[key]

    def _load(self, spec: AnyKernelSpec, layout: AnyLayout, pdl: Pdl) -> CudaKernel:
        rank, device = self._bootstrap.rank, self._device
        kernel = load_kernel(spec, layout, rank=rank, device=device, pdl=pdl)
        if self.shares_gpu:
            kernel.leave_shared_memory()
        return kernel

    def _stock(self, spec: KernelSpec, stream: int) -> StockReduction:
        """Find NVSHMEM's reduction. Collective.

        Raises:
            ArgumentError: `stream` is being captured.
            BackendUnavailableError: It has none.
        """
        self.refuse_capture(spec.name, stream)
        name = f"{NVSHMEM_TYPES[spec.dtype.name]}_{spec.op.value}_reduce_on_stream"
        found = self._bootstrap.together(lambda: _binding(name), f"find NVSHMEM's {name}")

        def reduce(destination: int, source: int, count: int, stream: int) -> None:
            found(TEAM_WORLD, destination, source, count, stream)

        return StockReduction(reduce, spec.dtype.itemsize)

    def try_stock(self, kernel: Any, staging: Memory, part_nbytes: int) -> None:
        """Reduce an element, and as much as fits, for NVSHMEM loads what it needs. Collective.

        Raises:
            BackendUnavailableError: The memory is not symmetric to NVSHMEM.
            DeviceError: It refused; peers may be in it then.
            CollectiveTimeoutError: It did not end within the deadline.
        """
        places = {at - base for at, base in zip(staging.addresses, self._peers, strict=True)}
        if len(places) > 1:
            raise BackendUnavailableError(
                "the stock collective needs memory at the same place on all ranks, and other "
                "communicators of some of the ranks have divided the heap unevenly. Make the first "
                "call of it before them, or have another kernel (SHMEMAR_KERNEL, SHMEMAR_TABLE)."
            )
        own, handle = staging.addresses[self._bootstrap.rank], int(self._setup_stream.handle)
        doing, order = "make a first stock collective", self._job.stock_order

        def enqueue() -> None:
            # Another communicator's may still run.
            order.before_launch(handle, None)
            for count in (1, part_nbytes // kernel.itemsize):
                kernel.reduce(own + part_nbytes, own, count, handle)
            order.after_launch(handle, None)

        self._bootstrap.together(enqueue, doing, self._compile_timeout_s)
        deadline = time.monotonic() + (self._compile_timeout_s or math.inf)
        while not is_done(handle):
            if time.monotonic() > deadline:
                rank = self._bootstrap.rank
                raise CollectiveTimeoutError(
                    f"rank {rank} waited more than {self._compile_timeout_s:g} s for NVSHMEM's "
                    "first all-reduce to end. A peer failed, or is in another call.",
                    rank=rank,
                    missing=(),
                )
            time.sleep(0.001)
        self._bootstrap.allgather(None, doing, self._compile_timeout_s)

    def why_no_stock(self) -> str | None:
        """Say that NVSHMEM would reduce over others, too."""
        if self._bootstrap.size == self._job.size:
            return None
        return (
            f"NVSHMEM's reduces over all {self._job.size} processes of the job, and the "
            f"communicator has {self._bootstrap.size}"
        )

    def launch(
        self, kernel: Any, grid: Grid, arguments: AnyArguments | StockArguments, stream: int
    ) -> None:
        """Enqueue a kernel, behind the one before it."""
        capture = None
        try:
            order, pdl = self._order, kernel.pdl
            capture = capture_of(stream)
            order.before_launch(stream, capture)
            is_stock = isinstance(arguments, StockArguments)
            if is_stock:
                self._job.stock_order.before_launch(stream, capture)
            is_programmatic = pdl is Pdl.ALWAYS
            if capture is not None and pdl is Pdl.BEHIND:
                is_programmatic = order.is_behind_trigger(capture_of(stream))
            kernel.launch(grid, arguments.flat(), stream, is_programmatic=is_programmatic)
            order.after_launch(stream, capture, triggers=pdl is not Pdl.NEVER)
            if is_stock:
                self._job.stock_order.after_launch(stream, capture)
        except DeviceError as error:
            if capture is None:
                raise
            # Nothing runs yet, so the communicator is as it was.
            raise ArgumentError(
                f"stream {stream:#x} is being captured and could not take the call: {error} "
                "Capture again."
            ) from error

    def bind(
        self, kernel: Any, grid: Grid, arguments: KernelArguments | StockArguments
    ) -> BoundLaunch | None:
        """Prepare a launch for :mod:`shmemar.host.fast_launch`."""
        gate = self._gate
        if gate is None or isinstance(arguments, StockArguments):
            return None
        values = arguments.flat()
        prepared = PreparedLaunch(
            kernel.function,
            len(values),
            is_programmatic=kernel.pdl is Pdl.ALWAYS,
            gate=gate.address,
            source_at=len(arguments.peers),
        )
        prepared.values[:] = values
        prepared.set_grid(grid.blocks, grid.block_threads)
        launch, place, kept = _fast_launch(), prepared.address, (prepared, gate, kernel)

        def bound(
            stream: int, producer: int, source: int, destination: int, /, _: Any = kept
        ) -> bool:
            status = launch(place, stream, producer, source, destination)
            if status == 0:
                return True
            if status != NOT_AS_USUAL:
                raise_refusal(status)
            return False

        return bound

    def shut(self) -> None:
        """Shut the gate of what was bound."""
        if self._gate is not None:
            self._gate.shut()

    def current_stream_of(self, x: Any) -> Callable[[], int]:
        """Ask the library that `x` is of."""
        return current_stream_of(x)

    def stream(self, stream: Any, x: Any) -> int:
        """Return the handle of a caller's stream, or of the current one of `x`'s library."""
        return stream_handle(stream, x)

    def operand(self, name: str, array: Any, stream: int, *, writeable: bool) -> Operand:
        """Check an array on this rank's GPU."""
        return device_operand(
            name, array, stream, device=self._device.device_id, writeable=writeable
        )

    def empty_like(self, x: Any, stream: int) -> Any:
        """Allocate with CuPy or torch, whichever `x` is of, from its memory for `stream`."""
        library = library_of(x)
        try:
            if library == "cupy":
                import cupy

                with cupy.cuda.ExternalStream(stream):
                    return cupy.empty_like(x)
            if library == "torch":
                import torch

                with torch.cuda.stream(torch.cuda.ExternalStream(stream, x.device)):
                    return torch.empty_like(x)
        except Exception as error:
            raise DeviceError(
                f"no array like x could be allocated ({type(error).__name__}: {error}). Free "
                "memory, or give out=."
            ) from error
        raise ArgumentError(self.why_no_new_array(x))

    def why_no_new_array(self, x: Any) -> str | None:
        """Say whose arrays can't be made."""
        if library_of(x) is not None:
            return None
        return (
            f"out is None, and x is {type(x).__module__}.{type(x).__name__}; expected out= for an "
            "array that is neither CuPy's nor torch's."
        )

    def symmetric_array(
        self, memory: Memory, shape: tuple[int, ...], dtype: np.dtype[Any]
    ) -> SymmetricArray:
        """Make one on this rank's GPU."""
        ordinal = int(self._device.device_id)
        return DeviceSymmetricArray(memory, shape, dtype, self._bootstrap.rank, ordinal)

    def why_no_multicast(self) -> str | None:
        """Ask the driver and NVSHMEM, unless the environment is against it. Collective."""
        facts = MulticastFacts(
            self.backend,
            str(self._device.uuid),
            has_multicast(self._device),
            environment(DISABLE_NVLS),
            self._job.size,
        )
        everyone = self._bootstrap.allgather(facts, "look for multicast")
        why = why_no_multicast(everyone)
        if why is None:
            trouble = ""
            try:
                self._job.window_at(0, self._job.arena.nbytes)
            except BackendUnavailableError as error:
                trouble = str(error)
            facts = replace(facts, trouble=trouble)
            why = why_no_multicast(self._bootstrap.allgather(facts, "ask for multicast"))
        self._has_multicast = why is None
        return why

    def describe(self) -> dict[str, str]:
        """Name the GPU, how many ranks share one, and the versions of what is below."""
        from cuda.bindings import driver

        _, cuda = driver.cuDriverGetVersion()
        return {
            "GPU": f"{self._device.name}, sm_{self._device.arch}",
            "ranks on a GPU": str(self._job.ranks_per_gpu),
            "MPS": "running" if is_under_mps(self._device) else "not running",
            "CUDA driver": f"{cuda // 1000}.{cuda % 1000 // 10}",
            "NVSHMEM": nvshmem_version(),
            **{name: version(name) for name in ("numba-cuda", "cuda-core", "numpy")},
        }

    def synchronize(self) -> None:
        """Wait until everything on this rank's GPU has ended."""
        try:
            self._device.sync()
        except Exception as error:
            raise DeviceError(f"the GPU of rank {self._bootstrap.rank} failed: {error}") from error

    def active(self) -> AbstractContextManager[None]:
        """Make this rank's GPU current, as the caller may have chosen another, or a new thread."""
        return current_context(self._context)

    def abandon(self, *memory: Memory | Control) -> None:
        """Keep kernels, stream, event and `memory` for the life of the process."""
        _kept.append((self, memory))

    def close(self) -> None:
        """Forget the kernels and return what orders them."""
        self._kernels.clear()
        self._order.close()
        self._setup_stream.close()

    def _compare_versions(self) -> None:
        own = {name: version(name) for name in ("numba-cuda", "cuda-core")}
        own["NVSHMEM"] = nvshmem_version()
        everyone = self._bootstrap.allgather(own, "compare versions")
        for name in own:
            by_version = group_ranks(entry.get(name) for entry in everyone)
            if len(by_version) > 1:
                raise BackendUnavailableError(
                    f"the version of {name} differs between ranks: {list_groups(by_version)}. "
                    "Give every rank the same installation."
                )

    def _count_ranks_per_gpu(self) -> int:
        where = (self._bootstrap.host(), self._device.uuid)
        crowd = max(Counter(self._bootstrap.allgather(where, "count ranks on GPUs")).values())
        if crowd > 1 and self._bootstrap.rank == 0 and not is_under_mps(self._device):
            logger.warning(
                "%d ranks share a GPU and CUDA MPS is not running: every wait takes a time slice "
                "of about 2 ms. Start it with `nvidia-cuda-mps-control -d`.",
                crowd,
            )
        return crowd

    def _join_job(self, heap_nbytes: int) -> _Job:
        running = _Job.current
        identities = self._bootstrap.allgather(running and running.identity, "find NVSHMEM")
        strangers = [r for r, other in enumerate(identities) if other != identities[0]]
        if strangers:
            raise BackendUnavailableError(
                "NVSHMEM runs already, for other ranks than those of comm (rank "
                f"{strangers[0]} is not with rank 0). Make the communicator of all ranks first."
            )
        if running is None:
            crowd = self._count_ranks_per_gpu()
            running = _Job(self._bootstrap, self._device, crowd)
            _Job.current = running
        running.take_heap(self._bootstrap, heap_nbytes)
        return running

    def _reach_peers(self, hosts: Sequence[str], pes: Sequence[int]) -> tuple[int, ...]:
        addresses = tuple(self._job.address_at(pe) for pe in pes)
        unreached = [rank for rank, address in enumerate(addresses) if not address]
        if unreached:
            rank = unreached[0]
            raise BackendUnavailableError(
                f"rank {self._bootstrap.rank} on {hosts[self._bootstrap.rank]} can't store to the "
                f"memory of rank {rank} on {hosts[rank]}: the GPUs have no peer access. shmemar's "
                "kernels need it; start all ranks on one host whose GPUs are linked."
            )
        return addresses


def _may_be_captured(stream: int) -> bool:
    """True also of what can't be asked, as the legacy default stream can't beside a capture."""
    try:
        return is_capturing(stream)
    except DeviceError:
        return True


@cache
def _fast_launch() -> Callable[..., int]:
    return compile_launch(DriverCalls.load())


def _binding(name: str) -> Callable[..., None]:
    """Find a function of NVSHMEM's.

    Raises:
        BackendUnavailableError: This version has none.
    """
    import nvshmem.bindings

    try:
        found: Callable[..., None] = getattr(nvshmem.bindings, name)
    except AttributeError as error:
        raise BackendUnavailableError(
            f"nvshmem.bindings has no {name}; expected it of nvshmem4py 0.4. Have another kernel "
            "(SHMEMAR_KERNEL)."
        ) from error
    return found


def _start(init: Callable[[], None]) -> None:
    """Run NVSHMEM's own start, whose errors are numbers.

    Raises:
        BackendUnavailableError: It failed.
    """
    try:
        init()
    except Exception as error:
        raise BackendUnavailableError(
            f"NVSHMEM did not start ({type(error).__name__}: {error}); what it printed says more. "
            "Are there as many ranks on each GPU? NVSHMEM 3.8.0 refused 3 on 2 GPUs."
        ) from error


def _check_nvshmem() -> None:
    version = nvshmem_version()
    if tuple(int(part) for part in version.split(".")[:2]) < MIN_NVSHMEM:
        wanted = ".".join(map(str, MIN_NVSHMEM))
        raise BackendUnavailableError(
            f"NVSHMEM is {version}; expected {wanted} or newer. Upgrade nvidia-nvshmem-cu13."
        )
