"""Symmetric memory of one process, divided among its communicators.

NVSHMEM allocates with all of its processes together, but a communicator may hold some of them only.
So one block is taken at the start, and each process divides its own; the parts of a communicator
need not lie at the same offset on its ranks, as they exchange their addresses.
"""

from __future__ import annotations

from shmemar.errors import BackendUnavailableError

__all__ = ["ALIGNMENT", "Arena"]

ALIGNMENT = 512


class Arena:
    """First-fit division of the bytes from `base` on.

    Attributes:
        base: Address of the first byte.
        nbytes: Bytes in all.
    """

    def __init__(self, base: int, nbytes: int) -> None:
        """Begin with everything free."""
        self.base = base
        self.nbytes = nbytes
        self._used: dict[int, int] = {}

    @property
    def nbytes_used(self) -> int:
        """Bytes that are allocated."""
        return sum(self._used.values())

    def allocate(self, nbytes: int) -> int:
        """Take `nbytes` and return their offset.

        Raises:
            BackendUnavailableError: No gap is large enough.
        """
        rounded = -(-nbytes // ALIGNMENT) * ALIGNMENT
        start = 0
        for offset in sorted(self._used):
            if offset - start >= rounded:
                break
            start = offset + self._used[offset]
        if start + rounded > self.nbytes:
            raise BackendUnavailableError(
                f"{nbytes} bytes of symmetric memory do not fit: of {self.nbytes} bytes "
                f"{self.nbytes_used} are in use. Close a communicator, or raise "
                "SHMEMAR_HEAP_NBYTES (and NVSHMEM_SYMMETRIC_SIZE above it)."
            )
        self._used[start] = rounded
        return start

    def free(self, offset: int) -> None:
        """Return what `allocate` took."""
        del self._used[offset]
