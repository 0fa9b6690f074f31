"""The eigensolver on one rank, its kernels under numba's simulator, and what surrounds them."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import linalg

from benchmarks.apps import eigensolver_plot
from benchmarks.apps.communicators import alone
from benchmarks.apps.eigensolver import main, summarise
from benchmarks.apps.eigensolver_agreement import same_pairs
from benchmarks.apps.eigensolver_host import reflector
from benchmarks.apps.eigensolver_layout import DTYPES, Layout, needed
from benchmarks.apps.eigensolver_measure import Case, measure, problem, residuals
from benchmarks.apps.eigensolver_plot import draw
from benchmarks.apps.eigensolver_solve import Solver, generalised_eigh, tridiagonalise
from shmemar.errors import ArgumentError, ArgumentTypeError
from tests.launcher import ROOT

SIZES = [1, 2, 3, 4, 5, 31, 32, 33, 65]


def _relative(found: Any, expected: Any) -> float:
    return float(np.abs(found - expected).max() / np.abs(expected).max())


@given(n=st.integers(1, 60), block=st.integers(1, 9), size=st.integers(1, 5))
def test_every_column_has_one_owner_and_its_local_number(n: int, block: int, size: int) -> None:
    layouts = [Layout(n, block, rank, size) for rank in range(size)]
    assert sorted(column for each in layouts for column in each.own) == list(range(n))
    for each in layouts:
        for local, column in enumerate(each.own):
            assert each.own_before(int(column)) == local
        assert each.own_before(n) == len(each.own)
    for panel in layouts[0].panels:
        columns = range(panel.start, panel.stop)
        assert set(columns) <= set(layouts[panel.owner].own.tolist())


@pytest.mark.parametrize(("dtype", "nsums"), [("float32", [0, 0, 1]), ("complex128", [0, 1, 2])])
def test_one_sum_for_each_column_that_is_reflected(dtype: str, nsums: list[int]) -> None:
    assert [Layout(n, 4, 0, 1).nsums(dtype) for n in (1, 2, 3)] == nsums


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scale", [1.0, 1e-6, 0.0])
def test_a_reflector_leaves_a_real_first_element(dtype: str, scale: float) -> None:
    generator = np.random.default_rng(3)
    x = generator.standard_normal(6) + 1j * generator.standard_normal(6)
    x = (x if np.dtype(dtype).kind == "c" else x.real).astype(dtype)
    x[1:] *= np.dtype(dtype).type(scale)
    beta, tau, factor = reflector(x[0], np.vdot(x[1:], x[1:]).real)
    v = np.concatenate([[1], factor * x[1:]])
    reflected = x - np.conj(tau) * v * np.vdot(v, x)
    eps = np.finfo(dtype).eps
    assert np.abs(reflected[1:]).max() <= 8 * eps * np.linalg.norm(x)
    assert abs(reflected[0] - beta) <= 8 * eps * np.linalg.norm(x)
    assert np.isreal(beta)


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("dtype", ["float64", "complex128"])
def test_one_rank_solves_as_scipy_does(n: int, dtype: str) -> None:
    a, b = problem(n, dtype, 5)
    comm = alone()
    found = generalised_eigh(a, b, comm, block=32)
    assert _relative(found.eigenvalues, linalg.eigh(a, b, eigvals_only=True)) <= 1e-12
    x, eps = found.own_vectors, np.finfo(dtype).eps
    assert np.array_equal(found.own_columns, np.arange(n))
    residual = np.abs(a @ x - b @ x * found.eigenvalues).max() / np.abs(a).max()
    assert residual <= 1e-12
    assert np.abs(x.conj().T @ b @ x - np.eye(n)).max() <= 1e-12
    assert max(residuals(comm, a, b, found)) <= 10
    t = linalg.eigh_tridiagonal(found.d, found.e, eigvals_only=True)
    assert _relative(found.eigenvalues, t) <= 10 * n * eps
    assert found.allreduces == Layout(n, 32, 0, 1).nsums(dtype)
    assert found.broadcasts == -(-n // 32)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("block", [1, 4, 32])
def test_the_reflectors_make_the_matrix_tridiagonal(dtype: str, block: int) -> None:
    n = 19
    c, _ = problem(n, dtype, 7)
    found = tridiagonalise(c, alone(), block=block)
    q = np.eye(n, dtype=dtype)
    for j in range(n):
        v = found.reflectors[:, j]
        q = q - found.tau[j] * np.outer(q @ v, v.conj())
    t = np.diag(found.d) + np.diag(found.e, 1) + np.diag(found.e, -1)
    eps = np.finfo(dtype).eps
    assert np.abs(q.conj().T @ q - np.eye(n)).max() <= 20 * eps
    assert np.abs(q.conj().T @ c @ q - t).max() <= 20 * n * eps
    assert found.d.dtype == found.e.dtype == np.finfo(dtype).dtype


@pytest.mark.parametrize(
    ("dtype", "of_a", "of_b"),
    [
        ("float64", 1e200, 1.0),
        ("float64", 1e-200, 1e-120),
        ("complex128", 1e160, 1e100),
        ("float32", 1e25, 1e-8),
    ],
)
def test_squares_of_large_and_small_elements_do_no_harm(
    dtype: str, of_a: float, of_b: float
) -> None:
    a, b = problem(20, dtype, 2)
    plain = generalised_eigh(a, b, alone())
    scaled = generalised_eigh(a * a.dtype.type(of_a), b * b.dtype.type(of_b), alone())
    tolerance = 100 * np.finfo(dtype).eps
    assert _relative(scaled.eigenvalues / (of_a / of_b), plain.eigenvalues) <= tolerance
    vectors = np.abs(scaled.own_vectors) * np.sqrt(of_b)
    assert _relative(vectors, np.abs(plain.own_vectors)) <= 1e3 * tolerance


@pytest.mark.parametrize("matrix", ["zero", "identity", "diagonal"])
def test_matrices_without_anything_to_reflect_are_solved(matrix: str) -> None:
    n = 12
    a = {
        "zero": np.zeros((n, n)),
        "identity": np.eye(n),
        "diagonal": np.diag(np.arange(n, 0, -1.0)),
    }[matrix]
    found = generalised_eigh(a, np.eye(n), alone(), block=5)
    assert np.array_equal(found.eigenvalues, np.sort(np.diag(a)))
    assert np.abs(found.own_vectors.T @ found.own_vectors - np.eye(n)).max() <= 1e-14


def test_a_solver_is_used_again() -> None:
    with Solver(40, "complex128", alone(), block=8) as solver:
        for seed in range(3):
            a, b = problem(40, "complex128", seed)
            found = solver.solve(a, b)
            assert _relative(found.eigenvalues, linalg.eigh(a, b, eigvals_only=True)) <= 1e-12
            assert found.allreduces == 39


def test_a_long_solve_tells_where_it_is() -> None:
    told: list[str] = []
    with Solver(10, "float64", alone(), block=4) as solver:
        solver.solve(*problem(10, "float64", 0), progress=told.append)
    assert told == [f"tridiagonalise: column {column} of 10" for column in (4, 8, 10)]


_A, _B = problem(6, "float64", 0)
_UNEVEN, _ODD = _A.copy(), _A.copy()
_UNEVEN[4, 1] += 1e-3
_ODD[2, 2] = np.nan


@pytest.mark.parametrize(
    ("a", "b", "error", "message"),
    [
        (_A, -_B, ArgumentError, "b is not positive definite"),
        (_A, np.zeros((6, 6)), ArgumentError, "b is not positive definite"),
        (_UNEVEN, _B, ArgumentError, "a is not symmetric: an element and its mirror .* 0.001"),
        (_A, _UNEVEN, ArgumentError, "b is not symmetric"),
        (_A * 1j, _B + 0j, ArgumentError, "a is not Hermitian"),
        (_ODD, _B, ArgumentError, "a has elements that are not finite"),
        (_A, _B[:5, :5], ArgumentError, r"b is float64 \(5, 5\); expected float64 \(6, 6\)"),
        (_A, _B.astype("f4"), ArgumentError, r"b is float32 \(6, 6\); expected float64"),
        (_A[:, :5], _B, ArgumentError, r"of shape \(6, 5\); expected n rows and columns"),
        (np.zeros((0, 0)), _B, ArgumentError, "n is 0; expected a whole number of 1 or more"),
        (_A.astype(int), _B, ArgumentError, "dtype is int64; expected one of float32"),
        (_A.astype("f2"), _B, ArgumentError, "dtype is float16"),
        ([[1.0]], _B, ArgumentError, "a matrix is list"),
        (_A, "b", ArgumentTypeError, "b is str; expected an array of numpy"),
    ],
)
def test_a_problem_that_cannot_be_solved_is_refused_before_any_sum(
    a: Any, b: Any, error: type[Exception], message: str
) -> None:
    comm = alone()
    with pytest.raises(error, match=message):
        generalised_eigh(a, b, comm)
    assert comm.counts.calls == {}


@pytest.mark.parametrize("block", [0, -1, 129, 1.5, True])
def test_a_block_that_cannot_be_is_refused(block: Any) -> None:
    with pytest.raises(ArgumentError, match=f"block is {block}; expected"):
        generalised_eigh(_A, _B, alone(), block=block)


def test_a_problem_without_room_is_refused_before_it_is_allocated() -> None:
    n = 3_000_000
    gib = sum(vars(needed(Layout(n, 64, 0, 1), "float64")).values()) / 2**30
    with pytest.raises(ArgumentError, match=rf"{gib:.2f} GiB of memory are needed"):
        Solver(n, "float64", alone())


@pytest.mark.parametrize("dtype", DTYPES)
def test_problems_are_positive_definite_at_any_size(dtype: str) -> None:
    for n in range(1, 30):
        a, b = problem(n, dtype, 1)
        assert linalg.eigh(b, eigvals_only=True)[0] > 0.1
        assert np.array_equal(a, a.conj().T)
    assert not np.array_equal(problem(4, dtype, 1)[0], problem(4, dtype, 2)[0])


class _World:
    """An mpi4py communicator of one process, as `measure` uses it."""

    rank = 0

    def allgather(self, item: Any) -> list[Any]:
        return [item]

    def bcast(self, item: Any, root: int) -> Any:
        return item

    def Ibarrier(self) -> Any:  # noqa: N802 - mpi4py's name
        return SimpleNamespace(Test=lambda: True)


def test_a_measurement_says_all_that_the_table_has() -> None:
    (result,) = measure(
        _World(), {"self": alone()}, ["self"], Case(20, "float64", 8, repeat=2), seed=1
    )
    assert result.trouble == ()
    assert (result.backend, result.allreduces, result.broadcasts) == ("self", 18, 3)
    assert (result.alike, result.same_bits, result.difference) == (True, True, 0)
    assert 0 < result.seconds["tridiagonalise"] < result.seconds["total"]
    assert result.column_us == pytest.approx(result.seconds["tridiagonalise"] / 20 * 1e6)
    assert None not in (result.residual, result.orthogonality, result.reference_difference)
    assert result.compute_us
    assert result.as_dict()["share"] == pytest.approx(1 - result.compute_us / result.column_us)
    assert result.call_s == 0


class _Eager:
    """A communicator whose calls can be captured or not other than they are."""

    def __init__(self, *, capturable: bool) -> None:
        self._comm, self.capturable = alone(), capturable

    def __getattr__(self, name: str) -> Any:
        return getattr(self._comm, name)


def test_no_share_is_given_where_only_one_of_two_was_captured() -> None:
    comms: Any = {"self": _Eager(capturable=True), "mpi": _Eager(capturable=False)}
    results = measure(_World(), comms, ["self", "mpi"], Case(20, "float64", 8, repeat=1), seed=1)
    assert [each.as_dict()["share"] is None for each in results] == [False, True]
    assert [each.compute_us is None for each in results] == [False, True]
    cells = [summarise(each)["  share of communication"] for each in results]
    assert cells == [results[0].share, None]


def test_the_reference_is_run_once_before_it_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    eigh, calls = linalg.eigh, []

    def count(*arguments: Any, **options: Any) -> Any:
        calls.append(len(arguments[0]))
        time.sleep(0.5 if len(calls) == 1 else 0)
        return eigh(*arguments, **options)

    monkeypatch.setattr("benchmarks.apps.eigensolver_measure.linalg.eigh", count)
    case = Case(12, "float64", 8, repeat=3, checks=False)
    (result,) = measure(_World(), {"self": alone()}, ["self"], case, seed=1)
    assert calls == [12] * 4
    assert result.reference_s
    assert result.reference_s < 0.5


def test_another_number_of_sums_in_any_solve_is_trouble(monkeypatch: pytest.MonkeyPatch) -> None:
    plain, calls = Solver.solve, []

    def solve(self: Any, *arguments: Any, **options: Any) -> Any:
        calls.append(plain(self, *arguments, **options))
        return replace(calls[-1], allreduces=calls[-1].allreduces + (len(calls) == 2))

    monkeypatch.setattr(Solver, "solve", solve)
    case = Case(20, "float64", 8, repeat=2, has_reference=False)
    (result,) = measure(_World(), {"self": alone()}, ["self"], case, seed=1)
    assert result.trouble == ("19 all-reduces and 3 broadcasts in solve 1; expected 18 and 3",)


def test_ranks_go_on_with_the_first_ones_pairs_where_lapack_differs() -> None:
    class Two:
        rank, others = 1, [(np.zeros(3), np.eye(3))]

        def host_allgather(self, item: Any) -> list[Any]:
            return [b"another digest" if isinstance(item, bytes) else self.others[0], item]

    two: Any = Two()
    values, vectors = same_pairs(two, np.ones(3), np.ones((3, 3)))
    assert np.array_equal(values, np.zeros(3))
    assert np.array_equal(vectors, np.eye(3))
    two.host_allgather = lambda item: [item, item]
    values, _ = same_pairs(two, np.ones(3), np.ones((3, 3)))
    assert np.array_equal(values, np.ones(3))


def test_a_wrong_answer_is_trouble(monkeypatch: pytest.MonkeyPatch) -> None:
    def off(self: Any, vectors: Any) -> Any:
        return vectors * (1 + 1e-9)

    monkeypatch.setattr("benchmarks.apps.eigensolver_host.HostWork.back", off)
    (result,) = measure(
        _World(), {"self": alone()}, ["self"], Case(20, "float64", 8, repeat=1), seed=1
    )
    assert [text.partition(" ")[0] for text in result.trouble] == ["residual", "orthogonality"]


def _measured(monkeypatch: pytest.MonkeyPatch, case: Case, **changes: Any) -> Any:
    """Results whose vectors are `scale` times too long, with other fields as `changes` say."""
    plain, scale = Solver.solve, changes.pop("scale", 1.0)

    def solve(self: Any, *arguments: Any, **options: Any) -> Any:
        found = plain(self, *arguments, **options)
        return replace(found, own_vectors=found.own_vectors * scale, **changes)

    monkeypatch.setattr(Solver, "solve", solve)
    (result,) = measure(_World(), {"self": alone()}, ["self"], case, seed=1)
    return result


def test_sums_that_ranks_have_not_alike_are_named_where_a_result_is_wrong(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    case = Case(20, "float64", 8, repeat=1, has_reference=False)
    result = _measured(monkeypatch, case, alike=False, scale=2.0)
    assert result.trouble[0].startswith("orthogonality is ")
    assert result.trouble[1].startswith("the ranks found other bits: this backend's sums are not")


@pytest.mark.parametrize("changes", [{}, {"allreduces": 3}])
def test_they_are_not_blamed_where_it_is_right(
    monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any]
) -> None:
    case = Case(20, "float64", 8, repeat=1, has_reference=False)
    result = _measured(monkeypatch, case, alike=False, **changes)
    assert len(result.trouble) == 2 * len(changes)
    assert not any("other bits" in text for text in result.trouble)


def _row(n: int, backend: str, column_us: float) -> dict[str, Any]:
    return {
        "n": n,
        "dtype": "float64",
        "block": 64,
        "ranks": 2,
        "backend": backend,
        "column_us": column_us,
        "compute_us": 10.0,
        "share": 1 - 10 / column_us,
    }


def test_a_plot_has_bars_whose_share_is_not_known(tmp_path: Path) -> None:
    row = {**_row(64, "mpi", 40), "compute_us": None, "share": None}
    draw({"rows": [_row(64, "shmemar", 12.5), row]}, tmp_path / "plot.svg")
    text = (tmp_path / "plot.svg").read_text(encoding="utf-8")
    assert "<!-- 20% -->" in text
    assert text.count("% -->") == 1


@pytest.mark.parametrize("suffix", [".svg", ".png"])
def test_a_plot_is_drawn(tmp_path: Path, suffix: str) -> None:
    rows = [_row(n, name, us) for n in (64, 128) for name, us in (("shmemar", 12.5), ("mpi", 40))]
    path = tmp_path / f"plot{suffix}"
    draw({"gpus": "2 x NVIDIA H200", "rows": rows[:3]}, path)
    if suffix == ".svg":
        text = path.read_text(encoding="utf-8")
        for said in ("shmemar", "mpi", "without communication", "20%", "75%", "2 x NVIDIA H200"):
            assert f"<!-- {said}" in text or said in text
    assert path.stat().st_size > 1000


@pytest.mark.parametrize(
    ("rows", "name", "message"),
    [
        ([], "plot.svg", "no rows to draw"),
        ([{**_row(64, "mpi", 20), "trouble": ["residual"]}], "plot.svg", "no rows to draw"),
        ([_row(64, "mpi", 20)], "plot.pdf", "ends in .svg or .png"),
        ([_row(64, "mpi", 20)], "none/plot.svg", "could not be written"),
    ],
)
def test_a_plot_that_cannot_be_is_refused(
    tmp_path: Path, rows: list[Any], name: str, message: str
) -> None:
    with pytest.raises(ArgumentError, match=message):
        draw({"rows": rows}, tmp_path / name)


def test_a_run_without_right_results_ends_though_a_plot_was_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    plain = Solver.solve

    def solve(self: Any, *arguments: Any, **options: Any) -> Any:
        found = plain(self, *arguments, **options)
        return replace(found, own_vectors=2 * found.own_vectors)

    monkeypatch.setattr(Solver, "solve", solve)
    plot = tmp_path / "plot.svg"
    options = ["--run-on", "emulated", "--no-reference", "--repeat", "1", "--check"]
    assert main(["--n", "8,9", "--backend", "mpi", "--plot", str(plot), *options]) == 1
    out = capsys.readouterr().out
    assert "# WRONG: n 8, float64, mpi: orthogonality" in out
    assert "# WRONG: n 9, float64, mpi: orthogonality" in out
    assert not plot.exists()


def _kept(path: Path, *rows: dict[str, Any], gpus: str = "2 x H200") -> str:
    path.write_text(json.dumps({"gpus": gpus, "rows": rows}), encoding="utf-8")
    return str(path)


def _shares(path: str) -> list[str]:
    return re.findall(r"<!-- (\d+)% -->", Path(path).read_text(encoding="utf-8"))


def test_results_that_were_kept_are_drawn_but_for_wrong_ones(tmp_path: Path) -> None:
    wrong = {**_row(128, "mpi", 80), "trouble": ["residual is 1e+10"]}
    kept = _kept(tmp_path / "a.json", _row(64, "mpi", 20), wrong)
    plot = str(tmp_path / "plot.svg")
    assert eigensolver_plot.main([kept, plot]) == 0
    assert _shares(plot) == ["50"]
    assert "dc:date" not in Path(plot).read_text(encoding="utf-8")


def test_later_results_are_drawn_in_the_place_of_earlier_ones(tmp_path: Path) -> None:
    first = _kept(tmp_path / "a.json", _row(64, "mpi", 20), _row(128, "mpi", 80))
    again = _kept(tmp_path / "b.json", _row(128, "mpi", 40), _row(128, "self", 100))
    plot = str(tmp_path / "plot.svg")
    assert eigensolver_plot.main([first, again, plot]) == 0
    assert sorted(_shares(plot)) == ["50", "75", "90"]


@pytest.mark.parametrize(
    ("changes", "gpus"),
    [({"ranks": 4}, "2 x H200"), ({"block": 32}, "2 x H200"), ({}, "1 x H100")],
)
def test_results_of_other_conditions_are_not_drawn_together(
    tmp_path: Path, capsys: Any, changes: dict[str, Any], gpus: str
) -> None:
    first = _kept(tmp_path / "a.json", _row(64, "mpi", 20))
    other = _kept(tmp_path / "b.json", {**_row(128, "mpi", 40), **changes}, gpus=gpus)
    plot = tmp_path / "plot.svg"
    assert eigensolver_plot.main([first, other, str(plot)]) == 2
    assert "b.json is of other GPUs, ranks or blocks than" in capsys.readouterr().err
    assert not plot.exists()


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("{", "JSONDecodeError"),
        ("[]", "TypeError"),
        ('{"cases": []}', "KeyError: 'rows'"),
        ('{"rows": [{"dtype": "float64"}]}', "KeyError: 'n'"),
        (json.dumps({"rows": [{**_row(64, "mpi", 20), "column_us": None}]}), "TypeError"),
        (json.dumps({"rows": [{**_row(64, "mpi", 20), "share": "much"}]}), "ValueError"),
    ],
)
def test_what_holds_no_results_of_the_eigensolver_is_refused(
    tmp_path: Path, capsys: Any, text: str, error: str
) -> None:
    path = tmp_path / "a.json"
    path.write_text(text, encoding="utf-8")
    assert eigensolver_plot.main([str(path), str(tmp_path / "plot.svg")]) == 2
    assert f"a.json can't be read ({error}" in capsys.readouterr().err


def test_a_missing_file_is_refused(tmp_path: Path, capsys: Any) -> None:
    missing = str(tmp_path / "none.json")
    assert eigensolver_plot.main([missing, str(tmp_path / "plot.svg")]) == 2
    assert "none.json can't be read (FileNotFoundError" in capsys.readouterr().err


@pytest.mark.parametrize("dtype", ["float32", "complex128"])
def test_kernels_compile_for_sm_90_without_spills(
    dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    import numba.cuda.dispatcher

    from benchmarks.apps.eigensolver_kernels import build
    from benchmarks.apps.eigensolver_parts import Shape
    from tests.ptx.assembler import assemble

    device = SimpleNamespace(compute_capability=(9, 0))
    monkeypatch.setattr(numba.cuda.dispatcher, "get_current_device", lambda: device)
    kernels = build(np.dtype(dtype), 64, Shape())._asdict()
    assert len(kernels) == 6
    if dtype == "complex128":  # the one that has most in registers: seconds are spared
        kernels = {"multiply": kernels["multiply"]}
    for name, (function, types) in kernels.items():
        ptx, _ = numba.cuda.compile(function, types, device=False, abi="numba", cc=(9, 0))
        code = assemble(str(ptx))
        assert (code.stack_nbytes, code.spill_nbytes) == (0, 0), name
        assert code.registers <= 128, name
        assert ".f64" not in code.ptx or dtype == "complex128", name
        # Nothing is added up in the order of arrival.
        assert not code.lines("atom") + code.lines("red"), name
        if name == "multiply":
            first_use = code.ptx.index("st.shared", code.ptx.index("bar.sync"))
            assert code.ptx[:first_use].count("ld.global") >= 16, "loads are not under way together"


def test_the_kernels_do_what_the_host_does() -> None:
    """Under numba's simulator, which has to be chosen before numba is loaded."""
    cases = [(1, 1, 1, "float64"), (4, 2, 2, "complex64")]
    code = f"from tests.unit.test_apps_eigensolver import simulate; simulate({cases!r})"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "NUMBA_ENABLE_CUDASIM": "1", "PYTHONPATH": str(ROOT)},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("as on the host") == len(cases)


def simulate(cases: list[tuple[int, int, int, str]]) -> None:
    """Reduce matrices with the kernels, all ranks in one process, and compare.

    What is above the diagonal, and what no kernel has written, is not a number.
    """
    from benchmarks.apps.eigensolver_columns import REAL, ColumnArrays, ColumnLoop, array_sizes
    from benchmarks.apps.eigensolver_parts import Shape

    shape = Shape(rows=2, parts=2, tile_rows=4, tile_columns=4)
    for n, block, size, name in cases:
        dtype = np.dtype(name)
        real = np.finfo(dtype).dtype
        matrix, _ = problem(n, name, 3)
        ranks = []
        for rank in range(size):
            layout = Layout(n, block, rank, size)
            sizes = array_sizes(layout, shape)
            arrays = ColumnArrays(
                **{
                    each: np.full(count, np.nan, real if each in REAL else dtype)
                    for each, count in sizes.items()
                }
            )
            arrays.v[...] = arrays.w[...] = arrays.tau[...] = 0
            own = np.where(np.arange(n)[:, None] >= layout.own, matrix[:, layout.own], np.nan)
            arrays.columns[: own.size] = own.T.ravel()
            ranks.append((layout, arrays, ColumnLoop(layout, dtype, arrays, 0, shape)))
        for panel in ranks[0][0].panels:
            layout, arrays, _ = ranks[panel.owner]
            at = layout.own_before(panel.start)
            columns = arrays.columns.reshape(-1, n)[at : at + panel.width, panel.start :].copy()
            for _, arrays, _ in ranks:
                arrays.panel[: columns.size] = columns.ravel()
            for counts in zip(*(loop.run(panel) for *_, loop in ranks), strict=True):
                parts = [arrays.summed[: counts[0]] for _, arrays, _ in ranks]
                assert not any(np.isnan(part).any() for part in parts)
                total = np.sum(parts, axis=0)
                for part in parts:
                    part[...] = total
            for layout, arrays, _ in ranks:
                at, rows = layout.own_before(panel.stop), slice(panel.stop, None)
                v = arrays.v.reshape(n, n).T[:, panel.start : panel.stop]
                w = arrays.w.reshape(-1, n).T[:, : panel.width]
                behind, own = arrays.columns.reshape(-1, n).T[rows, at:], layout.own[at:]
                if len(own):
                    behind -= v[rows] @ w[own].conj().T + w[rows] @ v[own].conj().T
        first = ranks[0][1]
        for _, arrays, _ in ranks:
            for each in ("d", "v", "tau"):
                assert np.array_equal(getattr(arrays, each), getattr(first, each)), each
        d, e = first.d, first.e[: n - 1]
        expected = tridiagonalise(matrix, alone(), block=block)
        scale = 100 * n * np.finfo(dtype).eps
        assert _relative(d, expected.d) <= scale
        assert n == 1 or _relative(e, expected.e) <= scale
        assert np.abs(first.tau - expected.tau).max() <= scale
        sys.stdout.write("as on the host\n")
