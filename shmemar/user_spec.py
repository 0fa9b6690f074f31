"""Kernels that users write: what their buffers are made for, and what they are compiled for."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from shmemar.errors import ArgumentError, ArgumentTypeError
from shmemar.layout import (
    BLOCK_THREADS,
    LL_BUFFERS,
    MAX_LAUNCH_PACKETS,
    PACKET_NBYTES,
    SENTINEL_BUFFERS,
    WORD_NBYTES,
    LLLayout,
    packet_count,
)
from shmemar.spec import MAX_RANKS, PACKET_PROTOCOLS, KernelSpec, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = [
    "ADDRESSES",
    "AnyKernelSpec",
    "BufferSpec",
    "UserKernelSpec",
    "as_numpy_dtype",
    "describe_code",
    "scratch_nbytes",
]


ELEMENT_KINDS = {
    "i": (1, 2, 4, 8),
    "u": (1, 2, 4, 8),
    "f": (4, 8),
    "c": (8, 16),
}
"""numpy's kinds of scalars that elements are made of, and their bytes."""


def as_numpy_dtype(dtype: Any) -> np.dtype[Any]:
    """Convert to numpy's type.

    Raises:
        ArgumentTypeError: It is none.
    """
    try:
        if dtype is not None:  # which numpy takes for float64
            found: np.dtype[Any] = np.dtype(dtype)
            return found
    except (TypeError, ValueError, SyntaxError) as error:
        raise ArgumentTypeError(f"dtype is {dtype!r}, which numpy does not know.") from error
    raise ArgumentTypeError("dtype is None; expected one that numpy knows.")


@dataclass(frozen=True)
class BufferSpec:
    """What an LLBuffer of a user's kernels is made for.

    Attributes:
        dtype: numpy's name of the scalar type.
        length: Scalars in an element: 1, or more of 4 or 8 bytes; at most 16 bytes together.
        protocol: The protocol.
        nranks: Ranks of the communicator.
        nthreads: The most threads of a launch: whole blocks.
        nslots: Slots of a thread.
        multicast: True where `LLBuffer.bcast` stores to all ranks by a multicast address.
    """

    dtype: str
    length: int
    protocol: Protocol
    nranks: int
    nthreads: int
    nslots: int
    multicast: bool = False

    def __post_init__(self) -> None:
        if self.multicast and self.nranks < 2:
            raise ArgumentError(
                f"multicast is True, and nranks {self.nranks}; expected 2 or more: one rank has "
                "nobody to store to. Use the buffer without multicast."
            )

    @classmethod
    def of(
        cls,
        nranks: int,
        dtype: Any,
        *,
        threads: int,
        slots: int,
        protocol: str | Protocol,
        multicast: bool = False,
    ) -> BufferSpec:
        """Check a user's arguments.

        Raises:
            ArgumentTypeError: `dtype` can't be an element.
            ArgumentError: `threads`, `slots` or `protocol`.
        """
        found = as_numpy_dtype(dtype)
        scalar, shape = found.base, found.shape
        length = shape[0] if shape else 1
        fits = scalar.itemsize in ELEMENT_KINDS.get(scalar.kind, ()) and scalar.isnative
        if shape and (len(shape) > 1 or length < 2 or scalar.itemsize not in (4, 8)):
            fits = False
        if not fits or found.itemsize > PACKET_NBYTES or (shape and scalar.kind == "c"):
            raise ArgumentTypeError(
                f"dtype is {found}; expected an integer of 8 to 64 bits, float32, float64, "
                "complex64 or complex128, or several of 4 or 8 bytes that are at most 16 together, "
                "such as ('float32', 4). Send 16-bit floats as uint16 or uint32."
            )
        for name, value in (("threads", threads), ("slots", slots)):
            if not isinstance(value, int | np.integer) or isinstance(value, bool) or value < 1:
                raise ArgumentError(f"{name} is {value!r}; expected a positive integer.")
        names = {each.value: each for each in PACKET_PROTOCOLS}
        given = protocol.value if isinstance(protocol, Protocol) else protocol
        if not isinstance(given, str) or given not in names:
            raise ArgumentError(f"protocol is {given!r}; expected one of {', '.join(names)}.")
        protocol = names[given]
        if protocol is Protocol.SENTINEL and scalar.kind in "iu":
            raise ArgumentError(
                f"protocol is sentinel, and dtype {scalar.name}, in which every value may be data, "
                "so that none is left to mean an empty slot; expected protocol ll."
            )
        nthreads = packet_count(int(threads), BLOCK_THREADS) * BLOCK_THREADS
        found_spec = cls(scalar.name, length, protocol, nranks, nthreads, int(slots), multicast)
        if found_spec.layout.nslots > MAX_LAUNCH_PACKETS:
            raise ArgumentError(
                f"threads is {threads} and slots {slots}, of {found_spec.npackets} packets each; "
                f"expected at most {MAX_LAUNCH_PACKETS} packets together."
            )
        return found_spec

    @property
    def itemsize(self) -> int:
        """Bytes of an element."""
        return np.dtype(self.dtype).itemsize * self.length

    @property
    def npackets(self) -> int:
        """Packets that carry an element."""
        is_ll = self.protocol is Protocol.LL
        return packet_count(self.itemsize, PACKET_NBYTES // 2 if is_ll else PACKET_NBYTES)

    @property
    def machine_word_nbytes(self) -> int:
        """0 with LL packets; with sentinel ones the width of the words that are compared."""
        if self.protocol is Protocol.LL:
            return 0
        scalar = np.dtype(self.dtype)
        component = scalar.itemsize // (2 if scalar.kind == "c" else 1)
        return max(WORD_NBYTES, component)

    @property
    def like(self) -> Any:
        """An element, whose type counts."""
        zero = np.dtype(self.dtype).type(0)
        return (zero,) * self.length if self.length > 1 else zero

    @property
    def layout(self) -> LLLayout:
        """Layout of the region."""
        nbuffers = LL_BUFFERS if self.protocol is Protocol.LL else SENTINEL_BUFFERS
        return LLLayout(self.nranks, self.nthreads * self.nslots * self.npackets, nbuffers)

    @property
    def name(self) -> str:
        """Name in messages, such as ``float32x2/ll``."""
        element = self.dtype if self.length == 1 else f"{self.dtype}x{self.length}"
        return f"{element}/{self.protocol.value}" + "/multicast" * self.multicast


def scratch_nbytes(
    nranks: int, dtype: Any, *, threads: int, slots: int = 1, protocol: str | Protocol = "ll"
) -> int:
    """Bytes of symmetric memory that `Communicator.ll_buffer` takes on each rank.

    Args:
        nranks: Ranks of the communicator.
        dtype: As of `Communicator.ll_buffer`.
        threads: Likewise.
        slots: Likewise.
        protocol: Likewise.

    Raises:
        ArgumentTypeError: `dtype` can't be an element.
        ArgumentError: The other arguments.
    """
    if not 1 <= nranks <= MAX_RANKS:
        raise ArgumentError(f"nranks is {nranks}; expected 1 to {MAX_RANKS}.")
    spec = BufferSpec.of(nranks, dtype, threads=threads, slots=slots, protocol=protocol)
    return spec.layout.nbytes


ADDRESSES = "addresses"
"""A tuple of an address on each rank, among `UserKernelSpec.argument_types`."""


@dataclass(frozen=True)
class UserKernelSpec:
    """A user's kernel for one buffer and one kind of arguments.

    Attributes:
        function: The function.
        buffer: Its buffer.
        argument_types: numba's names of the types of its own arguments, ``[:]`` behind for arrays;
            `ADDRESSES` for a symmetric array.
    """

    function: Callable[..., Any]
    buffer: BufferSpec
    argument_types: tuple[str, ...]

    @property
    def nranks(self) -> int:
        """Ranks of the communicator."""
        return self.buffer.nranks

    @property
    def code(self) -> int:
        """A word for failure records, which `describe_code` reads in this process."""
        known = self.name, self.buffer.protocol, self.buffer.nthreads * self.buffer.npackets
        if known not in _user_kernels:
            _user_kernels.append(known)
        return _user_kernels.index(known)

    @property
    def name(self) -> str:
        """Name in error messages: the function's."""
        return str(getattr(self.function, "__name__", "kernel"))

    @property
    def symbol(self) -> str:
        """Name of its machine code."""
        name = re.sub(r"\W", "_", self.name, flags=re.ASCII)
        return f"user_{name}" + "_multicast" * self.buffer.multicast


AnyKernelSpec: TypeAlias = KernelSpec | UserKernelSpec
"""What is compiled and launched."""

_user_kernels: list[tuple[str, Protocol, int]] = []


def describe_code(code: int) -> tuple[str, Protocol, int]:
    """Return what the word of a failure record means.

    Returns:
        The kernel's name, its protocol, and how many of the layout's slots its author calls one.
    """
    if code >> 24:
        spec = KernelSpec.from_code(code)
        return spec.name, spec.protocol, 1
    return _user_kernels[code]
