"""Functions that are written once and compiled by more than one compiler.

A *primitive* has a Python body and one lowering for each compiler. A *device function* is composed
of primitives, and each compiler gets its bytecode. Both stay plain Python functions.

At a *meeting* the threads of a group come together, at one place of the machine code. CPython may
copy a call to more than one place of the bytecode: a short end of a function to each branch that
leads there (from 3.12 on ``return meet(x)`` is short enough), a loop's condition to the loop's end.
On a GPU the threads of a block that come to a copy each count for themselves, and wait for those
that came to another one. So a function in which a call that meets was copied is refused.
"""

from __future__ import annotations

import dis
import inspect
import sys
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

from shmemar.errors import ShmemarError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import ModuleType

__all__ = ["Compiler", "device", "device_methods", "meeting"]

F = TypeVar("F", bound="Callable[..., Any]")
T = TypeVar("T", bound=type)

_functions: dict[Callable[..., Any], None] = {}
_classes: list[tuple[type, tuple[str, ...]]] = []
_compilers: list[Compiler] = []
_meetings: set[Any] = set()


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


def meeting(primitive: F) -> F:
    """Mark a primitive at which the threads of a group come together."""
    _meetings.add(primitive)
    return primitive


def device(function: F) -> F:
    """Make `function` callable from kernels, on every target; it stays a plain function.

    Raises:
        ShmemarError: The bytecode holds a call more than once at which threads come together.
    """
    if function not in _functions:
        _check_meetings(function)
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


def _check_meetings(function: Callable[..., Any]) -> None:
    """Refuse a copied meeting, and mark a function that has one as one."""
    places: Counter[tuple[str, int | None, int | None]] = Counter()
    for name, callee, instruction in _loads(function):
        if callee in _meetings:
            where = instruction.positions
            places[name, where and where.lineno, where and where.col_offset] += 1
    for (name, line, _), times in places.items():
        if times > 1:
            version = ".".join(map(str, sys.version_info[:2]))
            raise ShmemarError(
                f"{function.__qualname__} ({function.__code__.co_filename}, line {line}): Python "
                f"{version} compiles its call of {name}, at which threads come together, to "
                f"{times} places; expected one, or they wait for one another at different ones. "
                "Call it in a statement of its own, neither in a loop's condition nor behind "
                "branches at the function's end."
            )
    if places:
        _meetings.add(function)


def _loads(
    function: Callable[..., Any],
) -> Iterator[tuple[str, Any, dis.Instruction]]:
    """What a function's bytecode loads of what is defined outside of it, also of modules."""
    code, cells = function.__code__, function.__closure__ or ()
    outside = dict(function.__globals__)
    for variable, cell in zip(code.co_freevars, cells, strict=True):
        with suppress(ValueError):  # it is empty: what it is to hold is defined further on
            outside[variable] = cell.cell_contents
    value: Any = None
    for instruction in dis.get_instructions(function):
        name = instruction.argval
        if instruction.opname in ("LOAD_GLOBAL", "LOAD_DEREF"):
            value = outside.get(name)
        elif instruction.opname in ("LOAD_ATTR", "LOAD_METHOD"):
            value = getattr(value, name, None)
        else:
            continue
        if inspect.isfunction(value):
            yield name, value, instruction
