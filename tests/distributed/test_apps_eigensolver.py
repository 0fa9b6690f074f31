"""The eigensolver over ranks: against scipy, over several backends, and what it refuses."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from scipy import linalg

from benchmarks.apps import eigensolver
from benchmarks.apps.communicators import open_communicators
from benchmarks.apps.eigensolver import main
from benchmarks.apps.eigensolver_fused import fused_kernel, fused_threads
from benchmarks.apps.eigensolver_layout import Layout
from benchmarks.apps.eigensolver_measure import Case, measure, problem, residuals
from benchmarks.apps.eigensolver_parts import Shape
from benchmarks.apps.eigensolver_solve import Solver, generalised_eigh, tridiagonalise
from benchmarks.apps.eigensolver_tiles import build_sums
from shmemar.errors import ArgumentError, MismatchError, ShmemarError
from tests.launcher import ROOT

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from mpi4py import MPI

    import shmemar
    from benchmarks.apps.communicators import Communicator
    from shmemar.host.arrays import Arrays


LARGEST_IN_TURN = 35


def one_shot(ll: Any, thread: int, nthreads: int, x: Any, y: Any) -> None:
    for i in range(thread, x.size, nthreads):
        ll.bcast(0, x[i])
        y[i] = ll.recv_reduce(0, x[i], lambda a, b: a + b)
        ll.advance_epoch()


@pytest.fixture(scope="module")
def comms(world: MPI.Intracomm, backend: str) -> Iterator[dict[str, Communicator]]:
    made = open_communicators(world, ["shmemar", "mpi", "self"], backend=backend)
    yield made
    for each in made.values():
        each.close()


@pytest.fixture
def in_one_suite(world: MPI.Intracomm, request: pytest.FixtureRequest) -> Callable[[int], None]:
    """Leave a test to the suite of some number of ranks, where there are several suites."""

    def require(size: int) -> None:
        if request.config.getoption("--in-turn") and world.size != size:
            pytest.skip(f"it is run on {size} ranks")

    return require


@pytest.mark.parametrize(
    ("n", "dtype", "block"),
    [
        *((n, "float64", 32) for n in (1, 2, 3, 5, 8, 31, 32, 33, 65, 100, 161, 300)),
        *((n, "complex128", 8) for n in (1, 2, 3, 8, 9, 50, 97)),
        *((n, dtype, 8) for n in (7, 29) for dtype in ("float32", "complex64")),
        *((n, "float64", 1) for n in (4, 9)),
    ],
)
def test_ranks_solve_as_scipy_does(
    comms: dict[str, Communicator],
    agree: Any,
    request: pytest.FixtureRequest,
    n: int,
    dtype: str,
    block: int,
) -> None:
    # Each of n all-reduces waits for ranks that wait for a core.
    if n > LARGEST_IN_TURN and request.config.getoption("--in-turn"):
        pytest.skip("it takes long where ranks share cores with other tests")
    comm = comms["mpi"]
    a, b = problem(n, dtype, 4)
    found = generalised_eigh(a, b, comm, block=block)
    expected = linalg.eigh(a, b, eigvals_only=True)
    eps = float(np.finfo(dtype).eps)
    tolerance = 1e-12 if eps < 1e-12 else 20 * n * eps
    assert np.abs(found.eigenvalues - expected).max() <= tolerance * np.abs(expected).max()
    layout = Layout(n, block, comm.rank, comm.size)
    assert np.array_equal(found.own_columns, layout.own)
    assert (found.allreduces, found.broadcasts) == (layout.nsums(dtype), len(layout.panels))
    on_device = comm.xp.asarray(a), comm.xp.asarray(b)
    assert max(residuals(comm, *on_device, found)) * n * eps <= tolerance
    assert found.alike
    assert len(set(agree((found.d.tobytes(), found.e.tobytes())))) == 1


@pytest.mark.parametrize(("n", "block"), [(1, 4), (7, 4), (40, 32)])
def test_backends_give_the_same_answer(
    comms: dict[str, Communicator],
    agree: Any,
    in_one_suite: Callable[[int], None],
    n: int,
    block: int,
) -> None:
    """And of two ranks the same bits, whose sums have one order."""
    in_one_suite(2)
    a, b = problem(n, "float64", 6)
    found = {}
    for name in ("shmemar", "mpi"):
        comms[name].counts.clear()
        found[name] = generalised_eigh(a, b, comms[name], block=block)
        assert found[name].alike
    assert found["shmemar"].allreduces == found["mpi"].allreduces == max(n - 2, 0)
    difference = np.abs(found["shmemar"].eigenvalues - found["mpi"].eigenvalues).max()
    assert difference <= 1e-13 * np.abs(found["mpi"].eigenvalues).max()
    if comms["mpi"].size <= 2:
        for each in ("d", "e"):
            assert np.array_equal(getattr(found["shmemar"], each), getattr(found["mpi"], each))
    assert len(set(agree(found["shmemar"].d.tobytes()))) == 1


def test_a_solver_is_used_again_and_sums_as_often(comms: dict[str, Communicator]) -> None:
    with Solver(35, "complex128", comms["mpi"], block=8) as solver:
        for seed in range(3):
            a, b = problem(35, "complex128", seed)
            found = solver.solve(a, b)
            expected = linalg.eigh(a, b, eigvals_only=True)
            assert np.abs(found.eigenvalues - expected).max() <= 1e-12 * np.abs(expected).max()
            assert (found.allreduces, found.broadcasts) == (34, 5)


def test_the_bytes_that_are_summed_are_those_below_the_diagonal(
    comms: dict[str, Communicator],
) -> None:
    comm, n, block = comms["mpi"], 20, 4
    comm.counts.clear()
    tridiagonalise(problem(n, "float64", 1)[0], comm, block=block)
    panels = Layout(n, block, 0, 1).panels
    assert comm.counts.nbytes == {
        "allreduce": 8 * sum(n - 1 - j for j in range(n - 2)),
        "broadcast": 8 * sum((n - each.start) * each.width for each in panels),
    }


@pytest.mark.parametrize("step", ["__init__", "warm_up", "capture", "load_standard"])
def test_a_step_that_fails_on_one_rank_is_an_error_on_all(
    comms: dict[str, Communicator], agree: Any, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    """And the communicator's exchanges still fit together."""
    comm = comms["mpi"]
    work = "eigensolver_host.HostWork" if comm.xp is np else "eigensolver_device.DeviceWork"

    def fail(*_: Any) -> None:
        raise MemoryError("no room")

    raised = ""
    with monkeypatch.context() as patch:
        if comm.rank == comm.size - 1:
            patch.setattr(f"benchmarks.apps.{work}.{step}", fail)
        try:
            generalised_eigh(*problem(9, "float64", 0), comm)
        except (MemoryError, ShmemarError) as error:
            raised = str(error)
    assert all("no room" in text for text in agree(raised))
    assert comm.host_allgather(comm.rank) == list(range(comm.size))
    assert generalised_eigh(*problem(9, "float64", 0), comm).allreduces == 7


class _Wrong:
    """A communicator whose sums are 1e-14 times larger on the last rank."""

    def __init__(self, comm: Communicator) -> None:
        self._comm = comm

    def __getattr__(self, name: str) -> Any:
        return getattr(self._comm, name)

    def allreduce(self, x: Any) -> None:
        self._comm.allreduce(x)
        if self._comm.rank == self._comm.size - 1:
            x *= 1 + 1e-14


def test_ranks_whose_sums_differ_are_told_and_go_on_with_those_of_one(
    comms: dict[str, Communicator], agree: Any, backend: str
) -> None:
    if comms["mpi"].size == 1 or backend != "emulated":
        pytest.skip("it needs several ranks, and sums that are called from Python")
    a, b = problem(30, "float64", 8)
    wrong: Any = _Wrong(comms["mpi"])
    found = generalised_eigh(a, b, wrong, block=8)
    assert agree(found.alike) == [False] * comms["mpi"].size
    assert len(set(agree((found.d.tobytes(), found.eigenvalues.tobytes())))) == 1
    assert max(residuals(comms["mpi"], a, b, found)) <= 100


def test_a_solve_over_sums_that_differ_by_little_is_wrong_and_says_why(
    world: Any,
    comms: dict[str, Communicator],
    backend: str,
    in_one_suite: Callable[[int], None],
) -> None:
    if world.size == 1 or backend != "emulated":
        pytest.skip("it needs several ranks, and sums that are called from Python")
    in_one_suite(2)
    wrong: Any = _Wrong(comms["mpi"])
    case = Case(200, "float64", 32, repeat=1, has_reference=False)
    (found,) = measure(world, {"mpi": wrong, "self": comms["self"]}, ["mpi"], case, seed=1)
    assert not found.alike
    assert [text.partition(" is ")[0] for text in found.trouble[:2]] == [
        "residual",
        "orthogonality",
    ]
    assert "this backend's sums are not the same on all ranks" in found.trouble[2]


def _uneven(rank: int) -> tuple[Any, Any]:
    a, b = problem(9, "float64", 0)
    if rank == 0:
        a[5, 2] += 1
    return a, b


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (_uneven, ArgumentError, "a is not symmetric"),
        (lambda _: (problem(9, "float64", 0)[0], -np.eye(9)), ArgumentError, "positive definite"),
        (
            lambda rank: problem(9 + (rank == 0), "float64", 0),
            MismatchError,
            "n differs between ranks",
        ),
        (lambda rank: (np.eye(9 + (rank == 0)), np.eye(9)), ShmemarError, ""),
    ],
)
def test_a_bad_problem_of_one_rank_is_an_error_on_all(
    comms: dict[str, Communicator],
    agree: Any,
    make: Callable[[int], tuple[Any, Any]],
    error: type[ShmemarError],
    message: str,
) -> None:
    comm = comms["mpi"]
    if comm.size == 1 and error is MismatchError:
        pytest.skip("one rank has no other one to differ from")
    comm.counts.clear()
    raised = ""
    try:
        generalised_eigh(*make(comm.rank), comm)
    except error as caught:
        raised = str(caught)
    everyone = agree(raised)
    assert all(text and message in text for text in everyone), everyone
    assert comm.counts.calls == {}


def test_what_was_measured_is_kept_when_a_later_size_does_not_end(
    world: MPI.Intracomm,
    backend: str,
    tmp_path: Path,
    agree: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path = world.bcast(tmp_path / "found.json", root=0)
    measured: list[Any] = []

    def once(*arguments: Any) -> Any:
        if measured:
            raise ArgumentError("it is over")
        measured.append(arguments)
        return measure(*arguments)

    monkeypatch.setattr(eigensolver, "measure", once)
    arguments = ["--n", "5,6", "--block", "2", "--repeat", "1", "--backend", "mpi"]
    if world.size == 1:
        arguments.append("--no-reference")
    status = main([*arguments, "--json", str(path), "--run-on", backend])
    assert agree(status) == [2] * world.size
    rows = json.loads(path.read_text(encoding="utf-8"))["rows"]
    assert [row["n"] for row in rows] == [5]


@pytest.mark.parametrize("name", ["float64", "complex64"])
def test_the_fused_kernel_adds_up_tiles_and_ranks(
    comm: shmemar.Communicator,
    arrays: Arrays,
    agree: Any,
    in_one_suite: Callable[[int], None],
    name: str,
) -> None:
    """Sums of integers, which are exact, by all threads at once and by few that take turns."""
    in_one_suite(2)
    shape, block, dtype = Shape(rows=2, parts=8, tile_rows=4, tile_columns=4), 4, np.dtype(name)
    kernel = fused_kernel(dtype, block, shape)
    assert kernel is fused_kernel(dtype, block, shape)
    n, k, j = 75, 8, 10
    nrows, nproducts = n - 1 - j, 2 * (j - k)
    buffer = comm.ll_buffer(name, threads=fused_threads(n, 2 * block, shape))
    row_sum, product_sum = build_sums(dtype, block, shape)
    for call, threads in enumerate((buffer.threads, 128, 256)):
        total: Any = 0
        for rank in reversed(range(comm.size)):
            layout = Layout(n, block, rank, comm.size)
            nown = len(layout.own)
            draw = np.random.default_rng((rank, call))
            across, along, dots = (
                draw.integers(-9, 9, count).astype(name)
                for count in (-(-nown // 4) * n, max(-(-n // 4) * nown, 1), -(-n // 2) * 2 * block)
            )
            first_tile = layout.own_before(j + 1) // 4
            where = across, along, n, nown, rank, comm.size, first_tile
            parts = [[row_sum(*where, r, p) for r in range(j + 1, n)] for p in range(8)]
            total = total + np.sum(parts, axis=0)
            if rank == comm.rank:
                given = [arrays.make(each) for each in (across, along, dots)]
                mine = nown, first_tile
                products = [
                    sum(product_sum(dots, n, j, at, p) for p in range(8)) for at in range(nproducts)
                ]
        found, out = (arrays.make(np.full(n, np.nan, name)) for _ in range(2))
        comm.launch(kernel, buffer, *given, found, out, n, k, j, *mine, threads=threads)
        assert agree(arrays.host(out)[:nrows].tolist()) == [total.tolist()] * comm.size
        assert arrays.host(found)[:nproducts].tolist() == products
        assert np.isnan(arrays.host(found)[nproducts:]).all()
        assert np.isnan(arrays.host(out)[nrows:]).all()


def test_sums_are_fused_over_shmemar_on_gpus_alone(
    comms: dict[str, Communicator], backend: str
) -> None:
    with pytest.raises(ArgumentError, match=r"fuses is True over backend mpi on .*shmemar on"):
        Solver(8, "float64", comms["mpi"], fuses=True)
    if backend == "emulated":
        with pytest.raises(ArgumentError, match="fuses is True over backend shmemar on numpy"):
            Solver(8, "float64", comms["shmemar"], fuses=True)


def test_the_command_refuses_fused_sums_of_emulated_ranks_before_it_measures(
    world: MPI.Intracomm, backend: str, agree: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    if backend != "emulated":
        pytest.skip("these ranks have GPUs")
    arguments = ["--n", "9", "--backend", "shmemar,shmemar-fused", "--run-on", backend]
    assert agree(main(arguments)) == [2] * world.size
    told, error = capfd.readouterr()
    assert not told
    assert error.count("backend shmemar-fused needs GPUs") == (world.rank == 0)


def test_a_kernel_for_parts_that_no_warp_has_is_refused() -> None:
    with pytest.raises(ArgumentError, match="parts is 64; expected a divisor of the 32 lanes"):
        fused_kernel(np.dtype("float64"), 8, Shape(rows=64, parts=64))


def test_fused_sums_are_counted_and_their_memory_is_used_again(
    comms: dict[str, Communicator], arrays: Arrays, in_one_suite: Callable[[int], None]
) -> None:
    in_one_suite(2)
    fusing, counts = comms["shmemar"].fusing, comms["shmemar"].counts
    assert fusing is not None
    assert comms["mpi"].fusing is None
    small = fusing.buffer(np.dtype("float64"), 100)
    assert fusing.buffer(np.dtype("float64"), 128) is small
    larger = fusing.buffer(np.dtype("float64"), 300)
    assert larger.threads >= 300
    assert fusing.buffer(np.dtype("float32"), 100).dtype == np.float32
    counts.clear()
    x, y = arrays.make(np.ones(5)), arrays.make(np.zeros(5))
    stream = None if comms["shmemar"].xp is np else comms["shmemar"].xp.cuda.Stream.null
    fusing.launch(one_shot, small, x, y, nbytes=40, threads=5, stream=stream)
    assert arrays.host(y).tolist() == [comms["shmemar"].size] * 5
    assert (counts.calls, counts.nbytes) == ({"allreduce": 1}, {"allreduce": 40})
    assert counts.seconds > 0


def test_fused_sums_have_the_bits_of_the_others(
    world: MPI.Intracomm, comms: dict[str, Communicator], backend: str
) -> None:
    if backend == "emulated":
        pytest.skip("sums are fused on GPUs")
    for n, name, block in ((97, "float64", 16), (130, "float32", 32), (66, "complex128", 8)):
        names = ["shmemar", "shmemar-fused"]
        plain, fused = measure(world, comms, names, Case(n, name, block, 2), 5)
        assert (plain.trouble, fused.trouble) == ((), ())
        assert fused.backend == "shmemar-fused"
        assert fused.same_bits
        assert (fused.allreduces, fused.broadcasts) == (plain.allreduces, plain.broadcasts)


def test_the_command_compares_backends_and_keeps_what_it_found(
    world: MPI.Intracomm, backend: str, tmp_path: Path, agree: Any
) -> None:
    path = world.bcast(tmp_path / "found.json", root=0)
    others = [] if world.size > 1 else ["--no-reference"]
    arguments = ["--n", "12,33", "--dtype", "float32,complex64", "--block", "8", "--repeat", "1"]
    keep = ["--check", "--json", str(path), "--plot", str(path.with_suffix(".svg"))]
    status = main([*arguments, *keep, *others, "--backend", "mpi", "--run-on", backend])
    assert agree(status) == [0] * world.size
    document = json.loads(path.read_text(encoding="utf-8"))
    assert document["is_right"] is True
    assert document["ranks"] == str(world.size)
    rows = document["rows"]
    assert [(row["n"], row["dtype"]) for row in rows] == [
        (n, dtype) for dtype in ("float32", "complex64") for n in (12, 33)
    ]
    for row in rows:
        assert row["allreduces"] == row["n"] - (1 if row["dtype"] == "complex64" else 2)
        assert row["broadcasts"] == -(-row["n"] // 8)
        assert row["alike"] is True
        assert row["compute_us"] is None or row["compute_us"] > 0
        assert (row["compute_us"] is None) == (row["share"] is None) == (backend != "emulated")
        assert 0 < row["call_s"] < row["seconds"]["total"]
        assert row["seconds"]["total"] > row["seconds"]["tridiagonalise"] > 0
        assert (row["reference_s"] is None) == (world.size == 1)
    assert path.with_suffix(".svg").read_text(encoding="utf-8").startswith("<?xml")


def test_the_command_tridiagonalises_only(
    world: MPI.Intracomm, backend: str, tmp_path: Path, agree: Any
) -> None:
    path = world.bcast(tmp_path / "found.json", root=0)
    arguments = ["--n", "1,21", "--block", "8", "--repeat", "1", "--tridiagonalise-only", "--check"]
    status = main([*arguments, "--json", str(path), "--backend", "mpi", "--run-on", backend])
    assert agree(status) == [0] * world.size
    rows = json.loads(path.read_text(encoding="utf-8"))["rows"]
    assert [row["n"] for row in rows] == [1, 21]
    for row in rows:
        assert list(row["seconds"]) == ["tridiagonalise"]
        assert row["reference_s"] is row["residual"] is row["orthogonality"] is None
        assert (row["difference"], row["trouble"]) == (0, [])


def test_a_matrix_that_is_not_similar_is_told(
    world: MPI.Intracomm, comms: dict[str, Communicator], monkeypatch: pytest.MonkeyPatch
) -> None:
    case = Case(9, "float64", 4, 1, tridiagonalises_only=True)
    (found,) = measure(world, comms, ["mpi"], case, 3)
    assert found.trouble == ()
    reduce, by = Solver.tridiagonalise, 0.0

    def off(self: Solver, c: Any, **options: Any) -> Any:
        made = reduce(self, c, **options)
        return replace(made, d=made.d + made.d.dtype.type(by))

    monkeypatch.setattr(Solver, "tridiagonalise", off)
    single = replace(case, n=60, dtype="float32")
    for planted, by, ntold in ((case, 1e-9, 2), (single, 1e-9, 0), (single, 1e-2, 2)):  # noqa: B007
        (found,) = measure(world, comms, ["mpi"], planted, 3)
        assert len(found.trouble) == ntold, found.trouble
        if ntold:
            assert "has trace" in found.trouble[0]
            assert "has Frobenius norm" in found.trouble[1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--n", "0"], "n is 0; expected a whole number of 1 or more"),
        (["--n", "12,x"], "n is 'x'; expected whole numbers"),
        (["--block", "0"], "block is 0; expected"),
        (["--backend", "mpi,mpi"], "expected each once"),
        (["--dtype", "int32"], "dtype is int32; expected one of float32"),
        (["--repeat", "0"], "repeat is 0; expected 1 or more"),
        (["--backend", "ring"], "backends have 'ring'; expected some of shmemar"),
        (["--plot", "plot.txt"], "ends in .svg or .png"),
        (["--plot", "/dev/null/plot.svg"], "/dev/null/plot.svg can't be written"),
        (["--json", "/dev/null/x/found.json"], "/dev/null/x/found.json can't be written"),
        (["--json", "."], "is a folder; expected a file's name"),
        (["--n", "3000000", "--backend", "mpi"], "GiB of memory are needed"),
    ],
)
def test_wrong_arguments_of_the_command_are_one_line(
    world: MPI.Intracomm,
    backend: str,
    agree: Any,
    capfd: pytest.CaptureFixture[str],
    arguments: list[str],
    message: str,
) -> None:
    assert agree(main([*arguments, "--run-on", backend])) == [2] * world.size
    told = capfd.readouterr().err
    expected = int(world.rank == 0)
    assert told.count(message) == expected, told
    assert "Traceback" not in told


def test_self_alone_is_refused_with_several_ranks(
    world: MPI.Intracomm, agree: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    if world.size == 1:
        pytest.skip("one rank may be alone")
    assert agree(main(["--backend", "self"])) == [2] * world.size
    told = capfd.readouterr().err
    assert ("backend is self with" in told) == (world.rank == 0)


def test_the_program_of_the_documentation_runs(
    world: MPI.Intracomm,
    backend: str,
    monkeypatch: pytest.MonkeyPatch,
    in_one_suite: Callable[[int], None],
) -> None:
    in_one_suite(2)
    text = (ROOT / "docs" / "eigensolver.md").read_text(encoding="utf-8")
    program, *_ = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    told: list[str] = []
    monkeypatch.setenv("SHMEMAR_BACKEND", backend)
    exec(program, {"print": told.append})  # noqa: S102 - our own text
    found = [re.fullmatch(r"(\w+): (\d+) all-reduces, (\de[+-]\d\d) off", line) for line in told]
    assert [each and each[1] for each in found] == ["shmemar", "mpi"][: 2 * (world.rank == 0)]
    assert all(each and int(each[2]) >= 10 and float(each[3]) < 1e-9 for each in found), told
