"""The stock collective: pinned, listed by a table, and refused."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import shmemar
from shmemar.dtypes import DTYPES, ReduceOp
from shmemar.host.selector import Band, Candidate, Table
from shmemar.spec import Backend, Kernel, Protocol
from tests.distributed.checked import Checked

if TYPE_CHECKING:
    from collections.abc import Callable

    from mpi4py import MPI

    from shmemar.host.arrays import Arrays

    Pinned = Callable[..., shmemar.Communicator]

STOCK = Candidate(Kernel.STOCK, Protocol.STREAM)
ONE_LL = Candidate(Kernel.ONE_SHOT, Protocol.LL)
COUNTS = 1, 2, 3, 31, 256, 1000


@pytest.mark.parametrize(
    ("name", "op"),
    [
        ("float32", ReduceOp.SUM),
        ("float64", ReduceOp.SUM),
        ("int32", ReduceOp.MIN),
        ("int64", ReduceOp.MAX),
        ("uint64", ReduceOp.SUM),
    ],
)
def test_any_arrays_are_reduced_exactly(
    pinned: Pinned, arrays: Arrays, agree: Any, name: str, op: ReduceOp
) -> None:
    comm = pinned(Kernel.STOCK, Protocol.STREAM)
    reduce = Checked(comm, arrays)
    for number, count in enumerate(COUNTS):
        offset = (number + comm.rank) % 5
        reduce(name, op, count, offset=offset, in_place=(number // 2 + comm.rank) % 3 == 0)
    assert agree((reduce.call, reduce.wrong)) == [(len(COUNTS), [])] * comm.size


def test_a_message_goes_in_parts_as_large_as_the_staging_memory(
    pinned: Pinned, arrays: Arrays, agree: Any
) -> None:
    comm = pinned(Kernel.STOCK, Protocol.STREAM, one_block=True)
    whole = comm._config.two_shot_scratch_nbytes
    nbytes = whole // 2
    found = comm.explain(nbytes=3 * nbytes + 4)
    assert (found.kernel, found.launches, found.passes, found.blocks) == ("stock/stream", 4, 1, 0)
    assert found.scratch_nbytes == whole
    assert "grid: its own, 4 launches" in str(found)
    reduce = Checked(comm, arrays)
    for count in (nbytes // 4, nbytes // 4 + 1, 3 * (nbytes // 4) + 1):
        reduce("float32", ReduceOp.SUM, count, offset=1)
        reduce("float32", ReduceOp.SUM, count, in_place=True)
    assert agree((reduce.call, reduce.wrong)) == [(6, [])] * comm.size


def test_a_plan_of_it_has_no_grid_and_no_programmatic_launch(
    pinned: Pinned, arrays: Arrays, agree: Any
) -> None:
    comm = pinned(Kernel.STOCK, Protocol.STREAM)
    x, out = (arrays.make(np.full(5, comm.rank + 1, np.float32)) for _ in range(2))
    plan = comm.plan_allreduce(x, out)
    assert (plan.kernel, plan.blocks, plan.launches, plan.pdl) == ("stock/stream", 0, 1, "never")
    for _ in range(3):
        plan()
    total = comm.size * (comm.size + 1) // 2
    assert agree(arrays.host(out).tolist()) == [[total] * 5] * comm.size


def test_a_table_may_list_it_where_ranks_round_alike(
    world: MPI.Intracomm, backend: str, arrays: Arrays, agree: Any
) -> None:
    with shmemar.init(world, backend=backend, determinism="not_guaranteed") as comm:
        table = Table("a test", (Band(64, (ONE_LL,)), Band(None, (STOCK, ONE_LL))))
        comm.use_table(table)
        chosen = {
            (name, nbytes): comm.explain(nbytes=nbytes, dtype=name).kernel
            for name in ("int32", "float32")
            for nbytes in (64, 68)
        }
        of_floats = "stock/stream" if comm.size <= 2 else "one_shot/ll"
        assert chosen == {
            ("int32", 64): "one_shot/ll",
            ("int32", 68): "stock/stream",
            ("float32", 64): "one_shot/ll",
            ("float32", 68): of_floats,
        }
        reduce = Checked(comm, arrays)
        for count in (16, 17, 16, 17):
            reduce("int32", ReduceOp.SUM, count)
        assert agree((reduce.call, reduce.wrong)) == [(4, [])] * comm.size


@pytest.mark.parametrize(
    ("name", "op"), [("float16", "sum"), ("float32", "min"), ("int32", "prod")]
)
def test_what_it_would_do_otherwise_is_refused(
    pinned: Pinned, arrays: Arrays, name: str, op: str
) -> None:
    comm = pinned(Kernel.STOCK, Protocol.STREAM)
    x = arrays.make(np.ones(3, name))
    with pytest.raises(shmemar.ArgumentError, match="and kernel stock, which"):
        comm.allreduce(x, op=op)
    with pytest.raises(shmemar.ArgumentError, match="and kernel stock, which"):
        comm.explain(nbytes=DTYPES[name].itemsize, dtype=name, op=op)


@pytest.mark.parametrize("determinism", ["run_to_run", "bitwise"])
def test_it_is_pinned_only_where_nothing_is_promised(
    world: MPI.Intracomm, backend: str, monkeypatch: pytest.MonkeyPatch, determinism: str
) -> None:
    monkeypatch.setenv("SHMEMAR_KERNEL", "stock")
    with pytest.raises(shmemar.ConfigurationError, match="expected 'not_guaranteed' with it"):
        shmemar.init(world, backend=backend, determinism=determinism)


def test_a_communicator_of_some_ranks_has_none_on_gpus(
    world: MPI.Intracomm, backend: str, comm: shmemar.Communicator
) -> None:
    if comm.backend is Backend.EMULATED or world.size < 2:
        pytest.skip("MPI reduces over any ranks")
    part: Any = world.Split(world.rank % 2)
    with shmemar.init(part, backend=backend, determinism="not_guaranteed") as some:
        some.use_table(Table("a test", (Band(None, (STOCK,)),)))
        found = some.explain(nbytes=64)
        assert dict(found.others)["stock/stream"].startswith(
            f"NVSHMEM's reduces over all {world.size} processes of the job"
        )
    part.Free()


def test_pinned_it_wants_all_processes_of_the_job(
    world: MPI.Intracomm, backend: str, comm: shmemar.Communicator, monkeypatch: pytest.MonkeyPatch
) -> None:
    if comm.backend is Backend.EMULATED or world.size < 2:
        pytest.skip("MPI reduces over any ranks")
    part: Any = world.Split(world.rank % 2)
    monkeypatch.setenv("SHMEMAR_KERNEL", "stock")
    with pytest.raises(shmemar.ConfigurationError, match="SHMEMAR_KERNEL is stock, and NVSHMEM's"):
        shmemar.init(part, backend=backend, determinism="not_guaranteed")
    part.Free()


def test_its_protocol_alone_pins_nothing(
    world: MPI.Intracomm, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHMEMAR_PROTOCOL", "stream")
    with pytest.raises(shmemar.ConfigurationError, match="SHMEMAR_PROTOCOL is 'stream', which"):
        shmemar.init(world, backend=backend, determinism="not_guaranteed")


@pytest.mark.gpu
@pytest.mark.parametrize("nbytes", [4, 64 << 10, 40 << 20])
def test_a_first_call_of_a_plan_is_captured(
    pinned: Pinned, backend: str, agree: Any, nbytes: int
) -> None:
    if backend != "nvshmem":
        pytest.skip("--backend is not nvshmem")
    import cupy

    comm = pinned(Kernel.STOCK, Protocol.STREAM)
    x, out = (cupy.full(nbytes // 4, comm.rank + 1, "float32") for _ in range(2))
    plan = comm.plan_allreduce(x, out)
    stream = cupy.cuda.Stream(non_blocking=True)
    stream.begin_capture()
    plan(stream=stream)
    graph = stream.end_capture()
    total = comm.size * (comm.size + 1) // 2
    seen = []
    for factor in (1, 3):
        x[...] = factor * (comm.rank + 1)
        cupy.cuda.Device().synchronize()
        graph.launch(stream)
        stream.synchronize()
        seen.append((float(out.min()), float(out.max())))
    assert agree(seen) == [[(total, total), (3 * total, 3 * total)]] * comm.size


@pytest.mark.gpu
def test_two_communicators_take_turns_at_it(world: MPI.Intracomm, backend: str, agree: Any) -> None:
    if backend != "nvshmem":
        pytest.skip("--backend is not nvshmem")
    import cupy

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SHMEMAR_KERNEL", "stock")
        patch.setenv("SHMEMAR_TWO_SHOT_SCRATCH_NBYTES", str(2 << 20))
        both = [
            shmemar.init(world, backend=backend, determinism="not_guaranteed") for _ in range(2)
        ]
    streams = [cupy.cuda.Stream(non_blocking=True) for _ in both]
    count = (1 << 20) // 4
    wrong = 0
    x = [cupy.empty(count, "float32") for _ in both]
    out = [cupy.empty(count, "float32") for _ in both]
    for turn in range(20):
        for each in range(2):
            x[each][...] = (turn + each) * (world.rank + 1)
        cupy.cuda.Device().synchronize()
        for comm, source, target, stream in zip(both, x, out, streams, strict=True):
            comm.allreduce(source, out=target, stream=stream)
        cupy.cuda.Device().synchronize()
        for each in range(2):
            expected = (turn + each) * world.size * (world.size + 1) // 2
            wrong += int((out[each] != expected).sum())
    assert agree(wrong) == [0] * world.size
    for comm in both:
        comm.close()
