"""What tests under mpirun share. Every rank runs every test; a verdict is one for all ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from mpi4py import MPI

import shmemar
from shmemar.host.arrays import Arrays

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


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
    """A communicator whose scratch holds one block, so that little data takes many passes."""
    one_block = 2 * world.size * 256 * 16
    with shmemar.init(world, backend=backend, scratch_nbytes=one_block) as made:
        yield made


@pytest.fixture
def agree(world: MPI.Intracomm) -> Callable[[Any], list[Any]]:
    """Gather a verdict of every rank, so that all ranks fail together."""
    return world.allgather
