"""Where threads meet, they must do so at one place of the machine code; does Python see to that?

At a *meeting* the threads of a block come together, or the lanes that add to a line by one
instruction. On a GPU it is one instruction, which a part of a warp must not come to by itself: a
barrier then counts the warp as if it were whole, once for each part.

CPython may copy a short end of a function to each branch that leads there. Python 3.12 does so with
``return meet(x)``, so that threads which have parted before meet at different places. What numba
compiles is the bytecode. So kernels are looked through for copied calls of what meets, directly or
by another function.

Not seen are meetings that go by another name, an alias or a parameter of the function, and those in
functions that a user has given to numba. Nor is it seen that a function calls what meets in two
branches. A vote of a warp is no such meeting: its lanes may come to different instructions.
"""

from __future__ import annotations

import dis
import sys
from collections import Counter
from contextlib import suppress
from types import CodeType, FunctionType
from typing import TYPE_CHECKING, Any, TypeVar

from shmemar.device.registry import is_device, methods_named

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = ["meeting", "why_copied"]

F = TypeVar("F", bound="Callable[..., Any]")

_meetings: set[Any] = set()
_meets: dict[Any, bool] = {}
LONGEST_END = 32
"""Instructions that are looked at for the end of a function; what is copied is much shorter."""

_NUMBA_MEETINGS = ("syncthreads", "syncthreads_and", "syncthreads_count", "syncthreads_or")


def meeting(primitive: F) -> F:
    """Mark a primitive at which threads come together."""
    _meetings.add(primitive)
    return primitive


def why_copied(function: Callable[..., Any]) -> str | None:
    """Say which call of what meets this Python has copied; None where there is none.

    In the function, and in all that it calls, as far as they can be told from its names.
    """
    found: list[str] = []
    _look_through(function, found)
    return found[0] if found else None


def _look_through(function: Any, found: list[str]) -> bool:
    """Return whether a function meets, and add what is copied in it, or below it."""
    if function in _meets and not _meets[function]:
        return False  # looked through, or on the way
    _meets[function] = False
    meets = False
    places: Counter[tuple[str, int | None, int | None]] = Counter()
    for name, callee, instruction, ends in _calls(function):
        if not (_is_meeting(callee) or (_is_compiled(callee) and _look_through(callee, found))):
            continue
        meets = True
        where = instruction.positions
        if ends:
            places[name, where and where.lineno, where and where.col_offset] += 1
    _meets[function] = meets
    for (name, line, _), times in places.items():
        if times > 1:
            version = ".".join(map(str, sys.version_info[:2]))
            found.append(
                f"Python {version} has copied its call of {name} at the end of "
                f"{function.__qualname__} ({function.__code__.co_filename}, line {line}) to "
                f"{times} places, and threads that have parted would meet at different ones; move "
                "what parts them to a function of its own"
            )
    return meets


def _is_meeting(callee: Any) -> bool:
    if isinstance(callee, FunctionType) and callee in _meetings:
        return True
    module, name = getattr(callee, "__module__", None), getattr(callee, "__name__", None)
    return str(module).startswith("numba.cuda") and name in _NUMBA_MEETINGS


def _is_compiled(callee: Any) -> bool:
    return isinstance(callee, FunctionType) and is_device(callee)


def _calls(function: FunctionType) -> Iterator[tuple[str, Any, dis.Instruction, bool]]:
    """What a function loads of functions, and whether the piece of code there ends the function."""
    names = dict(function.__globals__)
    cells = function.__closure__ or ()
    for variable, cell in zip(function.__code__.co_freevars, cells, strict=True):
        with suppress(ValueError):  # it is empty
            names[variable] = cell.cell_contents
    yield from _calls_of_code(function.__code__, names)


def _calls_of_code(
    code: CodeType, names: dict[str, Any]
) -> Iterator[tuple[str, Any, dis.Instruction, bool]]:
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _calls_of_code(inner, names)
    instructions = list(dis.get_instructions(code))
    value: Any = None
    for at, instruction in enumerate(instructions):
        name = instruction.argval
        if instruction.opname in ("LOAD_GLOBAL", "LOAD_DEREF"):
            value = names.get(name)
            values = [value]
        elif instruction.opname in ("LOAD_ATTR", "LOAD_METHOD"):
            value = getattr(value, name, None)
            values = [value] if value is not None else methods_named(name)
        else:
            value = None
            continue
        for each in filter(callable, values):
            yield name, each, instruction, _ends_function(instructions, at)


def _ends_function(instructions: list[dis.Instruction], start: int) -> bool:
    for each in instructions[start : start + LONGEST_END]:
        if each.opname.startswith("RETURN"):
            return True
        if "JUMP" in each.opname or each.opname in ("FOR_ITER", "SEND", "RAISE_VARARGS", "RERAISE"):
            return False
    return False
