"""Kernels that users write: their buffers, and their arguments as launches take them."""

from __future__ import annotations

from dataclasses import dataclass
from dis import get_instructions
from types import CodeType, FunctionType
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar
from weakref import WeakKeyDictionary

import numpy as np

from shmemar.device.meetings import why_copied
from shmemar.errors import ArgumentError, ArgumentTypeError
from shmemar.host.symmetric import SymmetricArray
from shmemar.layout import BLOCK_THREADS, Grid, packet_count
from shmemar.user_spec import ADDRESSES, UserKernelSpec

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from shmemar.host.interop import Operand
    from shmemar.host.scratch import Scratch
    from shmemar.user_spec import AnyKernelSpec, BufferSpec

__all__ = [
    "LLScratch",
    "as_scalar",
    "check_function",
    "check_kernel",
    "compiled",
    "first_array",
    "grid_of",
    "leaves_of",
    "type_of",
    "view_of",
]

T = TypeVar("T")

Taken: TypeAlias = "Operand | SymmetricArray | np.int64 | np.float64"
"""An argument, checked."""

_BITS = {"float16": "uint16", "bfloat16": "uint16"}
"""Types that kernels see as the bits they are, because numba's compilers lack them on one side."""


@dataclass(frozen=True, eq=False)
class LLScratch:
    """Symmetric memory behind the `LLBuffer` of a user's kernels. Made by `Communicator.ll_buffer`.

    It lives as long as the communicator.

    Attributes:
        spec: What it was made for.
        scratch: Region, empty, and epoch words.
    """

    spec: BufferSpec
    scratch: Scratch

    @property
    def dtype(self) -> np.dtype[Any]:
        """Numpy's type of an element; of several scalars a subarray type."""
        scalar = np.dtype(self.spec.dtype)
        return scalar if self.spec.length == 1 else np.dtype((scalar, (self.spec.length,)))

    @property
    def threads(self) -> int:
        """The most threads of a launch."""
        return self.spec.nthreads

    @property
    def slots(self) -> int:
        """Slots of a thread."""
        return self.spec.nslots

    @property
    def nbytes(self) -> int:
        """Bytes of symmetric memory on each rank."""
        return self.spec.layout.nbytes

    def __repr__(self) -> str:
        """Element, protocol and extents."""
        return (
            f"<shmemar.LLScratch {self.spec.name}, {self.threads} threads x {self.slots} slots, "
            f"{self.nbytes} bytes>"
        )


def check_kernel(kernel: Any, buffer: Any, known: Sequence[LLScratch]) -> None:
    """Check what is launched on what.

    Raises:
        ArgumentTypeError: `kernel` is not a function, or `buffer` no LLScratch.
        ArgumentError: `buffer` is another communicator's, or `kernel` raises.
    """
    check_function(kernel)
    if not isinstance(buffer, LLScratch):
        raise ArgumentTypeError(
            f"buffer is {type(buffer).__name__}; expected what ll_buffer() of this communicator "
            "returned."
        )
    if not any(buffer is each for each in known):
        raise ArgumentError(
            "buffer is another communicator's; expected one of this communicator's ll_buffer()."
        )


def check_function(kernel: Any) -> None:
    """Check that a user's kernel is a function that numba may compile, once for its code.

    What it calls is looked at then; other functions of these names later are not.

    Raises:
        ArgumentTypeError: It is not a function.
        ArgumentError: It raises, or Python has copied a call at which threads meet.
    """
    if not isinstance(kernel, FunctionType):
        raise ArgumentTypeError(
            f"kernel is {type(kernel).__name__}; expected a plain Python function "
            "kernel(ll, thread, nthreads, *arguments), not yet compiled."
        )
    code = kernel.__code__
    if _checked.get(kernel) is code:
        return
    if _raises(code):
        raise ArgumentError(
            f"kernel {kernel.__name__} has a raise or an assert; expected none, as a GPU would end "
            "the thread in the middle of its exchange, and nobody would hear of it."
        )
    why = why_copied(kernel)
    if why is not None:
        raise ArgumentError(f"kernel {kernel.__name__} can't be compiled: {why}.")
    _checked[kernel] = code


_checked: WeakKeyDictionary[FunctionType, CodeType] = WeakKeyDictionary()
"""The code of functions in which nothing was found; looking takes as long as all of a launch."""


def _raises(code: CodeType) -> bool:
    inner = (each for each in code.co_consts if isinstance(each, CodeType))
    raising = any(each.opname == "RAISE_VARARGS" for each in get_instructions(code))
    return raising or any(map(_raises, inner))


def grid_of(threads: Any, buffer: BufferSpec, max_blocks: int | None) -> Grid:
    """Choose the grid of a launch, of whole blocks: the same on all ranks.

    Raises:
        ArgumentError: `threads` is not a number of threads that `buffer` has.
    """
    wanted = buffer.nthreads if threads is None else threads
    is_integer = isinstance(wanted, int | np.integer) and not isinstance(wanted, bool)
    if not is_integer or not 1 <= wanted <= buffer.nthreads:
        raise ArgumentError(
            f"threads is {threads!r}; expected 1 to {buffer.nthreads}, those of the buffer. Make "
            "one for more."
        )
    blocks = packet_count(int(wanted), BLOCK_THREADS)
    return Grid(min(blocks, max_blocks or blocks), BLOCK_THREADS)


def first_array(arguments: Sequence[Any]) -> Any:
    """Return the argument whose library's current stream a launch is for; None for none.

    The first array of a user's; else of a symmetric one what the user gets of it.
    """
    arrays = [a for a in arguments if hasattr(a, "dtype") and not isinstance(a, np.generic)]
    for array in arrays:
        if not isinstance(array, SymmetricArray):
            return array
    return arrays[0].array if arrays else None


def as_scalar(name: str, value: Any) -> np.int64 | np.float64 | None:
    """Convert a Python or numpy number to what kernels take; None for anything else.

    Raises:
        ArgumentError: An integer of more than 64 bits.
        ArgumentTypeError: A complex number.
    """
    if isinstance(value, bool | np.bool_ | int | np.integer):
        if not -(1 << 63) <= int(value) < 1 << 63:
            raise ArgumentError(f"{name} is {value}; expected an integer of 64 bits.")
        return np.int64(value)
    if isinstance(value, float | np.floating):
        return np.float64(value)
    if isinstance(value, complex | np.complexfloating):
        raise ArgumentTypeError(
            f"{name} is {type(value).__name__}; expected an array, an integer or a float. Put it "
            "into an array of one element."
        )
    return None


def type_of(argument: Taken) -> str:
    """Name the type that a kernel sees, as `UserKernelSpec.argument_types` does."""
    if isinstance(argument, SymmetricArray):
        return ADDRESSES
    if isinstance(argument, np.number):
        return argument.dtype.name
    return f"{_BITS.get(argument.dtype.name, argument.dtype.name)}[:]"


def view_of(array: Any) -> Any:
    """Return an argument as kernels on the CPU see it: arrays of one dimension."""
    if isinstance(array, SymmetricArray):
        return tuple(map(np.int64, array.addresses))
    if not isinstance(array, np.ndarray):
        return array
    flat = array.reshape(-1)
    return flat.view(np.uint16) if flat.dtype.name in _BITS else flat


def leaves_of(argument: Taken) -> list[int]:
    """Take an argument apart into the 64-bit parameters of a GPU's kernel.

    Of an array, in numba's order: owner, parent, elements, bytes of one, address, shape, strides.
    """
    if isinstance(argument, np.number):
        return [int(np.array(argument).view(np.uint64))]
    if isinstance(argument, SymmetricArray):
        return list(argument.addresses)
    itemsize = argument.dtype.itemsize
    return [0, 0, argument.count, itemsize, argument.address, argument.count, itemsize]


def compiled(action: Callable[[], T], spec: AnyKernelSpec) -> T:
    """Run what compiles a kernel; numba's errors of a user's become the user's.

    Raises:
        ArgumentError: numba could not compile the user's kernel.
    """
    from numba.core.errors import NumbaError

    try:
        return action()
    except NumbaError as error:
        if not isinstance(spec, UserKernelSpec):
            raise
        raise ArgumentError(
            f"kernel {spec.name} could not be compiled; expected what numba can, over "
            f"LLBuffer's methods: {error}"
        ) from error
