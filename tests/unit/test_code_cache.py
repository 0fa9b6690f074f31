"""Compiled code on disk: found again, told apart, and done without."""

from __future__ import annotations

import os
import re
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import cuda.core
import pytest

from shmemar.config import Config
from shmemar.dtypes import DTYPES, ReduceOp
from shmemar.host import code_cache, launch
from shmemar.host.code_cache import kept_cubin, kept_ptx
from shmemar.host.scratch import layout_for
from shmemar.spec import Kernel, KernelSpec, Pdl
from shmemar.user_spec import BufferSpec, UserKernelSpec

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(autouse=True)
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where code is kept, for this test alone."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    forget()
    yield tmp_path / "shmemar"
    forget()


def forget() -> None:
    for each in (code_cache._sources, code_cache._compilers, code_cache._warn_once):
        each.cache_clear()


def never() -> str:
    raise AssertionError("it was compiled again")


def test_ptx_is_made_once() -> None:
    assert kept_ptx(("a", 1), lambda: "first µ") == "first µ"
    assert kept_ptx(("a", 1), never) == "first µ"
    assert kept_ptx(("a", 2), lambda: "other") == "other"
    code_cache._open.cache_clear()  # as in another process
    forget()
    assert kept_ptx(("a", 1), never) == "first µ"
    assert kept_ptx(("a", 2), never) == "other"


def test_ptx_of_other_sources_or_compilers_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    kept_ptx(("a",), lambda: "first")
    monkeypatch.setattr(code_cache, "_sources", lambda: "others")
    assert kept_ptx(("a",), lambda: "second") == "second"
    monkeypatch.undo()
    forget()
    monkeypatch.setenv("NUMBA_OPT", "0" if os.environ.get("NUMBA_OPT") != "0" else "1")
    assert kept_ptx(("a",), lambda: "third") == "third"


def test_sources_are_told_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "shmemar"
    (package / "host").mkdir(parents=True)
    monkeypatch.setattr(code_cache, "__file__", str(package / "host" / "code_cache.py"))
    seen = set()
    for name, text in (("a.py", "1"), ("a.py", "2"), ("host/b.py", "2"), ("host/c.txt", "2")):
        (package / name).write_text(text, encoding="utf-8")
        forget()
        seen.add(code_cache._sources())
    assert len(seen) == 3


def test_compilers_are_named() -> None:
    python, packages, (library, nbytes, _), variables = code_cache._compilers()
    assert python == sys.version
    assert [name for name, _ in packages] == ["numba", "numba-cuda", "llvmlite"]
    assert "libnvvm" in library
    assert nbytes == Path(library).stat().st_size
    assert all(name.startswith("NUMBA_") for name, _ in variables)


def test_what_cannot_be_kept_is_made_each_time_and_warned_of_once(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory.write_text("a file in the way", encoding="utf-8")
    with pytest.warns(RuntimeWarning, match=r"not kept on disk \(\w+Error: .* XDG_CACHE_HOME") as w:
        made = [kept_ptx(("b",), partial(str, text)) for text in ("made", "again")]
    assert (made, len(w)) == (["made", "again"], 1)
    forget()
    monkeypatch.setattr(
        "cuda.pathfinder.load_nvidia_dynamic_lib", lambda _: SimpleNamespace(abs_path=None)
    )
    with pytest.warns(RuntimeWarning, match="it is not known where libNVVM comes from"):
        assert kept_ptx(("b",), lambda: "made") == "made"


def test_a_store_that_is_full_loses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    class Full(dict[bytes, bytes]):
        def __setitem__(self, key: bytes, value: bytes) -> None:
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(code_cache, "_open", lambda _: Full())
    with pytest.warns(RuntimeWarning, match="No space left on device"):
        assert kept_ptx(("c",), lambda: "made") == "made"


class Program:
    """Of cuda.core, as far as a cubin is concerned."""

    def __init__(self, ptx: str = "", kind: str = "ptx", options: Any = None) -> None:
        self.ptx = ptx

    def compile(self, form: str, *, cache: Any = None) -> Any:
        key = self.ptx.encode()
        if cache is None:
            return SimpleNamespace(form=form, how="alone", ptx=self.ptx)
        if cache.get(key) is not None:
            return SimpleNamespace(form=form, how="found", ptx=self.ptx)
        cache[key] = b"cubin"
        return SimpleNamespace(form=form, how="kept", ptx=self.ptx)


def test_a_cubin_is_kept_where_it_can_be(directory: Path) -> None:
    assert kept_cubin(Program("d")).how == "kept"
    assert kept_cubin(Program("d")).how == "found"
    assert (directory / "cubin").is_dir()
    code_cache._open.cache_clear()
    (directory / "cubin").rename(directory / "moved")
    (directory / "cubin").write_text("a file in the way", encoding="utf-8")
    with pytest.warns(RuntimeWarning, match="compiled kernels are not kept on disk"):
        assert kept_cubin(Program("d")).how == "alone"


SPEC = KernelSpec(
    Kernel.ONE_SHOT, Kernel.ONE_SHOT.default_protocol, DTYPES["float32"], ReduceOp.SUM, 2
)
LAYOUT = layout_for(SPEC, Config())


def test_kernels_are_compiled_once_but_not_those_of_users_or_changed_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    compiled: list[Any] = []

    def compile_ptx(spec: Any, layout: Any, **options: Any) -> str:
        compiled.append((spec, layout, options))
        return f".visible .entry {spec.symbol}(.param .u64 a, .param .u64 b) {len(compiled)}"

    def as_it_is(cubin: Any, symbol: str, nparameters: int, device: Any, *, pdl: Pdl) -> Any:
        return cubin.ptx, symbol, nparameters, pdl

    monkeypatch.setattr(launch, "compile_ptx", compile_ptx)
    monkeypatch.setattr(launch, "CudaKernel", as_it_is)
    monkeypatch.setattr(cuda.core, "Program", Program)
    device: Any = SimpleNamespace(compute_capability=(9, 0), arch="90")

    def load(spec: Any = SPEC, **options: Any) -> Any:
        return launch.load_kernel(
            spec, LAYOUT, **{"rank": 0, "device": device, "looped": False, **options}
        )

    first = load()
    assert first[1:] == (SPEC.symbol, 2, Pdl.NEVER)
    assert load() == first
    assert len(compiled) == 1
    others: list[dict[str, Any]] = [
        {"rank": 1},
        {"looped": True},
        {"pdl": Pdl.BEHIND},
        {"device": SimpleNamespace(compute_capability=(10, 0), arch="100")},
    ]
    for number, options in enumerate(others, 2):
        load(**options)
        load(**options)
        assert len(compiled) == number
    assert compiled[0] == (
        SPEC,
        LAYOUT,
        {"rank": 0, "compute_capability": (9, 0), "looped": False, "programmatic": False},
    )

    load(keeps_ptx=False)
    load(keeps_ptx=False)
    assert len(compiled) == 7
    assert load() == first

    buffer = BufferSpec.of(2, "uint32", threads=32, slots=1, protocol="ll")
    theirs = UserKernelSpec(never, buffer, ())
    load(theirs)
    load(theirs)
    assert len(compiled) == 9


@pytest.mark.parametrize("kernel", [kernel for kernel in Kernel if kernel.has_code])
def test_what_tells_kernels_apart_holds_no_address(kernel: Kernel) -> None:
    spec = KernelSpec(kernel, kernel.default_protocol, DTYPES["float32"], ReduceOp.SUM, 4)
    assert not re.search(r"0x[0-9a-f]{6}|\.\.\.", repr((spec, layout_for(spec, Config()))))
