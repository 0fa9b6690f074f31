"""shmemar: GPU collectives in Python, near the speed of light of the hardware.

    from mpi4py import MPI
    import shmemar

    with shmemar.init(MPI.COMM_WORLD) as comm:
        comm.allreduce(x, out=y, op="sum")

Importing the package needs neither MPI nor a GPU, and does no work.
"""

from __future__ import annotations

import time
from importlib import import_module
from typing import TYPE_CHECKING, Any

_IMPORTED_NS = time.time_ns()
"""What has changed on disk since then is not what runs."""

if TYPE_CHECKING:
    from shmemar.dtypes import ReduceOp as ReduceOp
    from shmemar.errors import (
        ArgumentError as ArgumentError,
    )
    from shmemar.errors import (
        ArgumentTypeError as ArgumentTypeError,
    )
    from shmemar.errors import (
        BackendUnavailableError as BackendUnavailableError,
    )
    from shmemar.errors import (
        ClosedError as ClosedError,
    )
    from shmemar.errors import (
        CollectiveTimeoutError as CollectiveTimeoutError,
    )
    from shmemar.errors import (
        ConfigurationError as ConfigurationError,
    )
    from shmemar.errors import (
        DeviceError as DeviceError,
    )
    from shmemar.errors import (
        MismatchError as MismatchError,
    )
    from shmemar.errors import (
        ShmemarError as ShmemarError,
    )
    from shmemar.host.checker import check_kernel as check_kernel
    from shmemar.host.communicator import Communicator as Communicator
    from shmemar.host.startup import init as init
    from shmemar.host.symmetric import SymmetricArray as SymmetricArray
    from shmemar.host.user_kernels import LLScratch as LLScratch
    from shmemar.user_spec import scratch_nbytes as scratch_nbytes

__all__ = [
    "ArgumentError",
    "ArgumentTypeError",
    "BackendUnavailableError",
    "ClosedError",
    "CollectiveTimeoutError",
    "Communicator",
    "ConfigurationError",
    "DeviceError",
    "LLScratch",
    "MismatchError",
    "ReduceOp",
    "ShmemarError",
    "SymmetricArray",
    "__version__",
    "check_kernel",
    "init",
    "scratch_nbytes",
]

__version__ = "0.1.0"

_HOMES = {
    "Communicator": "shmemar.host.communicator",
    "check_kernel": "shmemar.host.checker",
    "init": "shmemar.host.startup",
    "LLScratch": "shmemar.host.user_kernels",
    "ReduceOp": "shmemar.dtypes",
    "SymmetricArray": "shmemar.host.symmetric",
    "scratch_nbytes": "shmemar.user_spec",
}


def __getattr__(name: str) -> Any:
    """Import a public name when it is first asked for."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_HOMES.get(name, "shmemar.errors")), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
