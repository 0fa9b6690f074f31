"""The main job with a wrong element planted on rank 0: it must be counted and end non-zero."""

from __future__ import annotations

import sys
from typing import Any

from shmemar.__main__ import main
from shmemar.host.communicator import Communicator

_allreduce = Communicator.allreduce


def wrong_by_one(self: Communicator, x: Any, **arguments: Any) -> Any:
    out = _allreduce(self, x, **arguments)
    if self.rank == 0 and out.size == 4:
        out[-1] += 1
    return out


Communicator.allreduce = wrong_by_one  # type: ignore[method-assign]
sys.exit(main(["allreduce", "-b", "8", "-e", "32", "-n", "3", "-w", "0", "--backend", "emulated"]))
