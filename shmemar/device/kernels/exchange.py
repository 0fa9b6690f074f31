"""What every kernel over an LLBuffer does around its exchanges."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from shmemar.device.arithmetic import arithmetic
from shmemar.device.ll_buffer import LLBuffer
from shmemar.device.memory import ld_b32, st_b32
from shmemar.device.packet import LAST_EPOCH
from shmemar.device.payload import payload_access
from shmemar.device.registry import device
from shmemar.device.watchdog import Watchdog, was_broken
from shmemar.device.words import u32, u64
from shmemar.layout import WORD_NBYTES, WORDS_PER_PACKET
from shmemar.spec import Protocol

if TYPE_CHECKING:
    from collections.abc import Callable

    from shmemar.device.kernels.arguments import KernelArguments
    from shmemar.layout import LLLayout
    from shmemar.spec import KernelSpec

__all__ = ["Exchange", "exchange"]

EPOCH_NBYTES = WORD_NBYTES
"""Each slot has an epoch word of its own."""


class Exchange(NamedTuple):
    """Constants and device functions of a kernel's code.

    Attributes:
        packets: Slots of a thread.
        words: Data words in a packet.
        gap: Words from one data word of a packet to the next.
        step: Words of one rank's packets in an array of all ranks' packets.
        machine_word_nbytes: See `LLBuffer`.
        watchdog: ``watchdog(arguments, rank, thread, block_threads)`` makes the deadline.
        load: ``load(words, at, arguments, packet)`` loads a packet of the input.
        store: ``store(words, at, arguments, packet)`` stores one of the output.
        may_start: ``may_start(arguments, watchdog, epoch, first_slot)`` loads the epochs of the
            thread's slots, and returns False when the rank is broken.
        finish: ``finish(arguments, epoch, first_slot)`` stores them.
        buffer: ``buffer(arguments, rank, epoch, watchdog)`` makes the LLBuffer.
        reduce: ``reduce(result, packets)`` reduces an array of all ranks' packets to data words.
    """

    packets: int
    words: int
    gap: int
    step: int
    machine_word_nbytes: int
    watchdog: Callable[..., Any]
    load: Callable[..., Any]
    store: Callable[..., Any]
    may_start: Callable[..., Any]
    finish: Callable[..., Any]
    buffer: Callable[..., Any]
    reduce: Callable[..., Any]


def exchange(spec: KernelSpec, layout: LLLayout) -> Exchange:
    """Make them for `spec` and `layout`."""
    # Templated arguments.
    IS_LL = spec.protocol is Protocol.LL
    NRANKS = spec.nranks
    PACKETS = spec.packets_per_thread
    WORDS = spec.payload_nbytes // WORD_NBYTES
    GAP = WORDS_PER_PACKET // WORDS
    STEP = PACKETS * WORDS_PER_PACKET
    UNIT = spec.unit_words
    UNITS = PACKETS * WORDS // UNIT
    MACHINE_WORD = 0 if IS_LL else max(WORD_NBYTES, spec.dtype.component_nbytes)
    PITCH_NBYTES, BUFFER_NBYTES = layout.pitch_nbytes, layout.buffer_nbytes
    KERNEL = spec.code
    load_payload, store_payload = payload_access(spec.dtype.component_nbytes, WORDS)
    unpack, combine, pack = arithmetic(spec.dtype, spec.op)

    @device
    def watchdog(
        arguments: KernelArguments, rank: int, thread: int, block_threads: int
    ) -> Watchdog:
        return Watchdog(
            arguments.broken,
            arguments.record,
            arguments.timeout_ns,
            KERNEL,
            rank,
            thread,
            block_threads,
        )

    @device
    def load(words: list[int], at: int, arguments: KernelArguments, packet: int) -> None:
        load_payload(
            words, at, arguments.source, packet, arguments.source_vectors, arguments.ncomponents
        )

    @device
    def store(words: list[int], at: int, arguments: KernelArguments, packet: int) -> None:
        store_payload(
            words,
            at,
            arguments.destination,
            packet,
            arguments.destination_vectors,
            arguments.ncomponents,
        )

    @device
    def may_start(
        arguments: KernelArguments, watchdog: Watchdog, epoch: list[int], first_slot: int
    ) -> bool:
        stops = was_broken(watchdog)
        for p in range(PACKETS):
            epoch[p] = ld_b32(arguments.epochs + u64(first_slot + p) * u64(EPOCH_NBYTES))
            # Never true, but it keeps the epoch's load before the branch, beside the others.
            stops = stops | (epoch[p] > u32(LAST_EPOCH))
        # Not later: a thread that gave up has not advanced its epoch, and would send other data
        # under the same flag, to peers that may still be waiting for it.
        return not stops

    @device
    def finish(arguments: KernelArguments, epoch: list[int], first_slot: int) -> None:
        for p in range(PACKETS):
            st_b32(arguments.epochs + u64(first_slot + p) * u64(EPOCH_NBYTES), epoch[p])

    @device
    def buffer(arguments: KernelArguments, rank: int, epoch: int, watchdog: Watchdog) -> LLBuffer:
        return LLBuffer(
            arguments.peers, rank, PITCH_NBYTES, BUFFER_NBYTES, MACHINE_WORD, epoch, watchdog
        )

    @device
    def reduce(result: list[int], packets: list[int]) -> None:
        for unit in range(UNITS):
            at = unit * UNIT * GAP
            total = unpack(packets, at, GAP)
            for r in range(1, NRANKS):
                total = combine(total, unpack(packets, STEP * r + at, GAP))
            words = pack(total)
            for i in range(UNIT):
                result[unit * UNIT + i] = words[i]

    return Exchange(
        PACKETS,
        WORDS,
        GAP,
        STEP,
        MACHINE_WORD,
        watchdog,
        load,
        store,
        may_start,
        finish,
        buffer,
        reduce,
    )
