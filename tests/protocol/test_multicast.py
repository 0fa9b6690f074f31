"""Multicast forms under hostile schedules, and what their machine does."""

from __future__ import annotations

import re
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import shmemar
from shmemar.device.interpreter import running
from shmemar.device.memory import (
    fence_acq_rel_sys,
    fence_proxy_alias,
    ld_b32,
    ld_relaxed_sys_b32,
    multimem_ld_reduce_add_v4_f32,
    multimem_red_release_sys_add_u32,
    multimem_st_relaxed_sys_two_b64,
    multimem_st_v4_f32,
    relax,
    st_b32,
)
from shmemar.dtypes import DTYPES, ReduceOp
from shmemar.errors import ArgumentError
from shmemar.host.checker import (
    MULTICAST_PAIRS,
    Call,
    CallSequence,
    ScheduleKind,
    check,
    check_sequence,
)
from shmemar.host.checker.calls import layout_of
from shmemar.host.checker.hostile_machine import HostileMachine
from shmemar.host.checker.memory_map import MemoryMap, Span
from shmemar.host.checker.schedule import schedule_of
from shmemar.host.checker.threads import Launch
from shmemar.host.checker.verdict import ProtocolError, Verdict
from shmemar.host.failure import failure_from
from shmemar.spec import Kernel, KernelSpec, Protocol
from tests.protocol.test_deadlines import record_of, run_without_last

if TYPE_CHECKING:
    from collections.abc import Callable

forms = pytest.mark.parametrize(
    ("kernel", "protocol"),
    MULTICAST_PAIRS,
    ids=[f"{k.value}-{p.value}" for k, p in MULTICAST_PAIRS],
)


@forms
@pytest.mark.parametrize("nranks", [2, 3, 4, 8])
def test_nothing_is_found_in_sequences_of_calls(
    kernel: Kernel, protocol: Protocol, nranks: int
) -> None:
    # Of many operations each, and of many threads those with barriers.
    runs = {2: 24, 3: 12, 4: 6, 8: 2}[nranks] if kernel.has_barriers else {8: 5}.get(nranks, 20)
    report = check(kernel, protocol, nranks, range(runs), multicast=True)
    assert report.passed, str(report)
    assert report.runs == runs
    assert report.name == f"{kernel.value}/{protocol.value}/multicast"


@forms
@pytest.mark.parametrize("kind", ScheduleKind)
def test_nothing_is_found_under_any_kind_of_schedule(
    kernel: Kernel, protocol: Protocol, kind: ScheduleKind
) -> None:
    report = check(kernel, protocol, 2, range(100, 104), kind.value, multicast=True)
    assert report.passed, str(report)


@forms
def test_nothing_is_found_in_all_schedules_of_few_deviations(
    kernel: Kernel, protocol: Protocol
) -> None:
    report = check(kernel, protocol, 2, range(150), "exhaustive", multicast=True)
    assert report.passed, str(report)


def spec_of(kernel: Kernel, protocol: Protocol, nranks: int) -> KernelSpec:
    return KernelSpec(kernel, protocol, DTYPES["float32"], ReduceOp.SUM, nranks, multicast=True)


@forms
@pytest.mark.parametrize("first_epoch", [2**31 - 3, 2**32 - 4])
def test_epochs_and_counts_pass_the_wrap(
    kernel: Kernel, protocol: Protocol, first_epoch: int
) -> None:
    spec = spec_of(kernel, protocol, 3)
    calls = tuple(Call(spec, count if kernel.reduces else 0, 2) for count in (5, 1, 9))
    report = check_sequence(CallSequence(calls, first_epoch, replays=2), range(8))
    assert report.passed, str(report)


@forms
def test_a_body_may_be_looped_within_a_launch(kernel: Kernel, protocol: Protocol) -> None:
    spec = spec_of(kernel, protocol, 3)
    call = Call(spec, 4 if kernel.reduces else 0, 2, repeats=6)
    report = check_sequence(CallSequence((call,)), range(6))
    assert report.passed, str(report)


@pytest.mark.parametrize("name", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("op", [ReduceOp.SUM, ReduceOp.AVG])
def test_every_loaded_sum_is_exact_where_it_can_be(name: str, op: ReduceOp) -> None:
    spec = KernelSpec(Kernel.BARRIER_TWO_SHOT, Protocol.PULL, DTYPES[name], op, 4, multicast=True)
    calls = tuple(Call(spec, count, 2, shift=1) for count in (5, 1, 37))
    report = check_sequence(CallSequence(calls), [1])
    assert report.passed, str(report)


@pytest.mark.parametrize(
    ("pair", "nranks", "told"),
    [
        ((Kernel.TWO_SHOT, Protocol.LL), 2, "kernel two_shot, multicast True; expected one of one"),
        ((Kernel.ONE_SHOT, Protocol.LL), 1, "nranks 1; expected 2 to 15 for kernel one_shot"),
        ((Kernel.ONE_SHOT, Protocol.LL), 16, "nranks 16; expected 2 to 15 for kernel one_shot"),
    ],
)
def test_a_form_that_is_not_there_is_refused(
    pair: tuple[Kernel, Protocol], nranks: int, told: str
) -> None:
    with pytest.raises(ArgumentError, match=told):
        check(*pair, nranks, [1], multicast=True)


# Kernels of users


def total(ll: Any, thread: int, nthreads: int, x: Any, y: Any) -> None:
    for i in range(thread, x.size, nthreads):
        ll.bcast(0, x[i])
        y[i] = ll.recv_reduce(0, x[i], lambda a, b: a + b)
        ll.advance_epoch()


def values(rank: int, launch: int) -> Any:
    return np.arange(7, dtype=np.float32) + 10 * rank + 100 * launch


def run_total(kernel: Callable[..., None], protocol: str, nranks: int) -> Any:
    return shmemar.check_kernel(
        kernel,
        lambda rank, launch: (values(rank, launch), np.zeros(7, np.float32)),
        lambda _, launch: (None, sum(values(r, launch) for r in range(nranks))),
        nranks=nranks,
        protocol=protocol,
        multicast=True,
        seeds=range(6 if nranks > 3 else 20),
    )


@pytest.mark.parametrize("protocol", ["ll", "sentinel"])
@pytest.mark.parametrize("nranks", [2, 3, 8])
def test_a_users_kernel_passes(protocol: str, nranks: int) -> None:
    report = run_total(total, protocol, nranks)
    assert report.passed, str(report)


def without_advancing(ll: Any, thread: int, nthreads: int, x: Any, y: Any) -> None:
    for i in range(thread, x.size, nthreads):
        ll.bcast(0, x[i])
        y[i] = ll.recv_reduce(0, x[i], lambda a, b: a + b)


@pytest.mark.parametrize("protocol", ["ll", "sentinel"])
def test_a_users_kernel_that_does_not_advance_is_caught(protocol: str) -> None:
    assert run_total(without_advancing, protocol, 2).failure.verdict is Verdict.WRITTEN_TWICE


def test_a_users_kernel_of_one_rank_is_refused() -> None:
    with pytest.raises(ArgumentError, match="multicast is True, and nranks 1; expected 2 or more"):
        run_total(total, "ll", 1)


# The machine


def outcomes(*programs: Callable[[int, int], Any], seeds: int = 300) -> set[Any]:
    """What rank 1's program returns, over schedules; they take the own and the window's address."""
    return {_outcome(programs, seed) for seed in range(seeds)}


def _outcome(programs: tuple[Callable[[int, int], Any], ...], seed: int) -> Any:
    nranks = len(programs)
    memory = MemoryMap(nranks)
    areas = [memory.add("memory", rank, 64) for rank in range(nranks)]
    machine = HostileMachine(schedule_of(seed, nranks), memory)
    window, found = machine.window(areas), {}
    rights = memory.rights([Span(area, "rw", is_shared=True) for area in areas])

    def launch(rank: int) -> Launch:
        def body() -> None:
            found[rank] = programs[rank](areas[rank].address, window)

        return Launch("a program", rank, [body], rights, 1)

    with running(machine), np.errstate(all="ignore"):
        machine.run([iter([launch(rank)]) for rank in range(nranks)])
    return found[1]


def nothing(own: int, window: int) -> None:
    """For a rank that others write to."""


def test_the_halves_of_a_packet_to_all_arrive_apart_and_each_whole() -> None:
    def send(own: int, window: int) -> None:
        multimem_st_relaxed_sys_two_b64(window, 1, 2, 3, 4)

    def look(own: int, window: int) -> tuple[int, ...]:
        return tuple(ld_relaxed_sys_b32(own + at) for at in (12, 8, 4, 0))

    found = outcomes(send, look)
    assert (0, 0, 0, 0) in found
    assert (4, 3, 2, 1) in found
    assert (0, 0, 2, 1) in found
    assert not {each for each in found if each[0] and not each[1]}


def counted(before: Callable[[int, int], None], fences: bool) -> Any:
    """Rank 0 does something and adds to a counter; rank 1 polls its own, fences, and reads X."""

    def signal(own: int, window: int) -> None:
        before(own, window)
        if fences:
            fence_proxy_alias()
        multimem_red_release_sys_add_u32(window + 32, 1)

    def wait(own: int, window: int) -> int:
        while ld_relaxed_sys_b32(own + 32) != 1:
            relax()
        fence_acq_rel_sys()
        return ld_b32(own)

    return outcomes(signal, wait)


def test_what_was_stored_to_all_is_seen_at_home_behind_an_alias_fence_alone() -> None:
    def store(own: int, window: int) -> None:
        multimem_st_v4_f32(window, 7, 7, 7, 7)

    assert counted(store, fences=True) == {7}
    assert counted(store, fences=False) == {0, 7}


def test_a_sum_needs_an_alias_fence_behind_stores_at_home() -> None:
    word = int(np.float32(2).view(np.uint32))

    def run(*, fences: bool) -> set[Any]:
        def stage(own: int, window: int) -> None:
            st_b32(own, word)
            if fences:
                fence_proxy_alias()
            multimem_red_release_sys_add_u32(window + 32, 1)

        def add_up(own: int, window: int) -> Any:
            stage(own, window)
            while ld_relaxed_sys_b32(own + 32) != 2:
                relax()
            fence_acq_rel_sys()
            return float(np.uint32(multimem_ld_reduce_add_v4_f32(window)[0]).view(np.float32))

        return outcomes(stage, add_up)

    assert run(fences=True) == {4.0}
    assert 2.0 in run(fences=False)


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        (lambda own, _: multimem_st_v4_f32(own, 1, 2, 3, 4), "expected a multicast address"),
        (lambda _, window: ld_b32(window), "would load from 4 bytes at all ranks' memory"),
        (lambda _, window: multimem_st_v4_f32(window + 4, 1, 2, 3, 4), "that is not aligned"),
        (lambda _, window: multimem_red_release_sys_add_u32(window + 64, 1), "its launch may not"),
    ],
)
def test_addresses_are_not_mixed_up(wrong: Callable[[int, int], Any], told: str) -> None:
    with pytest.raises(ProtocolError, match=told) as caught:
        outcomes(nothing, wrong, seeds=1)
    assert caught.value.verdict is Verdict.OUTSIDE


# Deadlines


def test_a_counter_that_is_not_added_to_is_reported_with_all_peers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("shmemar.device.barrier.POLLS_PER_LOOK", 4)
    spec = spec_of(Kernel.BARRIER_TWO_SHOT, Protocol.PULL, 3)
    machine = run_without_last(spec, layout_of(spec), 3, seed=1)
    for rank in (0, 1):
        error = failure_from(partial(record_of, machine, rank), 1.0)
        assert error is not None
        assert error.rank == rank
        assert error.missing == tuple(other for other in range(3) if other != rank)
        assert f"one or more of ranks {', '.join(map(str, error.missing))} in " in str(error)
        # A peer's addition may be late as well.
        assert re.search("expected 0x3 as the count of all, saw 0x[12]", str(error))
