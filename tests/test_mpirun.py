"""Everything that needs more than one process, started under mpirun."""

from __future__ import annotations

import json
import os
import re
import time
from contextlib import suppress
from pathlib import Path

import pytest

import shmemar
from benchmarks.__main__ import main as benchmark
from benchmarks.contenders import CONTENDERS
from tests.launcher import ROOT, mpirun, run_distributed_suite

SWEEP = ("-m", "shmemar", "allreduce", "--backend", "emulated")


def test_the_distributed_suite_passes(suite_nranks: int, request: pytest.FixtureRequest) -> None:
    done = run_distributed_suite(suite_nranks, request.config.getoption("--random-calls"))
    assert done.returncode == 0, done.stdout[-20_000:]
    passed = re.findall(r"(\d+) passed", done.stdout)
    assert len(passed) == suite_nranks
    assert min(map(int, passed)) > 100


@pytest.mark.parametrize(
    ("signal", "options"), [("SIGSTOP", ()), ("SIGKILL", ("--continuous",))], ids=["stop", "kill"]
)
def test_a_lost_rank_is_named_within_the_deadline_and_the_others_exit(
    signal: str, options: tuple[str, ...]
) -> None:
    done = mpirun(
        3,
        *("tests/programs/lose_rank.py", signal, "emulated", "loop"),
        timeout_s=100,
        variables={"SHMEMAR_TIMEOUT_S": "3"},
        options=options,
    )
    assert done.returncode != 0
    caught = re.findall(
        r"CAUGHT rank (\d) call 50 missing \(2,\) after (\d+\.\d) s: rank \d waited more than 3 s "
        r"for rank 2 in one_shot_ll_float32_sum_3: block \d+, thread \d+, slot \d+, epoch \d+, "
        r"expected 0x[0-9a-f]+ from rank 2, saw 0x[0-9a-f]+\.",
        done.stdout,
    )
    assert sorted(rank for rank, _ in caught) == ["0", "1"], done.stdout
    assert all(3 <= float(waited) < 6 for _, waited in caught), done.stdout
    assert sorted(re.findall(r"STILL BROKEN rank (\d)", done.stdout)) == ["0", "1"]


def test_a_rank_lost_before_a_kernel_of_the_users_is_named() -> None:
    done = mpirun(
        2,
        *("tests/programs/lose_rank.py", "SIGSTOP", "emulated", "user"),
        timeout_s=100,
        variables={"SHMEMAR_TIMEOUT_S": "3"},
    )
    assert done.returncode != 0
    pattern = (
        r"CAUGHT rank (\d) call 50 missing \(1,\) after 3\.\d s: rank \d waited more than 3 s for "
        r"rank 1 in until_all_have_come: block 0, thread 0, slot 0, epoch 3, expected 0x3 from"
    )
    assert re.findall(pattern, done.stdout) == ["0"], done.stdout


def test_a_kernel_of_the_users_that_raises_breaks_the_communicator() -> None:
    """Where it can be heard: its epochs are lost, so nothing may be sent with them again."""
    code = (
        "import numpy as np, shmemar\n"
        "from mpi4py import MPI\n"
        "def divides(ll, thread, nthreads, x, divisor):\n"
        "    ll.bcast(0, x[0])\n"
        "    x[0] = 7 // divisor\n"
        "    ll.recv_reduce(0, x[0], max)\n"
        "with shmemar.init(MPI.COMM_WORLD, backend='emulated') as comm:\n"
        "    buffer, x = comm.ll_buffer('float32', threads=1), np.ones(4, 'f4')\n"
        "    comm.launch(divides, buffer, x, 2)\n"
        "    for act in (lambda: comm.launch(divides, buffer, x, 0), comm.check):\n"
        "        try:\n"
        "            act()\n"
        "        except shmemar.DeviceError as error:\n"
        "            print('CAUGHT', error, flush=True)\n"
        "    raise SystemExit(3)\n"
    )
    done = mpirun(2, "-c", code, timeout_s=100, variables={"SHMEMAR_TIMEOUT_S": "5"})
    assert done.returncode != 0
    message = r"CAUGHT rank \d could not launch divides: the kernel raised ZeroDivisionError"
    assert len(re.findall(message, done.stdout)) >= 2, done.stdout


@pytest.mark.parametrize(
    ("place", "message"),
    [("host", "for rank 1 to gather on"), ("mpi", "in MPI's all-reduce of a numpy array")],
)
def test_a_rank_lost_on_the_host_ends_the_wait_at_the_deadline(place: str, message: str) -> None:
    done = mpirun(
        2,
        *("tests/programs/lose_rank.py", "SIGSTOP", "emulated", place),
        timeout_s=100,
        variables={"SHMEMAR_TIMEOUT_S": "3"},
    )
    assert done.returncode != 0
    pattern = rf"CAUGHT rank 0 call 50 missing \(1?,?\) after (\d+\.\d) s: .* {message}"
    (waited,) = re.findall(pattern, done.stdout)
    assert 3 <= float(waited) < 6


def test_a_stopped_job_leaves_no_process_behind() -> None:
    token = f"token-{os.getpid()}-{time.monotonic_ns()}"
    done = mpirun(
        2,
        *("tests/programs/lose_rank.py", "SIGSTOP", "emulated", "loop", token),
        timeout_s=100,
        variables={"SHMEMAR_TIMEOUT_S": "1"},
    )
    assert "STILL BROKEN rank 0" in done.stdout
    left = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with suppress(OSError):
                if token.encode() in (entry / "cmdline").read_bytes():
                    left.append(entry.name)
    assert left == []


def test_the_exit_status_of_the_main_job_after_a_timeout_is_that_of_an_error() -> None:
    code = (
        "import sys, shmemar.host.sweep as s, shmemar.__main__ as m, os, signal\n"
        "def stop(comm, *a, **k):\n"
        "    if comm.rank == 1: os.kill(os.getpid(), signal.SIGSTOP)\n"
        "    comm.host_barrier(); yield\n"
        "s.sweep = stop\n"
        "sys.stdout.close()\n"
        "sys.stdout = None\n"
        "m.print = lambda *a, **k: None\n"
        "sys.exit(m.main(['allreduce', '--backend', 'emulated']))"
    )
    done = mpirun(2, "-c", code, timeout_s=60, variables={"SHMEMAR_TIMEOUT_S": "1"})
    assert done.returncode == 2, done.stdout
    assert re.search(r"Exit code: +2", done.stdout)


def test_the_main_job_prints_a_checked_table() -> None:
    done = mpirun(4, *SWEEP, "-b", "4", "-e", "4K", "-n", "5", timeout_s=200)
    assert done.returncode == 0, done.stdout
    assert "# Times are CPU times of an emulation" in done.stdout
    rows = [line.split() for line in done.stdout.splitlines() if re.match(r" +\d", line)]
    assert [int(row[0]) for row in rows] == [4 << k for k in range(11)]
    assert {tuple(row[2:5]) for row in rows} == {("float32", "sum", "one_shot/ll")}
    assert all(float(row[5]) > 0 for row in rows)
    assert {row[6] for row in rows} == {"0"}
    assert done.stdout.rstrip().endswith("# all results right")


@pytest.mark.parametrize("dtype", ["int64", "complex64"])
def test_the_main_job_takes_types_operators_and_in_place(dtype: str) -> None:
    sizes = ("-b", "8", "-e", "1K", "-f", "4", "-n", "2", "-w", "0")
    done = mpirun(2, *SWEEP, "-d", dtype, "-o", "prod", "--in-place", *sizes, timeout_s=200)
    assert done.returncode == 0, done.stdout
    assert done.stdout.count(f"{dtype}  prod") == 4


def test_the_main_job_counts_a_planted_wrong_element_and_fails() -> None:
    done = mpirun(2, "tests/programs/plant_wrong.py", timeout_s=200)
    assert done.returncode == 1, done.stdout
    rows = [line.split() for line in done.stdout.splitlines() if re.match(r" +\d", line)]
    # Three calls with one wrong element each, and one mismatch between the ranks' bits.
    assert [(row[0], row[6]) for row in rows] == [("8", "0"), ("16", "4"), ("32", "0")]
    assert "# 4 wrong" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("-b", "x"), "size is 'x'; expected bytes such as 8, 64K or 1M"),
        (("-b", "8", "-e", "4"), "sizes are 8 to 4 bytes; expected"),
        (("-f", "1"), "factor is 1; expected 2 or more"),
        (("-n", "0"), "calls is 0; expected 1 or more"),
        (("-d", "complex64", "-o", "max"), "op is 'max', which complex64 does not define"),
        (("-d", "int32", "-o", "sum", "-w", "-1"), "warmups is -1; expected 0 or more"),
    ],
)
def test_wrong_arguments_of_the_main_job_are_one_line(
    arguments: tuple[str, ...], message: str
) -> None:
    done = mpirun(2, *SWEEP, *arguments, timeout_s=60)
    assert done.returncode == 2
    assert done.stdout.count(message) == 1
    assert "Traceback" not in done.stdout


def test_readmes_program_runs(tmp_path: Path) -> None:
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    programs = [block for block in blocks if block.startswith("from mpi4py import MPI")]
    assert len(programs) == 1
    program = tmp_path / "app.py"
    program.write_text(programs[0])
    done = mpirun(3, str(program), timeout_s=100)
    assert done.returncode == 0, done.stdout
    assert done.stdout.count("[3. 6. 9.]") == 3


def test_the_docstrings_example_runs() -> None:
    code = "import doctest, shmemar.host.startup as m; print(doctest.testmod(m))"
    done = mpirun(2, "-c", code, timeout_s=100)
    assert done.stdout.count("TestResults(failed=0, attempted=5)") == 2, done.stdout


def test_version_is_printed() -> None:
    done = mpirun(1, "-m", "shmemar", "--version", timeout_s=60)
    assert done.stdout.strip() == f"shmemar {shmemar.__version__}"
    assert os.sep not in done.stdout


def test_the_benchmark_runs_emulated_and_says_what_it_left_out(tmp_path: Path) -> None:
    file = tmp_path / "rows.json"
    sizes = ("-b", "128", "-e", "1K", "-n", "4", "--json", str(file))
    who = ("--contenders", "all", "--floor")
    command = ("-m", "benchmarks", "allreduce", "--backend", "emulated", *sizes, *who)
    done = mpirun(2, *command, timeout_s=200)
    assert done.returncode == 0, done.stdout
    assert "# times: CPU times of an emulation" in done.stdout
    assert "# device: not run, it needs GPUs" in done.stdout
    assert "# graph: not run, it needs GPUs" in done.stdout
    document = json.loads(file.read_text())
    names = ["shmemar", *CONTENDERS]
    assert [(row["mode"], row["nbytes"], row["contender"]) for row in document["rows"]] == [
        ("eager", nbytes, name) for nbytes in (128, 1024) for name in names
    ]
    assert not any(row["wrong"] for row in document["rows"])
    ran = {row["contender"] for row in document["rows"] if row["median_us"] is not None}
    assert ran == {"shmemar", "mpi"}
    for row in document["rows"]:
        if row["contender"] in ran:
            floor_us = document["floor"]["l_sol_us"]
            assert row["xsol"] == pytest.approx(row["median_us"] / floor_us)
        else:
            assert "emulated backend has no" in row["note"]
    assert document["backend"] == "emulated"
    assert "# floor: L_SoL " in done.stdout
    # What reads such a file.
    assert benchmark(["compare", str(file), str(file)]) == 0
    assert benchmark(["plot", str(file), str(tmp_path / "plot.svg"), "-m", "eager"]) == 0
    assert (tmp_path / "plot.svg").read_text(encoding="utf-8").startswith("<?xml")


@pytest.mark.parametrize("form", ["osu", "json"])
def test_the_table_has_other_formats(form: str) -> None:
    sizes = ("--sizes", "128,256", "-n", "2", "--format", form, "-m", "eager")
    command = ("-m", "benchmarks", "allreduce", "--backend", "emulated", *sizes)
    done = mpirun(1, *command, timeout_s=100)
    assert done.returncode == 0, done.stdout
    if form == "json":
        document = json.loads(done.stdout[done.stdout.index("{\n") : done.stdout.rindex("}") + 1])
        assert [row["nbytes"] for row in document["rows"]] == [128, 256]
    else:
        assert re.search(r"\n  128 +\d+\.\d\d  shmemar one_shot/ll, eager\n", done.stdout)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["compare", "none.json", "none.json"], "none.json"),
        (["plot", "none.json", "plot.svg"], "none.json"),
    ],
)
def test_a_result_file_that_is_none_is_one_line(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert benchmark(arguments) == 2
    told = capsys.readouterr().err
    assert told.startswith("benchmarks: ")
    assert message in told
    assert told.count("\n") == 1


def test_the_floor_is_measured_under_mpirun(tmp_path: Path) -> None:
    file = tmp_path / "floor.json"
    command = ("-m", "shmemar", "floor", "--backend", "emulated", "-n", "20", "--json", str(file))
    done = mpirun(2, *command, timeout_s=200)
    assert done.returncode == 0, done.stdout
    assert "L_SoL = 2 * " in done.stdout
    assert "# times: CPU times of an emulation" in done.stdout
    document = json.loads(file.read_text(encoding="utf-8"))
    assert document["pairs"][0]["fastest_ns"] > 0
    assert document["barrier_us"] == {}
    refused = mpirun(1, "-m", "shmemar", "floor", "-n", "0", timeout_s=60)
    assert refused.returncode == 2
    assert "rounds is 0; expected 1 to" in refused.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("-m", "warp"), "--modes has 'warp'; expected some of device, graph, behind, early"),
        (("--contenders", "ring"), "--contenders have 'ring'; expected some of shmemar, nvshmem"),
        (("--kernels", "ring"), "--kernels has 'ring'; expected some of one_shot, two_shot"),
        (("--protocols", "ll,tcp"), "--protocols has 'tcp'; expected some of ll, sentinel"),
        (("-n", "0"), "--samples must be 1 or more"),
        (("--in-place",), "needs --op min or max"),
        (("--chained",), "--chained needs -m device,graph"),
        (("--chained", "-m", "graph", "-o", "prod"), "--chained needs -m device,graph, --op sum"),
    ],
)
def test_wrong_arguments_of_the_allreduce_benchmark_are_refused(
    arguments: tuple[str, ...], message: str
) -> None:
    done = mpirun(1, "-m", "benchmarks", "allreduce", *arguments, timeout_s=60)
    assert done.returncode == 2
    assert message in done.stdout


def test_the_barrier_benchmark_runs_emulated_and_says_what_it_left_out(tmp_path: Path) -> None:
    file = tmp_path / "rows.json"
    options = ("--backend", "emulated", "-n", "4", "--kernels", "barrier_one_shot")
    done = mpirun(2, "-m", "benchmarks", "barrier", *options, "--json", str(file), timeout_s=100)
    assert done.returncode == 0, done.stdout
    assert done.stdout.count("# device: not run, it needs GPUs") == 2
    document = json.loads(file.read_text())
    assert [(row["mode"], row["kernel"], row["wrong"]) for row in document["rows"]] == [
        ("eager", "barrier", 0)
    ]
    assert document["shares"] == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--kernels", "one_shot"), "--kernels has 'one_shot'; expected some of barrier_one_shot"),
        (("-m", "early"), "--modes has 'early'; expected some of device, graph, eager"),
        (("--protocols", "pull"), "--protocols names none of a kernel in --kernels"),
        (("--kernels", "barrier_one_shot", "--protocols", "ll"), "--protocols names none of"),
        (("--sizes", "x", "--backend", "emulated"), "size is 'x'; expected bytes such as"),
    ],
)
def test_wrong_arguments_of_the_barrier_benchmark_are_refused(
    arguments: tuple[str, ...], message: str
) -> None:
    done = mpirun(1, "-m", "benchmarks", "barrier", *arguments, timeout_s=60)
    assert done.returncode != 0
    assert message in done.stdout
    assert "# shmemar" not in done.stdout  # nothing has been measured


def test_the_tuner_keeps_a_table_that_names_itself(tmp_path: Path) -> None:
    table = tmp_path / "table.json"
    pins = {"SHMEMAR_KERNEL": "one_shot", "SHMEMAR_PROTOCOL": "ll"}
    sizes = "-b", "4", "-e", "1K", "-f", "16", "-n", "2"
    tune = "-m", "shmemar", "tune", "--backend", "emulated", "--output", str(table)
    plot = "--plot", str(tmp_path / "plot.svg")
    done = mpirun(2, *tune, *sizes, *plot, timeout_s=200, variables=pins)
    assert done.returncode == 0, done.stdout
    assert f"# all results right; kept in {table}" in done.stdout
    assert re.search(r"\n +64 +256  one_shot/ll \d", done.stdout), done.stdout
    assert "[##############################] 3/3 done" in done.stdout
    document = json.loads(table.read_text(encoding="utf-8"))
    assert [row["nbytes"] for row in document["rows"]] == [4, 64, 1024]
    assert (tmp_path / "plot.svg").read_text(encoding="utf-8").startswith("<?xml")
    drawn = mpirun(1, "-m", "shmemar", "tune", "--draw", str(table), timeout_s=60)
    assert drawn.returncode == 2
    assert "--draw is given without --plot" in drawn.stdout


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("-n", "0"), "samples is 0; expected 1 or more"),
        (
            ("-d", "int32"),
            "--dtype int32 would make a table for that alone the one of",
        ),
        (("-b", "many"), "size is 'many'"),
        (("--draw", "none.json", "--plot", "plot.svg"), "none.json is no table of the tuner's"),
    ],
)
def test_wrong_arguments_of_the_tuner_are_one_line(
    arguments: tuple[str, ...], expected: str
) -> None:
    done = mpirun(1, "-m", "shmemar", "tune", *arguments, timeout_s=60)
    assert done.returncode == 2
    assert expected in done.stdout
    assert "Traceback" not in done.stdout


def test_the_hosts_time_of_a_call_needs_gpus() -> None:
    done = mpirun(2, "-m", "benchmarks", "launches", "--backend", "emulated", timeout_s=60)
    assert done.returncode == 2
    assert done.stdout.count("launches: not run, it needs GPUs") == 1
