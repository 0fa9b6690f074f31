"""Threads that meet do so at one place of the code, also where Python copies what is short."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from numba import cuda

import shmemar
from shmemar.config import Config
from shmemar.device import groups, kernels
from shmemar.device.groups import all_in_block, all_in_warp
from shmemar.device.meetings import why_copied
from shmemar.device.registry import device, device_methods
from shmemar.dtypes import DTYPES, ReduceOp
from shmemar.errors import ArgumentError, ShmemarError
from shmemar.host.scratch import layout_for
from shmemar.host.user_kernels import check_function
from shmemar.spec import Kernel, KernelSpec, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FunctionType

COPIES = sys.version_info[:2] == (3, 12)
"""Whether this Python copies the short ends of the functions below."""


class Machine:
    """What `own` is a method of."""

    def meets(self) -> bool:
        return all_in_block(True)  # noqa: FBT003


device_methods("meets")(Machine)


def with_end(end: str, **names: Any) -> FunctionType:
    """A function whose threads part, and then come to `end`."""
    source = f"""
def parts(value, turn, own=None):
    came = True
    if value:
        if turn > 0:
            came = turn > 3
    else:
        for _ in range(turn):
            came = False
    {end}
"""
    exec(source, names)  # noqa: S102
    found: FunctionType = names["parts"]
    return found


ENDS: list[tuple[str, dict[str, Any]]] = [
    ("return meet(came)", {"meet": all_in_block}),
    ("return meet(came)", {"meet": groups.any_in_block}),
    ("return meet(came)", {"meet": cuda.syncthreads_count}),
]


@pytest.mark.parametrize(("end", "names"), ENDS)
def test_a_short_end_is_found_where_python_copies_it(end: str, names: dict[str, Any]) -> None:
    why = why_copied(with_end(end, **names))
    if COPIES:
        assert why is not None
        assert why.startswith("Python 3.12 has copied its call of meet at the end of parts")
    else:
        assert why is None


def later(value: bool, turn: int) -> bool:
    came = True
    if value:
        if turn > 0:
            came = turn > 3
    else:
        for _ in range(turn):
            came = False
    return defined_below(came)


@device
def defined_below(value: bool) -> bool:
    return all_in_block(value)


def test_what_is_defined_further_on_is_looked_through() -> None:
    assert (why_copied(later) is not None) is COPIES


def outer() -> Callable[..., Any]:
    @device
    def calls(value: bool, turn: int) -> bool:
        return bool(later_one(value, turn))

    later_one = device(with_end("return meet(came)", meet=all_in_block))
    return calls


def test_what_a_closure_gets_further_on_is_looked_through() -> None:
    assert (why_copied(outer()) is not None) is COPIES


def test_what_is_called_is_looked_through_and_found_again() -> None:
    inner = device(with_end("return meet(came)", meet=all_in_block))
    outermost = with_end("inner(came, turn); return came", inner=inner)
    for _ in range(2):
        assert (why_copied(outermost) is not None) is COPIES


def test_a_registered_method_is_known_by_its_name() -> None:
    assert (why_copied(with_end("return own.meets()")) is not None) is COPIES


def loops(value: bool) -> None:
    while all_in_block(value):
        pass


def votes(value: bool) -> None:
    while all_in_warp(value):
        pass


@pytest.mark.parametrize(
    "function",
    [
        loops,
        votes,
        with_end("return meet(came)", meet=all_in_warp),
        with_end("return meet(came)", meet=abs),
        with_end("came = meet(came); turn += 1; return came", meet=all_in_block),
    ],
)
def test_what_all_come_to_together_is_no_copy(function: Callable[..., Any]) -> None:
    assert why_copied(function) is None


EVERY = [(each, protocol) for each in Kernel if each.has_code for protocol in each.protocols]


@pytest.mark.parametrize(("kernel", "protocol"), EVERY)
@pytest.mark.parametrize("looped", [False, True])
@pytest.mark.parametrize("nranks", [2, 8, 19])
def test_no_kernel_has_a_copied_meeting(
    kernel: Kernel, protocol: Protocol, nranks: int, *, looped: bool
) -> None:
    spec = KernelSpec(kernel, protocol, DTYPES["float32"], ReduceOp.SUM, nranks)
    body = kernels.build(spec, layout_for(spec, Config()), looped=looped)
    assert why_copied(body) is None


def test_a_kernel_that_has_one_is_not_built(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "why_copied", lambda _: "a call was copied")
    spec = KernelSpec(Kernel.ONE_SHOT, Protocol.LL, DTYPES["int8"], ReduceOp.PROD, 61)
    with pytest.raises(ShmemarError, match=r"one_shot.* can't run on this Python: a call"):
        kernels.build(spec, layout_for(spec, Config()))


def test_a_kernel_of_the_users_that_has_one_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shmemar.host.user_kernels.why_copied", lambda _: "a call was copied")
    with pytest.raises(ArgumentError, match=r"kernel votes can't be compiled: a call was copied"):
        check_function(votes)
    with pytest.raises(ArgumentError, match="a call was copied"):
        shmemar.check_kernel(
            votes, lambda *_: (np.zeros(1, "f4"),), lambda *_: (None,), seeds=range(1)
        )
