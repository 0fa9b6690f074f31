"""What the threads of a run did, for whoever wants to know why it went wrong."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable

    from shmemar.host.checker.memory_map import MemoryMap

__all__ = ["Move", "Moves"]

KEPT_MOVES = 4000


@dataclass
class Move:
    """An operation of a thread, or a store of it that was performed.

    Attributes:
        step: Its number in the run.
        thread: The thread.
        what: What it did.
        address: Where; 0 for nowhere.
        words: What it loaded or stored.
        times: How often it did so, one time after another, but for other loads.
    """

    step: int
    thread: Any
    what: str
    address: int
    words: tuple[Any, ...]
    times: int = 1

    def told(self, memory: MemoryMap) -> str:
        """One line."""
        words = ", ".join(f"{w:#x}" if type(w) is int else str(w) for w in self.words)
        parts = [f"{self.step:>6} {self.thread} {self.what}"]
        if self.address:
            parts.append(memory.describe(self.address))
        line = " ".join(parts) + (f": {words}" if words else "")
        return line + (f" ({self.times} times)" if self.times > 1 else "")


class Moves:
    """The last moves of a run; what a poll finds again and again is one of them."""

    def __init__(self) -> None:
        """Begin with none."""
        self._moves: deque[Move] = deque(maxlen=KEPT_MOVES)
        self._polls: dict[Any, dict[int, Move]] = {}

    def add(self, step: int, thread: Any, what: str, address: int, words: tuple[Any, ...]) -> None:
        """Add one."""
        move = Move(step, thread, what, address, words)
        polls = self._polls.setdefault(thread, {})
        if not what.startswith("loads"):
            if what != "has performed":
                polls.clear()
        else:
            same = polls.get(address)
            if same is not None and same.words == words:
                same.times += 1
                same.step = step
                return
            polls[address] = move
        self._moves.append(move)

    def last(self, count: int, ranks: Iterable[int], memory: MemoryMap) -> tuple[str, ...]:
        """Tell of the last moves of the threads of some ranks, oldest first."""
        among = set(ranks)
        found = [move for move in self._moves if move.thread.rank in among]
        found.sort(key=lambda move: move.step)
        return tuple(move.told(memory) for move in found[-count:])
