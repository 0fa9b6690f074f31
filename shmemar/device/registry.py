"""Functions that are written once and compiled by more than one compiler.

A *primitive* has a Python body and one lowering for each compiler. A *device function* is composed
of primitives, and each compiler gets its bytecode. Both stay plain Python functions.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType

__all__ = ["Compiler", "device", "device_methods", "is_device", "methods_named"]

F = TypeVar("F", bound="Callable[..., Any]")
T = TypeVar("T", bound=type)

_functions: dict[Callable[..., Any], None] = {}
_classes: list[tuple[type, tuple[str, ...]]] = []
_compilers: list[Compiler] = []


@dataclass(frozen=True, eq=False)
class Compiler:
    """One of numba's compilers, and what was registered with it.

    Attributes:
        target: numba's name of the target: ``cpu`` or ``cuda``.
        extending: The module that holds its ``overload``, ``overload_method`` and ``intrinsic``.
        namedtuples: numba's types for a NamedTuple of mixed and of equal fields.
        jit_options: numba's options for what is compiled from source.
    """

    target: str
    extending: ModuleType
    namedtuples: tuple[type, ...]
    jit_options: dict[str, bool] = field(default_factory=dict)
    installed: list[str] = field(default_factory=list)

    def install(self) -> None:
        """Register every device function, and from now on each one as it is defined."""
        if self in _compilers:
            return
        _compilers.append(self)
        for function in _functions:
            self.add_function(function)
        for cls, methods in _classes:
            self.add_methods(cls, methods)

    def lower(self, primitive: Callable[..., Any], **options: Any) -> Callable[[F], F]:
        """Decorate the typing function that returns the implementation of `primitive`.

        Options are those of numba's ``overload``.
        """

        def register(typing: F) -> F:
            def bare(*operands: Any) -> Callable[..., Any] | None:
                implementation: Callable[..., Any] | None = typing(*operands)
                if implementation is not None:
                    implementation.__annotations__ = {}
                return implementation

            # numba compares parameters with their annotations.
            parameters = inspect.signature(typing).parameters.values()
            bare.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
                [p.replace(annotation=inspect.Parameter.empty) for p in parameters]
            )
            self.extending.overload(primitive, target=self.target, **options)(bare)
            return typing

        return register

    def add_function(self, function: Callable[..., Any]) -> None:
        """Compile calls of `function` from its own source."""

        def typing(*_: Any) -> Callable[..., Any]:
            return function

        typing.__signature__ = inspect.signature(function)  # type: ignore[attr-defined]
        overload = self.extending.overload
        overload(function, target=self.target, jit_options=self.jit_options)(typing)

    def add_methods(self, cls: type, methods: tuple[str, ...]) -> None:
        """Compile calls of methods of the NamedTuple `cls` from their own source."""
        for name in methods:
            method = getattr(cls, name)

            def typing(
                receiver: Any, *_: Any, method: Callable[..., Any] = method
            ) -> Callable[..., Any] | None:
                return method if getattr(receiver, "instance_class", None) is cls else None

            typing.__signature__ = inspect.signature(method)  # type: ignore[attr-defined]
            for namedtuple in self.namedtuples:
                self.extending.overload_method(
                    namedtuple, name, target=self.target, jit_options=self.jit_options
                )(typing)


def device(function: F) -> F:
    """Make `function` callable from kernels, on every target; it stays a plain function."""
    if function not in _functions:
        _functions[function] = None
        for compiler in _compilers:
            compiler.add_function(function)
    return function


def device_methods(*methods: str) -> Callable[[T], T]:
    """Make methods of a NamedTuple callable from kernels, on every target.

    No two such classes may share a name of a method, or have one as a field: numba keeps them by
    name for all named tuples.
    """

    def register(cls: T) -> T:
        _classes.append((cls, methods))
        for compiler in _compilers:
            compiler.add_methods(cls, methods)
        return cls

    return register


def is_device(function: Any) -> bool:
    """Return whether it was registered with `device`, or as a method."""
    return function in _functions or function in methods_named(getattr(function, "__name__", ""))


def methods_named(name: str) -> list[Any]:
    """Registered methods of that name, whatever their classes."""
    return [getattr(cls, name) for cls, methods in _classes if name in methods]
