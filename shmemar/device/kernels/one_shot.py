"""One-shot all-reduce with LL packets: every rank sends all of its data to every peer.

Algorithm, for each thread t of a grid of T, on every rank alike:

1. Load the packet's worth of input that is thread t's, and slot t's epoch word.
2. Advance the epoch; store the packet to slot t on every peer; load the next input, if any.
3. Poll slot t of every peer's packets until all flags show the epoch.
4. Reduce in rank order 0 ... N-1, the own data from registers; store to the output.
5. Go on with the group of packets T further, if there is one. Store the epoch word.

Layout: :mod:`shmemar.layout`. Half-open bytes of the region on the receiving rank::

    [half * H + source * P + slot * 16, + 16)    one packet; half = epoch & 1, slot = thread

    A complex128 product takes two packets a thread: thread t owns slots 2t and 2t + 1, each with
    its own epoch word, so a call of one kind may follow one of the other on the same region.

Requires: the same arguments on all ranks, but for addresses and what they hold; a grid of no more
threads than slots; all blocks resident at once; launches of one communicator in the same order on
all ranks, one after another.

Reuse is safe because a thread writes epoch e + 2 to a half only after it has received every peer's
e + 1, which the same slot's owner there sent after it had read all of e; between two launches the
kernel boundary stands in for "the same thread".

Cost: N - 1 remote stores of 16 bytes and one round of polls a packet; no fence, no barrier.

Source: the one-shot all-reduce of NCCL's symmetric LL kernels, and "Every µs Matters: Achieving
Near Speed-of-Light Latency in GPU Collectives" (2026).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from shmemar.device.arithmetic import arithmetic
from shmemar.device.ll_buffer import LLBuffer
from shmemar.device.memory import ld_b32, st_b32
from shmemar.device.packet import LAST_EPOCH
from shmemar.device.payload import payload_access
from shmemar.device.registry import device
from shmemar.device.watchdog import Watchdog, was_broken
from shmemar.device.words import u32, u64, word_array
from shmemar.layout import WORD_NBYTES, WORDS_PER_PACKET

if TYPE_CHECKING:
    from collections.abc import Callable

    from shmemar.device.kernels.arguments import KernelArguments
    from shmemar.layout import LLLayout
    from shmemar.spec import KernelSpec

__all__ = ["build"]


def build(spec: KernelSpec, layout: LLLayout) -> Callable[..., Any]:
    """Return the kernel's body for `spec` and `layout`, which are constants of its code."""
    # Templated arguments.
    NRANKS = spec.nranks
    PACKETS = spec.packets_per_thread
    STEP = PACKETS * WORDS_PER_PACKET
    NWORDS = NRANKS * STEP
    PAYLOAD_WORDS = 2 * PACKETS
    PITCH_NBYTES, HALF_NBYTES = layout.pitch_nbytes, layout.half_nbytes
    KERNEL = spec.code
    load, store = payload_access(spec.dtype.component_nbytes)
    unpack, combine, pack = arithmetic(spec.dtype, spec.op)

    @device
    def load_group(payload: list[int], arguments: KernelArguments, first: int) -> None:
        for p in range(PACKETS):
            payload[2 * p], payload[2 * p + 1] = load(
                arguments.source, u32(first + p), arguments.source_vectors, arguments.ncomponents
            )

    def one_shot_ll(
        arguments: KernelArguments, rank: int, thread: int, nthreads: int, block_threads: int
    ) -> None:
        # Packets are counted in 32 bits: half the instructions before the first load.
        npackets = u32(arguments.npackets)
        first_slot = u32(thread * PACKETS)
        first = first_slot
        if first >= npackets:
            return
        watchdog = Watchdog(
            arguments.broken,
            arguments.record,
            arguments.timeout_ns,
            KERNEL,
            rank,
            thread,
            block_threads,
        )
        packets = word_array(NWORDS)
        own = STEP * rank
        payload = word_array(PAYLOAD_WORDS)
        epoch = word_array(PACKETS)

        # The input's load is issued before the epoch's: the other order serialises two round trips.
        load_group(payload, arguments, first)
        stops = was_broken(watchdog)
        for p in range(PACKETS):
            epoch[p] = ld_b32(arguments.epochs + u64(first_slot + p) * u64(WORD_NBYTES))
            # Never true, but it keeps the epoch's load before the branch, beside the others.
            stops = stops | (epoch[p] > u32(LAST_EPOCH))
        # Not later: a thread that gave up has not advanced its epoch, and would send other data
        # under the same flag, to peers that may still be waiting for it.
        if stops:
            return

        while True:
            for p in range(PACKETS):
                ll = LLBuffer(arguments.peers, rank, PITCH_NBYTES, HALF_NBYTES, epoch[p], watchdog)
                ll = ll.advance_epoch()
                epoch[p] = ll.epoch
                packets[own + 4 * p] = payload[2 * p]
                packets[own + 4 * p + 2] = payload[2 * p + 1]
                ll.bcast(u32(first_slot + p), payload[2 * p], payload[2 * p + 1])
            following = u32(first + nthreads * PACKETS)
            is_last = following >= npackets
            if not is_last:
                load_group(payload, arguments, following)
            for p in range(PACKETS):
                ll = LLBuffer(arguments.peers, rank, PITCH_NBYTES, HALF_NBYTES, epoch[p], watchdog)
                if not ll.recv_unrolled(u32(first_slot + p), packets, 4 * p, STEP):
                    return
            total = unpack(packets, 0)
            for r in range(1, NRANKS):
                total = combine(total, unpack(packets, STEP * r))
            result = pack(total)
            for p in range(PACKETS):
                store(
                    arguments.destination,
                    u32(first + p),
                    arguments.destination_vectors,
                    arguments.ncomponents,
                    result[2 * p],
                    result[2 * p + 1],
                )
            if is_last:
                break
            first = following

        for p in range(PACKETS):
            st_b32(arguments.epochs + u64(first_slot + p) * u64(WORD_NBYTES), epoch[p])

    return one_shot_ll
