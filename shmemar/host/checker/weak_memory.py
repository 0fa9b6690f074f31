"""Memory of several GPUs as the checker models it: late, reordered, and old where that is allowed.

A *location* is 8 aligned bytes. What was stored there, in the order in which it came to be, is a
list of *messages*, its modification order.

* A store waits in its thread's queue for the location. It is *performed*, which appends a message,
  at any later time: after the stores of the thread to the same location that came before, but
  before or after any other. So packets of 16 bytes are seen in halves, and a reset that comes late
  destroys what has arrived meanwhile. An addition waits likewise, and adds when it is performed.
* Additions to a line of 128 bytes that 8 lanes of a warp make by one instruction are performed at
  once, and a thread that has read one of them reads none of the others' bytes as they were before.
  PTX does not promise that: it is what a litmus test has to show of a machine.
* The thread sees its own stores, and after a meeting of threads those of the others who met.
* A thread has a *view*: of each location the oldest message that it may read. A load reads that one
  or any newer, which becomes the view. Nothing else raises a view but what follows.
* ``fence.acq_rel.sys`` performs all stores that the thread made or saw. What it stores afterwards,
  unless weakly, carries its view; whoever reads that, unless weakly, and then runs a fence of
  system scope has at least this view. A store or addition of release order does so by itself: what
  came before is performed before it. A load of acquire order has the view of what it read at once.
* ``fence.acq_rel.gpu`` does so for memory of the thread's own GPU, and between threads of it: each
  rank has a GPU of its own here. Stores to peers stay late, and peers get no view.
* The end of a kernel performs all stores of its threads, and joins their views for the next one.
* A multicast address is another name of each rank's location, an *alias*: what is stored to all
  ranks is a store to each of them, which waits by itself. A thread has a queue and an entry of its
  view for either name. By one name it neither sees its stores by the other nor keeps order with
  them, and a view of one says nothing about the other, until ``fence.proxy.alias`` makes both of
  both; so does the end of a kernel. Polls by one name read what was stored by the other, whole, and
  take its view: that PTX does not promise.

Not modelled: load buffering, where a store is performed before a load that comes before it in
program order (the kernels rely on it that no store is performed before the branch that it depends
on); accesses torn within 8 bytes; what the memory model does not define, such as races of weak
accesses, beyond this; a view of 4 bytes apart from that of the other 4.

Sources: PTX ISA 8.x, "Memory Consistency Model"; Kang et al., "A Promising Semantics for
Relaxed-Memory Concurrency" (2017), whose views and messages these are, without promises.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from shmemar.device.interpreter import Scope
from shmemar.host.checker.messages import ALIAS, Message, Queue, Store

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from shmemar.host.checker.messages import Observer, Released, View

__all__ = ["ALIAS", "ALL_BITS", "WeakMemory"]

ALL_BITS = (1 << 64) - 1


MANY_VIEWS = 12
"""Views of a message, beyond which they are made one: a counter would collect them for ever."""


class WeakMemory:
    """Locations, what waits to be performed, and who may read what.

    Attributes:
        messages: Modification order of each location.
        queues: Queues that are not empty, in the order in which they came to be so.
        has_aliases: True where locations have a second name; False spares the work of it.
        owner_of: ``owner_of(location)`` is the rank whose memory it is.
        choose: ``choose(oldest, newest)`` picks the message that a load reads.
        is_performed: ``is_performed(location, before, store)`` hears of each store that becomes a
            message, and of the one before it.
        is_read: ``is_read(message)`` hears of the first reading of a half of a packet.
    """

    def __init__(
        self,
        *,
        initial: Callable[[int], int],
        owner_of: Callable[[int], int],
        choose: Callable[[int, int], int],
        is_performed: Callable[[int, Message, Store], None],
        is_read: Callable[[Message], None],
    ) -> None:
        """Make memory in which a location holds ``initial(location)`` at first."""
        self.messages: dict[int, list[Message]] = {}
        self.queues: list[Queue] = []
        self.owner_of = owner_of
        self.choose = choose
        self.is_performed = is_performed
        self.is_read = is_read
        self._initial = initial
        self.has_aliases = False

    def order_of(self, location: int) -> list[Message]:
        """The modification order of a location."""
        messages = self.messages.get(location)
        if messages is None:
            value = self._initial(location)
            messages = self.messages[location] = [Message(value, self.owner_of(location))]
        return messages

    def read(self, who: Observer, location: int, *, is_strong: bool, acquires: bool = False) -> int:
        """Load a location, relaxed, weak or with acquire order."""
        messages = self.messages.get(location) or self.order_of(location)
        newest = len(messages) - 1
        oldest = who.view.get(location)
        if oldest is None:
            oldest = who.base.get(location, 0)
        waiting = who.queues.get(location)
        if waiting is not None or who.seen:
            found = self._read_waiting(who, location, waiting)
            if found is not None:
                return found
            oldest, newest = who.oldest(location), len(messages) - 1
        index = newest
        if oldest < newest and who.patience > 0:
            index = self.choose(oldest, newest)
            if index < newest:
                who.patience -= 1
        if index > oldest:
            who.view[location] = index
        message = messages[index]
        if acquires:
            self._join_released(who, message.of_sys)
            if message.rank == who.rank:
                self._join_released(who, message.of_gpu)
        elif is_strong and (message.of_sys or (message.of_gpu and message.rank == who.rank)):
            who.unacquired.append(message)
        if message.packet is not None and not message.was_read:
            message.was_read = True
            self.is_read(message)
        if message.line:
            self._join(who, [message.line])
        return message.value

    def read_alias(self, who: Observer, location: int) -> int:
        """Load a location weakly, by its other name."""
        alias = location + ALIAS
        self._perform_visible(who, alias)
        messages = self.order_of(location)
        index, newest = who.oldest(alias), len(messages) - 1
        if index < newest:
            index = self.choose(index, newest) if who.patience > 0 else newest
            who.patience -= index < newest
            who.view[alias] = index
        return messages[index].value

    def link_aliases(self, who: Observer) -> None:
        """Make what a thread sees by one name of a location seen by the other, too."""
        if not self.has_aliases:
            return
        for queue in who.queues.values():
            for store in queue.stores:
                store.is_linked = True
        for store in who.seen.values():
            store.is_linked = True
        self.link_view(who.base, who.view)

    def link_view(self, base: View, view: View) -> None:
        """Let a view, of which `base` is the older part, say the same of both names."""
        if not self.has_aliases:
            return
        for location in {**base, **view}:
            index = view.get(location, base.get(location, 0))
            if index > view.get(location ^ ALIAS, base.get(location ^ ALIAS, 0)):
                view[location ^ ALIAS] = index

    def _read_waiting(self, who: Observer, location: int, own: Queue | None) -> int | None:
        """What the thread sees of stores that wait; None of nothing."""
        seen = who.seen.get(location)
        if seen is not None and seen.index >= 0:
            if seen.index > who.oldest(location):
                who.view[location] = seen.index
            seen = None
        stores: list[Store] = []
        if seen is not None:
            theirs = seen.queue.stores
            stores += theirs[: theirs.index(seen) + 1]
        if own is not None:
            stores += [store for store in own.stores if store not in stores]
        if not stores:
            return None
        if any(store.add for store in stores):
            for store in stores:
                self.perform_up_to(store)
            return None
        value = self.order_of(location)[-1].value if stores[0].mask != ALL_BITS else 0
        for store in stores:
            value = value & ~store.mask | store.value
        return value

    def store(
        self,
        who: Observer,
        location: int,
        value: int,
        mask: int = ALL_BITS,
        *,
        add: Callable[[int, int], int] | None = None,
        is_strong: bool = True,
        releases: bool = False,
        packet: Any = None,
        behind: list[Store] | None = None,
    ) -> Store:
        """Let a store to the bits of `mask`, or an addition, wait; weak ones carry no view.

        One that releases is performed behind all that the thread made or saw, or just `behind`.
        """
        queue = who.queues.get(location)
        if queue is None:
            queue = who.queues[location] = Queue(who, location)
            self.queues.append(queue)
        store = Store(queue, value, mask, add=add, packet=packet)
        if not is_strong:
            store.of_gpu = store.of_sys = ()
        if who.seen:
            seen = who.seen.get(location)
            if seen is not None and seen.index < 0 and seen.queue is not queue:
                store.behind.append(seen)
        if releases:
            store.releases = True
            store.of_gpu = store.of_sys = who.base, dict(who.view)
            store.behind = self.before_release(who) if behind is None else list(behind)
        queue.stores.append(store)
        return store

    def before_release(self, who: Observer) -> list[Store]:
        """What a thread made or saw, and what waits: a release is performed behind it."""
        return [q.stores[-1] for q in who.queues.values() if q.stores] + list(who.seen.values())

    def perform_at_once(self, stores: Sequence[Store]) -> None:
        """Let additions that wait be performed together, as one."""
        for store in stores:
            store.line = tuple(stores)

    def perform(self, queue: Queue) -> None:
        """Perform the oldest store of a queue."""
        store = queue.stores[0]
        for each in store.behind:
            self.perform_up_to(each)
        location, observer = queue.location % ALIAS, queue.observer
        messages = self.messages.get(location) or self.order_of(location)
        before = messages[-1]
        self.is_performed(location, before, store)
        value, mask = store.value, store.mask
        of_gpu, of_sys = store.of_gpu, store.of_sys
        if store.releases:
            done = ({name: each.index for each in store.behind for name in each.names},)
            of_gpu, of_sys = of_gpu + done, of_sys + done
        if store.add:
            value = before.value & ~mask | store.add(before.value & mask, value) & mask
            of_gpu, of_sys = _together(before.of_gpu, of_gpu), _together(before.of_sys, of_sys)
        elif mask != ALL_BITS:
            value = before.value & ~mask | value
        store.index = len(messages)
        messages.append(Message(value, observer.rank, of_gpu, of_sys, store.packet))
        observer.view[queue.location] = store.index
        if store.is_linked:
            observer.view[queue.location ^ ALIAS] = store.index
        del queue.stores[0]
        if not queue.stores:
            self.queues.remove(queue)
            del observer.queues[queue.location]
        if store.line:
            self._perform_rest_of_line(store)

    def _perform_rest_of_line(self, store: Store) -> None:
        rest = [each for each in store.line if each.index < 0]
        if rest:
            # The last of them finds none left, and joins them.
            self.perform_up_to(rest[0])
            return
        places = {each.queue.location: each.index for each in store.line}
        for location, index in places.items():
            self.messages[location][index].line = places

    def see_all(self, location: int, locations: Iterable[int]) -> None:
        """Let whoever reads the newest message of a location see what others hold now."""
        newest = {each: len(self.order_of(each)) - 1 for each in locations}
        self.order_of(location)[-1].line = newest

    def perform_up_to(self, store: Store) -> None:
        """Perform a store, and what has to be performed before it."""
        while store.index < 0:
            self.perform(store.queue)

    def exchange(self, who: Observer, location: int, value: int, mask: int) -> int:
        """Store bits at once, and return what all of the location held before."""
        self._perform_visible(who, location)
        messages = self.order_of(location)
        before = messages[-1]
        value = before.value & ~mask | value
        views = before.of_gpu + who.of_gpu, before.of_sys + who.of_sys
        messages.append(Message(value, who.rank, *views))
        who.view[location] = len(messages) - 1
        if before.of_sys or (before.of_gpu and before.rank == who.rank):
            who.unacquired.append(before)
        return before.value

    def _perform_visible(self, who: Observer, location: int) -> None:
        seen = who.seen.get(location)
        if seen is not None:
            self.perform_up_to(seen)
        while location in who.queues:
            self.perform(who.queues[location])

    def fence(self, who: Observer, scope: Scope) -> None:
        """Order what a thread did and saw against what it does from now on."""
        is_sys = scope is Scope.SYS
        for queue in list(who.queues.values()):
            if is_sys or self.owner_of(queue.location % ALIAS) == who.rank:
                while queue.stores:
                    self.perform(queue)
        for store in who.seen.values():
            if is_sys or self.owner_of(store.queue.location % ALIAS) == who.rank:
                self.perform_up_to(store)
            for name in store.names:
                if store.index > who.oldest(name):
                    who.view[name] = store.index
        views: dict[int, View] = {}
        later = []
        for message in who.unacquired:
            if is_sys:
                views |= {id(view): view for view in message.of_sys}
            if message.rank == who.rank:
                views |= {id(view): view for view in message.of_gpu}
            elif not is_sys:
                later.append(message)
        who.unacquired = later
        views.pop(id(who.base), None)
        self._join_released(who, views.values())
        released = who.base, dict(who.view)
        who.of_gpu = released
        if is_sys:
            who.of_sys = released

    def _join_released(self, who: Observer, views: Iterable[View]) -> None:
        """Join views that messages carry, which keep them, each of them once."""
        new = [view for view in views if id(view) not in who.has_joined]
        if new:
            self._join(who, new)
            who.has_joined.update(map(id, new))

    def _join(self, who: Observer, views: Iterable[View]) -> None:
        newer, base = who.view, who.base
        newer_of, base_of = newer.get, base.get
        for view in views:
            for location, index in view.items():
                own = newer_of(location)
                if index > (base_of(location, 0) if own is None else own):
                    newer[location] = index

    def meet(self, members: list[Observer]) -> None:
        """Give all members one view, and let each see the stores of the others."""
        base = self.joined(members)
        seen: dict[int, Store] = {}
        for store in self._waiting_of(members):
            before = seen.get(store.queue.location)
            if before is not None and before is not store and before.queue is not store.queue:
                # Both are seen from now on, as one behind the other.
                self.perform_up_to(before)
            seen[store.queue.location] = store
        for store in seen.values():
            if store.index >= 0:
                for name in store.names:
                    base[name] = max(base.get(name, 0), store.index)
        seen = {location: store for location, store in seen.items() if store.index < 0}
        for member in members:
            member.base, member.view, member.seen = base, {}, seen

    def _waiting_of(self, members: list[Observer]) -> list[Store]:
        stores = {id(s): s for member in members for s in member.seen.values()}
        for member in members:
            stores |= {id(q.stores[-1]): q.stores[-1] for q in member.queues.values()}
        return list(stores.values())

    def joined(self, members: Iterable[Observer]) -> View:
        """The view of all members together."""
        members = list(members)
        base = dict(members[0].base) if members else {}
        others = {id(m.base): m.base for m in members if m.base is not members[0].base}
        for view in (*others.values(), *(member.view for member in members)):
            for location, index in view.items():
                if index > base.get(location, 0):
                    base[location] = index
        return base

    def poke(self, location: int, value: int, mask: int) -> int:
        """Store bits at once, as the host does between kernels; return the message's index."""
        messages = self.order_of(location)
        before = messages[-1].value
        messages.append(Message(before & ~mask | value, self.owner_of(location)))
        return len(messages) - 1

    def peek(self, location: int) -> int:
        """What is newest."""
        return self.order_of(location)[-1].value


def _together(first: Released, second: Released) -> Released:
    """Views of what is added to, and those of an addition."""
    views = first + second
    if len(views) <= MANY_VIEWS:
        return views
    joined: View = {}
    for view in {id(view): view for view in views}.values():
        for location, index in view.items():
            if index > joined.get(location, 0):
                joined[location] = index
    return (joined,)
