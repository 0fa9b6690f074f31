"""Put and signal under random schedules: what a signal covers is there when the signal is."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from shmemar.device import signal
from shmemar.device.groups import all_in_block
from shmemar.device.interpreter import Group, current, running
from shmemar.device.kernels import UserArguments, build
from shmemar.device.memory import ld_b32, st_b32
from shmemar.device.signal import (
    SIGNAL_ADD,
    SIGNAL_SET,
    put_signal,
    put_signal_block,
    signal_op,
    signal_wait,
    signal_wait_block,
)
from shmemar.spec import Protocol
from shmemar.user_spec import BufferSpec, UserKernelSpec
from tests.protocol.random_machine import MeetingMachine, RandomMachine, StuckError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

NWORDS, NCALLS = 8, 4
INBOX, OUTBOX, SIGNAL, ACK, CONTROL, EPOCHS = (k << 32 for k in range(1, 7))


def ring(ll: Any, thread: int, nthreads: int, bases: Any, seen: list[int]) -> None:
    """Each call puts other words into the same memory of the right neighbour."""
    right, left = (ll.rank + 1) % ll.size, (ll.rank - 1) % ll.size
    for call in range(1, NCALLS + 1):
        source = bases[ll.rank] + OUTBOX + 4 * NWORDS * call
        inbox = INBOX + 4 * (call // 2 % 2)  # by words, or 16 bytes at a time
        op = SIGNAL_SET if call % 2 else SIGNAL_ADD
        value = call if op == SIGNAL_SET else 1
        put_signal(
            ll, bases[right] + inbox, source, 4 * NWORDS, bases[right] + SIGNAL, value, op
        )  # fmt: skip
        assert signal_wait(ll, left, bases[ll.rank] + SIGNAL, call)
        seen.extend(ld_b32(bases[ll.rank] + inbox + 4 * i) for i in range(NWORDS))
        signal_op(ll, bases[left] + ACK, call, SIGNAL_SET)
        assert signal_wait(ll, right, bases[ll.rank] + ACK, call)


def blocks_of_one(ll: Any, thread: int, nthreads: int, bases: Any, seen: list[int]) -> None:
    """Threads run one after another here, so the first of a block does the work of all."""
    right, left = (ll.rank + 1) % ll.size, (ll.rank - 1) % ll.size
    put_signal_block(
        ll, bases[right] + INBOX, bases[ll.rank] + OUTBOX, 4 * NWORDS, bases[right] + SIGNAL, 1,
        SIGNAL_ADD,
    )  # fmt: skip
    assert signal_wait_block(ll, left, bases[ll.rank] + SIGNAL, 1)
    if thread == 0:
        seen.extend(ld_b32(bases[ll.rank] + INBOX + 4 * i) for i in range(NWORDS))


def word(rank: int, call: int, i: int) -> int:
    return 1 + rank * 1000 + call * 100 + i


def is_right(kernel: Callable[..., None], nranks: int, nthreads: int, seed: int) -> bool:
    machine = RandomMachine(seed)
    spec = UserKernelSpec(kernel, BufferSpec("int32", 1, Protocol.LL, nranks, nthreads, 1), ())
    body = build(spec, spec.buffer.layout)
    bases = tuple((rank + 1) << 40 for rank in range(nranks))
    seen: list[list[int]] = [[] for _ in bases]
    calls = range(1, NCALLS + 1) if kernel is ring else range(1)
    for rank, base in enumerate(bases):
        for call in calls:
            for i in range(NWORDS):
                machine.words[base + OUTBOX + 4 * (NWORDS * call + i)] = word(rank, call, i)

    def threads_of(rank: int) -> list[Callable[[], None]]:
        base = bases[rank]
        arguments = UserArguments(
            bases, base + EPOCHS, base + CONTROL, base + CONTROL + 128, 0, (bases, seen[rank])
        )
        return [lambda t=t: body(arguments, rank, t, nthreads, nthreads) for t in range(nthreads)]  # type: ignore[misc]

    with running(machine):
        machine.run([iter([threads_of(rank)]) for rank in range(nranks)], limit=20_000)
    return all(
        seen[rank] == [word((rank - 1) % nranks, c, i) for c in calls for i in range(NWORDS)]
        for rank in range(nranks)
    )


def first_failure(
    kernel: Callable[..., None], nranks: int, seeds: Iterable[int], nthreads: int = 1
) -> int | None:
    for seed in seeds:
        try:
            if not is_right(kernel, nranks, nthreads, seed):
                return seed
        except StuckError:
            return seed
    return None


@pytest.mark.parametrize("nranks", [1, 2, 3])
def test_every_schedule_delivers_what_a_signal_covers(nranks: int) -> None:
    assert first_failure(ring, nranks, range(150)) is None
    assert first_failure(blocks_of_one, nranks, range(60), nthreads=3) is None


def test_a_signal_without_release_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    def relaxed(address: int, value: int) -> None:
        from shmemar.device.interpreter import Order

        current().store(address, (value, 0), Order.RELAXED_SYS)

    monkeypatch.setattr(signal, "st_release_sys_b64", relaxed)
    assert first_failure(ring, 2, range(100)) is not None


def test_an_addition_without_release_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        signal, "red_release_sys_add_u64", lambda address, value: current().add_b64(address, value)
    )
    assert first_failure(ring, 2, range(100)) is not None


NTHREADS = 3


@pytest.fixture
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(signal, "BLOCK_THREADS", NTHREADS)


def by_block(ll: Any, thread: int, nthreads: int, bases: Any, seen: list[int]) -> None:
    """What all threads wrote is put by all of them, and read by all of them; so four times."""
    right, left = (ll.rank + 1) % ll.size, (ll.rank - 1) % ll.size
    for call in range(1, NCALLS + 1):
        # The copy gives the words to other threads than those that write them here.
        for i in range(thread, NWORDS, nthreads):
            st_b32(bases[ll.rank] + OUTBOX + 4 * (NWORDS - 1 - i), word(ll.rank, call, i))
        inbox = INBOX + 4 * (call // 2 % 2)
        put_signal_block(
            ll, bases[right] + inbox, bases[ll.rank] + OUTBOX, 4 * NWORDS, bases[right] + SIGNAL,
            1, SIGNAL_ADD,
        )  # fmt: skip
        assert signal_wait_block(ll, left, bases[ll.rank] + SIGNAL, call)
        for i in range(thread, NWORDS, nthreads):
            seen[NWORDS * (call - 1) + i] = ld_b32(bases[ll.rank] + inbox + 4 * (NWORDS - 1 - i))
        signal.signal_op_block(ll, bases[left] + ACK, call, SIGNAL_SET)
        assert signal_wait_block(ll, right, bases[ll.rank] + ACK, call)


def first_failure_of_blocks(nranks: int, seeds: Iterable[int]) -> int | None:
    spec = UserKernelSpec(by_block, BufferSpec("int32", 1, Protocol.LL, nranks, 3, 1), ())
    body = build(spec, spec.buffer.layout)
    bases = tuple((rank + 1) << 40 for rank in range(nranks))
    expected = [
        [word((rank - 1) % nranks, call, i) for call in range(1, NCALLS + 1) for i in range(NWORDS)]
        for rank in range(nranks)
    ]
    for seed in seeds:
        machine = MeetingMachine(seed, threads={Group.BLOCK: NTHREADS})
        seen = [[0] * (NWORDS * NCALLS) for _ in bases]

        def threads_of(rank: int, seen: list[list[int]] = seen) -> list[Callable[[], None]]:
            base = bases[rank]
            arguments = UserArguments(
                bases, base + EPOCHS, base + CONTROL, base + CONTROL + 128, 0, (bases, seen[rank])
            )
            return [lambda t=t: body(arguments, rank, t, 3, 3) for t in range(3)]  # type: ignore[misc]

        with running(machine):
            try:
                machine.run([iter([threads_of(rank)]) for rank in range(nranks)], limit=60_000)
            except StuckError:
                return seed
        if seen != expected:
            return seed
    return None


@pytest.mark.usefixtures("_small_blocks")
@pytest.mark.parametrize("nranks", [2, 3])
def test_threads_of_a_block_put_and_read_together(nranks: int) -> None:
    assert first_failure_of_blocks(nranks, range(100)) is None


@pytest.mark.usefixtures("_small_blocks")
def test_a_block_that_signals_before_its_threads_have_met_is_caught(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def at_once(ll: Any, address: int, value: int, op: int) -> None:
        if ll.thread == 0:
            signal_op(ll, address, value, op)

    monkeypatch.setattr(signal, "signal_op_block", at_once)
    assert first_failure_of_blocks(2, range(100)) is not None


@pytest.mark.usefixtures("_small_blocks")
def test_a_block_that_copies_before_its_threads_have_met_is_caught(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def only_counted(value: bool) -> bool:
        # A constant is what the meeting before the copy votes.
        return True if value is True else all_in_block(value)

    monkeypatch.setattr(signal, "all_in_block", only_counted)
    assert first_failure_of_blocks(2, range(100)) is not None


@pytest.mark.usefixtures("_small_blocks")
def test_a_signal_of_a_block_without_release_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        signal, "red_release_sys_add_u64", lambda address, value: current().add_b64(address, value)
    )
    assert first_failure_of_blocks(2, range(100)) is not None
