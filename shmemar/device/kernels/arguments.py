"""What a launch passes to a kernel: written once, for the kernels, both compilers and the host."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

__all__ = ["KernelArguments", "numba_type"]


class KernelArguments(NamedTuple):
    """Parameters that change from call to call, or that a rank has for itself. All of 64 bits.

    Attributes:
        peers: Address of the region on each rank, in rank order.
        source: Address of the input.
        destination: Address of the output.
        ncomponents: Components of the input: elements, twice that for complex ones.
        epochs: Address of the rank's epoch words.
        broken: Address of the rank's broken word.
        record: Address of the rank's failure record.
        timeout_ns: Deadline of a spin in nanoseconds; 0 for none.
    """

    peers: tuple[int, ...]
    source: int
    destination: int
    ncomponents: int
    epochs: int
    broken: int
    record: int
    timeout_ns: int

    def typed(self) -> KernelArguments:
        """The same with numpy's scalars, of the types that `numba_type` says."""
        scalars = [_SCALARS[name](value) for name, value in zip(self._fields, self, strict=True)]
        return KernelArguments(*scalars)

    def flat(self) -> list[int]:
        """The parameters one after the other, as a GPU's launch takes them."""
        return [*self.peers, *self[1:]]


def _addresses(values: tuple[int, ...]) -> tuple[np.uint64, ...]:
    return tuple(map(np.uint64, values))


_SCALARS: dict[str, Any] = {
    **dict.fromkeys(KernelArguments._fields, np.uint64),
    "peers": _addresses,
    "ncomponents": np.int64,
}


def numba_type(nranks: int) -> Any:
    """The type of `KernelArguments` for a number of ranks, to numba's compilers."""
    from numba import types

    fields = [
        types.int64 if _SCALARS[name] is np.int64 else types.uint64
        for name in KernelArguments._fields[1:]
    ]
    return types.NamedTuple((types.UniTuple(types.uint64, nranks), *fields), KernelArguments)
