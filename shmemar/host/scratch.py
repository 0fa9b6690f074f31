"""The memory behind one kernel family: its symmetric region and its epoch words."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shmemar.layout import LLLayout

if TYPE_CHECKING:
    from shmemar.host.bootstrap import Bootstrap
    from shmemar.host.contract import Memory, Runtime
    from shmemar.host.heap import SymmetricHeap

__all__ = ["LLScratch"]


class LLScratch:
    """Region and epoch words of an LL layout. Collective.

    Attributes:
        layout: Where things lie.
        region: Symmetric memory for packets.
        epochs: The rank's own epoch words.

    Raises:
        ConfigurationError: `nbytes` is too small for the number of ranks.
    """

    def __init__(
        self, bootstrap: Bootstrap, heap: SymmetricHeap, runtime: Runtime, nbytes: int
    ) -> None:
        self.layout = LLLayout.fit(bootstrap.size, nbytes)
        self.region: Memory = heap.allocate(self.layout.nbytes)
        self.epochs: Memory = bootstrap.together(
            lambda: runtime.allocate_private(self.layout.epochs_nbytes), "allocate epoch words"
        )
