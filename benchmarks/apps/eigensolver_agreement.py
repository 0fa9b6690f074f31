"""What the ranks of the eigensolver settle on the host: arguments, memory, and results."""

from __future__ import annotations

import hashlib
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks.apps.eigensolver_layout import needed
from benchmarks.apps.reporting import require_memory
from shmemar.errors import MismatchError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from benchmarks.apps.communicators import Communicator
    from benchmarks.apps.eigensolver_layout import Layout

__all__ = ["agreed", "compare", "require_room", "require_room_for", "same_pairs"]


def compare(comm: Communicator, own: dict[str, Any]) -> None:
    """Refuse arguments that differ between ranks. Collective.

    Raises:
        MismatchError: They do; on every rank.
    """
    for rank, theirs in enumerate(comm.host_allgather(own)):
        for name, value in theirs.items():
            if value != own[name]:
                raise MismatchError(
                    f"{name} differs between ranks: {own[name]} here, {value} on rank {rank}. "
                    "Every rank must solve the same problem."
                )


def require_room(comm: Communicator, arrays: int, host: int) -> None:
    """Refuse what does not fit, before it is allocated. Collective.

    Args:
        comm: The ranks.
        arrays: Bytes that this rank needs where the communicator's arrays are.
        host: Bytes that it needs on the host beside.

    Raises:
        ArgumentError: A GPU or a host has less memory free than its ranks need; on every rank.
    """
    ranks = SimpleNamespace(allgather=comm.host_allgather)
    advice = "Solve a smaller problem, or use fewer ranks on each."
    if comm.xp is np:
        require_memory(ranks, np, arrays + host, advice)
        return
    comm.xp.get_default_memory_pool().free_all_blocks()
    require_memory(ranks, comm.xp, arrays, advice)
    require_memory(ranks, np, host, advice)


def require_room_for(
    comm: Communicator, layout: Layout, dtype: np.dtype[Any], *matrices: Any
) -> None:
    """Refuse matrices of numpy whose copies do not fit on a GPU beside the rest. Collective.

    Raises:
        ArgumentError: As of `require_room`.
    """
    if comm.xp is np:
        return
    copies = sum(each.nbytes for each in matrices if isinstance(each, np.ndarray))
    if any(comm.host_allgather(copies)):
        n, nown = layout.n, len(layout.own)
        there = (n * n + n * nown) * dtype.itemsize  # reflectors, own columns
        require_room(comm, needed(layout, dtype).arrays - there + copies, 0)


def agreed(
    comm: Communicator, d: NDArray[Any], e: NDArray[Any]
) -> tuple[NDArray[Any], NDArray[Any], bool]:
    """The same d and e on all ranks: rank 0's, where the sums were not the same."""
    if comm.name == "self" and comm.size > 1:
        return d, e, False
    digests = comm.host_allgather(hashlib.sha256(d.tobytes() + e.tobytes()).digest())
    if len(set(digests)) == 1:
        return d, e, True
    d, e = comm.host_allgather((d, e) if comm.rank == 0 else None)[0]  # type: ignore[misc]
    return d, e, False


def same_pairs(
    comm: Communicator, values: NDArray[Any], vectors: NDArray[Any]
) -> tuple[NDArray[Any], NDArray[Any]]:
    """The same eigenvalues and vectors on all ranks: rank 0's, where LAPACK's are not the same.

    It gives the same where processors and threads are. Vectors of a cluster have to be of one rank,
    to be orthogonal across ranks. The values and two rows of the vectors tell whether they are.
    """
    seen = values.tobytes() + vectors[[0, len(vectors) // 2]].tobytes()
    if len(set(comm.host_allgather(hashlib.sha256(seen).digest()))) == 1:
        return values, vectors
    return comm.host_allgather((values, vectors) if comm.rank == 0 else None)[0]  # type: ignore[return-value]
