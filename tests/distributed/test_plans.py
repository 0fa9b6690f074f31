"""Plans, and what a communicator says of its choices."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import shmemar
from shmemar.dtypes import DTYPES, ReduceOp
from shmemar.host.exact import count_wrong, exact_input, exact_result, poison
from shmemar.host.selector import CANDIDATES
from shmemar.spec import Pdl

if TYPE_CHECKING:
    from mpi4py import MPI

    from shmemar.host.arrays import Arrays

FLOAT, SUM = DTYPES["float32"], ReduceOp.SUM


def copy_to(target: Any, values: Any) -> None:
    """Put values of the host into an array that is there."""
    if isinstance(target, np.ndarray):
        target[...] = values
    elif hasattr(target, "set"):
        target.set(values)
    else:
        import torch

        target.copy_(torch.from_numpy(values))


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("count", [1, 300, 5000])
def test_a_plan_reduces_what_is_in_its_arrays_at_each_call(
    comm: shmemar.Communicator, arrays: Arrays, agree: Any, count: int, in_place: bool
) -> None:
    x = arrays.make(np.zeros(count, np.float32))
    out = x if in_place else arrays.make(np.zeros(count, np.float32))
    plan = comm.plan_allreduce(x, out)
    poisoned = np.empty(count, np.float32)
    poison(poisoned)
    wrong = 0
    for call in range(20):
        values = exact_input(FLOAT, SUM, count, rank=comm.rank, call=call)
        if not in_place:
            copy_to(out, poisoned)
        copy_to(x, values)
        arrays.synchronize()
        assert plan() is out
        arrays.synchronize()
        wrong += count_wrong(
            arrays.host(out), exact_result(FLOAT, SUM, count, nranks=comm.size, call=call)
        )
        if not in_place:
            wrong += count_wrong(arrays.host(x), values)
        if call % 3 == 0:  # others may come between
            arrays.reduce(comm, np.ones(7, np.float32))
    assert agree(wrong) == [0] * comm.size
    assert plan.launches == 1
    assert plan.kernel == comm.explain(nbytes=4 * count).kernel


def test_plans_take_turns_and_have_results_of_their_own(
    comm: shmemar.Communicator, arrays: Arrays, agree: Any
) -> None:
    xs = [arrays.make(np.full(count, comm.rank + 1, np.float32)) for count in (3, 40, 3)]
    plans = [comm.plan_allreduce(x) for x in xs]
    total = comm.size * (comm.size + 1) / 2
    results = [plan() for plan in (plans[2], plans[0], plans[1], plans[0])]
    arrays.synchronize()
    assert results[1] is results[3] is plans[0].out is not plans[2].out
    sums = [arrays.host(each).tolist() for each in results]
    assert agree(sums == [[total] * n for n in (3, 3, 40, 3)]) == [True] * comm.size


@pytest.mark.parametrize("pdl", ["auto", True, False])
def test_a_plan_may_be_launched_programmatically(
    comm: shmemar.Communicator, arrays: Arrays, agree: Any, pdl: Any
) -> None:
    """Of each kernel that the sizes choose."""
    wrong = 0
    for count in (5, 40_000, 300_000):
        xs, outs, expected = [], [], []
        for call in range(4):
            xs.append(arrays.make(exact_input(FLOAT, SUM, count, rank=comm.rank, call=call)))
            outs.append(arrays.make(np.full(count, np.nan, np.float32)))
            expected.append(exact_result(FLOAT, SUM, count, nranks=comm.size, call=call))
        plans = [comm.plan_allreduce(x, out, pdl=pdl) for x, out in zip(xs, outs, strict=True)]
        by_itself = "behind a collective" if comm._kernels.pdl() is Pdl.BEHIND else "never"
        on_gpus = {True: "always", False: "never"}.get(pdl, by_itself)
        expected_pdl = "never" if comm._runtime.is_synchronous else on_gpus
        assert {plan.pdl for plan in plans} == {expected_pdl}
        arrays.synchronize()
        for _ in range(5):
            for plan in plans:
                plan()
        arrays.synchronize()
        wrong += sum(
            count_wrong(arrays.host(out), result)
            for out, result in zip(outs, expected, strict=True)
        )
    assert agree(wrong) == [0] * comm.size


def test_a_plan_of_nothing_launches_nothing(comm: shmemar.Communicator, arrays: Arrays) -> None:
    x = arrays.make(np.zeros(0, np.float32))
    plan = comm.plan_allreduce(x, x)
    assert plan() is x
    assert (plan.kernel, plan.launches) == ("none", 0)
    assert repr(plan) == "<shmemar.AllreducePlan none, launches 0>"


def test_a_plan_is_checked_when_it_is_made(comm: shmemar.Communicator, arrays: Arrays) -> None:
    x = arrays.make(np.zeros(4, np.float32))
    with pytest.raises(shmemar.ArgumentError, match="op is 'median'"):
        comm.plan_allreduce(x, op="median")
    with pytest.raises(shmemar.ArgumentError, match="overlap"):
        comm.plan_allreduce(x[:3], x[1:])
    with pytest.raises(shmemar.ArgumentError, match="pdl is 'on'; expected True, False or 'auto'"):
        comm.plan_allreduce(x, pdl="on")  # type: ignore[arg-type]


def test_a_plan_of_a_closed_communicator_says_so(
    world: MPI.Intracomm, backend: str, arrays: Arrays
) -> None:
    with shmemar.init(world, backend=backend) as comm:
        plan = comm.plan_allreduce(arrays.make(np.zeros(4, np.float32)))
    with pytest.raises(shmemar.ClosedError, match="was closed"):
        plan()


def test_plans_that_differ_are_named_in_debug_mode(
    world: MPI.Intracomm, backend: str, arrays: Arrays, monkeypatch: pytest.MonkeyPatch
) -> None:
    if world.size == 1:
        pytest.skip("one rank can't differ")
    monkeypatch.setenv("SHMEMAR_CHECK", "1")
    with shmemar.init(world, backend=backend) as comm:
        count = 5 if world.rank == 0 else 6
        with pytest.raises(shmemar.MismatchError, match=r"count differs.*allreduce, call 1"):
            comm.plan_allreduce(arrays.make(np.zeros(count, np.float32)))
        plans = [comm.plan_allreduce(arrays.make(np.zeros(n, np.float32))) for n in (5, 6)]
        with pytest.raises(shmemar.MismatchError, match=r"plan differs between ranks in a plan's"):
            plans[world.rank == 0]()
        with pytest.raises(shmemar.MismatchError, match="pdl differs between ranks"):
            comm.plan_allreduce(arrays.make(np.zeros(5, np.float32)), pdl=world.rank == 0)
        with pytest.raises(shmemar.MismatchError, match=r"nbytes differs.* in prepare"):
            comm.prepare(nbytes=4 if world.rank == 0 else 8)


def test_what_is_explained_is_what_runs(
    comm: shmemar.Communicator, arrays: Arrays, agree: Any
) -> None:
    found = comm.explain(nbytes=128)
    assert found.kernel == "one_shot/ll"
    assert agree(found) == [found] * comm.size
    arrays.reduce(comm, np.ones(32, np.float32))
    found = comm.explain(nbytes=128)
    assert (found.blocks, found.block_threads, found.passes, found.is_compiled) == (1, 128, 1, True)
    assert 4_000_000 < found.scratch_nbytes <= 4 << 20
    text = str(found)
    assert text.startswith(f"one_shot/ll for 128 bytes of float32, sum, {comm.size} rank")
    assert "  why: the first for messages of " in text
    assert "  not ll128_atomic/sentinel: its order of summation may vary" in text
    assert len(found.others) == len(CANDIDATES) - 1
    large = comm.explain(nbytes=64 << 20, dtype="int32", op="max")
    assert dict(large.others)["one_shot/sentinel"].startswith("protocol is sentinel, and dtype")


def test_messages_of_gigabytes_are_explained_as_several_launches(
    comm: shmemar.Communicator,
) -> None:
    found = comm.explain(nbytes=1 << 40, dtype="float64")
    assert found.launches > 1
    assert f", {found.launches} launches" in str(found)


@pytest.mark.parametrize(
    ("arguments", "error", "expected"),
    [
        ({"nbytes": 0}, shmemar.ArgumentError, "nbytes is 0; expected a multiple of 4"),
        ({"nbytes": 6}, shmemar.ArgumentError, "nbytes is 6; expected a multiple of 4"),
        ({"nbytes": True}, shmemar.ArgumentError, "nbytes is True"),
        ({"nbytes": 8, "dtype": "float128"}, shmemar.ArgumentTypeError, "dtype is float128"),
        ({"nbytes": 8, "op": "median"}, shmemar.ArgumentError, "op is 'median'"),
        (
            {"nbytes": 8, "dtype": "complex64", "op": "max"},
            shmemar.ArgumentError,
            "op is 'max', which complex64 does not define",
        ),
    ],
)
def test_what_cannot_be_explained_or_prepared_is_an_error(
    comm: shmemar.Communicator, arguments: dict[str, Any], error: type[Exception], expected: str
) -> None:
    with pytest.raises(error, match=expected):
        comm.explain(**arguments)
    with pytest.raises(error, match=expected):
        comm.prepare(**arguments)


def test_a_call_is_supported_or_the_reason_is_said(
    comm: shmemar.Communicator, arrays: Arrays
) -> None:
    x = arrays.make(np.zeros(4, np.float32))
    assert comm.supports(x) == (True, "one_shot/ll")
    assert comm.supports(x[:0]) == (True, "nothing to do")
    ok, why = comm.supports(x, op="median")
    assert not ok
    assert why.startswith("op is 'median'")
    ok, why = comm.supports(x[:3], out=x[1:])
    assert not ok
    assert "overlap" in why
    ok, why = comm.supports("x")
    assert not ok
    assert why


def test_what_is_prepared_is_compiled(
    world: MPI.Intracomm, backend: str, arrays: Arrays, agree: Any
) -> None:
    with shmemar.init(world, backend=backend) as comm:
        assert not comm.explain(nbytes=64).is_compiled
        comm.prepare(nbytes=64)
        assert comm.explain(nbytes=64).is_compiled
        heap_nbytes = comm._heap.nbytes
        arrays.reduce(comm, np.ones(16, np.float32))
        assert comm._heap.nbytes == heap_nbytes
        assert agree(heap_nbytes) == [heap_nbytes] * world.size


def test_choices_of_bitwise_have_no_sentinels(
    world: MPI.Intracomm, backend: str, agree: Any
) -> None:
    with shmemar.init(world, backend=backend, determinism="bitwise") as comm:
        chosen = [comm.explain(nbytes=4 << shift).kernel for shift in range(25)]
        assert not any("sentinel" in name for name in chosen)
        assert "determinism is 'bitwise'" in str(comm.explain(nbytes=1 << 20))
        assert agree(chosen) == [chosen] * world.size
