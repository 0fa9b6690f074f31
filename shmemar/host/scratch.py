"""The memory behind a kernel and its protocol: a symmetric region and the epoch words."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING
from typing import Protocol as ProtocolClass

from shmemar.device.packet import SENTINEL
from shmemar.errors import CollectiveTimeoutError
from shmemar.layout import BarrierLayout, StagingLayout
from shmemar.spec import Kernel, Protocol

if TYPE_CHECKING:
    from shmemar.host.bootstrap import Bootstrap
    from shmemar.host.contract import Memory, Runtime
    from shmemar.host.heap import SymmetricHeap
    from shmemar.layout import AnyLayout
    from shmemar.spec import KernelSpec

__all__ = ["Scratch", "layout_for", "make_scratch"]


@dataclass(frozen=True)
class Scratch:
    """Region and epoch words of one layout. Kernels of different layouts must not share them.

    Attributes:
        layout: Where things lie.
        region: Symmetric memory for packets, or for flags and staged data.
        epochs: The rank's own epoch words.
    """

    layout: AnyLayout
    region: Memory
    epochs: Memory


class Sizes(ProtocolClass):
    """How large scratch is, as `Config` says."""

    @property
    def scratch_nbytes(self) -> int:
        """Bytes on each rank."""

    @property
    def two_shot_scratch_nbytes(self) -> int:
        """The same of two-shot kernels, and of the stock collective."""


def layout_for(spec: KernelSpec, config: Sizes) -> AnyLayout:
    """Lay out the scratch of a kernel and protocol, as large as it is configured.

    Raises:
        ConfigurationError: That is too small for the number of ranks.
    """
    if spec.kernel is Kernel.STOCK:
        return StagingLayout(config.two_shot_scratch_nbytes)
    nbytes = config.two_shot_scratch_nbytes if spec.kernel.is_two_shot else config.scratch_nbytes
    if spec.kernel.has_barriers:
        return BarrierLayout.fit(spec.nranks, spec.nplaces, nbytes)
    return spec.fit_layout(nbytes)


def make_scratch(
    layout: AnyLayout,
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
    region = heap.allocate(layout.nbytes, word, layout.zeroed_nbytes)
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
