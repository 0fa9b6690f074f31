"""What a kernel with barriers becomes when the benchmark takes them out."""

from __future__ import annotations

import pytest

from benchmarks.barriers import _without_barriers
from shmemar.config import Config
from shmemar.dtypes import DTYPES, ReduceOp
from shmemar.host import launch
from shmemar.host.scratch import layout_for
from shmemar.spec import Kernel, KernelSpec


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
