"""The ``SHMEMAR_*`` environment variables, read once and checked.

This is the only module that reads the environment.
"""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass, fields
from enum import Enum
from typing import TYPE_CHECKING, Any, TypeVar

from shmemar.errors import ConfigurationError
from shmemar.layout import DEFAULT_SCRATCH_NBYTES, DEFAULT_TWO_SHOT_SCRATCH_NBYTES
from shmemar.spec import Backend, Kernel, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

__all__ = [
    "COMPILE_TIMEOUT_S",
    "DEFAULT_HEAP_NBYTES",
    "DEFAULT_TIMEOUT_S",
    "Config",
    "environment",
    "set_default",
    "set_variable",
]

DEFAULT_TIMEOUT_S = 60.0
COMPILE_TIMEOUT_S = 120.0
"""Least deadline for the peers to compile a kernel, which takes seconds of CPU time each."""

DEFAULT_HEAP_NBYTES = 512 << 20
PREFIX = "SHMEMAR_"

logger = logging.getLogger(__name__)

E = TypeVar("E", bound=Enum)


@dataclass(frozen=True)
class Config:
    """One field a variable; ``SHMEMAR_`` and the field's name in capitals is the variable.

    Attributes:
        backend: ``SHMEMAR_BACKEND``: auto, nvshmem or emulated; an argument of ``init`` goes first.
        kernel: ``SHMEMAR_KERNEL``: pins the algorithm, for all sizes.
        protocol: ``SHMEMAR_PROTOCOL``: pins the protocol; pull or push of kernels with barriers, ll
            or sentinel of the others.
        table: ``SHMEMAR_TABLE``: file with measured latencies (``python -m shmemar tune``) by which
            kernels are chosen; ``none`` for those that come with the package; by default what
            the tuner left for this machine, if it was there.
        timeout_s: ``SHMEMAR_TIMEOUT_S``: deadline of a spin in seconds, 0 for none.
        check: ``SHMEMAR_CHECK``: compare every call across ranks.
        multicast: ``SHMEMAR_MULTICAST``: use NVLink multicast in kernels that have such a form,
            where the machine has it and ``NVSHMEM_DISABLE_NVLS`` is not set.
        pdl: ``SHMEMAR_PDL``: 1 for programmatic dependent launch, 0 for none; by default, or with
            ``auto``, in CUDA graphs right behind another collective, where every rank has a GPU of
            its own.
        max_blocks: ``SHMEMAR_MAX_BLOCKS``: cap on the blocks of a launch.
        scratch_nbytes: ``SHMEMAR_SCRATCH_NBYTES``: symmetric scratch per rank in bytes.
        two_shot_scratch_nbytes: ``SHMEMAR_TWO_SHOT_SCRATCH_NBYTES``: the same of two-shot kernels,
            allocated when the first one runs.
        heap_nbytes: ``SHMEMAR_HEAP_NBYTES``: symmetric memory of a process in bytes, for all of its
            communicators; taken from NVSHMEM when the first one is made.
    """

    backend: Backend = Backend.AUTO
    kernel: Kernel | None = None
    protocol: Protocol | None = None
    table: str | None = None
    timeout_s: float = DEFAULT_TIMEOUT_S
    check: bool = False
    multicast: bool = False
    pdl: bool | None = None
    max_blocks: int | None = None
    scratch_nbytes: int = DEFAULT_SCRATCH_NBYTES
    two_shot_scratch_nbytes: int = DEFAULT_TWO_SHOT_SCRATCH_NBYTES
    heap_nbytes: int = DEFAULT_HEAP_NBYTES

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] | None = None) -> Config:
        """Read and check the variables.

        Args:
            environ: What to read instead of ``os.environ``.

        Raises:
            ConfigurationError: A value is unknown.
        """
        environ = os.environ if environ is None else environ
        parsers = _parsers()
        given = {name: text for name, text in environ.items() if name.startswith(PREFIX)}
        values: dict[str, Any] = {}
        for variable, text in sorted(given.items()):
            parse = parsers.get(variable)
            if parse is None:
                logger.warning("%s is not read; the variables are %s", variable, ", ".join(parsers))
                continue
            if text.strip():
                values[variable.removeprefix(PREFIX).lower()] = parse(variable, text.strip())
        return cls(**values)

    def as_variables(self) -> dict[str, str]:
        """The configuration as variables and their text, for comparing and for logs."""
        return {
            PREFIX + field.name.upper(): _text(getattr(self, field.name)) for field in fields(self)
        }


def environment(name: str) -> str | None:
    """Read a variable of another program, such as a launcher's."""
    return os.environ.get(name)


def environment_of(prefix: str) -> dict[str, str]:
    """Read all variables of another program whose names begin so."""
    return {name: text for name, text in os.environ.items() if name.startswith(prefix)}


def set_default(name: str, value: str) -> None:
    """Set a variable, for what is read later, unless it is set."""
    os.environ.setdefault(name, value)


def set_variable(name: str, value: str) -> None:
    """Set a variable, for what is read later, whatever it was."""
    os.environ[name] = value


def _parsers() -> dict[str, Callable[[str, str], Any]]:
    return {
        "SHMEMAR_BACKEND": _member(list(Backend)),
        "SHMEMAR_KERNEL": _member([kernel for kernel in Kernel if kernel.reduces]),
        "SHMEMAR_PROTOCOL": _member(list(Protocol)),
        "SHMEMAR_TABLE": lambda _, text: text,
        "SHMEMAR_TIMEOUT_S": _seconds,
        "SHMEMAR_CHECK": _switch,
        "SHMEMAR_MULTICAST": _switch,
        "SHMEMAR_PDL": _automatic_switch,
        "SHMEMAR_MAX_BLOCKS": _positive,
        "SHMEMAR_SCRATCH_NBYTES": _positive,
        "SHMEMAR_TWO_SHOT_SCRATCH_NBYTES": _positive,
        "SHMEMAR_HEAP_NBYTES": _positive,
    }


def _text(value: Any) -> str:
    if isinstance(value, Enum):
        return str(value.value)
    if isinstance(value, bool):
        return str(int(value))
    return "" if value is None else str(value)


def _refuse(variable: str, text: str, expected: str) -> ConfigurationError:
    return ConfigurationError(
        f"{variable} is {text!r}; expected {expected}. Correct it or unset it."
    )


def _member(members: Sequence[E]) -> Callable[[str, str], E]:
    named = {str(member.value): member for member in members}

    def parse(variable: str, text: str) -> E:
        if text not in named:
            raise _refuse(variable, text, f"one of {', '.join(named)}")
        return named[text]

    return parse


def _switch(variable: str, text: str) -> bool:
    if text not in ("0", "1"):
        raise _refuse(variable, text, "0 or 1")
    return text == "1"


def _automatic_switch(variable: str, text: str) -> bool | None:
    if text not in ("auto", "0", "1"):
        raise _refuse(variable, text, "auto, 0 or 1")
    return None if text == "auto" else text == "1"


def _positive(variable: str, text: str) -> int:
    if not text.isdecimal() or len(text) > 18 or int(text) < 1:
        raise _refuse(variable, text, "a whole number of 1 or more, of 18 digits at most")
    return int(text)


def _seconds(variable: str, text: str) -> float:
    expected = "seconds, 0 or more and at most a year (0: no deadline)"
    try:
        value = float(text)
    except ValueError:
        raise _refuse(variable, text, expected) from None
    if not 0 <= value <= 366 * 86400:
        raise _refuse(variable, text, expected)
    return value
