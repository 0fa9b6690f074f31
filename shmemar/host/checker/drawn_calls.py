"""Sequences of calls that are drawn from a seed, most of them of one kernel and protocol.

A sequence mixes counts, types, operators, grids, roots, alignments, loops of a body in one launch,
and calls of other kernels. It may begin with epochs just before their wrap, be replayed, as a CUDA
graph would be, with the same arguments and other data, or overlap as programmatic launch lets it.
"""

from __future__ import annotations

import random

from shmemar.device.groups import WARP_THREADS
from shmemar.device.kernels import BUILDERS
from shmemar.device.packet import LAST_EPOCH
from shmemar.dtypes import DTYPES, DType, ReduceOp, supported_ops
from shmemar.errors import ArgumentError
from shmemar.host.checker.calls import (
    FEW_SLOTS,
    MARKS,
    Call,
    CallSequence,
    barrier_layout_of,
)
from shmemar.host.exact import numpy_dtype
from shmemar.layout import LINE_LANES
from shmemar.spec import WIDE_RANKS, Kernel, KernelSpec, Protocol, why_impossible

__all__ = ["MULTICAST_PAIRS", "PAIRS", "draw_sequence", "tiny_sequence"]

PAIRS: list[tuple[Kernel, Protocol]] = [
    (kernel, protocol)
    for kernel in BUILDERS
    for protocol in sorted(kernel.protocols, key=list(Protocol).index)
]
"""Every kernel with each of its protocols."""

MULTICAST_PAIRS = [
    pair
    for pair in PAIRS
    if not why_impossible(*pair, DTYPES["float32"], ReduceOp.SUM, 2, multicast=True)
]
"""Those of them that have a multicast form."""

WRAPS = (LAST_EPOCH - 1, LAST_EPOCH - 2, LAST_EPOCH - 4, 2**31 - 3)
MANY_THREADS = 8
"""From so many ranks on kernels with barriers, of a thread for each rank, launch a block and make a
pass: they cost as many operations as the square of the ranks."""

EXACT_RANKS = 8
"""The most ranks whose 16-bit sums and whose real products are exact (`exact_input`)."""


def draw_sequence(
    kernel: Kernel, protocol: Protocol, nranks: int, seed: int, *, multicast: bool = False
) -> CallSequence:
    """Draw a sequence, most of whose calls are of one kernel and protocol, and of one form."""
    which = f"{kernel.value} {protocol.value}" + " multicast" * multicast
    draw = random.Random(f"{which} {nranks} {seed}")  # noqa: S311 - it need not be secret
    calls: list[Call] = []
    # Those of kernels whose threads work together, and of many ranks, cost as much as many others.
    most = 5 if nranks < MANY_THREADS or not kernel.has_barriers else 3
    is_short = nranks >= WIDE_RANKS or (kernel is Kernel.LL128_ATOMIC and nranks > 3)
    for _ in range(2 if is_short else draw.randint(3, most)):
        others = [
            pair
            for pair in PAIRS
            if pair != (kernel, protocol)
            and pair[0].has_barriers <= kernel.has_barriers
            and _types(*pair, nranks)
        ]
        is_other = calls and draw.random() < 0.2
        pair = draw.choice(others) if is_other else (kernel, protocol)
        calls.append(_draw_call(*pair, nranks, draw, multicast=multicast and not is_other))
    overlaps = draw.random() < 0.15
    return CallSequence(
        tuple(calls),
        first_epoch=draw.choice([0, 0, 0, *WRAPS]),
        replays=1 if overlaps else draw.choice([1, 1, 2]),
        resident=2 * nranks if overlaps else None,
        share_work=_draw_share_work(kernel, nranks, draw),
    )


def _draw_share_work(kernel: Kernel, nranks: int, draw: random.Random) -> bool:
    if kernel.has_barriers:  # where threads share work, each of many ranks costs as many of them
        return nranks < WIDE_RANKS and draw.random() < 0.7
    return nranks < WIDE_RANKS or draw.random() < 0.7


def tiny_sequence(
    kernel: Kernel, protocol: Protocol, nranks: int, *, multicast: bool = False
) -> CallSequence:
    """The shortest sequence in which every buffer is used again: for going through schedules."""
    spec = KernelSpec(kernel, protocol, DTYPES["float32"], ReduceOp.SUM, nranks, multicast)
    if kernel is Kernel.LL128_ATOMIC:
        whole_warp = Call(spec, 3 * nranks * spec.line_elements, LINE_LANES)
        return CallSequence((whole_warp,))
    owners = nranks if kernel.is_two_shot else 1
    count = owners * spec.payload_nbytes // spec.dtype.itemsize
    if kernel.has_barriers:
        call = Call(spec, count if kernel.reduces else 0, 1)
        return CallSequence((call,) * (2 if kernel.is_two_shot else 3))
    once, twice = Call(spec, count, 1), Call(spec, 2 * count, 1)
    return CallSequence((twice, once) if kernel is Kernel.TWO_SHOT else (twice, twice))


def _draw_call(
    kernel: Kernel, protocol: Protocol, nranks: int, draw: random.Random, *, multicast: bool
) -> Call:
    spec = _draw_spec(kernel, protocol, nranks, draw, multicast=multicast)
    if kernel.has_barriers:
        return _draw_call_with_barriers(spec, draw)
    nthreads = draw.randint(1, FEW_SLOTS // spec.packets_per_thread)
    repeats = draw.choice([1, 1, 1, 1, 1, 3])
    passes = draw.choice([1, 1, 2, 3, 4]) if repeats == 1 else 1
    busy = nthreads
    if nranks >= WIDE_RANKS:  # which costs as many operations as many calls of few ranks
        passes = min(passes, 2)
    if kernel is Kernel.LL128_ATOMIC:
        return _draw_lines(spec, draw)
    if spec.lanes > 1:
        nthreads = draw.choice([1, 1, 2]) * WARP_THREADS
        busy, passes = draw.choice([(busy, 1), (busy, 1), (nthreads // spec.lanes, 5)])
    owners = nranks if kernel is Kernel.TWO_SHOT else 1
    most = passes * busy * spec.packets_per_thread * owners * spec.payload_nbytes
    most = max(most // spec.dtype.itemsize, 1)
    return Call(
        spec,
        most if draw.random() < 0.3 else draw.randint(most // 2 + 1, most),
        nthreads,
        root=draw.randrange(nranks),
        repeats=repeats,
        in_place=kernel.reduces and draw.random() < 0.25,
        shift=draw.randrange(3),
        is_marked=(spec.dtype.name, spec.op) in MARKS and kernel.reduces and draw.random() < 0.5,
    )


def _draw_lines(spec: KernelSpec, draw: random.Random) -> Call:
    """Draw a call of a kernel whose warps work together; four lines or eight of each rank."""
    warp = LINE_LANES if spec.nranks < WIDE_RANKS else WARP_THREADS
    most = spec.nranks * spec.line_elements * (draw.choice([1, 3, 6]) if spec.nranks < 4 else 3)
    return Call(
        spec,
        draw.randint(1, most),
        warp * draw.choice([1, 2]),
        repeats=draw.choice([1, 1, 1, 1, 1, 2]),
        in_place=draw.random() < 0.25,
        shift=draw.randrange(3),
        is_marked=(spec.dtype.name, spec.op) in MARKS and draw.random() < 0.5,
    )


def _draw_call_with_barriers(spec: KernelSpec, draw: random.Random) -> Call:
    repeats = draw.choice([1, 1, 1, 1, 1, 3])
    blocks = draw.choice([1, 1, 1, 2]) if spec.nranks < MANY_THREADS else 1
    nthreads = blocks * barrier_layout_of(spec).block_threads
    if not spec.kernel.reduces:
        return Call(spec, 0, nthreads, repeats=repeats)
    passes = draw.choice([1, 1, 1, 2, 3]) if repeats == blocks == 1 else 1
    if spec.nranks >= MANY_THREADS:
        passes = 1
    most = max(passes * Call(spec, 1, nthreads).pass_nbytes // spec.dtype.itemsize, 1)
    return Call(
        spec,
        most if draw.random() < 0.1 else draw.randint((passes - 1) * most // passes + 1, most),
        nthreads,
        repeats=repeats,
        in_place=draw.random() < 0.25,
        shift=draw.randrange(3),
        is_marked=(spec.dtype.name, spec.op) in MARKS and draw.random() < 0.5,
    )


def _draw_spec(
    kernel: Kernel, protocol: Protocol, nranks: int, draw: random.Random, *, multicast: bool
) -> KernelSpec:
    fitting = _types(kernel, protocol, nranks, multicast=multicast)
    dtype = DTYPES["float32"] if draw.random() < 0.3 else draw.choice(fitting)
    is_exact = nranks <= EXACT_RANKS or dtype.is_complex
    ops = [
        op
        for op in supported_ops(dtype)
        if (is_exact or op is not ReduceOp.PROD)
        and not why_impossible(kernel, protocol, dtype, op, nranks, multicast=multicast)
    ]
    if dtype.name == "complex128" and ReduceOp.PROD in ops and draw.random() < 0.5:
        # With LL packets the one that takes two for each thread.
        return KernelSpec(kernel, protocol, dtype, ReduceOp.PROD, nranks, multicast)
    return KernelSpec(kernel, protocol, dtype, draw.choice(ops), nranks, multicast)


def _types(
    kernel: Kernel, protocol: Protocol, nranks: int, *, multicast: bool = False
) -> list[DType]:
    """Types that a kernel has, and whose results are known."""
    return [
        each
        for each in DTYPES.values()
        if _fits(each, kernel, protocol, nranks)
        and not why_impossible(kernel, protocol, each, ReduceOp.SUM, nranks, multicast=multicast)
    ]


def _fits(dtype: DType, kernel: Kernel, protocol: Protocol, nranks: int) -> bool:
    if why_impossible(kernel, protocol, dtype, ReduceOp.SUM, nranks):
        return False
    if dtype.component_nbytes == 2 and nranks > EXACT_RANKS:
        return False
    try:
        numpy_dtype(dtype)
    except ArgumentError:  # bfloat16, without ml_dtypes
        return False
    return True
