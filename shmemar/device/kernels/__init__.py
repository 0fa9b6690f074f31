"""Kernels, one algorithm a file, and the registry that finds them."""

from __future__ import annotations

from functools import cache
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeAlias

from shmemar.device.kernels import (
    arguments,
    barrier,
    barrier_one_shot,
    barrier_two_shot,
    broadcast,
    ll128_atomic,
    one_shot,
    two_shot,
    user,
)
from shmemar.device.kernels.arguments import KernelArguments
from shmemar.device.kernels.user import UserArguments
from shmemar.device.meetings import why_copied
from shmemar.errors import ShmemarError
from shmemar.spec import Kernel
from shmemar.user_spec import UserKernelSpec

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from shmemar.layout import AnyLayout
    from shmemar.user_spec import AnyKernelSpec

__all__ = ["BUILDERS", "AnyArguments", "KernelArguments", "UserArguments", "build", "numba_type"]

BUILDERS: Mapping[Kernel, Callable[..., Callable[..., Any]]] = MappingProxyType(
    {
        Kernel.ONE_SHOT: one_shot.build,
        Kernel.TWO_SHOT: two_shot.build,
        Kernel.BROADCAST: broadcast.build,
        Kernel.LL128_ATOMIC: ll128_atomic.build,
        Kernel.BARRIER_ONE_SHOT: barrier_one_shot.build,
        Kernel.BARRIER_TWO_SHOT: barrier_two_shot.build,
        Kernel.BARRIER: barrier.build,
    }
)


AnyArguments: TypeAlias = KernelArguments | UserArguments
"""What a launch passes."""


@cache
def build(spec: AnyKernelSpec, layout: AnyLayout, *, looped: bool = False) -> Callable[..., Any]:
    """Return the body of the kernel that `spec` names, for scratch laid out as `layout` says.

    The same one each time: its device functions are registered, and so kept, for good.

    Args:
        spec: The kernel.
        layout: Layout of its scratch.
        looped: True when one launch may run the body several times, so that no kernel boundary
            stands between: sentinel packets then need a fence in each.

    Raises:
        ShmemarError: This Python has copied a call at which threads meet.
    """
    if isinstance(spec, UserKernelSpec):
        return user.build(spec, spec.buffer.layout)
    body = BUILDERS[spec.kernel](spec, layout, looped=looped)
    why = why_copied(body)
    if why is not None:
        raise ShmemarError(f"{spec.name} can't run on this Python: {why}.")
    return body


def numba_type(spec: AnyKernelSpec) -> Any:
    """The type of a kernel's arguments, to numba's compilers."""
    if isinstance(spec, UserKernelSpec):
        return user.numba_type(spec)
    return arguments.numba_type(spec)
