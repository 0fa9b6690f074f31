"""Compiled code on disk: found again, told apart, and done without."""

from __future__ import annotations

import os
import re
import sys
import time
from dataclasses import fields, replace
from functools import partial
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import cuda.core
import pytest
from llvmlite import binding

import shmemar
from shmemar.config import Config
from shmemar.dtypes import DTYPES, ReduceOp
from shmemar.host import code_cache, launch
from shmemar.host.code_cache import kept_cubin, kept_ir, kept_ptx
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
    code_cache._digest_of.cache_clear()
    code_cache._open.cache_clear()
    code_cache._warned.clear()


def never() -> str:
    raise AssertionError("it was compiled again")


@pytest.fixture(params=[kept_ptx, kept_ir], ids=["ptx", "ir"])
def kept(request: pytest.FixtureRequest) -> Any:
    return request.param


def test_code_is_made_once(kept: Any) -> None:
    assert kept(("a", 1), lambda: "first µ\nb\n") == "first µ\nb\n"
    assert kept(("a", 1), never) == "first µ\nb\n"
    assert kept(("a", 2), lambda: "other") == "other"
    forget()  # as in another process
    assert kept(("a", 1), never) == "first µ\nb\n"
    assert kept(("a", 2), never) == "other"


@pytest.mark.parametrize("spoil", [lambda text: text[:-3], lambda text: b"", lambda text: b"\xff"])
def test_what_is_not_whole_is_made_again(directory: Path, kept: Any, spoil: Any) -> None:
    kept(("a",), lambda: "code of a kernel")
    (path,) = (path for path in directory.rglob("*") if path.is_file())
    path.write_bytes(spoil(path.read_bytes()))
    assert kept(("a",), lambda: "made again") == "made again"
    assert kept(("a",), never) == "made again"


def test_what_was_used_longest_ago_makes_room(
    directory: Path, kept: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(code_cache, "LIMIT_NBYTES", 5000)
    for part in ("ptx", "ir"):
        (directory / part / "a directory").mkdir(parents=True)
    for number in range(4):
        kept((number,), lambda: "x" * 1000)
        for path in directory.rglob("*"):
            facts = path.stat()
            os.utime(path, ns=(facts.st_atime_ns, facts.st_mtime_ns - 10**9))
    assert kept((0,), never) == "x" * 1000
    kept((4,), lambda: "y" * 1000)  # of 5,325 bytes 325 are too many, and 1,250 are to be spared
    files = [path for path in directory.rglob("*") if path.is_file()]
    assert len(files) == 3
    for number in (0, 3):
        assert kept((number,), never) == "x" * 1000
    assert kept((4,), never) == "y" * 1000


def test_code_of_other_sources_or_compilers_is_not_taken(
    kept: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept(("a",), lambda: "first")
    with monkeypatch.context() as patch:
        patch.setattr(code_cache, "_sources", lambda: "others")
        assert kept(("a",), lambda: "second") == "second"
    monkeypatch.setenv("NUMBA_OPT", "0" if os.environ.get("NUMBA_OPT") != "0" else "1")
    assert kept(("a",), lambda: "third") == "third"


def test_code_of_another_kind_is_not_taken() -> None:
    kept_ptx(("a",), lambda: "ptx")
    assert kept_ir(("a",), lambda: "ir") == "ir"


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package of which this is told to be the cache."""
    made = tmp_path / "elsewhere" / "shmemar"
    (made / "host").mkdir(parents=True)
    monkeypatch.setattr(code_cache, "__file__", str(made / "host" / "code_cache.py"))
    return made


def test_sources_are_told_apart(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = set()
    for name, text in (("a.py", "1"), ("a.py", "2"), ("host/b.py", "2"), ("host/c.txt", "2")):
        (package / name).write_text(text, encoding="utf-8")
        forget()  # as in another process
        monkeypatch.setattr(shmemar, "_IMPORTED_NS", time.time_ns())
        seen.add(code_cache._sources())
    assert len(seen) == 3


def test_code_of_sources_that_have_changed_since_is_neither_kept_nor_taken(
    package: Path, kept: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What runs is older than what is on disk."""
    source = package / "a.py"
    source.write_text("VERSION = 1", encoding="utf-8")
    monkeypatch.setattr(shmemar, "_IMPORTED_NS", time.time_ns())
    assert kept(("a",), lambda: "code of 1") == "code of 1"
    time.sleep(0.05)  # files are dated by a clock of some milliseconds
    source.write_text("VERSION = 2", encoding="utf-8")
    with pytest.warns(RuntimeWarning, match="have changed since it was imported"):
        assert kept(("a",), lambda: "still code of 1") == "still code of 1"
    forget()
    time.sleep(0.05)
    monkeypatch.setattr(shmemar, "_IMPORTED_NS", time.time_ns())
    assert kept(("a",), lambda: "code of 2") == "code of 2"
    assert kept(("a",), never) == "code of 2"


def test_code_of_sources_that_change_while_it_is_made_is_not_kept(
    package: Path, kept: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = package / "a.py"
    source.write_text("VERSION = 1", encoding="utf-8")
    monkeypatch.setattr(shmemar, "_IMPORTED_NS", time.time_ns())

    def make() -> str:
        time.sleep(0.05)
        source.write_text("VERSION = 2", encoding="utf-8")
        return "code of 1 and 2"

    with pytest.warns(RuntimeWarning, match="have changed since it was imported"):
        assert kept(("a",), make) == "code of 1 and 2"
    source.write_text("VERSION = 1", encoding="utf-8")
    forget()
    monkeypatch.setattr(shmemar, "_IMPORTED_NS", time.time_ns() + 10**9)
    assert kept(("a",), lambda: "code of 1") == "code of 1"


def test_without_sources_nothing_is_kept(package: Path, kept: Any) -> None:
    with pytest.warns(RuntimeWarning, match="sources are not on disk") as warned:
        assert kept(("a",), lambda: "made") == "made"
    assert "XDG_CACHE_HOME" not in str(warned[0].message)


def test_compilers_of_ptx_are_named() -> None:
    *_, numba_cuda, nvvm, libdevice = code_cache._compilers_of_ptx()
    assert numba_cuda == version("numba-cuda")
    assert "libnvvm" in nvvm[0]
    assert "libdevice" in libdevice[0]
    assert [each[1] for each in (nvvm, libdevice)] == [
        Path(each[0]).stat().st_size for each in (nvvm, libdevice)
    ]


def test_compilers_for_this_cpu_are_named() -> None:
    python, *versions, settings, variables, name, features = code_cache._compilers_of_ir()
    assert python == sys.version
    assert versions == [version(package) for package in ("numba", "llvmlite", "numpy")]
    assert name == binding.get_host_cpu_name()
    assert features.count(",") > 3
    assert dict(variables).get("NUMBA_OPT") == os.environ.get("NUMBA_OPT")
    assert "NUMBA_NUM_THREADS" not in dict(settings)


@pytest.mark.parametrize("part", ["ir", "ptx"])
def test_what_a_program_sets_of_numba_tells_code_apart(
    part: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "numba.core.config" if part == "ir" else "numba.cuda.core.config"
    kept, config = {"ir": kept_ir, "ptx": kept_ptx}[part], import_module(name)
    kept(("a",), lambda: "as usual")
    monkeypatch.setattr(config, "DEBUGINFO_DEFAULT", 1 - config.DEBUGINFO_DEFAULT)
    assert kept(("a",), lambda: "for debuggers") == "for debuggers"


@pytest.mark.parametrize(
    "compilers", [code_cache._compilers_of_ptx, code_cache._compilers_of_ir], ids=["ptx", "ir"]
)
def test_what_tells_compilers_apart_holds_no_address(compilers: Any) -> None:
    assert not re.search(r"0x[0-9a-f]{6}", repr(compilers()))


def test_what_cannot_be_kept_is_made_each_time_and_warned_of_once(
    directory: Path, kept: Any
) -> None:
    directory.write_text("a file in the way", encoding="utf-8")
    with pytest.warns(RuntimeWarning, match=r"not kept on disk \(\w+Error: .* XDG_CACHE_HOME") as w:
        made = [kept(("b",), partial(str, text)) for text in ("made", "again")]
    assert (made, len(w)) == (["made", "again"], 1)


def test_ptx_of_an_unknown_compiler_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "cuda.pathfinder.load_nvidia_dynamic_lib", lambda _: SimpleNamespace(abs_path=None)
    )
    with pytest.warns(RuntimeWarning, match="not known where libNVVM or libdevice come from"):
        assert kept_ptx(("b",), lambda: "made") == "made"


def test_ptx_of_a_compiler_that_is_not_there_is_not_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = SimpleNamespace(abs_path=str(tmp_path / "libnvvm.so"))
    monkeypatch.setattr("cuda.pathfinder.load_nvidia_dynamic_lib", lambda _: found)
    with pytest.warns(RuntimeWarning, match="libnvvm.so can't be looked at") as warned:
        assert kept_ptx(("b",), lambda: "made") == "made"
    assert "XDG_CACHE_HOME" not in str(warned[0].message)


def test_a_disk_that_is_full_loses_nothing(kept: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path, text: str) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(code_cache, "write_whole", full)
    with pytest.warns(RuntimeWarning, match="No space left on device"):
        assert kept(("c",), lambda: "made") == "made"


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
LAYOUT: Any = layout_for(SPEC, Config())


def test_kernels_are_compiled_once_but_those_of_users_each_time(
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

    def load(spec: Any = SPEC, layout: Any = LAYOUT, **options: Any) -> Any:
        return launch.load_kernel(
            spec, layout, **{"rank": 0, "device": device, "looped": False, **options}
        )

    first = load()
    assert first[1:] == (SPEC.symbol, 2, Pdl.NEVER)
    assert load() == first
    assert len(compiled) == 1
    others: list[dict[str, Any]] = [
        {"spec": replace(SPEC, op=ReduceOp.MAX)},
        {"spec": replace(SPEC, dtype=DTYPES["int32"])},
        {"layout": replace(LAYOUT, nslots=LAYOUT.nslots // 2)},
        {"rank": 1},
        {"looped": True},
        {"pdl": Pdl.BEHIND},
        {"device": SimpleNamespace(compute_capability=(10, 0), arch="100")},
    ]
    for number, options in enumerate(others, 2):
        made = load(**options)
        assert load(**options) == made
        assert len(compiled) == number
    assert compiled[0] == (
        SPEC,
        LAYOUT,
        {"rank": 0, "compute_capability": (9, 0), "looped": False, "programmatic": False},
    )

    assert load() == first

    buffer = BufferSpec.of(2, "uint32", threads=32, slots=1, protocol="ll")
    theirs = UserKernelSpec(never, buffer, ())
    load(theirs)
    load(theirs)
    assert len(compiled) == len(others) + 3


@pytest.mark.parametrize("kernel", [kernel for kernel in Kernel if kernel.has_code])
def test_what_tells_kernels_apart_is_all_of_them_and_no_address(kernel: Kernel) -> None:
    spec = KernelSpec(kernel, kernel.default_protocol, DTYPES["float32"], ReduceOp.SUM, 4)
    layout = layout_for(spec, Config())
    text = repr((spec, layout))
    assert not re.search(r"0x[0-9a-f]{6}|\.\.\.", text)
    for each in (spec, spec.dtype, layout):
        for field in fields(each):
            assert f"{field.name}={getattr(each, field.name)!r}" in text
