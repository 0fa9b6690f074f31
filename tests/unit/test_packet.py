"""LL packets and the run of epochs."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from shmemar.device.interpreter import Order, running
from shmemar.device.packet import LAST_EPOCH, next_epoch, st_packet
from tests.unit.machines import RefusingMachine

epochs = st.integers(1, LAST_EPOCH)


@pytest.mark.parametrize(
    ("epoch", "following"),
    [(0, 1), (1, 2), (0x7FFFFFFF, 0x80000000), (0xFFFFFFFD, 0xFFFFFFFE), (0xFFFFFFFE, 1)],
)
def test_epochs_count_up_and_start_over_at_one(epoch: int, following: int) -> None:
    assert next_epoch(epoch) == following


@given(epochs)
@example(LAST_EPOCH)
def test_halves_alternate_also_at_the_wrap(epoch: int) -> None:
    assert next_epoch(epoch) & 1 != epoch & 1


@given(epochs)
@example(LAST_EPOCH)
def test_an_epoch_is_never_what_fresh_memory_holds(epoch: int) -> None:
    assert 1 <= next_epoch(epoch) <= LAST_EPOCH


class _Recorder(RefusingMachine):
    """A machine that takes stores and nothing else."""

    def __init__(self) -> None:
        self.stores: list[tuple[int, tuple[int, ...], Order]] = []

    def store(self, address: int, words: tuple[int, ...], order: Order) -> None:
        self.stores.append((address, words, order))


def test_a_packet_is_one_store_with_a_flag_in_each_8_bytes() -> None:
    machine = _Recorder()
    with running(machine):
        st_packet(0x40, 10, 11, 7)
    assert machine.stores == [(0x40, (10, 7, 11, 7), Order.RELAXED_SYS)]
