"""Work without collectives, so that a GPU loads all of its kernels before any rank waits.

A kernel that is launched for the first time is loaded then, and that may wait for kernels that run
on the same GPU. Where ranks share one, under CUDA MPS, and one of them spins in a collective for a
peer that is about to load a kernel, neither goes on. So each rank first runs the same work with
`silent` collectives, and all meet before the real ones begin.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

from benchmarks.apps.communicators import Counts

if TYPE_CHECKING:
    from benchmarks.apps.communicator_base import Fusing
    from benchmarks.apps.communicators import Communicator

__all__ = ["silent"]

T = TypeVar("T")


class _Silent:
    """A communicator's ranks, memory and host, and collectives that leave arrays as they are."""

    def __init__(self, comm: Communicator) -> None:
        self._comm = comm
        self.name = comm.name
        self.rank = comm.rank
        self.size = comm.size
        self.xp = comm.xp
        self.capturable = comm.capturable
        self.fusing: Fusing | None = None
        self.counts = Counts()

    def empty(self, shape: int | tuple[int, ...], dtype: Any) -> Any:
        """Make an array of the communicator's. Collective."""
        return self._comm.empty(shape, dtype)

    def prepare(self, dtype: str, nbytes: int) -> None:
        """Nothing is to be loaded."""

    def allreduce(self, x: Any) -> None:
        """Leave it as it is."""

    def broadcast(self, x: Any, root: int) -> None:
        """Leave it as it is."""

    def barrier(self) -> None:
        """As of the communicator."""
        self._comm.barrier()

    def host_allgather(self, item: T) -> list[T]:
        """As of the communicator."""
        return self._comm.host_allgather(item)

    def close(self) -> None:
        """Leave the communicator open."""


def silent(comm: Communicator) -> Communicator:
    """Return a communicator of the same ranks whose sums and broadcasts do nothing.

    Args:
        comm: What memory comes from, and what meets.
    """
    return _Silent(comm)
