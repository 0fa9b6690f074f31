"""Arithmetic on bytes: packets, the control memory, and the grid."""

from __future__ import annotations

import re

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

import shmemar.layout
from shmemar.errors import ConfigurationError
from shmemar.layout import (
    BLOCK_THREADS,
    DEFAULT_SCRATCH_NBYTES,
    FAILURE_DTYPE,
    FLAG_NBYTES,
    LL_BUFFERS,
    MAX_BARRIER_BLOCKS,
    MAX_LAUNCH_PACKETS,
    MAX_PACKETS_PER_THREAD,
    PACKET_NBYTES,
    SENTINEL_BUFFERS,
    WORD_NBYTES,
    BarrierLayout,
    LLLayout,
    barrier_grid,
    failure_offset,
    grid_for,
    packet_count,
    vector_packets,
)
from shmemar.spec import MAX_RANKS

UNIT_SLOTS = BLOCK_THREADS * MAX_PACKETS_PER_THREAD

epochs = st.integers(0, 0xFFFFFFFF)
nranks = st.integers(1, MAX_RANKS)
buffers = st.sampled_from([LL_BUFFERS, SENTINEL_BUFFERS])
layouts = st.builds(LLLayout, nranks, st.integers(1, 40).map(lambda n: n * BLOCK_THREADS), buffers)
small_layouts = st.builds(LLLayout, st.integers(1, 5), st.integers(1, 6), buffers)


@st.composite
def packets(draw: st.DrawFn, layout: LLLayout) -> tuple[int, int, int]:
    source = draw(st.integers(0, layout.nranks - 1))
    return draw(epochs), source, draw(st.integers(0, layout.nslots - 1))


@given(st.data(), layouts)
def test_a_packet_lies_aligned_in_the_region(data: st.DataObject, layout: LLLayout) -> None:
    offset = layout.packet_offset(*data.draw(packets(layout)))
    assert offset % PACKET_NBYTES == 0
    assert 0 <= offset <= layout.nbytes - PACKET_NBYTES


@given(st.data(), st.one_of(layouts, small_layouts))
def test_different_packets_never_overlap(data: st.DataObject, layout: LLLayout) -> None:
    one, other = data.draw(packets(layout)), data.draw(packets(layout))
    turns = layout.nbuffers
    assume((one[0] % turns, *one[1:]) != (other[0] % turns, *other[1:]))
    distance = layout.packet_offset(*one) - layout.packet_offset(*other)
    assert abs(distance) >= PACKET_NBYTES


@given(small_layouts)
def test_packets_fill_the_region(layout: LLLayout) -> None:
    offsets = {
        layout.packet_offset(buffer, source, slot)
        for buffer in range(layout.nbuffers)
        for source in range(layout.nranks)
        for slot in range(layout.nslots)
    }
    assert offsets == set(range(0, layout.nbytes, PACKET_NBYTES))


@given(st.data(), layouts)
def test_a_slot_is_written_again_after_as_many_epochs_as_there_are_buffers(
    data: st.DataObject, layout: LLLayout
) -> None:
    epoch, source, slot = data.draw(packets(layout))
    turns = range(layout.nbuffers + 1)
    first, *between, last = (layout.packet_offset(epoch + i, source, slot) for i in turns)
    assert first == last
    assert first not in between


@given(nranks, st.integers(0, 2 * DEFAULT_SCRATCH_NBYTES))
def test_fit_takes_all_whole_blocks_that_fit(nranks: int, extra_nbytes: int) -> None:
    scratch_nbytes = LLLayout(nranks, UNIT_SLOTS).nbytes + extra_nbytes
    layout = LLLayout.fit(nranks, scratch_nbytes)
    assert layout.nranks == nranks
    assert layout.nslots % UNIT_SLOTS == 0
    assert layout.nbytes <= scratch_nbytes
    assert LLLayout(nranks, layout.nslots + UNIT_SLOTS).nbytes > scratch_nbytes


@pytest.mark.parametrize("nranks", [1, 2, 7, MAX_RANKS])
def test_fit_takes_exactly_one_block_and_refuses_a_byte_less(nranks: int) -> None:
    least = LL_BUFFERS * nranks * UNIT_SLOTS * PACKET_NBYTES
    assert LLLayout.fit(nranks, least).nslots == UNIT_SLOTS
    with pytest.raises(ConfigurationError) as caught:
        LLLayout.fit(nranks, least - 1)
    assert f"scratch_nbytes is {least - 1}" in str(caught.value)
    assert f"at least {least} for {nranks} ranks" in str(caught.value)


@pytest.mark.parametrize("scratch_nbytes", [0, -1])
def test_fit_refuses_no_scratch(scratch_nbytes: int) -> None:
    with pytest.raises(ConfigurationError, match=f"scratch_nbytes is {scratch_nbytes}"):
        LLLayout.fit(2, scratch_nbytes)


def test_the_default_scratch_fits_the_most_ranks() -> None:
    assert LLLayout.fit(MAX_RANKS, DEFAULT_SCRATCH_NBYTES).nslots >= BLOCK_THREADS


@given(layouts)
def test_every_slot_has_an_epoch_word(layout: LLLayout) -> None:
    assert layout.epochs_nbytes == layout.nslots * WORD_NBYTES


@given(
    st.integers(1, 1 << 21),
    layouts,
    st.sampled_from([1, 2]),
    st.sampled_from([1, 2, 8]),
    st.none() | st.integers(1, 50),
)
def test_a_grid_covers_the_message_as_far_as_slots_and_cap_allow(
    ngroups: int, layout: LLLayout, packets_per_thread: int, lanes: int, max_blocks: int | None
) -> None:
    per_block = BLOCK_THREADS // lanes * packets_per_thread
    assume(layout.nslots >= per_block)
    grid = grid_for(
        ngroups, layout, packets_per_thread=packets_per_thread, lanes=lanes, max_blocks=max_blocks
    )
    teams = grid.nthreads // lanes
    slots_used = teams * packets_per_thread
    assert grid.block_threads == BLOCK_THREADS
    assert grid.blocks >= 1
    assert slots_used <= layout.nslots
    assert max_blocks is None or grid.blocks <= max_blocks
    is_full = slots_used + per_block > layout.nslots or grid.blocks == max_blocks
    assert is_full or teams >= ngroups
    assert teams - BLOCK_THREADS // lanes < ngroups, "a block would have nothing to do"


@given(st.integers(0, 1 << 40), st.sampled_from([8, 16]))
def test_packets_carry_every_byte_and_none_is_empty(nbytes: int, payload_nbytes: int) -> None:
    assert 0 <= packet_count(nbytes, payload_nbytes) * payload_nbytes - nbytes < payload_nbytes


@pytest.mark.parametrize(
    ("address", "nbytes", "payload_nbytes", "expected"),
    [
        (0x100, 32, 8, 4),
        (0x100, 36, 8, 4),
        (0x100, 4, 8, 0),
        (0x104, 32, 8, 0),
        (0x108, 8, 8, 1),
        (0x108, 32, 16, 0),
        (0x110, 40, 16, 2),
    ],
)
def test_whole_packets_of_aligned_arrays_move_at_once(
    address: int, nbytes: int, payload_nbytes: int, expected: int
) -> None:
    assert vector_packets(address, nbytes, payload_nbytes) == expected


@given(st.integers(1, 1 << 24), layouts, st.none() | st.integers(1, 50))
def test_equal_arguments_give_equal_grids(
    ngroups: int, layout: LLLayout, max_blocks: int | None
) -> None:
    twin = LLLayout(layout.nranks, layout.nslots, layout.nbuffers)
    grid = grid_for(ngroups, layout, max_blocks=max_blocks)
    assert grid == grid_for(ngroups, twin, max_blocks=max_blocks)


def test_the_least_scratch_has_room_for_a_block_of_every_kernel() -> None:
    layout = LLLayout.fit(3, LLLayout(3, UNIT_SLOTS).nbytes)
    assert grid_for(8, layout, packets_per_thread=MAX_PACKETS_PER_THREAD).blocks == 1


def test_failure_words_lie_side_by_side_and_fill_the_record() -> None:
    offsets = [failure_offset(name) for name in FAILURE_DTYPE.names or ()]
    assert offsets == list(range(0, FAILURE_DTYPE.itemsize, WORD_NBYTES))
    assert len(offsets) > 0


def diagram() -> dict[str, list[str]]:
    """Cut the diagram in the docstring into starts of buffers 0 and 1, and of slots, and B."""
    text = (shmemar.layout.__doc__ or "").partition("::\n")[2]
    first, second, slots = (
        re.search(rf"{head}(.*)", text)
        for head in ("buffer 0", "buffer 1", "16-byte packet a slot:")
    )
    definition = re.search(r"B = (.*)", text)
    assert first
    assert second
    assert slots
    assert definition
    starts = [re.findall(r"\[([^,]+), [^)]*\)(?: |$)", m[1]) for m in (first, second, slots)]
    first_starts, second_starts, slot_starts = starts
    return {
        "buffer 0": first_starts,
        "buffer 1": second_starts,
        "slot": slot_starts,
        "B": [definition[1]],
    }


def value(formula: str, layout: LLLayout) -> int:
    """Evaluate a formula of the diagram, which writes 2P for 2 * P."""
    spelled = re.sub(r"(?<=[\dN)])(?=[PN(])", "*", formula)
    names = {"N": layout.nranks, "P": layout.pitch_nbytes, "B": layout.buffer_nbytes}
    return int(eval(spelled, {}, names))  # noqa: S307


@pytest.mark.parametrize("layout", [LLLayout(2, 128), LLLayout(5, 384)])
def test_the_diagram_agrees_with_packet_offset(layout: LLLayout) -> None:
    def starts(name: str) -> list[int]:
        return [value(formula, layout) for formula in diagram()[name]]

    last = layout.nranks - 1
    assert starts("B") == [layout.buffer_nbytes]
    assert starts("buffer 0") == [layout.packet_offset(0, source, 0) for source in (0, 1, last)]
    assert starts("buffer 1") == [layout.packet_offset(1, 0, 0)]
    assert starts("slot") == [layout.packet_offset(0, 0, slot) for slot in (0, 1)]


@given(st.data(), layouts)
def test_a_packets_offset_is_buffer_then_source_then_slot(
    data: st.DataObject, layout: LLLayout
) -> None:
    epoch, source, slot = data.draw(packets(layout))
    pitch = 16 * layout.nslots
    start = epoch % layout.nbuffers * layout.nranks * pitch
    assert layout.packet_offset(epoch, source, slot) == start + source * pitch + 16 * slot


barrier_layouts = st.builds(
    BarrierLayout,
    nranks,
    st.integers(1, 8),
    st.integers(1, 9),
    st.integers(1, 4).map(lambda rounds: rounds * BLOCK_THREADS),
)
small_barrier_layouts = st.builds(
    BarrierLayout, st.integers(1, 4), st.integers(0, 4), st.integers(1, 4), st.integers(1, 5)
)


@given(small_barrier_layouts)
def test_flags_and_staged_packets_fill_the_region(layout: BarrierLayout) -> None:
    flags = [
        layout.flag_offset(parity, block, source)
        for parity in range(2)
        for block in range(layout.nblocks)
        for source in range(layout.nranks)
    ]
    packets = [
        layout.staging_offset(place, block, slot)
        for place in range(layout.nplaces)
        for block in range(layout.nblocks)
        for slot in range(layout.block_slots)
    ]
    assert flags == list(range(0, layout.flags_nbytes, FLAG_NBYTES))
    assert packets == list(range(layout.flags_nbytes, layout.nbytes, PACKET_NBYTES))
    assert layout.flags_nbytes % PACKET_NBYTES == 0


@given(st.data(), barrier_layouts, epochs)
def test_flags_of_one_parity_share_a_place_and_those_of_the_next_epoch_do_not(
    data: st.DataObject, layout: BarrierLayout, epoch: int
) -> None:
    block = data.draw(st.integers(0, layout.nblocks - 1))
    source = data.draw(st.integers(0, layout.nranks - 1))
    here, next_one, again = (layout.flag_offset(epoch + i, block, source) for i in range(3))
    assert here == again != next_one
    assert abs(next_one - here) == layout.flags_nbytes // 2


@given(nranks, st.integers(1, 2 * MAX_RANKS), st.integers(0, 1 << 24))
def test_fit_takes_as_many_blocks_as_there_may_be_and_then_whole_rounds(
    nranks: int, nplaces: int, extra_nbytes: int
) -> None:
    scratch_nbytes = BarrierLayout(nranks, nplaces, 1, BLOCK_THREADS).nbytes + extra_nbytes
    layout = BarrierLayout.fit(nranks, nplaces, scratch_nbytes)
    more_blocks, more_slots = (
        BarrierLayout(nranks, nplaces, *shape)
        for shape in (
            (layout.nblocks + 1, BLOCK_THREADS),
            (layout.nblocks, layout.block_slots + BLOCK_THREADS),
        )
    )
    assert layout.nbytes <= scratch_nbytes < more_slots.nbytes
    assert layout.nblocks == MAX_BARRIER_BLOCKS or more_blocks.nbytes > scratch_nbytes
    assert layout.block_slots % layout.block_threads == 0


def test_fit_refuses_less_than_a_block_with_barriers() -> None:
    least = BarrierLayout(4, 5, 1, BLOCK_THREADS).nbytes
    assert BarrierLayout.fit(4, 5, least).nblocks == 1
    with pytest.raises(ConfigurationError, match=f"is {least - 1}; expected at least {least} for"):
        BarrierLayout.fit(4, 5, least - 1)


def test_a_barrier_alone_takes_flags_alone() -> None:
    layout = BarrierLayout.fit(8, 0, 1)
    assert layout.nbytes == layout.flags_nbytes == 2 * 8 * FLAG_NBYTES
    assert layout.epochs_nbytes == WORD_NBYTES


def test_packets_of_the_largest_scratch_are_counted_in_32_bits() -> None:
    assert BarrierLayout.fit(1, 2, 1 << 40).nslots <= MAX_LAUNCH_PACKETS


@given(st.integers(1, 1 << 24), barrier_layouts, st.none() | st.integers(1, 50))
def test_a_grid_with_barriers_has_no_idle_block_and_keeps_its_caps(
    ngroups: int, layout: BarrierLayout, max_blocks: int | None
) -> None:
    grid = barrier_grid(ngroups, layout, max_blocks=max_blocks)
    assert 1 <= grid.blocks <= layout.nblocks
    assert max_blocks is None or grid.blocks <= max_blocks
    assert (grid.blocks - 1) * layout.block_threads < ngroups, "a block would have nothing to do"
    is_full = grid.blocks in (layout.nblocks, max_blocks)
    assert is_full or grid.nthreads >= ngroups


@pytest.mark.parametrize("layout", [BarrierLayout(2, 3, 4, 256), BarrierLayout(5, 2, 7, 128)])
def test_the_diagram_of_a_barrier_layout_agrees_with_it(layout: BarrierLayout) -> None:
    text = (BarrierLayout.__doc__ or "").partition("::\n")[2]
    names = {
        "N": layout.nranks,
        "B": layout.nblocks,
        "F": layout.flags_nbytes,
        "P": layout.pitch_nbytes,
        "C": layout.block_slots,
    }

    def starts(row: str) -> list[int]:
        (line,) = re.findall(rf"^ +{row} +(\[.*)$", text, re.MULTILINE)
        formulas = re.findall(r"\[([^,]+), [^)]*\)", line)
        spelled = [re.sub(r"(?<=[\dBNP])(?=[BNP(])", "*", formula) for formula in formulas]
        return [int(eval(formula, {}, names)) for formula in spelled]  # noqa: S307

    assert starts("even epochs") == [
        layout.flag_offset(2, 0, 0),
        layout.flag_offset(2, 0, 1),
        layout.flag_offset(2, 1, 0),
    ]
    assert starts("odd epochs") == [layout.flag_offset(1, 0, 0)]
    assert starts("staging") == [layout.staging_offset(place, 0, 0) for place in (0, 1)]
    first = layout.staging_offset(0, 0, 0)
    assert starts("a place") == [layout.staging_offset(0, 0, slot) - first for slot in (0, 1)]
    assert layout.staging_offset(0, 2, 0) - first == 2 * layout.block_slots * PACKET_NBYTES
