"""The floor under an all-reduce: what the hardware takes for the least that one has to do.

``L_SoL = 2 L_L2 + L_store``. The input is loaded, from L2 at best; a packet is stored to a peer;
what arrives there is loaded by a poll. L_L2 is the latency of one ``__threadfence()`` with nothing
pending, which is an L2 round trip, and ``L_store = (ping-pong round - 2 L_L2) / 2``, as a ping-pong
is two stores and two loads that find them.

On one GPU the round depends on where the two blocks are, and on which of the two sides of the L2
the word is that they poll. Blocks can't be placed; so it is measured for several blocks and words,
and the floor takes the fastest, below which no kernel of any placement can be.

Source: "Every µs Matters: Achieving Near Speed-of-Light Latency in GPU Collectives" (2026).
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from functools import cache
from importlib.util import find_spec
from itertools import combinations, product
from statistics import median
from typing import TYPE_CHECKING, Any

import numpy as np

from shmemar.device.latency import (
    FENCES,
    PENDING,
    WARMUPS,
    fence_kernel,
    load_kernel,
    ping_pong,
    store_kernel,
)
from shmemar.errors import ArgumentError, DeviceError
from shmemar.host.timing import time_graph
from shmemar.layout import BLOCK_THREADS
from shmemar.spec import Backend

if TYPE_CHECKING:
    from collections.abc import Callable

    from shmemar.host.communicator import Communicator

__all__ = ["Floor", "Pair", "measure_floor", "render", "time_barrier"]

_BLOCKS = 16
"""Blocks of a launch, of which one works."""

_PLACES = 4
"""Words in memory, pages apart, that are polled."""

_PAGE_NBYTES = 1 << 16
MODEL_RANKS = (16, 32, 64)

_PRIMARY = next(iter(FENCES))


@dataclass(frozen=True)
class Pair:
    """Ping-pong rounds between two ranks, over all placements.

    Attributes:
        first: A rank.
        second: Another one.
        fastest_ns: Nanoseconds of a round.
        median_ns: The same, of the median placement.
        slowest_ns: The same, of the slowest.
    """

    first: int
    second: int
    fastest_ns: float
    median_ns: float
    slowest_ns: float


@dataclass(frozen=True)
class Floor:
    """What was measured, and the floor that follows. The largest of the ranks, or of the pairs.

    Attributes:
        nranks: Ranks.
        rounds: Rounds of each loop.
        fences_ns: Latency of a fence, by its name and what the thread had stored before it.
        load_ns: Round trip of a load from L2.
        store_ns: What another store to a peer takes a thread that waits for none.
        pairs: Ping-pong of each pair of ranks.
    """

    nranks: int
    rounds: int
    fences_ns: dict[str, dict[str, float]]
    load_ns: float
    store_ns: float
    pairs: tuple[Pair, ...]

    @property
    def l_l2_ns(self) -> float:
        """L_L2: one ``__threadfence()`` with nothing pending."""
        return self.fences_ns[_PRIMARY][PENDING[0]]

    def pair_ns(self, pair: Pair) -> float:
        """L_SoL between two ranks."""
        return self.l_l2_ns + pair.fastest_ns / 2

    @property
    def l_store_ns(self) -> float:
        """L_store, of the slowest pair; 0 of one rank."""
        slowest = max((pair.fastest_ns for pair in self.pairs), default=0.0)
        return slowest / 2 - self.l_l2_ns if slowest else 0.0

    @property
    def l_sol_ns(self) -> float:
        """L_SoL, of the slowest pair: an all-reduce needs all of them."""
        return 2 * self.l_l2_ns + self.l_store_ns

    def model_ns(self, nranks: int) -> float:
        """An estimate for another number of ranks like these: a store more for each peer more."""
        return self.l_sol_ns + (nranks - self.nranks) * self.store_ns

    def as_dict(self) -> dict[str, Any]:
        """For a JSON file; latencies in nanoseconds, but L_SoL in microseconds, too."""
        return {
            **asdict(self),
            "l_l2_ns": self.l_l2_ns,
            "l_store_ns": self.l_store_ns,
            "l_sol_us": self.l_sol_ns / 1e3,
            "pairs_l_sol_us": {
                f"{pair.first}-{pair.second}": self.pair_ns(pair) / 1e3 for pair in self.pairs
            },
            "model_us": {str(n): self.model_ns(n) / 1e3 for n in _modelled(self.nranks)},
        }


def _modelled(nranks: int) -> list[int]:
    return [n for n in MODEL_RANKS if n > nranks] if nranks > 1 else []


@cache
def _fences() -> dict[tuple[str, str], Callable[..., None]]:
    """One kernel each: what is compiled is known by the function."""
    return {key: fence_kernel(*key) for key in product(FENCES, PENDING)}


def measure_floor(
    comm: Communicator,
    *,
    rounds: int = 1000,
    progress: Callable[[int, int, str], None] = lambda *_: None,
) -> Floor:
    """Measure the floor between all ranks. Collective.

    A MiB of symmetric memory that it takes stays the communicator's.

    Args:
        comm: The ranks.
        rounds: Rounds of each loop, alike on all ranks.
        progress: Hears ``(done, all, what)`` before each measurement.

    Raises:
        ArgumentError: `rounds` is no positive integer, or ``SHMEMAR_MAX_BLOCKS`` too low.
        DeviceError: A rank did not answer another one.
        ShmemarError: As of `Communicator.launch`.
    """
    if isinstance(rounds, bool) or not isinstance(rounds, int) or not 1 <= rounds <= 1 << 20:
        raise ArgumentError(f"rounds is {rounds!r}; expected 1 to {1 << 20}.")
    most = comm._config.max_blocks  # noqa: SLF001 - of this package
    if most is not None and most < _BLOCKS:
        raise ArgumentError(
            f"SHMEMAR_MAX_BLOCKS is {most}; expected {_BLOCKS} or more, as many as are tried. "
            "Unset it."
        )
    bench = _Bench(comm, rounds)
    pairs = list(combinations(range(comm.size), 2))
    fences = [key for key in _fences() if comm.size > 1 or key[1] != PENDING[2]]
    total, done = len(fences) + 2 + len(pairs), 0

    def step(what: str) -> None:
        nonlocal done
        progress(done, total, what)
        done += 1

    fences_ns: dict[str, dict[str, float]] = {}
    for fence, pending in fences:
        step(f"{fence}, pending: {pending}")
        fences_ns.setdefault(fence, {})[pending] = bench.fence(fence, pending)
    step("load from L2")
    load_ns = bench.largest(load_kernel, bench.zeros, bench.found, 0, rounds)
    step("stores to peers")
    store_ns = 0.0
    if comm.size > 1:
        store_ns = bench.largest(store_kernel, bench.memory, bench.found, 0, rounds)
        store_ns /= comm.size - 1
    found = []
    for first, second in pairs:
        step(f"ping-pong of ranks {first} and {second}")
        found.append(bench.pair(first, second))
    progress(total, total, "done")
    return Floor(comm.size, rounds, fences_ns, load_ns, store_ns, tuple(found))


class _Bench:
    """Memory to measure in."""

    def __init__(self, comm: Communicator, rounds: int) -> None:
        self.comm, self.rounds = comm, rounds
        self._buffer = comm.ll_buffer("uint32", threads=_BLOCKS * BLOCK_THREADS)
        self.memory = comm.symmetric_array((_PLACES + 1, _PAGE_NBYTES // 4), "uint32")
        self.zeros = comm.symmetric_array(_PAGE_NBYTES // 8, "uint64")
        self.found = comm.symmetric_array(1, "uint64")
        self._mark = 1

    def own(self, kernel: Callable[..., None], *arguments: Any) -> float:
        """Nanoseconds of a round on this rank."""
        self.comm.host_barrier()
        stream = None if self.comm.backend is Backend.EMULATED else 0
        self.comm.launch(kernel, self._buffer, *arguments, stream=stream)
        return float(self.found.copy_to_host()[0]) / self.rounds

    def largest(self, kernel: Callable[..., None], *arguments: Any) -> float:
        """The median of a few launches, the largest of the ranks."""
        return max(self.comm.host_allgather(median(self.own(kernel, *arguments) for _ in range(5))))

    def fence(self, fence: str, pending: str) -> float:
        """Nanoseconds of a fence behind a store."""
        peer = (self.comm.rank + 1) % self.comm.size
        kernel = _fences()[fence, pending]
        return self.largest(kernel, self.memory, self.found, 0, peer, self.rounds)

    def pair(self, first: int, second: int) -> Pair:
        """Rounds between two ranks."""
        times = []
        for block in range(_BLOCKS):
            active, place = block * BLOCK_THREADS, block % _PLACES + 1
            what = self.memory, self.found, active, place * _PAGE_NBYTES, first, second
            took = self.own(ping_pong, *what, self.rounds, self._mark)
            self._mark += self.rounds + WARMUPS
            times.append(self.comm.host_allgather(took)[first])
        if not all(times):
            raise DeviceError(
                f"rank {first} or {second} did not answer the other one's stores within some "
                "seconds; see whether both GPUs are well, and close the communicator."
            )
        return Pair(first, second, min(times), median(times), max(times))


def render(floor: Floor, barrier_us: dict[int, float]) -> str:
    """Say it in text.

    Args:
        floor: What was measured.
        barrier_us: Microseconds of a barrier in a CUDA graph, by its number of ranks.
    """
    lines = ["# fences, ns, behind a store that is pending:"]
    heads = "".join(f"{pending:>14}" for pending in PENDING)
    lines.append(f"{'':<20}{heads}")
    for fence, times in floor.fences_ns.items():
        cells = "".join(f"{times[p]:>14.0f}" if p in times else f"{'-':>14}" for p in PENDING)
        lines.append(f"{fence:<20}{cells}")
    lines.append(f"load from L2, round trip      {floor.load_ns:>8.0f} ns")
    if floor.pairs:
        lines.append(f"another store to a peer       {floor.store_ns:>8.0f} ns")
        lines.append("# ping-pong round, ns, over placements, and L_SoL of the fastest:")
        lines.append(f"{'ranks':<12}{'fastest':>10}{'median':>10}{'slowest':>10}{'L_SoL':>10}")
        for pair in floor.pairs:
            rounds = (pair.fastest_ns, pair.median_ns, pair.slowest_ns, floor.pair_ns(pair))
            cells = "".join(f"{each:>10.0f}" for each in rounds)
            lines.append(f"{f'{pair.first}, {pair.second}':<12}{cells}")
    lines += [
        f"barrier of {n} ranks, in a graph   {us:>7.2f} us" for n, us in sorted(barrier_us.items())
    ]
    if floor.pairs:
        lines.append(
            f"L_SoL = 2 * {floor.l_l2_ns:.0f} ({_PRIMARY}, nothing pending) + "
            f"{floor.l_store_ns:.0f} (L_store) = {floor.l_sol_ns:.0f} ns, {floor.nranks} ranks"
        )
        for n in _modelled(floor.nranks):
            lines.append(
                f"estimated for {n} ranks like these, a store more a peer: "
                f"{floor.model_ns(n):.0f} ns"
            )
    else:
        lines.append("L_SoL needs two ranks; start more under mpirun.")
    return "\n".join(lines)


def time_barrier(comm: Communicator, samples: int = 20, repeats: int = 50) -> float | None:
    """Time a barrier in a CUDA graph, in microseconds; None where that can't be. Collective."""
    if comm.backend is Backend.EMULATED or find_spec("cupy") is None:
        return None
    comm.barrier()

    def collective(_: int, stream: Any) -> None:
        comm.barrier(stream=stream)

    found = time_graph(comm, collective, samples, repeats, _NoData())
    return max(comm.host_allgather(float(np.median(found.microseconds))))


class _NoData:
    """A barrier moves nothing."""

    def fill(self, sample: int) -> None:
        """Nothing."""

    def count_wrong(self, sample: int, repeats: int, runs: int = 1) -> int:
        """Nothing can be wrong."""
        return 0
