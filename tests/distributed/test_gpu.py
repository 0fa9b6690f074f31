"""What only GPUs have: streams, graphs, other libraries' arrays, and the host's part in it."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import shmemar
from shmemar.dtypes import DTYPES, ReduceOp
from shmemar.host.exact import count_wrong, exact_input, exact_result

if TYPE_CHECKING:
    from collections.abc import Callable

    from shmemar.host.arrays import Arrays

pytestmark = pytest.mark.gpu

FLOAT, SUM = DTYPES["float32"], ReduceOp.SUM


@pytest.fixture(autouse=True)
def _needs_a_gpu(backend: str) -> None:
    if backend != "nvshmem":
        pytest.skip("--backend is not nvshmem")


def inputs(comm: shmemar.Communicator, count: int, call: int) -> Any:
    return exact_input(FLOAT, SUM, count, rank=comm.rank, call=call)


def results(comm: shmemar.Communicator, count: int, call: int) -> Any:
    return exact_result(FLOAT, SUM, count, nranks=comm.size, call=call)


def cupy_stream() -> tuple[Any, Callable[[], None]]:
    import cupy

    stream = cupy.cuda.Stream(non_blocking=True)
    return stream, stream.synchronize


def torch_stream() -> tuple[Any, Callable[[], None]]:
    import torch

    stream = torch.cuda.Stream()
    return stream, stream.synchronize


def cuda_core_stream() -> tuple[Any, Callable[[], None]]:
    from cuda.core import Device

    stream = Device().create_stream()
    return stream, stream.sync


def integer_stream() -> tuple[Any, Callable[[], None]]:
    stream, synchronize = cupy_stream()
    integer_stream.keep = stream  # type: ignore[attr-defined]
    return stream.ptr, synchronize


STREAMS = [cupy_stream, torch_stream, cuda_core_stream, integer_stream]


@pytest.mark.parametrize("make_stream", STREAMS)
def test_work_is_ordered_on_the_callers_stream(
    comm: shmemar.Communicator, arrays: Arrays, agree: Any, make_stream: Any
) -> None:
    import cupy

    stream, synchronize = make_stream()
    handle = stream if isinstance(stream, int) else stream.__cuda_stream__()[1]
    count = 50_000
    x, y = cupy.empty(count, "f4"), cupy.empty(count, "f4")
    wrong = []
    for call in range(20):
        host = inputs(comm, count, call)
        with cupy.cuda.ExternalStream(handle):
            x.set(host)
            comm.allreduce(x, out=y, stream=stream)
            x.fill(cupy.nan)  # right behind the call, on its stream
            got = y.get()
        wrong.append(count_wrong(got, results(comm, count, call)))
    synchronize()
    assert agree(sum(wrong)) == [0] * comm.size


def test_calls_on_different_streams_run_one_after_the_other(
    comm: shmemar.Communicator, agree: Any
) -> None:
    """Every other call waits 2 ms on its stream, so that the next one would overtake it."""
    import cupy

    spin = cupy.RawKernel(
        'extern "C" __global__ void spin(long long n) { long long t = clock64() + n;'
        " while (clock64() < t) {} }",
        "spin",
    )
    streams = [cupy.cuda.Stream(non_blocking=True) for _ in range(3)]
    count = 20_000
    xs = [cupy.asarray(inputs(comm, count, call)) for call in range(30)]
    ys = [cupy.empty(count, "f4") for _ in xs]
    cupy.cuda.Device().synchronize()
    for call, (x, y) in enumerate(zip(xs, ys, strict=True)):
        stream = streams[call % 3]
        if call % 2 == 0:
            with stream:
                spin((1,), (1,), (np.int64(4_000_000),))
        comm.allreduce(x, out=y, stream=stream)
    cupy.cuda.Device().synchronize()
    wrong = [count_wrong(y.get(), results(comm, count, call)) for call, y in enumerate(ys)]
    assert agree(sum(wrong)) == [0] * comm.size


def test_the_current_stream_of_the_library_is_the_default(
    comm: shmemar.Communicator, agree: Any
) -> None:
    import cupy
    import torch

    wrong = 0
    for call in range(10):
        host, expected = inputs(comm, 3000, call), results(comm, 3000, call)
        with cupy.cuda.Stream(non_blocking=True):
            wrong += count_wrong(comm.allreduce(cupy.asarray(host)).get(), expected)
        with torch.cuda.stream(torch.cuda.Stream()):
            on_gpu = torch.from_numpy(host).cuda(non_blocking=True)
            wrong += count_wrong(comm.allreduce(on_gpu).cpu().numpy(), expected)
    assert agree(wrong) == [0] * comm.size


@pytest.mark.parametrize("library", ["cupy", "torch", "numba", "dlpack"])
def test_arrays_of_every_library_are_taken(
    comm: shmemar.Communicator, agree: Any, library: str
) -> None:
    host = inputs(comm, 777, 1)
    if library == "torch":
        import torch

        x = torch.from_numpy(host).cuda()
        out = torch.zeros_like(x)
        comm.allreduce(x, out=out)
        got = out.cpu().numpy()
    elif library == "numba":
        from numba import cuda

        x, out = cuda.to_device(host), cuda.device_array_like(host)
        comm.allreduce(x, out=out)
        got = out.copy_to_host()
    else:
        import cupy

        x, out = cupy.asarray(host), cupy.zeros(777, "f4")
        if library == "dlpack":

            class Opaque:
                """An array of a library that has nothing but DLPack."""

                def __init__(self, array: Any) -> None:
                    self.array = array

                def __dlpack__(self, **options: Any) -> Any:
                    return self.array.__dlpack__(**options)

                def __dlpack_device__(self) -> Any:
                    return self.array.__dlpack_device__()

            comm.allreduce(Opaque(x), out=Opaque(out))
        else:
            comm.allreduce(x, out=out)
        got = out.get()
    assert agree(count_wrong(got, results(comm, 777, 1))) == [0] * comm.size


def test_numpy_arrays_go_to_mpi(comm: shmemar.Communicator, agree: Any) -> None:
    host = inputs(comm, 1001, 3)
    wrong = count_wrong(comm.allreduce(host), results(comm, 1001, 3))
    comm.allreduce(host, out=host)
    wrong += count_wrong(host, results(comm, 1001, 3))
    assert agree(wrong) == [0] * comm.size


def test_what_the_gpu_cannot_take_is_refused(comm: shmemar.Communicator, agree: Any) -> None:
    import cupy
    import torch

    x = cupy.ones(8, "f4")
    cases: list[tuple[Any, dict[str, Any], type[Exception], str]] = [
        (cupy.ones(16, "f4")[::2], {}, ValueError, "x has shape.*C-contiguous"),
        (cupy.ones((3, 2), order="F"), {}, ValueError, "C-contiguous"),
        (cupy.ones(3, "i2"), {}, TypeError, "int16.*expected one of float16"),
        (torch.ones(3), {}, TypeError, "x is Tensor"),
        (torch.ones(3).cuda().requires_grad_(), {}, TypeError, "x is Tensor.*detached"),
        (torch.ones(3, dtype=torch.complex64).cuda().conj(), {}, ValueError, "resolve_conj"),
        (x, {"out": cupy.ones(7, "f4")}, ValueError, "7 elements"),
        (x, {"out": np.ones(8, "f4")}, TypeError, "out is ndarray"),
        (cupy.ones(12, "f4")[:8], {"op": "mean"}, ValueError, "op is 'mean'"),
        (x, {"stream": "fast"}, ValueError, "stream is 'fast'; expected a stream"),
        (3.0, {}, TypeError, "x is float; expected an array on a GPU"),
    ]
    for array, options, kind, message in cases:
        with pytest.raises(kind, match=message) as caught:
            comm.allreduce(array, **options)
        assert isinstance(caught.value, shmemar.ShmemarError)
    right = bool((comm.allreduce(x) == comm.size).all())
    assert agree(right) == [True] * comm.size


def capture_with_cupy(body: Callable[[Any], None]) -> Callable[[], None]:
    import cupy

    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        stream.begin_capture()
        body(stream)
        graph = stream.end_capture()

    def replay() -> None:
        graph.launch(stream)
        stream.synchronize()

    return replay


def capture_with_torch(body: Callable[[Any], None]) -> Callable[[], None]:
    import torch

    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        body(torch.cuda.current_stream())

    def replay() -> None:
        graph.replay()
        torch.cuda.synchronize()

    return replay


def capture_with_cuda_core(body: Callable[[Any], None]) -> Callable[[], None]:
    from cuda.core import Device

    device = Device()
    stream = device.create_stream()
    builder = stream.create_graph_builder()
    builder.begin_building()
    body(builder.stream if hasattr(builder, "stream") else builder)
    graph = builder.end_building().complete()

    def replay() -> None:
        graph.launch(stream)
        stream.sync()

    return replay


@pytest.mark.parametrize("capture", [capture_with_cupy, capture_with_torch, capture_with_cuda_core])
@pytest.mark.parametrize("ncollectives", [1, 10, 11])
def test_a_graph_replays_between_eager_calls(
    comm: shmemar.Communicator, agree: Any, capture: Any, ncollectives: int
) -> None:
    import cupy

    counts = [(37 * (k + 1)) % 4000 + 1 for k in range(ncollectives)]
    xs = [cupy.empty(count, "f4") for count in counts]
    ys = [cupy.empty(count, "f4") for count in counts]
    comm.prepare(nbytes=1 << 20)

    def body(stream: Any) -> None:
        for x, y in zip(xs, ys, strict=True):
            comm.allreduce(x, out=y, stream=stream)

    replay = capture(body)
    wrong = 0
    for call in range(100):
        for x, count in zip(xs, counts, strict=True):
            x.set(inputs(comm, count, call))
        cupy.cuda.Device().synchronize()
        replay()
        for y, count in zip(ys, counts, strict=True):
            wrong += count_wrong(y.get(), results(comm, count, call))
        if call % 3 == 0:
            eager = comm.allreduce(cupy.asarray(inputs(comm, 500, call))).get()
            wrong += count_wrong(eager, results(comm, 500, call))
    assert agree(wrong) == [0] * comm.size


@pytest.mark.parametrize(
    "kernel", ["", "barrier_one_shot", "barrier_two_shot"], ids=["default", "one_shot", "two_shot"]
)
def test_a_graph_holds_barriers(
    world: Any, backend: str, agree: Any, monkeypatch: pytest.MonkeyPatch, kernel: str
) -> None:
    """Between all-reduces, with barriers or without, and eager barriers between replays."""
    import cupy

    monkeypatch.setenv("SHMEMAR_KERNEL", kernel)
    with shmemar.init(world, backend=backend) as comm:
        x, y = cupy.zeros(3000, "f4"), cupy.zeros(3000, "f4")
        comm.allreduce(x, out=y)  # loads the kernels
        comm.barrier()

        def body(stream: Any) -> None:
            for _ in range(3):
                comm.barrier(stream=stream)
                comm.allreduce(x, out=y, stream=stream)

        replay = capture_with_cupy(body)
        wrong = 0
        for call in range(100):
            x.set(inputs(comm, 3000, call))
            y.fill(cupy.nan)
            cupy.cuda.Device().synchronize()
            replay()
            wrong += count_wrong(y.get(), results(comm, 3000, call))
            if call % 3 == 0:
                comm.barrier()
        del replay
        assert agree(wrong) == [0] * comm.size


def add_one(ll: Any, thread: int, nthreads: int, x: Any, y: Any) -> None:
    for i in range(thread, x.size, nthreads):
        ll.bcast(0, x[i])
        y[i] = ll.recv_reduce(0, x[i], lambda a, b: a + b) + 1
        ll.advance_epoch()


@pytest.mark.parametrize("protocol", ["ll", "sentinel"])
def test_a_graph_holds_launches_of_users_kernels(
    comm: shmemar.Communicator, agree: Any, protocol: str
) -> None:
    """Between them all-reduces, and between replays eager launches of other extents."""
    import cupy

    count = 3000
    buffer = comm.ll_buffer("float32", threads=1024, protocol=protocol)
    x, y, z = (cupy.zeros(count, "f4") for _ in range(3))
    comm.allreduce(y, out=z)
    comm.launch(add_one, buffer, x, y)  # loads the kernel

    def body(stream: Any) -> None:
        for _ in range(3):
            comm.launch(add_one, buffer, x, y, stream=stream)
            comm.allreduce(y, out=z, stream=stream)
            comm.launch(add_one, buffer, z, y, threads=256, stream=stream)

    replay = capture_with_cupy(body)
    wrong = 0
    for call in range(100):
        x.set(inputs(comm, count, call))
        y.fill(cupy.nan)
        cupy.cuda.Device().synchronize()
        replay()
        total = results(comm, count, call)
        wrong += count_wrong(y.get(), ((total + 1) * comm.size) * comm.size + 1)
        comm.launch(add_one, buffer, x[:77], y)
        wrong += count_wrong(y[:77].get(), total[:77] + 1)
    assert agree(wrong) == [0] * comm.size


def test_a_graph_of_ten_replays_a_thousand_times(comm: shmemar.Communicator, agree: Any) -> None:
    """Each input is mixed from the sum before it and the rank, so a sum left out shows."""
    import cupy

    count = 600
    start = np.arange(count, dtype=np.int64)
    x, y = cupy.empty(count, "i8"), cupy.empty(count, "i8")

    def body(stream: Any) -> None:
        for k in range(10):
            comm.allreduce(x, out=y, stream=stream)
            cupy.multiply(y, 5, out=x)
            x.__iadd__((comm.rank + 1) * (k + 1))

    def model(xs: list[Any]) -> list[Any]:
        for k in range(10):
            total = sum(xs)
            xs = [5 * total + (rank + 1) * (k + 1) for rank in range(comm.size)]
        return xs

    x.set(start + comm.rank)
    body(None)  # loads the kernels, CuPy's too
    replay = capture_with_cupy(body)
    x.set(start + comm.rank)
    cupy.cuda.Device().synchronize()
    expected = [start + rank for rank in range(comm.size)]
    wrong = 0
    with np.errstate(over="ignore"):
        for call in range(1000):
            replay()
            expected = model(expected)
            if call % 100 == 0:
                wrong += count_wrong(x.get(), expected[comm.rank])
                eager = comm.allreduce(cupy.asarray(inputs(comm, 100, call))).get()
                wrong += count_wrong(eager, results(comm, 100, call))
    wrong += count_wrong(x.get(), expected[comm.rank])
    assert agree(wrong) == [0] * comm.size


def by_itself(comm: shmemar.Communicator) -> str:
    """When `auto` launches programmatically."""
    return "never" if comm._runtime.shares_gpu else "behind a collective"


@pytest.mark.parametrize("pdl", [True, False, "auto"], ids=["pdl", "no-pdl", "auto"])
def test_a_graph_of_plans_replays_with_inputs_that_change(
    comm: shmemar.Communicator, agree: Any, pytestconfig: pytest.Config, pdl: Any
) -> None:
    """Pairs of collectives right behind one another, between kernels of CuPy."""
    import cupy

    replays, count = pytestconfig.getoption("--replays"), 60
    start = np.arange(count, dtype=np.int64)
    x, y, z = (cupy.empty(count, "i8") for _ in range(3))
    plans = comm.plan_allreduce(x, y, pdl=pdl), comm.plan_allreduce(y, z, pdl=pdl)
    when = {True: "always", False: "never"}.get(pdl, by_itself(comm))
    assert [plan.pdl for plan in plans] == [when, when]

    def body(stream: Any) -> None:
        for k in range(5):
            for plan in plans:
                plan(stream=stream)
            cupy.multiply(z, 5, out=x)
            x.__iadd__((comm.rank + 1) * (k + 1))

    def model(xs: list[Any]) -> list[Any]:
        for k in range(5):
            total = comm.size * sum(xs[1:], xs[0])
            xs = [5 * total + (rank + 1) * (k + 1) for rank in range(comm.size)]
        return xs

    x.set(start + comm.rank)
    body(cupy.cuda.Stream.null)  # loads CuPy's kernels
    replay = capture_with_cupy(body)
    x.set(start + comm.rank)
    cupy.cuda.Device().synchronize()
    expected = [start + rank for rank in range(comm.size)]
    wrong = 0
    with np.errstate(over="ignore"):
        for call in range(replays):
            replay()
            expected = model(expected)
            if call % 100 == 0:
                wrong += count_wrong(x.get(), expected[comm.rank])
                eager = comm.allreduce(cupy.asarray(inputs(comm, 100, call))).get()
                wrong += count_wrong(eager, results(comm, 100, call))
    wrong += count_wrong(x.get(), expected[comm.rank])
    assert agree(wrong) == [0] * comm.size


def test_several_graphs_replay_in_any_order_and_are_captured_again(
    comm: shmemar.Communicator, agree: Any, pytestconfig: pytest.Config
) -> None:
    """Of one collective, of 50 and of 7, by plans and calls, with eager calls between replays."""
    import cupy

    replays, count = pytestconfig.getoption("--replays"), 70
    x, y = cupy.empty(count, "i8"), cupy.empty(count, "i8")
    mix = cupy.ElementwiseKernel("int64 y, int64 own", "int64 x", "x = 5 * y + own", "mix")
    choices: tuple[Any, ...] = ("auto", True)
    plans = [comm.plan_allreduce(x, y, pdl=pdl) for pdl in choices]

    def collective(number: int, stream: Any) -> None:
        if number % 3 == 2:
            comm.allreduce(x, out=y, stream=stream)
        else:
            plans[number % 3](stream=stream)
        mix(y, comm.rank + 1, x)

    def capture(ncollectives: int) -> Callable[[], None]:
        def body(stream: Any) -> None:
            for number in range(ncollectives):
                collective(number, stream)

        return capture_with_cupy(body)

    def model(xs: list[Any], ncollectives: int) -> list[Any]:
        for _ in range(ncollectives):
            total = sum(xs[1:], xs[0])
            xs = [5 * total + rank + 1 for rank in range(comm.size)]
        return xs

    x.fill(0)
    for number in range(3):
        collective(number, None)  # loads the kernels
    lengths = (1, 50, 7)
    graphs = [capture(length) for length in lengths]
    x.set(np.arange(count) + comm.rank)
    cupy.cuda.Device().synchronize()
    expected = [np.arange(count) + rank for rank in range(comm.size)]
    order = np.random.default_rng(7).integers(0, 4, replays)
    wrong = 0
    with np.errstate(over="ignore"):
        for call, which in enumerate(order):
            if which < 3:
                graphs[which]()
                expected = model(expected, lengths[which])
            else:
                collective(2, None)
                cupy.cuda.Device().synchronize()
                expected = model(expected, 1)
            if call % 100 == 0:
                wrong += count_wrong(x.get(), expected[comm.rank])
                graphs[call // 100 % 3] = capture(lengths[call // 100 % 3])
    wrong += count_wrong(x.get(), expected[comm.rank])
    assert agree(wrong) == [0] * comm.size


def test_a_capture_that_fails_on_one_rank_leaves_the_others_as_they_were(
    comm: shmemar.Communicator, agree: Any
) -> None:
    import cupy

    x, y = cupy.empty(900, "f4"), cupy.empty(900, "f4")
    comm.allreduce(x, out=y)  # loads the kernel

    def body(stream: Any) -> None:
        for _ in range(3):
            comm.allreduce(x, out=y, stream=stream)

    if comm.rank == comm.size - 1:
        stream = cupy.cuda.Stream(non_blocking=True)
        with stream:
            stream.begin_capture()
            comm.allreduce(x, out=y, stream=stream)
            with pytest.raises(cupy.cuda.runtime.CUDARuntimeError, match="Capture"):
                cupy.cuda.runtime.deviceSynchronize()
            with pytest.raises(shmemar.ArgumentError, match="invalidated"):
                comm.allreduce(x, out=y, stream=stream)
            with pytest.raises(cupy.cuda.runtime.CUDARuntimeError, match="Invalidated"):
                stream.end_capture()
    else:
        capture_with_cupy(body)
    wrong = 0
    replay = capture_with_cupy(body)
    for call in range(20):
        x.set(inputs(comm, 900, call))
        y.fill(cupy.nan)
        cupy.cuda.Device().synchronize()
        replay()
        wrong += count_wrong(y.get(), results(comm, 900, call))
        wrong += count_wrong(comm.allreduce(x).get(), results(comm, 900, call))
    assert agree(wrong) == [0] * comm.size


def programmatic_edges(stream: Any) -> list[bool]:
    """Of a chain that was captured, from node to node: whether the next one may start early."""
    from cuda.bindings import driver

    def checked(result: tuple[Any, ...]) -> Any:
        assert result[0] == driver.CUresult.CUDA_SUCCESS
        return result[1:]

    _, _, graph, *_ = checked(driver.cuStreamGetCaptureInfo(stream.ptr))
    *_, count = checked(driver.cuGraphGetEdges(graph))
    starts, ends, data, _ = checked(driver.cuGraphGetEdges(graph, count))
    kind = driver.CUgraphDependencyType.CU_GRAPH_DEPENDENCY_TYPE_PROGRAMMATIC
    following = {
        int(start): (int(end), int(edge.type) == int(kind))
        for start, end, edge in zip(starts[:count], ends[:count], data[:count], strict=True)
    }
    (node,) = following.keys() - {end for end, _ in following.values()}
    found = []
    while node in following:
        node, is_programmatic = following[node]
        found.append(is_programmatic)
    return found


def test_a_launch_is_programmatic_where_it_pays(comm: shmemar.Communicator, agree: Any) -> None:
    """By itself right behind another collective alone, never, or always, as the plan says."""
    import cupy

    x, y = cupy.ones(100, "f4"), cupy.empty(100, "f4")
    found: dict[Any, list[bool]] = {}
    choices: tuple[Any, ...] = ("auto", True, False)
    plans = {pdl: comm.plan_allreduce(x, y, pdl=pdl) for pdl in choices}
    comm.allreduce(x, out=y)
    comm.barrier()
    for pdl, plan in plans.items():

        def body(stream: Any, plan: Any = plan, pdl: Any = pdl) -> None:
            plan(stream=stream)
            plan(stream=stream)
            comm.barrier(stream=stream)
            cupy.multiply(y, 1, out=x)
            plan(stream=stream)
            found[pdl] = programmatic_edges(stream)

        cupy.multiply(y, 1, out=x)
        capture_with_cupy(body)()
    # From one plan to the next, to the barrier, to the multiplication, to the last plan.
    behind = by_itself(comm) == "behind a collective"
    assert agree(found["auto"]) == [[behind, behind, False, False]] * comm.size
    assert agree(found[True]) == [[True, behind, False, True]] * comm.size
    assert agree(found[False]) == [[False, False, False, False]] * comm.size


@pytest.mark.parametrize("in_graph", [True, False], ids=["graph", "stream"])
def test_a_programmatic_launch_waits_for_a_kernel_that_triggers_early(
    comm: shmemar.Communicator, agree: Any, in_graph: bool
) -> None:
    """That kernel lets the plan's start at once, and writes its output 50 us later."""
    import cupy

    late = cupy.RawKernel(
        """extern "C" __global__ void late(float *x, const float *from, int n) {
            asm volatile("griddepcontrol.launch_dependents;");
            long long start = clock64();
            while (clock64() - start < 100000) {}
            for (int i = threadIdx.x; i < n; i += blockDim.x) x[i] = from[i];
        }""",
        "late",
    )
    count, wrong = 3000, 0
    fresh, x, y = (cupy.empty(count, "f4") for _ in range(3))
    plan = comm.plan_allreduce(x, y, pdl=True)

    def body(stream: Any) -> None:
        for _ in range(3):
            x.fill(cupy.nan)
            late((1,), (128,), (x, fresh, np.int32(count)))
            plan(stream=stream)

    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        body(stream)  # loads the kernels
    replay = capture_with_cupy(body) if in_graph else None
    for call in range(50):
        fresh.set(inputs(comm, count, call))
        y.fill(cupy.nan)
        cupy.cuda.Device().synchronize()
        if replay is not None:
            replay()
        else:
            with stream:
                body(stream)
            stream.synchronize()
        wrong += count_wrong(y.get(), results(comm, count, call))
    assert agree(wrong) == [0] * comm.size


def test_a_call_like_one_before_is_launched_at_once(
    comm: shmemar.Communicator, agree: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever its arrays hold, wherever they are: of CuPy and torch, with or without `out`."""
    import cupy
    import torch

    runtime = comm._runtime
    calls: list[None] = []
    launch = runtime.launch

    def counted(*arguments: Any) -> None:
        calls.append(None)
        launch(*arguments)

    monkeypatch.setattr(runtime, "launch", counted)
    wrong, counts = 0, []
    side = cupy.cuda.Stream(non_blocking=True)
    with side:
        for call in range(20):
            x = cupy.asarray(inputs(comm, 700, call))
            out = cupy.full(700, cupy.nan, "f4")
            assert comm.allreduce(x, out=out) is out
            new = comm.allreduce(x)
            wrong += count_wrong(out.get(), results(comm, 700, call))
            wrong += count_wrong(new.get(), results(comm, 700, call))
            comm.allreduce(x, out=x)
            wrong += count_wrong(x.get(), results(comm, 700, call))
            counts.append(len(calls))
    with torch.cuda.stream(torch.cuda.ExternalStream(side.ptr)):
        for call in range(20):
            t = torch.from_numpy(inputs(comm, 700, call)).cuda()
            wrong += count_wrong(comm.allreduce(t).cpu().numpy(), results(comm, 700, call))
            counts.append(len(calls))
    # One of each library; a new array is aligned as the first one was.
    assert counts[0] >= 1
    assert agree(counts[1:20] == [counts[0]] * 19) == [True] * comm.size
    assert agree(counts[21:] == [counts[20]] * 19) == [True] * comm.size
    assert agree(wrong) == [0] * comm.size


def test_a_known_call_waits_for_the_stream_that_writes_its_array(
    comm: shmemar.Communicator, agree: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CuPy's current stream writes it 2 ms late, and the call is on another one."""
    import cupy

    spin = cupy.RawKernel(
        'extern "C" __global__ void spin(long long n) { long long t = clock64() + n;'
        " while (clock64() < t) {} }",
        "spin",
    )
    own, other = (cupy.cuda.Stream(non_blocking=True) for _ in range(2))
    fresh, x, y = (cupy.empty(5000, "f4") for _ in range(3))
    comm.allreduce(x, out=y, stream=other)
    launched = []
    monkeypatch.setattr(comm._runtime, "launch", lambda *_: launched.append(1))
    wrong = 0
    for call in range(10):
        fresh.set(inputs(comm, 5000, call))
        x.fill(cupy.nan)
        cupy.cuda.Device().synchronize()
        with own:
            spin((1,), (1,), (np.int64(4_000_000),))
            x[...] = fresh
            comm.allreduce(x, out=y, stream=other)
        other.synchronize()
        wrong += count_wrong(y.get(), results(comm, 5000, call))
    assert not launched  # each was launched at once
    assert agree(wrong) == [0] * comm.size


def test_a_new_tensor_belongs_to_the_stream_of_a_known_call(
    comm: shmemar.Communicator, agree: Any
) -> None:
    """Torch gives memory of the current stream to its next user there, in that stream's order."""
    import torch

    side, wrong = torch.cuda.Stream(), 0
    for call in range(10):
        x = torch.from_numpy(inputs(comm, 700, call)).cuda()
        torch.cuda.synchronize()
        out = comm.allreduce(x, stream=side)
        with torch.cuda.stream(side):
            wrong += count_wrong(out.cpu().numpy(), results(comm, 700, call))
        later = torch.full((700,), float("nan"), device="cuda")
        assert later.data_ptr() != out.data_ptr()
    assert agree(wrong) == [0] * comm.size


def test_forked_streams_of_a_capture_run_one_after_the_other(
    comm: shmemar.Communicator, agree: Any
) -> None:
    """Nothing but the communicator orders the branches' all-reduces, which share slots."""
    import cupy

    count, branches = 20_000, 3
    xs = [cupy.empty(count, "f4") for _ in range(branches)]
    ys = [cupy.empty(count, "f4") for _ in range(branches)]
    comm.prepare(nbytes=1 << 20)
    forked = [cupy.cuda.Stream(non_blocking=True) for _ in range(branches - 1)]

    def body(stream: Any) -> None:
        start = stream.record()
        for side in forked:
            side.wait_event(start)
        for side, x, y in zip((stream, *forked), xs, ys, strict=True):
            for _ in range(4):
                comm.allreduce(x, out=y, stream=side)
        for side in forked:
            stream.wait_event(side.record())

    replay = capture_with_cupy(body)
    wrong = 0
    for call in range(50):
        for branch, x in enumerate(xs):
            x.set(inputs(comm, count, branches * call + branch))
        cupy.cuda.Device().synchronize()
        replay()
        for branch, y in enumerate(ys):
            wrong += count_wrong(y.get(), results(comm, count, branches * call + branch))
    assert agree(wrong) == [0] * comm.size


@pytest.mark.parametrize("library", ["cupy", "torch"])
def test_a_new_output_belongs_to_the_callers_stream(
    comm: shmemar.Communicator, agree: Any, library: str
) -> None:
    import cupy
    import torch

    host, expected = inputs(comm, 3000, 5), results(comm, 3000, 5)
    if library == "cupy":
        stream = cupy.cuda.Stream(non_blocking=True)
        x = cupy.asarray(host)
        cupy.cuda.Device().synchronize()
        out = comm.allreduce(x, stream=stream)
        stream.synchronize()
        got = out.get()
        assert cupy.cuda.get_current_stream() == cupy.cuda.Stream.null
    else:
        stream = torch.cuda.Stream()
        x = torch.from_numpy(host).cuda()
        torch.cuda.synchronize()
        out = comm.allreduce(x, stream=stream)
        stream.synchronize()
        got = out.cpu().numpy()
        assert torch.cuda.current_stream() == torch.cuda.default_stream()
    assert agree(count_wrong(got, expected)) == [0] * comm.size


def test_a_thread_that_has_no_context_may_call(comm: shmemar.Communicator, agree: Any) -> None:
    import cupy

    x, y = cupy.asarray(inputs(comm, 3000, 6)), cupy.empty(3000, "f4")
    cupy.cuda.Device().synchronize()
    with ThreadPoolExecutor(1) as pool:
        pool.submit(comm.allreduce, x, out=y).result()
    cupy.cuda.Device().synchronize()
    assert agree(count_wrong(y.get(), results(comm, 3000, 6))) == [0] * comm.size


def test_the_first_call_inside_a_capture_is_refused(comm: shmemar.Communicator, agree: Any) -> None:
    import cupy

    x = cupy.ones(4, "f4")
    with shmemar.init(comm._bootstrap._comm, backend="nvshmem") as fresh:
        stream = cupy.cuda.Stream(non_blocking=True)
        with stream:
            stream.begin_capture()
            with pytest.raises(shmemar.ArgumentError, match=r"first time while stream.*captured"):
                fresh.allreduce(x, stream=stream)
            stream.end_capture()
        right = bool((fresh.allreduce(x) == comm.size).all())
    assert agree(right) == [True] * comm.size


def test_nothing_is_prepared_or_planned_inside_a_capture(
    comm: shmemar.Communicator, agree: Any
) -> None:
    import cupy

    x = cupy.ones(4, "f4")
    with shmemar.init(comm._bootstrap._comm, backend="nvshmem") as fresh:
        stream = cupy.cuda.Stream(non_blocking=True)
        with stream:
            stream.begin_capture()
            for call in (fresh.prepare, lambda: fresh.plan_allreduce(x, x)):
                with pytest.raises(shmemar.ArgumentError, match=r"while stream.*captured"):
                    call()
            stream.end_capture()
        fresh.prepare(nbytes=64)
        right = bool((fresh.allreduce(x) == comm.size).all())
    assert agree(right) == [True] * comm.size


def test_an_array_that_cant_be_made_is_not_supported_without_out(
    comm: shmemar.Communicator,
) -> None:
    from numba import cuda

    x = cuda.to_device(np.ones(4, np.float32))
    ok, why = comm.supports(x)
    assert not ok
    assert why.startswith("out is None, and x is numba")
    assert comm.supports(x, out=x) == (True, "one_shot/ll")


def nodes_of(stream: Any) -> list[str]:
    """Types of the nodes that were captured so far."""
    from cuda.bindings import driver

    def checked(result: tuple[Any, ...]) -> Any:
        assert result[0] == driver.CUresult.CUDA_SUCCESS
        return result[1:]

    _, _, graph, *_ = checked(driver.cuStreamGetCaptureInfo(stream.ptr))
    _, count = checked(driver.cuGraphGetNodes(graph))
    nodes, _ = checked(driver.cuGraphGetNodes(graph, count))
    return [checked(driver.cuGraphNodeGetType(node))[0].name for node in nodes[:count]]


def test_a_collective_is_one_node_of_a_graph_at_a_plans_first_call_too(
    comm: shmemar.Communicator, agree: Any
) -> None:
    import cupy

    xs = [cupy.full(count, comm.rank + 1, "f4") for count in (1, 3000, 1 << 20)]
    plans = [comm.plan_allreduce(x) for x in xs]
    found: list[str] = []

    def body(stream: Any) -> None:
        for plan in plans:
            plan(stream=stream)
        comm.allreduce(xs[0], out=plans[0].out, stream=stream)
        found.extend(nodes_of(stream))

    replay = capture_with_cupy(body)
    assert agree(found) == [["CU_GRAPH_NODE_TYPE_KERNEL"] * 4] * comm.size
    total = comm.size * (comm.size + 1) / 2
    for _ in range(3):
        replay()
    right = all(bool((plan.out == total).all()) for plan in plans)
    assert agree(right) == [True] * comm.size


def test_a_plan_launches_by_itself_until_something_is_not_as_usual(
    comm: shmemar.Communicator, agree: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    import cupy

    runtime = comm._runtime
    calls: list[None] = []
    launch = runtime.launch

    def counted(*arguments: Any) -> None:
        calls.append(None)
        launch(*arguments)

    monkeypatch.setattr(runtime, "launch", counted)
    x = cupy.full(3000, comm.rank + 1, "f4")
    plan = comm.plan_allreduce(x)
    streams = [cupy.cuda.Stream(non_blocking=True) for _ in range(2)]
    cupy.cuda.Device().synchronize()
    counts = []
    for stream in (streams[0], streams[0], streams[1], streams[1], streams[0]):
        for _ in range(10):
            plan(stream=stream)
        counts.append(len(calls))
    cupy.cuda.Device().synchronize()
    right = bool((plan.out == comm.size * (comm.size + 1) / 2).all())
    # Each change of the stream takes the long way, once.
    assert agree((counts, right)) == [([1, 1, 2, 2, 3], True)] * comm.size


def test_a_plan_of_a_closed_communicator_launches_nothing(comm: shmemar.Communicator) -> None:
    import cupy

    with shmemar.init(comm._bootstrap._comm, backend="nvshmem") as fresh:
        plan = fresh.plan_allreduce(cupy.ones(4, "f4"))
        plan()
        cupy.cuda.Device().synchronize()
    with pytest.raises(shmemar.ClosedError):
        plan()


def test_the_grid_fits_the_gpu_and_is_the_same_on_all_ranks(
    comm: shmemar.Communicator, agree: Any
) -> None:
    import cupy

    comm.allreduce(cupy.ones(1 << 20, "f4"))
    kernels = list(comm._runtime._kernels.values())  # type: ignore[attr-defined]
    assert kernels
    for kernel in kernels:
        assert kernel.local_nbytes == 0
        assert 1 <= kernel.max_blocks * comm._runtime._job.ranks_per_gpu <= kernel.resident_blocks  # type: ignore[attr-defined]
    caps = agree([kernel.max_blocks for kernel in kernels])
    assert caps == [caps[0]] * comm.size


def test_a_heap_too_small_is_refused_with_sizes_and_the_variable(
    comm: shmemar.Communicator,
) -> None:
    with pytest.raises(
        shmemar.BackendUnavailableError,
        match=r"bytes of symmetric memory do not fit: of \d+ bytes \d+ are in use.*HEAP_NBYTES",
    ):
        shmemar.init(comm._bootstrap._comm, backend="nvshmem", scratch_nbytes=1 << 40)


def test_a_gpu_that_is_not_there_is_refused(comm: shmemar.Communicator) -> None:
    with pytest.raises(shmemar.BackendUnavailableError, match="device is 99; expected 0 to"):
        shmemar.init(comm._bootstrap._comm, backend="nvshmem", device=99)
