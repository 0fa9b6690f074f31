"""Options of the test suite."""

from __future__ import annotations

import atexit
import fcntl
import gc
import os
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

DISTRIBUTED = Path(__file__).parent / "distributed"


# What is tested is what is compiled of this tree, whatever the user's cache holds. Workers, and
# what tests start under mpirun, have that of the session.
if "CACHE_OF_TESTS" not in os.environ:
    os.environ["CACHE_OF_TESTS"] = os.environ["XDG_CACHE_HOME"] = tempfile.mkdtemp()
    atexit.register(shutil.rmtree, os.environ["CACHE_OF_TESTS"], ignore_errors=True)

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
        default=300,
        help="calls in the random sequence of tests/distributed (default: 300)",
    )
    group.addoption(
        "--replays",
        type=int,
        default=1000,
        help="replays of graphs on a GPU (default: 1000)",
    )
    group.addoption(
        "--every-kernel",
        action="store_true",
        help="run each type and operator with each kernel and protocol; default: with one, in turn",
    )
    group.addoption(
        "--in-turn",
        action="store_true",
        help="leave out half of the variants of tests/distributed that take long to compile, of 1 "
        "rank three quarters; which ones depends on the number of ranks",
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
        default=12,
        help="schedules of each kernel in tests/protocol (default: 12)",
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


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "suite_nranks" in metafunc.fixturenames:
        numbers = str(metafunc.config.getoption("--ranks")).split(",")
        metafunc.parametrize("suite_nranks", [int(text) for text in numbers])


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with what takes longest: workers that run out of tests take others' later ones."""

    def order(item: pytest.Item) -> tuple[bool, bool]:
        is_suite = "suite_nranks" in getattr(item, "fixturenames", ())
        return not is_suite, item.path.name != "test_mpirun.py"

    items.sort(key=order)


@pytest.fixture(autouse=True)
def _cores(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[None]:
    """Let other workers wait while the ranks of a suite run, which spin for one another.

    A rank that gives way to a worker's test waits for milliseconds at each exchange.
    """
    if "PYTEST_XDIST_WORKER" not in os.environ:
        yield
        return
    folder = tmp_path_factory.getbasetemp().parent
    callspec = getattr(request.node, "callspec", None)
    is_suite = callspec is not None and callspec.params.get("suite_nranks", 1) > 1
    with (folder / "entry").open("w") as entry, (folder / "cores").open("w") as cores:
        fcntl.flock(entry, fcntl.LOCK_EX)
        fcntl.flock(cores, fcntl.LOCK_EX if is_suite else fcntl.LOCK_SH)
        if not is_suite:
            fcntl.flock(entry, fcntl.LOCK_UN)
        yield


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """As many as `-n auto` starts: tests start up to eight processes of their own."""
    return min(4, len(os.sched_getaffinity(0)))
