"""Sequences of collective calls as the checker runs them: drawn from a seed, every result checked.

Each kernel and protocol has a region and epoch words, `broadcast` those of `one_shot`. A sequence
mixes counts, types, operators, grids, roots, alignments, loops of a body in one launch, and calls
of other kernels. It may begin with epochs just before their wrap, and is replayed, as a CUDA graph
would be, with the same arguments and other data.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from shmemar.device import kernels
from shmemar.device.elements import WIDE_RANKS
from shmemar.device.groups import WARP_THREADS
from shmemar.device.kernels import BUILDERS, KernelArguments
from shmemar.device.packet import LAST_EPOCH, SENTINEL, TWIN
from shmemar.dtypes import DTYPES, DType, ReduceOp, supported_ops
from shmemar.errors import ArgumentError
from shmemar.host.exact import exact_input, exact_result, numpy_dtype
from shmemar.host.hostile_machine import HostileMachine, Launch
from shmemar.host.memory_map import Area, Span
from shmemar.host.packet_log import PacketLog
from shmemar.host.verdict import ProtocolError, Verdict
from shmemar.layout import BLOCK_THREADS, FAILURE_DTYPE, PACKET_NBYTES, LLLayout
from shmemar.spec import Kernel, KernelSpec, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from numpy.typing import NDArray

__all__ = ["PAIRS", "Call", "CallSequence", "draw_sequence", "launches_of", "tiny_sequence"]

PAIRS: list[tuple[Kernel, Protocol]] = [
    (kernel, protocol)
    for kernel in BUILDERS
    for protocol in Protocol
    if kernel.reduces or protocol is Protocol.LL
]
"""Every kernel with each of its protocols."""

FEW_SLOTS = 4
"""Slots of a region, and so the most threads of a launch: enough for them to be mixed up. From
`WIDE_RANKS` on, where lanes may work together, there are two warps."""

POISON = b"\xa5"
STEPS_PER_THREAD = 40_000
"""Operations of a run, for each thread of a launch, after which it is a livelock: ten times what
the longest sequences take."""
SIGNALING = SENTINEL ^ 1 << 22
"""A NaN that is the sentinel once something was added to it, where NaNs keep what they carry."""

MARKS: dict[tuple[str, ReduceOp], list[tuple[int, ...]]] = {
    ("float32", ReduceOp.MIN): [(SENTINEL,)],
    ("float32", ReduceOp.SUM): [(SIGNALING,)],
    ("float64", ReduceOp.MIN): [(SENTINEL, 1 << 30), (SENTINEL, SENTINEL), (1, SENTINEL)],
}
"""Words of elements that look like an empty slot, all or in part, or become so."""

WRAPS = (LAST_EPOCH - 1, LAST_EPOCH - 2, LAST_EPOCH - 4, 2**31 - 3)
EXACT_RANKS = 8
"""The most ranks whose 16-bit sums and whose products are exact (`exact_input`)."""


@dataclass(frozen=True)
class Call:
    """One call, as every rank makes it.

    Attributes:
        spec: The kernel.
        count: Elements.
        nthreads: Threads of the grid.
        root: The rank whose data a broadcast sends.
        repeats: Times that the body runs in one launch, each with data of its own.
        in_place: True where input and output are one array.
        shift: By how much arrays begin behind an aligned address; it differs by rank.
        is_marked: True where some elements have the words of `MARKS`, on all ranks.
    """

    spec: KernelSpec
    count: int
    nthreads: int
    root: int = 0
    repeats: int = 1
    in_place: bool = False
    shift: int = 0
    is_marked: bool = False

    def input(self, number: int, rank: int) -> NDArray[Any]:
        """What `rank` contributes to the run of a body that is numbered so."""
        spec = self.spec
        data = exact_input(spec.dtype, spec.op, self.count, rank=rank, call=number)
        return _marked(data, number, self.marks) if self.is_marked else data

    def result(self, number: int, rank: int) -> NDArray[Any] | None:
        """What it must leave on `rank`; None for nothing."""
        what = self.spec.dtype, self.spec.op, self.count
        if self.spec.kernel is not Kernel.BROADCAST:
            result = exact_result(*what, nranks=self.spec.nranks, call=number)
            return _marked(result, number, self.marked_results) if self.is_marked else result
        return None if rank == self.root else self.input(number, self.root)

    @property
    def marks(self) -> list[tuple[int, ...]]:
        """Words of the elements that are marked, which take turns; none of most types."""
        return MARKS.get((self.spec.dtype.name, self.spec.op), [])

    @property
    def marked_results(self) -> list[tuple[int, ...]]:
        """What becomes of them."""
        spec = self.spec
        if spec.op is ReduceOp.SUM:
            number = np.uint32(self.marks[0][0]).view(np.float32)
            total = number
            with np.errstate(invalid="ignore"):
                for _ in range(1, spec.nranks):
                    total = total + number
            # What comes out as the sentinel is sent only by the kernel with two exchanges.
            word = int(total.view(np.uint32))
            is_sent = spec.kernel is Kernel.TWO_SHOT and spec.protocol is Protocol.SENTINEL
            return [(TWIN if is_sent and word == SENTINEL else word,)]
        if spec.protocol is Protocol.LL:
            return self.marks
        return [(TWIN, *words[1:]) if set(words) == {SENTINEL} else words for words in self.marks]


def _marked(data: NDArray[Any], number: int, marks: list[tuple[int, ...]]) -> NDArray[Any]:
    words = data.view(np.uint32).reshape(data.size, -1)
    for turn, at in enumerate(range(number % 3, data.size, 3)):
        words[at] = marks[turn % len(marks)]
    return data


@dataclass(frozen=True)
class CallSequence:
    """Calls, one after another.

    Attributes:
        calls: The calls.
        first_epoch: What all epoch words hold at first.
        replays: Times that the calls are made, with the same arguments and other data.
        resident: As of `HostileMachine`: launches that fit at once, where they overlap.
    """

    calls: tuple[Call, ...]
    first_epoch: int = 0
    replays: int = 1
    resident: int | None = None


def launches_of(sequence: CallSequence, machine: HostileMachine) -> list[Iterator[Launch]]:
    """Make the memory of a sequence, and each rank's launches."""
    return _Calls(sequence, machine).launches()


def layout_of(spec: KernelSpec) -> LLLayout:
    """The layout of a kernel's region."""
    return LLLayout(spec.nranks, _nslots(spec.nranks), spec.nbuffers)


def _nslots(nranks: int) -> int:
    return FEW_SLOTS if nranks < WIDE_RANKS else 2 * WARP_THREADS


@dataclass(frozen=True, eq=False)
class _Arrays:
    """Arrays of a call on one rank."""

    source: Area
    destination: Area


class _Calls:
    def __init__(self, sequence: CallSequence, machine: HostileMachine) -> None:
        self._sequence = sequence
        self._machine = machine
        self._nranks = sequence.calls[0].spec.nranks
        self._regions: dict[Any, list[Area]] = {}
        self._epochs: dict[Any, list[Area]] = {}
        self._arrays: dict[tuple[int, int], _Arrays] = {}
        self._results: dict[tuple[int, int, int], NDArray[Any] | None] = {}
        self._control = [machine.map.add("broken word", r, 4) for r in range(self._nranks)]
        self._records = [
            machine.map.add("failure record", r, FAILURE_DTYPE.itemsize)
            for r in range(self._nranks)
        ]
        nthreads = self._nranks * max(call.nthreads for call in sequence.calls)
        machine.limit = nthreads * STEPS_PER_THREAD
        for call in sequence.calls:
            self._make_scratch(call.spec)

    def _make_scratch(self, spec: KernelSpec) -> None:
        key = scratch_of(spec)
        layout, ranks, area = layout_of(spec), range(self._nranks), self._machine.map.add
        name = f"{key[0].value}/{key[1].value}"
        if region_of(spec) not in self._regions:
            fill = SENTINEL << 32 | SENTINEL if spec.protocol is Protocol.SENTINEL else 0
            log = PacketLog(name, layout) if self._machine.follows_packets else None
            self._regions[region_of(spec)] = [
                area(f"region of {name}", r, layout.nbytes, fill=fill, log=log) for r in ranks
            ]
        epoch = self._sequence.first_epoch
        if key in self._epochs:
            return
        self._epochs[key] = [
            area(f"epochs of {name}", r, layout.epochs_nbytes, fill=epoch << 32 | epoch)
            for r in ranks
        ]

    def launches(self) -> list[Iterator[Launch]]:
        return [self._launches_of(rank) for rank in range(self._nranks)]

    def _launches_of(self, rank: int) -> Iterator[Launch]:
        number = 0
        for replay in range(self._sequence.replays):
            for at, call in enumerate(self._sequence.calls):
                yield self._launch(
                    rank, at, call, number, f"call {at}" + f" of replay {replay}" * (replay > 0)
                )
                number += call.repeats

    def _launch(self, rank: int, at: int, call: Call, number: int, where: str) -> Launch:
        arrays = self._arrays.get((rank, at)) or self._make_arrays(rank, at, call)
        stride = _stride(call)
        machine = self._machine
        machine.poke(arrays.destination.address, POISON * arrays.destination.nbytes)
        for repeat in range(call.repeats):
            data = call.input(number + repeat, rank).tobytes()
            machine.poke(arrays.source.address + repeat * stride, data)
        return Launch(
            f"{call.spec.name} ({where})",
            rank,
            self._bodies(rank, call, arrays),
            machine.map.rights(self._spans(rank, call, arrays)),
            min(call.nthreads, BLOCK_THREADS),
            at_end=lambda: self._check(rank, call, number, arrays, where),
        )

    def _make_arrays(self, rank: int, at: int, call: Call) -> _Arrays:
        nbytes = _stride(call) * (call.repeats - 1) + call.count * call.spec.dtype.itemsize
        width = call.spec.dtype.component_nbytes
        shifts = (call.shift * (rank + 1) % 3, call.shift * (rank + 2) % 3)
        source, other = (
            self._machine.map.add(f"{name} of call {at}", rank, nbytes, offset=shift * width)
            for name, shift in zip(("input", "output"), shifts, strict=True)
        )
        arrays = self._arrays[rank, at] = _Arrays(source, source if call.in_place else other)
        return arrays

    def _spans(self, rank: int, call: Call, arrays: _Arrays) -> list[Span]:
        layout, epochs = layout_of(call.spec), self._epochs[scratch_of(call.spec)]
        spans = [
            Span(area, "rw" if area.rank == rank else "w", is_shared=True)
            for area in self._regions[region_of(call.spec)]
            if area.log is None or area.log.layout == layout
        ]
        spans += [Span(epochs[rank], "rw"), Span(arrays.source, "r")]
        # In place it is one array: what comes last counts.
        has_output = call.spec.kernel.reduces or rank != call.root
        if has_output:
            spans.append(Span(arrays.destination, "rw" if call.in_place else "w"))
        return [*spans, Span(self._control[rank], "rw"), Span(self._records[rank], "rw")]

    def _bodies(self, rank: int, call: Call, arrays: _Arrays) -> list[Callable[[], None]]:
        machine, stride = self._machine, _stride(call)
        body = body_of(call, layout_of(call.spec))
        overlaps = self._sequence.resident is not None
        block_threads = min(call.nthreads, BLOCK_THREADS)
        arguments = [
            KernelArguments.of_message(
                call.spec,
                arrays.source.address + repeat * stride,
                arrays.destination.address + repeat * stride,
                call.count,
                root=call.root,
                peers=tuple(area.address for area in self._regions[region_of(call.spec)]),
                epochs=self._epochs[scratch_of(call.spec)][rank].address,
                broken=self._control[rank].address,
                record=self._records[rank].address,
                timeout_ns=0,
            )
            for repeat in range(call.repeats)
        ]

        def run(index: int) -> None:
            if overlaps:
                before_body(machine)
            for each in arguments:
                body(each, rank, index, call.nthreads, block_threads)

        return [lambda index=index: run(index) for index in range(call.nthreads)]  # type: ignore[misc]

    def _check(self, rank: int, call: Call, number: int, arrays: _Arrays, where: str) -> None:
        for repeat in range(call.repeats):
            expected = self._result(call, number + repeat, rank)
            if expected is None:
                continue
            address = arrays.destination.address + repeat * _stride(call)
            got = self._machine.peek(address, expected.nbytes)
            if got != expected.tobytes():
                found = _first_difference(expected, got)
                again = f", repeat {repeat}" if call.repeats > 1 else ""
                raise ProtocolError(
                    Verdict.WRONG_VALUE,
                    f"rank {rank} got {found} in {call.spec.name} ({where}{again}) of "
                    f"{call.count} elements",
                    rank,
                )

    def _result(self, call: Call, number: int, rank: int) -> NDArray[Any] | None:
        # All ranks of a reduction get the same one.
        key = id(call), number, rank if call.spec.kernel is Kernel.BROADCAST else 0
        if key not in self._results:
            self._results[key] = call.result(number, rank)
        return self._results[key]


def body_of(call: Call, layout: LLLayout) -> Callable[..., Any]:
    """The kernel's body."""
    return kernels.build(call.spec, layout, looped=call.repeats > 1)


def scratch_of(spec: KernelSpec) -> tuple[Kernel, Protocol]:
    """What the epoch words of a kernel are known by."""
    shared = Kernel.ONE_SHOT if spec.kernel is Kernel.BROADCAST else spec.kernel
    return shared, spec.protocol


def region_of(spec: KernelSpec) -> Any:
    """What its region is known by."""
    return scratch_of(spec)


def before_body(machine: HostileMachine) -> None:
    """What a kernel does first where launches overlap: wait, and only then let the next one in."""
    machine.wait_for_launch()
    machine.trigger()


def _stride(call: Call) -> int:
    """Bytes from the array of one repeat to that of the next."""
    nbytes = call.count * call.spec.dtype.itemsize
    return nbytes + -nbytes % PACKET_NBYTES


def _first_difference(expected: NDArray[Any], got: bytes) -> str:
    found = np.frombuffer(got, expected.dtype)
    words = expected.view(np.uint8).reshape(expected.size, -1) != found.view(np.uint8).reshape(
        expected.size, -1
    )
    at = int(np.flatnonzero(words.any(axis=1))[0])
    return f"{found[at]} for element {at}, expected {expected[at]},"


def draw_sequence(kernel: Kernel, protocol: Protocol, nranks: int, seed: int) -> CallSequence:
    """Draw a sequence, most of whose calls are of one kernel and protocol."""
    draw = random.Random(f"{kernel.value} {protocol.value} {nranks} {seed}")  # noqa: S311
    calls: list[Call] = []
    for _ in range(draw.randint(3, 5) if nranks < WIDE_RANKS else 2):
        others = [pair for pair in PAIRS if pair != (kernel, protocol)]
        pair = draw.choice(others) if calls and draw.random() < 0.2 else (kernel, protocol)
        calls.append(_draw_call(*pair, nranks, draw))
    overlaps = draw.random() < 0.15
    return CallSequence(
        tuple(calls),
        first_epoch=draw.choice([0, 0, 0, *WRAPS]),
        replays=1 if overlaps else draw.choice([1, 1, 2]),
        resident=2 * nranks if overlaps else None,
    )


def tiny_sequence(kernel: Kernel, protocol: Protocol, nranks: int) -> CallSequence:
    """The shortest sequence in which every buffer is used again: for going through schedules."""
    spec = KernelSpec(kernel, protocol, DTYPES["float32"], ReduceOp.SUM, nranks)
    owners = nranks if kernel is Kernel.TWO_SHOT else 1
    count = owners * spec.payload_nbytes // spec.dtype.itemsize
    once, twice = Call(spec, count, 1), Call(spec, 2 * count, 1)
    return CallSequence((twice, once) if kernel is Kernel.TWO_SHOT else (twice, twice))


def _draw_call(kernel: Kernel, protocol: Protocol, nranks: int, draw: random.Random) -> Call:
    spec = _draw_spec(kernel, protocol, nranks, draw)
    nthreads = draw.randint(1, FEW_SLOTS // spec.packets_per_thread)
    repeats = draw.choice([1, 1, 1, 1, 1, 3])
    passes = draw.choice([1, 1, 2, 3, 4]) if repeats == 1 else 1
    busy = nthreads
    if nranks >= WIDE_RANKS:
        nthreads = WARP_THREADS
        busy, passes = draw.choice([(busy, 1), (busy, 1), (busy, 1), (nthreads, 2)])
    owners = nranks if kernel is Kernel.TWO_SHOT else 1
    most = passes * busy * spec.packets_per_thread * owners * spec.payload_nbytes
    most = max(most // spec.dtype.itemsize, 1)
    return Call(
        spec,
        most if draw.random() < 0.3 else draw.randint(most // 2 + 1, most),
        nthreads,
        root=draw.randrange(nranks),
        repeats=repeats,
        in_place=kernel.reduces and draw.random() < 0.25,
        shift=draw.randrange(3),
        is_marked=(spec.dtype.name, spec.op) in MARKS and kernel.reduces and draw.random() < 0.5,
    )


def _draw_spec(kernel: Kernel, protocol: Protocol, nranks: int, draw: random.Random) -> KernelSpec:
    fitting = [each for each in DTYPES.values() if _fits(each, protocol, nranks)]
    dtype = DTYPES["float32"] if draw.random() < 0.3 else draw.choice(fitting)
    ops = [op for op in supported_ops(dtype) if nranks <= EXACT_RANKS or op is not ReduceOp.PROD]
    if dtype.name == "complex128" and ReduceOp.PROD in ops and draw.random() < 0.5:
        # With LL packets the one that takes two for each thread.
        return KernelSpec(kernel, protocol, dtype, ReduceOp.PROD, nranks)
    return KernelSpec(kernel, protocol, dtype, draw.choice(ops), nranks)


def _fits(dtype: DType, protocol: Protocol, nranks: int) -> bool:
    if protocol is Protocol.SENTINEL and dtype.is_integer:
        return False
    if dtype.component_nbytes == 2 and nranks > EXACT_RANKS:
        return False
    try:
        numpy_dtype(dtype)
    except ArgumentError:  # bfloat16, without ml_dtypes
        return False
    return True
