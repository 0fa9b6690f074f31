"""The machine that tests here derive theirs from."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    from shmemar.device.interpreter import Group, Order, Scope


class RefusingMachine:
    """Refuses everything: a test overrides what it expects to be asked."""

    def load(self, address: int, nwords: int, order: Order) -> tuple[int, ...]:
        """Refuse a load."""
        raise AssertionError(f"unexpected {order} load of {nwords} words at {address:#x}")

    def store(self, address: int, words: tuple[int, ...], order: Order) -> None:
        """Refuse a store."""
        raise AssertionError(f"unexpected {order} store of {words} at {address:#x}")

    def load_part(self, address: int, nbytes: int) -> int:
        """Refuse a load of bytes."""
        raise AssertionError(f"unexpected load of {nbytes} bytes at {address:#x}")

    def store_part(self, address: int, nbytes: int, value: int) -> None:
        """Refuse a store of bytes."""
        raise AssertionError(f"unexpected store of {nbytes} bytes at {address:#x}")

    def exchange(self, address: int, word: int) -> int:
        """Refuse an exchange."""
        raise AssertionError(f"unexpected exchange of {word} at {address:#x}")

    def add(self, address: int, value: int) -> None:
        """Refuse an addition."""
        raise AssertionError(f"unexpected addition of {value} at {address:#x}")

    def add_b64(self, address: int, value: int, order: Order) -> None:
        """Refuse an addition to 64 bits."""
        raise AssertionError(f"unexpected {order} addition of {value} to 64 bits at {address:#x}")

    def wait_for_launch(self) -> None:
        """Refuse to wait for a launch."""
        raise AssertionError("unexpected wait for the launch before")

    def trigger(self) -> None:
        """Refuse to let the next launch start."""
        raise AssertionError("unexpected trigger of the next launch")

    def add_to_line(
        self, address: int, words: tuple[int, ...], add: Callable[[int, int], int]
    ) -> None:
        """Refuse an addition to a line."""
        raise AssertionError(f"unexpected addition to the line at {address:#x}")

    def store_to_all(self, address: int, words: tuple[int, ...], order: Order) -> None:
        """Refuse a store to all ranks."""
        raise AssertionError(f"unexpected {order} store of {words} to all at {address:#x}")

    def add_to_all(self, address: int, value: int) -> None:
        """Refuse an addition to all ranks."""
        raise AssertionError(f"unexpected addition of {value} to all at {address:#x}")

    def load_sum(self, address: int, add: Callable[[int, int], int]) -> tuple[int, ...]:
        """Refuse a load of all ranks' sum."""
        raise AssertionError(f"unexpected load of the sum at {address:#x}")

    def fence_aliases(self) -> None:
        """Refuse a fence of aliases."""
        raise AssertionError("unexpected fence of aliases")

    def fence(self, scope: Scope) -> None:
        """Refuse a fence."""
        raise AssertionError(f"unexpected fence of {scope}")

    def shares_work(self) -> bool:
        """Refuse to tell."""
        raise AssertionError("unexpected question whether threads run at once")

    def meet(
        self, group: Group, offered: Any, *, orders_memory: bool = True
    ) -> tuple[int, list[Any]]:
        """Refuse a meeting."""
        raise AssertionError(f"unexpected meeting of a {group} with {offered}")

    def relax(self) -> None:
        """Refuse to relax."""
        raise AssertionError("unexpected relax")

    def clock_ns(self) -> int:
        """Refuse to tell the time."""
        raise AssertionError("unexpected look at the clock")
