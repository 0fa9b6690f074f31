"""Kernels compiled for GPUs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from shmemar.device.kernels import build

if TYPE_CHECKING:
    from shmemar.layout import LLLayout
    from shmemar.spec import KernelSpec

__all__ = ["compile_ptx"]


def compile_ptx(
    spec: KernelSpec, layout: LLLayout, *, rank: int, compute_capability: tuple[int, int]
) -> str:
    """Compile a kernel to PTX; no GPU is needed. Its rank is a constant of the code.

    Args:
        spec: The kernel.
        layout: Layout of the scratch.
        rank: The rank that will run it.
        compute_capability: Of the GPU, such as ``(9, 0)``.

    Returns:
        PTX text with one entry, whose parameters are the region's address on each rank and then
        those of the kernel's body up to ``timeout_ns``, each of 64 bits.
    """
    from numba import cuda, types

    from shmemar.device import ptx

    ptx.install()
    body = cuda.jit(device=True)(build(spec, layout))

    def entry(
        peers: tuple[int, ...],
        source: int,
        destination: int,
        ncomponents: int,
        epochs: int,
        broken: int,
        record: int,
        timeout_ns: int,
    ) -> None:
        body(
            peers,
            source,
            destination,
            ncomponents,
            epochs,
            broken,
            record,
            timeout_ns,
            rank,
            cuda.grid(1),
            cuda.gridsize(1),
            cuda.blockDim.x,
        )

    address = types.uint64
    parameters: tuple[Any, ...] = (
        types.UniTuple(address, spec.nranks),
        address,  # source
        address,  # destination
        types.int64,  # ncomponents
        address,  # epochs
        address,  # broken
        address,  # record
        types.uint64,  # timeout_ns
    )
    text, _ = cuda.compile(
        entry, types.void(*parameters), device=False, abi="numba", cc=compute_capability
    )
    return str(text)
