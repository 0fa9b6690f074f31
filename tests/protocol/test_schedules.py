"""Every kernel's own source under hundreds of random schedules, and what guards it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from shmemar.device import packet_buffer
from shmemar.device.groups import WARP_THREADS
from shmemar.device.kernels import build, exchange, one_shot_wide
from shmemar.device.packet_buffer import PacketBuffer
from shmemar.device.words import u32
from shmemar.dtypes import DTYPES, Kind, ReduceOp, supported_ops
from shmemar.layout import LLLayout
from shmemar.spec import Kernel, KernelSpec, Protocol
from tests.protocol import random_machine
from tests.protocol.random_machine import (
    Call,
    MeetingMachine,
    RandomMachine,
    StuckError,
    wrong_calls,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

SEEDS = range(80)
REDUCING = [kernel for kernel in Kernel if kernel.reduces]
KERNELS = [(kernel, protocol) for kernel in REDUCING for protocol in Protocol]
kernels = pytest.mark.parametrize(
    ("kernel", "protocol"), KERNELS, ids=[f"{k.value}-{p.value}" for k, p in KERNELS]
)
with_sentinel = pytest.mark.parametrize("kernel", REDUCING, ids=lambda kernel: kernel.value)


def layout_of(protocol: Protocol, nranks: int) -> LLLayout:
    spec = KernelSpec(Kernel.ONE_SHOT, protocol, DTYPES["float32"], ReduceOp.SUM, nranks)
    return LLLayout(nranks, 4, spec.nbuffers)


def mixed_calls(kernel: Kernel, protocol: Protocol, nranks: int) -> list[Call]:
    """Calls of several sizes, grids and passes, one of them with two packets a thread."""
    floats, pairs = (
        KernelSpec(kernel, protocol, DTYPES[name], op, nranks)
        for name, op in (("float32", ReduceOp.SUM), ("complex128", ReduceOp.PROD))
    )
    # So many elements fill a packet of each share of a thread.
    scale = floats.payload_nbytes // 8 * (nranks if kernel is Kernel.TWO_SHOT else 1)
    return [
        Call(floats, 3 * scale, 2),
        Call(floats, 1, 1),
        Call(floats, 9 * scale, 2),
        Call(pairs, 2 * scale, 1),
        Call(floats, 5 * scale - 1, 4),
        Call(floats, 2 * scale, 1),
        Call(floats, 7 * scale + 1, 2),
    ]


def first_failure(
    kernel: Kernel,
    protocol: Protocol,
    nranks: int,
    seeds: Iterable[int],
    *,
    layout: LLLayout | None = None,
    first_epoch: int = 0,
) -> int | None:
    """The first seed under which a result is wrong or the ranks get stuck."""
    calls = mixed_calls(kernel, protocol, nranks)
    layout = layout or layout_of(protocol, nranks)
    for seed in seeds:
        try:
            if wrong_calls(calls, layout, seed, first_epoch=first_epoch):
                return seed
        except StuckError:
            return seed
    return None


@kernels
@pytest.mark.parametrize("nranks", [2, 3])
def test_every_schedule_gives_exact_sums(kernel: Kernel, protocol: Protocol, nranks: int) -> None:
    assert first_failure(kernel, protocol, nranks, SEEDS) is None


@kernels
@pytest.mark.parametrize("first_epoch", [2**31 - 3, 2**32 - 4, 2**32 - 5])
def test_epochs_pass_the_wrap(kernel: Kernel, protocol: Protocol, first_epoch: int) -> None:
    assert first_failure(kernel, protocol, 2, range(30), first_epoch=first_epoch) is None


@kernels
@pytest.mark.parametrize("nranks", [1, 4])
@pytest.mark.parametrize(
    ("name", "op"),
    [(name, op) for name, dtype in DTYPES.items() for op in supported_ops(dtype)],
)
def test_every_type_and_operator_is_exact(
    kernel: Kernel, protocol: Protocol, name: str, op: ReduceOp, nranks: int
) -> None:
    if protocol is Protocol.SENTINEL and DTYPES[name].kind is not Kind.FLOAT:
        pytest.skip("integers have no sentinel")
    spec = KernelSpec(kernel, protocol, DTYPES[name], op, nranks)
    calls = [Call(spec, 5, 2), Call(spec, 2, 2), Call(spec, 1, 1), Call(spec, 37, 2)]
    assert wrong_calls(calls, layout_of(protocol, nranks), seed=1) == []


class OneBuffer(LLLayout):
    """A layout whose buffers are the same memory."""

    @property
    def buffer_nbytes(self) -> int:
        return 0


@kernels
def test_one_buffer_instead_of_several_is_caught(kernel: Kernel, protocol: Protocol) -> None:
    nbuffers = layout_of(protocol, 2).nbuffers
    layout = OneBuffer(2, 4, nbuffers)
    assert first_failure(kernel, protocol, 2, SEEDS, layout=layout) is not None


@kernels
def test_judging_one_half_of_a_torn_packet_is_caught(
    kernel: Kernel, protocol: Protocol, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = packet_buffer._arrived

    def first_half_only(ll: PacketBuffer, packets: list[int], at: int) -> bool:
        low = packets[at : at + 2]
        return whole(ll, low + low, 0)

    monkeypatch.setattr(packet_buffer, "_arrived", first_half_only)
    assert first_failure(kernel, protocol, 2, SEEDS) is not None


@kernels
def test_a_wrap_that_breaks_the_turns_is_caught(
    kernel: Kernel, protocol: Protocol, monkeypatch: pytest.MonkeyPatch
) -> None:
    def wrong_wrap(epoch: int) -> int:
        return u32(2) if epoch == u32(0xFFFFFFFE) else u32(epoch + 1)

    monkeypatch.setattr(exchange, "next_epoch", wrong_wrap)
    found = first_failure(kernel, protocol, 2, range(200), first_epoch=2**32 - 4)
    assert found is not None


@kernels
def test_one_epoch_word_for_all_threads_is_caught(
    kernel: Kernel, protocol: Protocol, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exchange, "EPOCH_NBYTES", 0)
    assert first_failure(kernel, protocol, 2, SEEDS) is not None


@with_sentinel
def test_a_slot_that_is_not_emptied_is_caught(
    kernel: Kernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PacketBuffer, "reset", lambda *_: None)
    assert first_failure(kernel, Protocol.SENTINEL, 2, SEEDS) is not None


@with_sentinel
def test_resets_without_a_fence_are_caught(kernel: Kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PacketBuffer, "fence_resets", lambda _: None)
    assert first_failure(kernel, Protocol.SENTINEL, 2, range(300)) is not None


def test_broadcasts_and_one_shot_reductions_take_turns_on_the_same_slots() -> None:
    moved, reduced = (
        KernelSpec(kernel, Protocol.LL, DTYPES["uint32"], ReduceOp.SUM, 3)
        for kernel in (Kernel.BROADCAST, Kernel.ONE_SHOT)
    )
    calls = [
        Call(moved, 5, 2, root=1),
        Call(reduced, 9, 2),
        Call(moved, 1, 1, root=0),
        Call(moved, 9, 4, root=2),
        Call(reduced, 3, 2),
    ]
    wrong = [wrong_calls(calls, layout_of(Protocol.LL, 3), seed) for seed in range(60)]
    assert wrong == [[]] * 60


@pytest.mark.parametrize(
    ("kernel", "protocol"),
    [
        (Kernel.TWO_SHOT, Protocol.LL),
        (Kernel.TWO_SHOT, Protocol.SENTINEL),
        (Kernel.BROADCAST, Protocol.LL),
    ],
)
def test_many_ranks_are_received_in_parts(kernel: Kernel, protocol: Protocol) -> None:
    spec = KernelSpec(kernel, protocol, DTYPES["float32"], ReduceOp.SUM, 19)
    calls = [Call(spec, 5, 1, root=17), Call(spec, 2, 2, root=3), Call(spec, 41, 1, root=8)]
    assert wrong_calls(calls, layout_of(protocol, 19), seed=1) == []


def wrong_calls_of_lanes(
    protocol: Protocol,
    nranks: int,
    seed: int,
    *,
    kind: type[RandomMachine] = MeetingMachine,
) -> list[tuple[int, int]]:
    """Three calls of a warp: of few packets, of several passes, and of one."""
    spec = KernelSpec(Kernel.ONE_SHOT, protocol, DTYPES["float32"], ReduceOp.SUM, nranks)
    teams = WARP_THREADS // spec.lanes
    layout = LLLayout(nranks, teams * spec.packets_per_thread, spec.nbuffers)
    per_pass = teams * spec.packets_per_thread * spec.payload_nbytes // spec.dtype.itemsize
    counts = 3, 2 * per_pass + per_pass // 2 + 1, 1
    calls = [Call(spec, count, WARP_THREADS) for count in counts]
    return wrong_calls(calls, layout, seed, kind=kind)


@pytest.mark.parametrize("kind", [RandomMachine, MeetingMachine])
@pytest.mark.parametrize("nranks", [16, 19])
@pytest.mark.parametrize("protocol", Protocol)
def test_lanes_share_the_packets_of_many_ranks(
    protocol: Protocol, nranks: int, kind: type[RandomMachine]
) -> None:
    assert wrong_calls_of_lanes(protocol, nranks, seed=1, kind=kind) == []


def test_lanes_that_hand_on_nothing_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(one_shot_wide, "from_lane_before", lambda value, _: value)
    assert wrong_calls_of_lanes(Protocol.LL, 16, seed=1) != []


def looped_call(kernel: Kernel, protocol: Protocol) -> Call:
    return Call(KernelSpec(kernel, protocol, DTYPES["float32"], ReduceOp.SUM, 3), 4, 2, repeats=12)


@kernels
def test_a_body_may_be_looped_within_a_launch(kernel: Kernel, protocol: Protocol) -> None:
    call, layout = looped_call(kernel, protocol), layout_of(protocol, 3)
    assert [wrong_calls([call], layout, seed) for seed in range(40)] == [[]] * 40


def test_a_loop_over_a_body_that_counts_on_the_kernels_end_is_caught(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def not_looped(spec: KernelSpec, layout: LLLayout, *, looped: bool) -> Callable[..., Any]:
        return build(spec, layout)

    monkeypatch.setattr(random_machine, "build", not_looped)
    call = looped_call(Kernel.TWO_SHOT, Protocol.SENTINEL)
    layout = layout_of(Protocol.SENTINEL, 3)

    def fails(seed: int) -> bool:
        try:
            return bool(wrong_calls([call], layout, seed))
        except StuckError:
            return True

    assert any(fails(seed) for seed in range(400))
