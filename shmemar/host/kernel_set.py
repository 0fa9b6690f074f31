"""The kernels of a communicator: which serves a call, its code, its scratch and its grid."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from shmemar.host.scratch import Scratch, layout_for, make_scratch
from shmemar.host.selector import refusals, select, with_multicast
from shmemar.layout import (
    MAX_LAUNCH_PACKETS,
    BarrierLayout,
    Grid,
    StagingLayout,
    barrier_grid,
    grid_for,
    packet_count,
)
from shmemar.spec import Kernel, KernelSpec, Pdl, Protocol

if TYPE_CHECKING:
    from collections.abc import Iterator

    from shmemar.config import Config
    from shmemar.dtypes import DType, ReduceOp
    from shmemar.host.bootstrap import Bootstrap
    from shmemar.host.contract import CompiledKernel, Runtime
    from shmemar.host.heap import SymmetricHeap
    from shmemar.host.interop import Operand
    from shmemar.host.selector import Choice, Terms
    from shmemar.layout import AnyLayout

__all__ = ["Explanation", "KernelSet", "Prepared", "name_of"]


@dataclass(frozen=True)
class Prepared:
    """What a launch needs.

    Attributes:
        spec: The kernel that runs, without multicast where its region has no multicast address.
        kernel: What it was compiled to.
        scratch: Its scratch.
        max_blocks: Cap on its blocks; None for none.
        pdl: When by programmatic dependent launch.
    """

    spec: KernelSpec
    kernel: CompiledKernel
    scratch: Scratch
    max_blocks: int | None
    pdl: Pdl = Pdl.NEVER

    def grid(self, nbytes: int) -> Grid:
        """The grid of a launch for `nbytes` of a message."""
        return _grid(self.spec, nbytes, self.scratch.layout, self.max_blocks)

    @property
    def part_nbytes(self) -> int:
        """Bytes of a message that one launch takes."""
        return _longest(self.spec, self.scratch.layout)

    def parts(self, source: Operand, destination: Operand) -> Iterator[tuple[Operand, Operand]]:
        """Cut a message into what one launch takes."""
        longest = self.part_nbytes // source.dtype.itemsize
        for start in range(0, source.count, longest):
            yield source.part(start, longest), destination.part(start, longest)


@dataclass(frozen=True)
class Explanation:
    """Which kernel serves a message, and why no other; ``str()`` of it is for people.

    Attributes:
        nbytes: Bytes of the message.
        dtype: Element type.
        op: Operator.
        nranks: Ranks.
        kernel: Kernel and protocol, such as ``one_shot/ll``, with ``/multicast`` in that form.
        why: Why this one.
        blocks: Blocks of its launch. Before the kernel was compiled as many as its scratch allows;
            fewer may be resident. 0 of the stock collective, which has a grid of its own.
        is_compiled: Whether it was.
        block_threads: Threads a block.
        pdl: When by programmatic dependent launch: ``never``, ``behind a collective``, ``always``.
        launches: Launches, one behind the other: more than 1 for messages of gigabytes, or of what
            the stock collective's memory does not hold.
        passes: Times that the busiest thread or block fills its slots.
        scratch_nbytes: Bytes of symmetric memory of its scratch on each rank, all sizes together.
        others: The other kernels' names, and why each was not chosen.
    """

    nbytes: int
    dtype: str
    op: str
    nranks: int
    kernel: str
    why: str
    blocks: int
    is_compiled: bool
    block_threads: int
    pdl: str
    launches: int
    passes: int
    scratch_nbytes: int
    others: tuple[tuple[str, str], ...]

    @property
    def _ranks(self) -> str:
        return f"{self.nranks} rank{'s' * (self.nranks > 1)}"

    def __str__(self) -> str:
        """A few lines."""
        passes = f"{self.passes} pass{'es' * (self.passes > 1)}"
        blocks = f"{self.blocks}" if self.is_compiled else f"at most {self.blocks}"
        grid = f"{blocks} blocks of {self.block_threads} threads, {passes}"
        return "\n".join(
            [
                f"{self.kernel} for {self.nbytes} bytes of {self.dtype}, {self.op}, {self._ranks}",
                f"  why: {self.why}",
                f"  grid: {grid if self.blocks else 'its own'}"
                + f", {self.launches} launches" * (self.launches > 1)
                + f", programmatic dependent launch: {self.pdl}",
                f"  scratch: {self.scratch_nbytes} bytes of symmetric memory on each rank",
                *(f"  not {name}: {why}" for name, why in self.others),
            ]
        )


class KernelSet:
    """Chooses kernels, and keeps what was compiled and allocated for them.

    Attributes:
        terms: What the choice depends on; `use` changes it.
        scratches: What was allocated, by kernel, protocol and multicast.
    """

    def __init__(
        self,
        bootstrap: Bootstrap,
        config: Config,
        heap: SymmetricHeap,
        runtime: Runtime,
        terms: Terms,
    ) -> None:
        """Make an empty set."""
        self.terms = terms
        self._chosen: dict[tuple[int | None, DType, ReduceOp], Choice] = {}
        self.scratches: dict[tuple[Kernel, Protocol, bool], Scratch] = {}
        self._bootstrap = bootstrap
        self._config = config
        self._heap = heap
        self._runtime = runtime
        self._prepared: dict[tuple[KernelSpec, int | None, Pdl], Prepared] = {}

    def use(self, terms: Terms) -> None:
        """Choose on other terms from now on."""
        self.terms = terms
        self._chosen.clear()

    def choose(self, nbytes: int, dtype: DType, op: ReduceOp) -> Choice:
        """Choose as :func:`shmemar.host.selector.select` on `terms`, once a band of sizes."""
        terms = self.terms
        up_to = None if terms.kernel is not None else terms.table.band(nbytes).up_to
        key = up_to, dtype, op
        if key not in self._chosen:
            self._chosen[key] = select(nbytes, dtype, op, terms)
        return self._chosen[key]

    def choices(self, dtype: DType, op: ReduceOp, most_nbytes: int) -> list[Choice]:
        """All choices for messages of up to so many bytes."""
        found: dict[KernelSpec, Choice] = {}
        for band in self.terms.table.bands:
            nbytes = most_nbytes if band.up_to is None else min(band.up_to, most_nbytes)
            choice = self.choose(nbytes, dtype, op)
            found.setdefault(choice.spec, choice)
            if nbytes == most_nbytes:
                break
        return list(found.values())

    def with_multicast(self, spec: KernelSpec) -> KernelSpec:
        """The multicast form of a kernel that is no all-reduce, where it may be used."""
        return with_multicast(spec, self.terms)

    def pdl(self, *, wanted: bool | None = None) -> Pdl:
        """When kernels are launched programmatically; None for what the configuration says.

        That is, where it says nothing, behind a collective in a graph: there it always pays. But
        not where ranks share a GPU: a kernel that triggers lets whatever is launched so behind it
        in, a user's kernel of any size, too, and that would wait in the place of a peer's blocks.
        """
        wanted = self._config.pdl if wanted is None else wanted
        if self._runtime.is_synchronous or wanted is False:
            return Pdl.NEVER
        if wanted:
            return Pdl.ALWAYS
        pays = self._runtime.why_no_pdl() is None and not self._runtime.shares_gpu
        return Pdl.BEHIND if pays else Pdl.NEVER

    def prepare(
        self,
        spec: KernelSpec,
        stream: int,
        max_blocks: int | None = None,
        *,
        pdl: bool | None = None,
    ) -> Prepared:
        """Compile a kernel and allocate its scratch. Collective when it is asked for first.

        Args:
            spec: The kernel.
            stream: Where it is to be launched.
            max_blocks: Cap on the blocks, beside those of the configuration and of residency.
            pdl: As of `KernelSet.pdl`.
        """
        when = self.pdl(wanted=pdl)
        if not spec.kernel.has_code:
            when, max_blocks = Pdl.NEVER, None
        key = spec, max_blocks, when
        known = self._prepared.get(key)
        if known is not None:
            return known
        if _scratch_key(spec) not in self.scratches:
            self._runtime.refuse_capture(spec.name, stream)
        if spec.multicast and not self.scratch_for(spec).region.window:
            plain = self.prepare(replace(spec, multicast=False), stream, max_blocks, pdl=pdl)
            self._prepared[key] = plain
            return plain
        kernel = self._runtime.compile(spec, layout_for(spec, self._config), stream, pdl=when)
        if not spec.kernel.has_code:
            part_nbytes = _longest(spec, layout_for(spec, self._config))
            self._runtime.try_stock(kernel, self.scratch_for(spec).region, part_nbytes)
        most = self.max_blocks(kernel, max_blocks)
        prepared = Prepared(spec, kernel, self.scratch_for(spec), most, when)
        self._prepared[key] = prepared
        return prepared

    def max_blocks(self, kernel: CompiledKernel, *others: int | None) -> int | None:
        """The least of all caps on the blocks of a kernel; None where there is none."""
        return self._least(kernel.max_blocks, *others)

    def _least(self, *caps: int | None) -> int | None:
        return min((c for c in (self._config.max_blocks, *caps) if c is not None), default=None)

    def scratch_for(self, spec: KernelSpec) -> Scratch:
        """Return the scratch of a kernel and protocol. Collective when it is asked for first."""
        key = _scratch_key(spec)
        if key not in self.scratches:
            self.scratches[key] = make_scratch(
                layout_for(spec, self._config),
                spec.protocol,
                self._bootstrap,
                self._heap,
                self._runtime,
            )
        return self.scratches[key]

    def explain(self, nbytes: int, dtype: DType, op: ReduceOp) -> Explanation:
        """Say what `choose` chooses, and why nothing else."""
        choice = self.choose(nbytes, dtype, op)
        spec, most = choice.spec, self._least(choice.candidate.max_blocks)
        when, cap = self.pdl(), choice.candidate.max_blocks
        if not spec.kernel.has_code:
            when, cap = Pdl.NEVER, None
        prepared = self._prepared.get((spec, cap, when))
        if prepared is not None:
            spec, most = prepared.spec, prepared.max_blocks
        layout = layout_for(spec, self._config)
        longest = _longest(spec, layout)
        grid = _grid(spec, min(nbytes, longest), layout, most)
        return Explanation(
            nbytes=nbytes,
            dtype=dtype.name,
            op=op.value,
            nranks=spec.nranks,
            kernel=name_of(spec),
            why=choice.why,
            blocks=grid.blocks,
            is_compiled=prepared is not None,
            block_threads=grid.block_threads,
            pdl=when.value,
            launches=packet_count(nbytes, longest),
            passes=_passes(spec, min(nbytes, longest), grid, layout),
            scratch_nbytes=layout.nbytes,
            others=tuple(refusals(nbytes, dtype, op, self.terms)),
        )


def name_of(spec: KernelSpec) -> str:
    """Kernel and protocol as tables have them, such as ``one_shot/ll``."""
    return f"{spec.kernel.value}/{spec.protocol.value}" + "/multicast" * spec.multicast


def _longest(spec: KernelSpec, layout: AnyLayout) -> int:
    """Bytes of a message that one launch takes."""
    if isinstance(layout, StagingLayout):
        return layout.part_nbytes
    return MAX_LAUNCH_PACKETS * spec.payload_nbytes


def _grid(spec: KernelSpec, nbytes: int, layout: AnyLayout, max_blocks: int | None) -> Grid:
    if isinstance(layout, StagingLayout):
        return Grid(0, 0)
    ngroups = spec.group_count(nbytes)
    if isinstance(layout, BarrierLayout):
        return barrier_grid(ngroups, layout, max_blocks=max_blocks)
    return grid_for(
        ngroups,
        layout,
        packets_per_thread=spec.packets_per_thread,
        lanes=spec.lanes,
        max_blocks=max_blocks,
    )


def _passes(spec: KernelSpec, nbytes: int, grid: Grid, layout: AnyLayout) -> int:
    if isinstance(layout, StagingLayout):
        return 1
    ngroups = spec.group_count(nbytes)
    if isinstance(layout, BarrierLayout):
        return packet_count(ngroups, grid.blocks * layout.block_slots)
    return packet_count(ngroups * spec.lanes, grid.nthreads)


def _scratch_key(spec: KernelSpec) -> tuple[Kernel, Protocol, bool]:
    # A broadcast is an exchange of the one-shot's slots, so they share a region and epochs.
    owner = Kernel.ONE_SHOT if spec.kernel is Kernel.BROADCAST else spec.kernel
    return owner, spec.protocol, spec.multicast
