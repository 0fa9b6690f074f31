"""The kernel that a measured collective may stand behind."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest

from shmemar.host import timing


@pytest.mark.parametrize(("kind", "triggers"), [("behind", 0), ("early", 1)])
def test_a_kernel_ahead_takes_three_microseconds_and_triggers_where_it_should(
    monkeypatch: pytest.MonkeyPatch, kind: str, triggers: int
) -> None:
    made: list[tuple[str, str]] = []
    launched: list[Any] = []

    def raw_kernel(source: str, name: str) -> Any:
        made.append((source, name))
        return lambda *arguments: launched.append(arguments)

    cupy = SimpleNamespace(
        RawKernel=raw_kernel,
        cuda=SimpleNamespace(Device=lambda: SimpleNamespace(attributes={"ClockRate": 1_980_000})),
    )
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    launch = timing._kernel_ahead(kind)
    ((source, name),) = made
    assert f"__global__ void {name}(long long cycles)" in source
    assert source.count('asm volatile("griddepcontrol.launch_dependents;");') == triggers
    assert source.count("{") == source.count("}")
    launch()
    assert launched == [((1,), (32,), (5940,))] * 2  # loaded, and launched
