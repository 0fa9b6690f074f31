"""The one-shot kernel's own source under a few hundred random schedules, and what guards it."""

from __future__ import annotations

import pytest

from shmemar.device import ll_buffer
from shmemar.device.kernels import one_shot
from shmemar.device.words import u32
from shmemar.dtypes import DTYPES, ReduceOp, supported_ops
from shmemar.layout import LLLayout
from shmemar.spec import Kernel, KernelSpec, Protocol
from tests.protocol.random_machine import Call, StuckError, wrong_calls

SEEDS = range(300)


def spec_of(name: str, op: ReduceOp, nranks: int) -> KernelSpec:
    return KernelSpec(Kernel.ONE_SHOT, Protocol.LL, DTYPES[name], op, nranks)


def mixed_calls(nranks: int) -> list[Call]:
    """Calls of several sizes, grids and passes, one of them with two packets a thread."""
    floats = spec_of("float32", ReduceOp.SUM, nranks)
    pairs = spec_of("complex128", ReduceOp.PROD, nranks)
    return [
        Call(floats, 3, 2),
        Call(floats, 1, 1),
        Call(floats, 9, 2),
        Call(pairs, 2, 1),
        Call(floats, 5, 4),
        Call(floats, 2, 1),
        Call(floats, 7, 2),
    ]


def first_failure(layout: LLLayout, seeds: range, **options: int) -> int | None:
    """The first seed under which a result is wrong or the ranks get stuck."""
    calls = mixed_calls(layout.nranks)
    for seed in seeds:
        try:
            if wrong_calls(calls, layout, seed, **options):
                return seed
        except StuckError:
            return seed
    return None


@pytest.mark.parametrize("nranks", [2, 3])
def test_every_schedule_gives_exact_sums(nranks: int) -> None:
    assert first_failure(LLLayout(nranks, nslots=4), SEEDS) is None


@pytest.mark.parametrize("first_epoch", [2**31 - 3, 2**32 - 4, 2**32 - 5])
def test_epochs_pass_the_wrap(first_epoch: int) -> None:
    layout = LLLayout(2, nslots=4)
    assert first_failure(layout, range(40), first_epoch=first_epoch) is None


@pytest.mark.parametrize("nranks", [1, 4])
@pytest.mark.parametrize(
    ("name", "op"),
    [(name, op) for name, dtype in DTYPES.items() for op in supported_ops(dtype)],
)
def test_every_type_and_operator_is_exact(name: str, op: ReduceOp, nranks: int) -> None:
    spec = spec_of(name, op, nranks)
    calls = [Call(spec, 5, 2), Call(spec, 2, 2), Call(spec, 1, 1)]
    assert wrong_calls(calls, LLLayout(nranks, nslots=4), seed=1) == []


class OneBuffer(LLLayout):
    """A layout whose halves are the same memory."""

    @property
    def half_nbytes(self) -> int:
        return 0


def test_one_buffer_instead_of_two_is_caught() -> None:
    assert first_failure(OneBuffer(2, nslots=4), SEEDS) is not None


def test_judging_one_flag_of_a_torn_packet_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    def first_flag_only(packets: list[int], at: int, epoch: int) -> bool:
        return packets[at + 1] == epoch

    monkeypatch.setattr(ll_buffer, "_arrived", first_flag_only)
    assert first_failure(LLLayout(2, nslots=4), SEEDS) is not None


def test_a_wrap_that_keeps_parity_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    def skip_zero_only(epoch: int) -> int:
        return u32(1) if epoch == u32(0xFFFFFFFF) else u32(epoch + 1)

    monkeypatch.setattr(ll_buffer, "next_epoch", skip_zero_only)
    layout = LLLayout(2, nslots=4)
    assert first_failure(layout, range(100), first_epoch=2**32 - 4) is not None


def test_one_epoch_word_for_all_threads_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(one_shot, "WORD_NBYTES", 0)
    assert first_failure(LLLayout(2, nslots=4), SEEDS) is not None
