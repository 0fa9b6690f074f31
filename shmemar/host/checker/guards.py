"""The negative controls: each guard of the protocols, and how it is taken out."""

from __future__ import annotations

from functools import cache, partial
from typing import TYPE_CHECKING, Any

from shmemar.device import barrier, kernels, ll128, packet_buffer, programmatic, signal
from shmemar.device.groups import all_in_warp
from shmemar.device.interpreter import Order, Scope, current
from shmemar.device.kernels import barrier_one_shot, barrier_two_shot, exchange, ll128_atomic
from shmemar.device.ll_buffer import LLBuffer
from shmemar.device.memory import (
    fence_acq_rel_gpu,
    ld_relaxed_sys_b32,
    st_relaxed_sys_b32,
    st_relaxed_sys_v4_b32,
)
from shmemar.device.packet import LAST_EPOCH, SENTINEL, next_epoch
from shmemar.device.packet_buffer import PacketBuffer
from shmemar.device.signal import (
    signal_op,
)
from shmemar.dtypes import DTYPES, ReduceOp
from shmemar.host.checker import checked_calls
from shmemar.host.checker.calls import Call, CallSequence
from shmemar.host.checker.checked_calls import launches_of
from shmemar.host.checker.checked_run import Program
from shmemar.host.checker.control_kernels import in_a_ring, in_a_ring_of_warps, ring, sums
from shmemar.host.checker.controls import Control, Patch
from shmemar.host.checker.drawn_calls import MULTICAST_PAIRS, PAIRS, draw_sequence
from shmemar.host.checker.hostile_machine import HostileMachine
from shmemar.layout import LINE_LANES, LINE_NBYTES, LLLayout, flag_offset
from shmemar.spec import PACKET_PROTOCOLS, Kernel, KernelSpec, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable


__all__ = ["CONTROLS"]

LL, SENTINEL_PROTOCOL = Protocol.LL, Protocol.SENTINEL
ONE_SHOT, TWO_SHOT, BROADCAST = Kernel.ONE_SHOT, Kernel.TWO_SHOT, Kernel.BROADCAST
LL128_ATOMIC = Kernel.LL128_ATOMIC


@cache
def _drawn(
    kernel: Kernel, protocol: Protocol, nranks: int = 2, *, multicast: bool = False
) -> Program:
    """Sequences of calls that are drawn from the seeds."""
    draw = partial(draw_sequence, kernel, protocol, nranks, multicast=multicast)
    return Program(
        f"{kernel.value}/{protocol.value}" + "/multicast" * multicast,
        nranks,
        lambda machine, seed: launches_of(draw(seed), machine),
        lambda seed: draw(seed).resident,
    )


def _fixed(sequence: CallSequence) -> Program:
    spec = sequence.calls[0].spec
    return Program(
        f"{spec.kernel.value}/{spec.protocol.value}",
        spec.nranks,
        lambda machine, _: launches_of(sequence, machine),
        lambda _: sequence.resident,
    )


def _spec(kernel: Kernel, protocol: Protocol) -> KernelSpec:
    return KernelSpec(kernel, protocol, DTYPES["float32"], ReduceOp.SUM, 2)


def _replace(owner: Any, name: str, new: Any) -> Patch:
    return Patch(owner, name, lambda _: new)


def _nothing(*_: Any) -> None:
    """In the place of what is taken out."""


# Packets and epochs


def _in_buffers(count: int) -> Patch:
    def make(offset: Callable[..., int]) -> Callable[..., int]:
        def with_fewer(
            epoch: int, source: int, slot: int, pitch: int, buffer: int, nbuffers: int
        ) -> int:
            here = epoch % 2 if nbuffers == 2 else epoch % 3
            return offset(here % count, source, slot, pitch, buffer, nbuffers)

        return with_fewer

    return Patch(packet_buffer, "packet_offset", make)


def _first_half_only(whole: Callable[..., bool]) -> Callable[..., bool]:
    return lambda ll, packets, at: whole(ll, packets[at : at + 2] * 2, 0)


def _first_word_only(whole: Callable[..., bool]) -> Callable[..., bool]:
    def arrived(ll: PacketBuffer, packets: list[int], at: int) -> bool:
        if ll.machine_word_nbytes == 0:
            return whole(ll, packets, at)
        return packets[at] != SENTINEL

    return arrived


def _wrap_to_even(epoch: int) -> int:
    return 2 if epoch == LAST_EPOCH else epoch + 1


def _pitch_of_message(call: Call, layout: LLLayout) -> Callable[..., Any]:
    nslots = call.nthreads * call.spec.packets_per_thread
    own = LLLayout(layout.nranks, nslots, layout.nbuffers)
    return kernels.build(call.spec, own, looped=call.repeats > 1)


def _two_layouts(spec: KernelSpec) -> LLLayout:
    return LLLayout(spec.nranks, 2 if spec.kernel is TWO_SHOT else 4, spec.nbuffers)


def _not_looped(call: Call, layout: LLLayout) -> Callable[..., Any]:
    return kernels.build(call.spec, layout)


_REPLAYED = CallSequence((Call(_spec(ONE_SHOT, LL), 6, 2),), replays=4)
_BOTH = CallSequence(
    (
        Call(_spec(ONE_SHOT, LL), 8, 4),
        Call(_spec(TWO_SHOT, LL), 8, 2),
        Call(_spec(ONE_SHOT, LL), 3, 2),
        Call(_spec(TWO_SHOT, LL), 12, 2),
    ),
    replays=2,
)
_OVERLAPPING = CallSequence((Call(_spec(ONE_SHOT, LL), 4, 2),) * 8, resident=4)
_LOOPED_BLOCKS = CallSequence(
    (Call(_spec(Kernel.BARRIER_ONE_SHOT, Protocol.PULL), 3, 4, repeats=8),)
)
_LOOPED = CallSequence((Call(_spec(TWO_SHOT, SENTINEL_PROTOCOL), 8, 2, repeats=8),))


# Programmatic launch


def _trigger_first() -> None:
    programmatic.trigger()
    programmatic.wait_for_launch()


# Lines


def _in_one_accumulator(
    offset: Callable[[int, int, int, int], int],
) -> Callable[[int, int, int, int], int]:
    return lambda epoch, slot, packets, pitch: offset(0, slot, packets, pitch)


def _clear_all_but_the_marks(address: int, *words: int) -> None:
    if address % LINE_NBYTES:
        st_relaxed_sys_v4_b32(address, *words)
    else:
        current().store(address + 4, words[:1], Order.RELAXED_SYS)
        current().store(address + 8, words[:2], Order.RELAXED_SYS)


def _put_off() -> list[int]:
    """Where the current thread has lines to clear."""
    thread = current().turns.current  # type: ignore[attr-defined]
    found: list[int] = thread.__dict__.setdefault("put_off", [])
    return found


def _clear_later(address: int, *_: int) -> None:
    _put_off().append(address)


def _clear_those_before(bcast: Callable[..., None]) -> Callable[..., None]:
    """Behind the packet that licenses the line's next use."""

    def send(ll: PacketBuffer, slot: int, words: list[int], at: int) -> None:
        bcast(ll, slot, words, at)
        while len(_put_off()) > 1:
            st_relaxed_sys_v4_b32(_put_off().pop(0), 0, 0, 0, 0)

    return send


def _clear_the_last(store: Callable[[int, int], None]) -> Callable[[int, int], None]:
    def finish(address: int, epoch: int) -> None:
        while _put_off():
            st_relaxed_sys_v4_b32(_put_off().pop(0), 0, 0, 0, 0)
        store(address, epoch)

    return finish


def _in_two_halves(whole: Callable[..., None]) -> Callable[..., None]:
    """Add by two instructions, each with the other half of the lanes masked off."""

    def add(machine: HostileMachine, address: int, words: Any, add: Callable[..., int]) -> None:
        is_lower = machine.turns.current.index % LINE_LANES < LINE_LANES // 2
        for half in (True, False):
            if half is is_lower:
                whole(machine, address, words, add)
            else:
                machine.skip_line()

    return add


def _as_it_is(value: bool) -> bool:  # noqa: FBT001 - an operand
    return value


# Barriers


def _set_at_gpu_scope(flag: int, epoch: int) -> None:
    fence_acq_rel_gpu()
    st_relaxed_sys_b32(flag, epoch)


def _seen_at_gpu_scope(flag: int) -> int:
    seen = ld_relaxed_sys_b32(flag)
    fence_acq_rel_gpu()
    return seen


def _one_flag(epoch: int, block: int, source: int, nblocks: int, nranks: int) -> int:
    return flag_offset(0, block, source, nblocks, nranks)


# Multicast


def _added_relaxed_to_all(counter: int, value: int) -> None:
    machine: Any = current()
    machine.turns.take()
    machine.add_to_copies(machine.map.copies(counter), value, releases=False)


def _added_at_gpu_scope_to_all(counter: int, value: int) -> None:
    fence_acq_rel_gpu()
    _added_relaxed_to_all(counter, value)


def _has_come_without_own(seen: int, count: int) -> bool:
    return (seen - count + 1) % (1 << 32) < 1 << 31


def _has_come_as_numbers(seen: int, count: int) -> bool:
    return seen >= count


def _store_first_half_only(address: int, first: int, second: int, *_: int) -> None:
    current().store_to_all(address, (first, second), Order.RELAXED_SYS)


def _by_multicast(
    name: str, patch: Patch | tuple[Patch, ...], pairs: list[tuple[Kernel, Protocol]]
) -> tuple[Control, ...]:
    patches = (patch,) if isinstance(patch, Patch) else patch
    return tuple(Control(name, patches, _drawn(*pair, multicast=True)) for pair in pairs)


_PACKETS_TO_ALL = [pair for pair in MULTICAST_PAIRS if not pair[0].has_barriers]
_SENTINEL_TO_ALL = [pair for pair in _PACKETS_TO_ALL if pair[1] is SENTINEL_PROTOCOL]
_COUNTED = [pair for pair in MULTICAST_PAIRS if pair[0].has_barriers]
_SUMS_BY_LOAD = [pair for pair in _COUNTED if pair[0].reduces]

# Signals


def _stored_relaxed(address: int, value: int) -> None:
    current().store(address, (value & 0xFFFFFFFF, value >> 32), Order.RELAXED_SYS)


def _stored_at_gpu_scope(address: int, value: int) -> None:
    current().fence(Scope.GPU)
    _stored_relaxed(address, value)


def _added_relaxed(address: int, value: int) -> None:
    current().add_b64(address, value, Order.RELAXED_SYS)


def _signal_of_first_lane(ll: Any, address: int, value: int, op: int) -> None:
    if ll.thread % 32 == 0:
        signal_op(ll, address, value, op)


def _votes_that_count(value: bool) -> bool:  # noqa: FBT001 - an operand
    # A constant is what the meetings before and after a copy vote.
    return True if value is True else all_in_warp(value)


_RING = ring(in_a_ring, 1, 6, 3)
_WARPS = ring(in_a_ring_of_warps, 32, 32, 1)

_PACKETS_ALONE = [
    pair for pair in PAIRS if pair[0] is not LL128_ATOMIC and not pair[0].has_barriers
]
_WITH_SENTINEL = [pair for pair in PAIRS if pair[1] is SENTINEL_PROTOCOL]
_SENTINEL_ALONE = [pair for pair in _WITH_SENTINEL if pair[0] is not LL128_ATOMIC]
"""In an LL128 kernel packets are sent behind the additions of all ranks, which guard them more."""
_LINES = [(LL128_ATOMIC, SENTINEL_PROTOCOL)]
CLEAR = "st_relaxed_sys_v4_b32"
_WITH_LL = [pair for pair in PAIRS if pair[1] is LL]
_WITH_PACKETS = [pair for pair in PAIRS if not pair[0].has_barriers]
_WITH_BARRIERS = [pair for pair in PAIRS if pair[0].has_barriers]
_ONE_SHOT_WITH_BARRIERS = [pair for pair in PAIRS if pair[0] is Kernel.BARRIER_ONE_SHOT]
_TWO_SHOT_WITH_BARRIERS = [pair for pair in PAIRS if pair[0] is Kernel.BARRIER_TWO_SHOT]


def _of_each(
    name: str, patch: Patch | tuple[Patch, ...], pairs: list[tuple[Kernel, Protocol]]
) -> tuple[Control, ...]:
    patches = (patch,) if isinstance(patch, Patch) else patch
    return tuple(Control(name, patches, _drawn(*pair)) for pair in pairs)


CONTROLS: tuple[Control, ...] = (
    *_of_each("the second of two buffers", _in_buffers(1), _WITH_LL),
    *_of_each("the third of three buffers", _in_buffers(2), _SENTINEL_ALONE),
    *_of_each("an epoch word for each slot", _replace(exchange, "EPOCH_NBYTES", 0), _WITH_PACKETS),
    *_of_each(
        "the flag of the second half",
        Patch(packet_buffer, "_arrived", _first_half_only),
        _WITH_LL,
    ),
    *_of_each(
        "all words but the first of a sentinel packet",
        Patch(packet_buffer, "_arrived", _first_word_only),
        _WITH_SENTINEL,
    ),
    *_of_each("the reset of a slot", _replace(PacketBuffer, "reset", _nothing), _WITH_SENTINEL),
    *_of_each(
        "the fence behind resets",
        _replace(PacketBuffer, "fence_resets", _nothing),
        _SENTINEL_ALONE,
    ),
    *_of_each(
        "the twin of what looks empty",
        _replace(PacketBuffer, "encode", _nothing),
        _WITH_SENTINEL,
    ),
    *_of_each(
        "the wrap from even to odd",
        _replace(exchange, "next_epoch", _wrap_to_even),
        _WITH_PACKETS,
    ),
    Control(
        "the epoch word in memory, for a launch argument that is replayed",
        (_replace(exchange, "st_b32", _nothing),),
        _fixed(_REPLAYED),
    ),
    *(
        Control(
            "the pitch that no message changes",
            (_replace(checked_calls, "body_of", _pitch_of_message),),
            _drawn(*pair),
        )
        for pair in _PACKETS_ALONE
    ),
    Control(
        "a region for each layout",
        (
            _replace(checked_calls, "region_of", lambda spec: spec.protocol),
            _replace(checked_calls, "layout_of", _two_layouts),
        ),
        _fixed(_BOTH),
    ),
    Control(
        "the fence in a body that is looped",
        (_replace(checked_calls, "body_of", _not_looped),),
        _fixed(_LOOPED),
    ),
    Control(
        "the wait before the trigger",
        (_replace(programmatic, "begin", _trigger_first),),
        _fixed(_OVERLAPPING),
    ),
    Control(
        "the wait behind a programmatic launch",
        (_replace(programmatic, "begin", programmatic.trigger),),
        _fixed(_OVERLAPPING),
    ),
    *_of_each(
        "the second of two accumulators",
        Patch(ll128, "accumulator_offset", _in_one_accumulator),
        _LINES,
    ),
    *_of_each("the clearing of marks", _replace(ll128, CLEAR, _clear_all_but_the_marks), _LINES),
    Control(
        "the clearing before the packets that license it",
        (
            _replace(ll128, CLEAR, _clear_later),
            Patch(PacketBuffer, "bcast_packet", _clear_those_before),
            Patch(exchange, "st_b32", _clear_the_last),
        ),
        _drawn(LL128_ATOMIC, SENTINEL_PROTOCOL),
    ),
    *_of_each(
        "the fence behind additions",
        _replace(ll128_atomic, "fence_acq_rel_gpu", _nothing),
        _LINES,
    ),
    *_of_each(
        "the lanes of half a line", Patch(HostileMachine, "add_to_line", _in_two_halves), _LINES
    ),
    *_of_each(
        "the meeting behind a line's last mark",
        _replace(ll128_atomic, "all_in_warp", _as_it_is),
        _LINES,
    ),
    *(
        Control("`advance_epoch`", (_replace(LLBuffer, "advance_epoch", _nothing),), sums(protocol))
        for protocol in PACKET_PROTOCOLS
    ),
    Control(
        "the release of a signal",
        (_replace(signal, "st_release_sys_b64", _stored_relaxed),),
        _RING,
    ),
    Control(
        "the system scope of that release",
        (_replace(signal, "st_release_sys_b64", _stored_at_gpu_scope),),
        _RING,
    ),
    Control(
        "the release of an addition",
        (_replace(signal, "red_release_sys_add_u64", _added_relaxed),),
        _RING,
    ),
    Control(
        "the acquire behind a signal", (_replace(signal, "fence_acq_rel_sys", _nothing),), _RING
    ),
    Control(
        "the system scope of that acquire",
        (_replace(signal, "fence_acq_rel_sys", fence_acq_rel_gpu),),
        _RING,
    ),
    Control(
        "the meeting before a warp's signal",
        (_replace(signal, "signal_op_warp", _signal_of_first_lane),),
        _WARPS,
    ),
    Control(
        "the meeting before a warp's copy",
        (_replace(signal, "all_in_warp", _votes_that_count),),
        _WARPS,
    ),
    *_of_each(
        "the release of a barrier's flag",
        _replace(barrier, "st_release_sys_b32", st_relaxed_sys_b32),
        _WITH_BARRIERS,
    ),
    *_of_each(
        "the system scope of that release",
        _replace(barrier, "st_release_sys_b32", _set_at_gpu_scope),
        _WITH_BARRIERS,
    ),
    *_of_each(
        "the acquire of a barrier's flag",
        _replace(barrier, "ld_acquire_sys_b32", ld_relaxed_sys_b32),
        _WITH_BARRIERS,
    ),
    *_of_each(
        "the system scope of that acquire",
        _replace(barrier, "ld_acquire_sys_b32", _seen_at_gpu_scope),
        _WITH_BARRIERS,
    ),
    *_of_each(
        "the second of two flags", _replace(barrier, "flag_offset", _one_flag), _WITH_BARRIERS
    ),
    *_of_each(
        "the meetings of a block",
        _replace(barrier, "all_in_block", lambda value: value),
        _WITH_BARRIERS,
    ),
    *_of_each(
        "an epoch word for each block",
        _replace(barrier, "EPOCH_NBYTES", 0),
        _ONE_SHOT_WITH_BARRIERS + _TWO_SHOT_WITH_BARRIERS,
    ),
    *_of_each(
        "the wrap of a barrier's epochs",
        _replace(barrier, "next_epoch", _wrap_to_even),
        _WITH_BARRIERS,
    ),
    *_of_each(
        "the second buffer, which stands for an exit barrier",
        _replace(barrier_one_shot, "buffer_at", lambda _: 0),
        _ONE_SHOT_WITH_BARRIERS,
    ),
    *_of_each(
        "the places for results, which stand for a third barrier",
        _replace(barrier_two_shot, "place_of_results", lambda _: 0),
        _TWO_SHOT_WITH_BARRIERS,
    ),
    Control(
        "the last meeting of a block in a body that is looped",
        (_replace(checked_calls, "body_of", _not_looped),),
        _fixed(_LOOPED_BLOCKS),
    ),
    *_by_multicast(
        "the second of two buffers, of what all are sent",
        _in_buffers(1),
        [pair for pair in _PACKETS_TO_ALL if pair[1] is LL],
    ),
    *_by_multicast(
        "the third of three buffers, of what all are sent", _in_buffers(2), _SENTINEL_TO_ALL
    ),
    *_by_multicast(
        "the second store of a packet to all",
        _replace(packet_buffer, "multimem_st_relaxed_sys_two_b64", _store_first_half_only),
        _PACKETS_TO_ALL,
    ),
    *_by_multicast(
        "the reset of a slot that all write to",
        _replace(PacketBuffer, "reset", _nothing),
        _SENTINEL_TO_ALL,
    ),
    *_by_multicast(
        "the fence behind resets, before what all are sent",
        _replace(PacketBuffer, "fence_resets", _nothing),
        _SENTINEL_TO_ALL,
    ),
    *_by_multicast(
        "the release of an addition to all",
        _replace(barrier, "multimem_red_release_sys_add_u32", _added_relaxed_to_all),
        _COUNTED,
    ),
    *_by_multicast(
        "the system scope of that addition's release",
        _replace(barrier, "multimem_red_release_sys_add_u32", _added_at_gpu_scope_to_all),
        _COUNTED,
    ),
    *_by_multicast(
        "the fence behind the polls of a counter",
        _replace(barrier, "fence_acq_rel_sys", _nothing),
        _COUNTED,
    ),
    *_by_multicast(
        "the alias fence before the addition",
        _replace(barrier, "fence_proxy_alias", _nothing),
        _SUMS_BY_LOAD,
    ),
    *_by_multicast(
        "the last of a counter's additions",
        _replace(barrier, "has_come_to", _has_come_without_own),
        _COUNTED,
    ),
    *_by_multicast(
        "the comparison of counts that wraps",
        _replace(barrier, "has_come_to", _has_come_as_numbers),
        _COUNTED,
    ),
    *_by_multicast(
        "the epoch that wraps as counts do",
        _replace(barrier, "next_count", next_epoch),
        _COUNTED,
    ),
    *_by_multicast(
        "the meetings of a block that counts",
        _replace(barrier, "all_in_block", lambda value: value),
        _COUNTED,
    ),
    *_by_multicast(
        "the places for results, apart from what is loaded as a sum",
        _replace(barrier_two_shot, "place_of_results", lambda _: 0),
        _SUMS_BY_LOAD,
    ),
)
