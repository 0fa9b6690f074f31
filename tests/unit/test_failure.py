"""Failure records: written by a kernel's watchdog, read by the host."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from shmemar.device.interpreter import Order, Scope, running
from shmemar.device.watchdog import Watchdog, report
from shmemar.dtypes import DTYPES, ReduceOp
from shmemar.host.failure import failure_from
from shmemar.layout import FAILURE_DTYPE
from shmemar.spec import Kernel, KernelSpec, Protocol
from tests.unit.machines import RefusingMachine

if TYPE_CHECKING:
    from shmemar.errors import CollectiveTimeoutError

SPEC = KernelSpec(Kernel.ONE_SHOT, Protocol.LL, DTYPES["float64"], ReduceOp.MAX, 64)
RECORD = {
    "valid": 1,
    "kernel": SPEC.code,
    "rank": 5,
    "peer": 40,
    "missing_hi": 1 << 40 - 32,
    "thread": 2 * 128 + 17,
    "block_threads": 128,
    "slot": 273,
    "epoch": 9,
    "expected": 0x9,
    "seen": 0xABC,
}


def control(**changes: int) -> bytes:
    record: Any = np.zeros(1, FAILURE_DTYPE)
    for name, word in {**RECORD, **changes}.items():
        record[name] = word
    return bytes(record.tobytes())


def failure(memory: bytes) -> CollectiveTimeoutError:
    error = failure_from(lambda: memory, 2.5)
    assert error is not None
    return error


@pytest.mark.parametrize(
    "memory", [bytes(FAILURE_DTYPE.itemsize), control(valid=0)], ids=["fresh", "half"]
)
def test_a_record_that_is_not_valid_tells_of_nothing(memory: bytes) -> None:
    assert failure_from(lambda: memory, 2.5) is None


@pytest.mark.parametrize(
    "part",
    [
        "rank 5 waited more than 2.5 s for rank 40 in",
        f"in {SPEC.name}:",
        "block 2, thread 17",
        "slot 273",
        "epoch 9",
        "expected 0x9 from rank 40",
        "saw 0xabc",
        "SHMEMAR_CHECK=1",
        "SHMEMAR_TIMEOUT_S",
        "close it",
    ],
)
def test_the_message_says_who_waited_for_whom_where_and_what_to_do(part: str) -> None:
    assert part in str(failure(control()))


@pytest.mark.parametrize(
    ("low", "high", "missing", "named"),
    [
        (1 << 0, 0, (0,), "for rank 0 in"),
        (1 << 3 | 1 << 31, 0, (3, 31), "for ranks 3, 31 in"),
        (0, 1 << 0, (32,), "for rank 32 in"),
        (1 << 2, 1 << 40 - 32 | 1 << 63 - 32, (2, 40, 63), "for ranks 2, 40, 63 in"),
    ],
)
def test_the_missing_ranks_are_those_of_the_bits(
    low: int, high: int, missing: tuple[int, ...], named: str
) -> None:
    error = failure(control(missing_lo=low, missing_hi=high))
    assert (error.rank, error.missing) == (5, missing)
    assert named in str(error)


def test_of_a_count_nobody_is_named_alone() -> None:
    spec = KernelSpec(
        Kernel.BARRIER, Protocol.PUSH, DTYPES["uint32"], ReduceOp.SUM, 3, multicast=True
    )
    error = failure(
        control(kernel=spec.code, rank=0, peer=1, missing_lo=6, missing_hi=0, expected=9, seen=8)
    )
    assert error.missing == (1, 2)
    assert "for one or more of ranks 1, 2 in barrier_push_uint32_sum_3_multicast: " in str(error)
    assert "expected 0x9 as the count of all, saw 0x8" in str(error)


class _ControlMemory(RefusingMachine):
    """A machine whose memory is a rank's control memory, at address 0x1000."""

    def __init__(self) -> None:
        self.memory = np.zeros(256, np.uint8)

    def _at(self, address: int, nwords: int) -> Any:
        offset = address - 0x1000
        return self.memory[offset : offset + 4 * nwords].view("<u4")

    def load(self, address: int, nwords: int, order: Order) -> tuple[int, ...]:
        return tuple(self._at(address, nwords).tolist())

    def store(self, address: int, words: tuple[int, ...], order: Order) -> None:
        self._at(address, len(words))[:] = words

    def exchange(self, address: int, word: int) -> int:
        (before,) = self.load(address, 1, Order.RELAXED_SYS)
        self.store(address, (word,), Order.RELAXED_SYS)
        return before

    def fence(self, scope: Scope) -> None:
        """Nothing is late here."""


def test_the_host_reads_what_the_first_report_of_a_kernel_wrote() -> None:
    broken, record = 0x1000, 0x1000 + 128
    watchdog = Watchdog(broken, record, 1, SPEC.code, 5, 2 * 128 + 17, 128)
    machine = _ControlMemory()
    with running(machine):
        report(watchdog, 40, 1 << 40, 273, 9, 0x9, 0xABC)
        first = machine.memory.tobytes()
        report(watchdog._replace(thread=0), 1, 1 << 1, 0, 10, 0xA, 0)
    assert machine.memory.tobytes() == first
    written, read = failure(first[128:][: FAILURE_DTYPE.itemsize]), failure(control())
    assert str(written) == str(read)
    assert (written.rank, written.missing) == (read.rank, read.missing) == (5, (40,))


def test_words_that_came_after_the_first_reading_are_read_again() -> None:
    readings = iter([control(peer=0, missing_hi=0), control()])
    error = failure_from(lambda: next(readings), 2.5)
    assert error is not None
    assert error.missing == (40,)


def test_of_a_barrier_the_epoch_is_expected() -> None:
    spec = KernelSpec(Kernel.BARRIER_TWO_SHOT, Protocol.PULL, DTYPES["int8"], ReduceOp.SUM, 64)
    error = failure(control(kernel=spec.code, slot=2, seen=0x7))
    assert (
        "rank 40 in barrier_two_shot_pull_int8_sum_64: block 2, thread 17, its block's barrier, "
        "epoch 9, expected 0x9 from rank 40, saw 0x7."
    ) in str(error)


def test_of_sentinel_packets_no_word_is_expected_but_data() -> None:
    spec = KernelSpec(Kernel.TWO_SHOT, Protocol.SENTINEL, DTYPES["float64"], ReduceOp.SUM, 64)
    error = failure(control(kernel=spec.code, seen=0xFFFAFFFA))
    assert "two_shot_sentinel_float64_sum_64: " in str(error)
    assert "expected data from rank 40, saw 0xfffafffa" in str(error)
