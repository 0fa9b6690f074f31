"""A peer that never comes: one record, every thread ends, and nothing waits twice."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import pytest

from shmemar.device import barrier, watchdog
from shmemar.device.groups import WARP_THREADS
from shmemar.device.interpreter import running
from shmemar.device.kernels import KernelArguments, build, one_shot_wide
from shmemar.dtypes import DTYPES, ReduceOp
from shmemar.host.checker.calls import barrier_layout_of
from shmemar.host.checker.hostile_machine import HostileMachine
from shmemar.host.checker.memory_map import MemoryMap, Span
from shmemar.host.checker.schedule import schedule_of
from shmemar.host.checker.threads import Launch
from shmemar.host.checker.verdict import ProtocolError, Verdict
from shmemar.host.failure import failure_from
from shmemar.layout import FAILURE_DTYPE, LINE_LANES, BarrierLayout, LLLayout
from shmemar.spec import Kernel, KernelSpec, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from shmemar.device.interpreter import Order
    from shmemar.host.checker.memory_map import Area
    from shmemar.layout import AnyLayout

LAYOUT = LLLayout(3, nslots=4)
SPEC = KernelSpec(Kernel.ONE_SHOT, Protocol.LL, DTYPES["float32"], ReduceOp.SUM, 3)


class CountingMachine(HostileMachine):
    """Counts stores, and knows where the failure records are."""

    nstores = 0
    records: list[Area]
    outputs: list[Area]

    def store(self, address: int, words: tuple[int, ...], order: Order) -> None:
        self.nstores += 1
        super().store(address, words, order)


@pytest.fixture(autouse=True)
def _looks_come_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Look at the clock every 4 polls, which the interpreter's pace asks for."""
    monkeypatch.setattr("shmemar.device.packet_buffer.POLLS_PER_LOOK", 4)
    monkeypatch.setattr("shmemar.device.ll128.POLLS_PER_LOOK", 4)
    monkeypatch.setattr("shmemar.device.barrier.POLLS_PER_LOOK", 4)


def run_without_rank_2(seed: int, nlaunches: int) -> CountingMachine:
    """Launch on ranks 0 and 1 only, 4 threads each."""
    return run_without_last(SPEC, LAYOUT, 4, seed, nlaunches)


def run_without_last(
    spec: KernelSpec,
    layout: AnyLayout,
    nthreads: int,
    seed: int,
    nlaunches: int = 1,
    *,
    share_work: bool = True,
) -> CountingMachine:
    """Launch on all ranks but the last, of a message of 9 elements."""
    block_threads = layout.block_threads if isinstance(layout, BarrierLayout) else nthreads
    memory, ranks = MemoryMap(spec.nranks), range(spec.nranks)
    limit = 20_000 * spec.nranks + 40_000
    machine = CountingMachine(
        schedule_of(seed, spec.nranks), memory, limit=limit, tick_ns=40, share_work=share_work
    )
    machine.use_warps_of(min(nthreads, WARP_THREADS))
    regions, epochs, controls, sources, machine.outputs, machine.records = (
        [memory.add(name, rank, nbytes) for rank in ranks]
        for name, nbytes in (
            ("region", layout.nbytes),
            ("epochs", layout.epochs_nbytes),
            ("broken word", 4),
            ("input", 36),
            ("output", 36),
            ("record", FAILURE_DTYPE.itemsize),
        )
    )
    for source in sources:
        machine.poke(source.address, np.ones(9, np.float32).tobytes())
    body = build(spec, layout)
    peers = tuple(area.address for area in regions)
    if spec.multicast:
        peers += (machine.window(regions),)

    def launches(rank: int) -> Iterator[Launch]:
        own = [
            areas[rank] for areas in (epochs, controls, sources, machine.outputs, machine.records)
        ]
        arguments = KernelArguments.of_message(
            spec,
            sources[rank].address,
            machine.outputs[rank].address,
            9,
            peers=peers,
            epochs=epochs[rank].address,
            broken=controls[rank].address,
            record=machine.records[rank].address,
            timeout_ns=1000,
        )
        rights = memory.rights([Span(area, "rw") for area in (*regions, *own)])
        bodies: list[Callable[[], None]] = [
            partial(body, arguments, rank, index, nthreads, block_threads)
            for index in range(nthreads)
        ]
        for number in range(nlaunches):
            yield Launch(f"launch {number}", rank, bodies, rights, block_threads)

    with running(machine), np.errstate(over="ignore"):
        machine.run([launches(rank) for rank in ranks[:-1]])
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


@pytest.mark.parametrize("name", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("seed", range(4))
def test_the_marks_of_a_line_name_the_missing_rank(name: str, seed: int) -> None:
    spec = KernelSpec(Kernel.LL128_ATOMIC, Protocol.SENTINEL, DTYPES[name], ReduceOp.SUM, 4)
    layout = LLLayout(4, LINE_LANES, spec.nbuffers, spec.accumulators)
    machine = run_without_last(spec, layout, LINE_LANES, seed)
    for rank in range(3):
        failure = failure_from(partial(record_of, machine, rank), 1e-6)
        assert failure is not None
        assert failure.rank == rank
        # Others may be late as well, as they wait for the missing one themselves.
        assert 3 in failure.missing
        assert rank not in failure.missing
        assert machine.peek(machine.outputs[rank].address, 36) == bytes(36)


def run_lanes_without_rank_16() -> CountingMachine:
    """A warp of each of 16 ranks; only the lanes of its last part wait for the missing one."""
    spec = KernelSpec(Kernel.ONE_SHOT, Protocol.LL, DTYPES["float32"], ReduceOp.SUM, 17)
    return run_without_last(spec, LLLayout(17, nslots=8), WARP_THREADS, seed=0)


def test_lanes_give_up_together() -> None:
    machine = run_lanes_without_rank_16()
    for rank in range(16):
        failure = failure_from(partial(record_of, machine, rank), 1e-6)
        assert failure is not None
        assert failure.rank == rank
        assert machine.peek(machine.outputs[rank].address, 36) == bytes(36)


def test_a_lane_that_gives_up_alone_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(one_shot_wide, "all_in_warp", lambda value: value)
    with pytest.raises(ProtocolError) as caught:
        run_lanes_without_rank_16()
    # The others are handed a sum by a lane that has ended.
    assert caught.value.verdict is Verdict.RAISED


WITH_BARRIERS = [
    KernelSpec(kernel, protocol, DTYPES["float32"], ReduceOp.SUM, 3)
    for kernel in Kernel
    if kernel.has_barriers
    for protocol in kernel.protocols
]

with_barriers = pytest.mark.parametrize(
    "spec", WITH_BARRIERS, ids=[f"{s.kernel.value}-{s.protocol.value}" for s in WITH_BARRIERS]
)


def run_barriers_without_rank_2(
    spec: KernelSpec, seed: int, nlaunches: int = 1, *, share_work: bool = True
) -> CountingMachine:
    """A block of three threads on ranks 0 and 1; only the third waits for the missing rank."""
    layout = barrier_layout_of(spec)
    return run_without_last(spec, layout, 3, seed, nlaunches, share_work=share_work)


@with_barriers
@pytest.mark.parametrize("share_work", [True, False])
def test_a_block_gives_up_together_and_names_the_missing_rank(
    spec: KernelSpec, share_work: bool
) -> None:
    named = []
    for seed in range(9):
        machine = run_barriers_without_rank_2(spec, seed, share_work=share_work)
        for rank in (0, 1):
            failure = failure_from(partial(record_of, machine, rank), 1e-6)
            assert failure is not None
            assert failure.rank == rank
            # A peer's flag may be late as well, but never is the own rank missing.
            assert failure.missing in {(2,), (1 - rank,)}
            assert "block 0, thread " in str(failure)
            assert "its block's barrier, epoch 1, expected 0x1 from rank " in str(failure)
            named.append(failure.missing)
            assert machine.peek(machine.outputs[rank].address, 36) == bytes(36)
    assert named.count((2,)) > len(named) // 2


def test_a_thread_that_gives_up_alone_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(barrier, "all_in_block", lambda value: value)
    machine = run_barriers_without_rank_2(WITH_BARRIERS[0], 0)
    # The other threads went on without rank 2's data.
    assert machine.peek(machine.outputs[0].address, 36) != bytes(36)


def stores_of_later_barriers(spec: KernelSpec) -> int:
    return (
        run_barriers_without_rank_2(spec, 3, 4).nstores
        - run_barriers_without_rank_2(spec, 3, 1).nstores
    )


@with_barriers
def test_a_block_on_a_broken_rank_stores_nothing(spec: KernelSpec) -> None:
    assert stores_of_later_barriers(spec) == 0


@with_barriers
def test_a_block_that_does_not_look_at_the_broken_word_stores(
    spec: KernelSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(f"shmemar.device.kernels.{spec.kernel.value}.was_broken", lambda _: False)
    assert stores_of_later_barriers(spec) > 0


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
