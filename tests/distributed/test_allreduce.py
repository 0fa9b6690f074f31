"""All-reduce on every rank: values, shapes and sequences."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import shmemar
import shmemar.host.kernel_set
from shmemar.dtypes import DTYPES, ReduceOp
from tests.distributed.checked import Checked, random_floats

if TYPE_CHECKING:
    from shmemar.host.arrays import Arrays


OF_EACH_WIDTH = [
    ("float32", ReduceOp.SUM),
    ("int64", ReduceOp.MAX),
    ("complex128", ReduceOp.PROD),
]


@pytest.mark.parametrize("exponent", [*range(13), 16])
def test_counts_beside_powers_of_two_are_exact(
    comm: shmemar.Communicator, arrays: Arrays, agree: Any, exponent: int
) -> None:
    reduce = Checked(comm, arrays)
    for count in (2**exponent - 1, 2**exponent, 2**exponent + 1):
        reduce("float32", ReduceOp.SUM, count)
        reduce("float32", ReduceOp.SUM, count, offset=1, in_place=True)
    assert agree(reduce.wrong) == [[]] * comm.size


@pytest.mark.parametrize(("name", "op"), OF_EACH_WIDTH)
@pytest.mark.parametrize("npasses", [1, 2, 3, 10])
def test_either_side_of_a_pass_boundary_is_exact(
    small: shmemar.Communicator, arrays: Arrays, agree: Any, name: str, op: ReduceOp, npasses: int
) -> None:
    reduce = Checked(small, arrays)
    boundary = npasses * 256 * 8 // DTYPES[name].itemsize
    for count in (boundary - 1, boundary, boundary + 1):
        reduce(name, op, count)
        reduce(name, op, count, in_place=True)
    assert agree(reduce.wrong) == [[]] * small.size


@pytest.mark.parametrize(("name", "op"), OF_EACH_WIDTH)
def test_a_message_longer_than_a_launch_takes_goes_in_several(
    comm: shmemar.Communicator,
    arrays: Arrays,
    agree: Any,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    op: ReduceOp,
) -> None:
    packets = 64
    monkeypatch.setattr(shmemar.host.kernel_set, "MAX_LAUNCH_PACKETS", packets)
    longest = packets * 8 // DTYPES[name].itemsize
    reduce = Checked(comm, arrays)
    for count in (longest - 1, longest, longest + 1, 3 * longest + 2):
        reduce(name, op, count)
        reduce(name, op, count, offset=1, in_place=True)
    assert agree(reduce.wrong) == [[]] * comm.size


def test_a_message_larger_than_the_default_scratch_is_exact(
    comm: shmemar.Communicator, arrays: Arrays, agree: Any
) -> None:
    reduce = Checked(comm, arrays)
    per_pass = (4 << 20) // (2 * comm.size * 16) * 2
    for count in (per_pass + 1, 2 * per_pass + 3):
        reduce("float32", ReduceOp.SUM, count)
    assert agree(reduce.wrong) == [[]] * comm.size


def test_a_random_sequence_of_calls_is_exact(
    comm: shmemar.Communicator,
    small: shmemar.Communicator,
    arrays: Arrays,
    agree: Any,
    request: Any,
) -> None:
    draw = np.random.default_rng(2026)  # the same on every rank
    local = np.random.default_rng(comm.rank)
    reduces = [Checked(comm, arrays), Checked(small, arrays)]
    ncalls = request.config.getoption("--random-calls")
    for _ in range(ncalls):
        which = int(draw.integers(8) == 0)
        name, op = OF_EACH_WIDTH[draw.integers(len(OF_EACH_WIDTH))]
        count = int(2 ** draw.uniform(0, 11))
        reduces[which](
            name, op, count, offset=int(local.integers(3)), in_place=bool(local.integers(2))
        )
    done = sum(reduce.call for reduce in reduces)
    assert agree((done, [reduce.wrong for reduce in reduces])) == [(ncalls, [[], []])] * comm.size


@pytest.mark.parametrize(("name", "op"), [("float32", ReduceOp.SUM), ("complex128", ReduceOp.PROD)])
def test_ranks_and_runs_agree_bit_for_bit(
    comm: shmemar.Communicator, arrays: Arrays, agree: Any, name: str, op: ReduceOp
) -> None:
    x = random_floats(name, 1000, comm.rank)
    bits = {arrays.reduce(comm, x, op=op).tobytes() for _ in range(20)}
    assert len(bits) == 1
    everyone = agree(next(iter(bits)))
    assert len(set(everyone)) == 1


@pytest.mark.parametrize("name", ["float32", "float64"])
def test_sums_are_taken_in_rank_order(
    comm: shmemar.Communicator, arrays: Arrays, agree: Any, name: str
) -> None:
    expected = random_floats(name, 1000, 0)
    for rank in range(1, comm.size):
        expected = expected + random_floats(name, 1000, rank)
    got = arrays.reduce(comm, random_floats(name, 1000, comm.rank))
    assert agree(got.tobytes() == expected.tobytes()) == [True] * comm.size


def test_an_elements_bits_do_not_depend_on_the_size_of_the_message(
    comm: shmemar.Communicator, arrays: Arrays, agree: Any
) -> None:
    x = random_floats("float32", 5000, comm.rank)
    whole = arrays.reduce(comm, x)
    same = [
        arrays.reduce(comm, x[:n].copy()).tobytes() == whole[:n].tobytes()
        for n in (1, 7, 300, 4999)
    ]
    assert agree(same) == [[True] * 4] * comm.size


@pytest.mark.parametrize("name", ["float32", "float64"])
def test_special_values_pass_through(
    comm: shmemar.Communicator, arrays: Arrays, agree: Any, name: str
) -> None:
    tiny = np.finfo(name).smallest_subnormal
    x = np.array([-0.0, tiny, np.inf, -np.inf, np.nan, 1.0], name)
    with np.errstate(invalid="ignore"):
        expected = x * comm.size
    got = arrays.reduce(comm, x)
    right = np.array_equal(got, expected, equal_nan=True) and bool(np.signbit(got[0]))
    clean = bool((arrays.reduce(comm, np.ones(6, name)) == comm.size).all())
    assert agree((right, clean)) == [(True, True)] * comm.size


@pytest.mark.parametrize("special", [np.nan, np.inf])
@pytest.mark.parametrize("name", ["float32", "float64"])
def test_opposite_infinities_and_one_ranks_nan_give_nan(
    comm: shmemar.Communicator, arrays: Arrays, agree: Any, name: str, special: float
) -> None:
    x = np.zeros(5, name)
    last = comm.rank == comm.size - 1
    x[2] = special if last else -np.inf
    got = arrays.reduce(comm, x)
    alone = comm.size == 1 and special == np.inf
    right = bool(np.isposinf(got[2]) if alone else np.isnan(got[2]))
    assert agree((right, got[[0, 1, 3, 4]].any())) == [(True, False)] * comm.size


@pytest.mark.parametrize("name", ["float32"])
@pytest.mark.parametrize(("op", "sign"), [("min", True), ("max", False)])
def test_min_and_max_propagate_nan_and_order_zeros(
    comm: shmemar.Communicator, arrays: Arrays, agree: Any, name: str, op: str, sign: bool
) -> None:
    odd = comm.rank % 2 == 1
    x = np.array([-0.0 if odd else 0.0, 0.0 if odd else -0.0, np.nan if odd else 1.0], name)
    got = arrays.reduce(comm, x, op=op)
    expected = [False, True, False] if comm.size == 1 else [sign, sign, True]
    seen = [bool(np.signbit(got[0])), bool(np.signbit(got[1])), bool(np.isnan(got[2]))]
    assert agree(seen) == [expected] * comm.size


@pytest.mark.parametrize("name", ["int32"])
def test_integers_wrap(comm: shmemar.Communicator, arrays: Arrays, agree: Any, name: str) -> None:
    x = np.array([np.iinfo(name).max, np.iinfo(name).min], name)
    with np.errstate(over="ignore"):
        expected = np.add.reduce(np.tile(x, (comm.size, 1)), axis=0, dtype=name)
    assert agree((arrays.reduce(comm, x) == expected).all()) == [True] * comm.size


def test_shape_is_kept_and_out_is_returned(comm: shmemar.Communicator, arrays: Arrays) -> None:
    x = arrays.make(np.ones((2, 3, 4)))
    out = arrays.make(np.zeros((2, 3, 4)))
    assert comm.allreduce(x, out=out) is out
    fresh = comm.allreduce(x)
    assert type(fresh) is type(x)
    assert arrays.host(fresh).shape == (2, 3, 4)
    assert (arrays.host(out) == comm.size).all()
    assert (arrays.host(fresh) == comm.size).all()
    assert (arrays.host(x) == 1).all()


def test_a_scalar_array_reduces(comm: shmemar.Communicator, arrays: Arrays) -> None:
    got = arrays.reduce(comm, np.array(3.0))
    assert got.shape == ()
    assert got == 3.0 * comm.size


def test_a_call_without_elements_is_a_no_op(
    comm: shmemar.Communicator, arrays: Arrays, agree: Any
) -> None:
    before = arrays.reduce(comm, np.ones(1, np.float32))
    empty = arrays.reduce(comm, np.empty((0, 3), np.float32))
    after = arrays.reduce(comm, np.ones(1, np.float32))
    verdict = (empty.shape, float(before[0]), float(after[0]))
    assert agree(verdict) == [((0, 3), comm.size, comm.size)] * comm.size


def test_a_late_rank_is_waited_for(comm: shmemar.Communicator, arrays: Arrays, agree: Any) -> None:
    reduce = Checked(comm, arrays)
    for late in range(comm.size):
        if comm.rank == late:
            time.sleep(0.1)
        reduce("float32", ReduceOp.SUM, 1000)
    assert agree(reduce.wrong) == [[]] * comm.size


def test_communicators_of_halves_and_of_all_are_used_in_turn(
    world: Any, comm: shmemar.Communicator, arrays: Arrays, agree: Any
) -> None:
    colour = world.rank % 2
    half = world.Split(colour, world.rank)
    with shmemar.init(half, backend=comm.backend) as part:
        whole, halves = Checked(comm, arrays), Checked(part, arrays)
        for count in range(1, 60):
            for _ in range(1 + colour):  # the halves make different numbers of calls
                halves("float32", ReduceOp.SUM, count * (1 + colour))
            whole("float64", ReduceOp.SUM, count)
    half.Free()
    assert agree(whole.wrong + halves.wrong) == [[]] * comm.size
