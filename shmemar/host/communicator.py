"""The communicator: what users hold, and where every call is checked before any rank launches."""

from __future__ import annotations

import logging
import math
import warnings
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING, Any, Self, TypeVar

import numpy as np

from shmemar import __version__
from shmemar.config import COMPILE_TIMEOUT_S, Config
from shmemar.device.kernels import KernelArguments, UserArguments
from shmemar.dtypes import DTYPES, ReduceOp, as_reduce_op
from shmemar.errors import (
    ArgumentError,
    ClosedError,
    CollectiveTimeoutError,
    DeviceError,
    MismatchError,
    ShmemarError,
)
from shmemar.host.bootstrap import as_entry, leave_without_finalize, raise_any
from shmemar.host.failure import failure_from
from shmemar.host.heap import SymmetricHeap
from shmemar.host.interop import Operand, check_pair, host_operand, no_stream
from shmemar.host.ranks import as_rank, group_ranks, list_groups
from shmemar.host.scratch import Scratch, layout_for, make_scratch
from shmemar.host.symmetric import SymmetricArray, check_shape
from shmemar.host.user_kernels import (
    LLScratch,
    Taken,
    as_scalar,
    check_kernel,
    first_array,
    grid_of,
    leaves_of,
    type_of,
    view_of,
)
from shmemar.layout import (
    BLOCK_THREADS,
    MAX_LAUNCH_PACKETS,
    WORD_NBYTES,
    BarrierLayout,
    Grid,
    barrier_grid,
    grid_for,
)
from shmemar.spec import Backend, Determinism, Kernel, KernelSpec, Protocol, why_impossible
from shmemar.user_spec import BufferSpec, UserKernelSpec

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import TracebackType

    from shmemar.device.kernels import AnyArguments
    from shmemar.dtypes import DType
    from shmemar.host.bootstrap import Bootstrap
    from shmemar.host.contract import CompiledKernel, Runtime
    from shmemar.user_spec import AnyKernelSpec

__all__ = ["Communicator"]

logger = logging.getLogger(__name__)

T = TypeVar("T")


class Communicator:
    """Collectives of a fixed set of ranks. Made by :func:`shmemar.init`.

    Calls of communicators that share a GPU must not run at the same time, unless their blocks fit
    it together (``SHMEMAR_MAX_BLOCKS``): one rank's first call would wait for another's second.

    Ranks must make the same calls in the same order, with the same count, dtype and op. When they
    do not, and ``SHMEMAR_CHECK`` is not set, the outcome is undefined: wrong results, or a timeout.

    Close it, or use it in a ``with`` statement. When the body of the statement raises, the
    communicator is abandoned without a word to the other ranks, because they may be waiting
    elsewhere; their next collective ends at its deadline.

    Attributes:
        rank: The own rank.
        size: Number of ranks.
        backend: Where kernels run.
        determinism: What it was made with. Of the kernels of this version ``ll128_atomic`` needs
            ``not_guaranteed``; the others fulfil all of them.
        lines: What is known of lines of 128 bytes here (:mod:`shmemar.host.litmus`); empty where
            nothing asked for it.
        multicast: Whether kernels use NVLink multicast, and why not; empty where
            ``SHMEMAR_MULTICAST`` does not ask for it.
    """

    def __init__(
        self,
        bootstrap: Bootstrap,
        config: Config,
        determinism: Determinism,
        make_runtime: Callable[[float], Runtime],
    ) -> None:
        """Use :func:`shmemar.init`."""
        self.rank = bootstrap.rank
        self.size = bootstrap.size
        self.determinism = determinism
        self.lines = ""
        self.multicast = ""
        self._bootstrap = bootstrap
        self._config = config
        self._runtime = make_runtime(
            max(config.timeout_s, COMPILE_TIMEOUT_S) if config.timeout_s else 0.0
        )
        self.backend = self._runtime.backend
        self._heap = SymmetricHeap(self._runtime, bootstrap)
        self._timeout_ns = math.ceil(config.timeout_s * 1e9)  # 0 is for ever, so never round to it
        self._failure: CollectiveTimeoutError | DeviceError | None = None
        self._is_closed = True  # until it is whole
        self._ncalls = 0
        self._user_scratches: list[LLScratch] = []
        self._symmetric: list[SymmetricArray] = []
        try:
            self._scratches: dict[tuple[Kernel, Protocol, bool], Scratch] = {}
            self._may_multicast = config.multicast and self._look_for_multicast()
            # What the first call is most likely to use, so that a lack of room is said here.
            self._scratch_for(self._spec(DTYPES["float32"], ReduceOp.SUM))
            self._control = bootstrap.together(
                self._runtime.allocate_control, "allocate the failure record"
            )
        except Exception:
            self._heap.abandon()
            self._runtime.close()
            raise
        self._is_closed = False
        self._say_once()

    def allreduce(
        self,
        x: Any,
        *,
        out: Any = None,
        op: str | ReduceOp = "sum",
        stream: Any = None,
    ) -> Any:
        """Reduce an array over all ranks, element by element; every rank gets the same bits.

        Collective: every rank calls it with the same count, dtype and `op`, in the same order as
        its other calls. Each rank may place `x` and `out` as it likes, in place or not.

        Elements are combined in rank order, so a result does not depend on timing, nor on the size
        of the message. 16-bit types are accumulated in float32 and rounded once. Integers wrap;
        ``min`` and ``max`` propagate NaN and order -0 below +0; ``avg`` is the sum times the
        reciprocal of the number of ranks. ``ll128_atomic``, where it is pinned, adds as elements
        arrive, and rounds to their type at each addition: ranks agree, and runs need not.

        On GPUs the work is enqueued on `stream`, and the call returns before it is done; what goes
        wrong there is raised by the next call or by `check`. numpy arrays are reduced by MPI's own
        all-reduce then, with MPI's order of summation and its min and max: host data never take a
        GPU path.

        Args:
            x: C-contiguous array of any shape, of float16, bfloat16, float32, float64, int8, int32,
                int64, uint8, uint32, uint64, complex64 or complex128; not written to, unless it is
                `out`. With the nvshmem backend an array of CuPy, torch, numba, or any library with
                the CUDA array interface or DLPack; with the emulated one a numpy array.
            out: Array of the same dtype and count: `x` itself, or one that does not overlap it. A
                new one of `x`'s shape by default.
            op: ``"sum"``, ``"prod"``, ``"min"``, ``"max"`` or ``"avg"``; no ``min`` and ``max`` for
                complex types, and no ``avg`` for integers.
            stream: A stream of CuPy, torch, numba or cuda.core, or its handle; by default the
                current one of the library that `x` is of. Calls on different streams run one after
                the other. It may be captured into a CUDA graph once the same dtype and op were
                called before; replays are for the caller to order against other calls. Emulated,
                it must be None.

        Returns:
            `out`.

        Raises:
            ArgumentTypeError: An array or its dtype is not supported.
            ArgumentError: `op`, contiguity, alignment, count or overlap; nothing was launched.
            BackendUnavailableError: A kernel's scratch, allocated at its first call, does not fit;
                on every rank.
            ClosedError: The communicator was closed.
            MismatchError: Under ``SHMEMAR_CHECK=1``, the ranks' calls differ; on every rank.
            CollectiveTimeoutError: A peer did not take part within the deadline.
            DeviceError: CUDA refused the launch, or something before it; the other ranks then wait
                until their deadline.

        Source: :mod:`shmemar.device.kernels.one_shot`, :mod:`shmemar.device.kernels.two_shot`.
        """
        self._require_usable()
        with self._runtime.active():
            return self._allreduce(x, out, op, stream)

    def broadcast(self, x: Any, *, root: int = 0, stream: Any = None) -> Any:
        """Copy an array of one rank to all others; every bit arrives as it was.

        Collective: every rank calls it with the same count, dtype and `root`, in the same order as
        its other calls.

        On GPUs the work is enqueued on `stream`, as that of `allreduce`; a numpy array goes through
        MPI then.

        Args:
            x: C-contiguous array of a type that `allreduce` takes, of any shape: on `root` what is
                sent, and on the others where it is put. Each rank may place it as it likes.
            root: The rank that has the data.
            stream: As of `allreduce`.

        Returns:
            `x`.

        Raises:
            ArgumentTypeError: The array or its dtype is not supported.
            ArgumentError: `root`, contiguity or alignment, or a read-only array; nothing was
                launched.
            ClosedError, MismatchError, CollectiveTimeoutError, DeviceError: As of `allreduce`.

        Source: bidirectional LL exchange, :mod:`shmemar.device.kernels.broadcast`.
        """
        self._require_usable()
        with self._runtime.active():
            return self._broadcast(x, root, stream)

    def barrier(self, *, stream: Any = None) -> None:
        """Let the work that is enqueued behind it wait for all ranks to come to it.

        Collective: every rank calls it, in the same order as its other calls.

        What a stream enqueues behind the barrier starts on no rank before the barrier has started
        on all of them; what was enqueued before it on the same stream, there, has ended then. So a
        kernel behind it may read what kernels of any rank wrote before it, also to symmetric memory
        of its own, and overwrite what they read. On GPUs the host does not wait: the call returns
        when the work is enqueued. To make hosts wait for one another use `host_barrier`.

        Args:
            stream: As of `allreduce`; by default the legacy default stream. It may be captured into
                a CUDA graph once a barrier was called before. Emulated, it must be None.

        Raises:
            ArgumentError: `stream`; nothing was launched.
            BackendUnavailableError, ClosedError, MismatchError, CollectiveTimeoutError,
            DeviceError: As of `allreduce`.

        Example::

            comm.launch(fill_my_neighbours_inbox, buffer, inboxes)
            comm.barrier()
            comm.launch(read_my_inbox, buffer, inboxes)

        Source: unicast flags, :mod:`shmemar.device.barrier`.
        """
        self._require_usable()
        with self._runtime.active():
            self._barrier(stream)

    def _allreduce(self, x: Any, out: Any, op: str | ReduceOp, stream: Any) -> Any:
        self._ncalls += 1
        error: ShmemarError | None = None
        try:
            on_host = self._is_on_host(x)
            take = _take_on_host if on_host else self._runtime.operand
            handle = no_stream(stream) if on_host else self._runtime.stream(stream, x)
            source = take("x", x, handle, writeable=False)
            if out is None:
                out = np.empty_like(x) if on_host else self._runtime.empty_like(x, handle)
            destination = take("out", out, handle, writeable=True)
            check_pair(source, destination)
            reduce_op = as_reduce_op(op, source.dtype)
            spec = None if on_host else self._spec(source.dtype, reduce_op)
        except ShmemarError as caught:
            error = caught
        if self._config.check:
            call = {} if error else _call_of(source, on_host=on_host, op=reduce_op.value)
            self._compare_calls("allreduce", call, error)
        elif error is not None:
            raise error
        if on_host:
            with self._breaks_on_timeout():
                self._bootstrap.allreduce_host(x, out, reduce_op.value)
        elif spec and source.count:
            self._launch(spec, source, destination, handle)
        return out

    def _broadcast(self, x: Any, root: int, stream: Any) -> Any:
        self._ncalls += 1
        error: ShmemarError | None = None
        try:
            on_host = self._is_on_host(x)
            take = _take_on_host if on_host else self._runtime.operand
            handle = no_stream(stream) if on_host else self._runtime.stream(stream, x)
            operand = take("x", x, handle, writeable=True)
            root = as_rank("root", root, self.size)
        except ShmemarError as caught:
            error = caught
        if self._config.check:
            call = {} if error else _call_of(operand, on_host=on_host, root=root)
            self._compare_calls("broadcast", call, error)
        elif error is not None:
            raise error
        if on_host:
            with self._breaks_on_timeout():
                self._bootstrap.broadcast_host(x, root)
        elif operand.count:
            # Bits are moved, whatever they mean, so one kernel serves all types of a width.
            operand = operand.as_components(_MOVED[operand.dtype.component_nbytes])
            spec = KernelSpec(Kernel.BROADCAST, Protocol.LL, operand.dtype, ReduceOp.SUM, self.size)
            self._launch(spec, operand, operand, handle, root)
        return x

    def _barrier(self, stream: Any) -> None:
        self._ncalls += 1
        error: ShmemarError | None = None
        try:
            handle = self._runtime.stream(stream, None)
        except ShmemarError as caught:
            error = caught
        if self._config.check:
            self._compare_calls("barrier", {}, error)
        elif error is not None:
            raise error
        nothing = Operand(0, 0, DTYPES["uint32"])
        spec = KernelSpec(Kernel.BARRIER, Protocol.PUSH, nothing.dtype, ReduceOp.SUM, self.size)
        spec, kernel, scratch = self._prepare(self._with_multicast(spec), handle)
        arguments = self._arguments(spec, scratch, nothing, nothing)
        self._enqueue(spec, kernel, Grid(1, BLOCK_THREADS), arguments, handle)
        if self._runtime.is_synchronous:
            self._require_usable()

    def ll_buffer(
        self, dtype: Any, *, threads: int, slots: int = 1, protocol: str | Protocol = "ll"
    ) -> LLScratch:
        """Allocate the symmetric memory behind an `LLBuffer`, for kernels of your own.

        Collective: all ranks give the same arguments. The memory is empty, as kernels want it, and
        lives as long as the communicator.

        Args:
            dtype: Type of an element, as numpy names it: an integer, float32, float64, complex64 or
                complex128, or several that are at most 16 bytes together, as ``("float32", 4)``.
            threads: The most threads of a launch; rounded up to whole blocks of 128.
            slots: Elements that a thread receives from each peer in one epoch.
            protocol: ``"ll"``, or ``"sentinel"`` for floating types.

        Returns:
            What `launch` takes. Its size is `scratch_nbytes` of the same arguments.

        Raises:
            ArgumentTypeError: `dtype` can't be an element.
            ArgumentError: The other arguments.
            MismatchError: The ranks' arguments differ; on every rank.
            BackendUnavailableError: There is no room for it; on every rank.
            ClosedError, CollectiveTimeoutError, DeviceError: As of `allreduce`.
        """
        self._require_usable()
        try:
            spec = BufferSpec.of(
                self.size,
                dtype,
                threads=threads,
                slots=slots,
                protocol=protocol,
                multicast=self._may_multicast,
            )
        except ShmemarError as error:
            self._compare_calls("ll_buffer", {}, error)
            raise
        call = {"buffer": (spec.name, spec.nthreads, spec.nslots)}
        self._compare_calls("ll_buffer", call, None)
        with self._runtime.active(), self._breaks_on_timeout():
            scratch = make_scratch(
                spec.layout, spec.protocol, self._bootstrap, self._heap, self._runtime
            )
        spec = replace(spec, multicast=bool(scratch.region.window))
        self._user_scratches.append(LLScratch(spec, scratch))
        return self._user_scratches[-1]

    def launch(
        self,
        kernel: Callable[..., None],
        buffer: LLScratch,
        *arguments: Any,
        threads: int | None = None,
        stream: Any = None,
    ) -> None:
        """Run a kernel of your own, over an `LLBuffer`, on every rank.

        Collective: every rank launches the same kernel on the same buffer, with arguments of the
        same types, in the same order as its other calls. It is compiled at its first launch, by all
        ranks together.

        Args:
            kernel: ``kernel(ll, thread, nthreads, *arguments)``, a plain Python function that numba
                compiles, over :class:`shmemar.device.ll_buffer.LLBuffer`, whose docstring holds the
                contract. `thread` runs from 0 to ``nthreads - 1``, whole blocks. Functions that it
                calls are decorated with :func:`shmemar.device.registry.device`.
            buffer: Made by `ll_buffer` of this communicator.
            arguments: Arrays that `allreduce` takes, which the kernel sees in one dimension and may
                write to (16-bit floats as uint16), integers (int64), floats (float64), and arrays
                of `symmetric_array`, which it sees as a tuple of addresses.
            threads: Threads to launch, rounded up to whole blocks; by default all of the buffer.
                There may be fewer, where the GPU holds no more at once: loop over your elements
                with a stride of `nthreads`.
            stream: As of `allreduce`; by default the current one of the first array's library.

        Raises:
            ArgumentTypeError: An argument of another type.
            ArgumentError: `threads`, `buffer`, contiguity, alignment or a read-only array, or a
                kernel that numba could not compile; nothing was launched.
            ClosedError, MismatchError, CollectiveTimeoutError, DeviceError: As of `allreduce`.
        """
        self._require_usable()
        with self._runtime.active():
            self._launch_user(kernel, buffer, arguments, threads, stream)

    def _launch_user(
        self,
        kernel: Callable[..., None],
        buffer: LLScratch,
        arguments: tuple[Any, ...],
        threads: int | None,
        stream: Any,
    ) -> None:
        self._ncalls += 1
        error: ShmemarError | None = None
        try:
            check_kernel(kernel, buffer, self._user_scratches)
            grid_of(threads, buffer.spec, None)
            # Of symmetric arrays alone CuPy or torch would be asked, which a given stream spares.
            of_library = first_array(arguments) if stream is None else None
            handle = self._runtime.stream(stream, of_library)
            taken = [self._take(f"arguments[{i}]", a, handle) for i, a in enumerate(arguments)]
            spec = UserKernelSpec(kernel, buffer.spec, tuple(map(type_of, taken)))
        except ShmemarError as caught:
            error = caught
        if self._config.check:
            call = {} if error else self._launch_of(spec, buffer, threads)
            self._compare_calls("launch", call, error)
        elif error is not None:
            raise error
        layout = buffer.spec.layout
        with self._breaks_on_timeout():
            loaded = self._runtime.compile(spec, layout, handle)
        own: Any = [leaf for argument in taken for leaf in leaves_of(argument)]
        if self.backend is Backend.EMULATED:
            pairs = zip(arguments, taken, strict=True)
            own = tuple(view_of(a if isinstance(t, Operand) else t) for a, t in pairs)
        self._enqueue(
            spec,
            loaded,
            grid_of(threads, buffer.spec, self._max_blocks(loaded)),
            UserArguments(
                _peers(buffer.scratch, multicast=buffer.spec.multicast),
                buffer.scratch.epochs.addresses[0],
                self._control.broken,
                self._control.record,
                self._timeout_ns,
                own,
            ),
            handle,
        )
        if self._runtime.is_synchronous:
            self._require_usable()

    def _launch_of(
        self, spec: UserKernelSpec, buffer: LLScratch, threads: int | None
    ) -> dict[str, Any]:
        numbers = [number for number, mine in enumerate(self._user_scratches) if mine is buffer]
        return {
            "kernel": getattr(spec.function, "__qualname__", spec.name),
            "buffer": (numbers[0], buffer.spec.name),
            "threads": grid_of(threads, buffer.spec, None).nthreads,
            "arguments": spec.argument_types,
        }

    def _take(self, name: str, argument: Any, stream: int) -> Taken:
        if isinstance(argument, SymmetricArray):
            if not any(argument is each for each in self._symmetric):
                raise ArgumentError(
                    f"{name} is another communicator's symmetric array; expected one of this one's."
                )
            return argument
        scalar = as_scalar(name, argument)
        if scalar is not None:
            return scalar
        return self._runtime.operand(name, argument, stream, writeable=True)

    def symmetric_array(self, shape: int | tuple[int, ...], dtype: Any) -> SymmetricArray:
        """Allocate an array of zeros that kernels of every rank can put into.

        Collective: all ranks give the same arguments. It lives as long as the communicator.

        Args:
            shape: Extents, each 1 or more.
            dtype: A numeric type of numpy's.

        Returns:
            The array. `launch` passes it to a kernel as a tuple of addresses, one a rank; see
            :mod:`shmemar.device.signal`.

        Raises:
            ArgumentTypeError: `shape` or `dtype` is of another kind.
            ArgumentError: An extent below 1.
            MismatchError: The ranks' arguments differ; on every rank.
            BackendUnavailableError: There is no room for it; on every rank.
            ClosedError, CollectiveTimeoutError, DeviceError: As of `allreduce`.
        """
        self._require_usable()
        try:
            extents, found = check_shape(shape, dtype)
        except ShmemarError as error:
            self._compare_calls("symmetric_array", {}, error)
            raise
        call = {"shape": extents, "dtype": found.name}
        self._compare_calls("symmetric_array", call, None)
        nbytes = math.prod(extents) * found.itemsize
        with self._runtime.active(), self._breaks_on_timeout():
            memory = self._heap.allocate(nbytes + -nbytes % WORD_NBYTES)
        self._symmetric.append(self._runtime.symmetric_array(memory, extents, found))
        return self._symmetric[-1]

    def _is_on_host(self, x: Any) -> bool:
        return self.backend is not Backend.EMULATED and isinstance(x, np.ndarray)

    def kernel_for(self, dtype: DType, op: ReduceOp) -> str:
        """Name the kernel and protocol that serve `dtype` and `op`, such as ``one_shot/ll``."""
        spec = self._spec(dtype, op)
        return f"{spec.kernel.value}/{spec.protocol.value}" + "/multicast" * spec.multicast

    def describe(self) -> dict[str, str]:
        """Say what it runs on: backend, ranks, and the machine and versions behind them."""
        return {
            "shmemar": __version__,
            "ranks": str(self.size),
            "backend": self.backend.value,
            **self._runtime.describe(),
            **({"LL128 lines": self.lines} if self.lines else {}),
            **({"multicast": self.multicast} if self.multicast else {}),
        }

    def host_allgather(self, item: T) -> list[T]:
        """Gather a picklable object of every rank through the host, in rank order. Collective.

        For set-up and reports; it takes as long as MPI takes.

        Raises:
            CollectiveTimeoutError: A rank did not come within the deadline.
            ClosedError: The communicator was closed.
        """
        self._require_usable()
        with self._breaks_on_timeout():
            return self._bootstrap.allgather(item, "gather on the host")

    def host_barrier(self) -> None:
        """Wait on the host for every rank. Collective; raises as `host_allgather` does."""
        self.host_allgather(None)

    def check(self) -> None:
        """Raise what went wrong on the device since the communicator was made, if anything did.

        Local: a rank may call it alone.

        Raises:
            CollectiveTimeoutError: A spin passed its deadline on this rank.
            ClosedError: The communicator was closed.
        """
        self._require_usable()

    def close(self) -> None:
        """Free the symmetric memory. Collective; a second call does nothing.

        Destroy CUDA graphs that hold calls of the communicator before: they would use memory that
        is no longer its own.

        When a peer is known to be missing, or MPI has ended, what is collective is left out.
        """
        if self._is_closed:
            return
        if self._failure is not None or not self._bootstrap.is_alive:
            self._abandon()
            return
        with self._runtime.active():
            self._close()

    def _close(self) -> None:
        try:
            # Peers may store here until their kernels, and so ours, have ended.
            self._runtime.synchronize()
            self._require_usable()
            with self._breaks_on_timeout():
                self._bootstrap.allgather(None, "close the communicator")
        except (CollectiveTimeoutError, DeviceError) as error:
            if self._failure is None:
                self._break(error)
            self._abandon()
            raise
        self._is_closed = True
        self._let_go_of_arrays()
        self._heap.close()
        for scratch in self._all_scratches():
            scratch.epochs.free()
        self._control.free()
        self._runtime.close()
        self._bootstrap.free()

    def __enter__(self) -> Self:
        """Return the communicator itself."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Close the communicator, or abandon it when the body raised."""
        if error is None:
            self.close()
        else:
            self._abandon()

    def __del__(self) -> None:
        """Warn when the communicator was not closed: freeing is collective, so not done here."""
        if not getattr(self, "_is_closed", True):
            warnings.warn(f"{self!r} was not closed", ResourceWarning, source=self, stacklevel=1)

    def __repr__(self) -> str:
        """Rank, size, backend and state."""
        state = " closed" if self._is_closed else " broken" if self._failure else ""
        return (
            f"<shmemar.Communicator rank {self.rank} of {self.size}, {self.backend.value}{state}>"
        )

    def _look_for_multicast(self) -> bool:
        """Ask whether it can be used, and say so in `describe`. Collective."""
        why = self._runtime.why_no_multicast()
        self.multicast = "used where a kernel has it" if why is None else f"not used: {why}"
        if why is not None and self.rank == 0:
            logger.warning("SHMEMAR_MULTICAST is 1, and multicast is not used: %s", why)
        return why is None

    def _spec(self, dtype: DType, op: ReduceOp) -> KernelSpec:
        return self._with_multicast(KernelSpec(*self._config.all_reduce, dtype, op, self.size))

    def _with_multicast(self, spec: KernelSpec) -> KernelSpec:
        """The multicast form of a kernel, where it may be used; else the kernel itself."""
        found = _multicast_form(spec) if self._may_multicast else None
        if found is None:
            return spec
        may_vary = self.determinism is Determinism.NOT_GUARANTEED
        return found if found.is_deterministic or may_vary else spec

    def _prepare(self, spec: KernelSpec, stream: int) -> tuple[KernelSpec, CompiledKernel, Scratch]:
        """Compile a kernel and allocate its scratch. Collective when it is asked for first.

        Returns:
            The kernel, without multicast where its region turned out to have no multicast address;
            what it was compiled to; its scratch.
        """
        with self._breaks_on_timeout():
            if self._scratch_key(spec) not in self._scratches:
                self._runtime.refuse_capture(spec.name, stream)
            if spec.multicast and not self._scratch_for(spec).region.window:
                return self._prepare(replace(spec, multicast=False), stream)
            kernel = self._runtime.compile(spec, layout_for(spec, self._config), stream)
            return spec, kernel, self._scratch_for(spec)

    def _launch(
        self,
        spec: KernelSpec,
        source: Operand,
        destination: Operand,
        stream: int,
        root: int = 0,
    ) -> None:
        spec, kernel, scratch = self._prepare(spec, stream)
        longest = MAX_LAUNCH_PACKETS * spec.payload_nbytes // source.dtype.itemsize
        for start in range(0, source.count, longest):
            part = source.part(start, longest)
            target = destination.part(start, longest)
            arguments = self._arguments(spec, scratch, part, target, root)
            grid = self._grid(spec, part, kernel)
            self._enqueue(spec, kernel, grid, arguments, stream)
        if self._runtime.is_synchronous:
            self._require_usable()

    def _enqueue(
        self,
        spec: AnyKernelSpec,
        kernel: CompiledKernel,
        grid: Grid,
        arguments: AnyArguments,
        stream: int,
    ) -> None:
        try:
            self._runtime.launch(kernel, grid, arguments, stream)
        except DeviceError as error:
            # The peers' kernels may be waiting for this one already.
            text = f"rank {self.rank} could not launch {spec.name}: {error} Close it."
            self._break(DeviceError(text))
            raise self._failure_again() from error

    @staticmethod
    def _scratch_key(spec: KernelSpec) -> tuple[Kernel, Protocol, bool]:
        # A broadcast is an exchange of the one-shot's slots, so they share a region and epochs.
        owner = Kernel.ONE_SHOT if spec.kernel is Kernel.BROADCAST else spec.kernel
        return owner, spec.protocol, spec.multicast

    def _scratch_for(self, spec: KernelSpec) -> Scratch:
        """Return the scratch of a kernel and protocol. Collective when it is asked for first."""
        key = self._scratch_key(spec)
        if key not in self._scratches:
            self._scratches[key] = make_scratch(
                layout_for(spec, self._config),
                spec.protocol,
                self._bootstrap,
                self._heap,
                self._runtime,
            )
        return self._scratches[key]

    def _all_scratches(self) -> list[Scratch]:
        return [*self._scratches.values(), *(each.scratch for each in self._user_scratches)]

    def _grid(self, spec: KernelSpec, source: Operand, kernel: CompiledKernel) -> Grid:
        ngroups, layout = spec.group_count(source.nbytes), layout_for(spec, self._config)
        max_blocks = self._max_blocks(kernel)
        if isinstance(layout, BarrierLayout):
            return barrier_grid(ngroups, layout, max_blocks=max_blocks)
        return grid_for(
            ngroups,
            layout,
            packets_per_thread=spec.packets_per_thread,
            lanes=spec.lanes,
            max_blocks=max_blocks,
        )

    def _max_blocks(self, kernel: CompiledKernel) -> int | None:
        caps = [cap for cap in (self._config.max_blocks, kernel.max_blocks) if cap is not None]
        return min(caps, default=None)

    def _arguments(
        self,
        spec: KernelSpec,
        scratch: Scratch,
        source: Operand,
        destination: Operand,
        root: int = 0,
    ) -> KernelArguments:
        return KernelArguments.of_message(
            spec,
            source.address,
            destination.address,
            source.count,
            root=root,
            peers=_peers(scratch, multicast=spec.multicast),
            epochs=scratch.epochs.addresses[0],
            broken=self._control.broken,
            record=self._control.record,
            timeout_ns=self._timeout_ns,
        )

    def _require_usable(self) -> None:
        if self._is_closed:
            raise ClosedError("the communicator was closed; make a new one with shmemar.init.")
        if not self._bootstrap.is_alive:
            raise ClosedError("MPI has ended; use the communicator before MPI.Finalize.")
        if self._failure is None:
            failure = failure_from(self._control.read, self._config.timeout_s)
            if failure is not None:
                self._break(failure)
        if self._failure is not None:
            raise self._failure_again()

    def _failure_again(self) -> ShmemarError:
        """Make a new one each time: a traceback would keep every caller's frame alive."""
        failure = self._failure
        if isinstance(failure, CollectiveTimeoutError):
            return CollectiveTimeoutError(str(failure), rank=failure.rank, missing=failure.missing)
        return DeviceError(str(failure))

    def _abandon(self) -> None:
        self._is_closed = True
        self._let_go_of_arrays()
        self._heap.abandon()
        epochs = [scratch.epochs for scratch in self._all_scratches()]
        self._runtime.abandon(*epochs, self._control)

    def _let_go_of_arrays(self) -> None:
        for array in self._symmetric:
            array.close()

    def _compare_calls(self, name: str, call: dict[str, Any], error: ShmemarError | None) -> None:
        with self._breaks_on_timeout():
            gathered = self._bootstrap.allgather((as_entry(error), call), name)
        raise_any(error, [entry for entry, _ in gathered])
        for field in call:
            by_value = group_ranks(theirs[field] for _, theirs in gathered)
            if len(by_value) > 1:
                raise MismatchError(
                    f"{field} differs between ranks in {name}, call {self._ncalls}: "
                    f"{list_groups(by_value)}. Every rank must make the same call."
                )

    @contextmanager
    def _breaks_on_timeout(self) -> Iterator[None]:
        try:
            yield
        except CollectiveTimeoutError as failure:
            self._break(failure)
            raise
        except (KeyboardInterrupt, SystemExit):
            text = f"rank {self.rank} was interrupted in the middle of a collective; close it."
            self._break(CollectiveTimeoutError(text, rank=self.rank, missing=()))
            raise

    def _break(self, failure: CollectiveTimeoutError | DeviceError) -> None:
        self._failure = failure
        leave_without_finalize()

    def _say_once(self) -> None:
        if self.rank == 0:
            logger.info(
                "%s backend, %d ranks, %d bytes of scratch, %s",
                self.backend.value,
                self.size,
                self._heap.nbytes,
                self.determinism.value,
            )


_MOVED = {1: DTYPES["uint8"], 2: DTYPES["float16"], 4: DTYPES["uint32"], 8: DTYPES["uint64"]}
"""A type of each width, which a broadcast moves instead of the array's own."""


def _peers(scratch: Scratch, *, multicast: bool) -> tuple[int, ...]:
    """Addresses of the region on all ranks, and behind them the multicast one of who uses it."""
    region = scratch.region
    return (*region.addresses, region.window) if multicast else region.addresses


@cache
def _multicast_form(spec: KernelSpec) -> KernelSpec | None:
    what = spec.kernel, spec.protocol, spec.dtype, spec.op, spec.nranks
    return None if why_impossible(*what, multicast=True) else replace(spec, multicast=True)


def _call_of(operand: Operand, *, on_host: bool, **others: Any) -> dict[str, Any]:
    where = "host" if on_host else "device"
    return {"count": operand.count, "dtype": operand.dtype.name, "memory": where, **others}


def _take_on_host(name: str, array: Any, _stream: int, *, writeable: bool) -> Operand:
    return host_operand(name, array, writeable=writeable)
