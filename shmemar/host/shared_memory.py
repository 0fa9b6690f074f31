"""Memory that all ranks of one host map: a file for each rank, in memory, without a name.

A plain mapping, because MPI's shared windows are freed collectively, which would hang when a peer
is gone, and because each file loses its name as soon as all have mapped it: nothing stays behind,
however a rank ends.
"""

from __future__ import annotations

import mmap
import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from shmemar.errors import BackendUnavailableError

if TYPE_CHECKING:
    from shmemar.host.bootstrap import Bootstrap

__all__ = ["SharedMemory"]


class SharedMemory:
    """Zeros on every rank, mapped by all. Collective.

    Attributes:
        nbytes: Bytes of each rank.
        addresses: Address in this process of each rank's part, in rank order.

    Raises:
        BackendUnavailableError: A part can't be made or mapped; on every rank.
    """

    def __init__(self, bootstrap: Bootstrap, nbytes: int) -> None:
        self.nbytes = nbytes
        own = bootstrap.together(lambda: _create(nbytes))
        try:
            paths = bootstrap.allgather(str(own))
            self._maps = bootstrap.together(lambda: [_map(path, nbytes) for path in paths])
        finally:
            own.unlink()
        self._views: list[Any] = [np.frombuffer(part, np.uint8) for part in self._maps]
        self.addresses: tuple[int, ...] = tuple(
            int(view.__array_interface__["data"][0]) for view in self._views
        )

    def free(self) -> None:
        """Unmap all parts. Not collective: a peer's mapping of the same part stays."""
        self._views.clear()
        for part in self._maps:
            part.close()
        self._maps.clear()


def _create(nbytes: int) -> Path:
    directory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else tempfile.gettempdir()  # noqa: S108
    try:
        descriptor, name = tempfile.mkstemp(prefix="shmemar-", dir=directory)
        with os.fdopen(descriptor, "wb") as file:
            file.write(bytes(nbytes))
    except OSError as error:
        raise BackendUnavailableError(
            f"{nbytes} bytes of shared memory could not be made in {directory} ({error.strerror}). "
            "Make room there, or lower SHMEMAR_SCRATCH_NBYTES."
        ) from error
    return Path(name)


def _map(path: str, nbytes: int) -> mmap.mmap:
    try:
        with Path(path).open("r+b") as file:
            return mmap.mmap(file.fileno(), nbytes)
    except OSError as error:
        raise BackendUnavailableError(
            f"shared memory of a peer, {path}, could not be mapped ({error.strerror}). The ranks "
            "must run on one host, as one user, and not in containers of their own."
        ) from error
