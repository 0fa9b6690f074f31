"""What the checker finds, and how it says so."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any

__all__ = ["CheckReport", "Failure", "ProtocolError", "Verdict"]


class Verdict(Enum):
    """What is wrong with a run."""

    WRONG_VALUE = "wrong value"
    DEADLOCK = "deadlock"
    LIVELOCK = "livelock"
    WRITTEN_TWICE = "slot written twice in an epoch"
    REUSED = "slot reused before it was read"
    ONE_WAY = "epoch not bidirectional"
    OUTSIDE = "memory that the rank may not touch"
    OTHER_LAYOUT = "another layout's region"
    RAISED = "exception in a kernel"


class ProtocolError(Exception):
    """Ends a run that went wrong.

    Attributes:
        verdict: What is wrong.
        ranks: The ranks concerned.
    """

    def __init__(self, verdict: Verdict, message: str, *ranks: int) -> None:
        super().__init__(message)
        self.verdict = verdict
        self.ranks = ranks


@dataclass(frozen=True)
class Failure:
    """A run that went wrong.

    Attributes:
        verdict: What is wrong.
        message: What was seen, of whom, and what was expected.
        seed: The run's seed, which makes it the same run again.
        schedule: Name of the run's schedule.
        moves: The last moves of the threads concerned, oldest first.
    """

    verdict: Verdict
    message: str
    seed: int
    schedule: str
    moves: tuple[str, ...]

    def __str__(self) -> str:
        """All of it, a move a line."""
        lines = (
            f"{self.verdict.value}: {self.message}",
            f"seed {self.seed}, schedule {self.schedule}; the last moves of the threads concerned:",
            *self.moves,
        )
        return "\n  ".join(lines)


@dataclass(frozen=True)
class CheckReport:
    """What was checked, and the first failure.

    Attributes:
        name: What was run.
        nranks: Ranks.
        runs: Runs, each of a seed of its own, up to the one that failed.
        operations: Memory operations of all of them; a load or a store of a packet is one.
        seconds: Time that they took.
        failure: The failure of the least seed; None when all went well.
    """

    name: str
    nranks: int
    runs: int
    operations: int
    seconds: float
    failure: Failure | None

    @property
    def passed(self) -> bool:
        """True when no run went wrong."""
        return self.failure is None

    def __str__(self) -> str:
        """One line, and the failure behind it."""
        found = "passed" if self.failure is None else str(self.failure)
        return f"{self.name}, {self.nranks} ranks, {self.runs} runs: {found}"

    def joined(self, other: CheckReport) -> CheckReport:
        """This and a report of the same with other seeds; the failure of the lesser seed counts."""
        failures = [each.failure for each in (self, other) if each.failure is not None]
        details: dict[str, Any] = {
            "runs": self.runs + other.runs,
            "operations": self.operations + other.operations,
            "seconds": self.seconds + other.seconds,
            "failure": min(failures, key=lambda failure: failure.seed, default=None),
        }
        return CheckReport(self.name, self.nranks, **details)
