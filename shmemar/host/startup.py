"""Making a communicator: configuration, agreement of the ranks on it, and the runtime."""

from __future__ import annotations

import logging
from dataclasses import replace
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from shmemar import __version__
from shmemar.config import Config
from shmemar.dtypes import DTYPES, ReduceOp
from shmemar.errors import (
    ArgumentError,
    CollectiveTimeoutError,
    ConfigurationError,
    DeviceError,
)
from shmemar.host.bootstrap import Bootstrap
from shmemar.host.communicator import Communicator
from shmemar.host.default_tables import default_table
from shmemar.host.emulation import EmulatedRuntime
from shmemar.host.litmus import lines_verdict
from shmemar.host.ranks import group_ranks, list_groups
from shmemar.host.runtime import NvshmemRuntime, why_no_gpu
from shmemar.host.selector import Table, Terms, select
from shmemar.host.tables import facts_of, kept_path, parse_table
from shmemar.layout import LL_BUFFERS, LLLayout
from shmemar.spec import MAX_RANKS, Backend, Determinism, Kernel, Protocol

if TYPE_CHECKING:
    from mpi4py import MPI

    from shmemar.host.contract import Runtime

__all__ = ["init"]

logger = logging.getLogger(__name__)

E = TypeVar("E", bound=Enum)

MAX_SCRATCH_NBYTES = 1 << 40

_SPELLINGS = {
    "SHMEMAR_BACKEND": "SHMEMAR_BACKEND (or backend=)",
    "SHMEMAR_SCRATCH_NBYTES": "SHMEMAR_SCRATCH_NBYTES (or scratch_nbytes=)",
}
"""Variables that an argument of `init` goes before."""


def init(
    comm: MPI.Intracomm,
    *,
    backend: str | Backend | None = None,
    determinism: str | Determinism = "run_to_run",
    device: int | None = None,
    scratch_nbytes: int | None = None,
) -> Communicator:
    """Make a communicator of the ranks of `comm`.

    Collective: every rank of `comm` calls it, with the same arguments and the same ``SHMEMAR_*``
    variables. They are read here, once, and compared.

    Args:
        comm: An mpi4py intracommunicator; it is duplicated.
        backend: ``"auto"`` (the default), ``"nvshmem"`` or ``"emulated"``; goes before
            ``SHMEMAR_BACKEND``.
        determinism: ``"run_to_run"``, ``"bitwise"`` or ``"not_guaranteed"``; see
            :class:`shmemar.spec.Determinism`.
        device: Ordinal of this rank's GPU, which may differ between ranks; by default its number
            among the ranks of its host, modulo the number of GPUs.
        scratch_nbytes: Symmetric scratch of each rank in bytes; goes before
            ``SHMEMAR_SCRATCH_NBYTES``; 4 MiB by default.

    Where ``SHMEMAR_KERNEL`` is ``ll128_atomic``, or a measured table lists it and `determinism` is
    ``"not_guaranteed"``, a litmus test (:mod:`shmemar.host.litmus`) runs once a machine, and its
    verdict is kept beside the compiled kernels.

    Raises:
        ArgumentTypeError: `comm` is no mpi4py communicator.
        ConfigurationError: An argument or variable is unknown, or differs between ranks, or pins a
            kernel that this machine's GPUs can't be trusted with; on every rank.
        BackendUnavailableError: The backend can't run here; on every rank.

    Example:
        >>> from mpi4py import MPI
        >>> import numpy as np
        >>> import shmemar
        >>> with shmemar.init(MPI.COMM_WORLD, backend="emulated") as comm:
        ...     total = comm.allreduce(np.ones(3, np.float32))
        >>> bool((total == MPI.COMM_WORLD.size).all())
        True
    """
    config, chosen, error = Config(), Determinism.RUN_TO_RUN, None
    try:
        config, chosen = _configure(backend, determinism, device, scratch_nbytes)
    except ConfigurationError as caught:
        error = caught
    bootstrap = Bootstrap(comm, config.timeout_s)
    try:
        bootstrap.raise_together(error, "read the configuration")
        _compare(config, chosen, bootstrap)
        _check_pins(config)
        _check_size(bootstrap.size, config, chosen)
        made = _communicator(bootstrap, config, chosen, device)
    except CollectiveTimeoutError:
        raise  # the duplicate can't be freed without the missing ranks
    except Exception:  # of any kind: the other ranks free theirs
        bootstrap.free()
        raise
    _settle(made, comm, config, device)
    return made


def _settle(made: Communicator, comm: MPI.Intracomm, config: Config, device: int | None) -> None:
    """Let all ranks use the same table and trust the same lines, or close `made` and raise."""
    try:
        _use_measured_table(made, config)
        if _may_use_lines(made, config):
            _look_at_lines(made, comm, config, device)
    except (CollectiveTimeoutError, DeviceError) as error:
        made.__exit__(type(error), error, None)  # nothing that is collective would end
        raise
    except Exception:
        made.close()
        raise


def _use_measured_table(made: Communicator, config: Config) -> None:
    """Use the table that is configured, or kept from the tuner, as rank 0 reads it."""
    if config.table == "none" or (made.backend is Backend.EMULATED and not config.table):
        return
    found = _measured_table(config.table, facts_of(made.describe())) if made.rank == 0 else None
    table, why = made.host_allgather(found)[0] or (None, None)
    if table is not None:
        made.use_table(table)
        if made.rank == 0:
            logger.info("kernels are chosen by %s", table.origin)
    elif why is not None and config.table:
        raise ConfigurationError(f"SHMEMAR_TABLE: {why}")
    elif why is not None and made.rank == 0:
        logger.warning("kernels are chosen by the package's own table, as %s", why)


def _measured_table(name: str | None, facts: dict[str, str]) -> tuple[Table | None, str | None]:
    """The table of a file, or why it can't be used; neither where none is kept."""
    try:
        path = Path(name) if name else kept_path(facts)
        return parse_table(path.read_text(encoding="utf-8"), facts, str(path)), None
    except ConfigurationError as error:
        return None, str(error)
    except (OSError, UnicodeDecodeError, RuntimeError) as error:
        is_missing = isinstance(error, FileNotFoundError) and not name
        return (
            None,
            None if is_missing else f"{name or 'the kept table'} could not be read: {error}",
        )


def _may_use_lines(made: Communicator, config: Config) -> bool:
    if made.backend is Backend.EMULATED:
        return False
    if config.kernel is not None:
        return config.kernel is Kernel.LL128_ATOMIC
    listed = (each.kernel for band in made.table.bands for each in band.candidates)
    may_vary = made.determinism is Determinism.NOT_GUARANTEED
    return may_vary and Kernel.LL128_ATOMIC in listed


def _communicator(
    bootstrap: Bootstrap, config: Config, determinism: Determinism, device: int | None
) -> Communicator:
    return Communicator(
        bootstrap,
        config,
        determinism,
        lambda timeout_s: _make_runtime(bootstrap, config, timeout_s, device),
    )


def _look_at_lines(
    made: Communicator, comm: MPI.Intracomm, config: Config, device: int | None
) -> None:
    """Have lines of 128 bytes tested; raise, on every rank, where they fail what is pinned."""
    plain = replace(config, backend=made.backend, kernel=None, protocol=None, table="none")

    def another() -> Communicator:
        return _communicator(Bootstrap(comm, config.timeout_s), plain, made.determinism, device)

    verdict = lines_verdict(made, another)
    made.lines = verdict.text
    if not verdict.passed and config.kernel is Kernel.LL128_ATOMIC:
        raise ConfigurationError(
            f"SHMEMAR_KERNEL is {Kernel.LL128_ATOMIC.value}, which can't be relied on here; "
            f"expected GPUs on which lines of 128 bytes arrive as a whole: {verdict.text}. "
            f"Pin {Kernel.TWO_SHOT.value} instead."
        )
    made.use_table(made.table, why_no_lines="" if verdict.passed else verdict.text)


def _make_runtime(
    bootstrap: Bootstrap, config: Config, timeout_s: float, device: int | None
) -> Runtime:
    """Make the runtime that is configured; with ``auto``, the one that every rank can run."""

    def on_gpus() -> Runtime:
        return NvshmemRuntime(bootstrap, timeout_s, config.heap_nbytes, device)

    if config.backend is Backend.EMULATED:
        return EmulatedRuntime(bootstrap, timeout_s)
    if config.backend is Backend.NVSHMEM:
        return on_gpus()
    reasons = bootstrap.allgather(why_no_gpu(), "look for GPUs")
    if not any(reasons):
        return on_gpus()
    if bootstrap.rank == 0:
        reason = next(filter(None, reasons))
        logger.warning("emulated backend: kernels run on the CPU, because %s", reason)
    return EmulatedRuntime(bootstrap, timeout_s)


def _configure(
    backend: str | Backend | None,
    determinism: str | Determinism,
    device: int | None,
    scratch_nbytes: int | None,
) -> tuple[Config, Determinism]:
    config = Config.from_environment()
    if backend is not None:
        config = replace(config, backend=_member(Backend, "backend", backend))
    if scratch_nbytes is not None:
        if isinstance(scratch_nbytes, bool) or not isinstance(scratch_nbytes, int | np.integer):
            raise ConfigurationError(
                f"scratch_nbytes is {scratch_nbytes!r}; expected a whole number of bytes, or None."
            )
        config = replace(config, scratch_nbytes=int(scratch_nbytes))
    if device is not None and (isinstance(device, bool) or not isinstance(device, int)):
        raise ConfigurationError(f"device is {device!r}; expected the ordinal of a GPU, or None.")
    chosen = _member(Determinism, "determinism", determinism)
    pinned = config.kernel
    if pinned and not pinned.is_deterministic and chosen is not Determinism.NOT_GUARANTEED:
        raise ConfigurationError(
            f"SHMEMAR_KERNEL is {pinned.value}, whose order of summation may vary from run to run; "
            f"determinism is {chosen.value!r}; expected 'not_guaranteed' with it. Pass that to "
            "shmemar.init, or pin another kernel."
        )
    return config, chosen


def _check_pins(config: Config) -> None:
    kernel, protocol = config.kernel, config.protocol
    if protocol is Protocol.STREAM and kernel is None:
        raise ConfigurationError(
            "SHMEMAR_PROTOCOL is 'stream', which kernel stock alone has; expected "
            "SHMEMAR_KERNEL=stock with it. Set that, or unset SHMEMAR_PROTOCOL."
        )
    if kernel and protocol and protocol not in kernel.protocols:
        expected = " or ".join(each.value for each in kernel.protocols)
        others = [each.value for each in Kernel if each.reduces and protocol in each.protocols]
        raise ConfigurationError(
            f"SHMEMAR_PROTOCOL is {protocol.value!r}, and SHMEMAR_KERNEL {kernel.value}; expected "
            f"protocol {expected}, or kernel {' or '.join(others)}. Correct or unset one of them."
        )


def _check_size(nranks: int, config: Config, determinism: Determinism) -> None:
    """Check that the scratch has room for broadcasts, and for an all-reduce."""
    if nranks > MAX_RANKS:
        raise ConfigurationError(f"comm has {nranks} ranks; expected {MAX_RANKS} at most.")
    for name in ("scratch_nbytes", "two_shot_scratch_nbytes"):
        nbytes = getattr(config, name)
        if nbytes > MAX_SCRATCH_NBYTES:
            raise ConfigurationError(f"{name} is {nbytes}; expected {MAX_SCRATCH_NBYTES} at most.")
        LLLayout.fit(nranks, nbytes, LL_BUFFERS)  # broadcasts have LL packets, whatever is pinned
    terms = Terms(
        nranks,
        default_table(nranks, shares_gpu=False),
        determinism,
        config.kernel,
        config.protocol,
        scratch_nbytes=config.scratch_nbytes,
        two_shot_scratch_nbytes=config.two_shot_scratch_nbytes,
    )
    try:
        select(1, DTYPES["float32"], ReduceOp.SUM, terms)
    except ArgumentError as error:
        raise ConfigurationError(str(error)) from None


def _member(enum: type[E], name: str, value: Any) -> E:
    try:
        return enum(value)
    except ValueError:
        names = ", ".join(repr(member.value) for member in enum)
        raise ConfigurationError(f"{name} is {value!r}; expected one of {names}.") from None


def _compare(config: Config, determinism: Determinism, bootstrap: Bootstrap) -> None:
    """Raise on every rank when the ranks' configurations differ, naming variable and ranks."""
    own = {
        "shmemar's version": __version__,
        **config.as_variables(),
        "determinism=": determinism.value,
    }
    everyone = bootstrap.allgather(own, "compare the configuration")
    for variable in own:
        by_value = group_ranks(entry[variable] for entry in everyone)
        if len(by_value) > 1:
            raise ConfigurationError(
                f"{_SPELLINGS.get(variable, variable)} differs between ranks: "
                f"{list_groups(by_value)}. Give every rank the same (mpirun -x NAME exports a "
                "variable)."
            )
