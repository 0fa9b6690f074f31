"""What may be registered for kernels: threads that meet do so at one place of the code."""

from __future__ import annotations

import dis
import sys
from typing import TYPE_CHECKING, Any

import pytest

from shmemar.config import Config
from shmemar.device import groups, kernels
from shmemar.device.groups import all_in_block, all_in_warp
from shmemar.device.registry import device
from shmemar.dtypes import DTYPES, ReduceOp
from shmemar.errors import ShmemarError
from shmemar.host.scratch import layout_for
from shmemar.spec import Kernel, KernelSpec, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable


@device
def meets(value: bool) -> bool:
    return all_in_block(value)


def in_a_condition(value: bool) -> None:
    while all_in_warp(value):
        pass


def of_a_module(value: bool) -> None:
    while groups.any_in_block(value):
        pass


def through_another(value: bool) -> None:
    while meets(value):
        pass


def from_a_closure() -> Callable[..., None]:
    meeting = all_in_block

    def inner(value: bool) -> None:
        while meeting(value):
            pass

    return inner


@pytest.mark.parametrize(
    "function", [in_a_condition, of_a_module, through_another, from_a_closure()]
)
def test_a_meeting_that_python_copies_is_refused(function: Callable[..., Any]) -> None:
    calls = [each for each in dis.get_instructions(function) if each.opname == "CALL"]
    assert len(calls) > 1, "this Python copies no loop's condition; look for what it copies"
    with pytest.raises(ShmemarError, match=rf"{function.__name__}.* line \d+\).*to 2 places"):
        device(function)
    with pytest.raises(ShmemarError):  # and is not remembered
        device(function)


def at_the_end_of_branches(value: bool, turn: int) -> bool:
    came = True
    if value:
        if turn > 0:
            came = turn > 3
    else:
        for _ in range(turn):
            came = False
    return all_in_block(came)


def test_a_short_end_is_refused_where_python_copies_it() -> None:
    calls = [each for each in dis.get_instructions(at_the_end_of_branches) if each.opname == "CALL"]
    if sys.version_info[:2] == (3, 12):
        assert len(calls) == 3
        with pytest.raises(ShmemarError, match="compiles its call of all_in_block"):
            device(at_the_end_of_branches)
    else:
        assert len(calls) == 2
        assert device(at_the_end_of_branches) is at_the_end_of_branches


def two_meetings(value: bool) -> bool:
    if not all_in_block(value):
        return False
    return meets(value)


def test_two_calls_of_the_source_are_two() -> None:
    assert device(two_meetings) is two_meetings


EVERY = [(kernel, protocol) for kernel in Kernel for protocol in kernel.protocols]


@pytest.mark.parametrize(("kernel", "protocol"), EVERY)
@pytest.mark.parametrize("looped", [False, True])
@pytest.mark.parametrize("nranks", [2, 8, 19])
def test_no_kernel_has_a_copied_meeting(
    kernel: Kernel, protocol: Protocol, nranks: int, *, looped: bool
) -> None:
    spec = KernelSpec(kernel, protocol, DTYPES["float32"], ReduceOp.SUM, nranks)
    body = kernels.build(spec, layout_for(spec, Config()), looped=looped)
    assert device(body) is body
