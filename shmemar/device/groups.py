"""Primitives of threads that meet: the 32 lanes of a warp, the threads of a block.

All threads of the group must come. Where a rank's threads run one after another (`share_work` is
False), each meets nobody.
"""

from __future__ import annotations

from typing import Any

from shmemar.device.interpreter import Group, current
from shmemar.device.meetings import meeting

__all__ = [
    "WARP_THREADS",
    "all_in_block",
    "all_in_warp",
    "any_in_block",
    "any_in_warp",
    "from_lane_before",
    "share_work",
]

WARP_THREADS = 32
"""Lanes of a warp."""


def share_work() -> bool:
    """Return whether the threads of a block run at once, so that they may wait for one another."""
    return current().shares_work()


def all_in_warp(value: bool) -> bool:  # noqa: FBT001 - an operand
    """Meet the other threads of the warp; return whether `value` is true for all 32 of them.

    What they did before is visible to all of them afterwards. A thread that has ended counts as
    false.
    """
    return all(current().meet(Group.WARP, value)[1])


def any_in_warp(value: bool) -> bool:  # noqa: FBT001 - an operand
    """Meet the other threads of the warp; return whether `value` is true for one of them."""
    return any(current().meet(Group.WARP, value)[1])


@meeting
def all_in_block(value: bool) -> bool:  # noqa: FBT001 - an operand
    """Meet the other threads of the block; return whether `value` is true for every one."""
    return all(current().meet(Group.BLOCK, value)[1])


@meeting
def any_in_block(value: bool) -> bool:  # noqa: FBT001 - an operand
    """Meet the other threads of the block; return whether `value` is true for one of them."""
    return any(current().meet(Group.BLOCK, value)[1])


def from_lane_before(value: Any, distance: int) -> Any:
    """Return the `value` of the lane that is `distance` before this one in the warp.

    A number, or a tuple of numbers. The first `distance` lanes get their own. Orders no memory.
    """
    place, values = current().meet(Group.WARP, value, orders_memory=False)
    return values[place - distance] if place >= distance else value
