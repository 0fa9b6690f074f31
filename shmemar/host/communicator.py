"""The communicator: what users hold, and where every call is checked before any rank launches."""

from __future__ import annotations

import math
import sys
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import numpy as np

from shmemar.device.kernels import UserArguments
from shmemar.dtypes import DTYPES, ReduceOp, as_dtype, as_reduce_op
from shmemar.errors import ArgumentError, DeviceError, ShmemarError
from shmemar.host.interop import Operand, check_pair, host_operand, no_stream
from shmemar.host.kernel_set import Explanation, name_of
from shmemar.host.plan import AllreducePlan, PlanShape, Reduction
from shmemar.host.ranks import as_rank
from shmemar.host.scratch import make_scratch
from shmemar.host.session import Launch, Session, peers_of
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
from shmemar.layout import BLOCK_THREADS, WORD_NBYTES, Grid
from shmemar.spec import Backend, Kernel, KernelSpec, Pdl, Protocol
from shmemar.user_spec import BufferSpec, UserKernelSpec

if TYPE_CHECKING:
    from collections.abc import Callable

    from shmemar.dtypes import DType
    from shmemar.host.contract import BoundLaunch

__all__ = ["Communicator"]

T = TypeVar("T")


class Communicator(Session):
    """Collectives of a fixed set of ranks. Made by :func:`shmemar.init`.

    Calls of communicators that share a GPU must not run at the same time, unless their blocks fit
    it together (``SHMEMAR_MAX_BLOCKS``): one rank's first call would wait for another's second.

    Ranks must make the same calls in the same order, with the same count, dtype and op. When they
    do not, and ``SHMEMAR_CHECK`` is not set, the outcome is undefined: wrong results, or a timeout.

    Close it, or use it in a ``with`` statement. When the body of the statement raises, the
    communicator is abandoned without a word to the other ranks, because they may be waiting
    elsewhere; their next collective ends at its deadline.

    Attributes: those of :class:`shmemar.host.session.Session`.
    """

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
        of the message, but for one NaN in the place of another. 16-bit types are accumulated in
        float32 and rounded once. Integers wrap; ``min`` and ``max`` propagate NaN and order -0
        below +0; ``avg`` is the sum times the reciprocal of the number of ranks. ``ll128_atomic``,
        where it is pinned, or where a measured table lists it and `determinism` admits it, adds as
        elements arrive, and rounds to their type at each addition: ranks agree, and runs need not.
        Of ``stock``, likewise, nothing is promised but a sum; pinned, of floats, not even that
        ranks agree, and on GPUs it has no deadline.

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
                the other. It may be captured into a CUDA graph once a call of its kernel was made
                before (not of a plan, whose `pdl` may make it another one), or behind `prepare`;
                replays are for the caller to order against other calls. Emulated, it must be None.

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
        found = self._eager.find(x, out, op, stream)
        if found is not None and self._launch_bound(found.name, found.bound, *found[2:6]):
            return found.out
        found = None  # whose output, if it is new, makes room for another one
        self._require_usable()
        with self._runtime.active():
            return self._allreduce(x, out, op, stream)

    def plan_allreduce(
        self,
        x: Any,
        out: Any = None,
        *,
        op: str | ReduceOp = "sum",
        pdl: bool | Literal["auto"] = "auto",
    ) -> AllreducePlan:
        """Check and decide an all-reduce once, for calls that do nothing but launch it.

        Collective, as its calls are, and not to be made inside a capture. Its kernel is compiled
        here, so that the first call may be captured into a CUDA graph.

        Args:
            x: As of `allreduce`.
            out: As of `allreduce`; a new array by default, the same for all calls.
            op: As of `allreduce`.
            pdl: True for programmatic dependent launch: a call's kernel may be set up while the one
                before it on the stream still runs, and waits for its end before it does anything.
                It pays in graphs, behind a kernel that triggers early. False for none; ``"auto"``
                as ``SHMEMAR_PDL`` says, and else in graphs right behind another collective, which
                triggers, where every rank has a GPU of its own. Where ranks share one, True takes
                half of the blocks, and no other kernel may be launched so on the stream: it would
                wait in the place of a peer's. Emulated ranks have no launches.

        Returns:
            The plan; call it, with `stream=` or without.

        Raises:
            ArgumentError: `pdl`, or a GPU is older than sm_90 and it is True.
            The others as of `allreduce`.

        Example::

            plan = comm.plan_allreduce(x, y)
            for step in range(1000):
                update(x)
                plan()
        """
        self._require_usable()
        with self._runtime.active():
            return self._plan(x, out, op, pdl=pdl)

    def prepare(
        self, *, dtype: str = "float32", op: str | ReduceOp = "sum", nbytes: int | None = None
    ) -> None:
        """Compile what all-reduces of a type may use, and allocate its scratch, ahead of them.

        Collective, and not to be made inside a capture. Calls behind it, of sizes up to `nbytes`,
        may be captured into a CUDA graph at once, and none of them takes seconds.

        Args:
            dtype: Name of the element type.
            op: As of `allreduce`.
            nbytes: The largest message in bytes; any by default, which takes the most memory.

        Raises:
            ArgumentTypeError, ArgumentError: As of `explain`.
            BackendUnavailableError, ClosedError, MismatchError, CollectiveTimeoutError,
            DeviceError: As of `allreduce`.
        """
        self._require_usable()

        def check() -> tuple[DType, ReduceOp, int]:
            found = as_dtype(dtype)
            most = sys.maxsize if nbytes is None else _as_nbytes(nbytes, found)
            return found, as_reduce_op(op, found), most

        with self._runtime.active():
            wanted = self._agree(
                "prepare",
                check,
                lambda made: {"dtype": made[0].name, "op": made[1].value, "nbytes": made[2]},
            )
            for choice in self._kernels.choices(*wanted):
                self._prepare(choice.spec, 0, choice.candidate.max_blocks)

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
        handle, wanted = self._agree(
            "allreduce", lambda: self._reduction(x, out, op, stream), lambda made: made[1].call
        )
        if wanted.on_host:
            self._reduce_on_host(x, wanted)
        elif wanted.choice is not None:
            choice = wanted.choice
            prepared = self._prepare(choice.spec, handle, choice.candidate.max_blocks)
            launches = list(self._launches(prepared, wanted.source, wanted.destination))
            self._launch(launches, handle)
            if len(launches) == 1 and not self._config.check:
                bind = partial(self._runtime.bind, prepared.kernel, *launches[0][1:])
                self._eager.remember(x, wanted.out, op, prepared.spec.name, bind)
        return wanted.out

    def _reduction(
        self, x: Any, out: Any, op: str | ReduceOp, stream: Any
    ) -> tuple[int, Reduction]:
        on_host = self._is_on_host(x)
        take = _take_on_host if on_host else self._runtime.operand
        handle = no_stream(stream) if on_host else self._runtime.stream(stream, x)
        source = take("x", x, handle, writeable=out is x)
        if out is None:
            out = np.empty_like(x) if on_host else self._runtime.empty_like(x, handle)
        destination = source
        if out is not x:
            destination = take("out", out, handle, writeable=True)
            check_pair(source, destination)
        reduce_op = as_reduce_op(op, source.dtype)
        choice = None
        if source.count and not on_host:
            choice = self._kernels.choose(source.nbytes, source.dtype, reduce_op)
        return handle, Reduction(out, reduce_op, source, destination, on_host, choice)

    def _reduce_on_host(self, x: Any, wanted: Reduction) -> None:
        with self._breaks_on_timeout():
            self._bootstrap.allreduce_host(x, wanted.out, wanted.op.value)

    def _plan(
        self, x: Any, out: Any, op: str | ReduceOp, *, pdl: bool | Literal["auto"]
    ) -> AllreducePlan:
        def check() -> tuple[int, Reduction, bool | None]:
            handle, wanted = self._reduction(x, out, op, None)
            return handle, wanted, self._as_pdl(pdl)

        handle, wanted, wanted_pdl = self._agree(
            "plan_allreduce", check, lambda made: {**made[1].call, "pdl": made[2]}
        )
        choice, launches = wanted.choice, []
        name = "mpi" if wanted.on_host else "none"
        if choice is not None:
            most = choice.candidate.max_blocks
            prepared = self._prepare(choice.spec, handle, most, pdl=wanted_pdl)
            launches = list(self._launches(prepared, wanted.source, wanted.destination))
            name = name_of(prepared.spec)
        number = self._ncalls
        stream_of = no_stream if wanted.on_host else lambda given: self._runtime.stream(given, x)
        fast = None
        if len(launches) == 1 and not self._config.check:
            fast = self._fast(x, launches[0])

        def run(stream: Any) -> None:
            self._require_usable()
            with self._runtime.active():
                handle = self._agree(
                    "a plan's call", lambda: stream_of(stream), lambda _: {"plan": number}
                )
                if wanted.on_host:
                    self._reduce_on_host(x, wanted)
                elif launches:
                    self._launch(launches, handle)

        shape = PlanShape(
            name,
            launches=len(launches),
            blocks=launches[0].grid.blocks if launches else 0,
            pdl=(launches[0].prepared.pdl if launches else Pdl.NEVER).value,
        )
        return AllreducePlan(x, wanted.out, shape, run, fast)

    def _fast(self, x: Any, launch: Launch) -> Callable[[Any], bool] | None:
        """What launches a plan, and returns False where it has launched nothing."""
        bound = self._runtime.bind(launch.prepared.kernel, launch.grid, launch.arguments)
        if bound is None:
            return None
        name, source = launch.prepared.spec.name, launch.arguments.source
        destination = launch.arguments.destination
        current_stream = self._runtime.current_stream_of(x)
        # A stream is held, so that no other object takes its place in memory.
        known: Any = None
        handle = 0

        def fast(stream: Any) -> bool:
            nonlocal known, handle
            if stream is None:
                own = current_stream()
                return self._launch_bound(name, bound, own, own, source, destination)
            if stream is not known:
                known, handle = stream, self._runtime.stream(stream, x)
            return self._launch_bound(name, bound, handle, handle, source, destination)

        return fast

    def _launch_bound(
        self,
        name: str,
        bound: BoundLaunch,
        stream: int,
        producer: int,
        source: int,
        destination: int,
    ) -> bool:
        if not self._bootstrap.is_alive:
            return False
        try:
            return bound(stream, producer, source, destination)
        except DeviceError as error:
            self._raise_refused_launch(name, error)

    def _as_pdl(self, pdl: Any) -> bool | None:
        if pdl == "auto":
            return None
        if not isinstance(pdl, bool):
            raise ArgumentError(f"pdl is {pdl!r}; expected True, False or 'auto'.")
        if pdl:
            self._require_pdl()
        return pdl

    def _broadcast(self, x: Any, root: int, stream: Any) -> Any:
        on_host = self._is_on_host(x)

        def check() -> tuple[int, Operand, int]:
            take = _take_on_host if on_host else self._runtime.operand
            handle = no_stream(stream) if on_host else self._runtime.stream(stream, x)
            operand = take("x", x, handle, writeable=True)
            return handle, operand, as_rank("root", root, self.size)

        handle, operand, root = self._agree(
            "broadcast", check, lambda made: made[1].call(on_host=on_host, root=made[2])
        )
        if on_host:
            with self._breaks_on_timeout():
                self._bootstrap.broadcast_host(x, root)
        elif operand.count:
            # Bits are moved, whatever they mean, so one kernel serves all types of a width.
            operand = operand.as_components(_MOVED[operand.dtype.component_nbytes])
            spec = KernelSpec(Kernel.BROADCAST, Protocol.LL, operand.dtype, ReduceOp.SUM, self.size)
            prepared = self._prepare(spec, handle)
            self._launch(self._launches(prepared, operand, operand, root), handle)
        return x

    def _barrier(self, stream: Any) -> None:
        handle = self._agree("barrier", lambda: self._runtime.stream(stream, None), lambda _: {})
        nothing = Operand(0, 0, DTYPES["uint32"])
        spec = KernelSpec(Kernel.BARRIER, Protocol.PUSH, nothing.dtype, ReduceOp.SUM, self.size)
        prepared = self._prepare(self._kernels.with_multicast(spec), handle)
        arguments = self._arguments(prepared, nothing, nothing)
        self._launch([Launch(prepared, Grid(1, BLOCK_THREADS), arguments)], handle)

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
                multicast=self._kernels.terms.multicast,
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
        def check() -> tuple[int, list[Taken], UserKernelSpec]:
            check_kernel(kernel, buffer, self._user_scratches)
            grid_of(threads, buffer.spec, None)
            # Of symmetric arrays alone CuPy or torch would be asked, which a given stream spares.
            of_library = first_array(arguments) if stream is None else None
            handle = self._runtime.stream(stream, of_library)
            taken = [self._take(f"arguments[{i}]", a, handle) for i, a in enumerate(arguments)]
            types = tuple(map(type_of, taken))
            return handle, taken, UserKernelSpec(kernel, buffer.spec, types)

        handle, taken, spec = self._agree(
            "launch", check, lambda made: self._launch_of(made[2], buffer, threads)
        )
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
            grid_of(threads, buffer.spec, self._kernels.max_blocks(loaded)),
            UserArguments(
                peers_of(buffer.scratch, multicast=buffer.spec.multicast),
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

    def explain(
        self, *, nbytes: int, dtype: str = "float32", op: str | ReduceOp = "sum"
    ) -> Explanation:
        """Say which kernel serves an all-reduce of some size, with which grid, and why no other.

        Local; all ranks get the same.

        Args:
            nbytes: Bytes of the message: whole elements, one at least.
            dtype: Name of the element type.
            op: As of `allreduce`.

        Returns:
            What it chose, field by field; print it to read it.

        Raises:
            ArgumentTypeError: `dtype` is not supported.
            ArgumentError: `nbytes` or `op`, or what is pinned does not serve them.
        """
        found = as_dtype(dtype)
        reduce_op = as_reduce_op(op, found)
        return self._kernels.explain(_as_nbytes(nbytes, found), found, reduce_op)

    def supports(self, x: Any, *, out: Any = None, op: str | ReduceOp = "sum") -> tuple[bool, str]:
        """Ask whether `allreduce` takes arguments, without a call of it.

        Local; nothing is allocated or launched.

        Args:
            x: As of `allreduce`.
            out: As of `allreduce`.
            op: As of `allreduce`.

        Returns:
            Whether it does, and what would serve them, or why it does not.

        Raises:
            ClosedError, CollectiveTimeoutError, DeviceError: The communicator can't be used.
        """
        self._require_usable()
        with self._runtime.active():
            try:
                on_host = self._is_on_host(x)
                take = _take_on_host if on_host else self._runtime.operand
                handle = no_stream(None) if on_host else self._runtime.stream(None, x)
                source = take("x", x, handle, writeable=out is x)
                why = None if on_host or out is not None else self._runtime.why_no_new_array(x)
                if why is not None:
                    return False, why
                if out is not None and out is not x:
                    check_pair(source, take("out", out, handle, writeable=True))
                reduce_op = as_reduce_op(op, source.dtype)
                if on_host:
                    return True, "MPI's all-reduce"
                if not source.count:
                    return True, "nothing to do"
                choice = self._kernels.choose(source.nbytes, source.dtype, reduce_op)
            except ShmemarError as error:
                return False, str(error)
        return True, name_of(choice.spec)


_MOVED = {1: DTYPES["uint8"], 2: DTYPES["float16"], 4: DTYPES["uint32"], 8: DTYPES["uint64"]}
"""A type of each width, which a broadcast moves instead of the array's own."""


def _as_nbytes(nbytes: Any, dtype: DType) -> int:
    whole = isinstance(nbytes, int | np.integer) and not isinstance(nbytes, bool)
    if not whole or nbytes < 1 or nbytes % dtype.itemsize:
        raise ArgumentError(
            f"nbytes is {nbytes!r}; expected a multiple of {dtype.itemsize}, the bytes of a "
            f"{dtype.name}, of 1 or more elements."
        )
    return int(nbytes)


def _take_on_host(name: str, array: Any, _stream: int, *, writeable: bool) -> Operand:
    return host_operand(name, array, writeable=writeable)
