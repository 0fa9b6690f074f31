"""Draws a result document: latency against message size, one line per contender."""

from __future__ import annotations

from textwrap import fill
from typing import TYPE_CHECKING, Any

from benchmarks.compare import rows_of
from shmemar.errors import ArgumentError
from shmemar.host.plotting import line_style, require_matplotlib, save, set_axes, size_text

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from benchmarks.compare import Row

__all__ = ["draw"]

SUFFIXES = (".svg", ".png")


def draw(document: Mapping[str, Any], path: Path, mode: str) -> None:
    """Draw the rows of one mode to a file, readable in black and white.

    Both axes are logarithmic. Error bars reach from the 20th to the 80th percentile. Of several
    rows of one line and size the fastest is drawn. Rows without a number, of no bytes, or with
    wrong results are left out, and the plot says so. The floor is drawn where the document has it.

    Args:
        document: As `benchmarks.compare.load` returns it.
        path: The file; its suffix, ``.svg`` or ``.png``, says which form.
        mode: One of the document's modes.

    Raises:
        ArgumentError: There is nothing to draw in that mode, the suffix is another one, or the file
            could not be written.
        BackendUnavailableError: matplotlib is not installed.
    """
    if path.suffix.lower() not in SUFFIXES:
        raise ArgumentError(f"the plot is {path}; expected a file that ends in .svg or .png.")
    rows = [row for row in rows_of(document) if row.mode == mode]
    good = [row for row in rows if not _why_left_out(row)]
    if not good:
        modes = ", ".join(dict.fromkeys(row.mode for row in rows_of(document)))
        raise ArgumentError(
            f"the document has no rows of mode {mode} to draw; its modes are {modes}."
            f" {' '.join(_left_out(rows))}".rstrip()
        )
    require_matplotlib("draw the file: python -m benchmarks plot FILE PLOT")
    import matplotlib as mpl
    from matplotlib.figure import Figure

    with mpl.rc_context({"font.size": 9, "svg.hashsalt": "shmemar"}):
        figure = Figure(figsize=(7.5, 5), layout="constrained")
        axes = figure.subplots()
        for number, (label, points) in enumerate(_lines(good).items()):
            _draw_line(axes, number, label, points)
        floor_us = _floor_us(document)
        if floor_us:
            label = f"floor, {floor_us:.2f} µs"
            axes.axhline(floor_us, color="grey", linewidth=1.5, alpha=0.7, label=label, zorder=0)
        set_axes(axes, sorted({row.nbytes for row in good}))
        axes.set_xlabel("message size (bytes)")
        axes.set_ylabel("latency (µs)")
        axes.set_title(_title(document, good, mode), fontsize=9)
        axes.legend(fontsize=8)
        if left_out := _left_out(rows):
            figure.supxlabel("\n".join(fill(each, 120) for each in left_out), fontsize=7)
        save(figure, path)


_WHAT = ("collective", "dtype", "op", "in_place", "chained")
"""What is in the title where all rows have the same, and in the legend where they have not."""


def _lines(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """The rows of each line by its label, in rising order of size.

    A contender that ran one kernel a size, and not the same one at all sizes, has one line.
    """
    varying = [name for name in _WHAT if len({getattr(row, name) for row in rows}) > 1]
    kernels: dict[tuple[Any, ...], set[str]] = {}
    for row in rows:
        what = row.contender, *(getattr(row, name) for name in varying)
        kernels.setdefault((*what, row.nbytes), set()).add(row.kernel)
        kernels.setdefault((*what, "all"), set()).add(row.kernel)
    several = {what[:-1] for what, names in kernels.items() if what[-1] != "all" and len(names) > 1}
    found: dict[str, dict[int, Row]] = {}
    for row in rows:
        what = row.contender, *(getattr(row, name) for name in varying)
        by_size = what not in several and len(kernels[*what, "all"]) > 1
        kernel = "" if by_size else row.kernel
        parts = [row.contender, kernel, *(_said(row, name) for name in varying)]
        points = found.setdefault(" ".join(filter(None, parts)), {})
        known = points.get(row.nbytes)
        if known is None or _us(row.median_us) < _us(known.median_us):
            points[row.nbytes] = row
    return {label: [points[size] for size in sorted(points)] for label, points in found.items()}


def _draw_line(axes: Any, number: int, label: str, points: Sequence[Row]) -> None:
    medians_us = [_us(row.median_us) for row in points]
    below_us = [max(_us(row.median_us) - _us(row.p20_us), 0.0) for row in points]
    above_us = [max(_us(row.p80_us) - _us(row.median_us), 0.0) for row in points]
    axes.errorbar(
        [row.nbytes for row in points],
        medians_us,
        yerr=(below_us, above_us),
        label=label,
        **line_style(number),
        elinewidth=0.5,
        capsize=1.5,
    )


def _floor_us(document: Mapping[str, Any]) -> float | None:
    floor = document.get("floor")
    value = floor.get("l_sol_us") if isinstance(floor, dict) else None
    return value if isinstance(value, int | float) and value > 0 else None


def _title(document: Mapping[str, Any], rows: Sequence[Row], mode: str) -> str:
    def fact(name: str) -> str:
        return str(document.get(name) or f"{name}?")

    machine = f"{fact('GPU')}, {fact('ranks on a GPU')} on a GPU"
    if document.get("backend") == "emulated":
        machine = "emulated on a CPU"
    what = " ".join(filter(None, (_one(rows, name) for name in _WHAT)))
    return f"{fact('ranks')} ranks, {machine}; {what}, {mode}, {fact('date')[:10]}"


def _one(rows: Sequence[Row], name: str) -> str:
    """What all rows have; empty where they differ."""
    said = {_said(row, name) for row in rows}
    return said.pop() if len(said) == 1 else ""


def _said(row: Row, name: str) -> str:
    value = getattr(row, name)
    if isinstance(value, bool):
        return name.replace("_", " ") if value else ""
    return "" if value == "-" else str(value)


def _why_left_out(row: Row) -> str:
    if row.wrong:
        return "wrong results"
    if row.median_us is None:
        return f"no number, {row.why_no_number}"
    return "" if row.nbytes else "of no bytes"


def _left_out(rows: Sequence[Row]) -> list[str]:
    """Say what is not drawn and why, a sentence for each contender, kernel and reason."""
    sizes: dict[str, list[str]] = {}
    for row in rows:
        why = _why_left_out(row)
        if why:
            name = " ".join(filter(None, (row.contender, row.kernel)))
            sizes.setdefault(f"{name} ({why})", []).append(size_text(row.nbytes))
    return [f"Not drawn: {name} at {', '.join(at)}." for name, at in sizes.items()]


def _us(value: float | None) -> float:
    assert value is not None, "a row that is drawn has numbers"
    return value
