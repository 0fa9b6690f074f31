"""What a kernel with barriers becomes when the benchmark takes them out."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest

from benchmarks.barriers import _without_barriers
from shmemar.config import Config
from shmemar.dtypes import DTYPES, ReduceOp
from shmemar.host import launch
from shmemar.host.scratch import layout_for
from shmemar.spec import Kernel, KernelSpec

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize("kernel", [Kernel.BARRIER_ONE_SHOT, Kernel.BARRIER_TWO_SHOT])
def test_ranks_do_not_meet_and_data_move_as_before(kernel: Kernel) -> None:
    spec = KernelSpec(kernel, kernel.default_protocol, DTYPES["float32"], ReduceOp.SUM, 2)
    layout = layout_for(spec, Config())

    def compiled() -> str:
        return launch.compile_ptx(spec, layout, rank=0, compute_capability=(9, 0), looped=True)

    with _without_barriers():
        alone = compiled()
    whole = compiled()
    for flag in ("st.release.sys", "ld.acquire.sys"):
        assert flag in whole
        assert flag not in alone
    for access in ("ld.global.L1::no_allocate.v4.b32", "st.global.v4.b32"):
        assert alone.count(access) == whole.count(access)
    assert "bar" in alone


def test_what_the_benchmark_has_changed_is_neither_kept_nor_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel = Kernel.BARRIER_ONE_SHOT
    spec = KernelSpec(kernel, kernel.default_protocol, DTYPES["float32"], ReduceOp.SUM, 2)
    layout, device = layout_for(spec, Config()), SimpleNamespace(compute_capability=(9, 0), arch=90)
    made = iter([f".entry {spec.symbol}() {number}" for number in range(9)])
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(launch, "compile_ptx", lambda *_, **__: next(made))
    monkeypatch.setattr(launch, "CudaKernel", lambda cubin, *_, **__: cubin)
    monkeypatch.setattr(launch, "kept_cubin", lambda program: program)
    monkeypatch.setattr("cuda.core.Program", lambda ptx, *_: ptx)

    def load() -> str:
        return str(launch.load_kernel(spec, layout, rank=0, device=device, looped=True))[-1]

    assert load() == "0"
    with _without_barriers():
        assert [load(), load()] == ["1", "2"]
    assert load() == "0"
