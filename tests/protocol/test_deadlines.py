"""A peer that never comes: one record, every thread ends, and nothing waits twice."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import pytest

from shmemar.device import watchdog
from shmemar.device.groups import WARP_THREADS
from shmemar.device.interpreter import running
from shmemar.device.kernels import KernelArguments, build, one_shot_wide
from shmemar.dtypes import DTYPES, ReduceOp
from shmemar.host.failure import failure_from
from shmemar.layout import FAILURE_DTYPE, LLLayout
from shmemar.spec import Kernel, KernelSpec, Protocol
from tests.protocol.random_machine import MeetingMachine, RandomMachine, StuckError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

LAYOUT = LLLayout(3, nslots=4)
SPEC = KernelSpec(Kernel.ONE_SHOT, Protocol.LL, DTYPES["float32"], ReduceOp.SUM, 3)
EPOCHS, BROKEN, RECORD, ARRAYS = 1 << 32, 2 << 32, (2 << 32) + 128, 3 << 32
OUTPUT = ARRAYS + 4096


@pytest.fixture(autouse=True)
def _looks_come_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Look at the clock every 4 polls, which the interpreter's pace asks for."""
    monkeypatch.setattr("shmemar.device.packet_buffer.POLLS_PER_LOOK", 4)


def run_without_rank_2(seed: int, nlaunches: int) -> RandomMachine:
    """Launch on ranks 0 and 1 only, 4 threads each."""
    return run_without_last(RandomMachine(seed, tick_ns=40), SPEC, LAYOUT, 4, nlaunches)


def run_without_last(
    machine: RandomMachine, spec: KernelSpec, layout: LLLayout, nthreads: int, nlaunches: int = 1
) -> RandomMachine:
    """Launch on all ranks but the last, of a message of 9 elements."""
    bases = tuple((rank + 1) << 40 for rank in range(spec.nranks))
    body = build(spec, layout)

    def launches(rank: int) -> Iterator[list[Callable[[], None]]]:
        base = bases[rank]
        for _ in range(nlaunches):

            def thread(index: int) -> None:
                arguments = KernelArguments.of_message(
                    spec,
                    base + ARRAYS,
                    base + OUTPUT,
                    9,
                    peers=bases,
                    epochs=base + EPOCHS,
                    broken=base + BROKEN,
                    record=base + RECORD,
                    timeout_ns=1000,
                )
                body(arguments, rank, index, nthreads, nthreads)

            yield [lambda index=index: thread(index) for index in range(nthreads)]  # type: ignore[misc]

    with running(machine), np.errstate(over="ignore"):
        machine.run([launches(rank) for rank in range(spec.nranks - 1)])
        machine.drain(lambda _: True)
    return machine


def record_of(machine: RandomMachine, rank: int) -> bytes:
    base = ((rank + 1) << 40) + RECORD
    words = [machine.words.get(base + 4 * i, 0) for i in range(FAILURE_DTYPE.itemsize // 4)]
    return np.array(words, "<u4").tobytes()


@pytest.mark.parametrize("seed", range(30))
def test_every_thread_ends_and_the_record_names_the_missing_rank(seed: int) -> None:
    machine = run_without_rank_2(seed, nlaunches=1)
    for rank in (0, 1):
        failure = failure_from(partial(record_of, machine, rank), 1e-6)
        assert failure is not None
        assert failure.rank == rank
        # A peer's packets may be late as well, but never is nobody missing, or the own rank.
        assert 2 in failure.missing
        assert rank not in failure.missing


def run_lanes_without_rank_16() -> RandomMachine:
    """A warp of each of 16 ranks; only the lanes of its last part wait for the missing one."""
    spec = KernelSpec(Kernel.ONE_SHOT, Protocol.LL, DTYPES["float32"], ReduceOp.SUM, 17)
    machine = MeetingMachine(0, tick_ns=40)
    return run_without_last(machine, spec, LLLayout(17, nslots=8), WARP_THREADS)


def test_lanes_give_up_together() -> None:
    machine = run_lanes_without_rank_16()
    for rank in range(16):
        failure = failure_from(partial(record_of, machine, rank), 1e-6)
        assert failure is not None
        assert failure.rank == rank
        output = ((rank + 1) << 40) + OUTPUT
        assert not any(output <= address < output + 4096 for address in machine.words)


def test_a_lane_that_gives_up_alone_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(one_shot_wide, "all_in_warp", lambda value: value)
    with pytest.raises(StuckError):
        run_lanes_without_rank_16()


def stores_of_later_launches(seed: int) -> int:
    """Stores of three launches that follow a broken one, give or take one launch's own."""
    return run_without_rank_2(seed, nlaunches=4).nstores - run_without_rank_2(seed, 1).nstores


MOST_STORES_OF_A_LAUNCH = 2 * 4 * 2
"""Two ranks with four threads send to two peers each."""


@pytest.mark.parametrize("seed", range(10))
def test_a_launch_on_a_broken_rank_stores_nothing(seed: int) -> None:
    assert stores_of_later_launches(seed) <= MOST_STORES_OF_A_LAUNCH


def test_a_launch_that_does_not_look_at_the_broken_word_stores(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("shmemar.device.kernels.exchange.was_broken", lambda _: False)
    assert stores_of_later_launches(0) > MOST_STORES_OF_A_LAUNCH


def test_without_the_broken_word_in_the_spin_threads_wait_for_their_own_deadline(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The negative control: with a clock that stands still, only the broken word can end a spin."""
    monkeypatch.setattr(watchdog, "is_broken", lambda _: False)
    monkeypatch.setattr(RandomMachine, "clock_ns", _first_thread_only_clock())
    with pytest.raises(StuckError):
        run_without_rank_2(0, nlaunches=1)


def test_the_broken_word_ends_a_spin_whose_clock_stands_still(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(RandomMachine, "clock_ns", _first_thread_only_clock())
    machine = run_without_rank_2(0, nlaunches=1)
    assert failure_from(partial(record_of, machine, 0), 1e-6) is not None


def _first_thread_only_clock() -> Callable[[RandomMachine], int]:
    """A clock that runs for one thread of each rank, and stands still for the others."""
    clocks: dict[int, tuple[object, int]] = {}

    def clock_ns(self: RandomMachine) -> int:
        from greenlet import getcurrent

        thread = getcurrent()
        rank = self.rank_of[thread]
        owner, time_ns = clocks.setdefault(rank, (thread, 1))
        if owner is not thread:
            return 1
        clocks[rank] = (owner, time_ns + 400)
        return time_ns + 400

    return clock_ns
