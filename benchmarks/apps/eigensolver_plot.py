"""Draws time per column of the tridiagonalisation over n, split in compute and communication.

``python -m benchmarks.apps.eigensolver_plot RESULTS... PLOT`` draws results that were kept.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shmemar.errors import ArgumentError, ShmemarError
from shmemar.host.plotting import require_matplotlib, save

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = ["check_plot", "draw", "main", "read"]

SUFFIXES = (".svg", ".png")

_HATCHES = ("////", "....", "xxxx", "----", "++++")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; return 0, or 2 where it can't be drawn."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.apps.eigensolver_plot", description=__doc__
    )
    parser.add_argument(
        "results",
        nargs="+",
        type=Path,
        help="what --json of the eigensolver wrote, under the same conditions; what a later one "
        "has of a size, type and backend comes in the place of an earlier one's",
    )
    parser.add_argument("plot", type=Path, help="the file to draw; .svg or .png")
    arguments = parser.parse_args(argv)
    try:
        draw(read(arguments.results), arguments.plot)
    except ShmemarError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def read(paths: Sequence[Path]) -> dict[str, Any]:
    """Read result files into one document.

    Args:
        paths: Files of the same GPUs, number of ranks and block. Rows of a later one replace those
            of the same size, type and backend.

    Returns:
        What the last one says of the machine, and all rows.

    Raises:
        ArgumentError: One can't be read, is none of the eigensolver's, or is of other conditions.
    """
    document: dict[str, Any] = {}
    rows: dict[tuple[Any, ...], Any] = {}
    conditions: set[tuple[Any, ...]] = set()
    for path in paths:
        try:
            document = json.loads(path.read_text(encoding="utf-8"))
            for row in document["rows"]:
                drawn = {name: row[name] for name in _DRAWN}
                float(drawn["column_us"])
                if drawn["compute_us"] is not None:
                    float(drawn["compute_us"]), float(drawn["share"])
                rows[drawn["dtype"], drawn["n"], drawn["backend"]] = row
                conditions.add((document.get("gpus"), drawn["ranks"], drawn["block"]))
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ArgumentError(
                f"{path} can't be read ({type(error).__name__}: {error}); expected what --json of "
                "the eigensolver wrote."
            ) from error
        if len(conditions) > 1:
            raise ArgumentError(
                f"{path} is of other GPUs, ranks or blocks than the results before; expected the "
                "same."
            )
    return {**document, "rows": list(rows.values())}


_DRAWN = ("dtype", "n", "backend", "ranks", "block", "column_us", "compute_us", "share")


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
    all hatched is of a backend whose share is not known. Wrong results are not drawn.

    Args:
        document: What ``python -m benchmarks.apps.eigensolver --json`` writes.
        path: The file; its suffix, ``.svg`` or ``.png``, says which form.

    Raises:
        ArgumentError: There are no right results, or the file could not be written; or as of
            `check_plot`.
        BackendUnavailableError: matplotlib is not installed.
    """
    check_plot(path)
    rows = [row for row in document.get("rows", ()) if not row.get("trouble")]
    if not rows:
        raise ArgumentError("the document has no rows to draw; expected right results of a run.")
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
        figure.legend(loc="outside lower center", ncols=len(names) + 1, fontsize=8)
        save(figure, path)


def _title(document: Mapping[str, Any], row: Mapping[str, Any]) -> str:
    gpus = str(document.get("gpus", ""))
    machine = "emulated on a CPU" if gpus.startswith("none") else gpus or "gpus?"
    return (
        f"tridiagonalisation, {row['ranks']} ranks, {machine}; {row['dtype']}, block {row['block']}"
    )


if __name__ == "__main__":
    sys.exit(main())
