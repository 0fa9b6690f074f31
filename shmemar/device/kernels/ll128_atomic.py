"""Two-shot all-reduce whose sums are made by additions in memory, a line of 128 bytes at a time.

The message is cut into lines of 128 bytes, and its lines into N contiguous shares of S, the last
ones perhaps empty in part. A line's first element gives way to the mark that says who has added
(:mod:`shmemar.device.ll128`), so each share has extra lines, which carry the displaced elements:
with E elements in a line, that of data line g is element ``1 + g mod (E-1)`` of extra line ``g /
(E-1)``::

    lines of a share    [0, S) data   [S, S+X) extra, X = ceil(S / (E-1))   up to P: zeros
    P                   S + X, rounded up to whole warps of 4 lines

Threads count the 16 bytes of lines: thread t of T has lane ``t mod 8`` of line ``t / 8``.
Algorithm, for each thread, on every rank alike:

1. Load its 16 bytes of each rank's share, zeros behind the end, and the epoch word of its slot. The
   first lane of a line puts the rank's mark in the place of the first element.
2. Advance the epoch; add the 16 bytes to the accumulator of each rank whose share they are of, the
   own one included. 8 lanes add a whole line by one instruction, so none is ever masked off: warps
   make all passes together, and lines behind the last one are added as zeros.
3. The first lane polls the own accumulator until all marks are in; the warp meets; all lanes load
   their 16 bytes of the sums, once more, and clear them.
4. Broadcast them, as a sentinel packet a lane; store them to the output.
5. Poll the packets of all peers, and store their shares' sums to the output. A lane of a data line
   leaves the first element alone: the displaced ones are stored by the lanes of the extra line.
6. The warp meets; all give up if one did. Go on with the line T / 8 further, if there are any.
   Store the epoch word.

So every line goes through on its own, data or extra, and lanes wait for no other warp. Results land
in scratch first, as in all kernels, for any output will do, also the input. Where threads run one
after another, the first lane of a line does what its 8 lanes do.

Layout: that of :mod:`shmemar.layout`, a slot a thread. Reuse of accumulators is safe as
:mod:`shmemar.device.ll128` argues, and that of packets as :mod:`shmemar.device.packet_buffer` does:
a rank's packets of an epoch are sent behind the additions of all ranks in that epoch.

Cost: N additions and N - 1 remote stores of 16 bytes, and two rounds of polls, for 31 of 32
elements of a share's packet (63 of 64 of 16-bit types); no barrier. A fence behind the additions of
every pass of a launch but the first.

The sums are rounded at each addition, in the order in which additions arrive: ranks agree bit for
bit, and two runs need not.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from shmemar.device.groups import all_in_warp, share_work
from shmemar.device.kernels.exchange import KernelThread, chain, exchange
from shmemar.device.ll128 import lines
from shmemar.device.memory import (
    fence_acq_rel_gpu,
    ld_b16,
    ld_b32,
    ld_no_allocate_v4_b32,
    st_b16,
    st_b32,
    st_v4_b32,
)
from shmemar.device.registry import device
from shmemar.device.words import u32, u64, word_array
from shmemar.dtypes import ReduceOp
from shmemar.layout import LINE_LANES, PACKET_NBYTES, WORDS_PER_PACKET

if TYPE_CHECKING:
    from collections.abc import Callable

    from shmemar.device.kernels.arguments import KernelArguments
    from shmemar.layout import LLLayout
    from shmemar.spec import KernelSpec

__all__ = ["build"]


def build(spec: KernelSpec, layout: LLLayout, *, looped: bool = False) -> Callable[..., Any]:
    """Return the kernel's body for `spec` and `layout`, which are constants of its code.

    With `looped` it may be run several times in one launch.
    """
    # Templated arguments.
    this = exchange(spec, layout)
    NRANKS = spec.nranks
    WORDS = WORDS_PER_PACKET
    FIRST_END = this.parts[0][1]
    FIRST_WORDS = FIRST_END * WORDS
    IS_AVERAGE = spec.op is ReduceOp.AVG
    LOOPED = looped
    open_thread, may_start, advance, finish = (
        this.open_thread,
        this.may_start,
        this.advance,
        this.finish,
    )
    encode, bcast, receive = this.encode, this.bcast, this.receive
    unpack_all, pack_all = this.unpack_all, this.pack_all
    line = lines(spec.dtype, NRANKS, layout)
    put_mark, add, wait, take = line.put_mark, line.add, line.wait, line.take
    load, store = _access_to_lines(spec)

    @device
    def of_lane(me: KernelThread, lane: int) -> KernelThread:
        return KernelThread(me.arguments, me.rank, u32(me.first_slot + lane), me.watchdog)

    @device
    def load_shares(words: list[int], me: KernelThread, chunk: int, source: int, end: int) -> None:
        for owner in range(source, end):
            at = (owner - source) * WORDS
            load(words, at, me.arguments, owner, chunk)
            if chunk % u32(LINE_LANES) == u32(0):
                put_mark(words, at, me.rank)

    @device
    def add_shares(words: list[int], me: KernelThread, epoch: int, source: int, end: int) -> None:
        for owner in range(source, end):
            region = me.arguments.peers[owner]
            add(region, me.first_slot, epoch, words, (owner - source) * WORDS)

    @device
    def end_of_scatter(me: KernelThread, epoch: int, chunk: int) -> bool:
        return True

    def scatter_part(source: int, end: int, following: Callable[..., bool]) -> Callable[..., bool]:
        SOURCE, END, LENGTH = source, end, (end - source) * WORDS

        @device
        def scatter_later(me: KernelThread, epoch: int, chunk: int) -> bool:
            words = word_array(LENGTH)
            load_shares(words, me, chunk, SOURCE, END)
            add_shares(words, me, epoch, SOURCE, END)
            return following(me, epoch, chunk)

        # The kernel loads and adds the first part itself, as it loads it ahead.
        return scatter_later if source > 0 else following

    @device
    def send_sums(me: KernelThread, epoch: list[int], chunk: int) -> None:
        words = word_array(WORDS)
        sums = word_array(WORDS)
        take(me.arguments.peers[me.rank], me.first_slot, epoch[0], words)
        if IS_AVERAGE:
            pack_all(sums, unpack_all(words, 0))
        else:
            for word in range(WORDS):
                sums[word] = words[word]
        encode(me, sums, 0)
        bcast(me, epoch, sums)
        store(sums, 0, me.arguments, me.rank, chunk)

    @device
    def end_of_gather(me: KernelThread, epoch: list[int], chunk: int) -> bool:
        return True

    def gather_part(source: int, end: int, following: Callable[..., bool]) -> Callable[..., bool]:
        SOURCE, END, LENGTH = source, end, (end - source) * WORDS

        @device
        def gather(me: KernelThread, epoch: list[int], chunk: int) -> bool:
            packets = word_array(LENGTH)
            if not receive(packets, me, epoch, SOURCE, END):
                return False
            for owner in range(SOURCE, END):
                if owner != me.rank:
                    store(packets, (owner - SOURCE) * WORDS, me.arguments, owner, chunk)
            return following(me, epoch, chunk)

        return gather

    scatter_rest = chain(NRANKS, scatter_part, end_of_scatter)
    gather = chain(NRANKS, gather_part, end_of_gather)

    def ll128_atomic(
        arguments: KernelArguments, rank: int, thread: int, nthreads: int, block_threads: int
    ) -> None:
        share = u32(arguments.share)
        chunk = u32(thread)
        first_lane = chunk % u32(LINE_LANES) == u32(0)
        together = share_work()
        if chunk >= share or not (together or first_lane):
            return
        lanes = 1 if together else LINE_LANES
        me = open_thread(arguments, rank, thread, block_threads)
        shares = word_array(FIRST_WORDS)
        epoch = word_array(1)

        # The input's load is issued before the epoch's: the other order serialises two round trips.
        load_shares(shares, me, chunk, 0, FIRST_END)
        if not all_in_warp(may_start(me, epoch)):
            return

        is_first = True
        while True:
            following = u32(chunk + nthreads)
            is_last = following >= share
            advance(epoch)
            # The first lane's last, as its mark says that the others are there.
            for lane in range(lanes - 1, -1, -1):
                own = of_lane(me, lane)
                if not together:
                    load_shares(shares, own, u32(chunk + lane), 0, FIRST_END)
                add_shares(shares, own, epoch[0], 0, FIRST_END)
                scatter_rest(own, epoch[0], u32(chunk + lane))
            if LOOPED or not is_first:
                fence_acq_rel_gpu()

            came = True
            if first_lane:
                came = wait(arguments.peers[rank], me.first_slot, epoch[0], me.watchdog)
            if not all_in_warp(came):
                return
            for lane in range(lanes):
                send_sums(of_lane(me, lane), epoch, u32(chunk + lane))
            for lane in range(lanes):
                came = came and gather(of_lane(me, lane), epoch, u32(chunk + lane))
            if not all_in_warp(came):
                return
            if is_last:
                break
            chunk = following
            is_first = False
            load_shares(shares, me, chunk, 0, FIRST_END)

        finish(me, epoch)

    return ll128_atomic


def _access_to_lines(
    spec: KernelSpec,
) -> tuple[Callable[..., None], Callable[..., None]]:
    """Make what loads and stores 16 bytes of a line, of data or of what data lines displace.

    ``load(words, at, arguments, owner, chunk)`` and ``store`` of the same: chunk `chunk` of the
    share of rank `owner`. A load puts anything in the place of a line's first element, and zeros
    behind the end; a store leaves both alone.
    """
    NRANKS, WORDS = spec.nranks, WORDS_PER_PACKET
    ELEMENTS = spec.line_elements
    DISPLACED = ELEMENTS - 1
    IN_CHUNK = PACKET_NBYTES // spec.dtype.itemsize
    load_element, store_element = _ELEMENT_ACCESS[spec.dtype.itemsize]

    @device
    def data_lines(arguments: KernelArguments) -> int:
        count = u32(u32(arguments.npackets + u64(LINE_LANES - 1)) // u32(LINE_LANES))
        return u32(u32(count + u32(NRANKS - 1)) // u32(NRANKS))

    @device
    def place_of(arguments: KernelArguments, owner: int, chunk: int) -> Place:
        share = data_lines(arguments)
        data_chunks = u32(share * u32(LINE_LANES))
        before = u32(share * u32(owner))
        if chunk < data_chunks:
            packet = u32(u32(before * u32(LINE_LANES)) + chunk)
            start = u64(packet) * u64(IN_CHUNK)
            return Place(packet, start, u64(1), arguments.ncomponents)
        place = u32(u32(chunk - data_chunks) * u32(IN_CHUNK))
        line = u32(u32(place // u32(ELEMENTS)) * u32(DISPLACED) + place % u32(ELEMENTS))
        # Of the first lane the first element is none, and the one before the line's.
        start = (u64(before) + u64(line) - u64(1)) * u64(ELEMENTS)
        end = u64(u32(before + share)) * u64(ELEMENTS)
        behind = min(arguments.ncomponents, end)
        return Place(u32(NO_PACKET), start, u64(ELEMENTS), behind)

    @device
    def load(words: list[int], at: int, arguments: KernelArguments, owner: int, chunk: int) -> None:
        here = place_of(arguments, owner, chunk)
        if here.packet < u32(arguments.source_vectors):
            address = arguments.source + u64(here.packet) * u64(PACKET_NBYTES)
            first, second, third, fourth = ld_no_allocate_v4_b32(address)
            words[at], words[at + 1], words[at + 2], words[at + 3] = first, second, third, fourth
        else:
            for word in range(WORDS):
                words[at + word] = u32(0)
            is_first_lane = chunk % u32(LINE_LANES) == u32(0)
            for e in range(IN_CHUNK):
                element = here.start + u64(e) * here.step
                if element < here.behind and not (e == 0 and is_first_lane):
                    load_element(words, at, arguments.source, element, e)

    @device
    def store(
        words: list[int], at: int, arguments: KernelArguments, owner: int, chunk: int
    ) -> None:
        here = place_of(arguments, owner, chunk)
        is_first_lane = chunk % u32(LINE_LANES) == u32(0)
        if here.packet < u32(arguments.destination_vectors) and not is_first_lane:
            address = arguments.destination + u64(here.packet) * u64(PACKET_NBYTES)
            st_v4_b32(address, words[at], words[at + 1], words[at + 2], words[at + 3])
        else:
            for e in range(IN_CHUNK):
                element = here.start + u64(e) * here.step
                if element < here.behind and not (e == 0 and is_first_lane):
                    store_element(words, at, arguments.destination, element, e)

    return load, store


class Place(NamedTuple):
    """Where the elements of a chunk lie in an array.

    Attributes:
        packet: Number of the 16 bytes of data that it is; `NO_PACKET` of displaced elements.
        start: Number of its first element.
        step: From one of its elements to the next.
        behind: Elements from here on are none of it.
    """

    packet: int
    start: int
    step: int
    behind: int


NO_PACKET = 0xFFFFFFFF


# Element `e` of the 16 bytes from words[at] on, to or from element `index` of the array.


@device
def _load_f32(words: list[int], at: int, array: int, index: int, e: int) -> None:
    words[at + e] = ld_b32(array + index * u64(4))


@device
def _store_f32(words: list[int], at: int, array: int, index: int, e: int) -> None:
    st_b32(array + index * u64(4), words[at + e])


@device
def _load_16_bits(words: list[int], at: int, array: int, index: int, e: int) -> None:
    bits = u32(ld_b16(array + index * u64(2)) << u32(16 * (e % 2)))
    words[at + e // 2] = u32(words[at + e // 2] | bits)


@device
def _store_16_bits(words: list[int], at: int, array: int, index: int, e: int) -> None:
    st_b16(array + index * u64(2), u32(words[at + e // 2] >> u32(16 * (e % 2))))


_ELEMENT_ACCESS = {4: (_load_f32, _store_f32), 2: (_load_16_bits, _store_16_bits)}
