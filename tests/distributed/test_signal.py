"""Put and signal at every scope, emulated or on GPUs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import shmemar
from shmemar.device.groups import all_in_block, all_in_warp
from shmemar.device.registry import device
from shmemar.device.signal import (
    SIGNAL_ADD,
    SIGNAL_SET,
    put_signal,
    put_signal_block,
    put_signal_warp,
    signal_op,
    signal_wait,
    signal_wait_block,
    signal_wait_warp,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from shmemar.host.arrays import Arrays

CAPACITY = 5000
"""Bytes that a rank may be sent."""


@device
def acknowledged(ll: Any, acks: Any, left: int, call: int) -> bool:
    """Tell the left neighbour that what it sent was read, and wait for the right one's word."""
    signal_op(ll, acks[left], 1, SIGNAL_ADD)
    return signal_wait(ll, (ll.rank + 1) % ll.size, acks[ll.rank], call)


def by_thread(
    ll: Any, thread: int, nthreads: int, inbox: Any, outbox: Any, signals: Any, acks: Any,
    view: Any, got: Any, offset: int, nbytes: int, call: int,
) -> None:  # fmt: skip
    right, left = (ll.rank + 1) % ll.size, (ll.rank + ll.size - 1) % ll.size
    if thread == 0:
        put_signal(
            ll, inbox[right] + offset, outbox[ll.rank] + offset, nbytes, signals[right], call,
            SIGNAL_SET,
        )  # fmt: skip
        if signal_wait(ll, left, signals[ll.rank], call):
            for i in range(offset, offset + nbytes):
                got[i] = view[i]
            acknowledged(ll, acks, left, call)


def by_warp(
    ll: Any, thread: int, nthreads: int, inbox: Any, outbox: Any, signals: Any, acks: Any,
    view: Any, got: Any, offset: int, nbytes: int, call: int,
) -> None:  # fmt: skip
    right, left = (ll.rank + 1) % ll.size, (ll.rank + ll.size - 1) % ll.size
    if thread < 32:
        put_signal_warp(
            ll, inbox[right] + offset, outbox[ll.rank] + offset, nbytes, signals[right], call,
            SIGNAL_SET,
        )  # fmt: skip
        if signal_wait_warp(ll, left, signals[ll.rank], call):
            for i in range(offset + thread, offset + nbytes, 32):
                got[i] = view[i]
            all_in_warp(True)  # noqa: FBT003
            if thread == 0:
                acknowledged(ll, acks, left, call)


def by_block(
    ll: Any, thread: int, nthreads: int, inbox: Any, outbox: Any, signals: Any, acks: Any,
    view: Any, got: Any, offset: int, nbytes: int, call: int,
) -> None:  # fmt: skip
    """Every block signals by adding one, so all must have come."""
    right, left = (ll.rank + 1) % ll.size, (ll.rank + ll.size - 1) % ll.size
    blocks, block = nthreads // 128, thread // 128
    share = nbytes // blocks // 16 * 16
    start = block * share
    size = nbytes - start if block == blocks - 1 else share
    put_signal_block(
        ll, inbox[right] + offset + start, outbox[ll.rank] + offset + start, size, signals[right],
        1, SIGNAL_ADD,
    )  # fmt: skip
    # Emulated, the blocks of a rank run one after another, so only the last may wait for all.
    is_last = block == blocks - 1
    if is_last and signal_wait_block(ll, left, signals[ll.rank], call * blocks):
        for i in range(offset + thread - block * 128, offset + nbytes, 128):
            got[i] = view[i]
        all_in_block(True)  # noqa: FBT003
        if thread == block * 128:
            acknowledged(ll, acks, left, call)


@pytest.mark.parametrize("kernel", [by_thread, by_warp, by_block], ids=lambda f: f.__name__)
def test_what_was_put_is_there_when_the_signal_is(
    comm: shmemar.Communicator, arrays: Arrays, agree: Any, kernel: Callable[..., None]
) -> None:
    """Round a ring, of every alignment and size class, the same memory again and again."""
    buffer = comm.ll_buffer("int32", threads=256)
    inbox, outbox = (comm.symmetric_array(CAPACITY, "uint8") for _ in range(2))
    signals, acks = (comm.symmetric_array(1, "uint64") for _ in range(2))
    left = (comm.rank - 1) % comm.size
    wrong = []
    cases = [(0, 4096), (0, 1), (4, 400), (1, 37), (16, 4999 - 16), (0, 0), (8, 1000), (0, 17)]
    for call, (offset, nbytes) in enumerate(cases, 1):
        mine = np.random.default_rng((comm.rank, call)).integers(0, 255, CAPACITY, np.uint8)
        theirs = np.random.default_rng((left, call)).integers(0, 255, CAPACITY, np.uint8)
        before = np.full(CAPACITY, 0xA5, np.uint8)
        outbox.array[...] = arrays.make(mine)
        inbox.array[...] = arrays.make(before)
        arrays.synchronize()
        comm.host_barrier()
        got, view = arrays.make(before), inbox.array
        comm.launch(kernel, buffer, inbox, outbox, signals, acks, view, got, offset, nbytes, call)
        before[offset : offset + nbytes] = theirs[offset : offset + nbytes]
        # What the kernel read behind its wait, and what is there in the end.
        found = arrays.host(got), arrays.host(inbox.array)
        wrong.append(sum(int(np.count_nonzero(each != before)) for each in found))
    assert agree(wrong) == [[0] * len(cases)] * comm.size
    assert int(arrays.host(acks.array)[0]) == len(cases)


def test_symmetric_arrays_are_zeros_of_their_shape(
    comm: shmemar.Communicator, arrays: Arrays
) -> None:
    made = comm.symmetric_array((3, 5), "float32")
    assert (made.shape, made.dtype, made.nbytes) == ((3, 5), np.dtype("float32"), 60)
    assert arrays.host(made.array).tolist() == np.zeros((3, 5)).tolist()
    assert len(made.addresses) == comm.size
    made.array[1, 2] = 7
    arrays.synchronize()
    assert arrays.host(made.array)[1].tolist() == [0, 0, 7, 0, 0]
    copied = made.copy_to_host()
    made.array[1, 2] = 8
    assert (copied.dtype, copied[1].tolist()) == (made.dtype, [0, 0, 7, 0, 0])
    assert repr(made).endswith("SymmetricArray (3, 5) float32>")


def test_what_cannot_be_a_symmetric_array_is_refused(
    comm: shmemar.Communicator, world: Any, backend: str
) -> None:
    refused: list[tuple[Any, str, type[Exception], str]] = [
        (3, "string", TypeError, "dtype is 'string', which numpy"),
        (3, "bool", TypeError, "dtype is bool; expected an integer"),
        (3.0, "float32", TypeError, "shape is 3.0; expected an integer or a tuple"),
        ((3, 0), "float32", ValueError, r"shape is \(3, 0\); expected extents of 1"),
    ]
    for shape, dtype, error, message in refused:
        with pytest.raises(error, match=message):
            comm.symmetric_array(shape, dtype)
    if comm.size > 1:
        with pytest.raises(shmemar.MismatchError, match="shape differs between ranks in symmetric"):
            comm.symmetric_array(3 + comm.rank, "float32")
    with shmemar.init(world, backend=backend, scratch_nbytes=1 << 20) as other:
        theirs = other.symmetric_array(3, "int32")
        buffer = comm.ll_buffer("int32", threads=1)
        with pytest.raises(ValueError, match=r"arguments\[0\] is another communicator's symmetric"):
            comm.launch(by_thread, buffer, theirs)
        kept = theirs.array
    with pytest.raises(shmemar.ClosedError, match="of a symmetric array was closed"):
        _ = theirs.array
    if backend == "nvshmem":
        return
    # Not a crash, and not a peer's: the own memory lives as long as the array does.
    assert int(kept[0]) == 0
