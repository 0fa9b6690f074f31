"""Launches and threads of the checker, as greenlets run them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from shmemar.errors import BackendUnavailableError
from shmemar.host.checker.messages import Observer
from shmemar.host.checker.verdict import ProtocolError, Verdict

if TYPE_CHECKING:
    from collections.abc import Callable

    from shmemar.host.checker.memory_map import Rights
    from shmemar.host.checker.messages import View

__all__ = ["Launch", "Thread", "load_greenlet"]


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
        threads: Its threads, once it has started.
        live: Threads that have not ended.
        untriggered: Threads that have neither ended nor let the next launch start.
        before: The rank's launch before it.
        behind: Threads of the next launch that wait for its end.
        has_ended: True once it has.
    """

    name: str
    rank: int
    bodies: list[Callable[[], None]]
    rights: Rights
    block_threads: int
    at_end: Callable[[], None] = lambda: None
    threads: list[Thread] = field(default_factory=list)
    live: int = 0
    untriggered: int = 0
    before: Launch | None = None
    behind: list[Thread] = field(default_factory=list)
    has_ended: bool = False


class Thread(Observer):
    """A thread of a launch.

    Attributes:
        launch: The launch.
        index: Its number in the launch.
        number: Its place among all threads: by rank, then by index.
        rights: What it may touch.
        greenlet: Where it runs.
        polled: Locations that it loaded since its last poll.
        is_busy: True when it did something else since then.
        is_parked: True while it waits for what it polled to change.
        confirming: Polls that are left before it may be parked again.
        met: What the threads of a meeting offered, until it has fetched that.
        has_triggered: True once it let the next launch start.
        has_ended: True once it has.
        waits_for: What it waits for, unless it is parked.
    """

    def __init__(self, launch: Launch, index: int, base: View, patience: int) -> None:
        """Start at the view `base`."""
        super().__init__(launch.rank, base, patience)
        self.launch = launch
        self.index = index
        self.number = launch.rank << 20 | index
        self.rights = launch.rights
        self.greenlet: Any = None
        self.polled: list[int] = []
        self.is_busy = True
        self.is_parked = False
        self.confirming = 0
        self.met: list[Any] = []
        self.has_triggered = False
        self.has_ended = False
        self.waits_for = "nothing"

    def __str__(self) -> str:
        """Rank and thread."""
        return f"rank {self.rank} thread {self.index}"

    def start(self, body: Callable[[], None], main: Any) -> None:
        """Make its greenlet, which goes on with the body when it is switched to; then `main` does.

        It is begun here, and not from another thread: it would begin on top of that one's stack.
        """
        module = load_greenlet()

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
                    f"{self} of {self.launch.name} raised {type(error).__name__}: {error}",
                    self.rank,
                ) from error

        self.greenlet = module.greenlet(run, parent=main)
        self.greenlet.switch(module.getcurrent())
