"""Symmetric memory: allocated and freed by all ranks together, never by a destructor."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shmemar.errors import MismatchError

if TYPE_CHECKING:
    from shmemar.host.bootstrap import Bootstrap
    from shmemar.host.contract import Memory, Runtime

__all__ = ["SymmetricHeap"]


class SymmetricHeap:
    """Allocations of the same size at every rank, freed in reverse order of allocation."""

    def __init__(self, runtime: Runtime, bootstrap: Bootstrap) -> None:
        self._runtime = runtime
        self._bootstrap = bootstrap
        self._live: list[Memory] = []

    @property
    def nbytes(self) -> int:
        """Bytes that are allocated on each rank."""
        return sum(memory.nbytes for memory in self._live)

    def allocate(self, nbytes: int, word: int = 0, zeroed_nbytes: int = 0) -> Memory:
        """Allocate memory on every rank, filled with a word of 32 bits. Collective.

        Args:
            nbytes: Bytes of each rank.
            word: What they hold at first.
            zeroed_nbytes: How many of them, at the end, hold zeros.

        Raises:
            MismatchError: The ranks asked for different sizes.
        """
        sizes = self._bootstrap.allgather(nbytes, "allocate symmetric memory")
        if len(set(sizes)) > 1:
            listed = ", ".join(f"rank {rank} {size}" for rank, size in enumerate(sizes))
            raise MismatchError(
                f"a symmetric allocation must have the same bytes on all ranks; got {listed}."
            )
        memory = self._runtime.allocate_symmetric(nbytes, word, zeroed_nbytes)
        self._live.append(memory)
        return memory

    def free(self, memory: Memory) -> None:
        """Free one allocation. Collective."""
        self._live.remove(memory)
        memory.free()

    def close(self) -> None:
        """Free what is left. Collective."""
        while self._live:
            self.free(self._live[-1])

    def abandon(self) -> None:
        """Let go of what is left as far as that goes without the peers."""
        while self._live:
            self._live.pop().abandon()
