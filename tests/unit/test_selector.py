"""Which kernel serves a call."""

from __future__ import annotations

import builtins
import json
import math
import os
import time
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shmemar.dtypes import DTYPES, DType, ReduceOp, supported_ops
from shmemar.errors import ArgumentError
from shmemar.host import selector
from shmemar.host.default_tables import default_table
from shmemar.host.kernel_set import KernelSet
from shmemar.host.selector import CANDIDATES, Band, Candidate, Table, Terms, refusals, select
from shmemar.spec import MAX_RANKS, Determinism, Kernel, Protocol, why_impossible

FLOAT, INT, SUM = DTYPES["float32"], DTYPES["int32"], ReduceOp.SUM
RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
ONE_LL = Candidate(Kernel.ONE_SHOT, Protocol.LL)
TWO_SENTINEL = Candidate(Kernel.TWO_SHOT, Protocol.SENTINEL)
LINES = Candidate(Kernel.LL128_ATOMIC, Protocol.SENTINEL)


def table(*candidates: Candidate) -> Table:
    return Table("a test", (Band(None, candidates),))


@st.composite
def tables(draw: st.DrawFn) -> Table:
    ends: list[int | None] = [*sorted(draw(st.sets(st.integers(1, 1 << 40), max_size=4))), None]
    some = st.lists(st.sampled_from(CANDIDATES), unique=True)
    return Table("drawn", tuple(Band(end, tuple(draw(some))) for end in ends))


terms_drawn = st.builds(
    Terms,
    nranks=st.integers(1, MAX_RANKS),
    table=tables(),
    determinism=st.sampled_from(Determinism),
    multicast=st.booleans(),
    why_no_lines=st.sampled_from([None, "not tested"]),
    why_no_stock=st.sampled_from([None, "there are others"]),
)
calls = st.sampled_from([(d, op) for d in DTYPES.values() for op in supported_ops(d)])


@given(sizes=st.lists(st.integers(1, 1 << 42), min_size=2), call=calls, terms=terms_drawn)
def test_choices_that_are_remembered_are_those_of_their_sizes(
    sizes: list[int], call: tuple[DType, ReduceOp], terms: Terms
) -> None:
    nothing: Any = None
    kernels = KernelSet(nothing, nothing, nothing, nothing, terms)
    ends = [band.up_to for band in terms.table.bands if band.up_to is not None]
    for nbytes in [*sizes, *ends, *(end + 1 for end in ends), *sizes]:
        assert kernels.choose(nbytes, *call) == select(nbytes, *call, terms)


def test_other_terms_are_chosen_on_anew() -> None:
    nothing: Any = None
    kernels = KernelSet(nothing, nothing, nothing, nothing, Terms(2, table(ONE_LL)))
    assert kernels.choose(4, FLOAT, SUM).candidate == ONE_LL
    kernels.use(Terms(2, table(TWO_SENTINEL)))
    assert kernels.choose(4, FLOAT, SUM).candidate == TWO_SENTINEL


def test_a_pinned_kernel_is_chosen_once_for_all_sizes() -> None:
    nothing: Any = None
    terms = Terms(2, table(ONE_LL), kernel=Kernel.TWO_SHOT)
    kernels = KernelSet(nothing, nothing, nothing, nothing, terms)
    first = kernels.choose(4, FLOAT, SUM)
    assert first == select(4, FLOAT, SUM, terms)
    assert kernels.choose(1 << 30, FLOAT, SUM) is first


@given(nbytes=st.integers(1, 1 << 42), call=calls, terms=terms_drawn)
def test_every_call_is_served_by_what_supports_it_and_by_the_same_each_time(
    nbytes: int, call: tuple[DType, ReduceOp], terms: Terms
) -> None:
    dtype, op = call
    choice = select(nbytes, dtype, op, terms)
    spec = choice.spec
    assert (spec.dtype, spec.op, spec.nranks) == (dtype, op, terms.nranks)
    assert spec.kernel.reduces
    what = spec.kernel, spec.protocol, dtype, op, terms.nranks
    assert why_impossible(*what, multicast=spec.multicast) is None
    if terms.determinism is not Determinism.NOT_GUARANTEED:
        assert spec.is_deterministic
    if terms.determinism is Determinism.BITWISE:
        assert spec.protocol is not Protocol.SENTINEL
    if terms.why_no_lines:
        assert spec.kernel is not Kernel.LL128_ATOMIC
    if terms.why_no_stock or (terms.nranks > 2 and not dtype.is_integer):
        assert spec.kernel is not Kernel.STOCK
    assert terms.multicast or not spec.multicast
    assert select(nbytes, dtype, op, terms) == choice
    others = dict(refusals(nbytes, dtype, op, terms))
    assert {choice.candidate.name, *others} == {each.name for each in CANDIDATES}
    assert choice.candidate.name not in others
    assert all(others.values())


@given(nbytes=st.integers(1, 1 << 42), call=calls, terms=terms_drawn)
def test_the_first_of_the_band_that_can_serve_does(
    nbytes: int, call: tuple[DType, ReduceOp], terms: Terms
) -> None:
    choice = select(nbytes, *call, terms)
    listed = terms.table.band(nbytes).candidates
    before = listed[: listed.index(choice.candidate)] if choice.candidate in listed else listed
    others = dict(refusals(nbytes, *call, terms))
    for candidate in before:
        alone = Terms(terms.nranks, table(candidate), terms.determinism)
        is_lines = candidate.kernel is Kernel.LL128_ATOMIC and terms.why_no_lines
        is_stock = candidate.kernel is Kernel.STOCK and terms.why_no_stock
        assert is_lines or is_stock or select(nbytes, *call, alone).candidate != candidate
        assert "listed behind" not in others[candidate.name]


def test_nothing_of_one_rank_alone_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> Any:
        raise AssertionError("the choice depends on this")

    assert not {"os", "time", "random", "socket", "sys"} & set(vars(selector))
    found = default_table(4, shares_gpu=False)
    for owner, name in (
        (os, "getenv"),
        (os.environ, "get"),
        (time, "time"),
        (time, "monotonic"),
        (time, "perf_counter"),
        (builtins, "open"),
        (builtins, "id"),
        (builtins, "hash"),
    ):
        monkeypatch.setattr(owner, name, refuse)
    try:
        choice = select(1 << 20, FLOAT, SUM, Terms(4, found))
        reasons = list(refusals(1 << 20, FLOAT, SUM, Terms(4, found)))
    finally:
        monkeypatch.undo()
    assert choice.candidate == TWO_SENTINEL
    assert len(reasons) == len(CANDIDATES) - 1


@pytest.mark.parametrize("ends", [(), (None, None), (8,), (None, 8), (8, 8, None), (9, 8, None)])
def test_a_table_has_rising_sizes_and_an_open_end(ends: tuple[int | None, ...]) -> None:
    with pytest.raises(ArgumentError, match="bands end at"):
        Table("a test", tuple(Band(end, (ONE_LL,)) for end in ends))


def test_a_band_holds_its_end() -> None:
    bands = Table("a test", (Band(8, (ONE_LL,)), Band(None, (TWO_SENTINEL,))))
    found = [select(nbytes, FLOAT, SUM, Terms(2, bands)).candidate for nbytes in (8, 9)]
    assert found == [ONE_LL, TWO_SENTINEL]


def test_a_pinned_kernel_serves_all_sizes_with_its_default_protocol() -> None:
    for kernel in Kernel:
        if kernel.reduces:
            terms = Terms(
                4, default_table(4, shares_gpu=True), Determinism.NOT_GUARANTEED, kernel=kernel
            )
            for nbytes in (4, 1 << 30):
                choice = select(nbytes, FLOAT, SUM, terms)
                assert choice.spec.kernel is kernel
                assert choice.spec.protocol is kernel.default_protocol
                assert choice.why == f"SHMEMAR_KERNEL is {kernel.value}"


def test_a_pinned_protocol_leaves_the_kernels_that_have_it() -> None:
    table_of_4 = default_table(4, shares_gpu=False)
    terms = Terms(4, table_of_4, protocol=Protocol.PULL)
    choice = select(128, FLOAT, SUM, terms)
    assert choice.spec.protocol is Protocol.PULL
    others = dict(refusals(128, FLOAT, SUM, terms))
    assert others["one_shot/ll"] == "SHMEMAR_PROTOCOL is pull"


@pytest.mark.parametrize(
    ("kernel", "protocol", "dtype", "expected"),
    [
        (None, Protocol.SENTINEL, INT, "protocol is sentinel, and dtype int32"),
        (Kernel.ONE_SHOT, Protocol.SENTINEL, INT, "protocol is sentinel, and dtype int32"),
        (Kernel.LL128_ATOMIC, None, INT, "dtype is int32, and kernel ll128_atomic"),
        (Kernel.LL128_ATOMIC, None, DTYPES["float64"], "dtype is float64, and kernel ll128"),
        (Kernel.ONE_SHOT, Protocol.PULL, FLOAT, "no kernel fits that"),
    ],
)
def test_what_is_pinned_and_cant_serve_is_an_error(
    kernel: Kernel | None, protocol: Protocol | None, dtype: DType, expected: str
) -> None:
    terms = Terms(2, table(ONE_LL), Determinism.NOT_GUARANTEED, kernel, protocol)
    with pytest.raises(ArgumentError, match=expected):
        select(64, dtype, SUM, terms)


def test_what_has_no_room_in_the_scratch_is_left_out() -> None:
    known = default_table(2, shares_gpu=False)
    small = Terms(2, known, scratch_nbytes=2 * 2 * 256 * 16)
    assert select(1 << 16, FLOAT, SUM, Terms(2, known)).candidate.name == "one_shot/sentinel"
    assert select(1 << 16, FLOAT, SUM, small).candidate == ONE_LL
    others = dict(refusals(1 << 16, FLOAT, SUM, small))
    assert others["one_shot/sentinel"].startswith("scratch_nbytes is 16384; expected at least")
    with pytest.raises(ArgumentError, match="scratch_nbytes is 16; expected at least"):
        select(64, FLOAT, SUM, Terms(2, known, kernel=Kernel.ONE_SHOT, scratch_nbytes=16))


def test_lines_are_used_where_they_are_listed_allowed_and_tested() -> None:
    def chosen(determinism: Determinism, why: str | None, dtype: DType = FLOAT) -> str:
        terms = Terms(2, table(LINES, ONE_LL), determinism, why_no_lines=why)
        return select(1 << 20, dtype, SUM, terms).candidate.name

    assert chosen(Determinism.NOT_GUARANTEED, None) == "ll128_atomic/sentinel"
    assert chosen(Determinism.NOT_GUARANTEED, "not tested") == "one_shot/ll"
    assert chosen(Determinism.RUN_TO_RUN, None) == "one_shot/ll"
    assert chosen(Determinism.NOT_GUARANTEED, None, INT) == "one_shot/ll"
    terms = Terms(2, table(LINES, ONE_LL), why_no_lines="not tested")
    others = dict(refusals(64, FLOAT, SUM, terms))
    assert others["ll128_atomic/sentinel"].startswith("its order of summation may vary")


STOCK = Candidate(Kernel.STOCK, Protocol.STREAM)


@pytest.mark.parametrize(
    ("nranks", "dtype", "changes", "why"),
    [
        (2, FLOAT, {}, None),
        (2, INT, {}, None),
        (3, INT, {}, None),
        (3, FLOAT, {"kernel": Kernel.STOCK}, None),
        (3, FLOAT, {}, "nothing says that its 3 ranks round alike, so of float32 it serves only"),
        (2, INT, {"determinism": Determinism.RUN_TO_RUN}, "its order of summation may vary"),
        (2, FLOAT, {"why_no_stock": "there are others"}, "there are others"),
        (2, DTYPES["bfloat16"], {}, "dtype is bfloat16, and kernel stock, which rounds 16-bit"),
        (2, DTYPES["complex64"], {}, "dtype is complex64, and kernel stock"),
    ],
)
def test_the_stock_collective_serves_where_it_gives_what_is_promised(
    nranks: int, dtype: DType, changes: dict[str, Any], why: str | None
) -> None:
    settings = {"determinism": Determinism.NOT_GUARANTEED, **changes}
    terms = Terms(nranks, table(STOCK, ONE_LL), **settings)
    chosen = select(1 << 30, dtype, SUM, terms).candidate
    assert chosen == (STOCK if why is None else ONE_LL)
    if why is not None:
        assert dict(refusals(1 << 30, dtype, SUM, terms))["stock/stream"].startswith(why)


@pytest.mark.parametrize(
    ("dtype", "op"),
    [(FLOAT, ReduceOp.MIN), (INT, ReduceOp.PROD), (DTYPES["float64"], ReduceOp.AVG)],
)
def test_the_stock_collective_is_refused_what_it_has_not(dtype: DType, op: ReduceOp) -> None:
    terms = Terms(2, table(STOCK), Determinism.NOT_GUARANTEED, Kernel.STOCK)
    with pytest.raises(ArgumentError, match=f"op is '{op.value}', and kernel stock, which has no"):
        select(64, dtype, op, terms)


def test_no_table_that_comes_with_the_package_lists_the_stock_collective() -> None:
    for nranks, shares_gpu in product(range(1, MAX_RANKS + 1), (False, True)):
        bands = default_table(nranks, shares_gpu=shares_gpu).bands
        assert all(STOCK not in band.candidates for band in bands)


def test_reasons_have_the_latencies_of_the_table() -> None:
    listed = (
        Candidate(Kernel.ONE_SHOT, Protocol.LL, max_blocks=16, latency_us=2.5),
        Candidate(Kernel.TWO_SHOT, Protocol.LL, latency_us=4.0),
        Candidate(Kernel.TWO_SHOT, Protocol.SENTINEL),
    )
    terms = Terms(2, table(*listed))
    choice = select(64, FLOAT, SUM, terms)
    assert choice.candidate.max_blocks == 16
    assert choice.why == "the first for messages of any larger size, as known from a test"
    others = dict(refusals(64, FLOAT, SUM, terms))
    assert others["two_shot/ll"] == "4.00 us, one_shot/ll 2.50"
    assert others["two_shot/sentinel"] == "listed behind one_shot/ll"
    assert others["one_shot/sentinel"] == "not listed for this size"


# The tables that come with the package


@pytest.mark.parametrize("shares_gpu", [False, True])
@pytest.mark.parametrize("nranks", range(1, MAX_RANKS + 1))
def test_every_number_of_ranks_has_a_table(nranks: int, shares_gpu: bool) -> None:
    found = default_table(nranks, shares_gpu=shares_gpu)
    assert found.origin
    assert select(8, FLOAT, SUM, Terms(nranks, found)).candidate == ONE_LL


MEASURED = [
    (("2026-11-29-h200-two-gpus.json",), 2, False),
    (("2026-11-30-h200-two-gpus-large.json",), 2, False),
    (("2026-11-30-h200-four-gpus-tuned.json",), 4, False),
    (("2026-11-30-h200-one-gpu-2-ranks.json",), 2, True),
    (
        (
            "2026-11-30-h200-one-gpu-2-ranks-large.json",
            "2026-11-30-h200-one-gpu-2-ranks-barrier-kernels.json",
        ),
        2,
        True,
    ),
    (("2026-11-30-h200-one-gpu-4-ranks.json",), 4, True),
    (
        (
            "2026-11-30-h200-one-gpu-4-ranks-large.json",
            "2026-11-30-h200-one-gpu-4-ranks-barrier-kernels.json",
        ),
        4,
        True,
    ),
    (("2026-11-30-h200-one-gpu-8-ranks.json",), 8, True),
    (("2026-11-30-h200-one-gpu-16-ranks.json",), 16, True),
]


@pytest.mark.parametrize(
    ("files", "nranks", "shares_gpu"), MEASURED, ids=[m[0][0] for m in MEASURED]
)
@pytest.mark.parametrize("dtype", [FLOAT, INT], ids=["float32", "int32"])
def test_tables_choose_what_was_measured_to_be_fastest(
    files: tuple[str, ...], nranks: int, shares_gpu: bool, dtype: DType
) -> None:
    """Within a tenth, as medians of two runs differ by; integers move as float32 does."""
    terms = Terms(nranks, default_table(nranks, shares_gpu=shares_gpu))
    measured: dict[int, dict[str, float]] = {}
    for file in files:
        document = json.loads((RESULTS / file).read_text(encoding="utf-8"))
        for each in document["rows"]:
            row = {"mode": "graph", "dtype": "float32", "chained": False} | each  # as a tuner's are
            if row["mode"] == "graph" and row["dtype"] == "float32" and not row["chained"]:
                known = measured.setdefault(row["nbytes"], {})
                known[row["kernel"]] = min(row["median_us"], known.get(row["kernel"], math.inf))
    assert measured
    for nbytes, latencies in measured.items():
        possible = {
            name: latency
            for name, latency in latencies.items()
            if not name.startswith("ll128") and not (dtype is INT and "sentinel" in name)
        }
        chosen = select(nbytes, dtype, SUM, terms).candidate.name
        assert possible[chosen] <= 1.1 * min(possible.values()), (nbytes, chosen, possible)
