"""The protocol checker: kernels as plain Python, all ranks in one process, under hostile schedules.

Every memory operation of every thread is a point where another one may go on, stores arrive late
and out of order, and loads may see what was there before: what PTX's memory model allows, as far as
:mod:`shmemar.host.checker.weak_memory` models it. Each run is drawn from a seed, which makes it the
same run again. A run ends at the first thing that is wrong, a `Verdict`:

* a wrong value in a result; an exception in a kernel;
* a deadlock: nobody can go on; a livelock: no end after as many steps as are enough by far;
* a slot written twice in an epoch; a slot written again before it was read or emptied;
* an epoch of a slot that was not exchanged with every peer, both ways, when the launch ends;
* memory that the rank's launch may not touch, or the region of another layout.

What it can't find: what its memory does not model (see there); a deadline that passes; what
numba or a GPU makes of the source; a schedule that it did not draw. A pass is no proof.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from shmemar.dtypes import DTYPES, ReduceOp
from shmemar.errors import ArgumentError, ArgumentTypeError
from shmemar.host.checker.calls import Call, CallSequence
from shmemar.host.checker.checked_arrays import Symmetric
from shmemar.host.checker.checked_calls import launches_of
from shmemar.host.checker.checked_kernels import UserProgram
from shmemar.host.checker.checked_run import (
    EXHAUSTIVE,
    Program,
    as_schedule_kind,
    run_bounded,
    run_seeds,
)
from shmemar.host.checker.drawn_calls import (
    MULTICAST_PAIRS,
    PAIRS,
    draw_sequence,
    tiny_sequence,
)
from shmemar.host.checker.schedule import ScheduleKind
from shmemar.host.checker.threads import load_greenlet
from shmemar.host.checker.verdict import CheckReport, Failure, Verdict
from shmemar.host.user_kernels import check_function
from shmemar.spec import MAX_RANKS, WIDE_RANKS, Kernel, KernelSpec, Protocol
from shmemar.user_spec import BufferSpec, UserKernelSpec

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

__all__ = [
    "MULTICAST_PAIRS",
    "PAIRS",
    "Call",
    "CallSequence",
    "CheckReport",
    "Failure",
    "ScheduleKind",
    "Symmetric",
    "Verdict",
    "check",
    "check_kernel",
    "check_sequence",
]

DEVIATIONS = 2
"""Choices of a bounded exhaustive search that are not the first one."""


def check(
    kernel: Kernel,
    protocol: Protocol,
    nranks: int,
    seeds: Iterable[int] = range(200),
    schedule: str | None = None,
    *,
    multicast: bool = False,
) -> CheckReport:
    """Check a kernel with sequences of calls that are drawn from the seeds.

    Args:
        kernel: The kernel; calls of others come between.
        protocol: Its protocol.
        nranks: Ranks.
        seeds: A run each.
        schedule: A kind of schedule; by default all take turns. ``"exhaustive"`` goes through all
            schedules of a tiny sequence, on one thread a rank, that deviate from a first one in
            `DEVIATIONS` choices: as many as there are seeds, each known by its number.
        multicast: True for its multicast form.

    Raises:
        ArgumentError: A pair, a number of ranks or a schedule that there isn't.
        BackendUnavailableError: greenlet is not installed.
    """
    known = MULTICAST_PAIRS if multicast else PAIRS
    if (kernel, protocol) not in known:
        pairs = ", ".join(f"{k.value} with {p.value}" for k, p in known)
        form = ", multicast True" * multicast
        raise ArgumentError(
            f"protocol is {protocol.value}, and kernel {kernel.value}{form}; expected one of "
            f"{pairs}."
        )
    _require_ranks(nranks)
    if multicast:
        # Says how many ranks there may be.
        KernelSpec(kernel, protocol, DTYPES["float32"], ReduceOp.SUM, nranks, multicast=True)
    load_greenlet()
    name = f"{kernel.value}/{protocol.value}" + "/multicast" * multicast
    if schedule == EXHAUSTIVE:
        if nranks >= WIDE_RANKS:
            raise ArgumentError(
                f"schedule is {EXHAUSTIVE}, and nranks {nranks}; expected less than {WIDE_RANKS}: "
                "a search of more would not come far. Draw schedules instead."
            )
        tiny = tiny_sequence(kernel, protocol, nranks, multicast=multicast)
        program = Program(name, nranks, lambda machine, _: launches_of(tiny, machine))
        numbers = list(seeds)
        first, behind = (min(numbers), max(numbers) + 1) if numbers else (0, 0)
        return run_bounded(program, DEVIATIONS, first=first, behind=behind)
    draw = partial(draw_sequence, kernel, protocol, nranks, multicast=multicast)
    program = Program(
        name,
        nranks,
        lambda machine, seed: launches_of(draw(seed), machine),
        lambda seed: draw(seed).resident,
    )
    return run_seeds(program, seeds, _kind(schedule, EXHAUSTIVE))


def check_sequence(
    sequence: CallSequence, seeds: Iterable[int] = range(200), schedule: str | None = None
) -> CheckReport:
    """Check one sequence of calls under the seeds' schedules."""
    first = sequence.calls[0].spec
    program = Program(
        f"{first.kernel.value}/{first.protocol.value}" + "/multicast" * first.multicast,
        first.nranks,
        lambda machine, _: launches_of(sequence, machine),
        lambda _: sequence.resident,
    )
    return run_seeds(program, seeds, _kind(schedule))


def check_kernel(
    kernel: Callable[..., None],
    arguments: Callable[[int, int], Sequence[Any]],
    expected: Callable[[int, int], Sequence[Any]],
    *,
    nranks: int = 2,
    dtype: Any = np.float32,
    threads: int = 3,
    slots: int = 1,
    protocol: str | Protocol = "ll",
    multicast: bool = False,
    launches: int = 2,
    steps: int = 400_000,
    seeds: Iterable[int] = range(100),
    schedule: str | None = None,
) -> CheckReport:
    """Check a kernel of your own over an `LLBuffer`, without MPI, compiler or GPU.

    Several launches run one after another on `nranks` ranks, once a seed. See
    :mod:`shmemar.host.checker.checks` for what is found, and what is not.

    Example::

        def total(ll, thread, nthreads, x, y):
            for i in range(thread, x.size, nthreads):
                ll.bcast(0, x[i])
                y[i] = ll.recv_reduce(0, x[i], lambda a, b: a + b)
                ll.advance_epoch()

        def values(rank, launch):
            return np.arange(5, dtype=np.float32) + 10 * rank + 100 * launch

        report = shmemar.check_kernel(
            total,
            lambda rank, launch: (values(rank, launch), np.zeros(5, np.float32)),
            lambda rank, launch: (None, values(0, launch) + values(1, launch)),
        )
        assert report.passed, str(report)

    Args:
        kernel: As of `Communicator.launch`. Its arrays have `size`, `shape`, `dtype`, `len()` and
            single elements.
        arguments: ``arguments(rank, launch)`` makes what a rank passes: numpy arrays, which the
            kernel sees in one dimension, integers, floats, and of symmetric arrays
            `shmemar.host.checker.Symmetric`. Data should differ from launch to launch.
        expected: ``expected(rank, launch)`` says what each argument holds when the rank's launch
            has ended, bit for bit; None where any value will do.
        nranks: Ranks.
        dtype: As of `Communicator.ll_buffer`.
        threads: Threads of a launch. Few find more: every one of them is interpreted. Threads that
            meet need whole warps of 32, or blocks of 128.
        slots: As of `Communicator.ll_buffer`.
        protocol: Likewise.
        multicast: True to let `bcast` store by a multicast address, as it does where
            ``SHMEMAR_MULTICAST`` takes effect.
        launches: Launches, one after another.
        steps: Operations of all threads, after which a run is taken for one without end.
        seeds: A run each.
        schedule: A kind of schedule; by default all take turns.

    Returns:
        What was run, and the first failure, if any: with its seed, which makes it again.

    Raises:
        ArgumentTypeError: `kernel`, `dtype` or an argument.
        ArgumentError: The other arguments; what `expected` returns.
        BackendUnavailableError: greenlet is not installed.
    """
    check_function(kernel)
    _require_ranks(nranks)
    for name, value in (("arguments", arguments), ("expected", expected)):
        if not callable(value):
            raise ArgumentTypeError(
                f"{name} is {type(value).__name__}; expected a function {name}(rank, launch) that "
                "returns a tuple."
            )
    for name, number in (("launches", launches), ("steps", steps)):
        if isinstance(number, bool) or not isinstance(number, int) or number < 1:
            raise ArgumentError(f"{name} is {number!r}; expected a positive integer.")
    buffer = BufferSpec.of(
        nranks, dtype, threads=threads, slots=slots, protocol=protocol, multicast=multicast
    )
    load_greenlet()
    user = UserProgram(
        UserKernelSpec(kernel, buffer, ()), int(threads), launches, steps, arguments, expected
    )
    program = Program(user.spec.name, nranks, user.prepare)
    return run_seeds(program, seeds, _kind(schedule))


def _require_ranks(nranks: int) -> None:
    if isinstance(nranks, bool) or not isinstance(nranks, int) or not 1 <= nranks <= MAX_RANKS:
        raise ArgumentError(f"nranks is {nranks!r}; expected 1 to {MAX_RANKS}.")


def _kind(schedule: str | None, *others: str) -> ScheduleKind | None:
    return None if schedule is None else as_schedule_kind(schedule, *others)
