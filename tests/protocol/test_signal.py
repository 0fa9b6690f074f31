"""Put and signal under hostile schedules: what a signal covers is there when the signal is."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from shmemar.device import signal
from shmemar.device.groups import all_in_block
from shmemar.device.interpreter import Order, current
from shmemar.device.signal import (
    SIGNAL_ADD,
    SIGNAL_SET,
    put_signal,
    put_signal_block,
    signal_op,
    signal_wait,
    signal_wait_block,
)
from shmemar.host.checker import CheckReport, Symmetric, check_kernel, checked_kernels
from shmemar.host.checker.checked_kernels import UserProgram
from shmemar.host.checker.checked_run import Program, run_seeds
from shmemar.spec import Protocol
from shmemar.user_spec import BufferSpec, UserKernelSpec

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from numpy.typing import NDArray

    from shmemar.host.checker.hostile_machine import HostileMachine
    from shmemar.host.checker.threads import Launch

NWORDS, NCALLS = 8, 4


def ring(ll: Any, thread: int, nthreads: int, box: Any, signals: Any, view: Any, got: Any) -> None:
    """Each call puts other words into the same memory of the right neighbour."""
    right, left = (ll.rank + 1) % ll.size, (ll.rank - 1) % ll.size
    for call in range(1, NCALLS + 1):
        source = box[ll.rank] + 4 * (12 + NWORDS * call)
        shift = call // 2 % 2
        op = SIGNAL_SET if call % 2 else SIGNAL_ADD
        value = call if op == SIGNAL_SET else 1
        put_signal(ll, box[right] + 4 * shift, source, 4 * NWORDS, signals[right], value, op)
        if signal_wait(ll, left, signals[ll.rank], call):
            for i in range(NWORDS):
                got[NWORDS * (call - 1) + i] = view[shift + i]
        signal_op(ll, signals[left] + 8, call, SIGNAL_SET)
        signal_wait(ll, right, signals[ll.rank] + 8, call)


def by_block(
    ll: Any, thread: int, nthreads: int, box: Any, signals: Any, view: Any, got: Any
) -> None:
    """What all threads wrote is put by all of them, and read by all of them; so four times."""
    right, left = (ll.rank + 1) % ll.size, (ll.rank - 1) % ll.size
    outbox = 12
    for call in range(1, NCALLS + 1):
        # The copy gives the words to other threads than those that write them here.
        for i in range(thread, NWORDS, nthreads):
            view[outbox + NWORDS - 1 - i] = word(ll.rank, call, i)
        shift = call // 2 % 2
        put_signal_block(
            ll, box[right] + 4 * shift, box[ll.rank] + 4 * outbox, 4 * NWORDS, signals[right],
            1, SIGNAL_ADD,
        )  # fmt: skip
        if signal_wait_block(ll, left, signals[ll.rank], call):
            for i in range(thread, NWORDS, nthreads):
                got[NWORDS * (call - 1) + i] = view[shift + NWORDS - 1 - i]
        signal.signal_op_block(ll, signals[left] + 8, call, SIGNAL_SET)
        signal_wait_block(ll, right, signals[ll.rank] + 8, call)


def blocks_of_one(
    ll: Any, thread: int, nthreads: int, box: Any, signals: Any, view: Any, got: Any
) -> None:
    """Threads run one after another here, so the first of a block does the work of all."""
    right, left = (ll.rank + 1) % ll.size, (ll.rank - 1) % ll.size
    source = box[ll.rank] + 4 * (12 + NWORDS)
    put_signal_block(ll, box[right], source, 4 * NWORDS, signals[right], 1, SIGNAL_ADD)
    if signal_wait_block(ll, left, signals[ll.rank], 1) and thread == 0:
        for i in range(NWORDS):
            got[i] = view[i]


def word(rank: int, call: int, i: int) -> int:
    return 1 + rank * 1000 + call * 100 + i


def arguments(rank: int, launch: int) -> tuple[Any, ...]:
    first = np.zeros(12 + NWORDS * (NCALLS + 1), np.uint32)
    for call in range(1, NCALLS + 1):
        at = 12 + NWORDS * call
        first[at : at + NWORDS] = [word(rank, call, i) for i in range(NWORDS)]
    box = Symmetric(first)
    got = np.zeros(NWORDS * NCALLS, np.uint32)
    return box, Symmetric(np.zeros(2, np.uint64)), box.array, got


def what_the_left_sent(nranks: int, ncalls: int) -> Callable[[int, int], tuple[Any, ...]]:
    def expected(rank: int, launch: int) -> tuple[Any, ...]:
        left = (rank - 1) % nranks
        got: NDArray[Any] = np.zeros(NWORDS * NCALLS, np.uint32)
        words = [word(left, call, i) for call in range(1, ncalls + 1) for i in range(NWORDS)]
        got[: len(words)] = words
        return None, None, None, got

    return expected


def checked(
    kernel: Callable[..., None], nranks: int, seeds: Iterable[int], threads: int = 1
) -> CheckReport:
    return check_kernel(
        kernel,
        arguments,
        what_the_left_sent(nranks, NCALLS),
        nranks=nranks,
        dtype="int32",
        threads=threads,
        launches=1,
        seeds=seeds,
    )


@pytest.mark.parametrize("nranks", [1, 2, 3])
def test_every_schedule_delivers_what_a_signal_covers(nranks: int) -> None:
    report = checked(ring, nranks, range(150))
    assert report.passed, str(report)


@pytest.mark.parametrize("nranks", [1, 2, 3])
def test_the_first_thread_works_for_a_block_whose_threads_run_one_by_one(nranks: int) -> None:
    buffer = BufferSpec.of(nranks, "int32", threads=3, slots=1, protocol=Protocol.LL)
    spec = UserKernelSpec(blocks_of_one, buffer, ())
    user = UserProgram(spec, 3, 1, 20_000, arguments, what_the_left_sent(nranks, 1))

    def prepare(machine: HostileMachine, seed: int) -> list[Iterator[Launch]]:
        machine.share_work = False
        return user.prepare(machine, seed)

    report = run_seeds(Program("blocks_of_one", nranks, prepare), range(60))
    assert report.passed, str(report)


def test_a_signal_without_release_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    def relaxed(address: int, value: int) -> None:
        current().store(address, (value, 0), Order.RELAXED_SYS)

    monkeypatch.setattr(signal, "st_release_sys_b64", relaxed)
    assert not checked(ring, 2, range(100)).passed


def added_relaxed(address: int, value: int) -> None:
    current().add_b64(address, value, Order.RELAXED_SYS)


def test_an_addition_without_release_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(signal, "red_release_sys_add_u64", added_relaxed)
    assert not checked(ring, 2, range(100)).passed


NTHREADS = 3


@pytest.fixture
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(signal, "BLOCK_THREADS", NTHREADS)
    monkeypatch.setattr(checked_kernels, "BLOCK_THREADS", NTHREADS)


@pytest.mark.usefixtures("_small_blocks")
@pytest.mark.parametrize("nranks", [2, 3])
def test_threads_of_a_block_put_and_read_together(nranks: int) -> None:
    report = checked(by_block, nranks, range(100), NTHREADS)
    assert report.passed, str(report)


def test_a_block_as_large_as_on_a_gpu_puts_together() -> None:
    report = checked(by_block, 2, [1, 4], 128)
    assert report.passed, str(report)


def test_a_part_of_a_block_is_no_block() -> None:
    report = checked(by_block, 2, [0], 100)
    assert "which has 100 threads; expected 128: launch whole blocks" in str(report)


@pytest.mark.usefixtures("_small_blocks")
def test_a_block_that_signals_before_its_threads_have_met_is_caught(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def at_once(ll: Any, address: int, value: int, op: int) -> None:
        if ll.thread == 0:
            signal_op(ll, address, value, op)

    monkeypatch.setattr(signal, "signal_op_block", at_once)
    assert not checked(by_block, 2, range(100), NTHREADS).passed


@pytest.mark.usefixtures("_small_blocks")
def test_a_block_that_copies_before_its_threads_have_met_is_caught(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def only_counted(value: bool) -> bool:
        # A constant is what the meeting before the copy votes.
        return True if value is True else all_in_block(value)

    monkeypatch.setattr(signal, "all_in_block", only_counted)
    assert not checked(by_block, 2, range(100), NTHREADS).passed


@pytest.mark.usefixtures("_small_blocks")
def test_a_signal_of_a_block_without_release_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(signal, "red_release_sys_add_u64", added_relaxed)
    assert not checked(by_block, 2, range(100), NTHREADS).passed
