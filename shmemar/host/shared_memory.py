"""Memory that all ranks of one host map.

Each rank makes a file in memory that has no name, and the others map it through its descriptor.
Nothing can stay behind, however a rank ends; and freeing it is no collective call, as it is for
MPI's shared windows, so it can't hang on a peer that is gone.
"""

from __future__ import annotations

import mmap
import os
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from shmemar.errors import BackendUnavailableError
from shmemar.layout import WORD_NBYTES

if TYPE_CHECKING:
    from shmemar.host.bootstrap import Bootstrap

__all__ = ["SharedMemory"]


class SharedMemory:
    """Memory on every rank, mapped by all, filled with a word of 32 bits and zeros. Collective.

    Attributes:
        nbytes: Bytes of each rank.
        addresses: Address in this process of each rank's part, in rank order.
        window: 0, as there is no multicast address.

    Raises:
        BackendUnavailableError: A part can't be made or mapped; on every rank.
    """

    window = 0

    def __init__(
        self, bootstrap: Bootstrap, nbytes: int, word: int = 0, zeroed_nbytes: int = 0
    ) -> None:
        """Make the own part and map all; the last `zeroed_nbytes` are zeros."""
        self.nbytes = nbytes
        descriptor = bootstrap.together(
            lambda: _create(nbytes, word, zeroed_nbytes), "make shared memory"
        )
        try:
            paths = bootstrap.allgather(f"/proc/{os.getpid()}/fd/{descriptor}", "share memory")
            self._maps = bootstrap.together(
                lambda: [_map(path, nbytes) for path in paths], "map shared memory"
            )
        finally:
            os.close(descriptor)
        self._views: list[Any] = [np.frombuffer(part, np.uint8) for part in self._maps]
        self.addresses: tuple[int, ...] = tuple(
            int(view.__array_interface__["data"][0]) for view in self._views
        )

    def view(self, rank: int) -> Any:
        """Return one rank's part as bytes; it stays mapped as long as the array lives."""
        return self._views[rank][:]

    def free(self) -> None:
        """Unmap all parts; a peer's mapping of the same part stays, and so do arrays of users."""
        self._views.clear()
        for part in self._maps:
            with suppress(BufferError):
                part.close()
        self._maps.clear()

    def abandon(self) -> None:
        """Unmap all parts, as nobody else needs to take part."""
        self.free()


def _create(nbytes: int, word: int, zeroed_nbytes: int) -> int:
    descriptor = os.memfd_create("shmemar")
    try:
        os.posix_fallocate(descriptor, 0, nbytes)
    except OSError as error:
        os.close(descriptor)
        raise BackendUnavailableError(
            f"{nbytes} bytes of shared memory could not be made ({error.strerror}). Free memory, "
            "or lower scratch_nbytes (SHMEMAR_SCRATCH_NBYTES)."
        ) from error
    if word:
        with mmap.mmap(descriptor, nbytes) as part:
            whole = np.frombuffer(part, np.uint32)
            whole[: (nbytes - zeroed_nbytes) // WORD_NBYTES] = word
            del whole
    return descriptor


def _map(path: str, nbytes: int) -> mmap.mmap:
    try:
        with Path(path).open("r+b") as file:
            return mmap.mmap(file.fileno(), nbytes)
    except OSError as error:
        raise BackendUnavailableError(
            f"shared memory of a peer, {path}, could not be mapped ({error.strerror}). The ranks "
            "must run on one host, as one user, and not in containers of their own."
        ) from error
