"""Arrays of one library, made of numpy arrays and back: for the main job, benchmarks and tests."""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import numpy as np

from shmemar.errors import BackendUnavailableError
from shmemar.spec import Backend

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from shmemar.host.communicator import Communicator

__all__ = ["Arrays"]


class Arrays:
    """One library's arrays.

    Attributes:
        library: ``numpy``, ``cupy`` or ``torch``.
    """

    def __init__(self, library: str) -> None:
        """Choose the library by its name."""
        self.library = library

    @classmethod
    def of(cls, backend: Backend) -> Arrays:
        """Arrays that a backend's kernels take, of a library that is installed.

        Raises:
            BackendUnavailableError: Neither CuPy nor torch is.
        """
        if backend is Backend.EMULATED:
            return cls("numpy")
        for library in ("cupy", "torch"):
            if find_spec(library) is not None:
                return cls(library)
        raise BackendUnavailableError(
            "neither CuPy nor torch is installed, which make arrays on the GPU; install one."
        )

    def make(self, host: NDArray[Any]) -> Any:
        """Copy to an array of the library, on the current GPU if it has GPU arrays."""
        if self.library == "cupy":
            import cupy

            return cupy.asarray(host)
        if self.library == "torch":
            import torch

            if host.dtype.name == "bfloat16":  # which torch does not take from numpy, nor gives it
                return torch.from_numpy(host.view(np.int16).copy()).cuda().view(torch.bfloat16)
            return torch.from_numpy(host.copy()).cuda()
        return host.copy()

    def host(self, array: Any) -> NDArray[Any]:
        """Copy to a numpy array, after the work on it has ended."""
        if self.library == "cupy" or hasattr(array, "get"):  # symmetric arrays are CuPy's
            return np.asarray(array.get())
        if self.library == "torch":
            import torch

            if array.dtype == torch.bfloat16:
                return np.asarray(array.cpu().view(torch.int16).numpy().view("bfloat16"))
            return np.asarray(array.cpu().numpy())
        return np.array(array)

    def synchronize(self) -> None:
        """Wait until the work on the library's current stream has ended."""
        if self.library == "cupy":
            import cupy

            cupy.cuda.get_current_stream().synchronize()
        elif self.library == "torch":
            import torch

            torch.cuda.current_stream().synchronize()

    def reduce(self, comm: Communicator, x: NDArray[Any], **options: Any) -> NDArray[Any]:
        """All-reduce an array of the library that is made of `x`, to a new one."""
        return self.host(comm.allreduce(self.make(x), **options))
