"""The floor is measured on every backend; only GPUs make it mean something."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

import shmemar
from shmemar.device.latency import FENCES, PENDING
from shmemar.host import speed_of_light
from shmemar.host.speed_of_light import measure_floor, render, time_barrier

if TYPE_CHECKING:
    from mpi4py import MPI


def test_every_part_of_the_floor_is_measured(
    world: MPI.Intracomm, backend: str, agree: Any
) -> None:
    steps: list[tuple[int, int]] = []
    with shmemar.init(world, backend=backend) as comm:
        found = measure_floor(comm, rounds=20, progress=lambda at, of, _: steps.append((at, of)))
        assert agree(found) == [found] * world.size
    npairs = world.size * (world.size - 1) // 2
    assert len(found.pairs) == npairs
    for pair in found.pairs:
        assert 0 < pair.fastest_ns <= pair.median_ns <= pair.slowest_ns
    pending = PENDING if world.size > 1 else PENDING[:2]
    measured = {fence: tuple(times) for fence, times in found.fences_ns.items()}
    assert measured == dict.fromkeys(FENCES, pending)
    assert all(ns > 0 for times in found.fences_ns.values() for ns in times.values())
    assert found.load_ns > 0
    assert (found.store_ns > 0) == (world.size > 1)
    assert steps == [(at, steps[-1][1]) for at in range(len(steps))]
    assert steps[-1][0] == steps[-1][1]
    assert render(found, {})
    if backend == "nvshmem" and world.size > 1:
        assert found.l_store_ns > 0


def test_a_rank_that_does_not_answer_is_named(
    world: MPI.Intracomm, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if world.size == 1:
        pytest.skip("one rank has no pair")
    with shmemar.init(world, backend=backend) as comm:
        bench = speed_of_light._Bench(comm, 10)
        monkeypatch.setattr(bench, "own", lambda *_: 0.0)
        with pytest.raises(shmemar.DeviceError, match="rank 0 or 1 did not answer"):
            bench.pair(0, 1)


@pytest.mark.parametrize("rounds", [0, -1, True, 1.5, 1 << 21])
def test_rounds_that_are_none_are_refused(comm: shmemar.Communicator, rounds: Any) -> None:
    with pytest.raises(shmemar.ArgumentError, match=r"rounds is .*; expected 1 to"):
        measure_floor(comm, rounds=rounds)


def test_a_grid_of_fewer_blocks_than_are_tried_is_refused(
    world: MPI.Intracomm, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHMEMAR_MAX_BLOCKS", "15")
    told = "SHMEMAR_MAX_BLOCKS is 15; expected 16"
    with (
        shmemar.init(world, backend=backend) as comm,
        pytest.raises(shmemar.ArgumentError, match=told),
    ):
        measure_floor(comm, rounds=10)


def test_a_barrier_is_timed_in_graphs_alone(comm: shmemar.Communicator, backend: str) -> None:
    found = time_barrier(comm, samples=3, repeats=5)
    if backend == "emulated":
        assert found is None
    else:
        assert found is not None
        assert found > 0
