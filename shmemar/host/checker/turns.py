"""Whose turn it is: threads that can go on, threads that wait, and what becomes of it.

A thread that polls and would find the same again is parked, until a location that it polled has
changed; so a poll costs what it sees, and that nobody can go on is seen at once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from shmemar.host.checker.verdict import ProtocolError, Verdict

if TYPE_CHECKING:
    from shmemar.host.checker.memory_map import MemoryMap
    from shmemar.host.checker.schedule import Schedule
    from shmemar.host.checker.threads import Launch, Thread
    from shmemar.host.checker.weak_memory import WeakMemory

__all__ = ["Turns"]

CONFIRMING_POLLS = 100
"""Polls of each thread before a deadlock is called one: a loop of fewer may still end by itself."""

SHOWN_THREADS = 4


class Turns:
    """Threads of all ranks, of which one runs.

    Attributes:
        current: The thread that runs.
        runnable: Those that can go on.
        live: Launches that have started and not ended.
        steps: Operations so far.
        limit: Operations after which the run is a livelock.
    """

    def __init__(
        self, schedule: Schedule, memory: WeakMemory, memory_map: MemoryMap, limit: int
    ) -> None:
        """Begin with no thread."""
        self.current: Any = None
        self.runnable: list[Thread] = []
        self.live: list[Launch] = []
        self.steps = 0
        self.limit = limit
        self._schedule = schedule
        self._memory = memory
        self._map = memory_map
        self._parked: dict[int, list[Thread]] = {}
        self._is_confirmed = False

    def give(self) -> None:
        """Let a thread run, from outside of all; come back when one has ended: the current one."""
        if not self.runnable:
            self._find_runnable()
        self.current = self._schedule.next_thread(self.runnable, None)
        self.current.greenlet.switch()

    def take(self) -> Thread:
        """Let others go on; return the thread that called, when it is its turn again."""
        self.steps += 1
        if self.steps > self.limit:
            raise ProtocolError(
                Verdict.LIVELOCK,
                f"no end after {self.limit} operations",
                *{thread.rank for thread in self.runnable},
            )
        queues = self._memory.queues
        if queues:
            at = self._schedule.may_perform(len(queues))
            if at >= 0:
                self._memory.perform(queues[at])
        current: Thread = self.current
        if len(self.runnable) > 1:
            self._go_on(self._schedule.next_thread(self.runnable, current))
        return current

    def wait(self, for_what: str) -> None:
        """Let others go on until the calling thread is among those who can."""
        self.current.waits_for = for_what
        self.runnable.remove(self.current)
        if not self.runnable:
            self._find_runnable()
        self._go_on(self._schedule.next_thread(self.runnable, None))

    def _go_on(self, chosen: Any) -> None:
        if chosen is not self.current:
            self.current = chosen
            chosen.greenlet.switch()

    def end(self, thread: Thread) -> None:
        """Take out a thread that has ended."""
        thread.has_ended = True
        self._is_confirmed = False
        self.runnable.remove(thread)

    def poll(self, *, may_park: bool) -> None:
        """Let others go on, after a poll that found nothing new."""
        who: Thread = self.current
        if who.confirming:
            who.confirming -= 1
            self.take()
        elif may_park and who.polled and not who.is_busy and self._is_up_to_date(who):
            who.is_parked = True
            for location in who.polled:
                self._parked.setdefault(location, []).append(who)
            self.wait("what it polls")
        else:
            self.take()
        who.polled = []
        who.is_busy = False

    def _is_up_to_date(self, who: Thread) -> bool:
        messages = self._memory.messages
        return all(who.oldest(at) == len(messages[at]) - 1 for at in who.polled)

    def changed(self, location: int) -> None:
        """Let threads go on that were parked on a location."""
        self._is_confirmed = False
        for thread in self._parked.pop(location, ()):
            if thread.is_parked:
                thread.is_parked = False
                self.runnable.append(thread)

    def _find_runnable(self) -> None:
        queues = self._memory.queues
        while not self.runnable and queues:
            self._memory.perform(queues[self._schedule.must_perform(len(queues))])
        if self.runnable:
            return
        stuck = [t for launch in self.live for t in launch.threads if not t.has_ended]
        parked = [thread for thread in stuck if thread.is_parked]
        if self._is_confirmed or not parked:
            raise ProtocolError(
                Verdict.DEADLOCK,
                f"nobody can go on, and no store is left to arrive: {self._tell(stuck)}",
                *{thread.rank for thread in stuck},
            )
        self._is_confirmed = True
        for thread in parked:
            thread.is_parked = False
            thread.confirming = CONFIRMING_POLLS
        self.runnable += parked

    def _tell(self, stuck: list[Thread]) -> str:
        told = [f"{thread} {self._what_of(thread)}" for thread in stuck[:SHOWN_THREADS]]
        if len(stuck) > SHOWN_THREADS:
            told.append(f"and {len(stuck) - SHOWN_THREADS} more")
        return "; ".join(told)

    def _what_of(self, thread: Thread) -> str:
        if not thread.is_parked:
            return f"waits for {thread.waits_for}"
        packets = self._memory.order_of
        missing = [at for at in thread.polled if packets(at)[-1].packet is None] or thread.polled
        return f"polls {self._map.describe(missing[0] << 3)}"
