"""Arrays of the library under test, made of numpy arrays and back."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    import shmemar


class Arrays:
    """One library's arrays, by its name."""

    def __init__(self, library: str) -> None:
        self.library = library

    def make(self, host: NDArray[Any]) -> Any:
        """Copy to an array of the library, on the current GPU if it has GPU arrays."""
        if self.library == "cupy":
            import cupy

            return cupy.asarray(host)
        if self.library == "torch":
            import torch

            return torch.from_numpy(host.copy()).cuda()
        return host.copy()

    def host(self, array: Any) -> NDArray[Any]:
        """Copy to a numpy array, after the work on it has ended."""
        if self.library == "cupy":
            return np.asarray(array.get())
        if self.library == "torch":
            return np.asarray(array.cpu().numpy())
        return np.array(array)

    def reduce(self, comm: shmemar.Communicator, x: NDArray[Any], **options: Any) -> NDArray[Any]:
        """All-reduce an array of the library that is made of `x`, to a new one."""
        return self.host(comm.allreduce(self.make(x), **options))
