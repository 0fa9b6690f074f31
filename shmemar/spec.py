"""What decides which machine code runs: the kernel, its protocol, and what it is compiled for."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from shmemar.dtypes import DTYPES, DType, ReduceOp, why_unsupported
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

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = [
    "ADDRESSES",
    "MAX_RANKS",
    "AnyKernelSpec",
    "Backend",
    "BufferSpec",
    "Determinism",
    "Kernel",
    "KernelSpec",
    "Protocol",
    "UserKernelSpec",
    "as_numpy_dtype",
    "describe_code",
    "scratch_nbytes",
]

MAX_RANKS = 64
"""A failure record has a bit for each rank."""


class Backend(Enum):
    """Where kernels run, as ``backend=`` and ``SHMEMAR_BACKEND`` name it."""

    AUTO = "auto"
    NVSHMEM = "nvshmem"
    EMULATED = "emulated"


class Determinism(Enum):
    """What a caller may rely on between two runs, as ``determinism=`` names it.

    ``run_to_run``: the same inputs give the same bits. ``bitwise``: also, an element's bits do not
    depend on the size of the message, so one kernel serves all sizes. ``not_guaranteed``: kernels
    whose order of summation varies are admitted too. Ranks always agree bit for bit.
    """

    RUN_TO_RUN = "run_to_run"
    BITWISE = "bitwise"
    NOT_GUARANTEED = "not_guaranteed"


class Kernel(Enum):
    """Algorithms, as ``SHMEMAR_KERNEL`` names them."""

    ONE_SHOT = "one_shot"
    TWO_SHOT = "two_shot"
    BROADCAST = "broadcast"

    @property
    def reduces(self) -> bool:
        """True of those that all-reduce, which are the ones to be pinned."""
        return self is not Kernel.BROADCAST


class Protocol(Enum):
    """How a reader knows that data has arrived, as ``SHMEMAR_PROTOCOL`` names it."""

    LL = "ll"
    SENTINEL = "sentinel"


@dataclass(frozen=True)
class KernelSpec:
    """Everything that changes the code of a kernel, and nothing that changes from call to call.

    Attributes:
        kernel: The algorithm.
        protocol: The protocol.
        dtype: Element type.
        op: Reduction operator.
        nranks: Ranks of the communicator.
    """

    kernel: Kernel
    protocol: Protocol
    dtype: DType
    op: ReduceOp
    nranks: int

    def __post_init__(self) -> None:
        if not 1 <= self.nranks <= MAX_RANKS:
            raise ArgumentError(f"nranks is {self.nranks}; expected 1 to {MAX_RANKS}.")
        why = why_unsupported(self.dtype, self.op)
        if why is not None:
            raise ArgumentError(
                f"op is {self.op.value!r}, which {self.dtype.name} does not define ({why})."
            )
        if self.protocol is Protocol.SENTINEL and not self.kernel.reduces:
            raise ArgumentError(
                f"protocol is sentinel, and kernel {self.kernel.value}, which moves every bit as "
                "it is; expected protocol ll."
            )
        if self.protocol is Protocol.SENTINEL and self.dtype.is_integer:
            raise ArgumentError(
                f"protocol is sentinel, and dtype {self.dtype.name}, in which every value may be "
                "data, so that none is left to mean an empty slot; expected protocol ll. Unset "
                "SHMEMAR_PROTOCOL, or set it to ll."
            )

    @property
    def payload_nbytes(self) -> int:
        """Data bytes in a packet: half of it with LL's flags, all of it with a sentinel."""
        return PACKET_NBYTES // 2 if self.protocol is Protocol.LL else PACKET_NBYTES

    @property
    def nbuffers(self) -> int:
        """Buffers that a slot's epochs take in turn."""
        return LL_BUFFERS if self.protocol is Protocol.LL else SENTINEL_BUFFERS

    @property
    def unit_words(self) -> int:
        """Words that are reduced together.

        Two, but for an element whose components can't be reduced apart: the product of complex128.
        """
        whole = self.dtype.is_complex and self.op is ReduceOp.PROD
        return self.dtype.itemsize // WORD_NBYTES if whole else 2

    @property
    def packets_per_thread(self) -> int:
        """Slots of a thread: as many packets as carry the words that are reduced together."""
        return packet_count(self.unit_words * WORD_NBYTES, self.payload_nbytes)

    def group_count(self, nbytes: int) -> int:
        """Threads that a message of `nbytes` keeps busy.

        A thread of a two-shot kernel takes as many packets of each rank's share.
        """
        owners = self.nranks if self.kernel is Kernel.TWO_SHOT else 1
        return packet_count(nbytes, self.payload_nbytes * self.packets_per_thread * owners)

    @property
    def code(self) -> int:
        """The spec as a word, for failure records; `from_code` reads it."""
        fields = (
            list(Kernel).index(self.kernel),
            list(Protocol).index(self.protocol),
            list(DTYPES).index(self.dtype.name),
            list(ReduceOp).index(self.op),
        )
        word = self.nranks
        for number in fields:
            word = word << 6 | number
        return word

    @classmethod
    def from_code(cls, code: int) -> KernelSpec:
        """Read back what `code` says."""
        kernel, protocol, dtype, op = (code >> shift & 0x3F for shift in (18, 12, 6, 0))
        return cls(
            list(Kernel)[kernel],
            list(Protocol)[protocol],
            list(DTYPES.values())[dtype],
            list(ReduceOp)[op],
            nranks=code >> 24,
        )

    @property
    def name(self) -> str:
        """Name in logs, tables and error messages, such as ``one_shot_ll_float32_sum_4``."""
        parts = (self.kernel.value, self.protocol.value, self.dtype.name, self.op.value)
        return "_".join((*parts, str(self.nranks)))

    @property
    def symbol(self) -> str:
        """Name of its machine code."""
        return self.name


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
    """

    dtype: str
    length: int
    protocol: Protocol
    nranks: int
    nthreads: int
    nslots: int

    @classmethod
    def of(
        cls, nranks: int, dtype: Any, *, threads: int, slots: int, protocol: str | Protocol
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
        try:
            protocol = Protocol(protocol)
        except ValueError:
            names = ", ".join(each.value for each in Protocol)
            raise ArgumentError(f"protocol is {protocol!r}; expected one of {names}.") from None
        if protocol is Protocol.SENTINEL and scalar.kind in "iu":
            raise ArgumentError(
                f"protocol is sentinel, and dtype {scalar.name}, in which every value may be data, "
                "so that none is left to mean an empty slot; expected protocol ll."
            )
        nthreads = packet_count(int(threads), BLOCK_THREADS) * BLOCK_THREADS
        found_spec = cls(scalar.name, length, protocol, nranks, nthreads, int(slots))
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
        return f"{element}/{self.protocol.value}"


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
        return "user_" + re.sub(r"\W", "_", self.name, flags=re.ASCII)


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
