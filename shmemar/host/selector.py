"""Which kernel serves a call: a pure function of what all ranks have agreed on.

Two layers: what is admissible, and which of that is fastest. Nothing here looks at the environment,
a clock, a device or an array, so ranks that agree on `Terms` choose alike.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from shmemar.errors import ArgumentError, ConfigurationError
from shmemar.host.scratch import layout_for
from shmemar.layout import DEFAULT_SCRATCH_NBYTES, DEFAULT_TWO_SHOT_SCRATCH_NBYTES
from shmemar.spec import Determinism, Kernel, KernelSpec, Protocol, why_impossible

if TYPE_CHECKING:
    from collections.abc import Iterator

    from shmemar.dtypes import DType, ReduceOp

__all__ = [
    "CANDIDATES",
    "Band",
    "Candidate",
    "Choice",
    "Table",
    "Terms",
    "refusals",
    "select",
    "with_multicast",
]


@dataclass(frozen=True)
class Candidate:
    """An all-reduce kernel with its protocol, and how a table has it.

    Attributes:
        kernel: The algorithm.
        protocol: The protocol.
        max_blocks: Cap on the blocks of its launches; None for none but residency.
        latency_us: What was measured in the band; None where nothing was.
    """

    kernel: Kernel
    protocol: Protocol
    max_blocks: int | None = field(default=None, compare=False)
    latency_us: float | None = field(default=None, compare=False)

    @property
    def name(self) -> str:
        """Name in tables and logs, such as ``one_shot/ll``."""
        return f"{self.kernel.value}/{self.protocol.value}"


CANDIDATES: tuple[Candidate, ...] = tuple(
    Candidate(kernel, protocol)
    for kernel in Kernel
    if kernel.reduces
    for protocol in kernel.protocols
)
"""All of them. This is also their order where no table says another one: the first serves any
type, operator and size, and every kernel begins with its default protocol."""


@dataclass(frozen=True)
class Band:
    """A range of message sizes.

    Attributes:
        up_to: The largest message in bytes; None for any.
        candidates: Fastest first; those that are missing come behind, in the order of `CANDIDATES`.
    """

    up_to: int | None
    candidates: tuple[Candidate, ...]


@dataclass(frozen=True)
class Table:
    """What is fastest at which size.

    Attributes:
        origin: Where that is known from.
        bands: By rising size; the last one has no end.
    """

    origin: str
    bands: tuple[Band, ...]

    def __post_init__(self) -> None:
        ends = [band.up_to for band in self.bands]
        if not ends or ends[-1] is not None or None in ends[:-1]:
            raise ArgumentError(f"bands end at {ends}; expected the last one, alone, at None.")
        inner = [end for end in ends if end is not None]
        if any(end < 1 for end in inner) or sorted(set(inner)) != inner:
            raise ArgumentError(f"bands end at {inner} bytes; expected rising sizes of 1 or more.")

    def band(self, nbytes: int) -> Band:
        """The band of a message of `nbytes`."""
        for band in self.bands:
            if band.up_to is None or nbytes <= band.up_to:
                return band
        raise AssertionError("the last band has no end")


@dataclass(frozen=True)
class Terms:
    """What the ranks agreed on at start-up, as far as the choice depends on it.

    Attributes:
        nranks: Ranks of the communicator.
        table: What is fastest.
        determinism: What the caller relies on.
        kernel: The pinned kernel (``SHMEMAR_KERNEL``).
        protocol: The pinned protocol (``SHMEMAR_PROTOCOL``).
        multicast: Whether kernels may use NVLink multicast.
        why_no_lines: Why 128-byte lines can't be relied on; None where they can.
        why_no_stock: Why there is no stock collective of these ranks; None where there is one.
        scratch_nbytes: Symmetric scratch of a kernel on each rank, in bytes.
        two_shot_scratch_nbytes: The same of two-shot kernels.
    """

    nranks: int
    table: Table
    determinism: Determinism = Determinism.RUN_TO_RUN
    kernel: Kernel | None = None
    protocol: Protocol | None = None
    multicast: bool = False
    why_no_lines: str | None = None
    why_no_stock: str | None = None
    scratch_nbytes: int = DEFAULT_SCRATCH_NBYTES
    two_shot_scratch_nbytes: int = DEFAULT_TWO_SHOT_SCRATCH_NBYTES


@dataclass(frozen=True)
class Choice:
    """What serves a call.

    Attributes:
        spec: The kernel.
        candidate: What it was chosen as.
        why: The reason.
    """

    spec: KernelSpec
    candidate: Candidate
    why: str


def select(nbytes: int, dtype: DType, op: ReduceOp, terms: Terms) -> Choice:
    """Choose the kernel of an all-reduce.

    Args:
        nbytes: Bytes of the message, 1 or more.
        dtype: Element type.
        op: Operator, one that the type has.
        terms: What was agreed on.

    Raises:
        ArgumentError: What is pinned can't serve `dtype` and `op`; nothing else does.
    """
    for place, candidate in enumerate(_ranked(nbytes, terms)):
        if _why_not(candidate, dtype, op, terms) is None:
            spec = KernelSpec(candidate.kernel, candidate.protocol, dtype, op, terms.nranks)
            return Choice(with_multicast(spec, terms), candidate, _why(nbytes, place, terms))
    pinned = [c for c in CANDIDATES if _why_not_pinned(c, terms) is None]
    if not pinned:
        raise ArgumentError(
            f"{_why_not_pinned(CANDIDATES[0], terms)}; no kernel fits that. Unset one of them."
        )
    raise ArgumentError(_why_not(pinned[0], dtype, op, terms))


def refusals(nbytes: int, dtype: DType, op: ReduceOp, terms: Terms) -> Iterator[tuple[str, str]]:
    """Yield the name of every kernel that was not chosen, and why; raises as `select` does."""
    chosen = select(nbytes, dtype, op, terms).candidate
    ranked = list(_ranked(nbytes, terms))
    for candidate in ranked:
        if candidate != chosen:
            why = _why_not(candidate, dtype, op, terms)
            yield candidate.name, why or _why_behind(candidate, chosen, nbytes, terms)


def _ranked(nbytes: int, terms: Terms) -> tuple[Candidate, ...]:
    """All candidates, the best first; of a pinned kernel its default protocol."""
    if terms.kernel is not None:
        return CANDIDATES
    known = terms.table.band(nbytes).candidates
    return known + tuple(each for each in CANDIDATES if each not in known)


def _why(nbytes: int, place: int, terms: Terms) -> str:
    if terms.kernel is not None:
        return f"SHMEMAR_KERNEL is {terms.kernel.value}"
    band = terms.table.band(nbytes)
    sizes = "of any larger size" if band.up_to is None else f"of up to {band.up_to} bytes"
    rank = "the first" if place == 0 else f"number {place + 1}, and the first that can be used,"
    listed = rank if place < len(band.candidates) else "behind those that can't be used"
    return f"{listed} for messages {sizes}, as known from {terms.table.origin}"


def _why_behind(candidate: Candidate, chosen: Candidate, nbytes: int, terms: Terms) -> str:
    if terms.kernel is not None:
        return f"{chosen.name} serves all sizes"
    band = terms.table.band(nbytes)
    if candidate not in band.candidates:
        return "not listed for this size"
    listed = band.candidates[band.candidates.index(candidate)]
    if listed.latency_us is None or chosen.latency_us is None:
        return f"listed behind {chosen.name}"
    return f"{listed.latency_us:.2f} us, {chosen.name} {chosen.latency_us:.2f}"


def _why_not_pinned(candidate: Candidate, terms: Terms) -> str | None:
    if terms.kernel not in (None, candidate.kernel):
        return f"SHMEMAR_KERNEL is {terms.kernel.value}"
    if terms.protocol not in (None, candidate.protocol):
        return f"SHMEMAR_PROTOCOL is {terms.protocol.value}"
    return None


def _why_not(candidate: Candidate, dtype: DType, op: ReduceOp, terms: Terms) -> str | None:
    """Say why it may not serve; None where it may."""
    why = _why_not_pinned(candidate, terms)
    if why is not None:
        return why
    varies = not candidate.kernel.is_deterministic
    if varies and terms.determinism is not Determinism.NOT_GUARANTEED:
        return (
            "its order of summation may vary from run to run, and determinism is "
            f"{terms.determinism.value!r}"
        )
    if candidate.kernel is Kernel.STOCK:
        why = _why_no_stock(dtype, terms)
        if why is not None:
            return why
    if candidate.protocol is Protocol.SENTINEL and terms.determinism is Determinism.BITWISE:
        return "its packets put one NaN in the place of another, and determinism is 'bitwise'"
    if candidate.kernel is Kernel.LL128_ATOMIC and terms.why_no_lines is not None:
        return terms.why_no_lines
    try:
        spec = KernelSpec(candidate.kernel, candidate.protocol, dtype, op, terms.nranks)
        layout_for(spec, terms)
    except (ArgumentError, ConfigurationError) as error:
        return str(error)
    return None


def _why_no_stock(dtype: DType, terms: Terms) -> str | None:
    if terms.why_no_stock is not None:
        return terms.why_no_stock
    # Two terms have one sum; of more, each rank may have its own order.
    if terms.kernel is not Kernel.STOCK and terms.nranks > 2 and not dtype.is_integer:
        return (
            f"nothing says that its {terms.nranks} ranks round alike, so of {dtype.name} it serves "
            "only where SHMEMAR_KERNEL pins it"
        )
    return None


def with_multicast(spec: KernelSpec, terms: Terms) -> KernelSpec:
    """The multicast form of a kernel, where it has one that may be used; else the kernel."""
    what = spec.kernel, spec.protocol, spec.dtype, spec.op, spec.nranks
    if terms.multicast and why_impossible(*what, multicast=True) is None:
        form = replace(spec, multicast=True)
        if form.is_deterministic or terms.determinism is Determinism.NOT_GUARANTEED:
            return form
    return spec
