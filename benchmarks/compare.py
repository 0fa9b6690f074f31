"""Two result documents side by side: what became faster, what slower, and what can't be compared.

Rows are matched by what was measured: collective, contender, mode, bytes, dtype, op, in place,
chained. Where a document has several rows of one such key, as when several kernels are pinned, the
kernel that ran belongs to the key, too; rows that are still alike are matched in their order.

A matched pair is like for like when the same kernel ran on the same number of blocks, and the two
documents agree in the facts that matter. A fact that only one of them states counts as different:
nobody knows what the other ran with.
"""

from __future__ import annotations

import json
import math
from collections import Counter, defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from benchmarks.contender import OTHER_KERNEL
from shmemar.errors import ArgumentError
from shmemar.host.timing import AHEAD

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from pathlib import Path

__all__ = ["Comparison", "Pair", "Row", "compare", "load", "render", "rows_of"]

NOISE = 0.03
"""Medians that differ by no more than this part of the earlier one are the same."""

FACTS = (
    "backend",
    "GPU",
    "ranks",
    "ranks on a GPU",
    "MPS",
    "CUDA driver",
    "programmatic launch",
)
"""Facts that matter: where one differs, no pair is like for like."""

VERSIONS = ("shmemar", "NVSHMEM", "numba-cuda", "cuda-core", "numpy")
"""Facts that are said where they differ, and change no verdict."""


@dataclass(frozen=True)
class Row:
    """One row of a document, with what old files lack filled in.

    Attributes:
        collective: Its name.
        contender: Whose it is.
        mode: How it was measured, such as ``graph``.
        nbytes: Bytes of the message.
        dtype: Element type.
        op: Operator.
        in_place: True when reduced in place.
        chained: True when each call depended on the one before.
        kernel: What ran; empty when it is not known.
        blocks: Blocks of its grid; None when they are not known.
        median_us: Microseconds a collective; None where there is no number.
        p20_us: Its 20th percentile; None where there is no number.
        p80_us: Its 80th; None where there is no number.
        wrong: Wrong elements.
        note: Why there is no number, or another remark; empty without.
    """

    collective: str
    contender: str
    mode: str
    nbytes: int
    dtype: str
    op: str
    in_place: bool
    chained: bool
    kernel: str
    blocks: int | None
    median_us: float | None
    p20_us: float | None
    p80_us: float | None
    wrong: int
    note: str

    @property
    def what(self) -> str:
        """Collective, dtype, op, and whether in place and chained, as a heading."""
        parts = [self.collective, self.dtype, self.op]
        return ", ".join(
            [each for each in parts if each != "-"]
            + ["in place"] * self.in_place
            + ["chained"] * self.chained
        )

    @property
    def name(self) -> str:
        """Mode, contender and kernel, as text."""
        return " ".join(filter(None, (self.mode, self.contender, self.kernel)))

    @property
    def why_no_number(self) -> str:
        """The note, or that there is none."""
        return self.note or "the file does not say why"


@dataclass(frozen=True)
class Pair:
    """Two rows of the same, both with a number.

    Attributes:
        before: The earlier one.
        after: The later one.
        differs: What differs in these two rows; of facts of the documents `Comparison` knows.
        like_for_like: True when neither that nor a fact that matters differs.
    """

    before: Row
    after: Row
    differs: str
    like_for_like: bool

    @property
    def ratio(self) -> float:
        """Time after over time before."""
        return _number(self.after.median_us) / _number(self.before.median_us)

    @property
    def verdict(self) -> str:
        """One of same, faster, slower, wrong.

        It is faster or slower only beyond the noise: the intervals from the 20th to the 80th
        percentile are apart, and the medians differ by more than `NOISE`.
        """
        if self.before.wrong or self.after.wrong:
            return "wrong"
        if abs(self.ratio - 1) <= NOISE:
            return "same"
        if _number(self.after.p20_us) > _number(self.before.p80_us):
            return "slower"
        if _number(self.after.p80_us) < _number(self.before.p20_us):
            return "faster"
        return "same"


@dataclass(frozen=True)
class Comparison:
    """What `compare` found.

    Attributes:
        pairs: Matched rows, both with a number, in the order of the earlier document.
        uncompared: The others, each with the reason; of a matched pair the later one stands here.
        facts: The facts that matter and differ, each as a line.
        versions: The other facts that differ, likewise.
        wrong_before: Rows of the earlier document that have wrong results, matched or not.
        wrong_after: Those of the later one.
        head: Date and command of the two, and the facts that they share.
    """

    pairs: tuple[Pair, ...]
    uncompared: tuple[tuple[Row, str], ...]
    facts: tuple[str, ...]
    versions: tuple[str, ...]
    wrong_before: tuple[Row, ...]
    wrong_after: tuple[Row, ...]
    head: tuple[str, ...]

    @property
    def regressed(self) -> bool:
        """True when a pair that is like for like is slower, or a later result is wrong."""
        slower = any(pair.like_for_like and pair.verdict == "slower" for pair in self.pairs)
        return slower or bool(self.wrong_after)


def load(path: Path) -> dict[str, Any]:
    """Read a result document.

    Raises:
        ArgumentError: It can't be read, is no JSON document, or has no rows of measurements.
    """
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(document, dict):
            raise ArgumentError(f"the document is a {type(document).__name__}, not an object.")
        rows_of(document)
    except (OSError, ValueError, RecursionError) as error:
        raise ArgumentError(
            f"{path} is no result of a benchmark: {str(error).rstrip('.')}. Expected a JSON "
            "document with rows, as python -m benchmarks allreduce --json FILE writes it."
        ) from error
    return document


def rows_of(document: Mapping[str, Any]) -> list[Row]:
    """The rows of a document, old or new.

    Raises:
        ArgumentError: It has none, or one that is no measurement of a collective.
    """
    rows = document.get("rows")
    if not isinstance(rows, list) or not rows:
        raise ArgumentError("the document has no rows.")
    return [_row(number, each) for number, each in enumerate(rows, 1)]


def compare(before: Mapping[str, Any], after: Mapping[str, Any]) -> Comparison:
    """Set two documents side by side.

    Args:
        before: The earlier one, as `load` returns it.
        after: The later one.

    Raises:
        ArgumentError: One of them has no rows of measurements.
    """
    earlier, later = rows_of(before), rows_of(after)
    facts = _differing(before, after, FACTS)
    key = _key_of(earlier, later)
    waiting: dict[tuple[Any, ...], list[Row]] = defaultdict(list)
    for row in later:
        waiting[key(row)].append(row)
    pairs: list[Pair] = []
    uncompared: list[tuple[Row, str]] = []
    for row in earlier:
        matches = waiting[key(row)]
        if not matches:
            uncompared.append((row, _alone(row, "before")))
            continue
        match = matches.pop(0)
        if row.median_us is None or match.median_us is None:
            uncompared.append((match, _without_number(row, match)))
            continue
        differs = "; ".join(_differing(vars(row), vars(match), ("kernel", "blocks")))
        pairs.append(Pair(row, match, differs, like_for_like=not (facts or differs)))
    left = (row for matches in waiting.values() for row in matches)
    uncompared += [(row, _alone(row, "after")) for row in left]
    return Comparison(
        pairs=tuple(pairs),
        uncompared=tuple(uncompared),
        facts=facts,
        versions=_differing(before, after, VERSIONS),
        wrong_before=tuple(row for row in earlier if row.wrong),
        wrong_after=tuple(row for row in later if row.wrong),
        head=_head(before, after),
    )


def render(comparison: Comparison) -> str:
    """The comparison as text: a table of each collective, type and operator, and a summary."""
    lines = [f"# {each}" for each in comparison.head]
    lines += [f"# also differs: {each}" for each in comparison.versions]
    pairs, uncompared = comparison.pairs, comparison.uncompared
    whats = [pair.after.what for pair in pairs] + [row.what for row, _ in uncompared]
    for what in dict.fromkeys(whats):
        of_it = [pair for pair in pairs if pair.after.what == what]
        differing = [(pair.after, pair.differs) for pair in of_it if pair.differs]
        left = [entry for entry in uncompared if entry[0].what == what]
        lines += [f"# {what}", *(_table(of_it) if of_it else [])]
        lines += [f"# * {each}" for each in _grouped(differing)]
        lines += [f"# not compared: {each}" for each in _grouped(left)]
    lines += [f"# * all rows: {each}" for each in comparison.facts]
    for side, rows in (("before", comparison.wrong_before), ("after", comparison.wrong_after)):
        lines += [
            f"# WRONG {side}: {row.wrong} elements, {row.name}, {row.nbytes} bytes, {row.what}"
            for row in rows
        ]
    return "\n".join([*lines, _summary(comparison)])


def _row(number: int, row: Any) -> Row:
    """Check a row, and fill in what old files lack."""
    if not isinstance(row, dict):
        raise ArgumentError(f"row {number} is a {type(row).__name__}, not an object.")

    def take(name: str, kind: type[Any], default: Any = None) -> Any:
        value = row.get(name)
        if value is None and default is not None:
            return default
        if not isinstance(value, kind) or (kind is int and (isinstance(value, bool) or value < 0)):
            raise ArgumentError(f"{name} of row {number} is {value!r}; expected {_KINDS[kind]}.")
        return value

    def time_us(name: str) -> float:
        value: Any = row.get(name)
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if is_number and math.isfinite(value) and (value > 0 or is_difference):
            return float(value)
        raise ArgumentError(f"{name} of row {number} is {value!r}; expected a time above 0.")

    # What was ahead is subtracted, and noise may leave nothing.
    is_difference = row.get("mode") in AHEAD
    median_us = row.get("median_us")
    has_number = median_us is not None
    note = take("note", str, "")
    if is_difference and isinstance(median_us, int | float) and median_us <= 0:
        has_number, note = False, "what was ahead took as long"
    # Who ran another kernel than it says has no right result of its own.
    wrong = max(take("wrong", int, 0), int(note.startswith(OTHER_KERNEL)))
    kernel = take("kernel", str, "")
    return Row(
        # Files that don't name the collective have all-reduces, and barriers.
        collective=take("collective", str, "barrier" if kernel == "barrier" else "allreduce"),
        contender=take("contender", str, "shmemar"),
        mode=take("mode", str),
        nbytes=take("nbytes", int),
        dtype=take("dtype", str),
        op=take("op", str),
        in_place=take("in_place", bool, default=False),
        chained=take("chained", bool, default=False),
        kernel=kernel,
        blocks=None if row.get("blocks") is None else take("blocks", int),
        median_us=time_us("median_us") if has_number else None,
        p20_us=time_us("p20_us") if has_number else None,
        p80_us=time_us("p80_us") if has_number else None,
        wrong=wrong,
        note=note,
    )


_KINDS = {str: "text", int: "a whole number of 0 or more", bool: "true or false"}
_KEY = ("collective", "contender", "mode", "nbytes", "dtype", "op", "in_place", "chained")


def _key_of(earlier: Iterable[Row], later: Iterable[Row]) -> Callable[[Row], tuple[Any, ...]]:
    """The key of a row: with its kernel where a document has several rows of the rest of it."""

    def bare(row: Row) -> tuple[Any, ...]:
        return tuple(getattr(row, name) for name in _KEY)

    counts = Counter(map(bare, earlier)) | Counter(map(bare, later))
    return lambda row: bare(row) if counts[bare(row)] == 1 else (*bare(row), row.kernel)


def _number(value: float | None) -> float:
    assert value is not None, "a pair has numbers"
    return value


def _differing(
    before: Mapping[str, Any], after: Mapping[str, Any], names: Iterable[str]
) -> tuple[str, ...]:
    def said(document: Mapping[str, Any], name: str) -> str:
        value = document.get(name)
        return "not said" if value is None or value == "" else str(value)

    pairs = ((name, said(before, name), said(after, name)) for name in names)
    return tuple(
        f"{name}: {one} before, {other} after" for name, one, other in pairs if one != other
    )


def _alone(row: Row, side: str) -> str:
    without = "" if row.median_us is not None else f", and without a number: {row.why_no_number}"
    return f"only {side}{without}"


def _without_number(before: Row, after: Row) -> str:
    return "; ".join(
        f"no number {side}: {row.why_no_number}"
        for side, row in (("before", before), ("after", after))
        if row.median_us is None
    )


def _head(before: Mapping[str, Any], after: Mapping[str, Any]) -> tuple[str, ...]:
    head = []
    for side, document in (("before", before), ("after", after)):
        said = (document.get(name) for name in ("date", "command", "remark"))
        head.append(f"{side}: {', '.join(str(each) for each in said if each) or 'not said'}")
    shared = [name for name in FACTS if name in before and name in after]
    alike = [f"{name}: {after[name]}" for name in shared if before[name] == after[name]]
    return (*head, "; ".join(alike)) if alike else tuple(head)


def _table(pairs: Sequence[Pair]) -> list[str]:
    cells = [
        ("size", "mode", "contender", "kernel", "before", "after", "after/before", "verdict"),
        ("(B)", "", "", "", "(us)", "(us)", "", ""),
    ]
    cells += [
        (
            str(pair.after.nbytes),
            pair.after.mode,
            pair.after.contender,
            _kernel(pair),
            f"{_number(pair.before.median_us):.2f}",
            f"{_number(pair.after.median_us):.2f}",
            f"{pair.ratio:.3f}",
            pair.verdict + ("" if pair.like_for_like else " *"),
        )
        for pair in pairs
    ]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = []
    for number, line in enumerate(cells):
        *others, verdict = [text.rjust(width) for text, width in zip(line, widths, strict=True)]
        text = "  ".join([*others, verdict.strip()])
        lines.append(f"{'#' if number < 2 else ' '} {text}".rstrip())
    return lines


def _grouped(entries: Iterable[tuple[Row, str]]) -> list[str]:
    """Lines of what is said of rows, those that differ in size only on one line."""
    sizes: dict[tuple[str, str], list[str]] = defaultdict(list)
    for row, text in entries:
        sizes[row.name, text].append(str(row.nbytes))
    return [f"{name}, {', '.join(at)} bytes: {text}" for (name, text), at in sizes.items()]


def _kernel(pair: Pair) -> str:
    before, after = (row.kernel or "-" for row in (pair.before, pair.after))
    return after if before == after else f"{before} -> {after}"


def _summary(comparison: Comparison) -> str:
    verdicts = Counter(pair.verdict for pair in comparison.pairs)
    counts = ", ".join(f"{verdicts[each]} {each}" for each in ("same", "faster", "slower", "wrong"))
    unlike = sum(not pair.like_for_like for pair in comparison.pairs)
    ending = "regressed" if comparison.regressed else "nothing like for like is slower or wrong"
    return (
        f"# {len(comparison.pairs)} compared: {counts}; {unlike} not like for like (*); "
        f"{len(comparison.uncompared)} not compared; {ending}"
    )
