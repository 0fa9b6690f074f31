"""Decoding over communicators: the same tokens on all ranks and as on one, and what is counted."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from benchmarks.apps.communicators import open_communicators
from benchmarks.apps.decode import decode, main
from benchmarks.apps.decode_shape import ModelShape
from shmemar.errors import ArgumentError, MismatchError, ShmemarError
from tests.distributed.app_programs import AppProgram, is_told_apart

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from mpi4py import MPI

    from benchmarks.apps.communicators import Communicator

# Divides over 1, 2, 3, 4, 6, 8 and 12 ranks.
SHAPE = ModelShape(
    hidden=96,
    layers=2,
    heads=48,
    kv_heads=24,
    intermediate=192,
    vocab=150,
    batch=2,
    context=12,
    dtype="float32",
)
OPTIONS = (
    *("--hidden", "96", "--layers", "2", "--heads", "48", "--kv-heads", "24"),
    *("--intermediate", "192", "--vocab", "150", "--context", "8", "--tokens", "6"),
    *("--dtype", "float32"),
)


@pytest.fixture(scope="module", autouse=True)
def divides(world: MPI.Intracomm) -> None:
    if SHAPE.kv_heads % world.size:
        pytest.skip(f"24 kv_heads do not divide over {world.size} ranks")


@pytest.fixture(scope="module")
def communicators(world: MPI.Intracomm, backend: str) -> Iterator[dict[str, Communicator]]:
    made = open_communicators(world, ["shmemar", "mpi", "self"], backend=backend)
    yield made
    for each in made.values():
        each.close()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_backends_make_the_tokens_of_one_rank(
    world: MPI.Intracomm,
    communicators: dict[str, Communicator],
    backend: str,
    agree: Any,
    dtype: str,
) -> None:
    shape = replace(SHAPE, dtype=dtype)
    results = decode(world, communicators, shape, 10, check=True)
    assert list(results) == ["shmemar", "mpi"] + ["self"] * (world.size == 1)
    for name, result in results.items():
        made, check = result.generation, result.check
        assert check is not None
        assert check.is_right
        # float32 decides nearly all: two logits within 2**-24 times some are rare.
        assert check.decided >= (19 if dtype == "float32" else 10)
        assert check.total == made.tokens.size == 20
        assert made.alike
        assert (made.allreduces, made.nbytes) == (4, (4 if dtype == "float32" else 2) * 2 * 96)
        assert len(made.milliseconds) == 9
        assert min(made.milliseconds) > 0
        assert (result.alone_ms is None) == (world.size == 1 or not is_told_apart(name, backend))
    tokens = {name: each.generation.tokens.tobytes() for name, each in results.items()}
    assert len(set(agree(tokens["shmemar"]))) == 1
    if dtype == "float32":
        assert len(set(tokens.values())) == 1


class _Planted:
    """A communicator whose sums are doubled, on all ranks or on the last one."""

    def __init__(self, comm: Communicator, *, everywhere: bool, name: str = "mpi") -> None:
        self._comm, self._everywhere, self.name = comm, everywhere, name

    def __getattr__(self, name: str) -> Any:
        return getattr(self._comm, name)

    def allreduce(self, x: Any) -> None:
        self._comm.allreduce(x)
        if self._everywhere or self._comm.rank == self._comm.size - 1:
            x *= 2


def test_wrong_sums_make_wrong_tokens(
    world: MPI.Intracomm, communicators: dict[str, Communicator]
) -> None:
    planted: dict[str, Any] = {"mpi": _Planted(communicators["mpi"], everywhere=True)}
    result = decode(world, planted, SHAPE, 10, check=True)["mpi"]
    assert result.check is not None
    assert result.check.wrong > 0
    assert not result.is_right


def test_ranks_that_make_different_tokens_are_an_error_of_shmemar_alone(
    world: MPI.Intracomm, communicators: dict[str, Communicator], agree: Any
) -> None:
    if world.size == 1:
        pytest.skip("one rank has nobody to differ from")
    planted: dict[str, Any] = {"mpi": _Planted(communicators["mpi"], everywhere=False)}
    result = decode(world, planted, SHAPE, 10, check=True)["mpi"]
    assert not result.generation.alike
    assert not result.is_right
    assert len(set(agree(result.generation.tokens.tobytes()))) == 1
    planted = {"shmemar": _Planted(communicators["mpi"], everywhere=False, name="shmemar")}
    with pytest.raises(MismatchError, match=rf"tokens of ranks {world.size - 1} differ"):
        decode(world, planted, SHAPE, 10)


def test_a_check_that_fails_on_rank_0_is_told_by_all(
    world: MPI.Intracomm,
    communicators: dict[str, Communicator],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(*_: Any) -> None:
        raise MemoryError("no room")

    monkeypatch.setattr("benchmarks.apps.decode.reference", fail)
    with pytest.raises(ShmemarError, match="rank 0: MemoryError: no room"):
        decode(world, {"mpi": communicators["mpi"]}, SHAPE, 10, check=True)


def test_a_model_too_large_is_refused_with_the_amount(
    world: MPI.Intracomm, communicators: dict[str, Communicator]
) -> None:
    large = replace(SHAPE, hidden=9600, intermediate=192_000, layers=500)
    with pytest.raises(ArgumentError, match=r"GiB of memory are needed by .*--shared-weights"):
        decode(world, {"mpi": communicators["mpi"]}, large, 10)


@pytest.fixture
def program(world: MPI.Intracomm, backend: str, capfd: pytest.CaptureFixture[str]) -> AppProgram:
    return AppProgram(main, world, backend, capfd)


def test_the_program_prints_and_keeps_results(
    world: MPI.Intracomm,
    backend: str,
    program: AppProgram,
    tmp_path: Path,
) -> None:
    file = tmp_path / "decode.json"
    given = ("--check", "--shared-weights", "--json", str(file), "--backend", "mpi")
    status, told, _ = program.run(*OPTIONS, *given)
    assert status == 0
    if world.rank:
        assert not told
        return
    assert "# all decided tokens right" in told
    document = json.loads(file.read_text(encoding="utf-8"))
    assert document["shape"]["shared_weights"] is True
    result = document["backends"]["mpi"]
    assert result["check"]["wrong"] == 0
    assert len(result["generation"]["tokens"][0]) == 6
    assert result["median_ms"] > 0
    assert (result["share"] is None) == (world.size == 1 or not is_told_apart("mpi", backend))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--tokens", "9"), "tokens is 9; expected 3 to the 8 positions"),
        (("--hidden", "97"), "hidden is 97 for 48 heads"),
        (("--backend", "mpi,ring"), "backends have 'ring'"),
        (("--json", "/proc/nowhere/file"), "can't be written"),
        (("--layers", "100000000", "--hidden", "9600"), "GiB of memory are needed by"),
    ],
)
def test_wrong_arguments_are_one_line_of_rank_0(
    program: AppProgram, arguments: tuple[str, ...], message: str
) -> None:
    program.assert_refused(*OPTIONS, "--backend", "mpi", *arguments, message=message)
