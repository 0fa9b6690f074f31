"""Where multicast may be used, who is asked, and what is said where it may not."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from shmemar.config import Config
from shmemar.device.kernels import KernelArguments, numba_type
from shmemar.dtypes import DTYPES, ReduceOp
from shmemar.errors import ArgumentError, BackendUnavailableError
from shmemar.host import gpus, runtime
from shmemar.host.arena import Arena
from shmemar.host.communicator import Communicator
from shmemar.host.contract import Control
from shmemar.host.multicast import MulticastFacts, is_switched_on, why_no_multicast
from shmemar.host.runtime import NvshmemRuntime
from shmemar.layout import BarrierLayout
from shmemar.spec import Backend, Determinism, Kernel, KernelSpec, Protocol, why_impossible
from shmemar.user_spec import BufferSpec, UserKernelSpec, describe_code

FLOAT, SUM = DTYPES["float32"], ReduceOp.SUM
GOOD = [
    MulticastFacts(Backend.NVSHMEM, f"GPU-{rank}", is_supported=True, njob=3) for rank in range(3)
]


# The decision


def test_nothing_is_said_where_it_can_be_used() -> None:
    assert why_no_multicast(GOOD) is None
    assert why_no_multicast([replace(each, disable_nvls="0") for each in GOOD]) is None


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({1: {"backend": Backend.EMULATED}}, "the emulated backend has none; it needs GPUs"),
        (
            {0: {"disable_nvls": "1"}, 2: {"disable_nvls": ""}},
            "NVSHMEM_DISABLE_NVLS is '1' on ranks 0, 2; unset it where multicast is safe to use",
        ),
        (
            {1: {"is_supported": False}},
            "the driver says no when asked whether the GPU of rank 1 has it",
        ),
        (
            {1: {"is_supported": None}, 2: {"is_supported": False}},
            "the driver does not say when asked whether the GPU of ranks 1, 2 has it",
        ),
        ({2: {"gpu": "GPU-0"}}, "2 ranks share a GPU; it needs a GPU for each rank"),
        (
            {rank: {"njob": 4} for rank in range(3)},
            "the communicator has 3 ranks, and NVSHMEM runs with 4, to all of which",
        ),
        ({2: {"trouble": "NVSHMEM gives none"}}, "NVSHMEM gives none (rank 2)"),
    ],
    ids=["emulated", "disabled", "unsupported", "unknown", "shared", "part", "address"],
)
def test_each_reason_is_said_with_its_ranks(changes: dict[int, dict[str, Any]], told: str) -> None:
    facts = [replace(each, **changes.get(rank, {})) for rank, each in enumerate(GOOD)]
    why = why_no_multicast(facts)
    assert why is not None
    assert why.startswith(told)


def test_one_rank_has_nobody_to_store_to() -> None:
    why = why_no_multicast([replace(GOOD[0], njob=1)])
    assert why == "there is one rank, which has nobody to store to"


@pytest.mark.parametrize("text", ["1", "yes", "", "2", "true", " 0"])
def test_what_nvshmem_takes_for_true_switches_on(text: str) -> None:
    assert is_switched_on(text)


@pytest.mark.parametrize("text", [None, "0", "no", "N", "false", "F", "00"])
def test_what_it_takes_for_false_does_not(text: str | None) -> None:
    assert not is_switched_on(text)


# What is asked on GPUs


class _Alone:
    """A bootstrap of ranks that say the same, but for what `others` make of it."""

    rank, size = 0, 2

    def __init__(self, *others: Any) -> None:
        self.gathered: list[Any] = []
        self._others = list(others)

    def allgather(self, item: Any, _: str) -> list[Any]:
        self.gathered.append(item)
        make = self._others.pop(0) if self._others else (lambda mine: mine)
        return [item, make(item)]


def on_gpus(
    monkeypatch: pytest.MonkeyPatch,
    *others: Any,
    ask: Any = lambda team, at: at + (1 << 40),
    supported: bool | None = True,
) -> Any:
    """A runtime without a GPU, NVSHMEM or MPI; rank 1's GPU is another one."""
    monkeypatch.setattr(runtime, "has_multicast", lambda _: supported)
    made: Any = NvshmemRuntime.__new__(NvshmemRuntime)
    made._device = SimpleNamespace(uuid="GPU-0")
    made._has_multicast = False
    job: Any = runtime._Job.__new__(runtime._Job)
    job.arena, job.size = Arena(4096, 1024), 2
    job._bindings = SimpleNamespace(**({} if ask is None else {"mc_ptr": ask}))
    made._job = job
    first = lambda mine: replace(mine, gpu="GPU-1")  # noqa: E731 - of the other rank
    made._bootstrap = _Alone(*(others or (first, first)))
    return made


@pytest.fixture(autouse=True)
def _nothing_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NVSHMEM_DISABLE_NVLS", raising=False)


def test_nvshmem_is_asked_for_the_address_of_all_of_its_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = []

    def ask(team: int, at: int) -> int:
        asked.append((team, at))
        return at + (1 << 40)

    made = on_gpus(monkeypatch, ask=ask)
    assert made.why_no_multicast() is None
    assert asked == [(0, 4096), (0, 4096 + 1023)]
    assert made._has_multicast


@pytest.mark.parametrize(
    ("variable", "supported", "told"),
    [("1", True, "NVSHMEM_DISABLE_NVLS is '1'"), (None, False, "the driver says no")],
)
def test_nvshmem_is_not_asked_where_it_must_stay_off(
    monkeypatch: pytest.MonkeyPatch, variable: str | None, supported: bool, told: str
) -> None:
    if variable is not None:
        monkeypatch.setenv("NVSHMEM_DISABLE_NVLS", variable)

    def ask(team: int, at: int) -> int:
        raise AssertionError("asked")

    made = on_gpus(monkeypatch, ask=ask, supported=supported)
    assert told in made.why_no_multicast()
    assert not made._has_multicast


def fails(team: int, at: int) -> int:
    raise RuntimeError("function nvshmemx_mc_ptr is not found")


@pytest.mark.parametrize(
    ("ask", "told"),
    [
        (None, "nvshmem.bindings has no mc_ptr, which says a multicast address; upgrade"),
        (lambda team, at: 0, "NVSHMEM gives no multicast address of 1024 bytes of its heap"),
        (lambda team, at: 1 << 40, "NVSHMEM gives no multicast address of 1024 bytes"),
        (fails, "(RuntimeError: function nvshmemx_mc_ptr is not found)"),
    ],
    ids=["missing", "null", "in pieces", "error"],
)
def test_why_nvshmem_gives_no_address_is_said(
    monkeypatch: pytest.MonkeyPatch, ask: Any, told: str
) -> None:
    made = on_gpus(monkeypatch, ask=ask)
    why = made.why_no_multicast()
    assert told in why
    assert why.endswith("(ranks 0, 1)")


def test_another_ranks_trouble_keeps_this_one_from_it(monkeypatch: pytest.MonkeyPatch) -> None:
    made = on_gpus(
        monkeypatch,
        lambda mine: replace(mine, gpu="GPU-1"),
        lambda mine: replace(mine, gpu="GPU-1", trouble="NVSHMEM gives none"),
    )
    assert made.why_no_multicast() == "NVSHMEM gives none (rank 1)"
    assert not made._has_multicast


def test_memory_has_an_address_where_all_ranks_have_one(monkeypatch: pytest.MonkeyPatch) -> None:
    same = lambda window: window  # noqa: E731 - of the other rank
    none = lambda _: 0  # noqa: E731
    assert on_gpus(monkeypatch, same)._window([256, 256], 128) == 4096 + 256 + (1 << 40)
    assert on_gpus(monkeypatch, none)._window([256, 256], 128) == 0
    # Of communicators of some ranks, parts may lie anywhere.
    assert on_gpus(monkeypatch, same)._window([256, 512], 128) == 0
    assert on_gpus(monkeypatch, same, ask=None)._window([256, 256], 128) == 0


@pytest.mark.parametrize(("value", "status", "found"), [(1, 0, True), (0, 0, False), (1, 7, None)])
def test_the_driver_is_asked_for_the_gpus_multicast(
    monkeypatch: pytest.MonkeyPatch, value: int, status: int, found: bool | None
) -> None:
    from cuda.bindings import driver

    asked = (driver.CUresult(status) if status == 0 else driver.CUresult(1), value)
    monkeypatch.setattr(driver, "cuDeviceGetAttribute", lambda *_: asked)
    assert gpus.has_multicast(SimpleNamespace(device_id=0)) is found


# What a communicator makes of it


class _Runtime:
    """Memory that is counted, and kernels that are named."""

    backend, is_synchronous, shares_gpu = Backend.NVSHMEM, False, False

    def __init__(self, why: str | None, windows: list[int]) -> None:
        self.why, self.windows = why, windows
        self.asked = 0
        self.compiled: list[str] = []

    def why_no_multicast(self) -> str | None:
        self.asked += 1
        return self.why

    def allocate_symmetric(self, nbytes: int, word: int, zeroed_nbytes: int = 0) -> Any:
        window = self.windows.pop(0) if self.windows else 9000
        return SimpleNamespace(
            nbytes=nbytes,
            addresses=(100, 200),
            window=0 if self.why is not None else window,
            free=lambda: None,
            abandon=lambda: None,
        )

    def allocate_private(self, nbytes: int) -> Any:
        return SimpleNamespace(nbytes=nbytes, addresses=(300,), free=lambda: None)

    def allocate_control(self) -> Control:
        return Control(1, 2, lambda: bytes(48), lambda: None)

    def refuse_capture(self, name: str, stream: int) -> None:
        """Nothing is captured."""

    def why_no_stock(self) -> str | None:
        return None

    def why_no_pdl(self) -> str | None:
        return None

    def compile(self, spec: Any, layout: Any, stream: int, *, pdl: Any) -> Any:
        self.compiled.append(spec.name)
        return SimpleNamespace(max_blocks=None)

    def describe(self) -> dict[str, str]:
        return {}

    def abandon(self, *memory: Any) -> None:
        """Nothing to keep."""


class _Bootstrap(_Alone):
    is_alive = True

    def together(self, action: Any, _: str) -> Any:
        return action()


def communicator(
    why: str | None = None,
    *,
    determinism: Determinism = Determinism.RUN_TO_RUN,
    windows: tuple[int, ...] = (),
    **config: Any,
) -> tuple[Communicator, _Runtime]:
    made = _Runtime(why, list(windows))
    options: Any = {"multicast": True, **config}
    boot: Any = _Bootstrap()
    comm = Communicator(boot, Config(**options), determinism, lambda _: made)  # type: ignore[arg-type,return-value]
    comm._is_closed = True  # there is nothing to free
    return comm, made


def test_where_it_is_not_asked_for_nobody_looks() -> None:
    comm, made = communicator(multicast=False)
    assert made.asked == 0
    assert "multicast" not in comm.describe()
    assert comm.explain(nbytes=4).kernel == "one_shot/ll"


def test_where_it_can_be_used_kernels_that_have_it_do() -> None:
    comm, _ = communicator()
    assert comm.describe()["multicast"] == "used where a kernel has it"
    assert comm.explain(nbytes=4).kernel == "one_shot/ll/multicast"


def test_where_it_cant_the_reason_is_said_and_nothing_raised(
    caplog: pytest.LogCaptureFixture,
) -> None:
    comm, _ = communicator("2 ranks share a GPU")
    assert comm.describe()["multicast"] == "not used: 2 ranks share a GPU"
    assert comm.explain(nbytes=4).kernel == "one_shot/ll"
    assert "SHMEMAR_MULTICAST is 1, and multicast is not used: 2 ranks share a GPU" in caplog.text


@pytest.mark.parametrize(
    ("kernel", "protocol", "determinism", "name", "found"),
    [
        (Kernel.TWO_SHOT, None, Determinism.RUN_TO_RUN, "float32", "two_shot/ll"),
        (
            Kernel.BARRIER_TWO_SHOT,
            Protocol.PULL,
            Determinism.RUN_TO_RUN,
            "float32",
            "barrier_two_shot/pull",
        ),
        (
            Kernel.BARRIER_TWO_SHOT,
            Protocol.PULL,
            Determinism.NOT_GUARANTEED,
            "float32",
            "barrier_two_shot/pull/multicast",
        ),
        (
            Kernel.BARRIER_TWO_SHOT,
            Protocol.PULL,
            Determinism.NOT_GUARANTEED,
            "int32",
            "barrier_two_shot/pull",
        ),
        (
            Kernel.BARRIER_TWO_SHOT,
            None,
            Determinism.NOT_GUARANTEED,
            "float32",
            "barrier_two_shot/push",
        ),
    ],
)
def test_a_kernel_without_such_a_form_or_with_another_order_is_the_ordinary_one(
    kernel: Kernel, protocol: Protocol | None, determinism: Determinism, name: str, found: str
) -> None:
    comm, _ = communicator(determinism=determinism, kernel=kernel, protocol=protocol)
    assert comm.explain(nbytes=64, dtype=name).kernel == found


def test_the_multicast_address_is_passed_behind_the_others() -> None:
    comm, _ = communicator()
    for multicast, peers in ((True, (100, 200, 9000)), (False, (100, 200))):
        spec = KernelSpec(Kernel.ONE_SHOT, Protocol.LL, FLOAT, SUM, 2, multicast)
        nothing = SimpleNamespace(address=0, count=0)
        prepared: Any = SimpleNamespace(spec=spec, scratch=comm._kernels.scratch_for(spec))
        arguments = comm._arguments(prepared, nothing, nothing)  # type: ignore[arg-type]
        assert isinstance(arguments, KernelArguments)
        assert arguments.peers == peers
        assert numba_type(spec).types[0].count == len(peers)


def test_a_region_without_the_address_is_used_by_the_ordinary_kernel() -> None:
    comm, made = communicator(windows=(0,))
    prepared = comm._prepare(comm._kernels.choose(4, FLOAT, SUM).spec, 0)
    assert not prepared.spec.multicast
    assert made.compiled == ["one_shot_ll_float32_sum_2"]
    assert prepared.scratch is comm._kernels.scratch_for(prepared.spec)


# Specs


PAIRS = [
    (kernel, protocol, kernel in (Kernel.ONE_SHOT, Kernel.BARRIER) or protocol is Protocol.PULL)
    for kernel in Kernel
    if kernel is not Kernel.BARRIER_ONE_SHOT
    for protocol in kernel.protocols
]


@pytest.mark.parametrize(("kernel", "protocol", "has_form"), PAIRS)
def test_a_form_changes_name_and_code_and_comes_back_from_it(
    kernel: Kernel, protocol: Protocol, has_form: bool
) -> None:
    plain = KernelSpec(kernel, protocol, FLOAT, SUM, 8)
    why = why_impossible(kernel, protocol, FLOAT, SUM, 8, multicast=True)
    assert (why is None) is has_form
    if why is not None:
        assert f"kernel {kernel.value} with {protocol.value}, which has no multicast form" in why
        assert "expected one of one_shot with ll or sentinel, barrier_two_shot with pull" in why
        assert why.endswith("(unset SHMEMAR_MULTICAST).")
        return
    form = replace(plain, multicast=True)
    assert form.name == form.symbol == plain.name + "_multicast"
    assert form.code != plain.code
    assert form.code < 1 << 32
    assert KernelSpec.from_code(form.code) == form
    assert describe_code(form.code)[0] == form.name
    assert KernelSpec.from_code(plain.code) == plain


@pytest.mark.parametrize(
    ("kernel", "protocol", "name", "op", "nranks", "told"),
    [
        (
            Kernel.BARRIER_ONE_SHOT,
            Protocol.PULL,
            "float32",
            SUM,
            2,
            "barrier_one_shot with pull, which has no multicast form",
        ),
        (
            Kernel.BARRIER_TWO_SHOT,
            Protocol.PULL,
            "float64",
            SUM,
            2,
            "dtype float64, .*expected one of float32, float16, bfloat16",
        ),
        (
            Kernel.BARRIER_TWO_SHOT,
            Protocol.PULL,
            "float32",
            ReduceOp.MAX,
            2,
            "op 'max'; expected sum or avg",
        ),
        (Kernel.ONE_SHOT, Protocol.LL, "float32", SUM, 1, "nranks 1; expected 2 to 15"),
        (Kernel.ONE_SHOT, Protocol.LL, "float32", SUM, 16, "nranks 16; expected 2 to 15"),
        (Kernel.BARRIER, Protocol.PUSH, "uint32", SUM, 1, "nranks 1; expected 2 to 64"),
    ],
)
def test_what_has_no_form_is_refused(
    kernel: Kernel, protocol: Protocol, name: str, op: ReduceOp, nranks: int, told: str
) -> None:
    with pytest.raises(ArgumentError, match=rf"^multicast is True, and .*{told}"):
        KernelSpec(kernel, protocol, DTYPES[name], op, nranks, multicast=True)


def test_the_order_of_a_loaded_sum_is_nobodys_promise() -> None:
    plain = KernelSpec(Kernel.BARRIER_TWO_SHOT, Protocol.PULL, FLOAT, SUM, 4)
    assert plain.is_deterministic
    assert not replace(plain, multicast=True).is_deterministic
    assert KernelSpec(Kernel.ONE_SHOT, Protocol.LL, FLOAT, SUM, 4, multicast=True).is_deterministic
    assert not KernelSpec(Kernel.LL128_ATOMIC, Protocol.SENTINEL, FLOAT, SUM, 4).is_deterministic


def test_each_ranks_result_has_a_place_at_home() -> None:
    spec = KernelSpec(Kernel.BARRIER_TWO_SHOT, Protocol.PULL, FLOAT, SUM, 4, multicast=True)
    assert spec.nplaces == 8
    assert BarrierLayout.fit(4, spec.nplaces, 64 << 20).nplaces == 8


def test_a_buffers_form_changes_its_name_and_the_kernels_symbol_alone() -> None:
    def kernel(ll: Any, thread: int, nthreads: int) -> None:
        """Do nothing."""

    of: Any = {"threads": 128, "slots": 1, "protocol": "ll"}
    plain, form = (BufferSpec.of(2, "float32", multicast=m, **of) for m in (False, True))
    assert (plain.name, form.name) == ("float32/ll", "float32/ll/multicast")
    assert plain.layout == form.layout
    symbols = [UserKernelSpec(kernel, each, ()).symbol for each in (plain, form)]
    assert symbols == ["user_kernel", "user_kernel_multicast"]
    with pytest.raises(ArgumentError, match="multicast is True, and nranks 1; expected 2 or more"):
        BufferSpec.of(1, "float32", multicast=True, **of)


def test_a_missing_address_is_the_runtimes_error(monkeypatch: pytest.MonkeyPatch) -> None:
    job = on_gpus(monkeypatch, ask=None)._job
    with pytest.raises(BackendUnavailableError, match="upgrade nvshmem4py"):
        job.window_at(0, 16)
