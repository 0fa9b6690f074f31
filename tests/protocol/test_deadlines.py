"""A peer that never comes: one record, every thread ends, and nothing waits twice."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import pytest

from shmemar.device import watchdog
from shmemar.device.interpreter import running
from shmemar.device.kernels import KernelArguments, build
from shmemar.dtypes import DTYPES, ReduceOp
from shmemar.host.failure import failure_from
from shmemar.host.hostile_machine import HostileMachine
from shmemar.host.memory_map import MemoryMap, Span
from shmemar.host.schedule import schedule_of
from shmemar.host.threads import Launch
from shmemar.host.verdict import ProtocolError, Verdict
from shmemar.layout import FAILURE_DTYPE, LLLayout
from shmemar.spec import Kernel, KernelSpec, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from shmemar.device.interpreter import Order
    from shmemar.host.memory_map import Area

LAYOUT = LLLayout(3, nslots=4)
SPEC = KernelSpec(Kernel.ONE_SHOT, Protocol.LL, DTYPES["float32"], ReduceOp.SUM, 3)


class CountingMachine(HostileMachine):
    """Counts stores, and knows where the failure records are."""

    nstores = 0
    records: list[Area]

    def store(self, address: int, words: tuple[int, ...], order: Order) -> None:
        self.nstores += 1
        super().store(address, words, order)


@pytest.fixture(autouse=True)
def _looks_come_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Look at the clock every 4 polls, which the interpreter's pace asks for."""
    monkeypatch.setattr("shmemar.device.packet_buffer.POLLS_PER_LOOK", 4)


def run_without_rank_2(seed: int, nlaunches: int) -> CountingMachine:
    """Launch on ranks 0 and 1 only."""
    memory = MemoryMap(3)
    machine = CountingMachine(schedule_of(seed, 3), memory, limit=100_000, tick_ns=40)
    regions, epochs, controls, sources, destinations = (
        [memory.add(name, rank, nbytes) for rank in range(3)]
        for name, nbytes in (
            ("region", LAYOUT.nbytes),
            ("epochs", LAYOUT.epochs_nbytes),
            ("broken word", 4),
            ("input", 36),
            ("output", 36),
        )
    )
    machine.records = [memory.add("record", rank, FAILURE_DTYPE.itemsize) for rank in range(3)]
    body = build(SPEC, LAYOUT)

    def launches(rank: int) -> Iterator[Launch]:
        own = [areas[rank] for areas in (epochs, controls, sources, destinations, machine.records)]
        arguments = KernelArguments.of_message(
            SPEC,
            sources[rank].address,
            destinations[rank].address,
            9,
            peers=tuple(area.address for area in regions),
            epochs=epochs[rank].address,
            broken=controls[rank].address,
            record=machine.records[rank].address,
            timeout_ns=1000,
        )
        rights = memory.rights([Span(area, "rw") for area in (*regions, *own)])
        bodies: list[Callable[[], None]] = [
            partial(body, arguments, rank, index, 4, 4) for index in range(4)
        ]
        for number in range(nlaunches):
            yield Launch(f"launch {number}", rank, bodies, rights, 4)

    with running(machine), np.errstate(over="ignore"):
        machine.run([launches(0), launches(1)])
    return machine


def record_of(machine: CountingMachine, rank: int) -> bytes:
    return machine.peek(machine.records[rank].address, FAILURE_DTYPE.itemsize)


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
    monkeypatch.setattr(HostileMachine, "clock_ns", _first_thread_only_clock())
    with pytest.raises(ProtocolError) as caught:
        run_without_rank_2(0, nlaunches=1)
    assert caught.value.verdict is Verdict.LIVELOCK


def test_the_broken_word_ends_a_spin_whose_clock_stands_still(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(HostileMachine, "clock_ns", _first_thread_only_clock())
    machine = run_without_rank_2(0, nlaunches=1)
    assert failure_from(partial(record_of, machine, 0), 1e-6) is not None


def _first_thread_only_clock() -> Callable[[HostileMachine], int]:
    """A clock that runs for one thread of each rank, and stands still for the others."""
    clocks: dict[int, tuple[object, int]] = {}

    def clock_ns(self: HostileMachine) -> int:
        thread, rank = self.turns.current, self.turns.current.rank
        owner, time_ns = clocks.setdefault(rank, (thread, 1))
        if owner is not thread:
            return 1
        clocks[rank] = (owner, time_ns + 400)
        return time_ns + 400

    return clock_ns
