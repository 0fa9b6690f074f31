"""The communicator: what users hold, and where every call is checked before any rank launches."""

from __future__ import annotations

import logging
import warnings
from collections import defaultdict
from contextlib import contextmanager
from dataclasses import replace
from enum import Enum
from typing import TYPE_CHECKING, Any, Self, TypeVar

import numpy as np

from shmemar import __version__
from shmemar.config import DEFAULT_TIMEOUT_S, Config
from shmemar.dtypes import as_reduce_op
from shmemar.errors import (
    BackendUnavailableError,
    ClosedError,
    CollectiveTimeoutError,
    ConfigurationError,
    MismatchError,
    ShmemarError,
)
from shmemar.host.bootstrap import Bootstrap, name_ranks
from shmemar.host.emulation import EmulatedRuntime
from shmemar.host.failure import failure_from
from shmemar.host.heap import SymmetricHeap
from shmemar.host.interop import Operand, as_operand, check_pair
from shmemar.host.scratch import LLScratch
from shmemar.layout import ControlLayout, LLLayout, grid_for
from shmemar.spec import MAX_RANKS, Backend, Determinism, Kernel, KernelSpec, Protocol

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from types import TracebackType

    from mpi4py import MPI

    from shmemar.dtypes import DType, ReduceOp
    from shmemar.host.runtime import Runtime

__all__ = ["Communicator", "init"]

logger = logging.getLogger(__name__)

E = TypeVar("E", bound=Enum)
T = TypeVar("T")


def init(
    comm: MPI.Intracomm,
    *,
    backend: str | Backend | None = None,
    determinism: str | Determinism = "run_to_run",
    scratch_nbytes: int | None = None,
) -> Communicator:
    """Make a communicator of the ranks of `comm`.

    Collective: every rank of `comm` calls it, with the same arguments and the same ``SHMEMAR_*``
    variables. They are read here, once, and compared.

    Args:
        comm: An mpi4py intracommunicator; it is duplicated.
        backend: ``"auto"`` (the default), ``"nvshmem"`` or ``"emulated"``; goes before
            ``SHMEMAR_BACKEND``.
        determinism: ``"run_to_run"``, ``"bitwise"`` or ``"not_guaranteed"``; see
            :class:`shmemar.spec.Determinism`.
        scratch_nbytes: Symmetric scratch of each rank in bytes; goes before
            ``SHMEMAR_SCRATCH_NBYTES``; 4 MiB by default.

    Raises:
        ArgumentTypeError: `comm` is no mpi4py communicator.
        ConfigurationError: An argument or variable is unknown, or differs between ranks; on every
            rank.
        BackendUnavailableError: The backend can't run here; on every rank.

    Example:
        >>> from mpi4py import MPI
        >>> import numpy as np
        >>> import shmemar
        >>> with shmemar.init(MPI.COMM_WORLD, backend="emulated") as comm:
        ...     total = comm.allreduce(np.ones(3, np.float32))
        >>> bool((total == MPI.COMM_WORLD.size).all())
        True
    """
    bootstrap = Bootstrap(comm)
    try:
        config, chosen = bootstrap.together(
            lambda: _configure(backend, determinism, scratch_nbytes, bootstrap.size)
        )
        _compare(config, chosen, bootstrap)
        return Communicator(bootstrap, config, chosen)
    except ShmemarError:
        bootstrap.free()
        raise


class Communicator:
    """Collectives of a fixed set of ranks. Made by :func:`init`.

    Close it, or use it in a ``with`` statement. When the body of the statement raises, the
    communicator is abandoned without a word to the other ranks, because they may be waiting
    elsewhere; their next collective ends at its deadline.

    Attributes:
        rank: The own rank.
        size: Number of ranks.
        backend: Where kernels run.
    """

    def __init__(self, bootstrap: Bootstrap, config: Config, determinism: Determinism) -> None:
        """Use :func:`init`."""
        self.rank = bootstrap.rank
        self.size = bootstrap.size
        self.determinism = determinism
        self._bootstrap = bootstrap
        self._config = config
        # What waits for a compiler, or for a peer that is not in a kernel, is given more time.
        self._patience_s = max(config.timeout_s, DEFAULT_TIMEOUT_S) if config.timeout_s else 0.0
        self._runtime: Runtime = EmulatedRuntime(bootstrap, self._patience_s)
        self.backend = self._runtime.backend
        self._heap = SymmetricHeap(self._runtime, bootstrap)
        self._scratch = LLScratch(self._heap, self._runtime, self.size, config.scratch_nbytes)
        self._control_layout = ControlLayout()
        self._control = self._runtime.allocate_private(self._control_layout.nbytes)
        self._timeout_ns = round(config.timeout_s * 1e9)
        self._failure: CollectiveTimeoutError | None = None
        self._is_closed = False
        self._ncalls = 0
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

        Elements are combined in rank order, so a result depends neither on timing nor on the size
        of the message. Integers wrap; ``min`` and ``max`` propagate NaN and order -0 below +0.

        Args:
            x: C-contiguous array of float32, float64, int32, int64, complex64 or complex128, of any
                shape; not written to, unless it is `out`.
            out: Array of the same dtype and count: `x` itself, or one that does not overlap it. A
                new one of `x`'s shape by default.
            op: ``"sum"``, ``"prod"``, ``"min"`` or ``"max"``; no order, so no min or max, for
                complex.
            stream: Must be None: the emulated backend runs each call to its end.

        Returns:
            `out`.

        Raises:
            ArgumentTypeError: An array or its dtype is not supported.
            ArgumentError: `op`, contiguity, alignment, count or overlap; nothing was launched.
            ClosedError: The communicator was closed.
            MismatchError: Under ``SHMEMAR_CHECK=1``, the ranks' calls differ; on every rank.
            CollectiveTimeoutError: A peer did not take part within the deadline.

        Source: one-shot LL all-reduce, :mod:`shmemar.device.kernels.one_shot`.
        """
        self._require_usable()
        self._ncalls += 1
        error: ShmemarError | None = None
        try:
            self._runtime.check_stream(stream)
            if out is None:
                as_operand("x", x, writeable=False)
                out = np.empty_like(x)
            source, destination, reduce_op = _checked(x, out, op)
        except ShmemarError as caught:
            error = caught
        if self._config.check:
            call = None if error else (source.count, source.dtype.name, reduce_op.value)
            self._compare_calls("allreduce", call, error)
        elif error is not None:
            raise error
        if source.count:
            self._launch(source, destination, reduce_op, stream)
        return out

    def kernel_for(self, dtype: DType, op: ReduceOp) -> str:
        """Name the kernel and protocol that serve `dtype` and `op`, such as ``one_shot/ll``."""
        spec = self._spec(dtype, op)
        return f"{spec.kernel.value}/{spec.protocol.value}"

    def host_allgather(self, item: T) -> list[T]:
        """Gather a picklable object of every rank through the host, in rank order. Collective.

        For set-up and reports; it takes as long as MPI takes.

        Raises:
            CollectiveTimeoutError: A rank did not come within the deadline.
            ClosedError: The communicator was closed.
        """
        self._require_usable()
        with self._breaks_on_timeout():
            return self._bootstrap.allgather_within(item, self._patience_s, "gather on the host")

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

        When a peer is known to be missing, or MPI has ended, what is collective is left out.
        """
        if self._is_closed:
            return
        if self._failure is not None or not self._bootstrap.is_alive:
            self._abandon()
            return
        try:
            with self._breaks_on_timeout():
                self._bootstrap.allgather_within(None, self._patience_s, "close the communicator")
        except CollectiveTimeoutError:
            self._abandon()
            raise
        self._is_closed = True
        self._heap.close()
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

    def _spec(self, dtype: DType, op: ReduceOp) -> KernelSpec:
        return KernelSpec(
            self._config.kernel or Kernel.ONE_SHOT,
            self._config.protocol or Protocol.LL,
            dtype,
            op,
            self.size,
        )

    def _launch(self, source: Operand, destination: Operand, op: ReduceOp, stream: Any) -> None:
        spec = self._spec(source.dtype, op)
        layout = self._scratch.layout
        grid = grid_for(
            source.nbytes,
            layout,
            packets_per_thread=spec.packets_per_thread,
            max_blocks=self._config.max_blocks,
        )
        with self._breaks_on_timeout():
            kernel = self._runtime.compile(spec, layout)
        control = self._control.addresses[0]
        arguments = (
            self._scratch.region.addresses,
            source.address,
            destination.address,
            source.count * source.dtype.components,
            self._scratch.epochs.addresses[0],
            control + self._control_layout.broken_offset,
            control + self._control_layout.record_offset,
            self._timeout_ns,
            self.rank,
        )
        self._runtime.launch(kernel, grid, arguments, stream)
        if self._runtime.is_synchronous:
            self._require_usable()

    def _require_usable(self) -> None:
        if self._is_closed:
            raise ClosedError("the communicator was closed; make a new one with shmemar.init.")
        if self._failure is None:
            control = self._runtime.read_private(self._control)
            failure = failure_from(control, self._control_layout, self._config.timeout_s)
            if failure is not None:
                self._break(failure)
        if self._failure is not None:
            raise self._failure

    def _abandon(self) -> None:
        self._is_closed = True
        self._heap.abandon()

    def _compare_calls(self, name: str, call: tuple[Any, ...] | None, error: Any) -> None:
        doing = f"compare call {self._ncalls}"
        with self._breaks_on_timeout():
            self._bootstrap.raise_together(error, self._config.timeout_s, doing)
            own = (self._ncalls, name, *(call or ()))
            calls = self._bootstrap.allgather_within(own, self._config.timeout_s, doing)
        for index, field in enumerate(("call number", "collective", "count", "dtype", "op")):
            by_value = _group(entry[index] for entry in calls)
            if len(by_value) > 1:
                raise MismatchError(
                    f"{field} differs between ranks in call {self._ncalls}: {_listed(by_value)}. "
                    "Every rank must make the same call."
                )

    @contextmanager
    def _breaks_on_timeout(self) -> Iterator[None]:
        try:
            yield
        except CollectiveTimeoutError as failure:
            self._break(failure)
            raise

    def _break(self, failure: CollectiveTimeoutError) -> None:
        self._failure = failure
        self._bootstrap.leave_without_finalize()

    def _say_once(self) -> None:
        if self.rank == 0:
            if self._config.backend is Backend.AUTO:
                logger.warning("%s backend: kernels run on the CPU", self.backend.value)
            logger.info(
                "%s backend, %d ranks, %d bytes of scratch, %s",
                self.backend.value,
                self.size,
                self._heap.nbytes,
                self.determinism.value,
            )


def _checked(x: Any, out: Any, op: str | ReduceOp) -> tuple[Operand, Operand, ReduceOp]:
    source = as_operand("x", x, writeable=False)
    destination = as_operand("out", out, writeable=True)
    check_pair(source, destination)
    return source, destination, as_reduce_op(op, source.dtype)


def _configure(
    backend: str | Backend | None,
    determinism: str | Determinism,
    scratch_nbytes: int | None,
    nranks: int,
) -> tuple[Config, Determinism]:
    if nranks > MAX_RANKS:
        raise ConfigurationError(f"comm has {nranks} ranks; expected {MAX_RANKS} at most.")
    config = Config.from_environment()
    if backend is not None:
        config = replace(config, backend=_member(Backend, "backend", backend))
    if scratch_nbytes is not None:
        if isinstance(scratch_nbytes, bool) or not isinstance(scratch_nbytes, int | np.integer):
            raise ConfigurationError(
                f"scratch_nbytes is {scratch_nbytes!r}; expected a whole number of bytes, or None."
            )
        config = replace(config, scratch_nbytes=int(scratch_nbytes))
    LLLayout.fit(nranks, config.scratch_nbytes)
    if config.backend is Backend.NVSHMEM:
        raise BackendUnavailableError(
            "backend is 'nvshmem', which this version does not have yet; expected 'emulated' or "
            "'auto'."
        )
    return config, _member(Determinism, "determinism", determinism)


def _member(enum: type[E], name: str, value: Any) -> E:
    try:
        return enum(value)
    except ValueError:
        names = ", ".join(repr(member.value) for member in enum)
        raise ConfigurationError(f"{name} is {value!r}; expected one of {names}.") from None


def _compare(config: Config, determinism: Determinism, bootstrap: Bootstrap) -> None:
    """Raise on every rank when the ranks' configurations differ, naming variable and ranks."""
    own = {
        **config.as_variables(),
        "determinism": determinism.value,
        "shmemar's version": __version__,
    }
    everyone = bootstrap.allgather(own)
    for variable in own:
        by_value = _group(entry[variable] for entry in everyone)
        if len(by_value) > 1:
            raise ConfigurationError(
                f"{variable} differs between ranks: {_listed(by_value)}. Give every rank the same "
                "(mpirun -x NAME exports a variable)."
            )


def _group(values: Iterable[Any]) -> dict[Any, list[int]]:
    ranks_of: dict[Any, list[int]] = defaultdict(list)
    for rank, value in enumerate(values):
        ranks_of[value].append(rank)
    return ranks_of


def _listed(ranks_of: dict[Any, list[int]]) -> str:
    return "; ".join(f"{value!r} on {name_ranks(ranks)}" for value, ranks in ranks_of.items())
