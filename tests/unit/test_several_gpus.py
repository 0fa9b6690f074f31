"""The script for hosts with several GPUs, with an mpirun that only notes what it is told."""

from __future__ import annotations

import subprocess
from typing import TYPE_CHECKING

import pytest

from tests.launcher import ROOT

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    Run = Callable[..., subprocess.CompletedProcess[str]]

MPIRUN = """#!/bin/sh
printf '%s\n' "$*" >>"$NOTES"
echo "12 passed"
case "$*" in *decode*) echo "RuntimeError: no room"; exit 3;; esac
"""


@pytest.fixture
def run(tmp_path: Path) -> Run:
    tools = tmp_path / "tools"
    tools.mkdir()
    (tools / "mpirun").write_text(MPIRUN)
    (tools / "mpirun").chmod(0o755)

    def run(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [ROOT / "benchmarks/several_gpus.sh", *arguments],
            cwd=ROOT,
            env={"PATH": f"{tools}:/usr/bin:/bin", "NOTES": str(tmp_path / "notes"), **variables},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )

    return run


def test_each_part_runs_on_each_number_of_ranks(run: Run, tmp_path: Path) -> None:
    done = run(str(tmp_path / "out"), "floor", "tests", "kernels", RANKS="2 4")
    assert done.returncode == 0, done.stdout + done.stderr
    notes = (tmp_path / "notes").read_text().splitlines()
    assert [each.split()[:2] for each in notes] == [["-n", str(n)] for n in (2, 2, 2, 4, 4, 4)]
    assert f"--json {tmp_path}/out/floor-4-ranks.json" in notes[3]
    files = [each for each in notes[1].split() if each.endswith(".py")]
    assert len(files) > 5
    assert all((ROOT / each).exists() for each in files)
    assert (tmp_path / "out" / "tests-2-ranks.txt").read_text() == "12 passed\n"
    assert "== kernels, 4 ranks: status 0" in done.stdout


def test_a_part_that_fails_is_told_and_the_others_run(run: Run, tmp_path: Path) -> None:
    done = run(str(tmp_path / "out"), "decode", "floor", RANKS="2")
    assert done.returncode == 1
    assert "== decode, 2 ranks: status 3" in done.stdout
    assert "1 RuntimeError: no room" in done.stdout
    assert "== floor, 2 ranks: status 0" in done.stdout


def test_no_part_begins_for_which_no_time_is_left(run: Run, tmp_path: Path) -> None:
    done = run(str(tmp_path / "out"), "floor", RANKS="2", LIMIT_S="10")
    assert done.returncode == 1
    assert "== floor, 2 ranks: no time left" in done.stdout
    assert not (tmp_path / "notes").exists()


def test_nccl_is_left_out_where_ranks_share_a_gpu(run: Run, tmp_path: Path) -> None:
    tool = tmp_path / "tools" / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho GPU 0\necho GPU 1\n")
    tool.chmod(0o755)
    assert run(str(tmp_path / "out"), "eigensolver", RANKS="2 4").returncode == 0
    own, shared = (tmp_path / "notes").read_text().splitlines()
    assert "shmemar-fused,nvshmem,nccl" in own
    assert ",nccl" not in shared
    assert run(str(tmp_path / "out"), "floor").returncode == 0
    assert (tmp_path / "notes").read_text().splitlines()[-1].startswith("-n 2 ")


def test_without_gpus_the_number_of_ranks_is_asked_for(run: Run, tmp_path: Path) -> None:
    done = run(str(tmp_path / "out"), "floor")
    assert done.returncode == 2
    assert "set RANKS" in done.stderr


def test_a_part_that_is_none_is_refused(run: Run, tmp_path: Path) -> None:
    done = run(str(tmp_path / "out"), "flour", RANKS="2")
    assert done.returncode == 2
    assert "no part flour; expected topology tests" in done.stderr
    assert run().returncode == 2
