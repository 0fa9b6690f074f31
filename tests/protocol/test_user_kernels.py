"""Kernels over an LLBuffer under hundreds of random schedules, and what guards them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from shmemar.device.interpreter import running
from shmemar.device.kernels import UserArguments, build
from shmemar.device.ll_buffer import LLBuffer
from shmemar.device.packet import SENTINEL
from shmemar.device.packet_buffer import PacketBuffer
from shmemar.spec import Protocol
from shmemar.user_spec import BufferSpec, UserKernelSpec
from tests.protocol.random_machine import RandomMachine, StuckError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from numpy.typing import NDArray

NTHREADS = 3
LAUNCHES = [(7, 3), (1, 1), (12, 2), (5, 3)]
"""Elements and threads of each launch."""

both = pytest.mark.parametrize("protocol", list(Protocol), ids=lambda protocol: protocol.value)


def one_shot(ll: Any, thread: int, nthreads: int, x: Any, y: Any) -> None:
    for i in range(thread, x.size, nthreads):
        ll.bcast(0, x[i])
        y[i] = ll.recv_reduce(0, x[i], lambda a, b: a + b)
        ll.advance_epoch()


def gathered(ll: Any, thread: int, nthreads: int, x: Any, y: Any) -> None:
    """The last advance is left to the kernel's end, and one that follows no exchange is nothing."""
    for i in range(thread, x.size, nthreads):
        ll.advance_epoch()
        ll.bcast(0, x[i])
        values = ll.recv_unrolled(0, x[i])
        for r in range(ll.size):
            y[i] += values[r]


def to_the_right(ll: Any, thread: int, nthreads: int, x: Any, y: Any) -> None:
    """An element once round the ring; the other peers get an empty answer in another slot."""
    right, left = (ll.rank + 1) % ll.size, (ll.rank - 1) % ll.size
    for i in range(thread, x.size, nthreads):
        y[i] = x[i]
        passed = x[i]
        for _ in range(ll.size - 1):
            for peer in range(ll.size):
                if peer != ll.rank:
                    ll.send(peer, 1 if peer == right else 0, passed)
            for peer in range(ll.size):
                if peer not in (ll.rank, left):
                    ll.recv(peer, 0)
            passed = ll.recv(left, 1)
            y[i] += passed
            ll.advance_epoch()


KERNELS = [one_shot, gathered, to_the_right]
all_kernels = pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.__name__)


def element(dtype: Any, seed: tuple[int, ...]) -> Any:
    found: Any = np.dtype(dtype).type(np.random.default_rng(seed).integers(-40, 40))
    return found


def first_failure(
    kernel: Callable[..., None],
    protocol: Protocol,
    nranks: int,
    seeds: Iterable[int],
    *,
    dtype: str = "float32",
    first_epoch: int = 0,
) -> int | None:
    """The first seed under which a sum is wrong or the ranks get stuck."""
    buffer = BufferSpec(dtype, 1, protocol, nranks, NTHREADS, 2)
    for seed in seeds:
        try:
            if not all_right(kernel, buffer, seed, first_epoch):
                return seed
        except StuckError:
            return seed
    return None


def all_right(kernel: Callable[..., None], buffer: BufferSpec, seed: int, first_epoch: int) -> bool:
    machine = RandomMachine(seed)
    spec = UserKernelSpec(kernel, buffer, ())
    layout = buffer.layout
    body = build(spec, layout)
    bases = [(rank + 1) << 40 for rank in range(buffer.nranks)]
    epochs, control = 1 << 32, 2 << 32
    for base in bases:
        for thread in range(NTHREADS):
            machine.words[base + epochs + 4 * thread] = first_epoch
        if buffer.protocol is Protocol.SENTINEL:
            for offset in range(0, layout.nbytes, 4):
                machine.words[base + offset] = SENTINEL
    inputs = [
        [
            np.array([element(buffer.dtype, (launch, rank, i)) for i in range(count)])
            for rank in range(buffer.nranks)
        ]
        for launch, (count, _) in enumerate(LAUNCHES)
    ]
    outputs: dict[tuple[int, int], NDArray[Any]] = {}

    def launches_of(rank: int) -> Iterator[list[Callable[[], None]]]:
        for launch, (_, nthreads) in enumerate(LAUNCHES):
            x = inputs[launch][rank]
            outputs[launch, rank] = y = np.zeros_like(x)
            base = bases[rank]
            arguments = UserArguments(
                tuple(bases), base + epochs, base + control, base + control + 128, 0, (x, y)
            )

            def thread(
                index: int, arguments: UserArguments = arguments, nthreads: int = nthreads
            ) -> None:
                body(arguments, rank, index, nthreads, nthreads)

            yield [lambda index=index: thread(index) for index in range(nthreads)]  # type: ignore[misc]

    with running(machine):
        machine.run([launches_of(rank) for rank in range(buffer.nranks)])
    return all(
        np.array_equal(y, np.sum(inputs[launch], axis=0, dtype=y.dtype))
        for (launch, _), y in outputs.items()
    )


@both
@all_kernels
@pytest.mark.parametrize("nranks", [2, 3])
def test_every_schedule_gives_exact_sums(
    kernel: Callable[..., None], protocol: Protocol, nranks: int
) -> None:
    assert first_failure(kernel, protocol, nranks, range(60)) is None


@both
@pytest.mark.parametrize("dtype", ["int8", "float64", "complex64", "complex128"])
def test_every_width_is_exact(protocol: Protocol, dtype: str) -> None:
    if protocol is Protocol.SENTINEL and dtype == "int8":
        pytest.skip("integers have no sentinel")
    assert first_failure(one_shot, protocol, 2, range(20), dtype=dtype) is None


@both
@pytest.mark.parametrize("first_epoch", [2**31 - 3, 2**32 - 4, 2**32 - 5])
def test_epochs_pass_the_wrap(protocol: Protocol, first_epoch: int) -> None:
    assert first_failure(one_shot, protocol, 2, range(30), first_epoch=first_epoch) is None


@both
def test_many_ranks_are_received_in_parts(protocol: Protocol) -> None:
    assert first_failure(one_shot, protocol, 19, [1]) is None
    assert first_failure(gathered, protocol, 17, [1]) is None


def test_resets_without_a_fence_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PacketBuffer, "fence_resets", lambda _: None)
    assert first_failure(to_the_right, Protocol.SENTINEL, 3, range(200)) is not None


@both
def test_an_epoch_that_stands_still_is_caught(
    protocol: Protocol, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LLBuffer, "advance_epoch", lambda _: None)
    assert first_failure(one_shot, protocol, 2, range(60)) is not None


@both
def test_an_epoch_that_leaves_out_a_peer_is_caught(protocol: Protocol) -> None:
    """What the contract forbids: nobody says that what was sent before has been read."""

    def one_way(ll: Any, thread: int, nthreads: int, x: Any, y: Any) -> None:
        for i in range(thread, x.size, nthreads):
            y[i] = x[i]
            if ll.rank == 0:
                ll.send(1, 0, x[i])
                ll.send(1, 1, x[i])
            else:
                y[i] += ll.recv(0, 0) - ll.recv(0, 1)
            ll.advance_epoch()

    assert first_failure(one_way, protocol, 2, range(60)) is not None
