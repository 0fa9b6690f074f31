"""The tuner, and tables that are used by all ranks alike."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

import shmemar
from shmemar.dtypes import DTYPES, ReduceOp
from shmemar.host import startup, tuning
from shmemar.host.selector import CANDIDATES, Band, Table
from shmemar.host.tables import facts_of, table_document, write_table
from shmemar.host.tuning import Effort, table_of, tune

if TYPE_CHECKING:
    from pathlib import Path

    from mpi4py import MPI

LAST_FIRST = Table("a test", (Band(64, CANDIDATES[:1]), Band(None, CANDIDATES[::-1])))


@pytest.fixture
def table_file(tmp_path_factory: pytest.TempPathFactory, world: MPI.Intracomm) -> Path:
    """A file's path, the same on all ranks."""
    own = str(tmp_path_factory.mktemp("tables") / "table.json")
    return type(tmp_path_factory.getbasetemp())(world.bcast(own))


def keep(comm: shmemar.Communicator, path: Path, **changes: Any) -> None:
    """Write `LAST_FIRST`, on rank 0, as measured here."""
    if comm.rank == 0:
        document = table_document(LAST_FIRST, facts_of(comm.describe()), date="2026-11-30")
        write_table(path, {**document, **changes})
    comm.host_barrier()


def test_what_was_measured_makes_a_table(
    world: MPI.Intracomm, backend: str, agree: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHMEMAR_KERNEL", "one_shot")  # two kernels, of which one serves
    monkeypatch.setenv("SHMEMAR_PROTOCOL", "ll")
    heard = []
    with shmemar.init(world, backend=backend) as comm:
        before = comm.table
        rows = tune(
            comm,
            [4, 512],
            DTYPES["float32"],
            ReduceOp.SUM,
            Effort(samples=3, repeats=4),
            lambda *what: heard.append(what),
        )
        assert comm.table == before
    assert [(row.nbytes, row.kernel) for row in rows] == [(4, "one_shot/ll"), (512, "one_shot/ll")]
    assert all(row.median_us > 0 and row.spread_us >= 0 and row.blocks == 1 for row in rows)
    assert agree(sum(row.wrong for row in rows)) == [0] * world.size
    assert agree(rows) == [rows] * world.size
    assert heard == [
        (0, 2, "one_shot/ll, 4 bytes"),
        (1, 2, "one_shot/ll, 512 bytes"),
        (2, 2, "done"),
    ]
    assert [band.up_to for band in table_of(rows, "here", LAST_FIRST).bands] == [45, 1024, None]


def test_what_is_pinned_and_cant_serve_is_said_before_anything_is_measured(
    world: MPI.Intracomm, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHMEMAR_PROTOCOL", "sentinel")
    with shmemar.init(world, backend=backend) as comm:
        before = comm.table
        with pytest.raises(shmemar.ArgumentError, match="protocol is sentinel, and dtype int32"):
            tune(comm, [4], DTYPES["int32"], ReduceOp.SUM, Effort(), lambda *_: None)
        assert comm.table is before


def test_what_one_rank_cannot_make_is_an_error_on_all(
    world: MPI.Intracomm, backend: str, agree: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    last = world.size - 1

    def fails(*_: Any) -> None:
        raise MemoryError("planted")

    with shmemar.init(world, backend=backend) as comm:
        if world.rank == last:
            monkeypatch.setattr(tuning, "_Case", fails)
        with pytest.raises((MemoryError, shmemar.ShmemarError), match="planted") as caught:
            tune(comm, [4], DTYPES["float32"], ReduceOp.SUM, Effort(), lambda *_: None)
        named = world.rank == last or f"on rank {last}: MemoryError" in str(caught.value)
        assert agree((named, comm.explain(nbytes=4).kernel)) == [(True, "one_shot/ll")] * world.size


def test_a_table_that_is_named_is_used_by_all(
    comm: shmemar.Communicator,
    world: MPI.Intracomm,
    backend: str,
    agree: Any,
    monkeypatch: pytest.MonkeyPatch,
    table_file: Path,
) -> None:
    keep(comm, table_file)
    monkeypatch.setenv("SHMEMAR_TABLE", str(table_file))
    with shmemar.init(world, backend=backend) as other:
        found = other.explain(nbytes=128)
        assert other.explain(nbytes=64).kernel == "one_shot/ll"
    assert agree(found) == [found] * world.size
    assert found.kernel == "barrier_two_shot/pull"
    assert f"{table_file}, measured 2026-11-30" in found.why


def test_a_table_of_another_machine_is_an_error_on_all(
    comm: shmemar.Communicator,
    world: MPI.Intracomm,
    backend: str,
    monkeypatch: pytest.MonkeyPatch,
    table_file: Path,
) -> None:
    facts = {**facts_of(comm.describe()), "ranks": "60"}
    keep(comm, table_file, facts=facts)
    monkeypatch.setenv("SHMEMAR_TABLE", str(table_file))
    with pytest.raises(shmemar.ConfigurationError, match=r"SHMEMAR_TABLE: .*with ranks 60, and"):
        shmemar.init(world, backend=backend)
    monkeypatch.setenv("SHMEMAR_TABLE", f"{table_file}.none")
    with pytest.raises(shmemar.ConfigurationError, match=r"SHMEMAR_TABLE: .*could not be read"):
        shmemar.init(world, backend=backend)


def test_a_kept_table_is_found_where_times_mean_something(
    comm: shmemar.Communicator,
    world: MPI.Intracomm,
    backend: str,
    monkeypatch: pytest.MonkeyPatch,
    table_file: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    keep(comm, table_file)
    monkeypatch.delenv("SHMEMAR_TABLE", raising=False)
    monkeypatch.setattr(startup, "kept_path", lambda _: table_file)
    expected = "one_shot/ll" if backend == "emulated" else "barrier_two_shot/pull"
    with shmemar.init(world, backend=backend) as other:
        assert other.explain(nbytes=128).kernel == expected
    keep(comm, table_file, format=99)
    with shmemar.init(world, backend=backend) as other:
        assert other.explain(nbytes=128).kernel == "one_shot/ll"
    warned = [r.getMessage() for r in caplog.records if "package's own table" in r.getMessage()]
    assert len(warned) == (backend != "emulated" and world.rank == 0)
    monkeypatch.setattr(startup, "kept_path", lambda _: table_file.with_name("none"))
    with shmemar.init(world, backend=backend) as other:
        assert other.explain(nbytes=128).kernel == "one_shot/ll"


def test_tables_that_differ_between_ranks_are_refused(
    world: MPI.Intracomm, backend: str, agree: Any
) -> None:
    if world.size == 1:
        pytest.skip("one rank differs from nobody")
    with shmemar.init(world, backend=backend) as comm:
        with pytest.raises(
            shmemar.MismatchError, match=r"table differs between ranks in use_table"
        ):
            comm.use_table(LAST_FIRST if world.rank == 0 else comm.table)
        assert agree(comm.explain(nbytes=128).kernel) == ["one_shot/ll"] * world.size


def test_a_table_can_be_used_from_then_on(world: MPI.Intracomm, backend: str, agree: Any) -> None:
    with shmemar.init(world, backend=backend) as comm:
        comm.use_table(LAST_FIRST)
        assert comm.table is LAST_FIRST
        found = comm.explain(nbytes=128).kernel
        assert agree(found) == ["barrier_two_shot/pull"] * world.size


def test_the_table_is_json_that_people_can_read(
    comm: shmemar.Communicator, table_file: Path
) -> None:
    keep(comm, table_file)
    document = json.loads(table_file.read_text(encoding="utf-8"))
    assert document["facts"]["ranks"] == str(comm.size)
    assert document["bands"][0]["candidates"][0]["kernel"] == "one_shot"
