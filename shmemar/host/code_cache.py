"""Compiled code that is kept on disk, for the next run.

numba-cuda takes 2 to 5 s for a kernel, in every process that needs it, and the PTX is the same each
time. Kernels that users write are compiled anew: what their functions refer to is not known here.
"""

from __future__ import annotations

import hashlib
import sys
import warnings
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shmemar.config import environment_of
from shmemar.host.files import cache_directory

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["kept_cubin", "kept_ptx"]

LIMIT_NBYTES = 1 << 30
"""Of PTX, and of cubins; beyond it goes what was read longest ago."""

_COMPILERS = ("numba", "numba-cuda", "llvmlite")


def kept_ptx(what: tuple[object, ...], make: Callable[[], str]) -> str:
    """Return what `make` returned for `what` before, in any process of this user, or returns now.

    Args:
        what: Everything that decides the code, but for this package's sources and the compilers.
            Its ``repr`` has to tell.
        make: Compiles it.

    Warns:
        RuntimeWarning: It could not be kept.
    """
    try:
        text = repr((what, _sources(), _compilers()))
        store, key = _open(cache_directory("ptx")), hashlib.sha256(text.encode()).digest()
        found = store.get(key)
    except _REASONS as error:
        _warn(error)
        return make()
    if found is not None:
        return bytes(found).decode()
    made = make()
    try:
        store[key] = made.encode()
    except OSError as error:
        _warn(error)
    return made


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


_REASONS = (OSError, RuntimeError, PackageNotFoundError)
"""No home, no room, no right to write; or a compiler that can't be told from another one."""


@cache
def _open(directory: Path) -> Any:
    from cuda.core.utils import FileStreamProgramCache

    return FileStreamProgramCache(directory, max_size_bytes=LIMIT_NBYTES)


def _warn(error: Exception) -> None:
    _warn_once(
        f"compiled kernels are not kept on disk ({type(error).__name__}: {error}), so each run "
        "compiles them again, for seconds each. Have XDG_CACHE_HOME name a directory that can be "
        "written."
    )


@cache
def _warn_once(text: str) -> None:
    warnings.warn(text, RuntimeWarning, stacklevel=2)


@cache
def _sources() -> str:
    """Digest of this package's sources, as they are on disk."""
    package, digest = Path(__file__).parents[1], hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        contents = hashlib.sha256(path.read_bytes()).hexdigest()
        digest.update(f"{path.relative_to(package).as_posix()} {contents}\n".encode())
    return digest.hexdigest()


@cache
def _compilers() -> tuple[Any, ...]:
    """What turns them into PTX: versions, libNVVM, and the variables that steer numba."""
    from cuda.pathfinder import load_nvidia_dynamic_lib

    library = load_nvidia_dynamic_lib("nvvm").abs_path
    if library is None:
        raise RuntimeError("it is not known where libNVVM comes from")
    found = Path(library).stat()
    return (
        sys.version,
        tuple((name, version(name)) for name in _COMPILERS),
        (library, found.st_size, found.st_mtime_ns),
        tuple(sorted(environment_of("NUMBA_").items())),
    )
