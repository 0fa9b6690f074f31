"""Generations of a decoder: timed, compared across ranks, and with a float32 run on one rank.

On a GPU one step is captured into a CUDA graph and replayed, a token a replay, and a CUDA event
stands behind each. The host enqueues replays without waiting, so what is timed is the GPU's time
from one token to the next. Communicators that can't be captured are called step by step.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks.apps.agreement import of_first
from benchmarks.apps.communicators import alone
from benchmarks.apps.decode_model import ALLREDUCES_PER_LAYER, Decoder
from benchmarks.apps.decode_ops import TorchOps

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from benchmarks.apps.communicators import Communicator
    from benchmarks.apps.decode_ops import Ops
    from benchmarks.apps.decode_shape import ModelShape
    from benchmarks.apps.decode_weights import Weights

__all__ = ["Check", "Generation", "Reference", "compare", "generate", "reference"]

WARMUPS = 3
"""Replays, or steps, before those that are timed."""

ROUNDOFF = {"bfloat16": 2.0**-8, "float32": 2.0**-24}

BOUND = 8.0
"""Tokens are compared where the two best logits of the reference are further apart than this times
the unit roundoff, times sqrt(2 layers + 1), times the root mean square of the logits: roundings of
as many additions to the residual stream, which add up like a random walk. Logits of bfloat16 were
off by at most 3.8 in that unit, so that two of them move by less than 8 against each other (hidden
64 to 512, 1 to 80 layers, numpy with ml_dtypes; tests/unit/test_apps_decode.py)."""


@dataclass(frozen=True)
class Generation:
    """What one backend generated.

    Attributes:
        tokens: (batch, tokens), those of rank 0.
        alike: Whether all ranks made them.
        milliseconds: From each token to the next, the first one left out; maximum over ranks.
        is_captured: Whether steps were replays of a CUDA graph.
        allreduces: All-reduces of a step.
        nbytes: Bytes of each.
        call_s: Seconds that the host was in calls of collectives, with warm-ups and capture, and
            without replays; maximum over ranks.
    """

    tokens: NDArray[np.int64]
    alike: bool
    milliseconds: list[float]
    is_captured: bool
    allreduces: int
    nbytes: int
    call_s: float

    @property
    def median_ms(self) -> float:
        """Median of `milliseconds`."""
        return float(np.median(self.milliseconds))


def generate(
    mpi_comm: Any,
    ops: Ops,
    shape: ModelShape,
    weights: Weights,
    comm: Communicator,
    tokens: int,
    *,
    is_real: bool = True,
) -> Generation:
    """Generate, and time it. Collective.

    Args:
        mpi_comm: Of the same ranks.
        ops: Whose arrays; of the model's type.
        shape: The model.
        weights: This rank's.
        comm: What sums.
        tokens: How many of each sequence.
        is_real: False of a communicator that does not sum: ranks then make different tokens.

    Raises:
        MismatchError: Tokens differ between ranks, and `comm` is shmemar's; on every rank.
    """
    decoder = Decoder(ops, shape, weights, comm)
    counts = comm.counts
    before, call_s = (dict(counts.calls), dict(counts.nbytes)), counts.seconds
    if isinstance(ops, TorchOps):
        seconds = _timed_on_gpu(ops, decoder, comm, tokens)
    else:
        seconds = _timed_on_cpu(decoder, comm, tokens)
    steps = _steps_counted(comm, tokens)
    calls = counts.calls["allreduce"] - before[0].get("allreduce", 0)
    nbytes = counts.nbytes["allreduce"] - before[1].get("allreduce", 0)
    if calls != 1 + steps * ALLREDUCES_PER_LAYER * shape.layers:
        raise AssertionError(
            f"{calls} all-reduces in {steps} steps; expected two a layer, and one before"
        )
    made, alike = decoder.history(tokens), False
    if is_real:
        (made,), alike = of_first(comm, "tokens", made)
    slowest = np.max(mpi_comm.allgather(seconds), axis=0)
    return Generation(
        tokens=made,
        alike=alike,
        milliseconds=(1e3 * slowest[1:]).tolist(),
        is_captured=comm.capturable,
        allreduces=(calls - 1) // steps,
        nbytes=nbytes // calls,
        call_s=max(mpi_comm.allgather(counts.seconds - call_s)),
    )


def _steps_counted(comm: Communicator, tokens: int) -> int:
    """Steps whose all-reduces were counted: captured ones once, and not when replayed."""
    return WARMUPS + (1 if comm.capturable else tokens)


def _timed_on_cpu(decoder: Decoder, comm: Communicator, tokens: int) -> list[float]:
    decoder.prepare()
    for _ in range(WARMUPS):
        decoder.step()
    decoder.reset()
    comm.barrier()
    seconds = []
    for _ in range(tokens):
        begin = time.perf_counter()
        decoder.step()
        seconds.append(time.perf_counter() - begin)
    return seconds


def _timed_on_gpu(ops: TorchOps, decoder: Decoder, comm: Communicator, tokens: int) -> list[float]:
    torch = ops.torch
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())  # weights and caches are made there
    with torch.inference_mode(), torch.cuda.stream(stream):
        with decoder.silence():
            decoder.step()
            decoder.reset()
        comm.barrier()
        decoder.prepare()
        comm.barrier()
        for _ in range(WARMUPS):  # which also loads what a capture can't
            decoder.step()
        run: Callable[[], None] = decoder.step
        if comm.capturable:
            comm.barrier()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=stream, capture_error_mode="relaxed"):
                decoder.step()
            comm.barrier()  # instantiating a graph may wait for what spins on the GPU
            run = graph.replay
            decoder.reset()
            for _ in range(WARMUPS):
                run()
        decoder.reset()
        events = [torch.cuda.Event(enable_timing=True) for _ in range(tokens + 1)]
        comm.barrier()
        events[0].record()
        for event in events[1:]:
            run()
            event.record()
        comm.barrier()
    return [first.elapsed_time(second) / 1e3 for first, second in pairwise(events)]


@dataclass(frozen=True)
class Reference:
    """What the float32 model makes, of the same tokens before.

    Attributes:
        tokens: Its likeliest tokens, (batch, tokens).
        margins: How far its two best logits are apart, likewise.
        scale: Root mean square of its logits, likewise.
    """

    tokens: NDArray[np.int64]
    margins: NDArray[np.float64]
    scale: NDArray[np.float64]


@dataclass(frozen=True)
class Check:
    """A generation beside its reference.

    Attributes:
        total: Tokens.
        decided: Those where the reference's margin exceeds the bound.
        wrong: Decided ones that differ.
        different: All that differ.
    """

    total: int
    decided: int
    wrong: int
    different: int

    @property
    def is_right(self) -> bool:
        """True when some were decided, and none was wrong."""
        return self.decided > 0 and not self.wrong


def reference(
    ops: Ops, xp: Any, shape: ModelShape, weights: Weights, given: NDArray[np.int64]
) -> Reference:
    """Run the model in float32 on one rank, with the tokens that were generated. Not collective.

    At each position it gets the same tokens before, so that one difference makes no others.

    Args:
        ops: Of type float32.
        xp: Module of the communicators' arrays.
        shape: The model.
        weights: All of it: made for one rank, in the model's own type.
        given: Tokens of a generation, (batch, tokens).
    """
    decoder = Decoder(ops, shape, weights, alone(xp))
    tokens, margins, scale = [], [], []
    for column in given.T:
        decoder.step()
        logits = ops.host(decoder.logits).astype(np.float64)
        best = np.sort(logits, axis=1)[:, -2:]
        tokens.append(logits.argmax(1))
        margins.append(best[:, 1] - best[:, 0])
        scale.append(np.sqrt((logits**2).mean(1)))
        decoder.feed(ops.integers(column.tolist()))
    return Reference(*(np.array(each).T for each in (tokens, margins, scale)))


def compare(shape: ModelShape, made: NDArray[np.int64], expected: Reference) -> Check:
    """Compare tokens where the reference is decided: where rounding can't turn its choice."""
    bound = BOUND * ROUNDOFF[shape.dtype] * math.sqrt(2 * shape.layers + 1) * expected.scale
    decided = expected.margins > bound
    differs = made != expected.tokens
    return Check(
        total=made.size,
        decided=int(decided.sum()),
        wrong=int((decided & differs).sum()),
        different=int(differs.sum()),
    )
