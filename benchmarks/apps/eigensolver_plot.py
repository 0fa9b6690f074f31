"""Draws time per column of the tridiagonalisation over n, split in compute and communication."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from shmemar.errors import ArgumentError
from shmemar.host.plotting import require_matplotlib

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

__all__ = ["check_plot", "draw"]

SUFFIXES = (".svg", ".png")

_HATCHES = ("////", "....", "xxxx", "----", "++++")


def check_plot(path: Path) -> None:
    """Refuse what can't be drawn, before anything is measured.

    Raises:
        ArgumentError: The suffix says no form.
        BackendUnavailableError: matplotlib is not installed.
    """
    if path.suffix.lower() not in SUFFIXES:
        raise ArgumentError(f"the plot is {path}; expected a file that ends in .svg or .png.")
    require_matplotlib("run the command again")


def draw(document: Mapping[str, Any], path: Path) -> None:
    """Draw a result document to a file, readable in black and white.

    For each size and type there is a bar for each backend: below, white, the time without
    communication, above it, hatched, what communication adds. Numbers say its share. A bar that is
    all hatched is of a backend whose share is not known.

    Args:
        document: What ``python -m benchmarks.apps.eigensolver --json`` writes.
        path: The file; its suffix, ``.svg`` or ``.png``, says which form.

    Raises:
        ArgumentError: There are no rows, or the file could not be written; or as of `check_plot`.
        BackendUnavailableError: matplotlib is not installed.
    """
    check_plot(path)
    rows = document.get("rows")
    if not rows:
        raise ArgumentError("the document has no rows to draw; expected results of a run.")
    import matplotlib as mpl
    from matplotlib.figure import Figure

    several = len({row["dtype"] for row in rows}) > 1
    groups = list(dict.fromkeys((row["dtype"], row["n"]) for row in rows))
    names = list(dict.fromkeys(row["backend"] for row in rows))
    width = 0.8 / max(len(names), 3)
    with mpl.rc_context({"font.size": 9, "svg.hashsalt": "shmemar", "hatch.linewidth": 0.5}):
        figure = Figure(figsize=(7.5, 5), layout="constrained")
        axes = figure.subplots()
        style: dict[str, Any] = {"width": width * 0.9, "edgecolor": "black", "linewidth": 0.8}
        for number, name in enumerate(names):
            mine = {(row["dtype"], row["n"]): row for row in rows if row["backend"] == name}
            at = [
                place + (number - (len(names) - 1) / 2) * width
                for place, group in enumerate(groups)
                if group in mine
            ]
            found = [mine[group] for group in groups if group in mine]
            # None where it can't be told apart: then all of the bar is hatched.
            below = [min(row["compute_us"] or 0, row["column_us"]) for row in found]
            above = [row["column_us"] - low for row, low in zip(found, below, strict=True)]
            label = "without communication" if number == 0 else None
            axes.bar(at, below, color="white", label=label, **style)
            hatch = _HATCHES[number % len(_HATCHES)]
            bars = axes.bar(
                at, above, bottom=below, color="lightgrey", hatch=hatch, label=name, **style
            )
            shares = [
                "" if row["share"] is None else f"{max(row['share'], 0):.0%}" for row in found
            ]
            axes.bar_label(bars, labels=shares, fontsize=7, padding=1)
        axes.set_xticks(
            range(len(groups)),
            [f"{n}\n{dtype}" if several else str(n) for dtype, n in groups],
        )
        axes.set_xlabel("n")
        axes.set_ylabel("µs a column; numbers: share of communication")
        axes.set_ylim(0, 1.1 * max(row["column_us"] for row in rows))
        axes.grid(visible=True, axis="y", linewidth=0.3)
        axes.set_axisbelow(True)
        axes.set_title(_title(document, rows[0]), fontsize=9)
        axes.legend(fontsize=8)
        try:
            figure.savefig(path)
        except (OSError, ValueError) as error:
            raise ArgumentError(f"the plot could not be written to {path}: {error}") from error


def _title(document: Mapping[str, Any], row: Mapping[str, Any]) -> str:
    gpus = str(document.get("gpus", ""))
    machine = "emulated on a CPU" if gpus.startswith("none") else gpus or "gpus?"
    return (
        f"tridiagonalisation, {row['ranks']} ranks, {machine}; {row['dtype']}, block {row['block']}"
    )
