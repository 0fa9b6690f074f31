"""What follows from the latencies that were measured."""

from __future__ import annotations

import json

import pytest

from shmemar.device import latency
from shmemar.host.speed_of_light import Floor, Pair, render

FENCES = {
    "__threadfence()": {"nothing": 140.0, "own store": 250.0, "peer store": 300.0},
    "fence.acq_rel.gpu": {"nothing": 130.0, "own store": 240.0, "peer store": 290.0},
}


def floor(*pairs: Pair, nranks: int = 2) -> Floor:
    return Floor(nranks, 1000, FENCES, 146.0, 4.0, pairs)


def test_the_floor_is_two_round_trips_to_l2_and_a_store() -> None:
    found = floor(Pair(0, 1, 1400.0, 1500.0, 1600.0))
    assert found.l_l2_ns == 140
    assert found.l_store_ns == 1400 / 2 - 140
    assert found.l_sol_ns == 2 * 140 + 560 == 140 + 1400 / 2
    assert found.pair_ns(found.pairs[0]) == found.l_sol_ns


def test_the_floor_is_that_of_the_slowest_pair_at_its_fastest() -> None:
    pairs = Pair(0, 1, 600.0, 900.0, 990.0), Pair(0, 2, 800.0, 850.0, 860.0)
    found = floor(*pairs, nranks=3)
    assert found.l_sol_ns == 140 + 800 / 2
    assert found.model_ns(16) == found.l_sol_ns + 13 * 4


def test_one_rank_has_no_floor() -> None:
    found = floor(nranks=1)
    assert found.l_store_ns == 0
    text = render(found, {})
    assert "L_SoL needs two ranks" in text
    assert "estimated" not in text
    assert found.as_dict()["model_us"] == {}


def test_what_is_said_holds_the_parts_and_the_whole() -> None:
    found = floor(Pair(0, 1, 1400.0, 1500.0, 1600.0))
    text = render(found, {2: 2.61})
    assert "L_SoL = 2 * 140 (__threadfence(), nothing pending) + 560 (L_store) = 840 ns" in text
    assert "barrier of 2 ranks, in a graph      2.61 us" in text
    assert "estimated for 64 ranks like these, a store more a peer: 1088 ns" in text
    assert text.splitlines()[2].split() == ["__threadfence()", "140", "250", "300"]


def test_a_fence_that_was_not_measured_is_a_dash() -> None:
    alone = {"__threadfence()": {"nothing": 140.0, "own store": 250.0}}
    text = render(Floor(1, 10, alone, 146.0, 0.0, ()), {})
    assert text.splitlines()[2].split() == ["__threadfence()", "140", "250", "-"]


def test_a_file_holds_what_is_measured_and_what_follows() -> None:
    document = json.loads(json.dumps(floor(Pair(0, 1, 1400.0, 1500.0, 1600.0)).as_dict()))
    assert document["l_sol_us"] == pytest.approx(0.84)
    assert document["pairs_l_sol_us"] == {"0-1": pytest.approx(0.84)}
    assert document["pairs"][0]["slowest_ns"] == 1600
    assert sorted(document["model_us"]) == ["16", "32", "64"]


def test_fences_are_known_by_their_instructions() -> None:
    assert list(latency.FENCES) == ["__threadfence()", "fence.acq_rel.gpu", "fence.acq_rel.sys"]
