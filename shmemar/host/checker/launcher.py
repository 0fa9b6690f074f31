"""Each rank's launches, one after another, or overlapping as programmatic launch lets them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from shmemar.host.checker.threads import Thread, load_greenlet

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from shmemar.host.checker.messages import View
    from shmemar.host.checker.schedule import Schedule
    from shmemar.host.checker.threads import Launch
    from shmemar.host.checker.turns import Turns
    from shmemar.host.checker.weak_memory import WeakMemory

__all__ = ["Launcher"]


class Launcher:
    """Starts launches, and ends them.

    Attributes:
        views: What the next launch of a rank sees at least, by rank.
    """

    def __init__(
        self,
        schedule: Schedule,
        memory: WeakMemory,
        turns: Turns,
        thread_ended: Callable[[Launch], None],
    ) -> None:
        """Begin.

        Args:
            schedule: Makes all choices.
            memory: The memory.
            turns: Runs the threads.
            thread_ended: Hears of each thread of a launch that has ended.
        """
        self.views: dict[int, View] = {}
        self._schedule = schedule
        self._memory = memory
        self._turns = turns
        self._thread_ended = thread_ended
        self._main: Any = load_greenlet().getcurrent()
        self._todo: dict[int, Iterator[Launch]] = {}
        self._last: dict[int, Launch] = {}
        self._resident: int | None = None

    def run(self, ranks: list[Iterator[Launch]], resident: int | None) -> None:
        """Run all to their end; `resident` is that of a `HostileMachine`."""
        self._todo = dict(enumerate(ranks))
        self._resident = resident
        self._start_launches()
        while self._turns.live:
            self._turns.give()
            self._end_thread(self._turns.current)

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
        if self._resident is None:
            return last is None or last.has_ended
        has_room = len(self._turns.live) < self._resident
        return has_room and (last is None or last.has_ended or not last.untriggered)

    def _start(self, launch: Launch) -> None:
        launch.before = self._last.get(launch.rank)
        self._last[launch.rank] = launch
        self._turns.live.append(launch)
        launch.live = launch.untriggered = len(launch.bodies)
        base, patience = dict(self.views.setdefault(launch.rank, {})), self._schedule.patience()
        for index, body in enumerate(launch.bodies):
            thread = Thread(launch, index, base, patience)
            thread.start(body, self._main)
            launch.threads.append(thread)
        self._turns.runnable += launch.threads

    def _end_thread(self, thread: Thread) -> None:
        launch = thread.launch
        self._turns.end(thread)
        launch.live -= 1
        if not thread.has_triggered:
            launch.untriggered -= 1
        self._thread_ended(launch)
        if launch.live == 0:
            self._end(launch)
        if self._resident is not None or launch.has_ended:
            self._start_launches()

    def _end(self, launch: Launch) -> None:
        """Perform all its stores, and let the rank's next launch see them."""
        queues = [queue for thread in launch.threads for queue in thread.queues.values()]
        while queues:
            queue = queues[self._schedule.must_perform(len(queues))]
            if queue.stores:
                self._memory.perform(queue)
            if not queue.stores:
                queues.remove(queue)
        view = self.views[launch.rank]
        for location, index in self._memory.joined(launch.threads).items():
            if index > view.get(location, 0):
                view[location] = index
        self._memory.link_view({}, view)
        launch.has_ended = True
        self._turns.live.remove(launch)
        self._turns.runnable += launch.behind
        for log in {id(s.area.log): s.area.log for s in launch.rights.values()}.values():
            if log is not None:
                log.end_launch(launch.rank)
        launch.at_end()

    def wait(self, who: Thread) -> None:
        """Let a thread wait until its rank's launch before has ended, and see what it did."""
        before = who.launch.before
        if before is not None and not before.has_ended:
            before.behind.append(who)
            self._turns.wait("the end of the launch before")
        who.base, who.view = dict(self.views[who.rank]), {}
        who.has_joined.clear()

    def trigger(self, who: Thread) -> None:
        """Let the rank's next launch start, once all threads of this one say so or have ended."""
        if not who.has_triggered:
            who.has_triggered = True
            who.launch.untriggered -= 1
            self._start_launches()
