"""What the barrier kernels do between their barriers: packets staged in symmetric memory.

A packet here is 16 bytes of data and nothing else: that it has arrived is what a barrier says. Weak
stores and loads of 16 bytes move it; those of peers' data stand behind a barrier.

In a pass a block takes C packets of what its launch has, and puts packet j of them to its slot j of
a place (:class:`shmemar.layout.BarrierLayout`)::

    packets of block b in pass p    bB + jT + [0, B) + pCT/B    for j = 0 ... C/B - 1
    their slots                     [jB, jB + B)

for blocks of B threads and launches of T. The thread that stages a packet is the one that stores to
its place in the output, so input and output may be one array. All ranks launch the same grid, so
block b works on the same packets on each, and needs to meet nobody but the peers' blocks b.

Where the threads of a rank run one after another, the first of a block takes all of its packets.

With multicast a packet is published by one store to all ranks, and read at home; and what all ranks
have staged in one place is loaded as its sum, which the switch makes in an order of its own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from shmemar.device.arithmetic import arithmetic
from shmemar.device.groups import share_work
from shmemar.device.kernels.exchange import chain, of_all_units
from shmemar.device.memory import (
    ld_no_allocate_v4_b32,
    multimem_ld_reduce_add_v4_bf16x2,
    multimem_ld_reduce_add_v4_f16x2,
    multimem_ld_reduce_add_v4_f32,
    multimem_st_v4_f32,
    st_v4_b32,
)
from shmemar.device.payload import payload_access
from shmemar.device.registry import device
from shmemar.device.words import u32, u64, word_array
from shmemar.layout import WORDS_PER_PACKET, staging_offset
from shmemar.spec import Protocol

if TYPE_CHECKING:
    from collections.abc import Callable

    from shmemar.device.barrier import BlockThread
    from shmemar.layout import BarrierLayout
    from shmemar.spec import KernelSpec

__all__ = ["Staging", "staging"]

_LOADED_SUMS = {
    "float32": multimem_ld_reduce_add_v4_f32,
    "float16": multimem_ld_reduce_add_v4_f16x2,
    "bfloat16": multimem_ld_reduce_add_v4_bf16x2,
}
"""What loads the sum of all ranks' packets, by the name of the type."""

device(staging_offset)


class Staging(NamedTuple):
    """Device functions of a kernel's code; ``me`` is a `BlockThread`.

    Attributes:
        step: ``step()`` is how many slots further a thread goes on in its block's part of a place;
            it begins with that of its own place in the block.
        packet_at: ``packet_at(base, nthreads, slot)`` is the packet that a block, whose first one
            in this pass is `base`, puts to a slot.
        next_base: ``next_base(base, nthreads)`` is its first packet in the next pass.
        at: ``at(me, place, slot)`` is the byte offset of a slot in any rank's region.
        load_input: ``load_input(me, words, at, packet)`` loads a packet of the input.
        store_output: ``store_output(me, words, at, packet)`` stores one of the output.
        put: ``put(region, at, words, word)`` stores a packet to a rank's region.
        publish: ``publish(me, place, slot, words)`` puts a packet where all ranks will read it: to
            `place` at home, or, to push or with multicast, to the own one of the places behind
            `place` on every rank.
        get_part: made by ``get_part(first, behind)``: ``get(me, place, slot, packets)`` loads what
            those ranks have published, to four words each of `packets`.
        reduce: ``reduce(me, place, slot, result)`` loads it of all ranks and reduces it to data
            words, in rank order; with multicast what all ranks have in `place`, in any order.
    """

    step: Callable[..., int]
    packet_at: Callable[..., int]
    next_base: Callable[..., int]
    at: Callable[..., int]
    load_input: Callable[..., None]
    store_output: Callable[..., None]
    put: Callable[..., None]
    publish: Callable[..., bool]
    get_part: Callable[..., Callable[..., None]]
    reduce: Callable[..., bool]


def staging(spec: KernelSpec, layout: BarrierLayout) -> Staging:
    """Make them for `spec` and `layout`."""
    # Templated arguments.
    NRANKS, BLOCK_THREADS = spec.nranks, layout.block_threads
    FLAGS, PITCH = layout.flags_nbytes, layout.pitch_nbytes
    BLOCK_SLOTS, ROUNDS = layout.block_slots, layout.block_slots // layout.block_threads
    load_payload, store_payload = payload_access(spec.dtype.component_nbytes, WORDS_PER_PACKET)
    unpack, combine, finish_values, pack = arithmetic(spec.dtype, spec.op, spec.nranks)

    @device
    def step() -> int:
        return BLOCK_THREADS if share_work() else 1

    @device
    def packet_at(base: int, nthreads: int, slot: int) -> int:
        number = u32(slot)
        return u32(
            u32(base) + number // u32(BLOCK_THREADS) * u32(nthreads) + number % u32(BLOCK_THREADS)
        )

    @device
    def next_base(base: int, nthreads: int) -> int:
        return u32(u32(base) + u32(ROUNDS) * u32(nthreads))

    @device
    def at(me: BlockThread, place: int, slot: int) -> int:
        return staging_offset(place, me.block, slot, FLAGS, PITCH, BLOCK_SLOTS)

    @device
    def load_input(me: BlockThread, words: list[int], at: int, packet: int) -> None:
        arguments = me.arguments
        load_payload(
            words, at, arguments.source, packet, arguments.source_vectors, arguments.ncomponents
        )

    @device
    def store_output(me: BlockThread, words: list[int], at: int, packet: int) -> None:
        arguments = me.arguments
        store_payload(
            words,
            at,
            arguments.destination,
            packet,
            arguments.destination_vectors,
            arguments.ncomponents,
        )

    @device
    def put(region: int, at: int, words: list[int], word: int) -> None:
        st_v4_b32(region + u64(at), words[word], words[word + 1], words[word + 2], words[word + 3])

    @device
    def keep(me: BlockThread, place: int, slot: int, words: list[int]) -> bool:
        put(me.arguments.peers[me.rank], at(me, place, slot), words, 0)
        return True

    @device
    def end_of_push(me: BlockThread, place: int, slot: int, words: list[int]) -> bool:
        return True

    def push_part(source: int, end: int, following: Callable[..., bool]) -> Callable[..., bool]:
        SOURCE, COUNT = source, end - source

        @device
        def push(me: BlockThread, place: int, slot: int, words: list[int]) -> bool:
            for turn in range(COUNT):
                # Each rank begins with another one, or all would store to the same at once.
                rank = SOURCE + (turn + me.rank) % COUNT
                put(me.arguments.peers[rank], at(me, place + me.rank, slot), words, 0)
            return following(me, place, slot, words)

        return push

    @device
    def address_at_peer(me: BlockThread, place: int, slot: int, source: int) -> int:
        return me.arguments.peers[source] + u64(at(me, place, slot))

    @device
    def address_at_home(me: BlockThread, place: int, slot: int, source: int) -> int:
        return me.arguments.peers[me.rank] + u64(at(me, place + source, slot))

    is_push = spec.protocol is Protocol.PUSH
    address_of = address_at_home if is_push or spec.multicast else address_at_peer

    def get_part(source: int, end: int) -> Callable[..., None]:
        SOURCE, END = source, end

        @device
        def get(me: BlockThread, place: int, slot: int, packets: list[int]) -> None:
            for rank in range(SOURCE, END):
                words = ld_no_allocate_v4_b32(address_of(me, place, slot, rank))
                for word in range(WORDS_PER_PACKET):
                    packets[WORDS_PER_PACKET * (rank - SOURCE) + word] = words[word]

        return get

    @device
    def pack_one(total: Any) -> Any:
        return pack(finish_values(total))

    unpack_all, combine_all, pack_all = of_all_units(
        WORDS_PER_PACKET // spec.unit_words, spec.unit_words, 1, unpack, combine, pack_one
    )

    @device
    def fold(totals: Any, packets: list[int], start: int, end: int) -> Any:
        for r in range(start, end):
            totals = combine_all(totals, unpack_all(packets, WORDS_PER_PACKET * r))
        return totals

    @device
    def end_of_reduction(
        me: BlockThread, place: int, slot: int, result: list[int], totals: Any
    ) -> bool:
        pack_all(result, totals)
        return True

    def reduce_part(source: int, end: int, following: Callable[..., bool]) -> Callable[..., bool]:
        COUNT = end - source
        LENGTH = COUNT * WORDS_PER_PACKET
        get = get_part(source, end)

        @device
        def reduce_first(me: BlockThread, place: int, slot: int, result: list[int]) -> bool:
            packets = word_array(LENGTH)
            get(me, place, slot, packets)
            totals = fold(unpack_all(packets, 0), packets, 1, COUNT)
            return following(me, place, slot, result, totals)

        @device
        def reduce_later(
            me: BlockThread, place: int, slot: int, result: list[int], totals: Any
        ) -> bool:
            packets = word_array(LENGTH)
            get(me, place, slot, packets)
            totals = fold(totals, packets, 0, COUNT)
            return following(me, place, slot, result, totals)

        return reduce_first if source == 0 else reduce_later

    load_sum = _LOADED_SUMS.get(spec.dtype.name, multimem_ld_reduce_add_v4_f32)

    @device
    def publish_to_all(me: BlockThread, place: int, slot: int, words: list[int]) -> bool:
        address = me.arguments.peers[NRANKS] + u64(at(me, place + me.rank, slot))
        multimem_st_v4_f32(address, words[0], words[1], words[2], words[3])
        return True

    @device
    def reduce_by_load(me: BlockThread, place: int, slot: int, result: list[int]) -> bool:
        packet = load_sum(me.arguments.peers[NRANKS] + u64(at(me, place, slot)))
        for word in range(WORDS_PER_PACKET):
            result[word] = packet[word]
        pack_all(result, unpack_all(result, 0))
        return True

    publish = chain(NRANKS, push_part, end_of_push) if is_push else keep
    reduce = chain(NRANKS, reduce_part, end_of_reduction)
    if spec.multicast:
        publish, reduce = publish_to_all, reduce_by_load

    return Staging(
        step=step,
        packet_at=packet_at,
        next_base=next_base,
        at=at,
        load_input=load_input,
        store_output=store_output,
        put=put,
        publish=publish,
        get_part=get_part,
        reduce=reduce,
    )
