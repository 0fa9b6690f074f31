"""Threads of a warp or a block that meet, and what they tell one another."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from shmemar.device.interpreter import Group
from shmemar.host.checker.verdict import ProtocolError, Verdict

if TYPE_CHECKING:
    from collections.abc import Callable

    from shmemar.host.checker.threads import Launch, Thread
    from shmemar.host.checker.turns import Turns
    from shmemar.host.checker.weak_memory import WeakMemory

__all__ = ["Meetings"]


class _Which(NamedTuple):
    """A meeting: of which threads, and what it does."""

    launch: Launch
    group: Group
    number: int
    orders_memory: bool
    then: Callable[[list[tuple[Thread, Any] | None]], None] | None


class Meetings:
    """Meetings that are not complete.

    Attributes:
        warp_threads: Lanes of a warp.
    """

    def __init__(self, turns: Turns, memory: WeakMemory, warp_threads: int) -> None:
        """Begin with none."""
        self.warp_threads = warp_threads
        self._turns = turns
        self._memory = memory
        self._offers: dict[_Which, dict[int, tuple[Thread, Any]]] = {}

    def meet(
        self,
        who: Thread,
        group: Group,
        offered: Any,
        *,
        orders_memory: bool,
        then: Callable[[list[tuple[Thread, Any] | None]], None] | None = None,
    ) -> tuple[int, list[Any]]:
        """Wait for those of the group who have not ended; as of `Machine.meet`.

        `then` is what happens when the last one has come, before any goes on: it is given each
        thread and what it offered, by place.
        """
        size = self._size(who.launch, group)
        number, place = divmod(who.index, size)
        missing = (number + 1) * size - len(who.launch.threads)
        if missing > 0:
            raise ProtocolError(
                Verdict.RAISED,
                f"{who} of {who.launch.name} meets its {group.value}, which has {size - missing} "
                f"threads; expected {size}: launch whole {group.value}s",
                who.rank,
            )
        which = _Which(who.launch, group, number, orders_memory, then)
        self._offers.setdefault(which, {})[place] = who, offered
        self._complete(which)
        if not who.met:
            self._turns.wait(f"threads of its {group.value} that do not come")
        found, who.met = who.met, []
        return place, found

    def _size(self, launch: Launch, group: Group) -> int:
        return self.warp_threads if group is Group.WARP else launch.block_threads

    def thread_ended(self, launch: Launch) -> None:
        """Complete meetings that waited for a thread which has ended."""
        for which in [which for which in self._offers if which.launch is launch]:
            self._complete(which)

    def _complete(self, which: _Which) -> None:
        offers, size = self._offers[which], self._size(which.launch, which.group)
        group = which.launch.threads[which.number * size : (which.number + 1) * size]
        if any(not t.has_ended and place not in offers for place, t in enumerate(group)):
            return
        del self._offers[which]
        values = [offers[place][1] if place in offers else None for place in range(size)]
        members = [thread for thread, _ in offers.values()]
        if which.orders_memory:
            self._memory.meet(list(members))
        if which.then:
            which.then([offers.get(place) for place in range(size)])
        for thread in members:
            thread.met = values
            if thread is not self._turns.current:
                self._turns.runnable.append(thread)
