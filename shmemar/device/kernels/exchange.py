"""What every kernel over an PacketBuffer does around its exchanges."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from shmemar.device.arithmetic import arithmetic
from shmemar.device.elements import ranks_at_once
from shmemar.device.memory import ld_b32, st_b32
from shmemar.device.packet import LAST_EPOCH, next_epoch
from shmemar.device.packet_buffer import PacketBuffer
from shmemar.device.payload import payload_access
from shmemar.device.registry import device
from shmemar.device.watchdog import Watchdog, was_broken
from shmemar.device.words import u32, u64, word_array
from shmemar.layout import WORD_NBYTES, WORDS_PER_PACKET
from shmemar.spec import WIDE_RANKS, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable

    from shmemar.device.kernels.arguments import KernelArguments
    from shmemar.layout import LLLayout
    from shmemar.spec import KernelSpec

__all__ = ["Exchange", "KernelThread", "chain", "exchange", "of_all_units", "parts"]

EPOCH_NBYTES = WORD_NBYTES
"""Each slot has an epoch word of its own."""


class KernelThread(NamedTuple):
    """What a thread is told once: its call, and who it is.

    Attributes:
        arguments: The launch's.
        rank: The own rank, a constant of the code.
        first_slot: The first of the thread's slots.
        watchdog: Deadline of its polls.
    """

    arguments: KernelArguments
    rank: int
    first_slot: int
    watchdog: Watchdog


class Exchange(NamedTuple):
    """Constants and device functions of a kernel's code; ``me`` is a `KernelThread`.

    Attributes:
        packets: Slots of a thread.
        words: Data words in a packet.
        gap: Words from one data word of a packet to the next.
        step: Words of one rank's packets in an array of several ranks' packets.
        parts: Ranks that are received together: (first, behind the last).
        open_thread: ``open_thread(arguments, rank, thread, block_threads)`` makes ``me``.
        load: ``load(words, at, arguments, packet)`` loads a packet of the input.
        store: ``store(words, at, arguments, packet)`` stores one of the output.
        may_start: ``may_start(me, epoch)`` loads the epochs of the thread's slots, and returns
            False when the rank is broken.
        finish: ``finish(me, epoch)`` stores them.
        advance: ``advance(epoch)`` advances them.
        buffer: ``buffer(me, epoch)`` makes the PacketBuffer at one epoch.
        encode: ``encode(me, words, at)`` encodes the data words of the thread's packets.
        bcast: ``bcast(me, epoch, words)`` sends encoded data words to every peer.
        receive: ``receive(packets, me, epoch, source, end)`` receives the thread's slots from a
            part of the ranks, and empties them. False when it gave up, as of all below.
        put: ``put(packets, at, words)`` puts the own data words where those of a peer would be.
        unpack_all: ``unpack_all(packets, at)`` makes values of a rank's packets.
        combine_all: ``combine_all(left, right)`` reduces two of them.
        pack_all: ``pack_all(result, totals)`` makes data words of what all ranks are reduced to.
        reduce: ``reduce(me, epoch, own, result)`` receives from all ranks and reduces to data
            words; `own` are the own ones.
    """

    packets: int
    words: int
    gap: int
    step: int
    parts: list[tuple[int, int]]
    open_thread: Callable[..., Any]
    load: Callable[..., Any]
    store: Callable[..., Any]
    may_start: Callable[..., Any]
    finish: Callable[..., Any]
    advance: Callable[..., Any]
    buffer: Callable[..., Any]
    encode: Callable[..., Any]
    bcast: Callable[..., Any]
    receive: Callable[..., Any]
    put: Callable[..., Any]
    unpack_all: Callable[..., Any]
    combine_all: Callable[..., Any]
    pack_all: Callable[..., Any]
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
    OWN_WORDS = PACKETS * WORDS
    MACHINE_WORD = 0 if IS_LL else max(WORD_NBYTES, spec.dtype.component_nbytes)
    PITCH_NBYTES, BUFFER_NBYTES = layout.pitch_nbytes, layout.buffer_nbytes
    KERNEL = spec.code
    load_payload, store_payload = payload_access(spec.dtype.component_nbytes, WORDS)
    unpack, combine, finish_values, pack = arithmetic(spec.dtype, spec.op, spec.nranks)

    @device
    def open_thread(
        arguments: KernelArguments, rank: int, thread: int, block_threads: int
    ) -> KernelThread:
        watchdog = Watchdog(
            arguments.broken,
            arguments.record,
            arguments.timeout_ns,
            KERNEL,
            rank,
            thread,
            block_threads,
        )
        return KernelThread(arguments, rank, u32(thread * PACKETS), watchdog)

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
    def epoch_address(me: KernelThread, p: int) -> int:
        return me.arguments.epochs + u64(me.first_slot + p) * u64(EPOCH_NBYTES)

    @device
    def may_start(me: KernelThread, epoch: list[int]) -> bool:
        stops = was_broken(me.watchdog)
        for p in range(PACKETS):
            epoch[p] = ld_b32(epoch_address(me, p))
            # Never true, but it keeps the epoch's load before the branch, beside the others.
            stops = stops | (epoch[p] > u32(LAST_EPOCH))
        # Not later: a thread that gave up has not advanced its epoch, and would send other data
        # under the same flag, to peers that may still be waiting for it.
        return not stops

    @device
    def finish(me: KernelThread, epoch: list[int]) -> None:
        for p in range(PACKETS):
            st_b32(epoch_address(me, p), epoch[p])

    @device
    def advance(epoch: list[int]) -> None:
        for p in range(PACKETS):
            epoch[p] = next_epoch(epoch[p])

    @device
    def buffer(me: KernelThread, epoch: int) -> PacketBuffer:
        return PacketBuffer(
            me.arguments.peers[:NRANKS],
            me.rank,
            PITCH_NBYTES,
            BUFFER_NBYTES,
            MACHINE_WORD,
            epoch,
            me.watchdog,
            me.arguments.peers[NRANKS:],
        )

    @device
    def encode(me: KernelThread, words: list[int], at: int) -> None:
        ll = buffer(me, u32(0))
        for p in range(PACKETS):
            ll.encode(words, at + WORDS * p)

    @device
    def receive(
        packets: list[int], me: KernelThread, epoch: list[int], source: int, end: int
    ) -> bool:
        for p in range(PACKETS):
            ll = buffer(me, epoch[p])
            slot = u32(me.first_slot + p)
            if not ll.recv_packets(slot, packets, WORDS_PER_PACKET * p, STEP, source, end):
                return False
            ll.reset(slot, source, end)
        return True

    @device
    def put(packets: list[int], at: int, words: list[int]) -> None:
        for word in range(OWN_WORDS):
            packets[at + GAP * word] = words[word]

    # Ranks are served in parts, in rank order, each part by a function of its own that calls the
    # next: so all indices are constants of the code, and registers hold one part at a time.

    @device
    def end_of_bcast(me: KernelThread, epoch: list[int], words: list[int]) -> bool:
        return True

    def bcast_part(source: int, end: int, following: Callable[..., bool]) -> Callable[..., bool]:
        SOURCE, END = source, end

        @device
        def bcast_wide(me: KernelThread, epoch: list[int], words: list[int]) -> bool:
            for p in range(PACKETS):
                ll = buffer(me, epoch[p])
                for peer in range(SOURCE, END):
                    if peer != me.rank:
                        ll.send_packet(peer, u32(me.first_slot + p), words, WORDS * p)
            return following(me, epoch, words)

        @device
        def bcast(me: KernelThread, epoch: list[int], words: list[int]) -> bool:
            for p in range(PACKETS):
                buffer(me, epoch[p]).bcast_packet(u32(me.first_slot + p), words, WORDS * p)
            return True

        return bcast_wide if NRANKS >= WIDE_RANKS else bcast

    @device
    def pack_one(total: Any) -> Any:
        return pack(finish_values(total))

    unpack_all, combine_all, pack_all = of_all_units(UNITS, UNIT, GAP, unpack, combine, pack_one)

    @device
    def fold(totals: Any, packets: list[int], start: int, end: int) -> Any:
        for r in range(start, end):
            totals = combine_all(totals, unpack_all(packets, STEP * r))
        return totals

    @device
    def end_of_reduction(
        me: KernelThread, epoch: list[int], own: list[int], result: list[int], totals: Any
    ) -> bool:
        pack_all(result, totals)
        return True

    def reduce_part(source: int, end: int, following: Callable[..., bool]) -> Callable[..., bool]:
        SOURCE, END, LENGTH = source, end, (end - source) * STEP

        @device
        def receive_part(
            packets: list[int], me: KernelThread, epoch: list[int], own: list[int]
        ) -> bool:
            if not receive(packets, me, epoch, SOURCE, END):
                return False
            if SOURCE <= me.rank < END:
                put(packets, STEP * (me.rank - SOURCE), own)
            return True

        @device
        def reduce_first(
            me: KernelThread, epoch: list[int], own: list[int], result: list[int]
        ) -> bool:
            packets = word_array(LENGTH)
            if not receive_part(packets, me, epoch, own):
                return False
            totals = fold(unpack_all(packets, 0), packets, 1, END)
            return following(me, epoch, own, result, totals)

        @device
        def reduce_later(
            me: KernelThread, epoch: list[int], own: list[int], result: list[int], totals: Any
        ) -> bool:
            packets = word_array(LENGTH)
            if not receive_part(packets, me, epoch, own):
                return False
            totals = fold(totals, packets, 0, END - SOURCE)
            return following(me, epoch, own, result, totals)

        return reduce_first if source == 0 else reduce_later

    return Exchange(
        packets=PACKETS,
        words=WORDS,
        gap=GAP,
        step=STEP,
        parts=parts(NRANKS),
        open_thread=open_thread,
        load=load,
        store=store,
        may_start=may_start,
        finish=finish,
        advance=advance,
        buffer=buffer,
        encode=encode,
        bcast=chain(NRANKS, bcast_part, end_of_bcast),
        receive=receive,
        put=put,
        unpack_all=unpack_all,
        combine_all=combine_all,
        pack_all=pack_all,
        reduce=chain(NRANKS, reduce_part, end_of_reduction),
    )


def parts(nranks: int) -> list[tuple[int, int]]:
    """Divide the ranks, in order, into parts that registers hold: (first, behind the last)."""
    size = ranks_at_once(nranks)
    return [(source, min(source + size, nranks)) for source in range(0, nranks, size)]


def chain(
    nranks: int,
    make: Callable[[int, int, Callable[..., bool]], Callable[..., bool]],
    end: Callable[..., bool],
) -> Callable[..., bool]:
    """Make a function for each part, each of which calls the one for the next, and the last `end`.

    Args:
        nranks: Number of ranks.
        make: ``make(first, behind_last, following)`` makes the function of a part.
        end: What is called behind the last part.
    """
    for source, behind in reversed(parts(nranks)):
        end = make(source, behind, end)
    return end


def of_all_units(
    units: int,
    unit_words: int,
    gap: int,
    unpack: Callable[..., Any],
    combine: Callable[..., Any],
    pack: Callable[..., Any],
) -> tuple[Callable[..., Any], Callable[..., Any], Callable[..., Any]]:
    """Make unpack, combine and pack of the one or two units that a thread's packets carry."""
    UNIT, GAP = unit_words, gap

    @device
    def put_words(result: list[int], at: int, words: Any) -> None:
        for word in range(UNIT):
            result[at + word] = words[word]

    if units == 1:

        @device
        def unpack_all(packets: list[int], at: int) -> Any:
            return (unpack(packets, at, GAP),)

        @device
        def combine_all(left: Any, right: Any) -> Any:
            return (combine(left[0], right[0]),)

        @device
        def pack_all(result: list[int], totals: Any) -> None:
            put_words(result, 0, pack(totals[0]))

    else:

        @device
        def unpack_all(packets: list[int], at: int) -> Any:
            return unpack(packets, at, GAP), unpack(packets, at + UNIT * GAP, GAP)

        @device
        def combine_all(left: Any, right: Any) -> Any:
            return combine(left[0], right[0]), combine(left[1], right[1])

        @device
        def pack_all(result: list[int], totals: Any) -> None:
            put_words(result, 0, pack(totals[0]))
            put_words(result, UNIT, pack(totals[1]))

    return unpack_all, combine_all, pack_all
