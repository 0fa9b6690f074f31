"""What the checker's memory holds: messages, stores that wait, and what threads may see of both."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["ALIAS", "Message", "Observer", "Queue", "Released", "Store", "View"]

ALIAS = 1 << 60
"""Added to a location: its other name, that of a multicast address. It fits numpy's integers."""

View: TypeAlias = dict[int, int]
"""Index of a message by location; 0 where there is none."""

Released: TypeAlias = tuple[View, ...]
"""Views that a message carries."""


class Message:
    """What stood in a location, from one store to the next.

    Attributes:
        value: 64 bits.
        rank: The rank that stored it.
        of_gpu: Views that it carries to threads of its rank.
        of_sys: Views that it carries to all.
        packet: The packet that it is a half of, if it is.
        was_read: True once that half was read by whom it was for.
        line: Index of each message that arrived with it, by location, where they did at once.
    """

    __slots__ = ("line", "of_gpu", "of_sys", "packet", "rank", "value", "was_read")

    def __init__(
        self,
        value: int,
        rank: int,
        of_gpu: Released = (),
        of_sys: Released = (),
        packet: Any = None,
    ) -> None:
        self.value = value
        self.rank = rank
        self.of_gpu = of_gpu
        self.of_sys = of_sys
        self.packet = packet
        self.was_read = False
        self.line: View = {}


class Store:
    """A store or an addition.

    Attributes:
        queue: Where it waits.
        value: Its bits.
        mask: The bits that it is of.
        add: ``add(before, value)`` of an addition, on all 64 bits; None of a store.
        packet: The packet that it is a half of, or what else a `PacketLog` calls it.
        of_gpu: Views that it carries to threads of its rank.
        of_sys: Views that it carries to all.
        behind: Stores that are performed before it.
        releases: True where it also carries a view of those.
        line: Additions that are performed at once with it.
        index: Index of its message; -1 while it waits.
        is_linked: True once a fence made it known by both names of its location.
    """

    __slots__ = (
        "add",
        "behind",
        "index",
        "is_linked",
        "line",
        "mask",
        "of_gpu",
        "of_sys",
        "packet",
        "queue",
        "releases",
        "value",
    )

    def __init__(
        self,
        queue: Queue,
        value: int,
        mask: int,
        *,
        add: Callable[[int, int], int] | None,
        packet: Any,
    ) -> None:
        self.queue = queue
        self.value = value
        self.mask = mask
        self.add = add
        self.packet = packet
        self.of_gpu = queue.observer.of_gpu
        self.of_sys = queue.observer.of_sys
        self.behind: list[Store] = []
        self.releases = False
        self.line: tuple[Store, ...] = ()
        self.index = -1
        self.is_linked = False

    @property
    def names(self) -> tuple[int, ...]:
        """Names of its location by which who sees it is known to see it."""
        name = self.queue.location
        return (name, name ^ ALIAS) if self.is_linked else (name,)


class Queue:
    """Stores of one thread to one location that were not performed, oldest first."""

    __slots__ = ("location", "observer", "stores")

    def __init__(self, observer: Observer, location: int) -> None:
        self.observer = observer
        self.location = location
        self.stores: list[Store] = []


class Observer:
    """What a thread has done, may see, and passes on.

    Attributes:
        rank: Its rank.
        base: Its view when it started or last met others; shared, and so never changed.
        view: What is newer since.
        queues: Its stores that wait, by location.
        seen: Stores that wait and that it sees all the same, its own and others'; shared.
        unacquired: Messages that it read and whose views a fence would give it.
        of_gpu: Views that its stores carry to threads of its rank.
        of_sys: Views that they carry to all.
        patience: Old messages that it may still read before it must see the newest.
        has_joined: Numbers (`id`) of views of messages that are part of its own by now.
    """

    def __init__(self, rank: int, base: View, patience: int) -> None:
        self.rank = rank
        self.base = base
        self.view: View = {}
        self.queues: dict[int, Queue] = {}
        self.seen: dict[int, Store] = {}
        self.unacquired: list[Message] = []
        self.of_gpu: Released = ()
        self.of_sys: Released = ()
        self.patience = patience
        self.has_joined: set[int] = set()

    def oldest(self, location: int) -> int:
        """Index of the oldest message that it may read."""
        own = self.view.get(location)
        return self.base.get(location, 0) if own is None else own
