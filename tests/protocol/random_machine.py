"""Runs kernels as plain Python, all ranks in one process, under a seeded hostile schedule.

Each thread is a greenlet, and every operation of the machine lets another run. Stores wait in a
list and become visible one 8-byte piece at a time, in any order except that of one thread to one
address, with some seeds the newest first; a packet is therefore seen torn in half. A thread sees
its own stores. A rank's call starts when its call before it has ended and all its stores are
visible, as at a kernel boundary.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from greenlet import getcurrent, greenlet

from shmemar.device.groups import WARP_THREADS
from shmemar.device.interpreter import Group, Order, Scope, running
from shmemar.device.kernels import KernelArguments, build
from shmemar.device.packet import SENTINEL
from shmemar.host.exact import exact_input, exact_result
from shmemar.layout import BLOCK_THREADS, SENTINEL_BUFFERS
from shmemar.spec import Kernel

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from numpy.typing import NDArray

    from shmemar.layout import LLLayout
    from shmemar.spec import KernelSpec


class StuckError(Exception):
    """The schedule reached its step limit: nobody gets on."""


@dataclass(frozen=True)
class Call:
    """One call, as every rank makes it; `root` is that of a broadcast.

    `repeats` runs the body as often in one launch, as a loop that is measured does.
    """

    spec: KernelSpec
    count: int
    nthreads: int
    root: int = 0
    repeats: int = 1

    def result(self, number: int, rank: int) -> NDArray[Any] | None:
        """What call `number` must leave on `rank`; None for nothing."""
        what = self.spec.dtype, self.spec.op, self.count
        if self.spec.kernel is not Kernel.BROADCAST:
            return exact_result(*what, nranks=self.spec.nranks, call=number)
        return None if rank == self.root else exact_input(*what, rank=self.root, call=number)


@dataclass
class _Store:
    thread: object
    rank: int
    address: int
    words: tuple[int, ...]


@dataclass
class RandomMachine:
    """Memory of all ranks and a schedule drawn from `seed`."""

    seed: int
    tick_ns: int = 0
    words: dict[int, int] = field(default_factory=dict)
    pending: list[_Store] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        # Every other schedule makes the newest stores visible first, so that old ones stay behind.
        self._newest_first = self.seed % 2 == 1
        # In half of them stores become visible long after they were made.
        self._promptness = 0.5 if self.seed % 4 < 2 else 0.05
        self._time_ns = 0
        self.nstores = 0
        self.rank_of: dict[object, int] = {}
        self.index_of: dict[object, int] = {}
        self.scheduler: Any = getcurrent()

    def load(self, address: int, nwords: int, order: Order) -> tuple[int, ...]:
        return tuple(
            word
            for start in range(0, nwords, 2)
            for word in self._piece(address + 4 * start, min(2, nwords - start))
        )

    def store(self, address: int, words: tuple[int, ...], order: Order) -> None:
        thread = getcurrent()
        self.nstores += 1
        for start in range(0, len(words), 2):
            piece = words[start : start + 2]
            self.pending.append(_Store(thread, self.rank_of[thread], address + 4 * start, piece))
        self._switch()

    def load_part(self, address: int, nbytes: int) -> int:
        (word,) = self._piece(address & ~3, 1)
        return word >> 8 * (address & 3) & (1 << 8 * nbytes) - 1

    def store_part(self, address: int, nbytes: int, value: int) -> None:
        """At once: only outputs are stored in parts, and nobody reads them."""
        self._switch()
        shift, mask = 8 * (address & 3), (1 << 8 * nbytes) - 1
        word = self.words.get(address & ~3, 0)
        self.words[address & ~3] = word & ~(mask << shift) | value << shift

    def exchange(self, address: int, word: int) -> int:
        self._switch()
        before = self.words.get(address, 0)
        self.words[address] = word
        return before

    def add(self, address: int, value: int) -> None:
        self._switch()
        self.words[address] = self.words.get(address, 0) + value & 0xFFFFFFFF

    def add_b64(self, address: int, value: int) -> None:
        self._switch()
        old = self.words.get(address + 4, 0) << 32 | self.words.get(address, 0)
        new = old + value & 0xFFFFFFFFFFFFFFFF
        self.words[address], self.words[address + 4] = new & 0xFFFFFFFF, new >> 32

    def fence(self, scope: Scope) -> None:
        self.drain(lambda store: store.thread is getcurrent())
        self._switch()

    def shares_work(self) -> bool:
        return False

    def meet(
        self, group: Group, offered: Any, *, orders_memory: bool = True
    ) -> tuple[int, list[Any]]:
        return 0, [offered]

    def relax(self) -> None:
        self._switch()

    def clock_ns(self) -> int:
        self._time_ns += self.tick_ns
        return self._time_ns

    def drain(self, which: Callable[[_Store], bool]) -> None:
        """Make stores visible, in the order they were made."""
        for store in [store for store in self.pending if which(store)]:
            self._perform(store)

    def poke(self, address: int, contents: bytes) -> None:
        """Write bytes at once, as the host does between calls."""
        for at, byte in enumerate(contents, address):
            shift = 8 * (at & 3)
            rest = self.words.get(at & ~3, 0) & ~(0xFF << shift)
            self.words[at & ~3] = rest | byte << shift

    def peek(self, address: int, nbytes: int) -> bytes:
        """Read bytes at once."""
        places = range(address, address + nbytes)
        return bytes(self.words.get(at & ~3, 0) >> 8 * (at & 3) & 0xFF for at in places)

    def run(self, ranks: list[Iterator[list[Callable[[], None]]]], limit: int = 200_000) -> None:
        """Run each rank's calls one after another; a call is a list of threads."""
        live: dict[int, list[Any]] = {rank: [] for rank in range(len(ranks))}
        for _ in range(limit):
            for rank in [rank for rank, threads in live.items() if not threads]:
                self.drain(lambda store, rank=rank: store.rank == rank)  # type: ignore[misc]
                live[rank] = [greenlet(body) for body in next(ranks[rank], [])]
                for index, thread in enumerate(live[rank]):
                    self.rank_of[thread], self.index_of[thread] = rank, index
                if not live[rank]:
                    del live[rank]
            if not live:
                return
            if self.pending and self.random.random() < self._promptness:
                among = self.pending[-2:] if self._newest_first else self.pending
                self._perform(self._oldest_like(self.random.choice(among)))
                continue
            rank = self.random.choice(list(live))
            thread = self.random.choice(live[rank])
            thread.switch()
            if thread.dead:
                live[rank].remove(thread)
        raise StuckError(f"seed {self.seed}: no end after {limit} steps")

    def _piece(self, address: int, nwords: int) -> Iterator[int]:
        self._switch()
        # Both words of a piece are read at one moment.
        words = [self.words.get(address + 4 * i, 0) for i in range(nwords)]
        thread = getcurrent()
        for store in self.pending:
            if self.sees(thread, store):
                for i, word in enumerate(store.words):
                    if 0 <= store.address + 4 * i - address < 4 * nwords:
                        words[(store.address - address) // 4 + i] = word
        yield from words

    def sees(self, thread: object, store: _Store) -> bool:
        """Return whether a thread sees a store that is not visible to all yet."""
        return store.thread is thread

    def _oldest_like(self, store: _Store) -> _Store:
        return next(
            other
            for other in self.pending
            if other.thread is store.thread and other.address == store.address
        )

    def _perform(self, store: _Store) -> None:
        self.pending = [other for other in self.pending if other is not store]
        for i, word in enumerate(store.words):
            self.words[store.address + 4 * i] = word

    def _switch(self) -> None:
        self.scheduler.switch()


@dataclass
class MeetingMachine(RandomMachine):
    """Threads of a rank run at once and meet; a fence covers what others did before they met."""

    threads: dict[Group, int] = field(
        default_factory=lambda: {Group.WARP: WARP_THREADS, Group.BLOCK: BLOCK_THREADS}
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        self._offers: dict[Any, dict[int, Any]] = {}
        self._outcomes: dict[Any, list[list[Any]]] = {}
        self._seen: dict[object, dict[int, _Store]] = {}

    def shares_work(self) -> bool:
        return True

    def meet(
        self, group: Group, offered: Any, *, orders_memory: bool = True
    ) -> tuple[int, list[Any]]:
        thread = getcurrent()
        number, place = divmod(self.index_of[thread], self.threads[group])
        which = self.rank_of[thread], group, number
        offers = self._offers.setdefault(which, {})
        outcomes = self._outcomes.setdefault(which, [])
        turn = len(outcomes)
        assert place not in offers, "a thread came twice"
        offers[place] = thread, offered
        if len(offers) == self.threads[group]:
            outcomes.append([offers[place][1] for place in sorted(offers)])
            members = [member for member, _ in offers.values()]
            together = {  # with the stores, so that no other one gets the same id
                id(store): store
                for store in self.pending
                if any(self.sees(member, store) for member in members)
            }
            for member in members:
                self._seen.setdefault(member, {}).update(together)
            offers.clear()
        while len(outcomes) == turn:
            self._switch()
        return place, outcomes[turn]

    def sees(self, thread: object, store: _Store) -> bool:
        return super().sees(thread, store) or id(store) in self._seen.get(thread, ())

    def fence(self, scope: Scope) -> None:
        thread = getcurrent()
        self.drain(lambda store: self.sees(thread, store))
        self._switch()


def wrong_calls(
    calls: list[Call],
    layout: LLLayout,
    seed: int,
    *,
    first_epoch: int = 0,
    kind: type[RandomMachine] = RandomMachine,
) -> list[tuple[int, int]]:
    """Run a sequence of calls on all ranks; return (call, rank) of each wrong result.

    Raises:
        StuckError: The ranks wait for one another for ever.
    """
    machine = kind(seed)
    nranks = layout.nranks
    bases = [(rank + 1) << 40 for rank in range(nranks)]
    epochs, control, arrays = 1 << 32, 2 << 32, 3 << 32
    outputs: dict[tuple[int, int], int] = {}
    for base in bases:
        for slot in range(layout.nslots):
            machine.words[base + epochs + 4 * slot] = first_epoch
        if layout.nbuffers == SENTINEL_BUFFERS:
            for offset in range(0, layout.nbytes, 4):
                machine.words[base + offset] = SENTINEL

    def calls_of(rank: int) -> Iterator[list[Callable[[], None]]]:
        base = bases[rank]
        at = base + arrays
        for number, call in enumerate(calls):
            dtype = call.spec.dtype
            data = exact_input(dtype, call.spec.op, call.count, rank=rank, call=number)
            source, destination = at, at + data.nbytes + 4 * (number % 3)
            destination += -destination % dtype.component_nbytes
            at = destination + data.nbytes + 8
            at += -at % dtype.component_nbytes
            outputs[number, rank] = destination
            machine.poke(source, data.tobytes())
            machine.poke(destination, b"\xa5" * (data.nbytes + 4))
            body = build(call.spec, layout, looped=call.repeats > 1)

            def thread(
                index: int,
                body: Any = body,
                call: Call = call,
                source: int = source,
                destination: int = destination,
            ) -> None:
                arguments = KernelArguments.of_message(
                    call.spec,
                    source,
                    destination,
                    call.count,
                    root=call.root,
                    peers=tuple(bases),
                    epochs=base + epochs,
                    broken=base + control,
                    record=base + control + 128,
                    timeout_ns=0,
                )
                for _ in range(call.repeats):
                    body(arguments, rank, index, call.nthreads, call.nthreads)

            yield [lambda index=index: thread(index) for index in range(call.nthreads)]  # type: ignore[misc]

    with running(machine), np.errstate(over="ignore"):
        machine.run([calls_of(rank) for rank in range(nranks)])
        machine.drain(lambda _: True)

    wrong = []
    for (number, rank), address in outputs.items():
        expected = calls[number].result(number, rank)
        contents = b"" if expected is None else expected.tobytes()
        if machine.peek(address, len(contents) + 4) != contents + b"\xa5" * 4:
            wrong.append((number, rank))
    return sorted(wrong)
