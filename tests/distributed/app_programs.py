"""Command lines of the applications, run on all ranks of a test."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import pytest
    from mpi4py import MPI

__all__ = ["AppProgram", "is_told_apart"]


def is_told_apart(name: str, backend: str) -> bool:
    """Whether communication can be told from the rest.

    On GPUs mpi's sums are not captured, and launches would count as communication.
    """
    return backend == "emulated" or name != "mpi"


@dataclass(frozen=True)
class AppProgram:
    """An application's command line. All ranks make the same calls."""

    main: Callable[[Sequence[str]], int]
    world: MPI.Intracomm
    backend: str
    capfd: pytest.CaptureFixture[str]

    def run(self, *arguments: str) -> tuple[int, str, str]:
        """Return its status and what this rank printed to both outputs."""
        self.capfd.readouterr()
        status = self.main([*arguments, "--run-on", self.backend])
        return status, *self.capfd.readouterr()

    def assert_refused(self, *arguments: str, message: str) -> None:
        """Assert that rank 0 alone says why, in one line."""
        status, _, told = self.run(*arguments)
        assert status == 2
        lines = [line for line in told.splitlines() if message in line]
        assert len(lines) == (1 if self.world.rank == 0 else 0)
        assert "Traceback" not in told
