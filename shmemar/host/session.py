"""What is behind a communicator's collectives: ranks, memory, kernels, and what goes wrong."""

from __future__ import annotations

import hashlib
import logging
import math
import warnings
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, Self, TypeVar

from shmemar import __version__
from shmemar.config import COMPILE_TIMEOUT_S, Config
from shmemar.device.kernels import KernelArguments
from shmemar.dtypes import DTYPES, ReduceOp
from shmemar.errors import (
    ArgumentError,
    ClosedError,
    CollectiveTimeoutError,
    ConfigurationError,
    DeviceError,
    MismatchError,
    ShmemarError,
)
from shmemar.host.bootstrap import as_entry, leave_without_finalize, raise_any
from shmemar.host.default_tables import default_table
from shmemar.host.eager import EagerCalls
from shmemar.host.failure import failure_from
from shmemar.host.heap import SymmetricHeap
from shmemar.host.kernel_set import KernelSet, Prepared
from shmemar.host.ranks import group_ranks, list_groups
from shmemar.host.selector import Terms
from shmemar.host.stock import StockArguments
from shmemar.spec import Determinism, Kernel, KernelSpec

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from types import TracebackType

    from shmemar.device.kernels import AnyArguments
    from shmemar.host.bootstrap import Bootstrap
    from shmemar.host.contract import CompiledKernel, Runtime
    from shmemar.host.interop import Operand
    from shmemar.host.scratch import Scratch
    from shmemar.host.selector import Table
    from shmemar.host.symmetric import SymmetricArray
    from shmemar.host.user_kernels import LLScratch
    from shmemar.layout import Grid
    from shmemar.user_spec import AnyKernelSpec

__all__ = ["Launch", "Session", "peers_of"]

logger = logging.getLogger(__name__)

T = TypeVar("T")

_WHY_UNTESTED = (
    "whether 128-byte lines arrive as a whole was not tested; SHMEMAR_KERNEL=ll128_atomic has it "
    "tested"
)


class Launch(NamedTuple):
    """A kernel with everything that is passed to it."""

    prepared: Prepared
    grid: Grid
    arguments: KernelArguments | StockArguments


class Session:
    """Ranks that have agreed on how to work together. The base of `Communicator`.

    Attributes:
        rank: The own rank.
        size: Number of ranks.
        backend: Where kernels run.
        determinism: What it was made with.
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
        self._eager = EagerCalls()
        try:
            # Who pins it has it tested, and emulated ranks have no lines.
            needs_no_test = config.kernel is Kernel.LL128_ATOMIC or self._runtime.is_synchronous
            terms = Terms(
                self.size,
                default_table(self.size, shares_gpu=self._runtime.shares_gpu),
                determinism,
                config.kernel,
                config.protocol,
                multicast=config.multicast and self._look_for_multicast(),
                why_no_lines=None if needs_no_test else _WHY_UNTESTED,
                why_no_stock=self._runtime.why_no_stock(),
                scratch_nbytes=config.scratch_nbytes,
                two_shot_scratch_nbytes=config.two_shot_scratch_nbytes,
            )
            if config.pdl:
                self._require_pdl(from_environment=True)
            if terms.kernel is Kernel.STOCK and terms.why_no_stock is not None:
                raise ConfigurationError(
                    f"SHMEMAR_KERNEL is stock, and {terms.why_no_stock}. Unset it, or set it to "
                    "barrier_two_shot."
                )
            self._kernels = KernelSet(bootstrap, config, self._heap, self._runtime, terms)
            # What the first call is most likely to use, so that a lack of room is said here.
            self._kernels.scratch_for(self._kernels.choose(4, DTYPES["float32"], ReduceOp.SUM).spec)
            self._control = bootstrap.together(
                self._runtime.allocate_control, "allocate the failure record"
            )
        except Exception:
            self._heap.abandon()
            self._runtime.close()
            raise
        self._is_closed = False
        self._say_once()

    def describe(self) -> dict[str, str]:
        """Say what it runs on: backend, ranks, and the machine and versions behind them."""
        return {
            "shmemar": __version__,
            "ranks": str(self.size),
            "backend": self.backend.value,
            **self._runtime.describe(),
            "kernels are chosen by": self.table.origin,
            "programmatic launch": self._kernels.pdl().value,
            **({"LL128 lines": self.lines} if self.lines else {}),
            **({"multicast": self.multicast} if self.multicast else {}),
        }

    @property
    def table(self) -> Table:
        """By what kernels are chosen (:mod:`shmemar.host.selector`)."""
        return self._kernels.terms.table

    def use_table(self, table: Table, *, why_no_lines: str | None = None) -> None:
        """Choose kernels by another table from now on. Collective.

        Args:
            table: The same on all ranks.
            why_no_lines: Why 128-byte lines can't be relied on; empty where they can; by default as
                before.

        Raises:
            MismatchError: The ranks' tables differ; on every rank.
            ClosedError, CollectiveTimeoutError: As of `host_allgather`.
        """
        self._require_usable()
        digest = hashlib.sha256(repr(table).encode()).hexdigest()[:8]
        self._compare_calls("use_table", {"table": f"{table.origin} ({digest})"}, None)
        terms = replace(self._kernels.terms, table=table)
        if why_no_lines is not None:
            terms = replace(terms, why_no_lines=why_no_lines or None)
        self._use(terms)

    @contextmanager
    def keeping_table(self) -> Iterator[None]:
        """Choose as before when the body of the ``with`` statement ends. Not collective."""
        terms = self._kernels.terms
        try:
            yield
        finally:
            self._use(terms)

    def host_together(self, action: Callable[[], T], doing: str) -> T:
        """Run `action` so that all ranks raise or none does. Collective.

        Args:
            action: What each rank does by itself.
            doing: What that is, for messages.

        Raises:
            CollectiveTimeoutError, ClosedError: As of `host_allgather`.
            ShmemarError: Of another rank, which it names.
        """
        self._require_usable()
        with self._breaks_on_timeout():
            return self._bootstrap.together(action, doing)

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
        self._shut()
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

    def _require_pdl(self, *, from_environment: bool = False) -> None:
        """Refuse programmatic dependent launch where it can't be.

        Raises:
            ConfigurationError: A variable wants it.
            ArgumentError: An argument wants it.
        """
        why = self._runtime.why_no_pdl()
        if why is None:
            return
        if from_environment:
            raise ConfigurationError(
                f"SHMEMAR_PDL is 1, and {why} for programmatic dependent launch. Unset it, or set "
                "it to auto or 0."
            )
        raise ArgumentError(
            f"pdl is True, and {why} for programmatic dependent launch. Use 'auto' or False."
        )

    def _look_for_multicast(self) -> bool:
        """Ask whether it can be used, and say so in `describe`. Collective."""
        why = self._runtime.why_no_multicast()
        self.multicast = "used where a kernel has it" if why is None else f"not used: {why}"
        if why is not None and self.rank == 0:
            logger.warning("SHMEMAR_MULTICAST is 1, and multicast is not used: %s", why)
        return why is None

    def _prepare(
        self,
        spec: KernelSpec,
        stream: int,
        max_blocks: int | None = None,
        *,
        pdl: bool | None = None,
    ) -> Prepared:
        with self._breaks_on_timeout():
            try:
                return self._kernels.prepare(spec, stream, max_blocks, pdl=pdl)
            except DeviceError as error:
                if not spec.kernel.has_code:  # peers may be in its first call already
                    self._break(error)
                raise

    def _use(self, terms: Terms) -> None:
        self._kernels.use(terms)
        self._eager.clear()

    def _all_scratches(self) -> list[Scratch]:
        return [
            *self._kernels.scratches.values(),
            *(each.scratch for each in self._user_scratches),
        ]

    def _launches(
        self, prepared: Prepared, source: Operand, destination: Operand, root: int = 0
    ) -> Iterator[Launch]:
        """What it takes to run a kernel on a message."""
        for part, target in prepared.parts(source, destination):
            arguments = self._arguments(prepared, part, target, root)
            yield Launch(prepared, prepared.grid(part.nbytes), arguments)

    def _launch(self, launches: Iterable[Launch], stream: int) -> None:
        for each in launches:
            spec, kernel = each.prepared.spec, each.prepared.kernel
            self._enqueue(spec, kernel, each.grid, each.arguments, stream)
        if self._runtime.is_synchronous:
            self._require_usable()

    def _enqueue(
        self,
        spec: AnyKernelSpec,
        kernel: CompiledKernel,
        grid: Grid,
        arguments: AnyArguments | StockArguments,
        stream: int,
    ) -> None:
        # In stock emulated ranks have MPI's, which can time out, and be interrupted.
        is_mpi = self._runtime.is_synchronous and isinstance(arguments, StockArguments)
        try:
            with self._breaks_on_timeout() if is_mpi else nullcontext():
                self._runtime.launch(kernel, grid, arguments, stream)
        except DeviceError as error:
            self._raise_refused_launch(spec.name, error)

    def _raise_refused_launch(self, name: str, error: DeviceError) -> NoReturn:
        """Break the communicator: the peers' kernels may be waiting for this one already."""
        text = f"rank {self.rank} could not launch {name}: {error} Close it."
        self._break(DeviceError(text))
        raise self._failure_again() from error

    def _arguments(
        self, prepared: Prepared, source: Operand, destination: Operand, root: int = 0
    ) -> KernelArguments | StockArguments:
        spec, scratch = prepared.spec, prepared.scratch
        if not spec.kernel.has_code:
            staged = scratch.region.addresses[self.rank]
            reduced = staged + prepared.part_nbytes
            return StockArguments(
                staged, reduced, source.address, destination.address, source.count
            )
        return KernelArguments.of_message(
            spec,
            source.address,
            destination.address,
            source.count,
            root=root,
            peers=peers_of(scratch, multicast=spec.multicast),
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
        self._shut()
        self._let_go_of_arrays()
        self._heap.abandon()
        epochs = [scratch.epochs for scratch in self._all_scratches()]
        self._runtime.abandon(*epochs, self._control)

    def _shut(self) -> None:
        """Let nothing launch that was prepared before."""
        self._runtime.shut()
        self._eager.clear()

    def _let_go_of_arrays(self) -> None:
        for array in self._symmetric:
            array.close()

    def _agree(
        self, name: str, check: Callable[[], T], call_of: Callable[[T], dict[str, Any]]
    ) -> T:
        """Check the arguments of a call; in debug mode all ranks' together, and compare them."""
        self._ncalls += 1
        if not self._config.check:
            return check()
        try:
            checked = check()
        except ShmemarError as error:
            self._compare_calls(name, {}, error)
            raise
        self._compare_calls(name, call_of(checked), None)
        return checked

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
        self._shut()
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


def peers_of(scratch: Scratch, *, multicast: bool) -> tuple[int, ...]:
    """Addresses of the region on all ranks, and behind them the multicast one of who uses it."""
    region = scratch.region
    return (*region.addresses, region.window) if multicast else region.addresses
