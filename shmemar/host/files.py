"""Files that are kept from one run to the next."""

from __future__ import annotations

import hashlib
from pathlib import Path
from uuid import uuid4

from shmemar.config import environment

__all__ = ["cache_directory", "kept_file", "write_whole"]


def cache_directory(part: str) -> Path:
    """Directory of this user's that keeps `part` from one run to the next; it may be missing.

    Raises:
        RuntimeError: The user has no home.
    """
    root = environment("XDG_CACHE_HOME")
    return (Path(root) if root else Path.home() / ".cache") / "shmemar" / part


def kept_file(part: str, key: str) -> Path:
    """File that keeps what `key` names; raises as `cache_directory` does."""
    return cache_directory(part) / f"{hashlib.sha256(key.encode()).hexdigest()[:16]}.json"


def write_whole(path: Path, text: str) -> None:
    """Write a file so that another process finds all of it or nothing.

    Raises:
        OSError: It could not be written.
    """
    part = path.with_name(f"{path.name}.{uuid4().hex}")
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        part.write_text(text, encoding="utf-8")
        part.replace(path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise
