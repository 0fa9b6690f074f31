"""Runs the threads of all ranks in one process: any of them may go on at every operation.

Threads are greenlets. Each operation of :class:`shmemar.device.interpreter.Machine` is a point of
choice, where a `Schedule` picks who goes on and which stores are performed. What a thread that
polls would see again is not run again: it waits until a location that it polled has changed.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from shmemar.device.groups import WARP_THREADS
from shmemar.device.interpreter import Group, Order, Scope
from shmemar.errors import BackendUnavailableError
from shmemar.host.memory_map import AREA_SHIFT, MemoryMap, Rights, Span, rank_of
from shmemar.host.packet_log import Packet
from shmemar.host.verdict import ProtocolError, Verdict
from shmemar.host.weak_memory import ALL_BITS, Message, Observer, Store, View, WeakMemory

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from shmemar.host.moves import Moves
    from shmemar.host.schedule import Schedule

__all__ = ["HostileMachine", "Launch", "Thread", "load_greenlet"]

LOW = 0xFFFFFFFF
CONFIRMING_POLLS = 100
"""Polls of each thread before a deadlock is called one: a loop of fewer may still end by itself."""


def load_greenlet() -> Any:
    """Import greenlet.

    Raises:
        BackendUnavailableError: It is not installed.
    """
    try:
        import greenlet
    except ImportError as error:
        raise BackendUnavailableError(
            "the checker runs kernel threads as greenlets, and greenlet is not installed; install "
            "it with `pip install shmemar[check]`."
        ) from error
    return greenlet


@dataclass(eq=False)
class Launch:
    """A launch of one rank.

    Attributes:
        name: For messages.
        rank: The rank.
        bodies: What each thread runs.
        rights: What its threads may touch.
        block_threads: Threads a block.
        at_end: Called when all its stores are performed; raises `ProtocolError`.
    """

    name: str
    rank: int
    bodies: list[Callable[[], None]]
    rights: Rights
    block_threads: int
    at_end: Callable[[], None] = lambda: None
    threads: list[Thread] = field(default_factory=list)
    live: int = 0
    waiting_to_trigger: int = 0
    before: Launch | None = None
    behind: list[Thread] = field(default_factory=list)
    has_ended: bool = False


class Thread(Observer):
    """A thread of a launch.

    Attributes:
        launch: The launch.
        index: Its number in the launch.
        number: Its place among all threads: by rank, then by index.
        polled: Locations that it loaded since it last did anything else.
        is_busy: True when it did something else since its last poll.
        parked: True while it waits for what it polled to change.
        confirming: Polls that are left before it may be parked again.
        met: Results of meetings that it has not fetched.
    """

    def __init__(self, launch: Launch, index: int, base: View) -> None:
        """Start at the view `base`."""
        super().__init__(launch.rank, base)
        self.launch = launch
        self.index = index
        self.number = launch.rank << 20 | index
        self.rights = launch.rights
        self.greenlet: Any = None
        self.polled: list[int] = []
        self.is_busy = True
        self.parked = False
        self.confirming = 0
        self.has_ended = False
        self.met: list[Any] | None = None
        self.has_triggered = False

    def __str__(self) -> str:
        """Rank and thread."""
        return f"rank {self.rank} thread {self.index}"


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
        self._greenlet = load_greenlet().greenlet
        self._main = load_greenlet().getcurrent()
        self.operations = 0
        self.memory = WeakMemory(
            initial=self.map.initial,
            owner_of=rank_of,
            choose=self.schedule.message,
            is_performed=self._performed,
            is_read=self._was_read,
        )
        self._steps = 0
        self._runnable: list[Thread] = []
        self._parked: dict[int, list[Thread]] = {}
        self._confirmed = False
        self._current: Any = None
        self._time_ns = 0
        self._views: dict[int, View] = {}
        self._todo: dict[int, Iterator[Launch]] = {}
        self._last: dict[int, Launch] = {}
        self._live: list[Launch] = []
        self._offers: dict[Any, dict[int, tuple[Thread, Any]]] = {}
        self._patience = self.schedule.patience()

    # The host's side

    def poke(self, address: int, contents: bytes) -> None:
        """Write bytes at once, as the host does before a launch of the rank whose they are."""
        view = self._views.setdefault(rank_of(address >> 3), {})
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
        self._todo = dict(enumerate(ranks))
        self._start_launches()
        while self._live:
            if not self._runnable:
                self._make_runnable()
            self._current = self.schedule.next_thread(self._runnable, None)
            self._current.greenlet.switch()
            self._thread_ended(self._current)

    def _start_launches(self) -> None:
        for rank in list(self._todo):
            while self._may_start(rank):
                launch = next(self._todo[rank], None)
                if launch is None:
                    del self._todo[rank]
                    break
                self._start(launch)

    def _may_start(self, rank: int) -> bool:
        last = self._last.get(rank)
        if rank not in self._todo:
            return False
        if self.resident is None:
            return last is None or last.has_ended
        has_room = len(self._live) < self.resident
        return has_room and (last is None or last.has_ended or not last.waiting_to_trigger)

    def _start(self, launch: Launch) -> None:
        base = self._views.setdefault(launch.rank, {})
        launch.before = self._last.get(launch.rank)
        self._last[launch.rank] = launch
        self._live.append(launch)
        launch.live = launch.waiting_to_trigger = len(launch.bodies)
        for index, body in enumerate(launch.bodies):
            thread = Thread(launch, index, dict(base) if index == 0 else launch.threads[0].base)
            thread.patience = self._patience
            thread.greenlet = self._greenlet(self._guarded(thread, body), parent=self._main)
            # Begun here, and not from another thread: it would begin on top of that one's stack.
            thread.greenlet.switch(load_greenlet().getcurrent())
            launch.threads.append(thread)
        self._runnable += launch.threads

    def _guarded(self, thread: Thread, body: Callable[[], None]) -> Callable[[Any], None]:
        def run(starter: Any) -> None:
            starter.switch()
            try:
                # Its own, as the state of a greenlet is.
                with np.errstate(all="ignore"):
                    body()
            except ProtocolError:
                raise
            except Exception as error:
                raise ProtocolError(
                    Verdict.RAISED,
                    f"{thread} of {thread.launch.name} raised {type(error).__name__}: {error}",
                    thread.rank,
                ) from error

        return run

    def _thread_ended(self, thread: Thread) -> None:
        launch = thread.launch
        thread.has_ended = True
        self._confirmed = False
        self._runnable.remove(thread)
        launch.live -= 1
        if not thread.has_triggered:
            launch.waiting_to_trigger -= 1
        for which in [which for which in self._offers if which[0] is launch]:
            self._complete(which)
        if launch.live == 0:
            self._end(launch)
        if self.resident is not None or launch.has_ended:
            self._start_launches()

    def _end(self, launch: Launch) -> None:
        queues = [queue for thread in launch.threads for queue in thread.queues.values()]
        while queues:
            queue = queues[self.schedule.must_perform(len(queues))]
            if queue.stores:
                self.memory.perform(queue)
            if not queue.stores:
                queues.remove(queue)
        views = self._views[launch.rank]
        for location, index in self.memory.joined(launch.threads).items():
            if index > views.get(location, 0):
                views[location] = index
        launch.has_ended = True
        self._live.remove(launch)
        self._runnable += launch.behind
        for log in {id(s.area.log): s.area.log for s in launch.rights.values()}.values():
            if log is not None:
                log.end_launch(launch.rank)
        launch.at_end()

    # Who goes on

    def _turn(self) -> Thread:
        """Let others go on; return the thread that called, when it is its turn again."""
        self._steps += 1
        if self._steps > self.limit:
            raise ProtocolError(
                Verdict.LIVELOCK,
                f"no end after {self.limit} operations",
                *{thread.rank for thread in self._runnable},
            )
        queues = self.memory.queues
        if queues:
            at = self.schedule.may_perform(len(queues))
            if at >= 0:
                self.memory.perform(queues[at])
        current: Thread = self._current
        runnable = self._runnable
        if len(runnable) > 1:
            chosen = self.schedule.next_thread(runnable, current)
            if chosen is not current:
                self._current = chosen
                chosen.greenlet.switch()
        return current

    def _leave(self) -> None:
        """Let others go on until the calling thread is among those who can."""
        current = self._current
        self._runnable.remove(current)
        if not self._runnable:
            self._make_runnable()
        chosen = self.schedule.next_thread(self._runnable, None)
        if chosen is not current:
            self._current = chosen
            chosen.greenlet.switch()

    def _make_runnable(self) -> None:
        queues = self.memory.queues
        while not self._runnable and queues:
            self.memory.perform(queues[self.schedule.must_perform(len(queues))])
        if self._runnable:
            return
        parked = [t for launch in self._live for t in launch.threads if t.parked]
        if parked and not self._confirmed:
            self._confirmed = True
            for thread in parked:
                thread.parked = False
                thread.confirming = CONFIRMING_POLLS
            self._runnable += parked
            return
        stuck = [t for launch in self._live for t in launch.threads if not t.has_ended]
        what = "; ".join(f"{thread} {self._waits_for(thread)}" for thread in stuck[:4])
        raise ProtocolError(
            Verdict.DEADLOCK,
            f"nobody can go on, and no store is left to arrive: {what}"
            + (f"; and {len(stuck) - 4} more" if len(stuck) > 4 else ""),
            *{thread.rank for thread in stuck},
        )

    def _waits_for(self, thread: Thread) -> str:
        if not thread.parked:
            return "waits for threads that do not come"
        unread = [at for at in thread.polled if not self._is_packet(at)] or thread.polled
        return f"polls {self.map.describe(unread[0] << 3)}"

    def _is_packet(self, location: int) -> bool:
        return self.memory.order_of(location)[-1].packet is not None

    def _wake(self, location: int) -> None:
        for thread in self._parked.pop(location, ()):
            if thread.parked:
                thread.parked = False
                self._runnable.append(thread)

    def _performed(self, location: int, before: Message, store: Store) -> None:
        if self.moves is not None:
            who = store.queue.observer
            self.moves.add(self._steps, who, "has performed", location << 3, (store.value,))
        if before.packet is not None or store.packet is not None:
            packet = store.packet if isinstance(store.packet, Packet) else before.packet
            if isinstance(packet, Packet):
                packet.log.performed(before, store)
        self._confirmed = False
        if location in self._parked:
            self._wake(location)

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

    def load(self, address: int, nwords: int, order: Order) -> tuple[int, ...]:
        """Load words, 8 aligned bytes of them at a time."""
        who: Thread = self._current
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
            self._turn()
        self.operations += 1
        location = address >> 3
        who.polled.append(location)
        read = self.memory.read
        low = read(who, location)
        if nwords == 4:
            who.polled.append(location + 1)
            high = read(who, location + 1)
            found: tuple[int, ...] = (low & LOW, low >> 32, high & LOW, high >> 32)
        elif nwords == 2:
            found = low & LOW, low >> 32
        else:
            found = ((low >> 32 if address & 4 else low & LOW),)
        if self.moves is not None:
            self.moves.add(self._steps, who, f"loads ({order.value})", address, found)
        return found

    def store(self, address: int, words: tuple[int, ...], order: Order) -> None:
        """Store words; each 8 aligned bytes of them are performed by themselves."""
        who: Thread = self._current
        span = self._span(who, address, 4 * len(words), stores=True)
        if self.every_point or span.is_shared:
            self._turn()
        self._acts(who)
        if self.moves is not None:
            self.moves.add(self._steps, who, f"stores ({order.value})", address, words)
        log, packet = span.area.log, None
        if log is not None:
            packet = log.store(who.rank, span.area.rank, address - span.area.address, words)
        store, location = self.memory.store, address >> 3
        if len(words) == 1:
            shift = 32 if address & 4 else 0
            store(who, location, words[0] << shift, LOW << shift, packet=packet)
            return
        if order is Order.RELEASE_SYS:
            store(who, location, words[1] << 32 | words[0], releases=True)
            return
        for at in range(0, len(words), 2):
            store(who, location + at // 2, words[at + 1] << 32 | words[at], packet=packet)

    def load_part(self, address: int, nbytes: int) -> int:
        """Load bytes."""
        who: Thread = self._current
        span = self._span(who, address, nbytes, stores=False)
        if self.every_point or span.is_shared:
            self._turn()
        self.operations += 1
        who.polled.append(address >> 3)
        value = self.memory.read(who, address >> 3)
        found = value >> 8 * (address & 7) & (1 << 8 * nbytes) - 1
        if self.moves is not None:
            self.moves.add(self._steps, who, f"loads {nbytes} bytes", address, (found,))
        return found

    def store_part(self, address: int, nbytes: int, value: int) -> None:
        """Store bytes."""
        who: Thread = self._current
        span = self._span(who, address, nbytes, stores=True)
        if self.every_point or span.is_shared:
            self._turn()
        self._acts(who)
        if self.moves is not None:
            self.moves.add(self._steps, who, f"stores {nbytes} bytes", address, (value,))
        shift = 8 * (address & 7)
        mask = (1 << 8 * nbytes) - 1 << shift
        self.memory.store(who, address >> 3, value << shift, mask)

    def exchange(self, address: int, word: int) -> int:
        """Store a word at once, and return the one before."""
        who: Thread = self._current
        self._span(who, address, 4, stores=True)
        self._turn()
        self._acts(who)
        shift = 32 if address & 4 else 0
        location = address >> 3
        before = self.memory.exchange(who, location, word << shift, LOW << shift) >> shift & LOW
        if self.moves is not None:
            self.moves.add(self._steps, who, "exchanges", address, (before, word))
        if location in self._parked:
            self._wake(location)
        return before

    def add(self, address: int, value: int) -> None:
        """Add to a word, when the addition is performed."""
        shift = 32 if address & 4 else 0
        self._add(address, 4, value << shift, LOW << shift, Order.RELAXED_SYS)

    def add_b64(self, address: int, value: int, order: Order) -> None:
        """Add to 64 bits, likewise."""
        self._add(address, 8, value, ALL_BITS, order)

    def _add(self, address: int, nbytes: int, value: int, mask: int, order: Order) -> None:
        who: Thread = self._current
        self._span(who, address, nbytes, stores=True)
        self._turn()
        self._acts(who)
        if self.moves is not None:
            self.moves.add(self._steps, who, f"adds ({order.value})", address, (value,))
        releases = order is Order.RELEASE_SYS
        self.memory.store(who, address >> 3, value, mask, is_addition=True, releases=releases)

    def _acts(self, who: Thread) -> None:
        """Something that is not a poll: from here on old messages may be read again."""
        self.operations += 1
        who.is_busy = True
        who.patience = self._patience

    def fence(self, scope: Scope) -> None:
        """Order what the thread did and saw."""
        who = self._turn()
        who.is_busy = True
        who.patience = self._patience
        if self.moves is not None:
            self.moves.add(self._steps, who, f"fences ({scope.value})", 0, ())
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
        who = self._turn()
        who.is_busy = True
        size = self.warp_threads if group is Group.WARP else who.launch.block_threads
        number, place = divmod(who.index, size)
        if len(who.launch.threads) < (number + 1) * size:
            raise ProtocolError(
                Verdict.RAISED,
                f"{who} of {who.launch.name} meets its {group.value}, which has "
                f"{len(who.launch.threads) - number * size} threads; expected {size}: launch whole "
                f"{group.value}s",
                who.rank,
            )
        which = who.launch, group, number, orders_memory
        if self.moves is not None:
            self.moves.add(self._steps, who, f"meets its {group.value}", 0, (offered,))
        self._offers.setdefault(which, {})[place] = who, offered
        self._complete(which)
        while who.met is None:
            self._leave()
        found, who.met = who.met, None
        who.patience = self._patience
        return place, found

    def _complete(self, which: tuple[Launch, Group, int, bool]) -> None:
        launch, group, number, orders_memory = which
        offers = self._offers[which]
        size = self.warp_threads if group is Group.WARP else launch.block_threads
        group_threads = launch.threads[number * size : (number + 1) * size]
        if not offers or any(
            not thread.has_ended and place not in offers
            for place, thread in enumerate(group_threads)
        ):
            return
        values = [
            offers[place][1] if place in offers else None for place in range(len(group_threads))
        ]
        members = [thread for thread, _ in offers.values()]
        if orders_memory:
            self.memory.meet(list(members))
        del self._offers[which]
        for thread in members:
            thread.met = values
            if thread not in self._runnable:
                self._runnable.append(thread)

    def relax(self) -> None:
        """Wait, after a poll that would find the same again, for what it polled to change."""
        who: Thread = self._current
        polled = who.polled
        if who.confirming:
            who.confirming -= 1
            self._turn()
        elif polled and not who.is_busy and not self.tick_ns and self._is_up_to_date(who):
            who.parked = True
            for location in polled:
                self._parked.setdefault(location, []).append(who)
            self._leave()
        else:
            self._turn()
        who.polled = []
        who.is_busy = False

    def _is_up_to_date(self, who: Thread) -> bool:
        messages = self.memory.messages
        return all(who.oldest(location) == len(messages[location]) - 1 for location in who.polled)

    def clock_ns(self) -> int:
        """Look at a clock that only runs when it is looked at."""
        self._current.is_busy = True
        self._time_ns += self.tick_ns
        return self._time_ns

    # Programmatic launch

    def wait_for_launch(self) -> None:
        """Wait until the rank's launch before this one has ended, and see what it did."""
        who = self._turn()
        before = who.launch.before
        if before is not None and not before.has_ended:
            before.behind.append(who)
            self._leave()
        who.base, who.view = dict(self._views[who.rank]), {}

    def trigger(self) -> None:
        """Let the rank's next launch start, once all threads of this one say so or have ended."""
        who = self._turn()
        if not who.has_triggered:
            who.has_triggered = True
            who.launch.waiting_to_trigger -= 1
            self._start_launches()
