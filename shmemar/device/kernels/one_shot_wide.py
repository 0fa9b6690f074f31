"""One-shot all-reduce of many ranks: lanes of a warp share a packet, each with some of the peers.

A thread that polls all peers runs out of registers; if it polls them in parts, each costs a round
trip to L2. Here L lanes of a warp (`KernelSpec.lanes`: 2, 4 or 8) are a *team*. Its lane j has part
j of the ranks, ``j * R`` to ``j * R + R - 1``, at most 8 of them, so one round trip serves all. A
warp has W = 32 / L teams, and neighbouring lanes have neighbouring packets::

    lanes of a warp     [0, W) part 0   [W, 2W) part 1   ...   [32 - W, 32) part L - 1
    team of a lane      warp * W + lane mod W

Algorithm, for each team t of T, on every rank alike:

1. All lanes load the packet's worth of input that is team t's, and slot t's epoch word.
2. Advance the epoch; store the packet to slot t on every peer of the lane's part.
3. Poll slot t of the part's packets until all have arrived; empty them, if they are sentinel ones.
4. The warp meets: if a lane has given up, all do.
5. Part 0 reduces its ranks in order and hands the total to part 1, which goes on with its own, and
   so on: elements are combined in rank order 0 ... N-1, as in all kernels.
6. The lane of the last part stores to the output. Go on with the group of packets T further, if the
   warp has one. The lane of part 0 stores the epoch word.

Where threads run one after another, the first lane of a team takes all parts in turn.

Layout and requirements are those of :mod:`shmemar.device.kernels.one_shot`; a slot is its team's.

Reuse is safe as :mod:`shmemar.device.packet_buffer` argues, for each pair of ranks by itself: one
lane of a team on rank a, and no other, both sends to rank b and receives from it; likewise on b.

A body that is looped ends with another meeting, so that all lanes load the epoch that one stored.

Cost, a pass: at most 8 remote stores of 16 bytes and one round of polls for each packet of a lane,
a meeting of the warp, and L - 1 rounds of shuffles. One more meeting a launch; fences as in the
one-shot kernel.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from shmemar.device.groups import WARP_THREADS, all_in_warp, from_lane_before, share_work
from shmemar.device.kernels.exchange import KernelThread, exchange
from shmemar.device.registry import device
from shmemar.device.words import i64_from_word, opaque, u32, u64, word_array
from shmemar.layout import packet_count

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
    PACKETS, WORDS, STEP = this.packets, this.words, this.step
    OWN_WORDS = PACKETS * WORDS
    LANES, TEAMS = spec.lanes, WARP_THREADS // spec.lanes
    NRANKS, PART = spec.nranks, packet_count(spec.nranks, spec.lanes)
    LENGTH = PART * STEP
    LOOPED = looped
    open_thread, may_start, advance, finish = (
        this.open_thread,
        this.may_start,
        this.advance,
        this.finish,
    )
    load, store, buffer, encode = this.load, this.store, this.buffer, this.encode
    receive, put = this.receive, this.put
    unpack_all, combine_all, pack_all = this.unpack_all, this.combine_all, this.pack_all
    send_to_part = _chain_of_sends(this, PART, LANES, NRANKS)

    @device
    def load_group(words: list[int], arguments: KernelArguments, first: int) -> None:
        for p in range(PACKETS):
            load(words, WORDS * p, arguments, u32(first + p))

    @device
    def receive_part(
        packets: list[int], me: KernelThread, epoch: list[int], own: list[int], part: int
    ) -> bool:
        source = part * PART
        if not receive(packets, me, epoch, source, source + PART):
            return False
        for r in range(PART):
            if source + r == me.rank:
                put(packets, STEP * r, own)
        return True

    @device
    def fold(totals: Any, packets: list[int], part: int) -> Any:
        for r in range(PART):
            if r == 0 and part == 0:
                totals = unpack_all(packets, 0)
            elif part * PART + r < NRANKS:
                totals = combine_all(totals, unpack_all(packets, STEP * r))
        return totals

    def one_shot_wide(
        arguments: KernelArguments, rank: int, thread: int, nthreads: int, block_threads: int
    ) -> None:
        share = u32(arguments.share)
        warp, lane = u32(thread) // u32(WARP_THREADS), u32(thread) % u32(WARP_THREADS)
        my_part = i64_from_word(lane // u32(TEAMS))
        team = u32(warp * u32(TEAMS) + lane % u32(TEAMS))
        # All lanes of a warp make the passes of its first team, the one with the most.
        first_of_warp = u32(warp * u32(TEAMS * PACKETS))
        first = u32(team * u32(PACKETS))
        stride = u32(u32(nthreads) // u32(LANES) * u32(PACKETS))
        together = share_work()
        if first_of_warp >= share or (not together and my_part != 0):
            return
        begin = my_part if together else 0
        end = my_part + 1 if together else LANES

        caller = open_thread(arguments, rank, thread, block_threads)
        me = KernelThread(arguments, rank, first, caller.watchdog)
        payload = word_array(OWN_WORDS)
        own = word_array(OWN_WORDS)
        result = word_array(OWN_WORDS)
        packets = word_array(LENGTH)
        epoch = word_array(PACKETS)

        if first < share:
            load_group(payload, arguments, first)
        if not all_in_warp(may_start(me, epoch)):
            return

        is_first = True
        while True:
            is_mine = first < share
            following = u32(first + stride)
            is_last = u32(first_of_warp + stride) >= share
            if is_mine:
                advance(epoch)
                encode(me, payload, 0)
                for part in range(begin, end):
                    send_to_part(me, epoch, payload, anew(part))
            if LOOPED or not (is_first or is_last):
                buffer(me, epoch[0]).fence_resets()
            for word in range(OWN_WORDS):
                own[word] = payload[word]
            if following < share:
                load_group(payload, arguments, following)

            came = True
            totals = unpack_all(packets, 0)
            for part in range(begin, end):
                if is_mine and came:
                    came = receive_part(packets, me, epoch, own, anew(part))
                if not together:
                    totals = fold(totals, packets, part)
            if not all_in_warp(came):
                return
            if together:
                totals = fold(totals, packets, 0)
                for part in range(1, LANES):
                    before = from_lane_before(totals, TEAMS)
                    if my_part == part:
                        totals = fold(before, packets, part)
            if is_mine and end == LANES:
                pack_all(result, totals)
                for p in range(PACKETS):
                    store(result, WORDS * p, arguments, u32(first + p))
            if is_last:
                break
            first = following
            first_of_warp = u32(first_of_warp + stride)
            is_first = False

        if begin == 0:
            finish(me, epoch)
        if LOOPED:
            # The next run of the body loads the epoch word on all lanes.
            all_in_warp(True)  # noqa: FBT003

    return one_shot_wide


@device
def anew(part: int) -> int:
    """Return the part, of which a compiler then knows nothing.

    Else it would compute all that follows from the part before the first pass, and keep it in some
    thirty registers.
    """
    return i64_from_word(opaque(u32(part)))


def _chain_of_sends(this: Any, part_ranks: int, lanes: int, nranks: int) -> Callable[..., None]:
    """Make ``send(me, epoch, words, part)``, of functions in which every index is a constant.

    One for each rank of a part sends to that of the lane's part, and calls the next.
    """
    PACKETS, WORDS = this.packets, this.words
    buffer = this.buffer

    @device
    def end_of_part(me: KernelThread, epoch: list[int], words: list[int], part: int) -> None:
        pass

    def send_to(member: int, following: Callable[..., None]) -> Callable[..., None]:
        MEMBER = member
        region_of = _select(member, part_ranks, lanes, nranks)

        @device
        def send(me: KernelThread, epoch: list[int], words: list[int], part: int) -> None:
            peer = part * part_ranks + MEMBER
            if peer != me.rank and peer < nranks:
                region = region_of(me.arguments.peers, part)
                for p in range(PACKETS):
                    ll = buffer(me, epoch[p])
                    ll.send_packet_to(region, u32(me.first_slot + p), words, WORDS * p)
            following(me, epoch, words, part)

        return send

    sends: Callable[..., None] = end_of_part
    for member in reversed(range(part_ranks)):
        sends = send_to(member, sends)
    return sends


def _select(member: int, part_ranks: int, lanes: int, nranks: int) -> Callable[..., int]:
    """Make ``select(peers, part)``, the region of a member of a part, held in registers."""

    @device
    def none(peers: tuple[int, ...], part: int) -> int:
        return u64(0)

    def select_of(part: int, peer: int, following: Callable[..., int]) -> Callable[..., int]:
        PART, PEER = part, peer

        @device
        def select(peers: tuple[int, ...], part: int) -> int:
            return peers[PEER] if part == PART else following(peers, part)

        return select

    chosen: Callable[..., int] = none
    for part in reversed(range(lanes)):
        peer = part * part_ranks + member
        if peer < nranks:
            chosen = select_of(part, peer, chosen)
    return chosen
