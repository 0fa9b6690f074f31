"""Draws what the tuner measured: latency against size, with the kernel that is chosen."""

from __future__ import annotations

import json
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from shmemar.errors import ArgumentError, BackendUnavailableError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

__all__ = [
    "draw",
    "line_style",
    "read_table",
    "require_matplotlib",
    "save",
    "set_axes",
    "size_text",
]

_MARKERS = "osv^D<>Pd"
_DASHES = ("-", "--", ":", "-.")


def read_table(path: Path) -> dict[str, Any]:
    """Read a tuner's file.

    Raises:
        ArgumentError: It can't be read, or is none.
    """
    try:
        document: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        for name in ("rows", "bands", "facts", "mode", "dtype", "op", "date"):
            if not document[name]:
                raise ValueError(f"its {name} is empty")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ArgumentError(
            f"{path} is no table of the tuner's ({type(error).__name__}: {error})."
        ) from error
    return document


def require_matplotlib(
    then: str = "draw the kept table: python -m shmemar tune --draw TABLE --plot FILE",
) -> None:
    """Look for matplotlib.

    Args:
        then: What to do once it is there, for the message.

    Raises:
        BackendUnavailableError: It is not installed.
    """
    if find_spec("matplotlib") is None:
        raise BackendUnavailableError(
            f"a plot needs matplotlib; pip install 'shmemar[plot]', and {then}."
        )


def draw(document: Mapping[str, Any], path: Path) -> None:
    """Draw a tuner's document to a file, readable in black and white.

    Raises:
        BackendUnavailableError: matplotlib is not installed.
        ArgumentError: The file could not be written, or its suffix is unknown to matplotlib.
    """
    require_matplotlib()
    import matplotlib as mpl
    from matplotlib.figure import Figure

    best: dict[str, dict[int, float]] = {}
    for row in document["rows"]:
        points = best.setdefault(row["kernel"], {})
        points[row["nbytes"]] = min(row["median_us"], points.get(row["nbytes"], float("inf")))
    with mpl.rc_context({"font.size": 9, "svg.hashsalt": "shmemar"}):
        figure = Figure(figsize=(7.5, 5), layout="constrained")
        axes = figure.subplots()
        for number, (name, points) in enumerate(sorted(best.items())):
            axes.plot(
                list(points),
                list(points.values()),
                label=name,
                **line_style(number),
            )
        sizes = sorted({row["nbytes"] for row in document["rows"]})
        fastest = [min(points[n] for points in best.values() if n in points) for n in sizes]
        axes.plot(sizes, fastest, color="black", linewidth=6, alpha=0.15, label="fastest", zorder=0)
        set_axes(axes, sizes)
        axes.set_xlabel("message")
        axes.set_ylabel(f"microseconds an all-reduce, {document['mode']}")
        facts = document["facts"]
        machine = f"{facts.get('GPU')}, {facts.get('ranks on a GPU')} on a GPU"
        if facts.get("backend") == "emulated":
            machine = "emulated on a CPU"
        axes.set_title(
            f"{facts.get('ranks')} ranks, {machine}; {document['dtype']} {document['op']}, "
            f"{document['date'][:10]}",
            fontsize=9,
        )
        axes.legend(fontsize=8)
        save(figure, path)


def save(figure: Any, path: Path) -> None:
    """Write a figure; what is drawn alike is the same file, as SVG without the date.

    Raises:
        ArgumentError: The file could not be written, or its suffix is unknown to matplotlib.
    """
    try:
        figure.savefig(path, metadata={"Date": None} if path.suffix.lower() == ".svg" else None)
    except (OSError, ValueError) as error:
        raise ArgumentError(f"the plot could not be written to {path}: {error}") from error


def line_style(number: int) -> dict[str, Any]:
    """What tells line `number` from the others in black and white, as matplotlib takes it."""
    return {
        "marker": _MARKERS[number % len(_MARKERS)],
        "linestyle": _DASHES[number % len(_DASHES)],
        "color": "black" if number % 2 else "dimgray",
        "markerfacecolor": "white",
        "linewidth": 0.9,
        "markersize": 4,
    }


def set_axes(axes: Any, sizes: Sequence[int]) -> None:
    """Make both axes logarithmic, with a tick for each size in bytes."""
    from matplotlib.ticker import LogLocator

    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    turned = 45 if len(sizes) > 12 else 0
    axes.set_xticks(sizes, [size_text(nbytes) for nbytes in sizes], rotation=turned)
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter("{x:g}")
    axes.minorticks_off()
    axes.grid(visible=True, which="major", linewidth=0.3)


def size_text(nbytes: int) -> str:
    """Bytes as people write them, such as ``64 KiB``."""
    for scale, name in ((1 << 20, "MiB"), (1 << 10, "KiB")):
        if nbytes >= scale and nbytes % scale == 0:
            return f"{nbytes // scale} {name}"
    return f"{nbytes} B"
