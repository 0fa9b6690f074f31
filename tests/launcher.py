"""Starts programs under mpirun."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

ROOT = Path(__file__).parent.parent


def mpirun_command(nranks: int, *arguments: str, options: tuple[str, ...] = ()) -> list[str]:
    """The command line that runs this Python with `arguments` on `nranks` ranks."""
    mpirun = shutil.which(
        "mpirun", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    )
    assert mpirun, "there is no mpirun; the package's dependencies bring one"
    return [
        mpirun,
        "--allow-run-as-root",
        "--oversubscribe",
        *options,
        "-n",
        str(nranks),
        sys.executable,
        *arguments,
    ]


def clean_environment(variables: Mapping[str, str] | None = None) -> dict[str, str]:
    """This process's environment without variables of shmemar's, and with `variables`."""
    kept = {name: text for name, text in os.environ.items() if not name.startswith("SHMEMAR_")}
    # Half of the time goes into LLVM's optimisation, which tests/ptx has, and the main job. Threads
    # of numpy's library beside those of other ranks would take longer than none.
    ours = {
        "PYTHONPATH": str(ROOT),
        "PYTHONUNBUFFERED": "1",
        "NUMBA_OPT": "1",
        "OPENBLAS_NUM_THREADS": "1",
    }
    return {**kept, **ours, **(variables or {})}


def mpirun(
    nranks: int,
    *arguments: str,
    timeout_s: float,
    variables: Mapping[str, str] | None = None,
    options: tuple[str, ...] = (),
) -> subprocess.CompletedProcess[str]:
    """Run this Python with `arguments` on `nranks` ranks; both outputs come as ``stdout``."""
    return subprocess.run(
        mpirun_command(nranks, *arguments, options=options),
        env=clean_environment(variables),
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout_s,
        check=False,
    )


def run_distributed_suite(nranks: int, ncalls: int) -> subprocess.CompletedProcess[str]:
    """Run tests/distributed on `nranks` ranks, with `ncalls` calls in its random sequence."""
    suite = "-m", "pytest", "--distributed", f"--random-calls={ncalls}", "tests/distributed"
    command = mpirun_command(
        nranks,
        *(*suite, "--in-turn", "-q", "-p", "no:cacheprovider", "--color=no", "--maxfail=3"),
        options=("--output", "tag"),
    )
    variables = {"SHMEMAR_TIMEOUT_S": "30"}
    with subprocess.Popen(
        command,
        env=clean_environment(variables),
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        try:
            output, _ = process.communicate(timeout=1200)
        except subprocess.TimeoutExpired:
            process.terminate()
            output = process.communicate()[0] + "\nended after 1200 s"
    return subprocess.CompletedProcess(command, process.returncode, output)
