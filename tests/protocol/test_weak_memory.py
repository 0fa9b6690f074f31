"""Litmus tests of the checker's memory: what may be seen, and what may not, over all schedules."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import pytest

from shmemar.device.groups import all_in_warp, from_lane_before
from shmemar.device.interpreter import running
from shmemar.device.memory import (
    exch_relaxed_sys_b32,
    fence_acq_rel_gpu,
    fence_acq_rel_sys,
    ld_acquire_sys_b32,
    ld_b8,
    ld_b32,
    ld_relaxed_sys_b32,
    ld_relaxed_sys_b64,
    ld_relaxed_sys_v4_b32,
    red_relaxed_sys_add_u32,
    red_release_sys_add_u64,
    relax,
    st_b8,
    st_b32,
    st_relaxed_sys_b32,
    st_relaxed_sys_v4_b32,
    st_release_sys_b32,
    st_release_sys_b64,
)
from shmemar.host.checker.hostile_machine import HostileMachine
from shmemar.host.checker.memory_map import MemoryMap, Span
from shmemar.host.checker.schedule import bounded_schedules, schedule_of
from shmemar.host.checker.threads import Launch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from shmemar.host.checker.schedule import Schedule

    Thread = Callable[..., Any]

NRANKS = 3
X, Y, Z = 0, 16, 32
"""Bytes of a rank's memory, in locations of their own."""


def outcomes(
    *ranks: list[list[Thread]], deviations: int = 4, seeds: int = 0
) -> set[tuple[Any, ...]]:
    """What threads return, in order, over all schedules.

    Each of `ranks` is a list of launches, one after another; a launch is a list of threads. A
    thread takes the addresses of the ranks' memory. All schedules are those of so few deviations,
    or of so many seeds.
    """
    drawn = (schedule_of(seed, len(ranks)) for seed in range(seeds))
    schedules: Iterable[Schedule] = drawn if seeds else bounded_schedules(deviations)
    return {outcome(schedule, list(ranks)) for schedule in schedules}


def outcome(schedule: Schedule, ranks: list[list[list[Thread]]]) -> tuple[Any, ...]:
    memory = MemoryMap(NRANKS)
    machine = HostileMachine(schedule, memory, every_point=False, warp_threads=2)
    areas = [memory.add("memory", rank, 64) for rank in range(NRANKS)]
    bases = [area.address for area in areas]
    rights = memory.rights([Span(area, "rw", is_shared=True) for area in areas])
    results: dict[tuple[int, int, int], Any] = {}

    def launches(rank: int) -> Iterator[Launch]:
        for number, threads in enumerate(ranks[rank]):

            def run(index: int, number: int = number, threads: list[Thread] = threads) -> None:
                returned = threads[index](*bases)
                if returned is not None:
                    results[rank, number, index] = returned

            bodies: list[Callable[[], None]] = [
                partial(run, index) for index in range(len(threads))
            ]
            yield Launch(f"launch {number}", rank, bodies, rights, len(threads))

    with running(machine):
        machine.run([launches(rank) for rank in range(len(ranks))])
    return tuple(results[key] for key in sorted(results))


def store_both(fence: Callable[[], None] | None, where: int = 1) -> Thread:
    """Store data, and then a flag, to a rank's memory."""

    def thread(*bases: int) -> None:
        st_relaxed_sys_b32(bases[where] + X, 1)
        if fence:
            fence()
        st_relaxed_sys_b32(bases[where] + Y, 1)

    return thread


def load_both(fence: Callable[[], None] | None, where: int = 1) -> Thread:
    """Load the flag, and then the data."""

    def thread(*bases: int) -> tuple[int, int]:
        flag = ld_relaxed_sys_b32(bases[where] + Y)
        if fence:
            fence()
        return flag, ld_b32(bases[where] + X)

    return thread


GPU, SYS = fence_acq_rel_gpu, fence_acq_rel_sys
STALE = ((1, 0),)
"""The flag is there, and the data are not."""


@pytest.mark.parametrize(
    ("writers", "readers", "may_be_stale"),
    [
        (None, None, True),
        (SYS, None, True),
        (None, SYS, True),
        (GPU, SYS, True),
        (SYS, GPU, True),
        (GPU, GPU, True),
        (SYS, SYS, False),
    ],
)
def test_a_message_to_a_peer_needs_two_fences_of_system_scope(
    writers: Any, readers: Any, may_be_stale: bool
) -> None:
    found = outcomes([[store_both(writers)]], [[load_both(readers)]])
    assert (STALE in found) is may_be_stale
    assert {((0, 0),), ((1, 1),)} <= found


@pytest.mark.parametrize(
    ("writers", "readers", "may_be_stale"),
    [(None, GPU, True), (GPU, None, True), (GPU, GPU, False), (SYS, GPU, False)],
)
def test_a_message_within_a_gpu_needs_two_fences_of_any_scope(
    writers: Any, readers: Any, may_be_stale: bool
) -> None:
    found = outcomes([[store_both(writers, 0), load_both(readers, 0)]])
    assert (STALE in found) is may_be_stale
    assert ((1, 1),) in found


@pytest.mark.parametrize(("fence", "may_be_late"), [(None, True), (GPU, False), (SYS, False)])
def test_a_fence_performs_stores_to_the_own_memory(fence: Any, may_be_late: bool) -> None:
    """The argument for the scope of `fence_resets`: what a peer stores afterwards comes last."""

    def emptied(*bases: int) -> None:
        st_relaxed_sys_b32(bases[0] + X, 5)
        if fence:
            fence()
        st_relaxed_sys_b32(bases[1] + Y, 1)
        waits_for(bases[2] + Z)  # not at the kernel's end, which performs all stores

    def licensed(*bases: int) -> None:
        waits_for(bases[1] + Y)
        st_relaxed_sys_b32(bases[0] + X, 7)
        fence_acq_rel_sys()
        st_relaxed_sys_b32(bases[2] + Z, 1)

    def looks(*bases: int) -> int:
        waits_for(bases[2] + Z)
        fence_acq_rel_sys()
        return ld_b32(bases[0] + X)

    found = outcomes([[emptied]], [[licensed]], [[looks]], seeds=1000)
    assert found == ({(5,), (7,)} if may_be_late else {(7,)})


def waits_for(address: int) -> None:
    while ld_relaxed_sys_b32(address) == 0:
        relax()


def test_stores_of_a_thread_to_one_location_stay_in_order_and_loads_do_not_go_back() -> None:
    def writer(*bases: int) -> None:
        st_relaxed_sys_b32(bases[1] + X, 1)
        st_relaxed_sys_b32(bases[1] + X, 2)

    def reader(*bases: int) -> tuple[int, int]:
        return ld_relaxed_sys_b32(bases[1] + X), ld_relaxed_sys_b32(bases[1] + X)

    found = outcomes([[writer]], [[reader]])
    assert found == {((a, b),) for a in range(3) for b in range(a, 3)}


def test_each_thread_may_read_before_the_store_of_the_other_is_performed() -> None:
    def left(*bases: int) -> int:
        st_relaxed_sys_b32(bases[0] + X, 1)
        return ld_relaxed_sys_b32(bases[0] + Y)

    def right(*bases: int) -> int:
        st_relaxed_sys_b32(bases[0] + Y, 1)
        return ld_relaxed_sys_b32(bases[0] + X)

    assert outcomes([[left]], [[right]]) == {(0, 0), (0, 1), (1, 0), (1, 1)}


def test_a_thread_sees_its_own_stores_at_once_and_parts_of_them() -> None:
    def thread(*bases: int) -> tuple[int, ...]:
        st_relaxed_sys_v4_b32(bases[1] + X, 1, 2, 3, 4)
        st_b32(bases[1] + X + 4, 0x01020304)
        st_b8(bases[1] + X + 6, 9)
        return *ld_relaxed_sys_v4_b32(bases[1] + X), ld_b8(bases[1] + X + 6)

    assert outcomes([[thread]]) == {((1, 0x01090304, 3, 4, 9),)}


def test_a_packet_is_seen_in_halves_and_no_smaller_parts() -> None:
    def writer(*bases: int) -> None:
        st_relaxed_sys_v4_b32(bases[1] + X, 1, 2, 3, 4)

    def reader(*bases: int) -> tuple[int, ...]:
        return ld_relaxed_sys_v4_b32(bases[1] + X)

    assert outcomes([[writer]], [[reader]]) == {
        ((*low, *high),) for low in ((0, 0), (1, 2)) for high in ((0, 0), (3, 4))
    }


def test_a_fence_covers_what_its_thread_has_seen() -> None:
    """Write to read causality: what rank 1 saw of rank 0 is there when rank 1's flag is."""

    def first(*bases: int) -> None:
        st_relaxed_sys_b32(bases[2] + X, 1)

    def second(*bases: int) -> None:
        if ld_relaxed_sys_b32(bases[2] + X) == 1:
            fence_acq_rel_sys()
            st_relaxed_sys_b32(bases[2] + Y, 1)

    found = outcomes([[first]], [[second]], [[load_both(SYS, 2)]])
    assert STALE not in found
    assert ((1, 1),) in found


def test_a_thread_sees_its_own_additions() -> None:
    def adds(*bases: int) -> tuple[int, int]:
        red_relaxed_sys_add_u32(bases[1] + X, 1)
        first = ld_relaxed_sys_b32(bases[1] + X)
        red_relaxed_sys_add_u32(bases[1] + X, 1)
        return first, ld_relaxed_sys_b32(bases[1] + X)

    assert outcomes([[adds]]) == {((1, 2),)}


@pytest.mark.parametrize("add", [red_release_sys_add_u64, None])
def test_additions_carry_what_all_of_them_cover(add: Any) -> None:
    def adder(at: int) -> Thread:
        def thread(*bases: int) -> None:
            st_relaxed_sys_b32(bases[2] + at, 1)
            if add:
                add(bases[2] + Y, 1)
            else:
                red_relaxed_sys_add_u32(bases[2] + Y, 1)

        return thread

    def reader(*bases: int) -> tuple[int, int, int]:
        count = ld_relaxed_sys_b64(bases[2] + Y)
        fence_acq_rel_sys()
        return count, ld_b32(bases[2] + X), ld_b32(bases[2] + Z)

    found = outcomes([[adder(X)]], [[adder(Z)]], [[reader]])
    assert ((2, 1, 1),) in found
    assert (((2, 0, 1),) in found) is (add is None)


def test_an_exchange_gives_each_value_away_once() -> None:
    def taker(*bases: int) -> int:
        return exch_relaxed_sys_b32(bases[0] + X, 1)

    assert outcomes([[taker]], [[taker]], [[taker]], deviations=2) == {
        (0, 1, 1),
        (1, 0, 1),
        (1, 1, 0),
    }


def test_the_end_of_a_kernel_performs_all_and_the_next_one_sees_it() -> None:
    def writer(*bases: int) -> None:
        st_b32(bases[0] + X, 1)
        st_b32(bases[1] + X, 1)

    def reader(*bases: int) -> tuple[int, int]:
        return ld_b32(bases[0] + X), ld_b32(bases[1] + X)

    assert outcomes([[writer, writer], [reader]]) == {((1, 1),)}


@pytest.mark.parametrize("meets", ["before", "not at all", "shuffles"])
def test_threads_that_met_see_what_they_did(meets: str) -> None:
    def thread(number: int) -> Thread:
        def run(*bases: int) -> int:
            st_b32(bases[0] + 16 * number, 1)
            if meets == "before":
                all_in_warp(True)  # noqa: FBT003
            elif meets == "shuffles":
                from_lane_before(1, 1)
            return ld_b32(bases[0] + 16 * (1 - number))

        return run

    found = outcomes([[thread(0), thread(1)]])
    assert ((0, 0) in found) is (meets != "before")
    assert (1, 1) in found


@pytest.mark.parametrize("meets", [True, False])
def test_a_release_covers_what_others_did_before_they_met(meets: bool) -> None:
    def writer(*bases: int) -> None:
        st_b32(bases[1] + X, 1)
        if meets:
            all_in_warp(True)  # noqa: FBT003

    def signals(*bases: int) -> None:
        if meets:
            all_in_warp(True)  # noqa: FBT003
        st_release_sys_b64(bases[1] + Y, 1)

    found = outcomes([[writer, signals]], [[load_both(SYS)]])
    assert (STALE in found) is not meets
    assert ((1, 1),) in found


def test_a_store_behind_a_meeting_comes_after_those_before_it() -> None:
    def first(*bases: int) -> None:
        st_b32(bases[1] + X, 1)
        all_in_warp(True)  # noqa: FBT003

    def second(*bases: int) -> None:
        all_in_warp(True)  # noqa: FBT003
        st_b32(bases[1] + X, 2)

    def last(*bases: int) -> int:
        return ld_b32(bases[1] + X)

    assert outcomes([[first, second], [last]]) == {(2,)}


def test_a_load_is_not_performed_behind_a_later_store() -> None:
    """What is not modelled, as is said: load buffering."""

    def copies(source: int, destination: int) -> Thread:
        def thread(*bases: int) -> int:
            seen = ld_relaxed_sys_b32(bases[0] + source)
            st_relaxed_sys_b32(bases[0] + destination, 1)
            return seen

        return thread

    assert (1, 1) not in outcomes([[copies(X, Y)]], [[copies(Y, X)]])


def test_a_release_does_not_order_what_comes_after_it() -> None:
    """Unlike a fence in its place."""

    def writer(*bases: int) -> None:
        st_relaxed_sys_b32(bases[1] + X, 1)
        st_release_sys_b64(bases[1] + Z, 1)
        st_relaxed_sys_b32(bases[1] + Y, 1)

    assert STALE in outcomes([[writer]], [[load_both(SYS)]])


@pytest.mark.parametrize("order", ["acquire", "relaxed"])
def test_an_acquire_sees_what_was_released_with_what_it_reads(order: str) -> None:
    load = ld_acquire_sys_b32 if order == "acquire" else ld_relaxed_sys_b32

    def writer(*bases: int) -> None:
        st_b32(bases[1] + X, 1)
        st_release_sys_b32(bases[1] + Y, 1)

    def reader(*bases: int) -> tuple[int, int]:
        return load(bases[1] + Y), ld_b32(bases[1] + X)

    found = outcomes([[writer]], [[reader]])
    assert (STALE in found) is (order == "relaxed")
    assert ((1, 1),) in found


def test_an_acquire_does_not_order_what_comes_before_it() -> None:
    """Unlike a fence in its place: nothing that was stored before is released by it."""

    def writer(*bases: int) -> None:
        st_relaxed_sys_b32(bases[1] + X, 1)
        ld_acquire_sys_b32(bases[1] + Z)
        st_relaxed_sys_b32(bases[1] + Y, 1)

    assert STALE in outcomes([[writer]], [[load_both(SYS)]])


@pytest.mark.parametrize("weak", ["store", "load"])
def test_a_flag_that_is_stored_or_loaded_weakly_orders_nothing(weak: str) -> None:
    def writer(*bases: int) -> None:
        st_relaxed_sys_b32(bases[1] + X, 1)
        fence_acq_rel_sys()
        (st_b32 if weak == "store" else st_relaxed_sys_b32)(bases[1] + Y, 1)

    def reader(*bases: int) -> tuple[int, int]:
        flag = (ld_b32 if weak == "load" else ld_relaxed_sys_b32)(bases[1] + Y)
        fence_acq_rel_sys()
        return flag, ld_b32(bases[1] + X)

    assert STALE in outcomes([[writer]], [[reader]])
