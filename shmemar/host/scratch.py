"""The memory behind a kernel and its protocol: a symmetric region and the epoch words."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from shmemar.device.packet import SENTINEL
from shmemar.errors import CollectiveTimeoutError
from shmemar.spec import Kernel, Protocol

if TYPE_CHECKING:
    from shmemar.config import Config
    from shmemar.host.bootstrap import Bootstrap
    from shmemar.host.contract import Memory, Runtime
    from shmemar.host.heap import SymmetricHeap
    from shmemar.layout import LLLayout
    from shmemar.spec import KernelSpec

__all__ = ["Scratch", "layout_for", "make_scratch"]


@dataclass(frozen=True)
class Scratch:
    """Region and epoch words of one layout. Kernels of different layouts must not share them.

    Attributes:
        layout: Where things lie.
        region: Symmetric memory for packets.
        epochs: The rank's own epoch words.
    """

    layout: LLLayout
    region: Memory
    epochs: Memory


def layout_for(spec: KernelSpec, config: Config) -> LLLayout:
    """Lay out the scratch of a kernel and protocol, as large as it is configured.

    Raises:
        ConfigurationError: That is too small for the number of ranks.
    """
    has_shares = spec.kernel in (Kernel.TWO_SHOT, Kernel.LL128_ATOMIC)
    return spec.fit_layout(config.two_shot_scratch_nbytes if has_shares else config.scratch_nbytes)


def make_scratch(
    layout: LLLayout,
    protocol: Protocol,
    bootstrap: Bootstrap,
    heap: SymmetricHeap,
    runtime: Runtime,
) -> Scratch:
    """Allocate it, empty. Collective.

    Raises:
        BackendUnavailableError: There is no room for it; on every rank.
    """
    word = SENTINEL if protocol is Protocol.SENTINEL else 0
    region = heap.allocate(layout.nbytes, word, layout.nbytes - layout.packets_nbytes)
    try:
        epochs = bootstrap.together(
            lambda: runtime.allocate_private(layout.epochs_nbytes), "allocate epoch words"
        )
    except CollectiveTimeoutError:
        raise
    except Exception:
        heap.free(region)  # all ranks are here
        raise
    return Scratch(layout, region, epochs)
