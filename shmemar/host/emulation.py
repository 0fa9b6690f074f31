"""The emulated runtime: kernels compiled by numba for the CPU, one process a rank.

Threads of a rank run one after another, in the same order on every rank. That is enough for kernels
whose waits are for the same thread index on the peers; a kernel that waits for other threads of its
own rank would need them to run at once.

A signal handler of Python's, such as that of Ctrl-C, runs when the kernel has ended, so at the
deadline at the latest; in the stock collective, which is MPI's, at once.

Its times are those of processes taking turns on a CPU and say nothing about a GPU.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache, cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from shmemar.errors import BackendUnavailableError, CollectiveTimeoutError, DeviceError
from shmemar.host.contract import Control
from shmemar.host.cpu_code import generate, load
from shmemar.host.interop import host_operand, no_stream
from shmemar.host.multicast import MulticastFacts, why_no_multicast
from shmemar.host.shared_memory import SharedMemory
from shmemar.host.stock import reduce_views
from shmemar.host.symmetric import HostSymmetricArray, SymmetricArray
from shmemar.host.user_kernels import compiled
from shmemar.layout import FAILURE_DTYPE, WORD_NBYTES
from shmemar.spec import Backend, KernelSpec, Pdl
from shmemar.user_spec import UserKernelSpec

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

    from shmemar.host.bootstrap import Bootstrap
    from shmemar.host.contract import BoundLaunch, CompiledKernel, Memory
    from shmemar.host.interop import Operand
    from shmemar.layout import AnyLayout, Grid
    from shmemar.user_spec import AnyKernelSpec

__all__ = ["EmulatedRuntime"]


@dataclass(frozen=True)
class _PrivateMemory:
    array: np.ndarray[Any, np.dtype[np.uint8]]
    window: int = 0

    @property
    def nbytes(self) -> int:
        return self.array.nbytes

    def view(self, rank: int) -> Any:
        """The bytes."""
        return self.array

    @cached_property
    def addresses(self) -> tuple[int, ...]:
        return (self.array.__array_interface__["data"][0],)

    def free(self) -> None:
        """Nothing to do: the array goes with its last reference."""

    abandon = free


@dataclass(frozen=True)
class _EmulatedKernel:
    run: Callable[..., None]
    max_blocks: int | None = None


class EmulatedRuntime:
    """Ranks are processes of one host that share memory; kernels run on its CPU.

    Collective, as are `allocate_symmetric` and `compile`.

    Raises:
        BackendUnavailableError: The ranks are on different hosts.
    """

    backend = Backend.EMULATED
    is_synchronous = True
    shares_gpu = False

    def __init__(self, bootstrap: Bootstrap, compile_timeout_s: float) -> None:
        """Check that the ranks share memory.

        Args:
            bootstrap: The ranks.
            compile_timeout_s: Deadline for the peers to compile a kernel; 0 for none.
        """
        self._bootstrap = bootstrap
        self._compile_timeout_s = compile_timeout_s
        self._kernels: dict[tuple[AnyKernelSpec, AnyLayout], CompiledKernel] = {}
        if not bootstrap.shares_memory():
            raise BackendUnavailableError(
                "the emulated backend needs all ranks on one host, as they share memory; they are "
                f"on {', '.join(sorted(set(bootstrap.hosts())))}. Start them on one host."
            )

    def allocate_symmetric(self, nbytes: int, word: int, zeroed_nbytes: int = 0) -> Memory:
        """Allocate shared memory. Collective."""
        return SharedMemory(self._bootstrap, nbytes, word, zeroed_nbytes)

    def allocate_private(self, nbytes: int) -> Memory:
        """Allocate memory of this process."""
        return _PrivateMemory(np.zeros(nbytes, np.uint8))

    def allocate_control(self) -> Control:
        """Allocate both in memory of this process."""
        broken = self.allocate_private(WORD_NBYTES)
        record = np.zeros(1, FAILURE_DTYPE)
        address = int(record.__array_interface__["data"][0])
        return Control(broken.addresses[0], address, record.tobytes, broken.free)

    def refuse_capture(self, name: str, stream: int) -> None:
        """Nothing is captured here."""

    def why_no_pdl(self) -> str | None:
        """Nothing is against it, as no launch overlaps another here."""
        return None

    def compile(
        self, spec: AnyKernelSpec, layout: AnyLayout, stream: int, *, pdl: Pdl = Pdl.NEVER
    ) -> CompiledKernel:
        """Compile: rank 0 for all, each rank its own user's. Collective: all can run it then."""
        key = spec, layout
        if key not in self._kernels:
            doing, deadline_s = f"compile {spec.name}", self._compile_timeout_s
            if isinstance(spec, KernelSpec) and not spec.kernel.has_code:
                run = reduce_views(spec, self._bootstrap.allreduce_host)
            elif isinstance(spec, UserKernelSpec):
                run = self._bootstrap.together(lambda: _compile(spec), doing, deadline_s)
            else:
                code = self._bootstrap.from_first(lambda: generate(spec, layout), doing, deadline_s)
                run = self._bootstrap.together(lambda: load(code), f"load {spec.name}", deadline_s)
            self._kernels[key] = _EmulatedKernel(run)
        return self._kernels[key]

    def launch(self, kernel: Any, grid: Grid, arguments: Any, stream: int) -> None:
        """Run the kernel to its end."""
        try:
            kernel.run(arguments, self._bootstrap.rank, grid.nthreads, grid.block_threads)
        except CollectiveTimeoutError:
            raise
        except Exception as error:
            # Of a user's kernel, in the middle of an exchange: its epochs are lost.
            raise DeviceError(f"the kernel raised {type(error).__name__}: {error}.") from error

    def bind(self, kernel: Any, grid: Grid, arguments: Any) -> BoundLaunch | None:
        """Say that nothing is gained."""
        return None

    def shut(self) -> None:
        """Nothing was bound."""

    def current_stream_of(self, x: Any) -> Callable[[], int]:
        """There are none."""
        return lambda: 0

    def stream(self, stream: Any, x: Any) -> int:
        """Refuse any stream: calls run to their end."""
        return no_stream(stream)

    def operand(self, name: str, array: Any, stream: int, *, writeable: bool) -> Operand:
        """Check a numpy array."""
        return host_operand(name, array, writeable=writeable)

    def empty_like(self, x: Any, stream: int) -> Any:
        """Allocate with numpy."""
        return np.empty_like(x)

    def why_no_new_array(self, x: Any) -> str | None:
        """Nothing is against it."""
        return None

    def symmetric_array(
        self, memory: SharedMemory, shape: tuple[int, ...], dtype: np.dtype[Any]
    ) -> SymmetricArray:
        """Make one that is a numpy array."""
        return HostSymmetricArray(memory, shape, dtype, self._bootstrap.rank)

    def try_stock(self, kernel: Any, staging: Memory, part_nbytes: int) -> None:
        """Nothing is loaded at its first call."""

    def why_no_stock(self) -> str | None:
        """There is MPI's."""
        return None

    def why_no_multicast(self) -> str | None:
        """Say that it is for GPUs."""
        return why_no_multicast([MulticastFacts(self.backend)])

    def describe(self) -> dict[str, str]:
        """Say that this is no GPU."""
        return {"times": "CPU times of an emulation; they say nothing about a GPU"}

    def synchronize(self) -> None:
        """Nothing to do: kernels have ended when `launch` returns."""

    def active(self) -> AbstractContextManager[None]:
        """Nothing has to be current."""
        return nullcontext()

    def close(self) -> None:
        """Forget the kernels."""
        self._kernels.clear()

    def abandon(self, *memory: Memory | Control) -> None:
        """Nothing to keep: no kernel runs once `launch` has returned."""


@cache
def _compile(spec: UserKernelSpec) -> Callable[..., None]:
    from numba import njit, types

    from shmemar.device import kernels, native
    from shmemar.device.registry import device

    native.install()
    body = device(kernels.build(spec, spec.buffer.layout))

    def entry(
        arguments: kernels.UserArguments, rank: int, nthreads: int, block_threads: int
    ) -> None:
        for thread in range(nthreads):
            body(arguments, rank, thread, nthreads, block_threads)

    # What it raises has to come out of it, which is beyond what C can call.
    signature = types.void(kernels.numba_type(spec), types.int64, types.int64, types.int64)
    function = compiled(lambda: njit(signature, nogil=True)(entry), spec)
    return lambda arguments, *where: function(arguments.typed(), *where)
