"""Arrays of users' kernels, as the checker gives them: elements in its memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from shmemar.device.interpreter import Order, current
from shmemar.host.checker.memory_map import rank_of
from shmemar.host.checker.verdict import ProtocolError, Verdict

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["CheckedArray", "OwnPart", "Symmetric"]


class Symmetric:
    """A symmetric array among the arguments of a kernel that is checked, at the same place.

    The kernel sees a tuple of its address on each rank. It stays from one launch to the next.

    Attributes:
        first: What this rank's part holds at first.
    """

    def __init__(self, first: NDArray[Any]) -> None:
        """Take a numpy array of one dimension, as long on all ranks."""
        self.first = first

    @property
    def array(self) -> OwnPart:
        """The own rank's part, which the kernel sees as an array; another argument."""
        return OwnPart(self)


@dataclass(frozen=True)
class OwnPart:
    """The own rank's part of a symmetric array.

    Attributes:
        of: The array, which is another argument.
    """

    of: Symmetric


class CheckedArray:
    """What a kernel sees of an array: elements, each of which it loads or stores.

    Attributes:
        name: For messages.
        dtype: numpy's type.
        size: Elements.
        shape: The same, as a tuple.
    """

    def __init__(self, name: str, address: int, dtype: np.dtype[Any], size: int) -> None:
        """Say where it lies."""
        self.name = name
        self.dtype = dtype
        self.size = size
        self.shape = (size,)
        self._address = address

    def __len__(self) -> int:
        return self.size

    def _at(self, index: Any) -> int:
        if not isinstance(index, int | np.integer):
            raise TypeError(
                f"{self.name} has index {index!r}; expected one integer: kernels that are checked "
                "load and store single elements."
            )
        if not -self.size <= index < self.size:
            raise ProtocolError(
                Verdict.OUTSIDE,
                f"{self.name} has index {index}, and {self.size} elements",
                rank_of(self._address >> 3),
            )
        return self._address + int(index) % self.size * self.dtype.itemsize

    def __getitem__(self, index: Any) -> Any:
        at, nbytes = self._at(index), self.dtype.itemsize
        if nbytes < 4:
            contents = current().load_part(at, nbytes).to_bytes(nbytes, "little")
        else:
            words = current().load(at, nbytes // 4, Order.WEAK)
            contents = b"".join(word.to_bytes(4, "little") for word in words)
        return np.frombuffer(contents, self.dtype)[0]

    def __setitem__(self, index: Any, value: Any) -> None:
        at, nbytes = self._at(index), self.dtype.itemsize
        contents = np.array(value).astype(self.dtype).tobytes()
        if nbytes < 4:
            current().store_part(at, nbytes, int.from_bytes(contents, "little"))
        else:
            words = np.frombuffer(contents, np.uint32).tolist()
            current().store(at, tuple(words), Order.WEAK)
