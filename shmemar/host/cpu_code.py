"""Kernels as machine code of the CPU, which one rank compiles for all ranks of its host.

numba takes seconds for a kernel, LLVM a tenth of a second for the code that comes out of it, which
is therefore kept on disk, too (:mod:`shmemar.host.code_cache`). Each kernel lives in an execution
engine of its own: numba numbers the functions of a process and names their symbols by that, so in
its own engine code of another process can take the place of another kernel's that got the same
number (with numba 0.68.1 a product came out as a sum).
"""

from __future__ import annotations

import ctypes
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from shmemar.host.code_cache import kept_ir

if TYPE_CHECKING:
    from collections.abc import Callable

    from shmemar.device.kernels import KernelArguments
    from shmemar.layout import AnyLayout
    from shmemar.spec import KernelSpec

__all__ = ["CpuCode", "generate", "load"]


class CpuCode(NamedTuple):
    """A compiled kernel, for any process on this host.

    Attributes:
        symbol: Name of the function ``void(arguments*, rank, nthreads, block_threads, done*)``,
            which sets ``*done`` to 1 when it comes to its end.
        ir: LLVM's intermediate representation, optimised.
    """

    symbol: str
    ir: str


@cache
def generate(spec: KernelSpec, layout: AnyLayout) -> CpuCode:
    """Compile a function that runs a kernel's threads one after another, or find it on disk.

    Args:
        spec: The kernel.
        layout: Layout of its scratch.

    Warns:
        RuntimeWarning: It could not be kept.
    """
    text = kept_ir((spec, layout), lambda: "\n".join(_compile(spec, layout)))
    symbol, _, ir = text.partition("\n")
    return CpuCode(symbol, ir)


def _compile(spec: KernelSpec, layout: AnyLayout) -> CpuCode:
    from numba import cfunc, types

    from shmemar.device import kernels, native
    from shmemar.device.registry import device

    native.install()
    body = device(kernels.build(spec, layout))

    def entry(
        arguments: list[KernelArguments],
        rank: int,
        nthreads: int,
        block_threads: int,
        done: list[int],
    ) -> None:
        for thread in range(nthreads):
            body(arguments[0], rank, thread, nthreads, block_threads)
        done[0] = 1

    passed, number = types.CPointer(kernels.numba_type(spec)), types.int64
    signature = types.void(passed, number, number, number, types.CPointer(number))
    compiled = cfunc(signature)(entry)
    return CpuCode(compiled.native_name, compiled.inspect_llvm())


@cache
def load(code: CpuCode) -> Callable[[KernelArguments, int, int, int], None]:
    """Return ``run(arguments, rank, nthreads, block_threads)``, which lets go of Python's lock.

    It raises MemoryError where the kernel did not come to its end: it has nothing else to raise.
    """
    from llvmlite import binding

    _start_numba()
    machine = binding.Target.from_default_triple().create_target_machine(
        cpu=binding.get_host_cpu_name(), features=binding.get_host_cpu_features().flatten()
    )
    engine = binding.create_mcjit_compiler(binding.parse_assembly(code.ir), machine)
    engine.finalize_object()
    prototype = ctypes.CFUNCTYPE(None, ctypes.c_void_p, *[ctypes.c_int64] * 3, ctypes.c_void_p)
    function = prototype(engine.get_function_address(code.symbol))

    def run(arguments: KernelArguments, rank: int, nthreads: int, block_threads: int) -> None:
        words: Any = np.array(arguments.flat(), np.uint64)
        done = ctypes.c_int64(0)
        function(words.ctypes.data, rank, nthreads, block_threads, ctypes.addressof(done))
        if not done.value:
            # numba can't let an exception out of what C may call; it prints it.
            raise MemoryError("the kernel ended early; what numba printed says why")

    run.engine = engine  # type: ignore[attr-defined] # which owns the code
    return run


@cache
def _start_numba() -> None:
    """Start numba's runtime, which its code calls: the first compilation does."""
    from numba import njit

    njit("void()")(lambda: None)
