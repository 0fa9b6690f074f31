"""Primitives as plain Python: what they ask of the machine that runs them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from shmemar.device import groups, memory, programmatic
from shmemar.device.additions import add_f32, add_two_bf16, add_two_f16
from shmemar.device.interpreter import Group, Order, Scope, current, running

if TYPE_CHECKING:
    from collections.abc import Callable

WEAK, SYS, ACQUIRE = Order.WEAK, Order.RELAXED_SYS, Order.ACQUIRE_SYS
RELEASE = Order.RELEASE_SYS
WARP, BLOCK = Group.WARP, Group.BLOCK

# Primitive, its arguments, what the machine is asked, and the result if loads give 1, 2, 3, ...
CALLS = [
    ("ld_b8", (9,), ("load_part", 9, 1), 3),
    ("ld_b16", (10,), ("load_part", 10, 2), 3),
    ("st_b8", (9, 0x12345), ("store_part", 9, 1, 0x45), None),
    ("st_b16", (10, 0x12345), ("store_part", 10, 2, 0x2345), None),
    ("ld_b32", (8,), ("load", 8, 1, WEAK), 1),
    ("ld_no_allocate_v4_b32", (16,), ("load", 16, 4, WEAK), (1, 2, 3, 4)),
    ("st_v4_b32", (16, 5, 6, 7, 8), ("store", 16, (5, 6, 7, 8), WEAK), None),
    ("ld_no_allocate_v2_b32", (8,), ("load", 8, 2, WEAK), (1, 2)),
    ("st_b32", (8, 5), ("store", 8, (5,), WEAK), None),
    ("st_v2_b32", (8, 5, 6), ("store", 8, (5, 6), WEAK), None),
    ("ld_relaxed_sys_b32", (8,), ("load", 8, 1, SYS), 1),
    ("ld_acquire_sys_b32", (8,), ("load", 8, 1, ACQUIRE), 1),
    ("st_release_sys_b32", (8, 5), ("store", 8, (5,), RELEASE), None),
    ("ld_relaxed_sys_v4_b32", (16,), ("load", 16, 4, SYS), (1, 2, 3, 4)),
    ("st_relaxed_sys_b32", (8, 5), ("store", 8, (5,), SYS), None),
    ("st_relaxed_sys_v4_b32", (16, 5, 6, 7, 8), ("store", 16, (5, 6, 7, 8), SYS), None),
    ("exch_relaxed_sys_b32", (8, 5), ("exchange", 8, 5), 9),
    ("red_relaxed_sys_add_u32", (8, 5), ("add", 8, 5), None),
    ("ld_relaxed_sys_b64", (8,), ("load", 8, 2, SYS), 2 << 32 | 1),
    ("st_release_sys_b64", (8, 7 << 32 | 5), ("store", 8, (5, 7), RELEASE), None),
    ("red_release_sys_add_u64", (8, 5), ("add_b64", 8, 5, RELEASE), None),
    *(
        (f"red_line_relaxed_sys_add_{kind}", (16, 5, 6, 7, 8), ("add_to_line", *rest), None)
        for kind, rest in (
            ("f32", (16, (5, 6, 7, 8), add_f32)),
            ("f16x2", (16, (5, 6, 7, 8), add_two_f16)),
            ("bf16x2", (16, (5, 6, 7, 8), add_two_bf16)),
        )
    ),
    *(
        (f"multimem_ld_reduce_add_v4_{kind}", (16,), ("load_sum", 16, add), (1, 2, 3, 4))
        for kind, add in (("f32", add_f32), ("f16x2", add_two_f16), ("bf16x2", add_two_bf16))
    ),
    (
        "multimem_st_relaxed_sys_two_b64",
        (16, 5, 6, 7, 8),
        ("store_to_all", 16, (5, 6, 7, 8), SYS),
        None,
    ),
    ("multimem_st_v4_f32", (16, 5, 6, 7, 8), ("store_to_all", 16, (5, 6, 7, 8), WEAK), None),
    ("multimem_red_release_sys_add_u32", (8, 5), ("add_to_all", 8, 5), None),
    ("fence_proxy_alias", (), ("fence_aliases",), None),
    ("fence_acq_rel_gpu", (), ("fence", Scope.GPU), None),
    ("fence_sc_gpu", (), ("fence", Scope.GPU), None),
    ("fence_acq_rel_sys", (), ("fence", Scope.SYS), None),
    ("globaltimer_ns", (), ("clock_ns",), 77),
    ("relax", (), ("relax",), None),
]

# Likewise of threads that meet, where this one is the third and the others offer 7 and 0.
MEETINGS = [
    ("share_work", (), ("shares_work",), True),
    ("all_in_warp", (True,), ("meet", WARP, True, True), False),
    ("any_in_warp", (False,), ("meet", WARP, False, True), True),
    ("all_in_block", (True,), ("meet", BLOCK, True, True), False),
    ("any_in_block", (False,), ("meet", BLOCK, False, True), True),
    ("from_lane_before", (5, 2), ("meet", WARP, 5, False), 7),
    ("from_lane_before", (5, 3), ("meet", WARP, 5, False), 5),
]


class _Recorder:
    """A machine that writes down what it is asked."""

    def __init__(self) -> None:
        self.asked: list[tuple[Any, ...]] = []

    def load(self, address: int, nwords: int, order: Order) -> tuple[int, ...]:
        self.asked.append(("load", address, nwords, order))
        return tuple(range(1, 1 + nwords))

    def store(self, address: int, words: tuple[int, ...], order: Order) -> None:
        self.asked.append(("store", address, words, order))

    def load_part(self, address: int, nbytes: int) -> int:
        self.asked.append(("load_part", address, nbytes))
        return 3

    def store_part(self, address: int, nbytes: int, value: int) -> None:
        self.asked.append(("store_part", address, nbytes, value))

    def add(self, address: int, value: int) -> None:
        self.asked.append(("add", address, value))

    def add_b64(self, address: int, value: int, order: Order) -> None:
        self.asked.append(("add_b64", address, value, order))

    def add_to_line(
        self, address: int, words: tuple[int, ...], add: Callable[[int, int], int]
    ) -> None:
        self.asked.append(("add_to_line", address, words, add))

    def exchange(self, address: int, word: int) -> int:
        self.asked.append(("exchange", address, word))
        return 9

    def store_to_all(self, address: int, words: tuple[int, ...], order: Order) -> None:
        self.asked.append(("store_to_all", address, words, order))

    def add_to_all(self, address: int, value: int) -> None:
        self.asked.append(("add_to_all", address, value))

    def load_sum(self, address: int, add: Callable[[int, int], int]) -> tuple[int, ...]:
        self.asked.append(("load_sum", address, add))
        return 1, 2, 3, 4

    def fence_aliases(self) -> None:
        self.asked.append(("fence_aliases",))

    def fence(self, scope: Scope) -> None:
        self.asked.append(("fence", scope))

    def wait_for_launch(self) -> None:
        self.asked.append(("wait_for_launch",))

    def trigger(self) -> None:
        self.asked.append(("trigger",))

    def shares_work(self) -> bool:
        self.asked.append(("shares_work",))
        return True

    def meet(
        self, group: Group, offered: Any, *, orders_memory: bool = True
    ) -> tuple[int, list[Any]]:
        self.asked.append(("meet", group, offered, orders_memory))
        return 2, [7, 0, offered]

    def relax(self) -> None:
        self.asked.append(("relax",))

    def clock_ns(self) -> int:
        self.asked.append(("clock_ns",))
        return 77


def test_the_calls_here_cover_every_primitive() -> None:
    assert sorted(call[0] for call in CALLS) == sorted(memory.__all__)
    assert {*(call[0] for call in MEETINGS), "WARP_THREADS"} == set(groups.__all__)


@pytest.mark.parametrize(("name", "arguments", "asked", "result"), MEETINGS)
def test_a_primitive_of_threads_that_meet_asks_for_their_group(
    name: str, arguments: tuple[int, ...], asked: tuple[Any, ...], result: Any
) -> None:
    machine = _Recorder()
    with running(machine):
        assert getattr(groups, name)(*arguments) is result
    assert machine.asked == [asked]


def test_a_programmatic_launch_waits_before_it_triggers() -> None:
    machine = _Recorder()
    with running(machine):
        programmatic.begin()
    assert machine.asked == [("wait_for_launch",), ("trigger",)]


@pytest.mark.parametrize(("name", "arguments", "asked", "result"), CALLS)
def test_a_primitive_asks_for_the_width_and_order_in_its_name(
    name: str, arguments: tuple[int, ...], asked: tuple[Any, ...], result: Any
) -> None:
    machine = _Recorder()
    with running(machine):
        assert getattr(memory, name)(*arguments) == result
    assert machine.asked == [asked]


@pytest.mark.parametrize(("name", "arguments"), [call[:2] for call in CALLS])
def test_a_primitive_outside_of_a_machine_says_what_to_do(
    name: str, arguments: tuple[int, ...]
) -> None:
    with pytest.raises(RuntimeError) as caught:
        getattr(memory, name)(*arguments)
    assert "outside a machine" in str(caught.value)
    assert "launch the kernel through a communicator" in str(caught.value)
    assert "shmemar.device.interpreter.running(machine)" in str(caught.value)


def test_machines_nest() -> None:
    outer, inner = _Recorder(), _Recorder()
    with running(outer) as entered:
        assert entered is outer
        with running(inner):
            assert current() is inner
        assert current() is outer
    with pytest.raises(RuntimeError):
        current()


def test_a_machine_is_left_when_its_body_raises() -> None:
    with pytest.raises(ZeroDivisionError), running(_Recorder()):
        raise ZeroDivisionError
    with pytest.raises(RuntimeError, match="outside a machine"):
        current()
