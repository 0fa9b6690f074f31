"""What a communicator needs of the place where its kernels run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from shmemar.spec import Pdl

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

    import numpy as np

    from shmemar.device.kernels import AnyArguments, KernelArguments
    from shmemar.host.interop import Operand
    from shmemar.host.stock import StockArguments
    from shmemar.host.symmetric import SymmetricArray
    from shmemar.layout import AnyLayout, Grid
    from shmemar.spec import Backend
    from shmemar.user_spec import AnyKernelSpec

__all__ = ["BoundLaunch", "CompiledKernel", "Control", "Memory", "Runtime"]


class Memory(Protocol):
    """Memory that kernels can reach."""

    @property
    def nbytes(self) -> int:
        """Bytes of each rank."""

    @property
    def addresses(self) -> tuple[int, ...]:
        """Address in this process of each rank's part, in rank order; private memory has one."""

    @property
    def window(self) -> int:
        """Multicast address of all ranks' parts; 0 where there is none, on all ranks alike."""

    def free(self) -> None:
        """Return the memory. Of symmetric memory, every rank calls it in the same order."""

    def abandon(self) -> None:
        """Return what can be returned without the peers, who may still store to the rest."""


@dataclass(frozen=True)
class Control:
    """A rank's broken word and failure record, zeroed.

    Attributes:
        broken: Address of the word, in memory that kernels read fast.
        record: Address of the record, in memory that the host can read while kernels run.
        read: Returns the bytes of the record.
        free: Returns the memory.
    """

    broken: int
    record: int
    read: Callable[[], bytes]
    free: Callable[[], None]


class CompiledKernel(Protocol):
    """What `Runtime.compile` makes and `Runtime.launch` takes."""

    @property
    def max_blocks(self) -> int | None:
        """Blocks that may be launched at once; the same on all ranks; None for any number."""


class BoundLaunch(Protocol):
    """A launch that was prepared for many calls."""

    def __call__(self, stream: int, producer: int, source: int, destination: int, /) -> bool:
        """Launch on `stream`, with these addresses of input and output.

        Args:
            stream: Handle of the stream.
            producer: Handle of the stream whose work it waits for; `stream` itself for none.
            source: Address of the input.
            destination: Address of the output.

        Returns:
            False, where nothing was launched because it takes `Runtime.launch` to do it: once the
            communicator has failed or was closed, too.

        Raises:
            DeviceError: The driver refused it.
        """


class Runtime(Protocol):
    """A place where kernels run: GPUs that share a symmetric heap, or its emulation."""

    @property
    def backend(self) -> Backend:
        """Which one it is."""

    @property
    def is_synchronous(self) -> bool:
        """True when `launch` returns after the kernel has ended."""

    @property
    def shares_gpu(self) -> bool:
        """True where ranks of the job run on the same GPU."""

    def allocate_symmetric(self, nbytes: int, word: int, zeroed_nbytes: int = 0) -> Memory:
        """Allocate memory on every rank, reachable by all. Collective.

        It is filled with a word, but for the last `zeroed_nbytes`.
        """

    def allocate_private(self, nbytes: int) -> Memory:
        """Allocate zeros for this rank's kernels."""

    def allocate_control(self) -> Control:
        """Allocate a rank's broken word and failure record."""

    def refuse_capture(self, name: str, stream: int) -> None:
        """Refuse to load or allocate, for the kernel `name`, while `stream` is being captured.

        Raises:
            ArgumentError: It is.
        """

    def why_no_pdl(self) -> str | None:
        """Say why kernels can't be launched so; None where they can; the same on all ranks."""

    def compile(
        self, spec: AnyKernelSpec, layout: AnyLayout, stream: int, *, pdl: Pdl = Pdl.NEVER
    ) -> CompiledKernel:
        """Compile and load a kernel for use on `stream`, unless that was done before.

        Of the stock collective, which has no code here, find what runs it.

        Collective: no rank returns before all have loaded it.

        Args:
            spec: The kernel.
            layout: Layout of its scratch.
            stream: Where it is to be launched.
            pdl: When by programmatic dependent launch. Where ranks share a GPU, such a kernel may
                have half of the blocks.
        """

    def launch(
        self, kernel: Any, grid: Grid, arguments: AnyArguments | StockArguments, stream: int
    ) -> None:
        """Enqueue a kernel on `stream`.

        Raises:
            DeviceError: It could not be enqueued.
            CollectiveTimeoutError: The stock collective of emulated ranks missed its deadline.
        """

    def bind(
        self, kernel: Any, grid: Grid, arguments: KernelArguments | StockArguments
    ) -> BoundLaunch | None:
        """Prepare a launch that will be made many times; None where nothing is gained by it."""

    def shut(self) -> None:
        """Let nothing that was bound launch from now on."""

    def stream(self, stream: Any, x: Any) -> int:
        """Return the handle of a caller's stream, or of the current one of `x`'s library."""

    def current_stream_of(self, x: Any) -> Callable[[], int]:
        """Return what returns the handle of the current stream of `x`'s library."""

    def operand(self, name: str, array: Any, stream: int, *, writeable: bool) -> Operand:
        """Check one array and describe it."""

    def empty_like(self, x: Any, stream: int) -> Any:
        """Allocate an array like `x` for use on `stream`, in the library that `x` is of."""

    def why_no_new_array(self, x: Any) -> str | None:
        """Say why `empty_like` can't make an array like `x`; None where it can."""

    def symmetric_array(
        self, memory: Any, shape: tuple[int, ...], dtype: np.dtype[Any]
    ) -> SymmetricArray:
        """Make an array, of the kind that users' libraries take here.

        Args:
            memory: What `allocate_symmetric` of the same runtime returned.
            shape: Extents.
            dtype: Element type.
        """

    def try_stock(self, kernel: Any, staging: Memory, part_nbytes: int) -> None:
        """Make first calls of the stock collective, so that it can be captured. Collective.

        Args:
            kernel: What `compile` returned for it.
            staging: Its memory.
            part_nbytes: Bytes of a part, and of its place there.
        """

    def why_no_stock(self) -> str | None:
        """Say why there is no stock collective of these ranks; None where there is one.

        The same on all ranks.
        """

    def why_no_multicast(self) -> str | None:
        """Say why symmetric memory has no multicast address here; None where it has. Collective.

        Where it has, what is allocated from now on has one.
        """

    def describe(self) -> dict[str, str]:
        """Say what kernels run on, with versions."""

    def synchronize(self) -> None:
        """Wait until this rank's kernels have ended.

        Raises:
            DeviceError: One of them, or another kernel of the process, failed.
        """

    def active(self) -> AbstractContextManager[None]:
        """Make what this rank's calls need current, such as its GPU, whatever the caller chose."""

    def close(self) -> None:
        """Return what is this rank's own. Not collective."""

    def abandon(self, *memory: Memory | Control) -> None:
        """Keep what a kernel that waits may still use, for the life of the process."""
