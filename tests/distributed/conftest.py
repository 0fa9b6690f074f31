"""What tests under mpirun share. Every rank runs every test; a verdict is one for all ranks."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import pytest
from mpi4py import MPI

import shmemar
from shmemar.dtypes import DTYPES, ReduceOp
from shmemar.host.arrays import Arrays
from shmemar.layout import DEFAULT_SCRATCH_NBYTES, LLLayout
from shmemar.spec import Kernel, KernelSpec, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

# What a tuner has left on this machine is not what tests are about.
os.environ.setdefault("SHMEMAR_TABLE", "none")


AT_TWO_RANKS = (
    "test_apps_decode",
    "test_apps_lanczos",
    "test_benchmarks",
    "test_floor",
    "test_stock",
)
ONLY_AT = {
    "test_kernels_and_sizes_at_random_one_rank_late": (3,),
    "test_what_looks_like_the_sentinel_hangs_nothing": (2,),
    "test_ranks_get_the_same_of_many_nans": (3,),
    "test_every_type_of_element_is_summed_exactly": (2, 3),
}
"""Numbers of ranks of tests that need no others; they run there with all variants."""

COMPILES_MUCH = ("test_allreduce", "test_broadcast", "test_kernels", "test_lines", "test_signal")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """With --in-turn, leave out what takes seconds to compile, by number of ranks."""
    if not config.getoption("--in-turn"):
        return
    size = MPI.COMM_WORLD.size
    turns = 4 if size == 1 else 2
    variants: dict[str, int] = {}
    left_out = []
    for item in items:
        name = item.name.partition("[")[0]
        if (item.path.stem in AT_TWO_RANKS and size != 2) or size not in ONLY_AT.get(name, (size,)):
            left_out.append(item)
        elif name in ONLY_AT:
            continue
        elif item.path.stem in COMPILES_MUCH and hasattr(item, "callspec"):
            turn = variants.setdefault(name, len(variants))
            variants[name] += 1
            if (turn + size) % turns:
                left_out.append(item)
    items[:] = [item for item in items if item not in left_out]
    config.hook.pytest_deselected(items=left_out)


@pytest.fixture(scope="session")
def world() -> MPI.Intracomm:
    return MPI.COMM_WORLD


@pytest.fixture(scope="session")
def backend(pytestconfig: pytest.Config) -> str:
    return str(pytestconfig.getoption("--backend"))


@pytest.fixture(scope="session")
def arrays(pytestconfig: pytest.Config) -> Arrays:
    return Arrays(pytestconfig.getoption("--arrays"))


@pytest.fixture(scope="session")
def comm(world: MPI.Intracomm, backend: str) -> Iterator[shmemar.Communicator]:
    """A communicator of all ranks, for tests that leave it whole."""
    with shmemar.init(world, backend=backend) as made:
        yield made


@pytest.fixture(scope="session")
def small(
    world: MPI.Intracomm, backend: str, comm: shmemar.Communicator
) -> Iterator[shmemar.Communicator]:
    """A communicator whose one-shot scratch holds one block: little data takes many passes."""
    one_block = 2 * world.size * 256 * 16
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SHMEMAR_KERNEL", "one_shot")
        made = shmemar.init(world, backend=backend, scratch_nbytes=one_block)
    with made:
        yield made


@pytest.fixture(scope="session")
def pinned(
    world: MPI.Intracomm, backend: str, comm: shmemar.Communicator
) -> Iterator[Callable[..., shmemar.Communicator]]:
    """Make a communicator whose kernel and protocol the variables pin, or find it again.

    With ``one_block=True`` its scratch holds a block, so that little data takes many passes.
    """
    made: dict[tuple[Kernel, Protocol, bool], shmemar.Communicator] = {}

    def pin(kernel: Kernel, protocol: Protocol, *, one_block: bool = False) -> shmemar.Communicator:
        key = kernel, protocol, one_block
        if key not in made:
            unit = KernelSpec(kernel, protocol, DTYPES["float32"], ReduceOp.SUM, world.size)
            one = LLLayout(world.size, 256, unit.nbuffers, unit.accumulators)
            nbytes = one.nbytes if one_block else DEFAULT_SCRATCH_NBYTES
            with pytest.MonkeyPatch.context() as patch:
                patch.setenv("SHMEMAR_KERNEL", kernel.value)
                patch.setenv("SHMEMAR_PROTOCOL", protocol.value)
                patch.setenv("SHMEMAR_SCRATCH_NBYTES", str(nbytes))
                patch.setenv("SHMEMAR_TWO_SHOT_SCRATCH_NBYTES", str(nbytes))
                made[key] = shmemar.init(world, backend=backend, determinism="not_guaranteed")
        return made[key]

    yield pin
    for each in made.values():
        each.close()


@pytest.fixture
def agree(world: MPI.Intracomm) -> Callable[[Any], list[Any]]:
    """Gather a verdict of every rank, so that all ranks fail together."""
    return world.allgather
