"""What decides which machine code runs: the kernel, its protocol, and what it is compiled for."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from shmemar.dtypes import DTYPES, DType, ReduceOp, supported_ops
from shmemar.errors import ArgumentError

__all__ = ["MAX_RANKS", "Backend", "Determinism", "Kernel", "KernelSpec", "Protocol"]

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


class Protocol(Enum):
    """How a reader knows that data has arrived, as ``SHMEMAR_PROTOCOL`` names it."""

    LL = "ll"


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
        if self.op not in supported_ops(self.dtype):
            raise ArgumentError(
                f"op is {self.op.value!r}, which {self.dtype.name} does not define."
            )

    @property
    def packets_per_thread(self) -> int:
        """Packets of 8 payload bytes that one thread reduces together.

        Two only where an element's components can't be reduced apart: the product of complex128.
        """
        whole = self.dtype.is_complex and self.op is ReduceOp.PROD
        return 2 if whole and self.dtype.component_nbytes == 8 else 1

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
