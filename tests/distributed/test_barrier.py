"""The barrier of all ranks: nobody leaves before all have come, and what was written is there."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import shmemar
from shmemar.device.signal import put
from shmemar.dtypes import ReduceOp
from shmemar.host.communicator import Communicator
from tests.distributed.checked import Checked

if TYPE_CHECKING:
    from mpi4py import MPI

    from shmemar.host.arrays import Arrays

LATE_S = 0.05


def came_and_left(comm: shmemar.Communicator, late: int) -> tuple[int, int]:
    """When this rank came to a barrier and left it, by the clock of the host; one comes late."""
    if comm.rank == late:
        time.sleep(LATE_S)
    came_ns = time.monotonic_ns()
    comm.barrier()
    with comm._runtime.active():
        comm._runtime.synchronize()
    return came_ns, time.monotonic_ns()


@pytest.fixture
def met(comm: shmemar.Communicator) -> shmemar.Communicator:
    """A communicator whose barrier is compiled."""
    comm.barrier()
    return comm


def test_nobody_leaves_before_all_have_come(met: shmemar.Communicator, agree: Any) -> None:
    for late in range(met.size):
        times = agree(came_and_left(met, late))
        assert min(left for _, left in times) >= max(came for came, _ in times)


def test_ranks_that_do_not_meet_leave_before(
    met: shmemar.Communicator, agree: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    if met.size == 1:
        pytest.skip("one rank meets nobody")
    monkeypatch.setattr(Communicator, "barrier", lambda _: None)
    found = []
    for _ in range(5):  # a host may be so busy that all are late
        met.host_barrier()
        times = agree(came_and_left(met, late=met.size - 1))
        found.append(min(left for _, left in times) < max(came for came, _ in times))
    assert any(found)


def writes(ll: Any, thread: int, nthreads: int, box: Any, own: Any, x: Any, at: int) -> None:
    """Copy `x` to the right neighbour's box, from its element `at` on."""
    if thread == 0:
        outbox = 2 * x.size + at
        for i in range(x.size):
            own[outbox + i] = x[i]
        right = (ll.rank + 1) % ll.size
        put(ll, box[right] + 4 * at, box[ll.rank] + 4 * outbox, 4 * x.size)


def test_what_was_written_before_it_is_read_behind_it(
    comm: shmemar.Communicator, arrays: Arrays, agree: Any
) -> None:
    count = 8
    buffer = comm.ll_buffer("int32", threads=128)
    box = comm.symmetric_array(4 * count, "int32")
    draw = np.random.default_rng(3)  # the same on every rank
    wrong = 0
    left = (comm.rank - 1) % comm.size
    for turn in range(60):
        at = turn % 2 * count
        x = arrays.make(np.full(count, 100 * turn + comm.rank, np.int32))
        if comm.rank == draw.integers(comm.size):
            time.sleep(0.001)
        comm.launch(writes, buffer, box, box.array, x, at)
        comm.barrier()
        got = arrays.host(box.array)[at : at + count]
        wrong += int(np.count_nonzero(got != 100 * turn + left))
    assert agree(wrong) == [0] * comm.size


def test_barriers_and_reductions_take_turns(
    comm: shmemar.Communicator, arrays: Arrays, agree: Any
) -> None:
    reduce = Checked(comm, arrays)
    for call in range(60):
        if call % 3:
            reduce("float32", ReduceOp.SUM, 1 + call * 7)
        else:
            comm.barrier()
    assert agree(reduce.wrong) == [[]] * comm.size


def test_ranks_that_call_something_else_are_named_under_check(
    world: MPI.Intracomm, backend: str, arrays: Arrays, monkeypatch: pytest.MonkeyPatch
) -> None:
    if world.size == 1:
        pytest.skip("one rank differs from nobody")
    monkeypatch.setenv("SHMEMAR_CHECK", "1")
    x = arrays.make(np.ones(4, np.float32))
    with shmemar.init(world, backend=backend) as comm:
        with pytest.raises(shmemar.MismatchError, match=r"different things.*barrier"):
            comm.allreduce(x) if world.rank == 1 else comm.barrier()
        comm.barrier()


def test_a_stream_that_is_none_is_refused(comm: shmemar.Communicator) -> None:
    with pytest.raises(shmemar.ArgumentError, match="stream is "):
        comm.barrier(stream=object())
    comm.barrier()


def test_a_closed_communicator_has_no_barrier(world: MPI.Intracomm, backend: str) -> None:
    comm = shmemar.init(world, backend=backend)
    comm.close()
    with pytest.raises(shmemar.ClosedError):
        comm.barrier()


@pytest.mark.parametrize(
    ("kernel", "protocol", "expected"),
    [
        ("barrier_one_shot", "ll", "protocol pull or push, or kernel one_shot or two_shot"),
        ("two_shot", "push", "protocol ll or sentinel, or kernel barrier_one_shot or barrier_two_"),
    ],
)
def test_pins_that_do_not_go_together_are_refused_with_those_that_do(
    world: MPI.Intracomm,
    backend: str,
    monkeypatch: pytest.MonkeyPatch,
    kernel: str,
    protocol: str,
    expected: str,
) -> None:
    monkeypatch.setenv("SHMEMAR_KERNEL", kernel)
    monkeypatch.setenv("SHMEMAR_PROTOCOL", protocol)
    with pytest.raises(shmemar.ConfigurationError, match=expected):
        shmemar.init(world, backend=backend)


@pytest.mark.parametrize(
    ("kernel", "chosen"),
    [
        ("barrier_one_shot", "barrier_one_shot/pull"),
        ("barrier_two_shot", "barrier_two_shot/push"),
        ("two_shot", "two_shot/ll"),
    ],
)
def test_a_kernel_that_is_pinned_has_a_protocol_by_itself(
    world: MPI.Intracomm,
    backend: str,
    monkeypatch: pytest.MonkeyPatch,
    kernel: str,
    chosen: str,
) -> None:
    monkeypatch.setenv("SHMEMAR_KERNEL", kernel)
    with shmemar.init(world, backend=backend) as comm:
        assert comm.explain(nbytes=4).kernel == chosen
