"""Kernels as machine code of the CPU, which one rank compiles for all ranks of its host.

numba takes seconds for a kernel, LLVM a tenth of a second for the code that comes out of it. Each
kernel lives in an execution engine of its own: numba numbers the functions of a process and names
their symbols by that, so in its own engine code of another process can take the place of another
kernel's that got the same number (with numba 0.68.1 a product came out as a sum).
"""

from __future__ import annotations

import ctypes
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable

    from shmemar.device.kernels import KernelArguments
    from shmemar.layout import AnyLayout
    from shmemar.spec import KernelSpec

__all__ = ["CpuCode", "generate", "load"]


class CpuCode(NamedTuple):
    """A compiled kernel, for any process on this host.

    Attributes:
        symbol: Name of the function ``void(arguments*, rank, nthreads, block_threads)``.
        ir: LLVM's intermediate representation, optimised.
    """

    symbol: str
    ir: str


@cache
def generate(spec: KernelSpec, layout: AnyLayout) -> CpuCode:
    """Compile with numba a function that runs a kernel's threads one after another.

    Args:
        spec: The kernel.
        layout: Layout of its scratch.
    """
    from numba import cfunc, types

    from shmemar.device import kernels, native
    from shmemar.device.registry import device

    native.install()
    body = device(kernels.build(spec, layout))

    def entry(
        arguments: list[KernelArguments], rank: int, nthreads: int, block_threads: int
    ) -> None:
        for thread in range(nthreads):
            body(arguments[0], rank, thread, nthreads, block_threads)

    parameters = types.CPointer(kernels.numba_type(spec)), types.int64, types.int64, types.int64
    compiled = cfunc(types.void(*parameters))(entry)
    return CpuCode(compiled.native_name, compiled.inspect_llvm())


@cache
def load(code: CpuCode) -> Callable[[KernelArguments, int, int, int], None]:
    """Return ``run(arguments, rank, nthreads, block_threads)``, which lets go of Python's lock."""
    from llvmlite import binding

    _start_numba()
    machine = binding.Target.from_default_triple().create_target_machine(
        cpu=binding.get_host_cpu_name(), features=binding.get_host_cpu_features().flatten()
    )
    engine = binding.create_mcjit_compiler(binding.parse_assembly(code.ir), machine)
    engine.finalize_object()
    prototype = ctypes.CFUNCTYPE(None, ctypes.c_void_p, *[ctypes.c_int64] * 3)
    function = prototype(engine.get_function_address(code.symbol))

    def run(arguments: KernelArguments, rank: int, nthreads: int, block_threads: int) -> None:
        words: Any = np.array(arguments.flat(), np.uint64)
        function(words.ctypes.data, rank, nthreads, block_threads)

    run.engine = engine  # type: ignore[attr-defined] # which owns the code
    return run


@cache
def _start_numba() -> None:
    """Start numba's runtime, which its code calls: the first compilation does."""
    from numba import njit

    njit("void()")(lambda: None)
