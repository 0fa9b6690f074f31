"""What the applications print and keep: facts of the machine, tables, JSON files, errors."""

from __future__ import annotations

import json
import os
import platform
import sys
import time
import traceback
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from tempfile import TemporaryFile
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from benchmarks.apps.communicators import NAMES, open_communicators
from benchmarks.steering import steering_variables
from shmemar import __version__
from shmemar.errors import ArgumentError, CollectiveTimeoutError, DeviceError, ShmemarError
from shmemar.host.bootstrap import as_entry, leave_without_finalize, load_mpi, raise_any
from shmemar.host.files import write_whole

if TYPE_CHECKING:
    from argparse import ArgumentParser
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from benchmarks.apps.communicators import Communicator

__all__ = [
    "Progress",
    "add_common_options",
    "machine_facts",
    "on_first",
    "opened",
    "print_facts",
    "require_memory",
    "require_summing",
    "require_writable",
    "run_program",
    "side_by_side",
    "table",
    "write_json",
]

T = TypeVar("T")

PACKAGES = ("numpy", "scipy", "mpi4py", "numba-cuda", "cupy-cuda13x", "torch", "nvshmem4py-cu13")


def machine_facts(mpi_comm: Any, xp: Any) -> dict[str, str]:
    """Say what a program runs on. Collective; the same on all ranks.

    Args:
        mpi_comm: mpi4py's communicator of the ranks.
        xp: The arrays' module: numpy, or cupy, whose current device is the rank's.

    Returns:
        Facts by name: ranks, hosts, processors, GPUs with the ranks on each, versions, and the
        variables that steer the libraries, as rank 0 has them.
    """
    mine = (platform.node(), _gpu(xp))
    everyone = mpi_comm.allgather(mine)
    facts = {
        "shmemar": __version__,
        "ranks": str(mpi_comm.size),
        "hosts": ", ".join(dict.fromkeys(host for host, _ in everyone)),
        "processor": _processor(),
        "gpus": _gpus([gpu for _, gpu in everyone]),
        "python": platform.python_version(),
        "mpi": load_mpi().Get_library_version().split(",")[0].strip(),
        **{name: _version(name) for name in PACKAGES},
        **steering_variables(),
    }
    return mpi_comm.bcast({name: text for name, text in facts.items() if text}, root=0)  # type: ignore[no-any-return]


def _version(package: str) -> str:
    with suppress(metadata.PackageNotFoundError):
        return metadata.version(package)
    return ""


def _processor() -> str:
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return f"{line.partition(':')[2].strip()}, {os.cpu_count()} logical"
    return f"{platform.machine()}, {os.cpu_count()} logical"


def _gpu(xp: Any) -> tuple[str, str]:
    """Name and PCI address of the current GPU; empty without."""
    if xp is np:
        return "", ""
    runtime = xp.cuda.runtime
    device = xp.cuda.Device()
    name = runtime.getDeviceProperties(device.id)["name"].decode()
    version = runtime.driverGetVersion()
    cuda = f"{version // 1000}.{version % 1000 // 10}"
    return f"{name}, driver of CUDA {cuda}", device.pci_bus_id


def _gpus(found: Sequence[tuple[str, str]]) -> str:
    kinds = dict.fromkeys(name for name, _ in found if name)
    addresses = [address for _, address in found if address]
    if not kinds:
        return "none: times are those of an emulation on the CPU"
    each = sorted({addresses.count(address) for address in addresses})
    ranks = " or ".join(map(str, each))
    return f"{len(set(addresses))} x {'; '.join(kinds)}; ranks on each: {ranks}"


def add_common_options(parser: ArgumentParser, *more: str) -> None:
    """Add what all applications take: ``--backend``, ``--run-on`` and ``--json``.

    Args:
        parser: What is added to.
        more: Names of the application's own that ``--backend`` takes.
    """
    parser.add_argument(
        "--backend",
        default="shmemar,mpi",
        metavar="NAME,...",
        help=f"of {', '.join([*NAMES, *more])}, side by side; %(default)s",
    )
    parser.add_argument(
        "--run-on", default="auto", choices=["auto", "nvshmem", "emulated"], help="as shmemar.init"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write results here too")


def require_summing(names: Sequence[str], size: int) -> None:
    """Refuse ``self`` of several ranks, as it sums nothing.

    Raises:
        ArgumentError: It is among the names.
    """
    if size > 1 and "self" in names:
        raise ArgumentError(
            f"backend is self with {size} ranks, which it does not sum; expected others. What is "
            "not communication is timed with it anyway."
        )


def print_facts(facts: Mapping[str, str]) -> None:
    """Print what `machine_facts` found. One rank calls it."""
    for name, text in facts.items():
        print(f"# {name}: {text}")


def require_memory(mpi_comm: Any, xp: Any, nbytes: int, advice: str) -> None:
    """Refuse, before anything is allocated, what does not fit into memory. Collective.

    Args:
        mpi_comm: mpi4py's communicator of the ranks.
        xp: As of `machine_facts`; the memory is that of the current GPU, or the host's.
        nbytes: What this rank will allocate.
        advice: What to do about it: the end of the message's last sentence.

    Raises:
        ArgumentError: On every rank, with the amounts, when on some GPU or host it does not fit
            together with what the other ranks there need.
    """
    free = int(xp.cuda.Device().mem_info[0]) if xp is not np else _free_on_host()
    place = (platform.node(), _gpu(xp)[1])
    everyone = mpi_comm.allgather((place, nbytes, free))
    for where in dict.fromkeys(place for place, *_ in everyone):
        needs = [need for place, need, _ in everyone if place == where]
        room = min(free for place, _, free in everyone if place == where)
        if sum(needs) > room:
            host, gpu = where
            raise ArgumentError(
                f"{sum(needs) / 2**30:.2f} GiB of memory are needed by {len(needs)} ranks on "
                f"{'GPU ' + gpu + ' of ' if gpu else ''}{host}, {max(needs) / 2**30:.2f} GiB a "
                f"rank, where {room / 2**30:.2f} GiB are free; expected them to fit. {advice}"
            )


def _free_on_host() -> int:
    """Bytes that Linux can give; all of them where it does not say."""
    with suppress(OSError):
        for line in Path("/proc/meminfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return sys.maxsize


def on_first(mpi_comm: Any, action: Callable[[], T]) -> T:
    """Run something on rank 0, while the others sleep. Collective.

    Args:
        mpi_comm: mpi4py's communicator of the ranks.
        action: What rank 0 runs. It calls no collectives.

    Returns:
        What it returned, which is picklable; on every rank.

    Raises:
        ShmemarError: As `action` raised it, or about what it raised; on every rank.
    """
    entry: tuple[Any, Any] | None = None
    if mpi_comm.rank == 0:
        try:
            entry = None, action()
        except Exception as error:  # noqa: BLE001 - the other ranks are told
            entry = as_entry(error), None
    request = mpi_comm.Ibarrier()
    while not request.Test():
        time.sleep(0.001)
    failed, result = mpi_comm.bcast(entry, root=0)
    raise_any(None, [failed])
    return result  # type: ignore[no-any-return]


def require_writable(mpi_comm: Any, *paths: Path | None) -> None:
    """Refuse files that can't be written, before anything is measured. Collective.

    Args:
        mpi_comm: mpi4py's communicator of the ranks.
        paths: Files that rank 0 will write; None for those that are not asked for. Their folders
            are made.

    Raises:
        ArgumentError: One of them can't be; on every rank.
    """

    def check() -> None:
        for path in paths:
            if path is not None:
                _try_to_write(path)

    on_first(mpi_comm, check)


def _try_to_write(path: Path) -> None:
    if path.is_dir():
        raise ArgumentError(f"{path} is a folder; expected a file's name.")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=path.parent):
            pass
    except OSError as error:
        raise ArgumentError(
            f"{path} can't be written ({error}); expected a file in a folder that takes one."
        ) from error


def write_json(path: Path, program: str, document: Mapping[str, Any]) -> None:
    """Write a result file, whole or not at all. One rank calls it.

    Args:
        path: The file; its folder is made.
        program: Name of the module under ``benchmarks.apps``.
        document: What is in it, behind date and command line.

    Raises:
        OSError: It could not be written.
    """
    head = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": " ".join([f"python -m benchmarks.apps.{program}", *sys.argv[1:]]),
    }
    write_whole(path, json.dumps({**head, **document}, indent=1, default=_plain) + "\n")


def _plain(value: Any) -> Any:
    if isinstance(value, np.generic | np.ndarray):
        return value.tolist()
    raise TypeError(f"{type(value).__name__} has no place in a JSON file")


def table(headings: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """Set rows as text, the first column to the left and the others to the right.

    Args:
        headings: One a column; the line of them begins with ``#``.
        rows: Cells: text, integers, floats (four digits that count), or None for ``-``.
    """
    lines = [[f"#{headings[0]}", *headings[1:]], *([*map(_cell, row)] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join([line[0].ljust(widths[0]), *_right(line[1:], widths[1:])]).rstrip()
        for line in lines
    )


def _right(cells: Sequence[str], widths: Sequence[int]) -> list[str]:
    return [cell.rjust(width) for cell, width in zip(cells, widths, strict=True)]


def side_by_side(results: Mapping[str, Mapping[str, Any]], first: str = "") -> str:
    """Set results of several backends in columns: a row for each name in any of them.

    Args:
        results: By backend's name: value by name of the quantity.
        first: Heading of the column of names.
    """
    names = list(dict.fromkeys(name for result in results.values() for name in result))
    rows = [[name, *(result.get(name) for result in results.values())] for name in names]
    return table([first, *results], rows)


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, float | np.floating):
        number = float(value)
        return f"{number:.4g}" if abs(number) < 1e4 else f"{number:.0f}"
    return str(value)


class Progress:
    """Lines on the standard error of rank 0, at most one in `every_s` seconds."""

    def __init__(self, rank: int, every_s: float = 5.0) -> None:
        """Start counting time.

        Args:
            rank: The own rank; all but 0 are silent.
            every_s: Seconds between lines; the first comes when they have passed.
        """
        self._speaks, self._every_s = rank == 0, every_s
        self._last = time.monotonic()

    def __call__(self, text: str) -> None:
        """Print `text`, unless a line has just been printed."""
        now = time.monotonic()
        if self._speaks and now - self._last >= self._every_s:
            self._last = now
            print(f"# ... {text}", file=sys.stderr, flush=True)


@contextmanager
def opened(mpi_comm: Any, names: Sequence[str], backend: str) -> Iterator[dict[str, Communicator]]:
    """Open communicators, and close them, also behind an error that all ranks have. Collective.

    Args:
        mpi_comm: mpi4py's communicator of the ranks.
        names: As of `open_communicators`.
        backend: Likewise.

    Raises:
        ShmemarError: As of `open_communicators`; on every rank.
    """
    made = open_communicators(mpi_comm, names, backend=backend)
    try:
        yield made
    except (CollectiveTimeoutError, DeviceError):
        raise  # a peer is gone
    except ShmemarError:
        for each in made.values():
            each.close()
        raise
    for each in made.values():
        each.close()


def run_program(body: Callable[[Any], int]) -> int:
    """Run ``body(world)`` on all ranks, so that errors are told and nothing hangs.

    An error of shmemar's, which all ranks have alike, is one line of rank 0. Any other error is
    told by the rank that has it, which then ends all ranks: they may be waiting for it.

    Args:
        body: What to run on MPI's world; returns the exit status.

    Returns:
        The exit status: that of `body`, or 2.
    """
    world = load_mpi().COMM_WORLD
    try:
        return body(world)
    except ShmemarError as error:
        lost = isinstance(error, CollectiveTimeoutError | DeviceError)
        if lost:
            leave_without_finalize(2)
        if lost or world.rank == 0:
            print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
        return 2
    except Exception:
        if world.size == 1:
            raise
        traceback.print_exc()
        sys.stderr.flush()
        world.Abort(1)
        raise
