"""The stock collective: the all-reduce that the backend itself brings.

Under the nvshmem backend it is NVSHMEM's, on a stream. It reduces symmetric memory, so a message is
copied there and back, in parts as large as half of that memory, and any arrays will do. NVSHMEM may
hand it on to NCCL. Emulated ranks have MPI's.

What it does not have: a deadline on GPUs, where a rank that does not come makes the others wait for
ever; an order of summation that anyone states; the same order on all ranks (where NVSHMEM 3.8 sums
by itself, 4 ranks have not above 4681 elements); one node in a CUDA graph.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from shmemar.errors import DeviceError
from shmemar.host.exact import numpy_dtype
from shmemar.host.launch import copy_on_stream
from shmemar.spec import Pdl

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from shmemar.layout import Grid
    from shmemar.spec import KernelSpec

__all__ = ["NVSHMEM_TYPES", "StockArguments", "StockReduction", "reduce_views"]

NVSHMEM_TYPES = {
    "float16": "half",
    "bfloat16": "bfloat16",
    "float32": "float",
    "float64": "double",
    "int8": "int8",
    "int32": "int32",
    "int64": "int64",
    "uint8": "uint8",
    "uint32": "uint32",
    "uint64": "uint64",
}
"""What NVSHMEM calls the types that it reduces."""


@dataclass(frozen=True)
class StockArguments:
    """What a call of it is passed.

    Attributes:
        staged: Address of the rank's own symmetric memory for the input.
        reduced: The same for the output.
        source: Address of the input.
        destination: Address of the output.
        count: Elements, no more than the symmetric memory holds.
    """

    staged: int
    reduced: int
    source: int
    destination: int
    count: int

    def flat(self) -> list[int]:
        """The values, as those of a kernel's parameters."""
        return [self.staged, self.reduced, self.source, self.destination, self.count]


class StockReduction:
    """NVSHMEM's all-reduce of one type and operator, in the place of a loaded kernel.

    Attributes:
        itemsize: Bytes of an element.
        max_blocks: None: its grid is its own.
        pdl: Never: it is not launched by us.
    """

    max_blocks: int | None = None
    pdl = Pdl.NEVER

    def __init__(self, call: Callable[[int, int, int, int], None], itemsize: int) -> None:
        """Take what enqueues it: ``call(destination, source, count, stream)``."""
        self._call = call
        self.itemsize = itemsize

    def reduce(self, destination: int, source: int, count: int, stream: int) -> None:
        """Enqueue it, from symmetric memory to another one.

        Not in place: with 4 ranks NVSHMEM 3.8 gives wrong sums then.

        Raises:
            DeviceError: It was refused.
        """
        try:
            self._call(destination, source, count, stream)
        except Exception as error:
            raise DeviceError(
                f"NVSHMEM refused its all-reduce ({type(error).__name__}: {error})."
            ) from error

    def launch(
        self, grid: Grid, values: Sequence[int], stream: int, *, is_programmatic: bool = False
    ) -> None:
        """Enqueue copy, all-reduce and copy; as `CudaKernel.launch`.

        Raises:
            DeviceError: One of them was refused.
        """
        staged, reduced, source, destination, count = values
        copy_on_stream(staged, source, count * self.itemsize, stream)
        self.reduce(reduced, staged, count, stream)
        copy_on_stream(destination, reduced, count * self.itemsize, stream)


def reduce_views(spec: KernelSpec, reduce: Callable[[Any, Any, str], None]) -> Callable[..., None]:
    """Return what runs it in the place of an emulated kernel.

    Args:
        spec: The type and the operator.
        reduce: ``reduce(x, out, op)`` reduces numpy arrays over all ranks.
    """
    dtype = numpy_dtype(spec.dtype)

    def run(arguments: StockArguments, *_: int) -> None:
        x, out = (
            _view(address, arguments.count, dtype)
            for address in (arguments.source, arguments.destination)
        )
        reduce(x, out, spec.op.value)

    return run


def _view(address: int, count: int, dtype: np.dtype[Any]) -> Any:
    raw = (ctypes.c_uint8 * (count * dtype.itemsize)).from_address(address)
    return np.ctypeslib.as_array(raw).view(dtype)
