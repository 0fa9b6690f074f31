"""Kernels over an LLBuffer under hundreds of hostile schedules, and what guards them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from shmemar.device.ll_buffer import LLBuffer
from shmemar.device.packet_buffer import PacketBuffer
from shmemar.host.checker import CheckReport, check_kernel, checked_kernels
from shmemar.spec import PACKET_PROTOCOLS, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from numpy.typing import NDArray

COUNTS = [7, 1, 12, 5]
"""Elements of each launch."""

both = pytest.mark.parametrize("protocol", PACKET_PROTOCOLS, ids=lambda protocol: protocol.value)


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


def values(dtype: str, rank: int, launch: int) -> NDArray[Any]:
    drawn = np.random.default_rng((launch, rank)).integers(-40, 40, COUNTS[launch])
    return drawn.astype(dtype)


def checked(
    kernel: Callable[..., None],
    protocol: Protocol,
    nranks: int,
    seeds: Iterable[int],
    *,
    dtype: str = "float32",
    launches: int = len(COUNTS),
) -> CheckReport:
    """Check that a kernel gives sums over all ranks."""

    def sums(_: int, launch: int) -> tuple[Any, ...]:
        inputs = [values(dtype, rank, launch) for rank in range(nranks)]
        return None, np.sum(inputs, axis=0, dtype=dtype)

    def arguments(rank: int, launch: int) -> tuple[Any, ...]:
        return values(dtype, rank, launch), np.zeros(COUNTS[launch], dtype)

    return check_kernel(
        kernel,
        arguments,
        sums,
        nranks=nranks,
        dtype=dtype,
        slots=2,
        protocol=protocol,
        launches=launches,
        seeds=seeds,
    )


@both
@all_kernels
@pytest.mark.parametrize("nranks", [2, 3])
def test_every_schedule_gives_exact_sums(
    kernel: Callable[..., None], protocol: Protocol, nranks: int
) -> None:
    report = checked(kernel, protocol, nranks, range(60))
    assert report.passed, str(report)


@both
@pytest.mark.parametrize("dtype", ["int8", "float64", "complex64", "complex128"])
def test_every_width_is_exact(protocol: Protocol, dtype: str) -> None:
    if protocol is Protocol.SENTINEL and dtype == "int8":
        pytest.skip("integers have no sentinel")
    report = checked(one_shot, protocol, 2, range(20), dtype=dtype)
    assert report.passed, str(report)


@both
@pytest.mark.parametrize("first_epoch", [2**31 - 3, 2**32 - 4, 2**32 - 5])
def test_epochs_pass_the_wrap(
    protocol: Protocol, first_epoch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checked_kernels, "FIRST_EPOCHS", (first_epoch,))
    report = checked(one_shot, protocol, 2, range(30))
    assert report.passed, str(report)


@both
@pytest.mark.parametrize("kernel", [one_shot, gathered])
def test_many_ranks_are_received_in_parts(kernel: Callable[..., None], protocol: Protocol) -> None:
    report = checked(kernel, protocol, 17, [1], launches=2)
    assert report.passed, str(report)


def test_resets_without_a_fence_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PacketBuffer, "fence_resets", lambda _: None)
    assert not checked(to_the_right, Protocol.SENTINEL, 3, range(60)).passed


@both
def test_an_epoch_that_stands_still_is_caught(
    protocol: Protocol, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LLBuffer, "advance_epoch", lambda _: None)
    assert not checked(one_shot, protocol, 2, range(60)).passed


def one_way(ll: Any, thread: int, nthreads: int, x: Any, y: Any) -> None:
    """What the contract forbids: nobody says that what was sent before has been read."""
    for i in range(thread, x.size, nthreads):
        y[i] = x[i]
        if ll.rank == 0:
            ll.send(1, 0, x[i])
            ll.send(1, 1, x[i])
        else:
            y[i] += ll.recv(0, 0) - ll.recv(0, 1)
        ll.advance_epoch()


@both
def test_an_epoch_that_leaves_out_a_peer_is_caught(protocol: Protocol) -> None:
    assert not checked(one_way, protocol, 2, range(60)).passed
