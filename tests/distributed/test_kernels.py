"""Every kernel with every protocol, as the variables pin them."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from mpi4py import MPI

import shmemar
from shmemar.device.packet import SENTINEL, TWIN
from shmemar.dtypes import DTYPES, ReduceOp, supported_ops
from shmemar.errors import ArgumentError
from shmemar.host.exact import numpy_dtype
from shmemar.host.scratch import layout_for
from shmemar.layout import BLOCK_THREADS, LINE_LANES, LLLayout, StagingLayout
from shmemar.spec import Kernel, KernelSpec, Protocol, why_impossible
from tests.distributed.checked import Checked, random_floats

if TYPE_CHECKING:
    from collections.abc import Callable

    from shmemar.host.arrays import Arrays

    Pinned = Callable[..., shmemar.Communicator]

FLOAT, SUM = DTYPES["float32"], ReduceOp.SUM


def is_run(kernel: Kernel, protocol: Protocol, nranks: int) -> bool:
    """Each takes a few compilations: one rank and three leave out some of those with barriers."""
    if not kernel.has_barriers or nranks not in (1, 3):
        return True
    return protocol is kernel.default_protocol and (nranks == 1 or kernel.is_two_shot)


VARIANTS = [
    (kernel, protocol)
    for kernel in Kernel
    if kernel.reduces and kernel.has_code
    for protocol in kernel.protocols
    if is_run(kernel, protocol, MPI.COMM_WORLD.size)
]
COUNTS = 1, 2, 3, 5, 8, 13, 31, 64, 100, 255, 256, 257, 1000

variants = pytest.mark.parametrize(
    ("kernel", "protocol"), VARIANTS, ids=[f"{k.value}-{p.value}" for k, p in VARIANTS]
)


def combinations(nranks: int, *, every: bool) -> list[tuple[Kernel, Protocol, str, ReduceOp]]:
    """An eighth of the types and operators, with a kernel and protocol each, in turn with `nranks`.

    None on one rank, which has no peers. With `every` all of them, each with every kernel and
    protocol: each takes a compilation.
    """
    found = []
    pairs = [(dtype, op) for dtype in DTYPES.values() for op in supported_ops(dtype)]
    for number, (dtype, op) in enumerate(pairs):
        possible = [v for v in VARIANTS if not why_impossible(*v, dtype, op, nranks)]
        if not every:
            if nranks == 1 or (number + nranks) % 8:
                continue
            possible = [possible[(number // 8 + nranks) % len(possible)]]
        found += [(*variant, dtype.name, op) for variant in possible]
    return found


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "combination" in metafunc.fixturenames:
        every = metafunc.config.getoption("--every-kernel")
        chosen = combinations(MPI.COMM_WORLD.size, every=every)
        names = [f"{k.value}-{p.value}-{name}-{op.value}" for k, p, name, op in chosen]
        metafunc.parametrize("combination", chosen, ids=names)


@variants
def test_every_count_up_to_300_is_exact(
    pinned: Pinned, arrays: Arrays, agree: Any, kernel: Kernel, protocol: Protocol
) -> None:
    comm = pinned(kernel, protocol)
    reduce = Checked(comm, arrays)
    for count in range(301):
        # Ranks differ in alignment, and in whether they reduce in place.
        reduce(
            "float32",
            SUM,
            count,
            offset=(count + comm.rank) % 4,
            in_place=(count // 2 + comm.rank) % 3 == 0,
        )
    assert agree((reduce.call, reduce.wrong)) == [(301, [])] * comm.size


@variants
def test_counts_beside_powers_of_two_are_exact(
    pinned: Pinned, arrays: Arrays, agree: Any, kernel: Kernel, protocol: Protocol
) -> None:
    comm = pinned(kernel, protocol)
    reduce = Checked(comm, arrays)
    for exponent in range(9, 16):
        for count in (2**exponent - 1, 2**exponent, 2**exponent + 1):
            reduce("float32", SUM, count)
            reduce("float32", SUM, count, offset=1 + comm.rank % 3, in_place=True)
    assert agree(reduce.wrong) == [[]] * comm.size


def test_every_type_and_operator_is_exact(
    pinned: Pinned, arrays: Arrays, agree: Any, combination: tuple[Kernel, Protocol, str, ReduceOp]
) -> None:
    kernel, protocol, name, op = combination
    comm = pinned(kernel, protocol)
    reduce = Checked(comm, arrays)
    for number, count in enumerate(COUNTS):
        offset = (number + comm.rank) % 5
        reduce(name, op, count, offset=offset, in_place=(number // 2 + comm.rank) % 3 == 0)
    assert agree((reduce.call, reduce.wrong)) == [(len(COUNTS), [])] * comm.size


@variants
def test_either_side_of_a_pass_boundary_is_exact(
    pinned: Pinned, arrays: Arrays, agree: Any, kernel: Kernel, protocol: Protocol
) -> None:
    comm = pinned(kernel, protocol, one_block=True)
    spec = KernelSpec(kernel, protocol, FLOAT, SUM, comm.size)
    owners = comm.size if kernel.is_two_shot else 1
    # A launch has as many threads as the scratch has slots, in whole blocks.
    layout = layout_for(spec, comm._config)
    assert not isinstance(layout, StagingLayout)
    nslots = layout.nslots
    if kernel is Kernel.LL128_ATOMIC:
        nslots -= LINE_LANES  # of the extra line, which is no data
    per_pass = nslots * spec.payload_nbytes // FLOAT.itemsize * owners
    reduce = Checked(comm, arrays)
    for npasses in (1, 2, 3, 7):
        for count in (npasses * per_pass - 1, npasses * per_pass, npasses * per_pass + 1):
            reduce("float32", SUM, count)
            reduce("float32", SUM, count, offset=1, in_place=True)
    assert agree(reduce.wrong) == [[]] * comm.size


@pytest.mark.parametrize(
    ("kernel", "protocol"), [(Kernel.BARRIER_TWO_SHOT, Protocol.PUSH)], ids=["barrier_two_shot"]
)
def test_threads_stage_several_packets_in_a_pass(
    world: Any,
    backend: str,
    arrays: Arrays,
    agree: Any,
    monkeypatch: pytest.MonkeyPatch,
    kernel: Kernel,
    protocol: Protocol,
) -> None:
    monkeypatch.setattr("shmemar.layout.MAX_BARRIER_BLOCKS", 2)
    monkeypatch.setenv("SHMEMAR_KERNEL", kernel.value)
    monkeypatch.setenv("SHMEMAR_PROTOCOL", protocol.value)
    spec = KernelSpec(kernel, protocol, FLOAT, SUM, world.size)
    for variable in ("SHMEMAR_SCRATCH_NBYTES", "SHMEMAR_TWO_SHOT_SCRATCH_NBYTES"):
        monkeypatch.setenv(variable, str(spec.nplaces * 7 * BLOCK_THREADS * 16))
    with shmemar.init(world, backend=backend) as comm:
        layout: Any = layout_for(spec, comm._config)
        reduce = Checked(comm, arrays)
        per_block = BLOCK_THREADS * 4 * (comm.size if kernel.is_two_shot else 1)
        for nblocks in (1, 2, 3, 5, 6, 7, 13):
            for count in (nblocks * per_block - 1, nblocks * per_block, nblocks * per_block + 5):
                reduce("float32", SUM, count, offset=count % 3, in_place=count % 2 == 0)
        # Two blocks of three packets a thread.
        shape = layout.nblocks, layout.block_slots
        assert agree((shape, reduce.wrong)) == [((2, 3 * BLOCK_THREADS), [])] * comm.size


def test_kernels_and_sizes_at_random_one_rank_late(
    pinned: Pinned, arrays: Arrays, agree: Any, request: Any
) -> None:
    draw = np.random.default_rng(7)  # the same on every rank
    reduces = [
        Checked(pinned(*variant, one_block=one_block), arrays)
        for variant in VARIANTS
        for one_block in (False, True)
    ]
    ncalls = request.config.getoption("--random-calls")
    size, rank = reduces[0].comm.size, reduces[0].comm.rank
    for call in range(ncalls):
        reduce = reduces[draw.integers(len(reduces))]
        late, count = draw.integers(size), int(2 ** draw.uniform(0, 12))
        if call % 20 == 0 and rank == late:
            time.sleep(0.002)
        reduce("float32", SUM, count, offset=int(draw.integers(4)), in_place=count % 2 == 0)
    done = sum(reduce.call for reduce in reduces)
    wrong = [reduce.wrong for reduce in reduces]
    assert agree((done, wrong)) == [(ncalls, [[]] * len(reduces))] * size


@pytest.mark.parametrize(
    ("kernel", "protocol"),
    [variant for variant in VARIANTS if variant[0].is_deterministic],
    ids=[f"{k.value}-{p.value}" for k, p in VARIANTS if k.is_deterministic],
)
@pytest.mark.parametrize("name", ["float32"])
def test_all_kernels_give_the_same_bits_whatever_the_size(
    pinned: Pinned, arrays: Arrays, agree: Any, kernel: Kernel, protocol: Protocol, name: str
) -> None:
    comm = pinned(kernel, protocol)
    expected = random_floats(name, 3000, 0)
    for rank in range(1, comm.size):
        expected = expected + random_floats(name, 3000, rank)
    x = random_floats(name, 3000, comm.rank)
    same = [
        arrays.reduce(comm, x[:count].copy()).tobytes() == expected[:count].tobytes()
        for count in (1, 3, 300, 2999, 3000)
        for _ in range(20)
    ]
    assert agree(all(same)) == [True] * comm.size


def set_epochs(comm: shmemar.Communicator, backend: str, epoch: int) -> None:
    """Let every thread's last epoch have been `epoch`. Nothing runs meanwhile."""
    comm.host_barrier()
    for scratch in comm._kernels.scratches.values():
        if backend == "emulated":
            epochs: Any = scratch.epochs
            epochs.view(0).view(np.uint32)[...] = epoch
        else:
            import cupy

            address, nbytes = scratch.epochs.addresses[0], scratch.layout.epochs_nbytes
            memory = cupy.cuda.UnownedMemory(address, nbytes, scratch.epochs)
            pointer = cupy.cuda.MemoryPointer(memory, 0)
            cupy.ndarray(nbytes // 4, np.uint32, pointer).fill(epoch)
            cupy.cuda.Device().synchronize()
    comm.host_barrier()


@variants
@pytest.mark.parametrize("epoch", [2**31 - 5, 2**32 - 6])
def test_epochs_pass_the_wrap(
    pinned: Pinned,
    arrays: Arrays,
    agree: Any,
    backend: str,
    kernel: Kernel,
    protocol: Protocol,
    epoch: int,
) -> None:
    comm = pinned(kernel, protocol)
    reduce = Checked(comm, arrays)
    reduce("float32", SUM, 1)
    set_epochs(comm, backend, epoch)
    draw = np.random.default_rng(epoch)  # the same on every rank
    for call in range(30):
        if call % 10 == 5 and comm.rank == draw.integers(comm.size):
            time.sleep(0.002)
        reduce("float32", SUM, int(2 ** draw.uniform(0, 11)))
    assert agree(reduce.wrong) == [[]] * comm.size


HALVES = [
    ("float16", Kernel.ONE_SHOT, Protocol.LL, 10, -14),
    ("bfloat16", Kernel.TWO_SHOT, Protocol.SENTINEL, 7, -126),
]
"""16-bit types, a kernel each, bits of the fraction, exponent of the smallest normal number."""

halves = pytest.mark.parametrize(
    ("name", "kernel", "protocol", "fraction", "smallest"), HALVES, ids=["float16", "bfloat16"]
)


@halves
def test_sums_of_16_bits_are_rounded_once(
    pinned: Pinned,
    arrays: Arrays,
    agree: Any,
    name: str,
    kernel: Kernel,
    protocol: Protocol,
    fraction: int,
    smallest: int,
) -> None:
    """Of values that cancel and that differ by many orders, against a sum in float64."""
    comm = pinned(kernel, protocol)
    draw = np.random.default_rng(comm.rank)
    scale = 2.0 ** draw.integers(-12, 6, 20_000)
    x = (draw.normal(size=20_000) * scale).astype(numpy_dtype(DTYPES[name]))
    got = arrays.reduce(comm, x).astype(np.float64)
    everyone = np.array([theirs.astype(np.float64) for theirs in agree(x)])
    expected = everyone.sum(axis=0)
    exponents = np.maximum(np.floor(np.log2(np.abs(expected) + 1e-300)), smallest)
    half_a_unit = 2.0 ** (exponents - fraction - 1)
    in_float32 = (comm.size - 1) * 2.0**-24 * np.abs(everyone).sum(axis=0)
    worst = np.max(np.abs(got - expected) - (half_a_unit + in_float32))
    assert agree(bool(worst <= 0)) == [True] * comm.size, worst


@halves
def test_all_patterns_of_16_bits_come_through(
    pinned: Pinned,
    arrays: Arrays,
    agree: Any,
    name: str,
    kernel: Kernel,
    protocol: Protocol,
    fraction: int,
    smallest: int,
) -> None:
    """On one rank beside -0.0, which changes nothing, and on all; twice in a row."""
    comm = pinned(kernel, protocol)
    dtype = numpy_dtype(DTYPES[name])
    patterns = np.arange(1 << 16, dtype=np.uint16).view(dtype)
    nothing = np.full(1 << 16, -0.0, dtype)
    with np.errstate(over="ignore", invalid="ignore"):
        total = np.float32(comm.size) * patterns.astype(np.float32)
        expected = {False: patterns, True: total.astype(dtype)}
    verdicts = []
    for on_all in (False, True, False, True):
        x = patterns if on_all or comm.rank == comm.size - 1 else nothing
        got, right = arrays.reduce(comm, x), expected[on_all]
        same = got.view(np.uint16) == right.view(np.uint16)
        with np.errstate(invalid="ignore"):
            nans = np.isnan(got) & np.isnan(right)
        verdicts.append(int(np.count_nonzero(~same & ~nans)))
    assert agree(verdicts) == [[0] * 4] * comm.size


PATTERNS = {
    "float32": np.array([SENTINEL, TWIN], np.uint32).view(np.float32),
    "float64": np.array([SENTINEL << 32 | SENTINEL, SENTINEL << 32 | TWIN], np.uint64).view("f8"),
    # A double of which one half alone looks like the sentinel is a number like any other.
    "halves": np.array([SENTINEL, 0x3FF00000 << 32 | SENTINEL], np.uint64).view("f8"),
}


@pytest.mark.parametrize("patterns", PATTERNS)
@pytest.mark.parametrize(
    ("kernel", "protocol", "op"),
    [
        (Kernel.ONE_SHOT, Protocol.LL, "sum"),
        (Kernel.ONE_SHOT, Protocol.SENTINEL, "sum"),
        (Kernel.TWO_SHOT, Protocol.SENTINEL, "max"),
    ],
    ids=["one_shot-ll", "one_shot-sentinel", "two_shot-sentinel"],
)
def test_what_looks_like_the_sentinel_hangs_nothing(
    pinned: Pinned,
    arrays: Arrays,
    agree: Any,
    kernel: Kernel,
    protocol: Protocol,
    patterns: str,
    op: str,
) -> None:
    comm = pinned(kernel, protocol)
    special = PATTERNS[patterns]
    verdicts = []
    for position in (0, 1, 2, 3, 7, slice(None)):
        for on_all in (False, True):
            x = np.ones(8, special.dtype)
            if on_all or comm.rank == comm.size - 1:
                x[position] = special[comm.rank % 2]
            got = arrays.reduce(comm, x, op=op)
            everyone = np.array(agree(x))
            expected = everyone.sum(axis=0) if op == "sum" else everyone.max(axis=0)
            with np.errstate(invalid="ignore"):
                right = np.array_equal(got, expected, equal_nan=True)
            clean = (arrays.reduce(comm, np.ones(8, special.dtype)) == comm.size).all()
            verdicts.append((right, bool(clean), got.tobytes()))
    everyone_verdicts = agree(verdicts)
    assert [entry[:2] for entry in verdicts] == [(True, True)] * 12
    assert everyone_verdicts == [verdicts] * comm.size


@pytest.mark.parametrize(
    ("kernel", "protocol", "name", "op"),
    [
        (Kernel.ONE_SHOT, Protocol.LL, "float64", "sum"),
        (Kernel.BARRIER_ONE_SHOT, Protocol.PULL, "float64", "sum"),
        (Kernel.ONE_SHOT, Protocol.LL, "complex128", "prod"),
    ],
)
def test_ranks_get_the_same_of_many_nans(
    pinned: Pinned,
    arrays: Arrays,
    agree: Any,
    kernel: Kernel,
    protocol: Protocol,
    name: str,
    op: str,
) -> None:
    """Of two NaNs a float64 addition gives one by their places."""
    comm = pinned(kernel, protocol)
    own = np.uint64(0x7FF8 << 48 | (comm.rank + 1) << 32 | 5).view("f8")
    at = [0, 3, 4, 5]  # real and imaginary parts of complex numbers, and both
    verdicts = []
    for ranks in range(1, 1 << comm.size):
        x = np.ones(6)
        if ranks >> comm.rank & 1:
            x[at] = own
        got = arrays.reduce(comm, x.view(name), op=op).view("f8")
        verdicts.append((bool(np.isnan(got[at]).all()), got.tobytes()))
    assert all(is_nan for is_nan, _ in verdicts)
    assert agree(verdicts) == [verdicts] * comm.size


def test_a_result_that_is_the_sentinel_is_sent_as_its_twin(
    pinned: Pinned, arrays: Arrays, agree: Any
) -> None:
    """No input looks like an empty slot, but the minimum of two halves of one does."""
    comm = pinned(Kernel.TWO_SHOT, Protocol.SENTINEL)
    half = 0x0000FFFA if comm.rank == 0 else 0xFFFA0000
    x = np.full(64, half, np.uint32).view(np.float16)
    got = arrays.reduce(comm, x, op="min")
    nans = 1 if comm.size == 1 else 2
    assert agree(np.isnan(got).reshape(-1, 2).sum(axis=1).tolist()) == [[nans] * 64] * comm.size
    assert len(set(agree(got.tobytes()))) == 1


def test_integers_have_no_sentinel(pinned: Pinned, arrays: Arrays, agree: Any) -> None:
    comm = pinned(Kernel.ONE_SHOT, Protocol.SENTINEL)
    x = arrays.make(np.ones(4, np.int32))
    with pytest.raises(ArgumentError, match=r"protocol is sentinel, and dtype int32.*to ll"):
        comm.allreduce(x)
    assert agree(arrays.reduce(comm, np.ones(4))[0]) == [comm.size] * comm.size


def test_the_scratch_of_two_shot_kernels_is_made_when_it_is_needed(
    pinned: Pinned, agree: Any
) -> None:
    comm = pinned(Kernel.TWO_SHOT, Protocol.LL)
    layout = next(iter(comm._kernels.scratches.values())).layout
    expected = LLLayout.fit(comm.size, comm._config.two_shot_scratch_nbytes)
    assert (
        agree((layout, list(comm._kernels.scratches)))
        == [(expected, [(Kernel.TWO_SHOT, Protocol.LL, False)])] * comm.size
    )
