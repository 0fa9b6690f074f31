"""Broadcast on every rank: every root, every width, and between all-reduces."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import shmemar
from shmemar.device.packet import SENTINEL
from shmemar.dtypes import ReduceOp
from tests.distributed.checked import Checked

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from shmemar.host.arrays import Arrays

NAMES = ["uint8", "float16", "float32", "complex128"]


def random_bits(name: str, count: int, rank: int, call: int) -> NDArray[Any]:
    draw = np.random.default_rng((rank, call))
    return np.frombuffer(draw.bytes(count * np.dtype(name).itemsize), name).copy()


def wrong_bytes(
    comm: shmemar.Communicator,
    arrays: Arrays,
    name: str,
    count: int,
    *,
    root: int,
    call: int,
    offset: int = 0,
) -> int:
    """Broadcast bits of which the type knows nothing; count what differs, also around them."""
    values = random_bits(name, count + offset + 1, comm.rank, call)
    expected = values.copy()
    sent = random_bits(name, count + 1 + (call + root) % 3, root, call)[(call + root) % 3 :]
    expected[offset : offset + count] = sent[:count]
    values[offset : offset + count] = sent[:count] if comm.rank == root else 0
    whole = arrays.make(values)
    x = whole[offset : offset + count]
    assert comm.broadcast(x, root=root) is x
    got = arrays.host(whole)
    return int(np.count_nonzero(got.view(np.uint8) != expected.view(np.uint8)))


@pytest.mark.parametrize("name", NAMES)
def test_every_root_and_width_arrives_bit_by_bit(
    comm: shmemar.Communicator, arrays: Arrays, agree: Any, name: str
) -> None:
    wrong = [
        wrong_bytes(
            comm,
            arrays,
            name,
            count,
            root=root,
            call=count,
            offset=(count + comm.rank) % 3,
        )
        for root in range(comm.size)
        for count in (0, 1, 2, 3, 7, 8, 63, 64, 65, 1000)
    ]
    assert agree(sum(wrong)) == [0] * comm.size


def test_a_broadcast_takes_many_passes(
    small: shmemar.Communicator, arrays: Arrays, agree: Any
) -> None:
    wrong = [
        wrong_bytes(small, arrays, "int64", count, root=count % small.size, call=count)
        for count in (255, 256, 257, 512, 1791, 1793)
    ]
    assert agree(sum(wrong)) == [0] * small.size


def test_broadcasts_and_reductions_take_turns_on_the_same_slots(
    comm: shmemar.Communicator, arrays: Arrays, agree: Any
) -> None:
    reduce, wrong = Checked(comm, arrays), 0
    draw = np.random.default_rng(5)  # the same on every rank
    for call in range(200):
        count, root = int(2 ** draw.uniform(0, 11)), int(draw.integers(comm.size))
        if draw.integers(2):
            wrong += wrong_bytes(comm, arrays, "float32", count, root=root, call=call)
        else:
            reduce("float32", ReduceOp.SUM, count)
    assert agree((wrong, reduce.wrong)) == [(0, [])] * comm.size


def test_every_bit_pattern_arrives(comm: shmemar.Communicator, arrays: Arrays, agree: Any) -> None:
    x = arrays.make(np.full(9, SENTINEL if comm.rank == 0 else 0, np.uint32).view(np.float32))
    comm.broadcast(x)
    assert agree((arrays.host(x).view(np.uint32) == SENTINEL).all()) == [True] * comm.size


def test_the_shape_is_kept(comm: shmemar.Communicator, arrays: Arrays, agree: Any) -> None:
    x = arrays.make(np.full((2, 3, 4), float(comm.rank)))
    comm.broadcast(x, root=comm.size - 1)
    got = arrays.host(x)
    assert agree((got.shape, float(got.min()))) == [((2, 3, 4), comm.size - 1.0)] * comm.size


@pytest.mark.parametrize(
    ("root", "kind", "message"),
    [
        (-1, shmemar.ArgumentError, "root is -1; expected a rank, 0 to"),
        (64, shmemar.ArgumentError, "root is 64; expected a rank, 0 to"),
        (1.0, shmemar.ArgumentTypeError, r"root is 1\.0; expected the number of a rank"),
        (None, shmemar.ArgumentTypeError, "root is None"),
    ],
)
def test_what_is_no_rank_is_refused(
    comm: shmemar.Communicator,
    arrays: Arrays,
    agree: Any,
    root: Any,
    kind: type[Exception],
    message: str,
) -> None:
    x = arrays.make(np.ones(4, np.float32))
    with pytest.raises(kind, match=message):
        comm.broadcast(x, root=root)
    comm.broadcast(x)
    assert agree(bool((arrays.host(x) == 1).all())) == [True] * comm.size


def test_a_read_only_array_is_refused_on_every_rank(
    comm: shmemar.Communicator, arrays: Arrays
) -> None:
    if arrays.library != "numpy":
        pytest.skip("arrays on GPUs are not read-only")
    x = np.ones(4)
    x.flags.writeable = False
    with pytest.raises(shmemar.ArgumentError, match="x is read-only"):
        comm.broadcast(x)


@pytest.mark.parametrize("field", ["root", "count"])
def test_ranks_that_differ_are_named_under_check(
    world: Any, backend: str, arrays: Arrays, monkeypatch: pytest.MonkeyPatch, field: str
) -> None:
    if world.size == 1:
        pytest.skip("one rank differs from nobody")
    monkeypatch.setenv("SHMEMAR_CHECK", "1")
    odd = world.rank == world.size - 1
    with shmemar.init(world, backend=backend) as comm:
        x = arrays.make(np.ones(5 if odd and field == "count" else 4))
        root = 1 if odd and field == "root" else 0
        with pytest.raises(shmemar.MismatchError, match=f"{field} differs between ranks in broad"):
            comm.broadcast(x, root=root)
