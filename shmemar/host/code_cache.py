"""Compiled code that is kept on disk, for the next run.

numba takes seconds for a kernel, in every process that needs it, and what comes out is the same
each time. Kernels that users write are compiled anew: what their functions refer to is not known
here. cuda.core's store keeps the cubins; where there is no CUDA, there is no cuda.core.
"""

from __future__ import annotations

import hashlib
import os
import sys
import warnings
from contextlib import suppress
from functools import cache
from importlib.metadata import version
from pathlib import Path
from stat import S_ISREG
from typing import TYPE_CHECKING, Any

import shmemar
from shmemar.config import environment_of
from shmemar.host.files import cache_directory, write_whole

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["kept_cubin", "kept_ir", "kept_ptx"]

LIMIT_NBYTES = 1 << 30
"""Of each of them; beyond it goes what was used longest ago."""


def kept_ptx(what: tuple[object, ...], make: Callable[[], str]) -> str:
    """Return the PTX that `make` returned for `what` before, in any process of this user, or now.

    Args:
        what: Everything that decides the code, but for this package's sources and the compilers.
            Its ``repr`` has to tell.
        make: Compiles it.

    Warns:
        RuntimeWarning: It could not be kept.
    """
    return _kept("ptx", what, _compilers_of_ptx, make)


def kept_ir(what: tuple[object, ...], make: Callable[[], str]) -> str:
    """As `kept_ptx`, of LLVM's code that numba has made for this CPU."""
    return _kept("ir", what, _compilers_of_ir, make)


def _kept(
    part: str,
    what: tuple[object, ...],
    compilers: Callable[[], tuple[object, ...]],
    make: Callable[[], str],
) -> str:
    try:
        key = repr((what, _sources(), compilers()))
        path = cache_directory(part) / hashlib.sha256(key.encode()).hexdigest()
        found = _read(path)
    except _REASONS as error:
        _warn(error)
        return make()
    if found is not None:
        return found
    made = make()
    try:
        _sources()  # which may have changed before the last of them was imported
        write_whole(path, f"{_digest(made)}\n{made}")
    except _REASONS as error:
        _warn(error)
    else:
        _make_room(path.parent)
    return made


def _read(path: Path) -> str | None:
    """What is kept there; None where there is nothing, or not all of it."""
    try:
        digest, _, text = path.read_text(encoding="utf-8").partition("\n")
    except (FileNotFoundError, UnicodeDecodeError):
        return None
    if digest != _digest(text):
        return None
    with suppress(OSError):  # another user's, in a shared directory
        os.utime(path)
    return text


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _make_room(directory: Path) -> None:
    """Remove what was used longest ago, until there is a fourth of the limit to spare."""
    found = []
    with suppress(OSError):  # room is made at another time, or by another process
        for path in directory.iterdir():
            facts = path.lstat()
            if S_ISREG(facts.st_mode):
                found.append((facts.st_mtime_ns, facts.st_size, path))
    excess = sum(nbytes for _, nbytes, _ in found) - LIMIT_NBYTES
    if excess <= 0:
        return
    excess += LIMIT_NBYTES // 4
    for _, nbytes, path in sorted(found):
        if excess > 0:
            with suppress(OSError):
                path.unlink()
            excess -= nbytes


def kept_cubin(program: Any) -> Any:
    """Assemble a program of cuda.core, or find its cubin on disk.

    Warns:
        RuntimeWarning: It could not be kept.
    """
    try:
        return program.compile("cubin", cache=_open(cache_directory("cubin")))
    except _REASONS as error:
        made = program.compile("cubin")  # whose own errors go on
        _warn(error)
        return made


_REASONS = (OSError, RuntimeError, ImportError)
"""No home, no room, no right to write; or sources or compilers that can't be told from others."""


@cache
def _open(directory: Path) -> Any:
    from cuda.core.utils import FileStreamProgramCache

    return FileStreamProgramCache(directory, max_size_bytes=LIMIT_NBYTES)


def _warn(error: Exception) -> None:
    # Messages of the system's name files, which are others each time.
    what = (type(error), error.errno) if isinstance(error, OSError) else (type(error), str(error))
    if what in _warned:
        return
    _warned.add(what)
    has_place = isinstance(error, ImportError | _UnknownError)
    remedy = "" if has_place else " Have XDG_CACHE_HOME name a directory that can be written."
    warnings.warn(
        f"compiled kernels are not kept on disk ({type(error).__name__}: {error}), so each run "
        f"compiles them again, for seconds each.{remedy}",
        RuntimeWarning,
        stacklevel=4,
    )


_warned: set[tuple[object, ...]] = set()


class _UnknownError(RuntimeError):
    """What decides the code is not known."""


def _sources() -> str:
    """Digest of this package's sources, which are on disk as they were imported."""
    package = Path(__file__).parents[1]
    paths = sorted(package.rglob("*.py"))
    if not paths:
        raise _UnknownError("this package's sources are not on disk")
    newest = max(max(each.st_mtime_ns, each.st_ctime_ns) for each in map(Path.stat, paths))
    if newest > shmemar._IMPORTED_NS:  # noqa: SLF001 - the first thing of the package that runs
        raise _UnknownError("this package's sources have changed since it was imported")
    return _digest_of(package, tuple(paths))


@cache
def _digest_of(package: Path, paths: tuple[Path, ...]) -> str:
    digest = hashlib.sha256()
    for path in paths:
        contents = hashlib.sha256(path.read_bytes()).hexdigest()
        digest.update(f"{path.relative_to(package).as_posix()} {contents}\n".encode())
    return digest.hexdigest()


def _compilers_of_ptx() -> tuple[Any, ...]:
    """What turns them into PTX: versions, settings, libNVVM and libdevice."""
    from cuda.pathfinder import load_nvidia_dynamic_lib
    from numba.cuda.core import config
    from numba.cuda.cudadrv.libs import get_libdevice

    libraries = load_nvidia_dynamic_lib("nvvm").abs_path, get_libdevice()
    if None in libraries:
        raise _UnknownError("it is not known where libNVVM or libdevice come from")
    return (*_numba(config), version("numba-cuda"), *map(_file, map(str, libraries)))


def _compilers_of_ir() -> tuple[Any, ...]:
    """What turns them into code of this CPU."""
    from llvmlite import binding
    from numba.core import config

    features = binding.get_host_cpu_features().flatten()
    return (*_numba(config), binding.get_host_cpu_name(), features)


def _numba(config: Any) -> tuple[Any, ...]:
    """Versions, and what steers numba, which reads its variables again when it compiles."""
    settings = {name: repr(value) for name, value in vars(config).items() if name.isupper()}
    # Those depend on how many processors a rank is bound to.
    others = {name: text for name, text in settings.items() if "NUM_THREADS" not in name}
    variables = environment_of("NUMBA_")
    versions = [version(name) for name in ("numba", "llvmlite", "numpy")]
    return (sys.version, *versions, tuple(sorted(others.items())), tuple(sorted(variables.items())))


def _file(path: str) -> tuple[str, int, int]:
    try:
        facts = Path(path).stat()
    except OSError as error:
        raise _UnknownError(f"{path} can't be looked at: {error}") from error
    return path, facts.st_size, facts.st_mtime_ns
