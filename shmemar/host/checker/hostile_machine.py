"""Runs the threads of all ranks in one process: any of them may go on at every operation.

Threads are greenlets. Each operation of :class:`shmemar.device.interpreter.Machine` is a point of
choice, where a `Schedule` picks who goes on and which stores are performed.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from shmemar.device.groups import WARP_THREADS
from shmemar.device.interpreter import Group, Order, Scope
from shmemar.host.checker.launcher import Launcher
from shmemar.host.checker.meetings import Meetings
from shmemar.host.checker.memory_map import AREA_SHIFT, MemoryMap, Span, rank_of
from shmemar.host.checker.messages import ALIAS
from shmemar.host.checker.packet_log import Packet
from shmemar.host.checker.turns import Turns
from shmemar.host.checker.verdict import ProtocolError, Verdict
from shmemar.host.checker.weak_memory import ALL_BITS, WeakMemory
from shmemar.layout import LINE_LANES, LINE_NBYTES, PACKET_NBYTES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from shmemar.host.checker.memory_map import Area
    from shmemar.host.checker.messages import Message, Store
    from shmemar.host.checker.moves import Moves
    from shmemar.host.checker.schedule import Schedule
    from shmemar.host.checker.threads import Launch, Thread

__all__ = ["HostileMachine"]

LOW = 0xFFFFFFFF


@dataclass(eq=False)
class HostileMachine:
    """A `shmemar.device.interpreter.Machine`.

    Attributes:
        schedule: Makes all choices.
        map: All memory.
        limit: Operations after which the run is a livelock.
        resident: Launches of all ranks that fit on their GPU at once, where calls overlap as
            programmatic launch lets them: a rank's next launch starts when all threads of the one
            before have triggered. None where they don't overlap.
        every_point: True to let others run at operations that nobody else can see, too.
        tick_ns: Time that passes at each look at the clock. With a clock that runs, all polls are.
        share_work: Whether the threads of a block run at once, as on a GPU.
        warp_threads: Lanes of a warp.
        follows_packets: False to see only what comes of it: wrong values, and who gets stuck.
        moves: Where to write down all operations; None for nowhere.
    """

    schedule: Schedule
    map: MemoryMap
    limit: int = 400_000
    resident: int | None = None
    every_point: bool = True
    tick_ns: int = 0
    share_work: bool = True
    warp_threads: int = WARP_THREADS
    follows_packets: bool = True
    moves: Moves | None = None

    def __post_init__(self) -> None:
        self.operations = 0
        self.memory = WeakMemory(
            initial=self.map.initial,
            owner_of=rank_of,
            choose=self.schedule.message,
            is_performed=self._performed,
            is_read=self._was_read,
        )
        self.turns = Turns(self.schedule, self.memory, self.map, self.limit)
        self._meetings = Meetings(self.turns, self.memory, self.warp_threads)
        self._launcher = Launcher(
            self.schedule, self.memory, self.turns, self._meetings.thread_ended
        )
        self._patience = self.schedule.patience()
        self._time_ns = 0

    def use_warps_of(self, lanes: int) -> None:
        """Let warps have so many lanes: fewer make kernels that need but a few cheaper to run."""
        self.warp_threads = self._meetings.warp_threads = lanes

    # The host's side

    def window(self, parts: list[Area]) -> int:
        """Make the multicast address of symmetric memory, of which a rank has a part each."""
        self.memory.has_aliases = True
        return self.map.window(parts)

    def poke(self, address: int, contents: bytes) -> None:
        """Write bytes at once, as the host does before a launch of the rank whose they are."""
        view = self._launcher.views.setdefault(rank_of(address >> 3), {})
        at = 0
        while at < len(contents):
            here = address + at
            part = contents[at : at + 8 - (here & 7)]
            shift = 8 * (here & 7)
            mask = (1 << 8 * len(part)) - 1 << shift
            value = int.from_bytes(part, "little") << shift
            view[here >> 3] = self.memory.poke(here >> 3, value, mask)
            at += len(part)

    def peek(self, address: int, nbytes: int) -> bytes:
        """Read bytes at once, the newest."""
        first, last = address >> 3, address + nbytes - 1 >> 3
        contents = b"".join(
            self.memory.peek(location).to_bytes(8, "little") for location in range(first, last + 1)
        )
        return contents[address & 7 : (address & 7) + nbytes]

    def run(self, ranks: list[Iterator[Launch]]) -> None:
        """Run each rank's launches one after another.

        Raises:
            ProtocolError: Something went wrong.
        """
        self._launcher.run(ranks, self.resident)

    def _performed(self, location: int, before: Message, store: Store) -> None:
        if self.moves is not None:
            who = store.queue.observer
            self.moves.add(self.turns.steps, who, "has performed", location << 3, (store.value,))
        if before.packet is not None or store.packet is not None:
            packet = store.packet if isinstance(store.packet, Packet) else before.packet
            if isinstance(packet, Packet):
                packet.log.performed(before, store)
        self.turns.changed(location)

    def _was_read(self, message: Message) -> None:
        if isinstance(message.packet, Packet):
            message.packet.log.read(message.packet)

    # Operations

    def _span(self, who: Thread, address: int, nbytes: int, *, stores: bool) -> Span:
        """Check what a thread touches."""
        span = who.rights.get(address >> AREA_SHIFT)
        is_inside = span is not None and span.low <= address and address + nbytes <= span.high
        if span is None or not is_inside or address & nbytes - 1:
            raise self._refusal(who, address, nbytes, span, stores=stores)
        if span.may_store if stores else span.may_load:
            return span
        raise self._refusal(who, address, nbytes, span, stores=stores)

    def _refusal(
        self, who: Thread, address: int, nbytes: int, span: Span | None, *, stores: bool
    ) -> ProtocolError:
        verdict, why = Verdict.OUTSIDE, "its launch may not"
        area = self.map.at(address)
        if address & nbytes - 1:
            why = "that is not aligned"
        elif span is None and area is not None and area.log is not None:
            verdict, why = Verdict.OTHER_LAYOUT, "its launch has another one"
        verb = "store to" if stores else "load from"
        return ProtocolError(
            verdict,
            f"{who} of {who.launch.name} would {verb} {nbytes} bytes at "
            f"{self.map.describe(address)}; {why}",
            who.rank,
        )

    def _must_be_a_packet(self, who: Thread, span: Span, address: int, nbytes: int) -> None:
        """Refuse what is no store of words, where packets lie."""
        if span.area.log_of(address) is not None:
            raise ProtocolError(
                Verdict.OUTSIDE,
                f"{who} of {who.launch.name} would change {nbytes} bytes at "
                f"{self.map.describe(address)}; expected stores of whole packets there.",
                who.rank,
            )

    def load(self, address: int, nwords: int, order: Order) -> tuple[int, ...]:
        """Load words, 8 aligned bytes of them at a time."""
        who: Thread = self.turns.current
        span = who.rights.get(address >> AREA_SHIFT)
        nbytes = 4 * nwords
        if (
            span is None
            or address < span.low
            or address + nbytes > span.high
            or not span.may_load
            or address & nbytes - 1
        ):
            raise self._refusal(who, address, nbytes, span, stores=False)
        if self.every_point or span.is_shared:
            self.turns.take()
        self.operations += 1
        location = address >> 3
        who.polled.append(location)
        read = self.memory.read
        is_strong = order is not Order.WEAK
        low = read(who, location, is_strong=is_strong, acquires=order is Order.ACQUIRE_SYS)
        if nwords == 4:
            who.polled.append(location + 1)
            high = read(who, location + 1, is_strong=is_strong)
            found: tuple[int, ...] = (low & LOW, low >> 32, high & LOW, high >> 32)
        elif nwords == 2:
            found = low & LOW, low >> 32
        else:
            found = ((low >> 32 if address & 4 else low & LOW),)
        if self.moves is not None:
            self.moves.add(self.turns.steps, who, f"loads ({order.value})", address, found)
        return found

    def store(self, address: int, words: tuple[int, ...], order: Order) -> None:
        """Store words; each 8 aligned bytes of them are performed by themselves."""
        who: Thread = self.turns.current
        span = self._span(who, address, 4 * len(words), stores=True)
        if self.every_point or span.is_shared:
            self.turns.take()
        self._acts(who)
        if self.moves is not None:
            self.moves.add(self.turns.steps, who, f"stores ({order.value})", address, words)
        log, packet = span.area.log_of(address), None
        if log is not None:
            packet = log.store(who.rank, span.area.rank, address - span.area.address, words)
        store, location, is_strong = self.memory.store, address >> 3, order is not Order.WEAK
        if len(words) == 1:
            shift = 32 if address & 4 else 0
            store(
                who,
                location,
                words[0] << shift,
                LOW << shift,
                is_strong=is_strong,
                releases=order is Order.RELEASE_SYS,
                packet=packet,
            )
            return
        if order is Order.RELEASE_SYS:
            store(who, location, words[1] << 32 | words[0], releases=True)
            return
        for at in range(0, len(words), 2):
            value = words[at + 1] << 32 | words[at]
            store(who, location + at // 2, value, is_strong=is_strong, packet=packet)

    def load_part(self, address: int, nbytes: int) -> int:
        """Load bytes."""
        who: Thread = self.turns.current
        span = self._span(who, address, nbytes, stores=False)
        if self.every_point or span.is_shared:
            self.turns.take()
        self.operations += 1
        who.polled.append(address >> 3)
        value = self.memory.read(who, address >> 3, is_strong=False)
        found = value >> 8 * (address & 7) & (1 << 8 * nbytes) - 1
        if self.moves is not None:
            self.moves.add(self.turns.steps, who, f"loads {nbytes} bytes", address, (found,))
        return found

    def store_part(self, address: int, nbytes: int, value: int) -> None:
        """Store bytes."""
        who: Thread = self.turns.current
        span = self._span(who, address, nbytes, stores=True)
        if self.every_point or span.is_shared:
            self.turns.take()
        self._must_be_a_packet(who, span, address, nbytes)
        self._acts(who)
        if self.moves is not None:
            self.moves.add(self.turns.steps, who, f"stores {nbytes} bytes", address, (value,))
        shift = 8 * (address & 7)
        mask = (1 << 8 * nbytes) - 1 << shift
        self.memory.store(who, address >> 3, value << shift, mask, is_strong=False)

    def exchange(self, address: int, word: int) -> int:
        """Store a word at once, and return the one before."""
        who: Thread = self.turns.current
        span = self._span(who, address, 4, stores=True)
        self._must_be_a_packet(who, span, address, 4)
        self.turns.take()
        self._acts(who)
        shift = 32 if address & 4 else 0
        location = address >> 3
        before = self.memory.exchange(who, location, word << shift, LOW << shift) >> shift & LOW
        if self.moves is not None:
            self.moves.add(self.turns.steps, who, "exchanges", address, (before, word))
        self.turns.changed(location)
        return before

    def add(self, address: int, value: int) -> None:
        """Add to a word, when the addition is performed."""
        shift = 32 if address & 4 else 0
        self._add(address, 4, value << shift, LOW << shift, Order.RELAXED_SYS)

    def add_b64(self, address: int, value: int, order: Order) -> None:
        """Add to 64 bits, likewise."""
        self._add(address, 8, value, ALL_BITS, order)

    def _add(self, address: int, nbytes: int, value: int, mask: int, order: Order) -> None:
        who: Thread = self.turns.current
        span = self._span(who, address, nbytes, stores=True)
        self._must_be_a_packet(who, span, address, nbytes)
        self.turns.take()
        self._acts(who)
        if self.moves is not None:
            self.moves.add(self.turns.steps, who, f"adds ({order.value})", address, (value,))
        releases = order is Order.RELEASE_SYS
        self.memory.store(who, address >> 3, value, mask, add=operator.add, releases=releases)

    def add_to_line(
        self, address: int, words: tuple[int, ...], add: Callable[[int, int], int]
    ) -> None:
        """Add to 16 bytes; the lines that the lanes of a warp have all of at once, others apart."""
        who = self.turns.take()
        span = self._span(who, address, PACKET_NBYTES, stores=True)
        self._must_be_a_packet(who, span, address, PACKET_NBYTES)
        self._acts(who)
        if self.moves is not None:
            self.moves.add(self.turns.steps, who, "adds to a line", address, words)

        def both(before: int, value: int) -> int:
            return add(before >> 32, value >> 32) << 32 | add(before & LOW, value & LOW)

        if not self.share_work:
            for at in (12, 8, 4, 0):
                shift = 8 * (at & 4)
                location, value = address + at >> 3, words[at // 4] << shift
                self.memory.store(who, location, value, LOW << shift, add=both)
                # A CPU's addition comes behind the one before, and whoever sees it sees that.
                self.memory.fence(who, Scope.SYS)
                line = address // LINE_NBYTES * LINE_NBYTES >> 3
                self.memory.see_all(location, range(line, line + LINE_NBYTES // 8))
            return
        offered = address, words, both
        self._meetings.meet(who, Group.WARP, offered, orders_memory=False, then=self._add_lines)

    def skip_line(self) -> None:
        """Come to the warp's next addition without adding."""
        self._meetings.meet(
            self.turns.take(), Group.WARP, None, orders_memory=False, then=self._add_lines
        )

    def _add_lines(self, lanes: list[tuple[Thread, Any] | None]) -> None:
        for first in range(0, len(lanes), LINE_LANES):
            stores, addresses = [], set()
            for lane in lanes[first : first + LINE_LANES]:
                if lane is None or lane[1] is None:
                    continue
                who, (address, words, both) = lane
                addresses.add(address - PACKET_NBYTES * (who.index % LINE_LANES))
                for at in (0, 1):
                    value = words[2 * at + 1] << 32 | words[2 * at]
                    stores.append(self.memory.store(who, (address >> 3) + at, value, add=both))
            is_whole = len(stores) == 2 * LINE_LANES and len(addresses) == 1
            if is_whole and not addresses.pop() % LINE_NBYTES:
                self.memory.perform_at_once(stores)

    # Multicast

    def _copies(
        self, who: Thread, address: int, nbytes: int, *, stores: bool
    ) -> list[tuple[int, Span]]:
        """Check what a thread touches by a multicast address: each rank's copy."""
        copies = self.map.copies(address)
        if not copies:
            raise ProtocolError(
                Verdict.OUTSIDE,
                f"{who} of {who.launch.name} would use {self.map.describe(address)} by "
                f"{address:#x}; expected a multicast address.",
                who.rank,
            )
        return [(copy, self._span(who, copy, nbytes, stores=stores)) for copy in copies]

    def store_to_all(self, address: int, words: tuple[int, ...], order: Order) -> None:
        """Store words to each rank; each 8 bytes of each of them are performed by themselves."""
        who: Thread = self.turns.current
        copies = self._copies(who, address, 4 * len(words), stores=True)
        self.turns.take()
        self._acts(who)
        if self.moves is not None:
            self.moves.add(self.turns.steps, who, f"stores to all ({order.value})", address, words)
        is_strong = order is not Order.WEAK
        for copy, span in copies:
            log, packet = span.area.log_of(copy), None
            if log is not None:
                area = span.area
                packet = log.store_to_all(who.rank, area.rank, copy - area.address, words)
            for at in range(0, len(words), 2):
                value, location = words[at + 1] << 32 | words[at], (copy >> 3) + at // 2 + ALIAS
                self.memory.store(who, location, value, is_strong=is_strong, packet=packet)

    def add_to_all(self, address: int, value: int) -> None:
        """Add to a word of each rank, when that addition is performed; each of them releases."""
        who: Thread = self.turns.current
        copies = self._copies(who, address, 4, stores=True)
        for copy, span in copies:
            self._must_be_a_packet(who, span, copy, 4)
        self.turns.take()
        self._acts(who)
        if self.moves is not None:
            self.moves.add(self.turns.steps, who, "adds to all (release.sys)", address, (value,))
        self.add_to_copies([copy for copy, _ in copies], value, releases=True)

    def add_to_copies(self, copies: list[int], value: int, *, releases: bool) -> None:
        """Add to a word of each rank, as of `add_to_all`."""
        who: Thread = self.turns.current
        behind = self.memory.before_release(who)
        for copy in copies:
            shift, location = 32 if copy & 4 else 0, (copy >> 3) + ALIAS
            self.memory.store(
                who,
                location,
                value << shift,
                LOW << shift,
                add=operator.add,
                releases=releases,
                behind=behind,
            )

    def load_sum(self, address: int, add: Callable[[int, int], int]) -> tuple[int, ...]:
        """Load four words of one rank after another, each at a time of its own, and add them."""
        who: Thread = self.turns.current
        copies = self._copies(who, address, PACKET_NBYTES, stores=False)
        total: list[int] = []
        for copy, _ in copies:
            self.turns.take()
            self.operations += 1
            found: list[int] = []
            for location in (copy >> 3, (copy >> 3) + 1):
                value = self.memory.read_alias(who, location)
                found += [value & LOW, value >> 32]
            total = [add(*pair) for pair in zip(total, found, strict=True)] if total else found
        if self.moves is not None:
            self.moves.add(self.turns.steps, who, "loads the sum", address, tuple(total))
        return tuple(total)

    def fence_aliases(self) -> None:
        """Order accesses by one name of memory against those by the other."""
        who = self.turns.take()
        self._acts(who)
        if self.moves is not None:
            self.moves.add(self.turns.steps, who, "fences (aliases)", 0, ())
        self.memory.link_aliases(who)

    def _acts(self, who: Thread) -> None:
        """Something that is not a poll: from here on old messages may be read again."""
        self.operations += 1
        who.is_busy = True
        who.patience = self._patience

    def fence(self, scope: Scope) -> None:
        """Order what the thread did and saw."""
        who = self.turns.take()
        who.is_busy = True
        who.patience = self._patience
        if self.moves is not None:
            self.moves.add(self.turns.steps, who, f"fences ({scope.value})", 0, ())
        self.memory.fence(who, scope)

    def shares_work(self) -> bool:
        """Whether threads of a block run at once."""
        return self.share_work

    def meet(
        self, group: Group, offered: Any, *, orders_memory: bool = True
    ) -> tuple[int, list[Any]]:
        """Wait for those of the group who have not ended."""
        if not self.share_work:
            return 0, [offered]
        who = self.turns.take()
        who.is_busy = True
        who.patience = self._patience
        if self.moves is not None:
            self.moves.add(self.turns.steps, who, f"meets its {group.value}", 0, (offered,))
        return self._meetings.meet(who, group, offered, orders_memory=orders_memory)

    def relax(self) -> None:
        """Wait, after a poll that would find the same again, for what it polled to change."""
        self.turns.poll(may_park=not self.tick_ns)

    def clock_ns(self) -> int:
        """Look at a clock that only runs when it is looked at."""
        self.turns.current.is_busy = True
        self._time_ns += self.tick_ns
        return self._time_ns

    # Programmatic launch

    def wait_for_launch(self) -> None:
        """Wait until the rank's launch before this one has ended, and see what it did."""
        self._launcher.wait(self.turns.take())

    def trigger(self) -> None:
        """Let the rank's next launch start, once all threads of this one say so or have ended."""
        self._launcher.trigger(self.turns.take())
