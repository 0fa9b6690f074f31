"""Arrays in symmetric memory, for kernels that put into them."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

import numpy as np

from shmemar.errors import ArgumentError, ArgumentTypeError, ClosedError
from shmemar.host.arrays import Arrays
from shmemar.spec import Backend
from shmemar.user_spec import as_numpy_dtype

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from shmemar.host.contract import Memory
    from shmemar.host.shared_memory import SharedMemory

__all__ = ["DeviceSymmetricArray", "HostSymmetricArray", "SymmetricArray", "check_shape"]


class SymmetricArray(ABC):
    """An array of the same shape on every rank, which peers' kernels can write to.

    Made by `Communicator.symmetric_array`. Passed to `Communicator.launch`, it is a tuple of
    addresses to the kernel, one a rank, in rank order.

    Attributes:
        shape: Extents.
        dtype: numpy's element type.
        nbytes: Bytes on each rank.
    """

    def __init__(
        self, memory: Memory, shape: tuple[int, ...], dtype: np.dtype[Any], rank: int
    ) -> None:
        """Use `Communicator.symmetric_array`."""
        self.shape = shape
        self.dtype = dtype
        self.nbytes = math.prod(shape) * dtype.itemsize
        self._memory: Memory | None = memory
        self._rank = rank

    @property
    def memory(self) -> Memory:
        """The memory behind it.

        Raises:
            ClosedError: The communicator was closed.
        """
        if self._memory is None:
            raise ClosedError("the communicator of a symmetric array was closed, and it with it.")
        return self._memory

    @property
    def addresses(self) -> tuple[int, ...]:
        """Address of each rank's array in this process's kernels."""
        return self.memory.addresses

    @property
    @abstractmethod
    def array(self) -> Any:
        """The own rank's array, not a copy: of numpy, or on a GPU of CuPy or torch.

        On a GPU it lasts as long as the communicator.
        """

    @abstractmethod
    def copy_to_host(self) -> NDArray[Any]:
        """Copy the own rank's array to numpy, once what this process runs on its GPU has ended."""

    def close(self) -> None:
        """Let go of the memory, which the communicator frees."""
        self._memory = None

    def __repr__(self) -> str:
        """Shape and type."""
        return f"<shmemar.{type(self).__name__} {self.shape} {self.dtype.name}>"


class HostSymmetricArray(SymmetricArray):
    """One in memory that processes share."""

    def __init__(
        self, memory: SharedMemory, shape: tuple[int, ...], dtype: np.dtype[Any], rank: int
    ) -> None:
        """Use `Communicator.symmetric_array`."""
        super().__init__(memory, shape, dtype, rank)
        self._shared = memory

    @property
    def array(self) -> Any:
        """The own rank's array, which stays when the communicator is closed."""
        _ = self.memory  # raises when it is
        part = self._shared.view(self._rank)[: self.nbytes]
        return part.view(self.dtype).reshape(self.shape)

    def copy_to_host(self) -> NDArray[Any]:
        """Copy it."""
        return np.array(self.array)


class DeviceSymmetricArray(SymmetricArray):
    """One on GPUs, which any library takes that knows the CUDA array interface."""

    def __init__(
        self, memory: Memory, shape: tuple[int, ...], dtype: np.dtype[Any], rank: int, ordinal: int
    ) -> None:
        """Use `Communicator.symmetric_array`."""
        super().__init__(memory, shape, dtype, rank)
        self._ordinal = ordinal

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        """The own rank's array."""
        return {
            "shape": self.shape,
            "typestr": self.dtype.str,
            "data": (self.addresses[self._rank], False),
            "version": 3,
        }

    @property
    def array(self) -> Any:
        """The own rank's array, not a copy."""
        library = Arrays.of(Backend.NVSHMEM).library
        if library == "cupy":
            import cupy

            with cupy.cuda.Device(self._ordinal):
                return cupy.asarray(self)
        import torch

        return torch.as_tensor(self, device=f"cuda:{self._ordinal}")

    def copy_to_host(self) -> NDArray[Any]:
        """Copy it; needs neither CuPy nor torch."""
        from shmemar.host.launch import copy_to_host

        contents = copy_to_host(self.addresses[self._rank], self.nbytes, self._ordinal)
        return contents.view(self.dtype).reshape(self.shape)


def check_shape(shape: Any, dtype: Any) -> tuple[tuple[int, ...], np.dtype[Any]]:
    """Check what a symmetric array is made of.

    Raises:
        ArgumentTypeError: No numeric type, or no shape.
        ArgumentError: An extent below 1.
    """
    found = as_numpy_dtype(dtype)
    if found.kind not in "iufc" or found.shape or not found.isnative:
        raise ArgumentTypeError(f"dtype is {found}; expected an integer, float or complex type.")
    extents = shape if isinstance(shape, tuple) else (shape,)
    if not all(isinstance(n, int | np.integer) and not isinstance(n, bool) for n in extents):
        raise ArgumentTypeError(f"shape is {shape!r}; expected an integer or a tuple of them.")
    if any(n < 1 for n in extents):
        raise ArgumentError(f"shape is {shape!r}; expected extents of 1 or more.")
    return tuple(map(int, extents)), found
