"""Each thing that can be wrong with a run, and what is told of it."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from shmemar.device.groups import all_in_block, all_in_warp
from shmemar.device.memory import (
    exch_relaxed_sys_b32,
    ld_b32,
    ld_relaxed_sys_b32,
    ld_relaxed_sys_v4_b32,
    red_relaxed_sys_add_u32,
    relax,
    st_b8,
    st_b32,
    st_relaxed_sys_v4_b32,
)
from shmemar.device.words import u64
from shmemar.dtypes import DTYPES, ReduceOp
from shmemar.errors import ArgumentError, ArgumentTypeError, BackendUnavailableError
from shmemar.host.checker import (
    Call,
    CallSequence,
    Failure,
    ScheduleKind,
    Symmetric,
    Verdict,
    check,
    check_kernel,
    check_sequence,
    checked_calls,
)
from shmemar.host.checker.checked_run import Program, run_seeds
from shmemar.layout import LLLayout
from shmemar.spec import PACKET_PROTOCOLS, Kernel, KernelSpec, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable

    from shmemar.host.checker import CheckReport

FEW = 40


def run(
    kernel: Callable[..., None], expected: float = 0.0, seeds: range = range(FEW), **options: Any
) -> CheckReport:
    """Check a kernel of one array of four numbers, at first all 0, on two ranks."""
    return check_kernel(
        kernel,
        lambda rank, launch: (np.zeros(4, np.float32),),
        lambda rank, launch: (np.full(4, expected, np.float32),),
        threads=options.pop("threads", 1),
        launches=options.pop("launches", 1),
        seeds=seeds,
        **options,
    )


def failure_of(kernel: Callable[..., None], **options: Any) -> Failure:
    report = run(kernel, **options)
    assert report.failure is not None
    return report.failure


def idle(ll: Any, thread: int, nthreads: int, x: Any) -> None:
    pass


def puts_two(ll: Any, thread: int, nthreads: int, x: Any) -> None:
    x[2] = 2


def test_a_wrong_value_is_told_with_its_place() -> None:
    assert run(idle).passed
    failure = failure_of(puts_two)
    assert failure.verdict is Verdict.WRONG_VALUE
    assert failure.message[7:] == (
        "got 2.0 for element 2 of argument 0, expected 0.0, in puts_two (launch 0)"
    )


def waits_for_more(ll: Any, thread: int, nthreads: int, x: Any) -> None:
    ll.bcast(0, 1.0)
    ll.recv_reduce(0, 1.0, max)
    ll.recv(1 - ll.rank, 1)


def test_a_deadlock_is_told_with_what_is_polled() -> None:
    failure = failure_of(waits_for_more, slots=2)
    assert failure.verdict is Verdict.DEADLOCK
    assert "rank 0 thread 0 polls rank 0's region of float32/ll, buffer " in failure.message
    assert ", from rank 1, slot 128; rank 1 thread 0 polls" in failure.message
    assert any("times)" in move for move in failure.moves)


def spins(ll: Any, thread: int, nthreads: int, x: Any) -> None:
    while True:
        x[0] = 1.0


def test_a_thread_without_end_is_a_livelock() -> None:
    failure = failure_of(spins, seeds=range(1), steps=5000)
    assert failure.verdict is Verdict.LIVELOCK
    assert failure.message == "no end after 5000 operations"


def gives_up_soon(ll: Any, thread: int, nthreads: int, x: Any) -> None:
    for _ in range(90):
        if x[0] != 0.0:
            break
        relax()
    if ll.rank == 0:
        ll.bcast(0, 1.0)
        ll.recv(1, 0)
    else:
        ll.bcast(0, 1.0)
        ll.recv(0, 0)


def test_a_loop_that_gives_up_is_no_deadlock() -> None:
    report = run(gives_up_soon)
    assert report.passed, str(report)


def sends_twice(ll: Any, thread: int, nthreads: int, x: Any) -> None:
    ll.bcast(0, 1.0)
    ll.bcast(0, 2.0)
    ll.recv(1 - ll.rank, 0)


@pytest.mark.parametrize("protocol", PACKET_PROTOCOLS)
def test_a_slot_written_twice_in_an_epoch_is_told_at_once(protocol: Protocol) -> None:
    failure = failure_of(sends_twice, protocol=protocol)
    assert failure.verdict is Verdict.WRITTEN_TWICE
    assert "and sent another one there in that epoch; expected one." in failure.message


def leaves_one_unread(ll: Any, thread: int, nthreads: int, x: Any) -> None:
    for _ in range(6):
        ll.bcast(0, 1.0)
        ll.bcast(1, 2.0)
        ll.recv(1 - ll.rank, 0)
        ll.advance_epoch()


@pytest.mark.parametrize("protocol", PACKET_PROTOCOLS)
def test_a_slot_reused_before_it_was_read_is_told(protocol: Protocol) -> None:
    failure = failure_of(leaves_one_unread, protocol=protocol, slots=2)
    assert failure.verdict is Verdict.REUSED
    assert "had not read" in failure.message


def only_to_the_right(ll: Any, thread: int, nthreads: int, x: Any) -> None:
    ll.send((ll.rank + 1) % ll.size, 0, 1.0)
    ll.recv((ll.rank + ll.size - 1) % ll.size, 0)


def test_an_epoch_that_leaves_out_a_peer_is_told_with_counts() -> None:
    assert run(only_to_the_right).passed  # of two ranks both are the right one
    failure = failure_of(only_to_the_right, nranks=3)
    assert failure.verdict is Verdict.ONE_WAY
    assert "1 to and 0 from rank" in failure.message


def beyond(ll: Any, thread: int, nthreads: int, x: Any) -> None:
    x[4] = 1.0


def sliced(ll: Any, thread: int, nthreads: int, x: Any) -> None:
    x[0:2]


def into_the_peers_place(ll: Any, thread: int, nthreads: int, x: Any) -> None:
    st_relaxed_sys_v4_b32(u64(ll.packets.peers[1 - ll.rank] + 0), 1, 2, 3, 4)
    st_relaxed_sys_v4_b32(u64(ll.packets.peers[1 - ll.rank] + 16 * 128), 1, 2, 3, 4)


def a_word_of_a_packet(ll: Any, thread: int, nthreads: int, x: Any) -> None:
    st_b32(ll.packets.peers[1 - ll.rank] + 16 * 128 * ll.rank, 1)


def a_byte_of_a_packet(ll: Any, thread: int, nthreads: int, x: Any) -> None:
    st_b8(ll.packets.peers[1 - ll.rank] + 16 * 128 * ll.rank, 1)


def an_addition_to_a_packet(ll: Any, thread: int, nthreads: int, x: Any) -> None:
    red_relaxed_sys_add_u32(ll.packets.peers[1 - ll.rank], 1)


def an_exchange_in_a_packet(ll: Any, thread: int, nthreads: int, x: Any) -> None:
    exch_relaxed_sys_b32(ll.packets.peers[1 - ll.rank], 1)


def into_its_own_region(ll: Any, thread: int, nthreads: int, x: Any) -> None:
    st_relaxed_sys_v4_b32(ll.packets.peers[ll.rank] + 16 * 128 * (1 - ll.rank), 1, 2, 3, 4)


def reads_the_peers_region(ll: Any, thread: int, nthreads: int, x: Any) -> None:
    ld_relaxed_sys_v4_b32(ll.packets.peers[1 - ll.rank])


def behind_the_region(ll: Any, thread: int, nthreads: int, x: Any) -> None:
    st_relaxed_sys_v4_b32(ll.packets.peers[1 - ll.rank] + (1 << 20), 1, 2, 3, 4)


def nowhere(ll: Any, thread: int, nthreads: int, x: Any) -> None:
    exch_relaxed_sys_b32(16, 1)


def askew(ll: Any, thread: int, nthreads: int, x: Any) -> None:
    ld_relaxed_sys_v4_b32(ll.packets.peers[ll.rank] + 8)


def a_byte_of_nothing(ll: Any, thread: int, nthreads: int, x: Any) -> None:
    st_b8(0, 1)


@pytest.mark.parametrize(
    ("kernel", "told"),
    [
        (beyond, "argument 0 has index 4, and 4 elements"),
        (into_the_peers_place, "in a place for rank"),
        (a_word_of_a_packet, "expected a whole packet"),
        (a_byte_of_a_packet, "would change 1 bytes at rank"),
        (an_addition_to_a_packet, "expected stores of whole packets there"),
        (an_exchange_in_a_packet, "expected stores of whole packets there"),
        (into_its_own_region, "expected sentinels, where a peer sends sentinel packets"),
        (reads_the_peers_region, "would load from 16 bytes at rank"),
        (
            behind_the_region,
            "region of float32/ll + 1048576 of 8192 bytes; its launch may not",
        ),
        (nowhere, "would store to 4 bytes at 0x10, which is no memory; its launch may not"),
        (askew, "slot 0 + 8 bytes; that is not aligned"),
        (a_byte_of_nothing, "would store to 1 bytes at 0x0, which is no memory"),
    ],
)
def test_memory_that_a_rank_may_not_touch_is_told(kernel: Callable[..., None], told: str) -> None:
    failure = failure_of(kernel)
    assert failure.verdict is Verdict.OUTSIDE
    assert told in failure.message


def test_another_layouts_region_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    one, two = (
        KernelSpec(kernel, Protocol.LL, DTYPES["float32"], ReduceOp.SUM, 2)
        for kernel in (Kernel.ONE_SHOT, Kernel.TWO_SHOT)
    )
    sequence = CallSequence((Call(one, 4, 2), Call(two, 4, 2)))
    monkeypatch.setattr(checked_calls, "region_of", lambda spec: spec.protocol)
    monkeypatch.setattr(
        checked_calls,
        "layout_of",
        lambda spec: LLLayout(2, 4 if spec.kernel is Kernel.ONE_SHOT else 2),
    )
    report = check_sequence(sequence, [0])
    assert report.failure is not None
    assert report.failure.verdict is Verdict.OTHER_LAYOUT
    assert "its launch has another one" in report.failure.message


def divides(ll: Any, thread: int, nthreads: int, x: Any) -> None:
    x[0] = 1 // (thread * 0)


def test_an_exception_in_a_kernel_is_told() -> None:
    failure = failure_of(divides)
    assert failure.verdict is Verdict.RAISED
    assert " thread 0 of divides (launch 0) raised ZeroDivisionError" in failure.message
    assert "expected one integer: kernels that are checked load" in failure_of(sliced).message


def comes_alone(ll: Any, thread: int, nthreads: int, x: Any) -> None:
    if thread != 1:
        all_in_warp(True)  # noqa: FBT003
    else:
        ll.recv(1 - ll.rank, 0)


def test_threads_that_wait_for_one_that_does_not_come_are_stuck() -> None:
    failure = failure_of(comes_alone, threads=32)
    assert failure.verdict is Verdict.DEADLOCK
    assert "rank 0 thread 0 waits for threads of its warp that do not come" in failure.message


def one_ends(ll: Any, thread: int, nthreads: int, x: Any) -> None:
    if thread != 1 and not all_in_block(True):  # noqa: FBT003
        x[thread % 4] = 3.0


def test_a_thread_that_has_ended_counts_as_one_that_votes_against() -> None:
    report = run(one_ends, 3.0, threads=128, seeds=range(2))
    assert report.passed, str(report)


# The same run again


def test_a_seed_makes_the_same_run_again() -> None:
    first, again = (failure_of(leaves_one_unread, slots=2) for _ in range(2))
    assert first == again
    alone = failure_of(leaves_one_unread, slots=2, seeds=range(first.seed, first.seed + 1))
    assert alone == first
    assert 0 < len(first.moves) <= 20
    text = str(first)
    assert f"seed {first.seed}, schedule {first.schedule};" in text
    assert all(move in text for move in first.moves)


def test_a_run_that_depends_on_something_else_is_told_as_such() -> None:
    kept: list[int] = []

    def changes(ll: Any, thread: int, nthreads: int, x: Any) -> None:
        kept.append(1)
        x[0] = float(len(kept))

    message = failure_of(changes).message
    assert "the kernel depends on something that the checker does not set" in message


@pytest.mark.parametrize("kind", ScheduleKind)
def test_each_kind_of_schedule_is_named_in_the_failure(kind: ScheduleKind) -> None:
    assert failure_of(sends_twice, schedule=kind.value).schedule == kind.value


# What is refused


def test_without_greenlet_the_error_names_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "greenlet", None)
    with pytest.raises(BackendUnavailableError, match=r"pip install shmemar\[check\]"):
        run(idle)
    with pytest.raises(BackendUnavailableError, match=r"pip install shmemar\[check\]"):
        check(Kernel.ONE_SHOT, Protocol.LL, 2, [0])


def raises(ll: Any, thread: int, nthreads: int, x: Any) -> None:
    raise ValueError


@pytest.mark.parametrize(
    ("options", "error", "told"),
    [
        ({"nranks": 0}, ArgumentError, "nranks is 0; expected 1 to 64"),
        ({"nranks": True}, ArgumentError, "nranks is True; expected 1 to 64"),
        ({"launches": 0}, ArgumentError, "launches is 0; expected a positive integer"),
        ({"seeds": ()}, ArgumentError, "seeds is empty; expected one or more"),
        ({"steps": 1.5}, ArgumentError, "steps is 1.5; expected a positive integer"),
        ({"threads": 0}, ArgumentError, "threads is 0; expected a positive integer"),
        ({"protocol": "mail"}, ArgumentError, "protocol is 'mail'; expected one of ll, sentinel"),
        ({"dtype": "float16"}, ArgumentTypeError, "dtype is float16; expected"),
        ({"schedule": "mild"}, ArgumentError, "schedule is 'mild'; expected one of uniform, slow"),
        ({"schedule": "exhaustive"}, ArgumentError, r"round_robin, priorities\.$"),
    ],
)
def test_an_argument_that_cant_be_is_refused(
    options: dict[str, Any], error: type[Exception], told: str
) -> None:
    with pytest.raises(error, match=told):
        run(idle, **options)


def test_what_is_no_function_is_refused() -> None:
    with pytest.raises(ArgumentTypeError, match="kernel is int; expected a plain Python function"):
        run(3)  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="kernel raises has a raise or an assert"):
        run(raises)
    for name in ("arguments", "expected"):
        given: Any = {"arguments": lambda *_: (), "expected": lambda *_: (), name: ()}
        with pytest.raises(ArgumentTypeError, match=f"{name} is tuple; expected a function {name}"):
            check_kernel(idle, **given)


def anything(ll: Any, thread: int, nthreads: int, *given: Any) -> None:
    pass


def nothing_known(rank: int, launch: int) -> tuple[None]:
    return (None,)


@pytest.mark.parametrize(
    ("argument", "error", "told"),
    [
        ("text", ArgumentTypeError, "argument 0 is str; expected a numpy array"),
        (1j, ArgumentTypeError, "argument 0 is complex"),
        (np.zeros(0), ArgumentError, "argument 0 has 0 elements of float64"),
        (
            np.zeros(2, "U3"),
            ArgumentError,
            "expected one or more numbers of 1, 2, 4, 8 or 16 bytes",
        ),
        (Symmetric(np.zeros(2)).array, ArgumentError, "a symmetric array that is no argument"),
    ],
)
def test_an_argument_that_kernels_cant_take_is_refused(
    argument: Any, error: type[Exception], told: str
) -> None:
    with pytest.raises(error, match=told):
        check_kernel(anything, lambda *_: (argument,), nothing_known, seeds=[0])


@pytest.mark.parametrize(
    "other", [(), (np.zeros(2),), (Symmetric(np.zeros(3)),)], ids=["none", "another", "longer"]
)
def test_a_symmetric_argument_is_one_on_all_ranks(other: tuple[Any, ...]) -> None:
    with pytest.raises(ArgumentError, match="argument 0 is symmetric on rank 0, of 16 bytes"):
        check_kernel(
            anything,
            lambda rank, _: other if rank else (Symmetric(np.zeros(2)),),
            nothing_known,
            seeds=[0],
        )


def test_what_is_expected_must_fit_the_arguments() -> None:
    def arguments(rank: int, launch: int) -> tuple[Any]:
        return (np.zeros(2),)

    with pytest.raises(ArgumentError, match="has 2 items; expected 1, one for each argument"):
        check_kernel(anything, arguments, lambda *_: (None, None), seeds=[0])
    with pytest.raises(ArgumentError, match="has 3 elements for argument 0; expected 2"):
        check_kernel(anything, arguments, lambda *_: (np.zeros(3),), seeds=[0])


def test_a_pair_that_there_is_not_is_refused() -> None:
    with pytest.raises(ArgumentError, match="protocol is sentinel, and kernel broadcast; expected"):
        check(Kernel.BROADCAST, Protocol.SENTINEL, 2)
    with pytest.raises(ArgumentError, match="nranks is 65; expected 1 to 64"):
        check(Kernel.ONE_SHOT, Protocol.LL, 65)
    with pytest.raises(ArgumentError, match="seeds is empty; expected one or more"):
        check(Kernel.ONE_SHOT, Protocol.LL, 2, [], "exhaustive")
    with pytest.raises(ArgumentError, match="schedule is exhaustive, and nranks 16; expected less"):
        check(Kernel.ONE_SHOT, Protocol.LL, 16, range(1), "exhaustive")


# What kernels see


def sees_all(
    ll: Any, thread: int, nthreads: int, box: Any, own: Any, halves: Any, n: int, f: float
) -> None:
    box_address = box[ll.rank]
    own[1] = own[0] + n + len(own) + own.shape[0]
    own[-1] = ld_b32(box_address)
    halves[1] = halves[0]
    st_b32(box[1 - ll.rank] + 4 * 2, ll.rank + 1)
    while ld_relaxed_sys_b32(box_address + 8) == 0:
        relax()


def test_arguments_arrive_as_they_do_in_a_launch() -> None:
    def arguments(rank: int, launch: int) -> tuple[Any, ...]:
        box = Symmetric(np.array([5 + rank, 0, 0, 0], np.uint32))
        return box, box.array, np.array([1.5, 0], np.float16), 3, 0.5

    def expected(rank: int, launch: int) -> tuple[Any, ...]:
        own = np.array([5 + rank, 5 + rank + 3 + 8, 2 - rank, 5 + rank], np.uint32)
        return own, own, np.array([1.5, 1.5], np.float16), None, None

    report = check_kernel(sees_all, arguments, expected, threads=1, launches=1, seeds=range(20))
    assert report.passed, str(report)


def test_a_report_says_what_was_run() -> None:
    report = run(idle, seeds=range(3))
    assert str(report) == "idle, 2 ranks, 3 runs: passed"
    assert report.operations > 0
    wrong = run(puts_two)
    assert str(wrong).startswith("puts_two, 2 ranks, 1 runs: wrong value: rank")
    both = report.joined(wrong)
    assert (both.runs, both.failure) == (4, wrong.failure)
    assert both.operations == report.operations + wrong.operations


def test_an_error_of_what_prepares_a_run_is_not_taken_for_the_kernels() -> None:
    def prepare(machine: Any, seed: int) -> Any:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        run_seeds(Program("none", 2, prepare), [0])
