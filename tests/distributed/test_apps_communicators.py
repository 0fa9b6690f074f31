"""The applications' communicators over ranks: sums and copies of known integers."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from benchmarks.apps.communicators import open_communicators
from shmemar.errors import BackendUnavailableError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from mpi4py import MPI

    from benchmarks.apps.communicators import Communicator

ON_GPUS = ("shmemar", "nvshmem", "nccl", "mpi")
ON_CPU = ("shmemar", "mpi")

COUNTS = (1, 3, 257)
LARGE_COUNTS = (1000, 12_288, 65_537, 1_000_000)


@pytest.fixture(scope="module")
def comms(world: MPI.Intracomm, backend: str) -> Iterator[dict[str, Communicator]]:
    names = ON_CPU if backend == "emulated" else ON_GPUS
    try:
        made = open_communicators(world, names, backend=backend)
    except BackendUnavailableError as error:
        if "nccl" not in str(error):
            raise
        # It refuses ranks that share a GPU.
        others = [name for name in names if name != "nccl"]
        made = open_communicators(world, others, backend=backend)
    yield made
    for each in made.values():
        each.close()


@pytest.fixture(params=ON_GPUS)
def comm(
    request: pytest.FixtureRequest, comms: dict[str, Communicator], world: MPI.Intracomm
) -> Communicator:
    name = request.param
    if name not in comms:
        pytest.skip(f"{name} is not available here")
    is_costly = name == "shmemar" and comms[name].xp is np  # seconds of compilation
    if is_costly and request.config.getoption("--in-turn") and world.size != 2:
        pytest.skip("it is run on 2 ranks")
    return comms[name]


def _counts(comm: Communicator) -> tuple[int, ...]:
    if comm.xp is np and comm.name == "shmemar":
        return COUNTS
    return COUNTS + LARGE_COUNTS


def _of_rank(rank: int, count: int, dtype: str) -> Any:
    """Integers whose sums float32 holds exactly, and which differ between ranks and places."""
    values = (np.arange(count) % 1009 + 1) * (rank + 1)
    if np.dtype(dtype).kind == "c":
        return (values + 2j * values[::-1]).astype(dtype)
    return values.astype(dtype)


def _on_host(comm: Communicator, x: Any) -> Any:
    return x if comm.xp is np else comm.xp.asnumpy(x)


def _dtypes(comm: Communicator) -> tuple[str, ...]:
    if comm.xp is np and comm.name == "shmemar":
        return ("float64",)
    return ("float32", "float64", "complex64", "complex128")


@pytest.mark.parametrize("made_by", ["communicator", "library"])
def test_sums_of_known_integers_are_right(comm: Communicator, agree: Any, made_by: str) -> None:
    wrong: list[tuple[Any, ...]] = []
    for dtype in _dtypes(comm):
        for count in _counts(comm):
            comm.prepare(dtype, count * np.dtype(dtype).itemsize)
            x = (comm if made_by == "communicator" else comm.xp).empty(count, dtype)
            x[...] = comm.xp.asarray(_of_rank(comm.rank, count, dtype))
            comm.barrier()
            comm.allreduce(x)
            expected = sum(_of_rank(rank, count, dtype) for rank in range(comm.size))
            comm.barrier()
            if not np.array_equal(_on_host(comm, x), expected):
                wrong.append((dtype, count))
            # A part, at another place than the beginning, and again what was summed.
            if count >= 257:
                comm.allreduce(x[1:200])
                expected[1:200] *= comm.size
                comm.barrier()
                if not np.array_equal(_on_host(comm, x), expected):
                    wrong.append((dtype, count, "part"))
    assert agree(wrong) == [[]] * comm.size


def _sums_are_alike(comm: Communicator, count: int) -> bool:
    """Whether all ranks get the same bits of sums that round."""
    comm.prepare("float64", 8 * count)
    x = comm.empty(count, "float64")
    x[...] = comm.xp.asarray(np.random.default_rng(comm.rank).uniform(-1, 1, count))
    comm.barrier()
    comm.allreduce(x)
    comm.barrier()
    return len(set(comm.host_allgather(_on_host(comm, x).tobytes()))) == 1


def test_all_ranks_get_the_same_bits_of_sums_that_round(comm: Communicator) -> None:
    if comm.name not in ("shmemar", "nvshmem"):
        pytest.skip("it promises nothing of the kind")
    if comm.name == "nvshmem" and comm.size > 2 and comm.size.bit_count() > 1:
        pytest.skip("of so many ranks it gives no such sums")
    counts = (4672, 4673, 8191, 65_537) if comm.name == "nvshmem" else _counts(comm)
    assert [count for count in counts if not _sums_are_alike(comm, count)] == []


def test_whole_sums_of_nvshmem_would_differ(
    comms: dict[str, Communicator], monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that parts are not there for nothing."""
    comm: Any = comms.get("nvshmem")
    if comm is None or comm._most == sys.maxsize:
        pytest.skip("NVSHMEM's sums are not in parts here")
    monkeypatch.setattr(comm, "_most", sys.maxsize)
    assert not _sums_are_alike(comm, 8191)


@pytest.mark.parametrize("made_by", ["communicator", "library"])
def test_every_rank_gets_what_the_root_has(comm: Communicator, agree: Any, made_by: str) -> None:
    wrong = []
    for count in _counts(comm):
        comm.prepare("float64", 8 * count)
        x = (comm if made_by == "communicator" else comm.xp).empty(count, "float64")
        x[...] = comm.xp.asarray(_of_rank(comm.rank, count, "float64"))
        comm.barrier()
        # One behind the other, as a root's data may come before others are ready for it.
        for root in (comm.size - 1, 0, comm.size // 2):
            x[...] = comm.xp.asarray(_of_rank(comm.rank, count, "float64"))
            comm.broadcast(x, root)
            if not np.array_equal(_on_host(comm, x), _of_rank(root, count, "float64")):
                wrong.append((count, root))
        comm.barrier()
    assert agree(wrong) == [[]] * comm.size


def test_captured_sums_are_right_each_time(comm: Communicator, agree: Any) -> None:
    if not comm.capturable:
        pytest.skip("its calls can't be captured")
    count, replays, xp = 12_288, 3, comm.xp
    stream = xp.cuda.Stream(non_blocking=True)
    wrong = []
    for made_by in (comm, xp):
        with stream:
            x = made_by.empty(count, "float64")
            comm.prepare("float64", x.nbytes)
            x[...] = xp.asarray(_of_rank(comm.rank, count, "float64"))
            comm.barrier()
            stream.begin_capture()
            comm.allreduce(x)
            graph = stream.end_capture()
            for _ in range(replays):
                graph.launch(stream)
            stream.synchronize()
        expected = sum(_of_rank(rank, count, "float64") for rank in range(comm.size))
        expected *= comm.size ** (replays - 1)
        if not np.array_equal(_on_host(comm, x), expected):
            wrong.append(made_by is comm)
        del graph
        comm.barrier()
    assert agree(wrong) == [[]] * comm.size


def test_memory_of_the_symmetric_heap_is_used_again(comms: dict[str, Communicator]) -> None:
    if "nvshmem" not in comms:
        pytest.skip("it is about nvshmem's memory")
    comm = comms["nvshmem"]
    # Of a size that no other test has left there.
    first, second = comm.empty(1009, "float64"), comm.empty(1009, "float64")
    places = {first.data.ptr, second.data.ptr}
    assert len(places) == 2
    kept = first[10:]
    del first, second
    third, fourth = comm.empty(2018, "float32"), comm.empty((1, 1009), "float64")
    assert third.data.ptr in places
    assert fourth.data.ptr not in places  # a part of the first one is still there
    assert kept.shape == (999,)


def test_calls_bytes_and_time_are_counted(
    comms: dict[str, Communicator],
) -> None:
    comm = comms["mpi"]
    comm.counts.clear()
    x = comm.empty(5, "float64")
    x[...] = comm.rank
    comm.allreduce(x)
    comm.broadcast(x, comm.size - 1)
    assert comm.counts.calls == {"allreduce": 1, "broadcast": 1}
    assert comm.counts.nbytes == {"allreduce": 40, "broadcast": 40}
    assert comm.counts.seconds > 0
