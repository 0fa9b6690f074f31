"""Negative controls of the checker: what guards a kernel is taken out, and must be missed.

A control patches the code that runs, so it fails when the guard is elsewhere or the checker is
blind. With the same seeds and nothing taken out all runs must pass.
"""

from __future__ import annotations

from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from shmemar.host.checker.checked_run import run_seeds

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from shmemar.host.checker.checked_run import Program
    from shmemar.host.checker.verdict import CheckReport

__all__ = ["MOST_RUNS", "Control", "Patch", "control_table", "removed"]

MOST_RUNS = 400
"""Runs in which what was taken out must be missed."""

HEADER = (
    "| taken out | kernel | found as | after runs | by results alone | after runs |\n"
    "|---|---|---|---|---|---|"
)


@dataclass(frozen=True)
class Patch:
    """An attribute that is another one while a control runs.

    Attributes:
        owner: Module or class.
        name: The attribute.
        make: ``make(old)`` makes the new one.
    """

    owner: Any
    name: str
    make: Callable[[Any], Any]


@dataclass(frozen=True)
class Control:
    """Something without which a kernel is wrong.

    Attributes:
        name: What is taken out.
        patches: How.
        program: What is run.
    """

    name: str
    patches: tuple[Patch, ...]
    program: Program

    def run(
        self, seeds: Iterable[int] = range(MOST_RUNS), *, follows_packets: bool = True
    ) -> CheckReport:
        """Run without the guard, up to the first seed that goes wrong."""
        with removed(self):
            return run_seeds(replace(self.program, follows_packets=follows_packets), seeds)

    def run_whole(self, seeds: Iterable[int]) -> CheckReport:
        """Run with the guard."""
        return run_seeds(self.program, seeds)

    def row(self, *reports: CheckReport) -> str:
        """The row of a table in Markdown."""
        cells = [self.name, f"`{self.program.name}`"]
        for report in reports:
            failure = report.failure
            cells.append("not found" if failure is None else failure.verdict.value)
            cells.append(str(report.runs))
        return f"| {' | '.join(cells)} |"


@contextmanager
def removed(control: Control) -> Iterator[None]:
    """Take something out."""
    with ExitStack() as stack:
        for patch in control.patches:
            old = getattr(patch.owner, patch.name)
            setattr(patch.owner, patch.name, patch.make(old))
            stack.callback(setattr, patch.owner, patch.name, old)
        yield


def control_table(
    controls: Iterable[Control], seeds: range | None = None
) -> Iterator[tuple[str, bool]]:
    """Run controls; yield the lines of a table, and whether what they say is as it should be."""
    seeds = seeds or range(MOST_RUNS)
    yield HEADER, True
    for control in controls:
        report = control.run(seeds)
        whole = control.run_whole(seeds[: report.runs])
        row = control.row(report, control.run(seeds, follows_packets=False))
        if whole.failure is not None:
            row += f" but with it: {whole.failure}"
        yield row, report.failure is not None and whole.passed
