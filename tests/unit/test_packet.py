"""Packets with flags and with a sentinel, and the run of epochs."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from shmemar.device import packet_buffer
from shmemar.device.interpreter import Order, Scope, running
from shmemar.device.packet import LAST_EPOCH, SENTINEL, TWIN, next_epoch
from shmemar.device.packet_buffer import PacketBuffer
from shmemar.device.watchdog import Watchdog
from tests.unit.machines import RefusingMachine

epochs = st.integers(1, LAST_EPOCH)


@pytest.mark.parametrize(
    ("epoch", "following"),
    [(0, 1), (1, 2), (0x7FFFFFFF, 0x80000000), (0xFFFFFFFD, 0xFFFFFFFE), (0xFFFFFFFE, 3)],
)
def test_epochs_count_up_and_start_over_at_three(epoch: int, following: int) -> None:
    assert next_epoch(epoch) == following


@given(epochs)
@example(LAST_EPOCH)
@example(0)
def test_two_and_three_buffers_take_turns_also_at_the_wrap(epoch: int) -> None:
    assert next_epoch(epoch) % 2 == (epoch + 1) % 2
    assert next_epoch(epoch) % 3 == (epoch + 1) % 3


@given(epochs)
@example(LAST_EPOCH)
def test_an_epoch_is_never_what_fresh_memory_holds(epoch: int) -> None:
    assert 1 <= next_epoch(epoch) <= LAST_EPOCH


class _Slots(RefusingMachine):
    """Takes stores, and gives back what was stored."""

    def __init__(self) -> None:
        self.stores: dict[int, tuple[int, ...]] = {}
        self.nfences = 0

    def store(self, address: int, words: tuple[int, ...], order: Order) -> None:
        assert order is Order.RELAXED_SYS
        self.stores[address] = words

    def load(self, address: int, nwords: int, order: Order) -> tuple[int, ...]:
        assert order is Order.RELAXED_SYS
        return self.stores.get(address, (SENTINEL,) * nwords)[:nwords]

    def fence(self, scope: Scope) -> None:
        self.nfences += 1


def buffer_of(machine_word_nbytes: int, rank: int = 0) -> PacketBuffer:
    watchdog = Watchdog(0, 0, 0, 0, rank, 0, 1)
    return PacketBuffer((0x1000, 0x2000), rank, 0x100, 0x200, machine_word_nbytes, 7, watchdog)


def test_an_ll_packet_is_one_store_with_a_flag_in_each_8_bytes() -> None:
    machine = _Slots()
    with running(machine):
        buffer_of(0).send_packet(1, 2, [9, 10, 11], 1)
    # Epoch 7 lies in buffer 1; the source is rank 0.
    assert machine.stores == {0x2000 + 0x200 + 2 * 16: (10, 7, 11, 7)}


@pytest.mark.parametrize("machine_word_nbytes", [4, 8])
def test_a_sentinel_packet_is_one_store_of_data(machine_word_nbytes: int) -> None:
    machine = _Slots()
    with running(machine):
        buffer_of(machine_word_nbytes).send_packet(1, 2, [9, 10, 11, 12, 13], 1)
    assert machine.stores == {0x2000 + 0x200 + 2 * 16: (10, 11, 12, 13)}


S, T = SENTINEL, TWIN


@pytest.mark.parametrize(
    ("machine_word_nbytes", "words", "encoded"),
    [
        (0, [S, S, S, S], [S, S, S, S]),
        (4, [S, 1, 2, S], [T, 1, 2, T]),
        (4, [S, S, S, S], [T, T, T, T]),
        (4, [T, 0, S ^ 2, 3], [T, 0, S ^ 2, 3]),
        (8, [S, 1, 2, S], [S, 1, 2, S]),
        (8, [1, S, S, 2], [1, S, S, 2]),
        (8, [S, S, S, S], [T, S, T, S]),
    ],
)
def test_the_twin_takes_the_place_of_every_machine_word_that_is_the_sentinel(
    machine_word_nbytes: int, words: list[int], encoded: list[int]
) -> None:
    framed = [S, *words, S]
    buffer_of(machine_word_nbytes).encode(framed, 1)
    assert framed == [S, *encoded, S]


@pytest.mark.parametrize("pattern", [SENTINEL, TWIN])
def test_sentinel_and_twin_are_nans_of_every_floating_type(pattern: int) -> None:
    words = np.array([pattern, SENTINEL], np.uint32)
    assert np.isnan(words.view(np.float32)).all()
    assert np.isnan(words.view(np.float64)).all()
    assert np.isnan(words.view(np.float16)).all()
    as_bfloat16 = words.view(np.uint16).astype(np.uint32) << 16
    assert np.isnan(as_bfloat16.view(np.float32)).all()


@pytest.mark.parametrize(
    ("machine_word_nbytes", "packet", "arrives"),
    [
        (0, (1, 7, 2, 7), True),
        (0, (1, 7, 2, 6), False),
        (0, (1, 5, 2, 7), False),
        (4, (1, 2, 3, 4), True),
        *((4, tuple(S if i == j else 1 for i in range(4)), False) for j in range(4)),
        (8, (S, 1, 1, S), True),
        (8, (S, S, 1, 1), False),
        (8, (1, 1, S, S), False),
    ],
)
def test_a_packet_has_arrived_when_all_of_it_has(
    machine_word_nbytes: int, packet: tuple[int, ...], arrives: bool
) -> None:
    ll = buffer_of(machine_word_nbytes)
    assert packet_buffer._arrived(ll, list(packet), 0) == arrives


def test_a_slot_that_was_reset_is_empty_again() -> None:
    sender, receiver = buffer_of(4, rank=1), buffer_of(4, rank=0)
    machine = _Slots()
    with running(machine):
        sender.bcast_packet(2, [1, 2, 3, 4], 0)
        packets = [0] * 8
        assert receiver.recv_packets(2, packets, 0, 4, 0, 2)
        assert packets[4:] == [1, 2, 3, 4]
        receiver.reset(2, 0, 2)
    assert list(machine.stores.values()) == [(SENTINEL,) * 4]


@pytest.mark.parametrize(("machine_word_nbytes", "nfences"), [(0, 0), (4, 1), (8, 1)])
def test_only_resets_need_a_fence(machine_word_nbytes: int, nfences: int) -> None:
    machine = _Slots()
    with running(machine):
        buffer_of(machine_word_nbytes).fence_resets()
        if machine_word_nbytes == 0:
            buffer_of(machine_word_nbytes).reset(2, 0, 2)
    assert (machine.nfences, machine.stores) == (nfences, {})
