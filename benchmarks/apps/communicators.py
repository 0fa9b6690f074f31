"""One interface to what an application's collectives may run on.

An application is written against `Communicator`: an all-reduce and a broadcast in place, on the
current stream, and memory to do them in. What is behind it is chosen by name: ``shmemar``,
``nvshmem`` (NVSHMEM's own collectives on a stream), ``nccl``, ``mpi`` (staged through the host),
``self`` (nothing at all). All of one process set are opened together, over the same ranks and GPUs.

Under the emulated backend arrays are numpy's, and there are ``shmemar``, ``mpi`` and ``self``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import numpy as np

import shmemar
from benchmarks.apps.communicator_backends import BACKENDS, require
from benchmarks.apps.communicator_base import Counts, Fusing, Job
from shmemar.errors import ArgumentError, CollectiveTimeoutError, DeviceError

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["NAMES", "Communicator", "Counts", "alone", "open_communicators"]

T = TypeVar("T")

NAMES = tuple(BACKENDS)
"""What can be opened."""


class Communicator(Protocol):
    """Collectives of a fixed set of ranks, as the applications call them.

    All ranks make the same calls in the same order, with arrays of the same size and type.

    Attributes:
        name: One of `NAMES`.
        rank: The own rank.
        size: Number of ranks.
        xp: ``numpy`` or ``cupy``: whose arrays it takes, and `empty` makes.
        capturable: Whether its collectives may be captured into a CUDA graph.
        fusing: Launches kernels of the application's own in which ranks sum; None but for shmemar.
        counts: What was asked of it.
    """

    name: str
    rank: int
    size: int
    xp: Any
    capturable: bool
    fusing: Fusing | None
    counts: Counts

    def empty(self, shape: int | tuple[int, ...], dtype: Any) -> Any:
        """Make an array that collectives take without a copy, as its contiguous parts. Collective.

        Extents are 1 or more, the same on all ranks. It lasts as long as the communicator, whose
        memory it may go back to when nothing refers to it any more: end graphs that use it before.
        """

    def prepare(self, dtype: str, nbytes: int) -> None:
        """Load what sums of a type, up to a size, run: then they may be captured. Collective."""

    def allreduce(self, x: Any) -> None:
        """Sum a contiguous array over all ranks, in place, on the current stream of its library."""

    def broadcast(self, x: Any, root: int) -> None:
        """Copy the root's contiguous array to all ranks, in place, on the current stream."""

    def barrier(self) -> None:
        """Return when all ranks have come here, and what they had enqueued on GPUs is done."""

    def host_allgather(self, item: T) -> list[T]:
        """Gather a picklable object of every rank through the host, in rank order. Collective."""

    def close(self) -> None:
        """Free what it has. Collective; a second call does nothing."""


class _Alone:
    """One rank, in a process without MPI."""

    name = "self"
    rank = 0
    size = 1

    def __init__(self, xp: Any) -> None:
        self.xp = xp
        self.capturable = xp is not np
        self.fusing: Fusing | None = None
        self.counts = Counts()

    def empty(self, shape: int | tuple[int, ...], dtype: Any) -> Any:
        """Make an array."""
        return self.xp.empty(shape, dtype)

    def prepare(self, dtype: str, nbytes: int) -> None:
        """Nothing is to be loaded."""

    def allreduce(self, x: Any) -> None:
        """Leave it as it is."""
        self.counts.add("allreduce", int(x.nbytes), 0.0)

    def broadcast(self, x: Any, root: int) -> None:
        """Leave it as it is."""
        if root:
            raise ArgumentError(f"root is {root}; expected 0, the only rank.")
        self.counts.add("broadcast", int(x.nbytes), 0.0)

    def barrier(self) -> None:
        """Wait for the GPU."""
        if self.xp is not np:
            self.xp.cuda.Device().synchronize()

    def host_allgather(self, item: T) -> list[T]:
        """Return the own item."""
        return [item]

    def close(self) -> None:
        """Nothing is to be freed."""


def alone(xp: Any = np) -> Communicator:
    """Make a communicator of this process alone, without MPI.

    Args:
        xp: ``numpy`` or ``cupy``.
    """
    return _Alone(xp)


def open_communicators(
    mpi_comm: Any, names: Sequence[str], *, backend: str = "auto"
) -> dict[str, Communicator]:
    """Open communicators of the same ranks. Collective.

    All ranks give the same arguments. On GPUs CuPy's current device becomes the rank's.

    Args:
        mpi_comm: An mpi4py intracommunicator, which is duplicated.
        names: Of `NAMES`, each once.
        backend: As of `shmemar.init`: ``"nvshmem"`` for GPUs, ``"emulated"``, or ``"auto"``, as
            ``SHMEMAR_BACKEND`` says.

    Returns:
        They, by name, in the order of `names`. Close each of them.

    Raises:
        ArgumentError: A name is unknown or given twice, or the ranks' names differ; on every rank.
        BackendUnavailableError: One of them can't run here; on every rank.
        ShmemarError: As of `shmemar.init`; on every rank.
    """
    everyone = mpi_comm.allgather(tuple(names))
    _check_names(everyone)
    ours = shmemar.init(mpi_comm, backend=None if backend == "auto" else backend)
    opened: dict[str, Communicator] = {}
    try:
        job = Job(ours)
        for name in names:
            ours.host_together(lambda name=name: require(job, name), f"open {name}")  # type: ignore[misc]
        for name in names:
            settled = BACKENDS[name].settle(job)
            opened[name] = ours.host_together(
                lambda name=name, settled=settled: BACKENDS[name](job, settled),  # type: ignore[misc]
                f"open {name}",
            )
    except (CollectiveTimeoutError, DeviceError):
        ours.close()  # a peer is gone
        raise
    except Exception:
        for each in opened.values():
            each.close()
        ours.close()
        raise
    return opened


def _check_names(everyone: Sequence[tuple[str, ...]]) -> None:
    expected = ", ".join(NAMES)
    for rank, names in enumerate(everyone):
        if names != everyone[0]:
            raise ArgumentError(
                f"backends differ between ranks: {', '.join(everyone[0])} on rank 0, "
                f"{', '.join(names)} on rank {rank}. Every rank must open the same."
            )
        unknown = [name for name in names if name not in NAMES]
        if unknown or not names:
            got = repr(unknown[0]) if unknown else "none"
            raise ArgumentError(f"backends have {got}; expected some of {expected}.")
        if len(set(names)) < len(names):
            raise ArgumentError(f"backends are {', '.join(names)}; expected each once.")
