"""Ranks in messages."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

__all__ = ["group_ranks", "list_groups", "name_ranks"]


def name_ranks(ranks: Sequence[int]) -> str:
    """Name ranks: "rank 3" or "ranks 0, 1, 2"."""
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
