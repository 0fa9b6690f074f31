"""Ranks in arguments and messages."""

from __future__ import annotations

from collections import defaultdict
from operator import index
from typing import TYPE_CHECKING, Any

from shmemar.errors import ArgumentError, ArgumentTypeError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

__all__ = ["as_rank", "group_ranks", "list_groups", "name_ranks"]


def as_rank(name: str, rank: Any, size: int) -> int:
    """Check the number of a rank that a caller gave.

    Raises:
        ArgumentTypeError: No integer.
        ArgumentError: Not a rank.
    """
    try:
        number = index(rank)
    except TypeError:
        raise ArgumentTypeError(
            f"{name} is {rank!r}; expected the number of a rank, an integer."
        ) from None
    if not 0 <= number < size:
        raise ArgumentError(f"{name} is {number}; expected a rank, 0 to {size - 1}.")
    return number


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
