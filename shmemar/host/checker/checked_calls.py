"""Sequences of collective calls as the checker runs them, every result checked.

Each kernel and protocol has a region and epoch words, `broadcast` those of `one_shot`. Around a
`barrier` the threads of all ranks write to one another, and look for what was written.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from shmemar.device import kernels, programmatic
from shmemar.device.kernels import KernelArguments
from shmemar.device.packet import SENTINEL
from shmemar.host.checker.barrier_mail import BarrierMail
from shmemar.host.checker.calls import layout_of
from shmemar.host.checker.memory_map import Area, Span
from shmemar.host.checker.packet_log import PacketLog
from shmemar.host.checker.threads import Launch
from shmemar.host.checker.verdict import ProtocolError, Verdict
from shmemar.layout import FAILURE_DTYPE, PACKET_NBYTES, BarrierLayout, LLLayout
from shmemar.spec import Kernel, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from numpy.typing import NDArray

    from shmemar.host.checker.calls import Call, CallSequence
    from shmemar.host.checker.hostile_machine import HostileMachine
    from shmemar.layout import AnyLayout
    from shmemar.spec import KernelSpec

__all__ = ["body_of", "launches_of", "region_of", "scratch_of"]

POISON = b"\xa5"
STEPS_PER_THREAD = 40_000
"""Operations of a run, for each thread of a launch, after which it is a livelock: ten times what
the longest sequences take."""


def launches_of(sequence: CallSequence, machine: HostileMachine) -> list[Iterator[Launch]]:
    """Make the memory of a sequence, and each rank's launches."""
    return _Calls(sequence, machine).launches()


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
        self._mail = BarrierMail(machine, self._nranks)
        self._regions: dict[Any, list[Area]] = {}
        self._epochs: dict[Any, list[Area]] = {}
        self._arrays: dict[tuple[int, int], _Arrays] = {}
        self._results: dict[tuple[int, int, int], NDArray[Any] | None] = {}
        self._control = [machine.map.add("broken word", r, 4) for r in range(self._nranks)]
        self._records = [
            machine.map.add("failure record", r, FAILURE_DTYPE.itemsize)
            for r in range(self._nranks)
        ]
        machine.share_work = sequence.share_work
        machine.use_warps_of(sequence.warp_threads)
        nthreads = self._nranks * max(call.nthreads for call in sequence.calls)
        machine.turns.limit = nthreads * STEPS_PER_THREAD
        for call in sequence.calls:
            self._make_scratch(call.spec)

    def _make_scratch(self, spec: KernelSpec) -> None:
        key = scratch_of(spec)
        layout, ranks, area = layout_of(spec), range(self._nranks), self._machine.map.add
        name = f"{key[0].value}/{key[1].value}" + "/multicast" * spec.multicast
        zeroed_nbytes = layout.zeroed_nbytes
        if region_of(spec) not in self._regions:
            fill = SENTINEL << 32 | SENTINEL if spec.protocol is Protocol.SENTINEL else 0
            if spec.multicast and isinstance(layout, BarrierLayout):
                # As many barriers as the epoch words say have been counted.
                count = self._sequence.first_epoch * spec.nranks % (1 << 32)
                fill, zeroed_nbytes = count << 32 | count, 0
            log = None
            if self._machine.follows_packets and isinstance(layout, LLLayout):
                log = PacketLog(name, layout)
            self._regions[region_of(spec)] = [
                area(
                    f"region of {name}",
                    r,
                    layout.nbytes,
                    fill=fill,
                    log=log,
                    zeroed_nbytes=zeroed_nbytes,
                )
                for r in ranks
            ]
        if spec.multicast:
            self._machine.window(self._regions[region_of(spec)])
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
            call.block_threads,
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
        at_peers = "rw" if call.spec.protocol is Protocol.PULL else "w"
        spans = [
            Span(area, "rw" if area.rank == rank else at_peers, is_shared=True)
            for area in self._regions[region_of(call.spec)]
            if area.log is None or area.log.layout == layout
        ]
        if call.spec.kernel is Kernel.BARRIER:
            spans += self._mail.spans(rank)
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
        block_threads = call.block_threads
        if call.spec.kernel is Kernel.BARRIER:
            body = self._mail.around(body, rank, call.repeats)
        areas = self._regions[region_of(call.spec)]
        peers = tuple(area.address for area in areas)
        if call.spec.multicast:
            peers += (machine.window(areas),)
        arguments = [
            KernelArguments.of_message(
                call.spec,
                arrays.source.address + repeat * stride,
                arrays.destination.address + repeat * stride,
                call.count,
                root=call.root,
                peers=peers,
                epochs=self._epochs[scratch_of(call.spec)][rank].address,
                broken=self._control[rank].address,
                record=self._records[rank].address,
                timeout_ns=0,
            )
            for repeat in range(call.repeats)
        ]

        def run(index: int) -> None:
            if overlaps:
                programmatic.begin()
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


def body_of(call: Call, layout: AnyLayout) -> Callable[..., Any]:
    """The kernel's body."""
    return kernels.build(call.spec, layout, looped=call.repeats > 1)


def scratch_of(spec: KernelSpec) -> tuple[Kernel, Protocol, bool]:
    """What the epoch words of a kernel are known by."""
    shared = Kernel.ONE_SHOT if spec.kernel is Kernel.BROADCAST else spec.kernel
    return shared, spec.protocol, spec.multicast


def region_of(spec: KernelSpec) -> Any:
    """What its region is known by."""
    return scratch_of(spec)


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
