"""Kernels, one algorithm a file, and the registry that finds them."""

from __future__ import annotations

from functools import cache
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from shmemar.device.kernels import broadcast, one_shot, two_shot
from shmemar.device.kernels.arguments import KernelArguments, numba_type
from shmemar.spec import Kernel

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from shmemar.layout import LLLayout
    from shmemar.spec import KernelSpec

__all__ = ["BUILDERS", "KernelArguments", "build", "numba_type"]

BUILDERS: Mapping[Kernel, Callable[..., Callable[..., Any]]] = MappingProxyType(
    {
        Kernel.ONE_SHOT: one_shot.build,
        Kernel.TWO_SHOT: two_shot.build,
        Kernel.BROADCAST: broadcast.build,
    }
)


@cache
def build(spec: KernelSpec, layout: LLLayout, *, looped: bool = False) -> Callable[..., Any]:
    """Return the body of the kernel that `spec` names, for scratch laid out as `layout` says.

    The same one each time: its device functions are registered, and so kept, for good.

    Args:
        spec: The kernel.
        layout: Layout of its scratch.
        looped: True when one launch may run the body several times, so that no kernel boundary
            stands between: sentinel packets then need a fence in each.
    """
    return BUILDERS[spec.kernel](spec, layout, looped=looped)
