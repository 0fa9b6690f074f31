"""float32 values at which rounding to 16 bits is at its worst."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray


def beside_halfway(narrow: np.dtype[Any]) -> NDArray[np.float32]:
    """Every number of a 16-bit type, every midpoint of neighbours, and what is beside those.

    The last midpoint is where rounding to infinity begins. The length is a multiple of 4.
    """
    numbers = np.arange(1 << 16, dtype=np.uint16).view(narrow).astype(np.float32)
    finite = np.unique(numbers[np.isfinite(numbers)])
    middles = finite[1:] / 2 + finite[:-1] / 2
    last = finite[-1] + (finite[-1] - finite[-2]) / 2
    middles = np.concatenate([middles, [last, -last]]).astype(np.float32)
    limits = np.finfo(np.float32)
    others = [-0.0, np.inf, -np.inf, limits.max, limits.min, limits.smallest_subnormal]
    with np.errstate(all="ignore"):
        beside = [np.nextafter(middles, np.float32(way)) for way in (-np.inf, np.inf)]
    values = np.concatenate([finite, middles, *beside, np.array(others, np.float32)])
    return np.concatenate([values, np.zeros(-len(values) % 4, np.float32)])
