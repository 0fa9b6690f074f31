"""The LL128 kernel: lines, marks, what is displaced, and sums in any order."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import shmemar
from shmemar.device.packet import SENTINEL
from shmemar.dtypes import DTYPES, ReduceOp
from shmemar.errors import ArgumentError, ConfigurationError
from shmemar.host.exact import numpy_dtype
from shmemar.layout import LINE_NBYTES
from shmemar.spec import Kernel, Protocol
from tests.distributed.checked import Checked

if TYPE_CHECKING:
    from collections.abc import Callable

    from mpi4py import MPI

    from shmemar.host.arrays import Arrays

    Pinned = Callable[..., shmemar.Communicator]

SUM, AVG = ReduceOp.SUM, ReduceOp.AVG
TYPES = "float32", "float16", "bfloat16"
ROUNDING = {"float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8}
SMALLEST = {"float32": 2.0**-149, "float16": 2.0**-24, "bfloat16": 2.0**-133}
"""Spacing of subnormal numbers."""

types = pytest.mark.parametrize("name", TYPES)


@pytest.fixture
def lines(pinned: Pinned) -> shmemar.Communicator:
    return pinned(Kernel.LL128_ATOMIC, Protocol.SENTINEL)


def counts(elements: int, nranks: int, *, every: bool) -> list[int]:
    """Elements of messages.

    Whole lines of every rank's share and one element more or less: a few lines, as many as fill an
    extra line, and one more. With `every` all counts to 2,000, and all shares until two extra lines
    are full.
    """
    whole = nranks * elements
    shares = [1, 2, 3, 4, elements - 1, elements]
    if every:
        shares = list(range(1, 2 * elements + 2))
    found = {whole * share + more for share in shares for more in (-1, 0, 1)}
    # And every part of a line, of the first share and of the last.
    found |= set(range(1, 2001)) if every else set(range(1, elements + 2, 3))
    return sorted(found)


@types
def test_every_remainder_of_lines_and_of_what_they_displace_is_exact(
    lines: shmemar.Communicator,
    arrays: Arrays,
    agree: Any,
    pytestconfig: pytest.Config,
    name: str,
) -> None:
    elements = LINE_NBYTES // DTYPES[name].itemsize
    tried = counts(elements, lines.size, every=pytestconfig.getoption("--every-kernel"))
    reduce = Checked(lines, arrays)
    for count in tried:
        # Ranks differ in alignment, and in whether they reduce in place.
        offset = (count + lines.rank) % 3
        reduce(name, SUM, count, offset=offset, in_place=(count // 2 + lines.rank) % 3 == 0)
    assert agree((reduce.call, reduce.wrong)) == [(len(tried), [])] * lines.size


def random_values(name: str, shape: tuple[int, ...], seed: int) -> Any:
    """Numbers of both signs and many magnitudes, so that they cancel and are rounded."""
    draw = np.random.default_rng(seed)
    values = draw.standard_normal(shape) * 2.0 ** draw.integers(-6, 6, shape)
    return values.astype(numpy_dtype(DTYPES[name]))


@types
@pytest.mark.parametrize("op", [SUM, AVG])
def test_errors_are_within_the_documented_bound_and_ranks_agree(
    lines: shmemar.Communicator,
    arrays: Arrays,
    agree: Any,
    pytestconfig: pytest.Config,
    name: str,
    op: ReduceOp,
) -> None:
    nranks, unit = lines.size, ROUNDING[name]
    worst = -np.inf
    for call in range(500 if pytestconfig.getoption("--every-kernel") else 5):
        everyone = random_values(name, (nranks, 2000), call)
        given = everyone.astype(np.float64)
        got = arrays.reduce(lines, everyone[lines.rank].copy(), op=op.value)
        bound = (nranks - 1) * unit / (1 - (nranks - 1) * unit) * np.abs(given).sum(axis=0)
        bound += 2 * nranks * 2.0**-126 if name == "float32" else 0
        exact = given.sum(axis=0)
        if op is AVG:
            # The product is rounded, in float32 the reciprocal too, and then to 16 bits.
            exact, bound = exact / nranks, bound / nranks
            bound += 2 * unit * (np.abs(exact) + bound) + SMALLEST[name]
        worst = max(worst, float(np.max(np.abs(got.astype(np.float64) - exact) - bound)))
        assert len(set(agree(got.tobytes()))) == 1
    assert agree(worst <= 0) == [True] * nranks, worst


def test_float32_flushes_what_is_subnormal_and_16_bits_do_not(
    lines: shmemar.Communicator, arrays: Arrays, agree: Any
) -> None:
    tiny = np.full(40, 1e-40, np.float32)
    assert agree(arrays.reduce(lines, tiny).tolist()) == [[0.0] * 40] * lines.size
    half = np.full(40, 2.0**-24, np.float16)
    expected = [lines.size * 2.0**-24] * 40
    assert agree(arrays.reduce(lines, half).astype(np.float64).tolist()) == [expected] * lines.size


def test_a_sum_of_negative_zeros_is_positive(
    lines: shmemar.Communicator, arrays: Arrays, agree: Any
) -> None:
    got = arrays.reduce(lines, np.full(100, -0.0, np.float32))
    assert agree(bool((got.view(np.uint32) == 0).all())) == [True] * lines.size


@pytest.mark.parametrize("name", ["float16", "bfloat16"])
def test_all_patterns_of_16_bits_come_through(
    lines: shmemar.Communicator, arrays: Arrays, agree: Any, name: str
) -> None:
    """On one rank, beside zeros, and on all; twice in a row."""
    dtype = numpy_dtype(DTYPES[name])
    patterns = np.arange(1 << 16, dtype=np.uint16).view(dtype)
    with np.errstate(over="ignore", invalid="ignore"):
        on_all = patterns + np.zeros_like(patterns)
        for _ in range(1, lines.size):
            on_all = on_all + patterns
        expected = {False: patterns + np.zeros_like(patterns), True: on_all}
    verdicts = []
    for everywhere in (False, True, False, True):
        is_mine = everywhere or lines.rank == lines.size - 1
        got = arrays.reduce(lines, patterns if is_mine else np.zeros_like(patterns))
        with np.errstate(invalid="ignore"):
            same = (got == expected[everywhere]) | (np.isnan(got) & np.isnan(expected[everywhere]))
        verdicts.append((int(np.count_nonzero(~same)), got.tobytes()))
    assert [wrong for wrong, _ in verdicts] == [0] * 4
    assert agree(verdicts) == [verdicts] * lines.size


def test_what_looks_like_the_sentinel_hangs_nothing(
    lines: shmemar.Communicator, arrays: Arrays, agree: Any
) -> None:
    special = np.array([SENTINEL], np.uint32).view(np.float32)[0]
    verdicts = []
    for position in (0, 1, 31, 32, slice(None)):
        for on_all in (False, True):
            x = np.ones(200, np.float32)
            if on_all or lines.rank == lines.size - 1:
                x[position] = special
            got = arrays.reduce(lines, x)
            expected = np.full(200, lines.size, np.float32)
            expected[position] = np.nan
            clean = (arrays.reduce(lines, np.ones(200, np.float32)) == lines.size).all()
            right = np.array_equal(got, expected, equal_nan=True)
            verdicts.append((right, bool(clean), got.tobytes()))
    assert [entry[:2] for entry in verdicts] == [(True, True)] * 10
    assert agree(verdicts) == [verdicts] * lines.size


@pytest.mark.parametrize(
    ("name", "op", "text"),
    [
        ("float64", "sum", r"dtype is float64, and kernel ll128_atomic.*two_shot"),
        ("int32", "sum", r"dtype is int32, and kernel ll128_atomic.*two_shot"),
        ("float32", "max", r"op is 'max', and kernel ll128_atomic.*two_shot"),
    ],
)
def test_other_types_and_operators_are_refused_with_what_to_use(
    lines: shmemar.Communicator, arrays: Arrays, agree: Any, name: str, op: str, text: str
) -> None:
    with pytest.raises(ArgumentError, match=text):
        lines.allreduce(arrays.make(np.ones(4, name)), op=op)
    ones = arrays.reduce(lines, np.ones(4, np.float32))
    assert agree(ones.tolist()) == [[lines.size] * 4] * lines.size


@pytest.mark.parametrize("determinism", ["run_to_run", "bitwise"])
def test_it_is_not_for_those_who_rely_on_the_same_bits(
    world: MPI.Intracomm, backend: str, monkeypatch: pytest.MonkeyPatch, determinism: str
) -> None:
    monkeypatch.setenv("SHMEMAR_KERNEL", "ll128_atomic")
    text = rf"SHMEMAR_KERNEL is ll128_atomic.*determinism is '{determinism}'.*'not_guaranteed'"
    with pytest.raises(ConfigurationError, match=text):
        shmemar.init(world, backend=backend, determinism=determinism)


def test_its_packets_are_sentinel_ones(
    world: MPI.Intracomm, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHMEMAR_KERNEL", "ll128_atomic")
    monkeypatch.setenv("SHMEMAR_PROTOCOL", "ll")
    text = "SHMEMAR_PROTOCOL is 'll', and SHMEMAR_KERNEL ll128_atomic; expected protocol sentinel"
    with pytest.raises(ConfigurationError, match=text):
        shmemar.init(world, backend=backend, determinism="not_guaranteed")
