"""What a communicator needs of the place where its kernels run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from shmemar.layout import Grid, LLLayout
    from shmemar.spec import Backend, KernelSpec

__all__ = ["CompiledKernel", "Memory", "Runtime"]

CompiledKernel = Any
"""What `Runtime.compile` makes and `Runtime.launch` takes."""


class Memory(Protocol):
    """Zeroed memory that kernels can reach."""

    @property
    def nbytes(self) -> int:
        """Bytes of each rank."""

    @property
    def addresses(self) -> tuple[int, ...]:
        """Address in this process of each rank's part, in rank order; private memory has one."""

    def free(self) -> None:
        """Return the memory. Of symmetric memory, every rank calls it in the same order."""


class Runtime(Protocol):
    """A place where kernels run: GPUs that share a symmetric heap, or its emulation."""

    @property
    def backend(self) -> Backend:
        """Which one it is."""

    @property
    def is_synchronous(self) -> bool:
        """True when `launch` returns after the kernel has ended."""

    def allocate_symmetric(self, nbytes: int) -> Memory:
        """Allocate zeros on every rank, reachable by all. Collective."""

    def allocate_private(self, nbytes: int) -> Memory:
        """Allocate zeros for this rank's kernels and host."""

    def read_private(self, memory: Memory) -> bytes:
        """Copy private memory to the host, as far as kernels have written it."""

    def compile(self, spec: KernelSpec, layout: LLLayout) -> CompiledKernel:
        """Compile and load a kernel. Collective: no rank returns before all have compiled."""

    def launch(
        self, kernel: CompiledKernel, grid: Grid, arguments: tuple[Any, ...], stream: Any
    ) -> None:
        """Enqueue a kernel on `stream`; arguments are those of its body, up to the rank."""

    def check_stream(self, stream: Any) -> None:
        """Raise an `ArgumentError` when `stream` is not one that kernels can run on."""
