"""What this machine and this process's environment have: asked here, judged by `doctor`.

Nothing here makes a CUDA context or starts an NVSHMEM job, but for `litmus`, which is for when all
else was found right. MPI is started in a process of its own before, because an MPI that can't start
may end the process that it is in.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass, replace
from importlib import import_module, metadata
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shmemar.config import DEFAULT_TIMEOUT_S, Config, environment
from shmemar.errors import ConfigurationError

if TYPE_CHECKING:
    from shmemar.host.litmus import LitmusReport

__all__ = [
    "Gpu",
    "Gpus",
    "auto_refusal",
    "installed",
    "kernel_driver",
    "launched_rank",
    "litmus",
    "mpi_library",
    "numba_trouble",
    "nvshmem_library",
    "read_config",
    "read_gpus",
    "shared_room",
]

MPI_TIMEOUT_S = 10
SHM = "/dev/shm"  # noqa: S108 - where Linux has shared memory


@dataclass(frozen=True)
class Gpu:
    """A visible GPU; what driver or bindings don't say of it is None."""

    name: str
    compute_capability: tuple[int, int]
    nbytes: int
    under_mps: bool | None = None
    has_multicast: bool | None = None


@dataclass(frozen=True)
class Gpus:
    """What the CUDA driver says.

    Attributes:
        gpus: The visible ones, by ordinal.
        peers: Whether GPU i can access the memory of GPU j, as ``peers[i][j]``.
        driver: Version of the driver, as text; empty when it is not known.
        cuda: Version of CUDA that the driver supports; None without a driver.
        trouble: Why there are no GPUs.
        advice: What to do about that.
    """

    gpus: tuple[Gpu, ...] = ()
    peers: tuple[tuple[bool, ...], ...] = ()
    driver: str = ""
    cuda: tuple[int, int] | None = None
    trouble: str = ""
    advice: str = ""

    @property
    def extra(self) -> str:
        """Command that installs what GPUs need, for the driver's CUDA."""
        extra = "cu12" if self.cuda and self.cuda[0] == 12 else "cu13"
        return f"pip install 'shmemar[{extra}]'"


SEE_SMI = "see what nvidia-smi says"
_NO_DRIVER = "install an NVIDIA driver, 580 or newer for CUDA 13; in a container, pass the GPUs in"
_INIT_ADVICE = {
    "CUDA_ERROR_NO_DEVICE": "no GPU visible: check CUDA_VISIBLE_DEVICES, and what nvidia-smi lists",
    "CUDA_ERROR_SYSTEM_NOT_READY": "start nvidia-fabricmanager, or wait for it",
    "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH": "driver and libcuda differ: reboot after an upgrade, and "
    "keep other libcuda.so.1 off LD_LIBRARY_PATH",
    "CUDA_ERROR_MPS_CONNECTION_FAILED": "MPS does not answer: check CUDA_MPS_PIPE_DIRECTORY, or "
    "restart it: echo quit | nvidia-cuda-mps-control; nvidia-cuda-mps-control -d",
}


class _DriverError(Exception):
    """A call of the CUDA driver failed; the text is the name of its status."""


def read_gpus() -> Gpus:
    """Ask the CUDA driver, without making a context."""
    try:
        driver: Any = import_module("cuda.bindings.driver")
    except ImportError:
        return Gpus(
            driver=kernel_driver(),
            trouble="not looked for: cuda-bindings is not installed",
            advice=Gpus().extra,
        )
    try:
        number = _ask(driver, "cuDriverGetVersion")
    except Exception as error:  # noqa: BLE001 - bindings raise what they like without a driver
        shown = str(error) if isinstance(error, _DriverError) else "no NVIDIA driver"
        return Gpus(driver=kernel_driver(), trouble=shown, advice=_NO_DRIVER)
    found = Gpus(driver=kernel_driver(), cuda=(number // 1000, number % 1000 // 10))
    try:
        _ask(driver, "cuInit", 0)
        count = _ask(driver, "cuDeviceGetCount")
        devices = [_ask(driver, "cuDeviceGet", ordinal) for ordinal in range(count)]
        if not devices:
            raise _DriverError("CUDA_ERROR_NO_DEVICE")
        return replace(
            found,
            gpus=tuple(_read_gpu(driver, device) for device in devices),
            peers=tuple(
                tuple(a is b or bool(_ask(driver, "cuDeviceCanAccessPeer", a, b)) for b in devices)
                for a in devices
            ),
        )
    except _DriverError as error:
        return replace(found, trouble=str(error), advice=_INIT_ADVICE.get(str(error), SEE_SMI))


def _read_gpu(driver: Any, device: Any) -> Gpu:
    def attribute(name: str) -> int | None:
        which = getattr(driver.CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{name}", None)
        try:
            return None if which is None else _ask(driver, "cuDeviceGetAttribute", which, device)
        except _DriverError:
            return None  # A driver that is older than the attribute.

    under_mps, has_multicast = attribute("MPS_ENABLED"), attribute("MULTICAST_SUPPORTED")
    return Gpu(
        name=_ask(driver, "cuDeviceGetName", 256, device).split(b"\0")[0].decode(),
        compute_capability=(
            attribute("COMPUTE_CAPABILITY_MAJOR") or 0,
            attribute("COMPUTE_CAPABILITY_MINOR") or 0,
        ),
        nbytes=int(_ask(driver, "cuDeviceTotalMem", device)),
        under_mps=None if under_mps is None else bool(under_mps),
        has_multicast=None if has_multicast is None else bool(has_multicast),
    )


def _ask(driver: Any, name: str, *arguments: Any) -> Any:
    status, *values = getattr(driver, name)(*arguments)
    if status != driver.CUresult.CUDA_SUCCESS:
        raise _DriverError(status.name)
    return values[0] if values else None


def kernel_driver() -> str:
    """Version of the NVIDIA driver that Linux has loaded; empty when it does not say."""
    for path in ("/sys/module/nvidia/version", "/proc/driver/nvidia/version"):
        try:
            found = re.search(r"\d+\.\d+(\.\d+)?", Path(path).read_text(encoding="utf-8"))
        except OSError:
            continue
        if found:
            return found[0]
    return ""


def installed(module: str, distributions: tuple[str, ...]) -> str | None:
    """Version of a package, without importing it; None when it is not installed."""
    try:
        if find_spec(module) is None:
            return None
    except (ImportError, ValueError):
        return None
    for distribution in distributions:
        try:
            return metadata.version(distribution)
        except metadata.PackageNotFoundError:
            continue
    return "installed, version not recorded"


def numba_trouble() -> str:
    """Say why numba can't be imported; empty when it can."""
    try:
        import_module("numba")
    except Exception as error:  # noqa: BLE001 - it checks its surroundings as it is imported
        return f"{type(error).__name__}: {error}"
    return ""


def launched_rank() -> int:
    """Number of this process among those that mpirun has started; 0 without it."""
    for variable in ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID"):
        text = environment(variable)
        if text is not None and text.isdecimal():
            return int(text)
    return 0


def mpi_library() -> str:
    """First line of what the MPI library says of itself, once it has started.

    Raises:
        RuntimeError: It did not start; the text says why.
    """
    program = (
        f"import sys; sys.path.append({str(Path(__file__).parents[2])!r})\n"
        "from shmemar.host.bootstrap import load_mpi\n"
        "from shmemar.errors import ShmemarError\n"
        "try:\n    version = load_mpi().Get_library_version()\n"
        "except ShmemarError as error:\n    sys.exit(str(error))\n"
        "print('MPI library:', version)"
    )
    try:
        # MPICH's mpiexec talks to its ranks through an inherited descriptor: close none.
        done = subprocess.run(  # noqa: S603 - this interpreter, and the text above
            [sys.executable, "-c", program],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=MPI_TIMEOUT_S,
            check=False,
            close_fds=False,
        )
    except subprocess.TimeoutExpired:
        raise RuntimeError(f"did not start within {MPI_TIMEOUT_S} s") from None
    said = re.search(r"^MPI library: (.*)$", done.stdout, re.MULTILINE)
    if done.returncode or said is None:
        # A traceback ends with its error; so does what `sys.exit` wrote.
        errors = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
        raise RuntimeError(f"did not start: {errors[-1]}")
    return said[1].strip("\0 ")


def nvshmem_library() -> str:
    """Version of the NVSHMEM library.

    Raises:
        BackendUnavailableError: It can't be loaded.
    """
    from shmemar.host.runtime import nvshmem_version

    return nvshmem_version()


def auto_refusal() -> str | None:
    """Say why ``backend="auto"`` would not choose nvshmem here; None when it would."""
    from shmemar.host.runtime import why_no_gpu

    return why_no_gpu()


def started_ranks() -> int:
    """Number of processes that mpirun has started; 1 without it."""
    for variable in ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS"):
        text = environment(variable)
        if text is not None and text.isdecimal():
            return int(text)
    return 1


def litmus(why_not: str = "") -> LitmusReport:
    """Run the long litmus test of lines, on all ranks that mpirun has started. Collective.

    Args:
        why_not: Why this rank can't; empty if it can. Then nothing is run on any.

    Raises:
        ShmemarError: It could not be run.
    """
    from shmemar.host.bootstrap import Bootstrap, load_mpi
    from shmemar.host.litmus import LitmusReport, gather_facts, run_litmus, why_no_lines
    from shmemar.host.startup import init

    # What keeps one rank from it must not leave the others waiting for it.
    bootstrap = Bootstrap(load_mpi().COMM_WORLD, DEFAULT_TIMEOUT_S)
    reasons = bootstrap.allgather(why_not, "say who can run the litmus test")
    bootstrap.free()
    for rank, reason in enumerate(reasons):
        if reason:
            return LitmusReport(bootstrap.size, why_not_run=f"rank {rank}: {reason}")
    options: Any = {"backend": "nvshmem", "determinism": "not_guaranteed"}
    with init(load_mpi().COMM_WORLD, **options) as comm:
        why = why_no_lines(gather_facts(comm))
        return LitmusReport(comm.size, why_not_run=why) if why else run_litmus(comm)


def shared_room() -> tuple[str, int]:
    """Directory that emulated ranks share memory through, and the bytes that are free there."""
    directory = SHM if os.access(SHM, os.W_OK) else tempfile.gettempdir()
    return directory, shutil.disk_usage(directory).free


def read_config() -> tuple[Config, tuple[str, ...]]:
    """Configuration of this environment, and the ``SHMEMAR_*`` variables that it does not know.

    A variable that is not valid gives the defaults; its error is for who checks it by itself.
    """
    unknown: list[str] = []

    class Catcher(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if isinstance(record.args, tuple) and record.args:
                unknown.append(str(record.args[0]))

    # Config warns of unknown variables, and the report says the same in its own place.
    log = logging.getLogger("shmemar.config")
    catcher, propagates = Catcher(), log.propagate
    log.addHandler(catcher)
    log.propagate = False
    try:
        config = Config.from_environment()
    except ConfigurationError:
        config = Config()
    finally:
        log.removeHandler(catcher)
        log.propagate = propagates
    return config, tuple(unknown)
