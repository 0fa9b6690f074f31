"""What decides which machine code runs: the kernel, its protocol, and what it is compiled for."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from shmemar.dtypes import DTYPES, DType, ReduceOp, why_unsupported
from shmemar.errors import ArgumentError
from shmemar.layout import (
    ACCUMULATORS,
    LINE_LANES,
    LINE_NBYTES,
    LL_BUFFERS,
    PACKET_NBYTES,
    SENTINEL_BUFFERS,
    WORD_NBYTES,
    LLLayout,
    packet_count,
    share_lines,
)

__all__ = [
    "MAX_RANKS",
    "MULTICAST_CODE",
    "PACKET_PROTOCOLS",
    "PART_RANKS",
    "WIDE_RANKS",
    "Backend",
    "Determinism",
    "Kernel",
    "KernelSpec",
    "Pdl",
    "Protocol",
    "why_impossible",
]

MAX_RANKS = 64
"""A failure record has a bit for each rank."""

WIDE_RANKS, PART_RANKS = 16, 8
"""From so many ranks on they are received in parts of so many: each takes four registers or more.
Parts of 16 would take local memory in a one-shot LL kernel of 16 ranks (CUDA 13.0)."""


class Backend(Enum):
    """Where kernels run, as ``backend=`` and ``SHMEMAR_BACKEND`` name it."""

    AUTO = "auto"
    NVSHMEM = "nvshmem"
    EMULATED = "emulated"


class Determinism(Enum):
    """What a caller may rely on between two runs, as ``determinism=`` names it.

    ``run_to_run``: the same inputs give the same bits. ``bitwise``: also, an element's bits do not
    depend on the size of the message, nor on the kernel that serves it: every kernel combines in
    rank order and rounds alike, and those with sentinel packets, which send one NaN in the place of
    another, are left out. ``not_guaranteed``: kernels whose order of summation varies are admitted
    too. Ranks always agree bit for bit, unless the stock collective is pinned.
    """

    RUN_TO_RUN = "run_to_run"
    BITWISE = "bitwise"
    NOT_GUARANTEED = "not_guaranteed"


class Pdl(Enum):
    """When a kernel is launched programmatically (:mod:`shmemar.device.programmatic`).

    ``BEHIND``: where it is captured into a CUDA graph right behind another one that triggers.
    """

    NEVER = "never"
    BEHIND = "behind a collective"
    ALWAYS = "always"


class Kernel(Enum):
    """Algorithms, as ``SHMEMAR_KERNEL`` names them."""

    ONE_SHOT = "one_shot"
    TWO_SHOT = "two_shot"
    BROADCAST = "broadcast"
    LL128_ATOMIC = "ll128_atomic"
    BARRIER_ONE_SHOT = "barrier_one_shot"
    BARRIER_TWO_SHOT = "barrier_two_shot"
    BARRIER = "barrier"
    STOCK = "stock"

    @property
    def reduces(self) -> bool:
        """True of those that all-reduce, which are the ones to be pinned."""
        return self not in (Kernel.BROADCAST, Kernel.BARRIER)

    @property
    def has_code(self) -> bool:
        """False of the stock collective: NVSHMEM's own, or MPI's where ranks are emulated."""
        return self is not Kernel.STOCK

    @property
    def is_two_shot(self) -> bool:
        """True of those in which each rank reduces a share of the data."""
        return self in (Kernel.TWO_SHOT, Kernel.BARRIER_TWO_SHOT, Kernel.LL128_ATOMIC)

    @property
    def has_barriers(self) -> bool:
        """True of those whose blocks meet those of the peers."""
        return self in (Kernel.BARRIER_ONE_SHOT, Kernel.BARRIER_TWO_SHOT, Kernel.BARRIER)

    @property
    def protocols(self) -> tuple[Protocol, ...]:
        """What it may be combined with, the default first."""
        if self is Kernel.BROADCAST:
            return (Protocol.LL,)
        if self is Kernel.BARRIER:
            return (Protocol.PUSH,)
        if self is Kernel.STOCK:
            return (Protocol.STREAM,)
        if self is Kernel.BARRIER_ONE_SHOT:
            return Protocol.PULL, Protocol.PUSH
        if self is Kernel.BARRIER_TWO_SHOT:
            return Protocol.PUSH, Protocol.PULL
        if self is Kernel.LL128_ATOMIC:
            return (Protocol.SENTINEL,)
        return PACKET_PROTOCOLS

    @property
    def default_protocol(self) -> Protocol:
        """What it is combined with where nothing else is asked for."""
        return self.protocols[0]

    @property
    def is_deterministic(self) -> bool:
        """True of those that give the same bits from run to run, or promise to."""
        return self not in (Kernel.LL128_ATOMIC, Kernel.STOCK)


class Protocol(Enum):
    """How data gets to a reader who knows that it has arrived, as ``SHMEMAR_PROTOCOL`` names it.

    ``ll`` and ``sentinel`` are packets that say so themselves. Between barriers a reader loads data
    from its peers (``pull``), or they store it to the reader (``push``). The stock collective is
    enqueued on a ``stream``, and how it works is its own affair.
    """

    LL = "ll"
    SENTINEL = "sentinel"
    PULL = "pull"
    PUSH = "push"
    STREAM = "stream"


PACKET_PROTOCOLS = (Protocol.LL, Protocol.SENTINEL)
"""Those of kernels without barriers."""


_MARK_BITS = {"float32": 24, "float16": 11, "bfloat16": 8}
"""Bits of a significand: so many ranks can each add a power of two of their own, in any order, and
the sum says who has added."""


_MULTICAST_PROTOCOLS = {
    Kernel.ONE_SHOT: PACKET_PROTOCOLS,
    Kernel.BARRIER_TWO_SHOT: (Protocol.PULL,),
    Kernel.BARRIER: (Protocol.PUSH,),
}
"""Kernels that have a multicast form, and their protocols that have it."""

_SWITCH_TYPES = ("float32", "float16", "bfloat16")
"""Types whose sums can be loaded by a multicast address, 16 bytes at a time."""

MULTICAST_CODE = 1 << 31
"""The bit of `KernelSpec.code` above the number of ranks."""


@dataclass(frozen=True)
class KernelSpec:
    """Everything that changes the code of a kernel, and nothing that changes from call to call.

    Attributes:
        kernel: The algorithm.
        protocol: The protocol.
        dtype: Element type.
        op: Reduction operator.
        nranks: Ranks of the communicator.
        multicast: True of the variant that stores to all ranks, adds to all, or loads the sum of
            all, by a multicast address.
    """

    kernel: Kernel
    protocol: Protocol
    dtype: DType
    op: ReduceOp
    nranks: int
    multicast: bool = False

    def __post_init__(self) -> None:
        if not 1 <= self.nranks <= MAX_RANKS:
            raise ArgumentError(f"nranks is {self.nranks}; expected 1 to {MAX_RANKS}.")
        why = why_unsupported(self.dtype, self.op)
        if why is not None:
            raise ArgumentError(
                f"op is {self.op.value!r}, which {self.dtype.name} does not define ({why})."
            )
        if self.protocol not in self.kernel.protocols:
            raise ArgumentError(self._why_another_protocol())
        if self.multicast:
            self._require_multicast_form()
        if self.kernel is Kernel.LL128_ATOMIC:
            self._require_atomic_additions()
        if self.kernel is Kernel.STOCK:
            self._require_stock_reduction()
        if self.protocol is Protocol.SENTINEL and self.dtype.is_integer:
            raise ArgumentError(
                f"protocol is sentinel, and dtype {self.dtype.name}, in which every value may be "
                "data, so that none is left to mean an empty slot; expected protocol ll. Unset "
                "SHMEMAR_PROTOCOL, or set it to ll."
            )

    def _why_another_protocol(self) -> str:
        why = "whose packets say themselves that they have arrived"
        if self.kernel.has_barriers:
            why = "whose barriers say that data have arrived"
        elif self.kernel is Kernel.BROADCAST:
            why = "which moves every bit as it is"
        elif self.kernel is Kernel.LL128_ATOMIC:
            why = "whose sums are floats"
        elif self.kernel is Kernel.STOCK:
            why = "which is not ours to choose the protocol of"
        expected = " or ".join(each.value for each in self.kernel.protocols)
        others = [each.value for each in Kernel if each.reduces and self.protocol in each.protocols]
        return (
            f"protocol is {self.protocol.value}, and kernel {self.kernel.value}, {why}; expected "
            f"protocol {expected}. Unset SHMEMAR_PROTOCOL, or set it to one of these; "
            f"{self.protocol.value} is for SHMEMAR_KERNEL={' or '.join(others)}."
        )

    def _require_atomic_additions(self) -> None:
        instead = "Use kernel two_shot (SHMEMAR_KERNEL)."
        if self.dtype.name not in _MARK_BITS:
            raise ArgumentError(
                f"dtype is {self.dtype.name}, and kernel ll128_atomic, for which no instruction "
                f"adds 16 bytes of it; expected one of {', '.join(_MARK_BITS)}. {instead}"
            )
        if self.op not in (ReduceOp.SUM, ReduceOp.AVG):
            raise ArgumentError(
                f"op is {self.op.value!r}, and kernel ll128_atomic, which adds; expected sum or "
                f"avg. {instead}"
            )
        if self.nranks > _MARK_BITS[self.dtype.name]:
            raise ArgumentError(
                f"nranks is {self.nranks}, and kernel ll128_atomic, where each rank adds a power "
                f"of two of its own to a {self.dtype.name}; expected at most "
                f"{_MARK_BITS[self.dtype.name]}. {instead}"
            )

    def _require_stock_reduction(self) -> None:
        """Refuse what it has not, or where it would not give what `allreduce` promises."""
        instead = "Use kernel barrier_two_shot (SHMEMAR_KERNEL)."
        is_wide_float = self.dtype.name in ("float32", "float64")
        if not self.dtype.is_integer and not is_wide_float:
            raise ArgumentError(
                f"dtype is {self.dtype.name}, and kernel stock, which rounds 16-bit floats at "
                "every addition and has no complex numbers; expected float32, float64 or an "
                f"integer. {instead}"
            )
        if self.op is not ReduceOp.SUM and (is_wide_float or self.op is ReduceOp.PROD):
            raise ArgumentError(
                f"op is {self.op.value!r}, and kernel stock, which has no prod and no avg, and "
                "does not say what min and max make of NaN and -0; expected sum, or min or max of "
                f"integers. {instead}"
            )

    def _require_multicast_form(self) -> None:
        instead = "Use the kernel without multicast (unset SHMEMAR_MULTICAST)."
        if self.protocol not in _MULTICAST_PROTOCOLS.get(self.kernel, ()):
            forms = [
                f"{kernel.value} with {' or '.join(each.value for each in protocols)}"
                for kernel, protocols in _MULTICAST_PROTOCOLS.items()
            ]
            raise ArgumentError(
                f"multicast is True, and kernel {self.kernel.value} with {self.protocol.value}, "
                f"which has no multicast form; expected one of {', '.join(forms)}. {instead}"
            )
        most = WIDE_RANKS - 1 if self.kernel is Kernel.ONE_SHOT else MAX_RANKS
        if not 2 <= self.nranks <= most:
            raise ArgumentError(
                f"multicast is True, and nranks {self.nranks}; expected 2 to {most} for kernel "
                f"{self.kernel.value}: one rank has nobody to store to, and from {WIDE_RANKS} on "
                f"the lanes of a one-shot team have a part of the ranks each. {instead}"
            )
        if self.kernel is not Kernel.BARRIER_TWO_SHOT:
            return
        if self.dtype.name not in _SWITCH_TYPES:
            raise ArgumentError(
                f"multicast is True, and dtype {self.dtype.name}, which kernel "
                f"{self.kernel.value} has no loaded sum of; expected one of "
                f"{', '.join(_SWITCH_TYPES)}. {instead}"
            )
        if self.op not in (ReduceOp.SUM, ReduceOp.AVG):
            raise ArgumentError(
                f"multicast is True, and op {self.op.value!r}; expected sum or avg for kernel "
                f"{self.kernel.value}, whose loads add. {instead}"
            )

    @property
    def is_deterministic(self) -> bool:
        """True of those that give the same bits from run to run.

        A sum that is loaded by a multicast address is made in an order that nobody is told.
        """
        loads_sums = self.multicast and self.kernel is Kernel.BARRIER_TWO_SHOT
        return self.kernel.is_deterministic and not loads_sums

    @property
    def payload_nbytes(self) -> int:
        """Data bytes in a packet: half of it with LL's flags, else all of it."""
        return PACKET_NBYTES // 2 if self.protocol is Protocol.LL else PACKET_NBYTES

    @property
    def nbuffers(self) -> int:
        """Buffers that a slot's epochs take in turn, of kernels without barriers."""
        return LL_BUFFERS if self.protocol is Protocol.LL else SENTINEL_BUFFERS

    @property
    def nplaces(self) -> int:
        """Places of a barrier kernel for what a pass stages (`shmemar.layout.BarrierLayout`).

        One-shot: two buffers of the own input, or of every rank's. Two-shot: for every rank's share
        of the own input and for the own result, or for what every rank sends of the own share and
        for every rank's result; with multicast for every share of the own input and every result.
        """
        if not self.kernel.has_barriers or not self.kernel.reduces:
            return 0
        if self.protocol is Protocol.PUSH or self.multicast:
            return 2 * self.nranks
        return self.nranks + 1 if self.kernel.is_two_shot else 2

    @property
    def unit_words(self) -> int:
        """Words that are reduced together.

        Two, but for an element whose components can't be reduced apart: the product of complex128.
        """
        whole = self.dtype.is_complex and self.op is ReduceOp.PROD
        return self.dtype.itemsize // WORD_NBYTES if whole else 2

    @property
    def lanes(self) -> int:
        """Lanes of a warp that take the same packets, each to and from a part of the ranks.

        A power of two; 1 where the kernel has threads that work alone.
        """
        if self.kernel is not Kernel.ONE_SHOT or self.nranks < WIDE_RANKS:
            return 1
        return 1 << (packet_count(self.nranks, PART_RANKS) - 1).bit_length()

    @property
    def packets_per_thread(self) -> int:
        """Slots of a thread: as many packets as carry the words that are reduced together."""
        return packet_count(self.unit_words * WORD_NBYTES, self.payload_nbytes)

    def group_count(self, nbytes: int) -> int:
        """Threads, or groups of `lanes`, that a message of `nbytes` keeps busy.

        A thread of a two-shot kernel takes as many packets of each rank's share, and of an LL128
        one 16 bytes of a line of each.
        """
        if self.kernel is Kernel.LL128_ATOMIC:
            lines = share_lines(packet_count(nbytes, LINE_NBYTES), self.nranks, self.line_elements)
            return lines * LINE_LANES
        owners = self.nranks if self.kernel.is_two_shot else 1
        return packet_count(nbytes, self.payload_nbytes * self.packets_per_thread * owners)

    @property
    def accumulators(self) -> int:
        """Accumulators behind the packets."""
        return ACCUMULATORS if self.kernel is Kernel.LL128_ATOMIC else 0

    def fit_layout(self, scratch_nbytes: int) -> LLLayout:
        """Lay out as much as `scratch_nbytes` hold; raises as `LLLayout.fit` does."""
        return LLLayout.fit(self.nranks, scratch_nbytes, self.nbuffers, self.accumulators)

    @property
    def line_elements(self) -> int:
        """Elements in a line."""
        return LINE_NBYTES // self.dtype.itemsize

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
        return word | MULTICAST_CODE * self.multicast

    @classmethod
    def from_code(cls, code: int) -> KernelSpec:
        """Read back what `code` says."""
        kernel, protocol, dtype, op = (code >> shift & 0x3F for shift in (18, 12, 6, 0))
        return cls(
            list(Kernel)[kernel],
            list(Protocol)[protocol],
            list(DTYPES.values())[dtype],
            list(ReduceOp)[op],
            nranks=(code & ~MULTICAST_CODE) >> 24,
            multicast=bool(code & MULTICAST_CODE),
        )

    @property
    def name(self) -> str:
        """Name in logs, tables and error messages, such as ``one_shot_ll_float32_sum_4``."""
        parts = (self.kernel.value, self.protocol.value, self.dtype.name, self.op.value)
        return "_".join((*parts, str(self.nranks))) + "_multicast" * self.multicast

    @property
    def symbol(self) -> str:
        """Name of its machine code."""
        return self.name


def why_impossible(
    kernel: Kernel,
    protocol: Protocol,
    dtype: DType,
    op: ReduceOp,
    nranks: int,
    *,
    multicast: bool = False,
) -> str | None:
    """Say why there is no such kernel; None where there is one."""
    try:
        KernelSpec(kernel, protocol, dtype, op, nranks, multicast)
    except ArgumentError as error:
        return str(error)
    return None
