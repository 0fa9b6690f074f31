"""Every kernel's own source under hundreds of hostile schedules."""

from __future__ import annotations

import pytest

from shmemar.device.groups import WARP_THREADS
from shmemar.device.kernels import build, one_shot_wide
from shmemar.device.packet_buffer import PacketBuffer
from shmemar.dtypes import DTYPES, ReduceOp, supported_ops
from shmemar.host.checker import (
    PAIRS,
    Call,
    CallSequence,
    CheckReport,
    ScheduleKind,
    Verdict,
    check,
    check_sequence,
    checked_calls,
)
from shmemar.layout import LINE_LANES, LLLayout
from shmemar.spec import PACKET_PROTOCOLS, Kernel, KernelSpec, Protocol, why_impossible

kernels = pytest.mark.parametrize(
    ("kernel", "protocol"), PAIRS, ids=[f"{k.value}-{p.value}" for k, p in PAIRS]
)


@pytest.fixture(scope="session")
def nseeds(request: pytest.FixtureRequest) -> int:
    found: int = request.config.getoption("--protocol-seeds")
    return found


@kernels
@pytest.mark.parametrize("nranks", [1, 2, 3, 4, 8])
def test_nothing_is_found_in_sequences_of_calls(
    kernel: Kernel, protocol: Protocol, nranks: int, nseeds: int
) -> None:
    runs = nseeds if nranks < 8 else -(-nseeds // 6)  # of many operations each
    if kernel is Kernel.LL128_ATOMIC:
        runs = -(-nseeds // 18) if nranks == 8 else -(-nseeds // 3)
    if kernel.has_barriers:  # with a thread for each rank, their square
        runs = -(-runs // 3)
    report = check(kernel, protocol, nranks, range(runs))
    assert report.passed, str(report)
    assert report.runs == runs


@kernels
@pytest.mark.parametrize("kind", ScheduleKind)
def test_nothing_is_found_under_any_kind_of_schedule(
    kernel: Kernel, protocol: Protocol, kind: ScheduleKind
) -> None:
    few = kernel.has_barriers or kernel is Kernel.LL128_ATOMIC
    seeds = range(100, 102 if few else 106)
    report = check(kernel, protocol, 3, seeds, kind.value)
    assert report.passed, str(report)


@kernels
def test_nothing_is_found_in_all_schedules_of_few_deviations(
    kernel: Kernel, protocol: Protocol, nseeds: int
) -> None:
    runs = (3 if kernel.has_barriers else 10) * nseeds
    if kernel is Kernel.LL128_ATOMIC:  # of 16 threads, and not 2: a run takes as long as a hundred
        runs = -(-nseeds // 8)
    report = check(kernel, protocol, 2, range(runs), "exhaustive")
    assert report.passed, str(report)
    assert report.runs == runs


@pytest.mark.parametrize("share_work", [True, False])
def test_two_warps_and_two_packets_a_lane_are_checked(share_work: bool) -> None:
    floats, pairs = (
        KernelSpec(Kernel.ONE_SHOT, Protocol.LL, DTYPES[name], op, 16)
        for name, op in (("float32", ReduceOp.SUM), ("complex128", ReduceOp.PROD))
    )
    # The second warp has something to do in the first pass only, then nothing, then a part.
    calls = Call(floats, 70, 64), Call(floats, 9, 64), Call(floats, 45, 64), Call(pairs, 3, 32)
    report = check_sequence(CallSequence(calls, share_work=share_work), range(1))
    assert report.passed, str(report)


def mixed_calls(kernel: Kernel, protocol: Protocol, nranks: int) -> tuple[Call, ...]:
    """Calls of several sizes, grids and passes, one of them with two packets a thread."""
    floats = KernelSpec(kernel, protocol, DTYPES["float32"], ReduceOp.SUM, nranks)
    if kernel is Kernel.LL128_ATOMIC:
        share = nranks * floats.line_elements
        halves = KernelSpec(kernel, protocol, DTYPES["bfloat16"], ReduceOp.SUM, nranks)
        return Call(floats, 3 * share, 8), Call(halves, share + 1, 16), Call(floats, 4 * share, 16)
    pairs = KernelSpec(kernel, protocol, DTYPES["complex128"], ReduceOp.PROD, nranks)
    # So many elements fill a packet of each share of a thread.
    scale = floats.payload_nbytes // 8 * (nranks if kernel.is_two_shot else 1)
    return (
        Call(floats, 3 * scale, 2),
        Call(floats, 1, 1),
        Call(floats, 9 * scale, 2),
        Call(pairs, 2 * scale, 1),
        Call(floats, 5 * scale - 1, 4),
        Call(floats, 2 * scale, 1),
        Call(floats, 7 * scale + 1, 2),
    )


@pytest.mark.parametrize(("name", "passes"), [("float32", 2), ("bfloat16", 1)])
def test_warps_as_wide_as_on_a_gpu_add_four_lines(
    monkeypatch: pytest.MonkeyPatch, name: str, passes: int
) -> None:
    spec = KernelSpec(Kernel.LL128_ATOMIC, Protocol.SENTINEL, DTYPES[name], ReduceOp.SUM, 2)
    layout = LLLayout(2, WARP_THREADS, spec.nbuffers, spec.accumulators)
    monkeypatch.setattr(checked_calls, "layout_of", lambda _: layout)
    monkeypatch.setattr(CallSequence, "warp_threads", WARP_THREADS)
    # Three lines of data a pass and one of what they displace, on each rank, and a little more.
    count = (3 * passes - 1) * 2 * spec.line_elements + 5
    report = check_sequence(CallSequence((Call(spec, count, WARP_THREADS),)), range(4))
    assert report.passed, str(report)


@kernels
@pytest.mark.parametrize("first_epoch", [2**31 - 3, 2**32 - 4, 2**32 - 5])
def test_epochs_pass_the_wrap(kernel: Kernel, protocol: Protocol, first_epoch: int) -> None:
    sequence = CallSequence(mixed_calls(kernel, protocol, 2), first_epoch)
    few = kernel.has_barriers or kernel is Kernel.LL128_ATOMIC
    report = check_sequence(sequence, range(9 if few else 30))
    assert report.passed, str(report)


@kernels
def test_a_graph_is_replayed_with_other_data(kernel: Kernel, protocol: Protocol) -> None:
    sequence = CallSequence(mixed_calls(kernel, protocol, 2), replays=5)
    report = check_sequence(sequence, range(3 if kernel is Kernel.LL128_ATOMIC else 10))
    assert report.passed, str(report)


@kernels
def test_calls_overlap_as_programmatic_launch_lets_them(kernel: Kernel, protocol: Protocol) -> None:
    sequence = CallSequence(mixed_calls(kernel, protocol, 3), resident=6)
    report = check_sequence(sequence, range(6 if kernel is Kernel.LL128_ATOMIC else 20))
    assert report.passed, str(report)


@pytest.mark.parametrize("nranks", [1, 4])
@pytest.mark.parametrize(
    ("kernel", "protocol", "name", "op"),
    [
        (*pair, name, op)
        for pair in PAIRS
        if pair[0] is not Kernel.BARRIER  # which has no data
        for name, dtype in DTYPES.items()
        for op in supported_ops(dtype)
        if not why_impossible(*pair, dtype, op, 4)
    ],
)
def test_every_type_and_operator_is_exact(
    kernel: Kernel, protocol: Protocol, name: str, op: ReduceOp, nranks: int
) -> None:
    spec = KernelSpec(kernel, protocol, DTYPES[name], op, nranks)
    counts = ((5, 2), (2, 2), (1, 1), (37, 2))
    # Of a kernel whose warps work together a thread stands for one.
    lanes = LINE_LANES if kernel is Kernel.LL128_ATOMIC else 1
    calls = tuple(Call(spec, count, lanes * nthreads, shift=1) for count, nthreads in counts)
    report = check_sequence(CallSequence(calls), [1])
    assert report.passed, str(report)


def test_broadcasts_and_one_shot_reductions_take_turns_on_the_same_slots() -> None:
    moved, reduced = (
        KernelSpec(kernel, Protocol.LL, DTYPES["uint32"], ReduceOp.SUM, 3)
        for kernel in (Kernel.BROADCAST, Kernel.ONE_SHOT)
    )
    calls = (
        Call(moved, 5, 2, root=1),
        Call(reduced, 9, 2),
        Call(moved, 1, 1, root=0),
        Call(moved, 9, 4, root=2),
        Call(reduced, 3, 2),
    )
    report = check_sequence(CallSequence(calls), range(60))
    assert report.passed, str(report)


@pytest.mark.parametrize(
    ("kernel", "protocol", "share_work"),
    [
        (Kernel.BARRIER_ONE_SHOT, Protocol.PULL, True),
        (Kernel.BARRIER_ONE_SHOT, Protocol.PUSH, False),
        (Kernel.BARRIER_TWO_SHOT, Protocol.PULL, False),
        (Kernel.BARRIER_TWO_SHOT, Protocol.PUSH, False),
        (Kernel.BARRIER, Protocol.PUSH, True),
    ],
)
def test_a_block_meets_those_of_many_ranks(
    kernel: Kernel, protocol: Protocol, share_work: bool
) -> None:
    spec = KernelSpec(kernel, protocol, DTYPES["float32"], ReduceOp.SUM, 17)
    counts = (9, 1, 67) if kernel.reduces else (0, 0, 0)
    calls = tuple(Call(spec, count, 17) for count in counts)
    report = check_sequence(CallSequence(calls, share_work=share_work), [4])
    assert report.passed, str(report)


@pytest.mark.parametrize(
    ("kernel", "protocol"),
    # Of lines a run of so many ranks takes a minute.
    [pair for pair in PAIRS if not pair[0].has_barriers and pair[0] is not Kernel.LL128_ATOMIC],
)
def test_many_ranks_are_received_in_parts(kernel: Kernel, protocol: Protocol) -> None:
    report = check(kernel, protocol, 17, [3])
    assert report.passed, str(report)


@pytest.mark.parametrize("share_work", [True, False])
@pytest.mark.parametrize("nranks", [16, 19])
@pytest.mark.parametrize("protocol", PACKET_PROTOCOLS)
def test_lanes_share_the_packets_of_many_ranks(
    protocol: Protocol, nranks: int, share_work: bool
) -> None:
    report = check_sequence(calls_of_lanes(protocol, nranks, share_work=share_work), [1])
    assert report.passed, str(report)


def test_lanes_that_hand_on_nothing_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(one_shot_wide, "from_lane_before", lambda value, _: value)
    report = check_sequence(calls_of_lanes(Protocol.LL, 16, share_work=True), [1])
    assert report.failure is not None
    assert report.failure.verdict is Verdict.WRONG_VALUE


def six_passes_of_lanes() -> CheckReport:
    """Sentinel packets need their fence in all passes but the first and the last."""
    spec = KernelSpec(Kernel.ONE_SHOT, Protocol.SENTINEL, DTYPES["float32"], ReduceOp.SUM, 16)
    per_pass = WARP_THREADS // spec.lanes * spec.payload_nbytes // spec.dtype.itemsize
    call = Call(spec, 5 * per_pass + 3, WARP_THREADS)
    return check_sequence(CallSequence((call,)), [0], ScheduleKind.NEWEST_FIRST.value)


def test_lanes_fence_their_resets_in_passes() -> None:
    report = six_passes_of_lanes()
    assert report.passed, str(report)


def test_resets_of_lanes_without_a_fence_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PacketBuffer, "fence_resets", lambda _: None)
    report = six_passes_of_lanes()
    assert report.failure is not None
    assert report.failure.verdict is Verdict.REUSED


def looped_lanes(seeds: range) -> CheckReport:
    """What benchmarks do; a launch of a communicator runs the body once."""
    spec = KernelSpec(Kernel.ONE_SHOT, Protocol.LL, DTYPES["float32"], ReduceOp.SUM, 16)
    call = Call(spec, 5, WARP_THREADS, repeats=3)
    return check_sequence(CallSequence((call,)), seeds)


def test_lanes_may_loop_a_body_within_a_launch() -> None:
    report = looped_lanes(range(9))
    assert report.passed, str(report)


def test_lanes_that_do_not_meet_behind_the_epochs_store_are_caught(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # With LL packets, which need no fence, a looped body differs in that meeting alone.
    monkeypatch.setattr(checked_calls, "body_of", lambda call, layout: build(call.spec, layout))
    assert not looped_lanes(range(9)).passed


def calls_of_lanes(protocol: Protocol, nranks: int, *, share_work: bool) -> CallSequence:
    """Three calls of a warp: of few packets, of several passes, and of one."""
    spec = KernelSpec(Kernel.ONE_SHOT, protocol, DTYPES["float32"], ReduceOp.SUM, nranks)
    teams = WARP_THREADS // spec.lanes
    per_pass = teams * spec.packets_per_thread * spec.payload_nbytes // spec.dtype.itemsize
    counts = 3, 2 * per_pass + per_pass // 2 + 1, 1
    calls = tuple(Call(spec, count, WARP_THREADS) for count in counts)
    return CallSequence(calls, share_work=share_work)


@kernels
def test_a_body_may_be_looped_within_a_launch(kernel: Kernel, protocol: Protocol) -> None:
    spec = KernelSpec(kernel, protocol, DTYPES["float32"], ReduceOp.SUM, 3)
    is_line = kernel is Kernel.LL128_ATOMIC
    call = Call(spec, 4, LINE_LANES, repeats=4) if is_line else Call(spec, 4, 2, repeats=12)
    report = check_sequence(CallSequence((call,)), range(4 if is_line else 40))
    assert report.passed, str(report)
