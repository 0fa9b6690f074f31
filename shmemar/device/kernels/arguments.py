"""What a launch passes to a kernel: written once, for the kernels, both compilers and the host."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from shmemar.layout import packet_count, vector_packets

if TYPE_CHECKING:
    from shmemar.spec import KernelSpec

__all__ = ["KernelArguments", "numba_type"]


class KernelArguments(NamedTuple):
    """Parameters that change from call to call, or that a rank has for itself. All of 64 bits.

    What every thread reads stands first: a launch finds the cache of constants cold, and the first
    touch of each 64 bytes of parameters stands in the way of the first store.

    Attributes:
        peers: Address of the region on each rank, in rank order; with `KernelSpec.multicast` its
            multicast address behind them.
        source: Address of the input.
        destination: Address of the output.
        share: Packets that are divided among threads: all, or of a two-shot kernel those that one
            rank reduces; whole groups of a thread's packets.
        source_vectors: Packets whose payload one access loads (`layout.vector_packets`).
        destination_vectors: Packets whose payload one access stores.
        epochs: Address of the rank's epoch words.
        broken: Address of the rank's broken word.
        timeout_ns: Deadline of a spin in nanoseconds; 0 for none.
        npackets: Packets of the message, less than 2**32 - the threads of the launch.
        ncomponents: Components of the message: elements, twice that for complex ones.
        root: The rank whose data a broadcast sends.
        record: Address of the rank's failure record.
    """

    peers: tuple[int, ...]
    source: int
    destination: int
    share: int
    source_vectors: int
    destination_vectors: int
    epochs: int
    broken: int
    timeout_ns: int
    npackets: int
    ncomponents: int
    root: int
    record: int

    @classmethod
    def of_message(
        cls,
        spec: KernelSpec,
        source: int,
        destination: int,
        count: int,
        *,
        root: int = 0,
        **others: Any,
    ) -> KernelArguments:
        """Fill in what follows from where a message of `count` elements lies."""
        nbytes = count * spec.dtype.itemsize
        return cls(
            source=source,
            destination=destination,
            npackets=packet_count(nbytes, spec.payload_nbytes),
            share=spec.group_count(nbytes) * spec.packets_per_thread,
            source_vectors=vector_packets(source, nbytes, spec.payload_nbytes),
            destination_vectors=vector_packets(destination, nbytes, spec.payload_nbytes),
            ncomponents=count * spec.dtype.components,
            root=root,
            **others,
        )

    def typed(self) -> KernelArguments:
        """The same with numpy's scalars, of the type that `numba_type` says."""
        word: Any = np.uint64
        return KernelArguments(tuple(map(word, self.peers)), *map(word, self[1:]))

    def flat(self) -> list[int]:
        """The parameters one after the other, as a GPU's launch takes them."""
        return [*self.peers, *self[1:]]


def numba_type(spec: KernelSpec) -> Any:
    """The type of a kernel's `KernelArguments`, to numba's compilers."""
    from numba import types

    naddresses = spec.nranks + spec.multicast
    scalars = [types.uint64] * (len(KernelArguments._fields) - 1)
    return types.NamedTuple((types.UniTuple(types.uint64, naddresses), *scalars), KernelArguments)
