"""Kernels as they are loaded on a GPU: compiled, assembled, kept, and found again."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from shmemar.config import Config
from shmemar.dtypes import DTYPES, ReduceOp
from shmemar.host import code_cache, launch
from shmemar.host.scratch import layout_for
from shmemar.spec import Kernel, KernelSpec, Pdl

if TYPE_CHECKING:
    from pathlib import Path

    import pytest


def test_a_kernel_is_found_again_as_it_was_compiled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def as_it_is(cubin: Any, symbol: str, nparameters: int, device: Any, *, pdl: Pdl) -> Any:
        return bytes(cubin.code), symbol, nparameters, pdl

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(launch, "CudaKernel", as_it_is)
    protocol = Kernel.ONE_SHOT.default_protocol
    spec = KernelSpec(Kernel.ONE_SHOT, protocol, DTYPES["float32"], ReduceOp.SUM, 2)
    device: Any = SimpleNamespace(compute_capability=(9, 0), arch="90")

    def load(**options: Any) -> Any:
        return launch.load_kernel(spec, layout_for(spec, Config()), **options, device=device)

    first = load(rank=0)
    code, symbol, nparameters, _ = first
    assert code.startswith(b"\x7fELF")
    # Two addresses of regions, and the other parameters.
    assert (symbol, nparameters) == (spec.symbol, 14)
    other = load(rank=1)
    assert other[0] != code

    cubins = sorted((tmp_path / "shmemar" / "cubin").rglob("*"))
    code_cache._open.cache_clear()  # as in another process

    def never(*_: Any, **__: Any) -> str:
        raise AssertionError("it was compiled again")

    monkeypatch.setattr(launch, "compile_ptx", never)
    assert load(rank=0) == first
    assert load(rank=1) == other
    assert sorted((tmp_path / "shmemar" / "cubin").rglob("*")) == cubins
