"""Elements of 1 to 16 bytes, as the data words of packets.

An element is a scalar, or a tuple of scalars of 4 or 8 bytes. Its type is that of a value, `like`,
which costs nothing: it is a constant of the kernel's code.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from shmemar.layout import PACKET_NBYTES, WORDS_PER_PACKET
from shmemar.spec import PART_RANKS, WIDE_RANKS

if TYPE_CHECKING:
    from shmemar.device.words import Packet

__all__ = [
    "as_element",
    "element_from_words",
    "packet_array",
    "packet_words",
    "part_array",
    "ranks_at_once",
    "words_from_element",
]


def as_element(value: Any, like: Any) -> Any:
    """Convert a value to the type of `like`."""
    if isinstance(like, tuple):
        return tuple(type(like[0])(part) for part in value)
    return type(like)(value)


def words_from_element(value: Any, like: Any) -> Packet:
    """Split a value, converted to the type of `like`, into four words; zeros behind its end."""
    contents = np.array(as_element(value, like)).tobytes()
    first, second, third, fourth = np.frombuffer(contents.ljust(16, b"\0"), np.uint32).tolist()
    return first, second, third, fourth


def element_from_words(first: int, second: int, third: int, fourth: int, like: Any) -> Any:
    """Join words to an element of the type of `like`."""
    parts = like if isinstance(like, tuple) else (like,)
    words = np.array((first, second, third, fourth), np.uint32)
    found = np.frombuffer(words.tobytes(), type(parts[0]))[: len(parts)]
    return tuple(found) if isinstance(like, tuple) else found[0]


def packet_array(peers: tuple[int, ...], like: Any) -> list[int]:
    """Make a word array for the packets of all ranks."""
    return [0] * (len(peers) * packet_words(np.array(like).nbytes))


def part_array(peers: tuple[int, ...], like: Any) -> list[int]:
    """Make a word array for the packets of `ranks_at_once`."""
    return [0] * (ranks_at_once(len(peers)) * packet_words(np.array(like).nbytes))


def packet_words(nbytes: int) -> int:
    """Words of the most packets that carry an element of `nbytes`."""
    return WORDS_PER_PACKET * (2 if nbytes > PACKET_NBYTES // 2 else 1)


def ranks_at_once(nranks: int) -> int:
    """Ranks whose packets are loaded before any is judged."""
    return nranks if nranks < WIDE_RANKS else PART_RANKS
