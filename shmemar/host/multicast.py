"""Whether a communicator may use NVLink multicast: asked of each rank, decided alike on all."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from shmemar.host.ranks import name_ranks
from shmemar.spec import Backend

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["DISABLE_NVLS", "MulticastFacts", "is_switched_on", "why_no_multicast"]

DISABLE_NVLS = "NVSHMEM_DISABLE_NVLS"
"""NVSHMEM's variable that keeps it from multicast, which goes before ``SHMEMAR_MULTICAST``."""


@dataclass(frozen=True)
class MulticastFacts:
    """What a rank tells the others.

    Attributes:
        backend: Where kernels run.
        gpu: What tells its GPU from others, such as the uuid.
        is_supported: Whether the driver says that the GPU has multicast; None where it is too old
            to say.
        disable_nvls: Text of ``NVSHMEM_DISABLE_NVLS``; None where it is not set.
        njob: Processes of the NVSHMEM job, to all of which a multicast address stores.
        trouble: Why NVSHMEM gave no multicast address; empty where it gave one.
    """

    backend: Backend
    gpu: str = ""
    is_supported: bool | None = None
    disable_nvls: str | None = None
    njob: int = 0
    trouble: str = ""


def is_switched_on(text: str | None) -> bool:
    """Return whether NVSHMEM takes a variable of this text, None if it is not set, for true.

    As it reads it: set is true, also to nothing, but for what begins as 0, no or false do.
    """
    return text is not None and text[:1] not in ("0", "n", "N", "f", "F")


def why_no_multicast(facts: Sequence[MulticastFacts]) -> str | None:
    """Say why ranks can't use multicast, in words that fit behind a colon; None where they can.

    Args:
        facts: Of each rank, in rank order. The answer is a function of these alone.
    """
    others = [rank for rank, each in enumerate(facts) if each.backend is not Backend.NVSHMEM]
    if others:
        return "the emulated backend has none; it needs GPUs and backend 'nvshmem'"
    if len(facts) < 2:
        return "there is one rank, which has nobody to store to"
    disabled = [rank for rank, each in enumerate(facts) if is_switched_on(each.disable_nvls)]
    if disabled:
        text = facts[disabled[0]].disable_nvls
        return (
            f"{DISABLE_NVLS} is {text!r} on {name_ranks(disabled)}; unset it where multicast is "
            "safe to use"
        )
    without = [rank for rank, each in enumerate(facts) if not each.is_supported]
    if without:
        says = "says no" if facts[without[0]].is_supported is False else "does not say"
        return f"the driver {says} when asked whether the GPU of {name_ranks(without)} has it"
    crowd = max(Counter(each.gpu for each in facts).values())
    if crowd > 1:
        return f"{crowd} ranks share a GPU; it needs a GPU for each rank"
    if facts[0].njob != len(facts):
        return (
            f"the communicator has {len(facts)} ranks, and NVSHMEM runs with {facts[0].njob}, to "
            "all of which a multicast address would store; it needs a communicator of all ranks"
        )
    troubled = [rank for rank, each in enumerate(facts) if each.trouble]
    if troubled:
        return f"{facts[troubled[0]].trouble} ({name_ranks(troubled)})"
    return None
