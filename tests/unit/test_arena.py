"""Division of the symmetric heap."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shmemar.errors import BackendUnavailableError
from shmemar.host.arena import ALIGNMENT, Arena


@given(st.lists(st.tuples(st.integers(1, 5000), st.booleans()), max_size=40))
def test_parts_are_aligned_disjoint_and_inside(steps: list[tuple[int, bool]]) -> None:
    arena = Arena(base=1 << 30, nbytes=1 << 20)
    live: dict[int, int] = {}
    for nbytes, frees in steps:
        if frees and live:
            offset = next(iter(live))
            arena.free(offset)
            del live[offset]
        live[arena.allocate(nbytes)] = nbytes
        spans = sorted((offset, offset + size) for offset, size in live.items())
        assert all(end <= start for (_, end), (start, _) in pairwise(spans))
        assert all(offset % ALIGNMENT == 0 for offset in live)
        assert spans[-1][1] <= arena.nbytes
    assert arena.nbytes_used >= sum(live.values())


def test_what_was_freed_is_used_again() -> None:
    arena = Arena(base=0, nbytes=4 * ALIGNMENT)
    first, second = arena.allocate(ALIGNMENT), arena.allocate(2 * ALIGNMENT)
    arena.free(first)
    assert arena.allocate(ALIGNMENT) == first
    arena.free(second)
    assert arena.allocate(3 * ALIGNMENT) == second


def test_no_room_is_an_error_with_sizes_and_the_variable() -> None:
    arena = Arena(base=0, nbytes=4 * ALIGNMENT)
    arena.allocate(3 * ALIGNMENT)
    with pytest.raises(
        BackendUnavailableError, match=r"1024 bytes .* of 2048 bytes 1536 are in use.*HEAP_NBYTES"
    ):
        arena.allocate(2 * ALIGNMENT)
