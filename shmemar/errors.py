"""Exceptions raised by shmemar.

Every message names the argument or variable, what it was, what was expected, and what to do next.
"""

from __future__ import annotations

__all__ = [
    "ArgumentError",
    "ArgumentTypeError",
    "BackendUnavailableError",
    "ClosedError",
    "CollectiveTimeoutError",
    "ConfigurationError",
    "DeviceError",
    "MismatchError",
    "ShmemarError",
]


class ShmemarError(Exception):
    """Base class of everything that shmemar raises on purpose."""


class ArgumentError(ShmemarError, ValueError):
    """An argument has a value that the call can't take; nothing was launched."""


class ArgumentTypeError(ShmemarError, TypeError):
    """An argument has a type that the call can't take; nothing was launched."""


class ConfigurationError(ShmemarError, ValueError):
    """A ``SHMEMAR_*`` variable or an argument of ``init`` is wrong, or differs between ranks."""


class BackendUnavailableError(ShmemarError, RuntimeError):
    """The backend asked for can't run here; the message says why."""


class ClosedError(ShmemarError, RuntimeError):
    """The communicator was closed before the call."""


class MismatchError(ShmemarError, RuntimeError):
    """The ranks made different calls; seen under ``SHMEMAR_CHECK=1``."""


class DeviceError(ShmemarError, RuntimeError):
    """CUDA refused an operation. When it was a launch, the communicator is broken from then on."""


class CollectiveTimeoutError(ShmemarError, TimeoutError):
    """A rank waited for a peer beyond the deadline; the communicator is broken from then on.

    Attributes:
        rank: The rank that waited.
        missing: The ranks whose data had not arrived, in rank order.
    """

    def __init__(self, message: str, *, rank: int, missing: tuple[int, ...]) -> None:
        super().__init__(message)
        self.rank = rank
        self.missing = missing
