"""Options of the test suite."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest

from tests.launcher import DistributedSuites

DISTRIBUTED = Path(__file__).parent / "distributed"


# The checker makes and drops many objects: a quarter of its time went into looking for cycles.
gc.set_threshold(50_000, 20, 20)


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("shmemar")
    group.addoption(
        "--distributed",
        action="store_true",
        help="collect tests/distributed; for processes that mpirun started",
    )
    group.addoption(
        "--random-calls",
        type=int,
        default=1000,
        help="calls in the random sequence of tests/distributed (default: 1000)",
    )
    group.addoption(
        "--every-kernel",
        action="store_true",
        help="run each type and operator with each kernel and protocol; default: with one, in turn",
    )
    group.addoption(
        "--backend",
        choices=["emulated", "nvshmem"],
        default="emulated",
        help="where tests/distributed runs its kernels (default: emulated)",
    )
    group.addoption(
        "--arrays",
        choices=["numpy", "cupy", "torch"],
        default="numpy",
        help="whose arrays tests/distributed reduces; on GPUs cupy or torch (default: numpy)",
    )
    group.addoption(
        "--protocol-seeds",
        type=int,
        default=15,
        help="schedules of each kernel in tests/protocol (default: 15)",
    )
    group.addoption(
        "--ranks",
        default="1,2,3",
        help="numbers of ranks that tests/test_mpirun.py starts (default: 1,2,3)",
    )


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave tests/distributed to processes that mpirun started."""
    if DISTRIBUTED in (collection_path, *collection_path.parents):
        return None if config.getoption("--distributed") else True
    return None


SUITES = pytest.StashKey[DistributedSuites]()


def _ranks(config: pytest.Config) -> list[int]:
    return [int(text) for text in str(config.getoption("--ranks")).split(",")]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if {"nranks", "suites"} <= {*metafunc.fixturenames}:
        metafunc.parametrize("nranks", _ranks(metafunc.config))


def pytest_collection_finish(session: pytest.Session) -> None:
    """Begin with what takes longest, where it is asked for, beside the tests before it."""
    fixtures: set[Any] = set()
    for item in session.items:
        fixtures |= {*getattr(item, "fixturenames", ())}
    if "suites" in fixtures and not session.config.option.collectonly:
        ncalls = session.config.getoption("--random-calls")
        session.config.stash[SUITES] = DistributedSuites(_ranks(session.config), ncalls)


def pytest_sessionfinish(session: pytest.Session) -> None:
    if SUITES in session.config.stash:
        session.config.stash[SUITES].close()


@pytest.fixture
def suites(request: pytest.FixtureRequest) -> DistributedSuites:
    """Runs of tests/distributed, begun when the session began."""
    return request.config.stash[SUITES]
