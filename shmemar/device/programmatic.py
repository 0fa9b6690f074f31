"""What a kernel does first under programmatic dependent launch.

Such a launch starts while the kernel before it on the stream still runs, once all blocks of that
have triggered or ended: the launch's own time then passes behind that kernel. Until
`wait_for_launch` returns nothing of that kernel may be relied on, so a kernel of ours waits before
it reads, resets or stores anything, and triggers directly behind that. What overlaps is the launch
alone.

Source: PTX ISA 8.x, ``griddepcontrol``.
"""

from __future__ import annotations

from shmemar.device.interpreter import current
from shmemar.device.registry import device

__all__ = ["begin", "trigger", "wait_for_launch"]


def wait_for_launch() -> None:
    """Wait until the launch before this one has ended, and see all that it did."""
    current().wait_for_launch()


def trigger() -> None:
    """Let the next launch start, once all threads of this one have said so or ended."""
    current().trigger()


@device
def begin() -> None:
    """Wait, and only then let the next one in."""
    wait_for_launch()
    trigger()
