"""What ranks need to have alike: errors, and results whatever bits a backend's sums gave them."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from shmemar.errors import MismatchError
from shmemar.host.bootstrap import as_entry, raise_any

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from benchmarks.apps.communicators import Communicator

__all__ = ["of_first", "together"]

T = TypeVar("T")


def together(comm: Communicator, action: Callable[[], T]) -> T:
    """Run `action` so that all ranks raise or none does. Collective."""
    result: Any = None
    error: Exception | None = None
    try:
        result = action()
    except Exception as caught:  # noqa: BLE001 - the other ranks are told
        error = caught
    raise_any(error, comm.host_allgather(as_entry(error)))
    return result  # type: ignore[no-any-return]


def of_first(
    comm: Communicator, what: str, *arrays: NDArray[Any]
) -> tuple[tuple[NDArray[Any], ...], bool]:
    """Give all ranks the arrays of rank 0, and say whether theirs had the same bits. Collective.

    Args:
        comm: What made them. Of the backends only shmemar promises sums of the same bits on all
            ranks.
        what: They, as a message names them.
        arrays: Of numpy, of the same shapes and types on all ranks.

    Returns:
        Those of rank 0, and whether those of all ranks were the same; alike on all ranks.

    Raises:
        MismatchError: They are not, and `comm` is shmemar's; on every rank.
    """
    digest = hashlib.sha256(b"".join(np.asarray(each).tobytes() for each in arrays)).digest()
    everyone = comm.host_allgather((digest, arrays if comm.rank == 0 else ()))
    others = [rank for rank, (each, _) in enumerate(everyone) if each != everyone[0][0]]
    if others and comm.name == "shmemar":
        raise MismatchError(
            f"{what} of ranks {', '.join(map(str, others))} differ from those of rank 0; expected "
            "the same bits, as the all-reduces' results have to be. Compare backends."
        )
    return everyone[0][1], not others
