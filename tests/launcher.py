"""Starts programs under mpirun."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from typing import Self

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
    return {**kept, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1", **(variables or {})}


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


class DistributedSuites:
    """Runs of tests/distributed under mpirun, one after another, beside what the caller does.

    Their ranks wait for one another much of the time, and other tests keep one core busy.
    """

    def __init__(self, ranks: Iterable[int], ncalls: int) -> None:
        """Begin with the first."""
        self._process: subprocess.Popen[str] | None = None
        self._is_closed = False
        self._pool = ThreadPoolExecutor(1)
        self._runs = {n: self._pool.submit(self._run, n, ncalls) for n in ranks}

    def result(self, nranks: int) -> subprocess.CompletedProcess[str]:
        """Wait for the run with so many ranks."""
        return self._runs[nranks].result()

    def close(self) -> None:
        """End what runs, and run nothing more."""
        self._is_closed = True
        if self._process is not None:
            self._process.terminate()
        self._pool.shutdown(cancel_futures=True)

    def __enter__(self) -> Self:
        """Return itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close it."""
        self.close()

    def _run(self, nranks: int, ncalls: int) -> subprocess.CompletedProcess[str]:
        suite = "-m", "pytest", "--distributed", f"--random-calls={ncalls}", "tests/distributed"
        options = "-q", "-p", "no:cacheprovider", "--color=no", "--maxfail=3"
        command = mpirun_command(nranks, *suite, *options, options=("--output", "tag"))
        # Half of the time goes into LLVM's optimisation, which tests/ptx and the main job have.
        variables = {"SHMEMAR_TIMEOUT_S": "30", "NUMBA_OPT": "1"}
        with subprocess.Popen(
            command,
            env=clean_environment(variables),
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        ) as process:
            self._process = process
            if self._is_closed:
                process.terminate()
            try:
                output, _ = process.communicate(timeout=1200)
            except subprocess.TimeoutExpired:
                process.terminate()
                output = process.communicate()[0] + "\nended after 1200 s"
            self._process = None
        return subprocess.CompletedProcess(command, process.returncode, output)
