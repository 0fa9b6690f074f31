"""Kernels compiled for GPUs, kept on disk, loaded, and launched with as little as it takes."""

from __future__ import annotations

import re
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from shmemar.device.kernels import KernelArguments, build, numba_type
from shmemar.errors import ArgumentError, DeviceError, ShmemarError
from shmemar.host.code_cache import kept_cubin, kept_ptx
from shmemar.host.fast_launch import DriverCalls, PreparedLaunch
from shmemar.layout import BLOCK_THREADS
from shmemar.spec import Pdl
from shmemar.user_spec import UserKernelSpec

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from shmemar.layout import AnyLayout, Grid
    from shmemar.user_spec import AnyKernelSpec

__all__ = [
    "Capture",
    "CudaKernel",
    "StreamOrder",
    "capture_of",
    "compile_ptx",
    "copy_to_host",
    "current_context",
    "current_context_handle",
    "is_capturing",
    "load_kernel",
    "raise_refusal",
    "set_current_context",
]


def compile_ptx(
    spec: AnyKernelSpec,
    layout: AnyLayout,
    *,
    rank: int,
    compute_capability: tuple[int, int],
    looped: bool = False,
    programmatic: bool = False,
) -> str:
    """Compile a kernel to PTX, whose rank is a constant of the code.

    numba-cuda asks for the current GPU on the way, though the code is for `compute_capability`.

    Args:
        spec: The kernel.
        layout: Layout of the scratch.
        rank: The rank that will run it.
        compute_capability: Of the GPU, such as ``(9, 0)``.
        looped: True to run the body `repeats` times in one launch, for measuring. The entry then
            has six more parameters: `repeats`, `warmups`, `source_stride`, `destination_stride`,
            `buffer_mask`, `times`. Repeat i reads its input ``i & buffer_mask`` source strides (in
            bytes) further on, and writes its output as many destination strides further on. Each
            block writes the nanoseconds that its repeats after the warm-ups took to
            ``times[block]``, 64 bits each.
        programmatic: True for programmatic dependent launch
            (:mod:`shmemar.device.programmatic`), which takes compute capability 9.0.

    Returns:
        PTX text with one entry, named after the spec, whose parameters are the region's address on
        each rank and then the other fields of `KernelArguments`.
    """
    from numba import cuda, types

    from shmemar.device import memory, ptx
    from shmemar.device.programmatic import begin
    from shmemar.device.registry import device
    from shmemar.device.words import u32, u64

    if looped and programmatic:
        raise ShmemarError(f"{spec.name} can't be both looped and launched programmatically.")
    ptx.install()
    body = device(build(spec, layout, looped=looped))

    def entry(arguments: KernelArguments) -> None:
        body(arguments, rank, u32(cuda.grid(1)), u32(cuda.gridsize(1)), cuda.blockDim.x)

    def programmatic_entry(arguments: KernelArguments) -> None:
        # Never true, but it brings the parameters into the cache of constants, which a launch finds
        # cold, while the kernel before still runs: 0.05 us (H200, in a CUDA graph, 2026-12-01).
        addresses = arguments.source | arguments.destination | arguments.epochs | arguments.broken
        numbers = arguments.share | arguments.ncomponents
        if (addresses | arguments.peers[0] | numbers) == u64(0):
            return
        begin()
        body(arguments, rank, u32(cuda.grid(1)), u32(cuda.gridsize(1)), cuda.blockDim.x)

    def looped_entry(
        arguments: KernelArguments,
        repeats: int,
        warmups: int,
        source_stride: int,
        destination_stride: int,
        buffer_mask: int,
        times: int,
    ) -> None:
        start_ns = u64(0)
        for repeat in range(repeats):
            if repeat == warmups:
                start_ns = memory.globaltimer_ns()
            buffer = u64(repeat & buffer_mask)
            here = KernelArguments(
                arguments.peers,
                arguments.source + buffer * u64(source_stride),
                arguments.destination + buffer * u64(destination_stride),
                arguments.share,
                arguments.source_vectors,
                arguments.destination_vectors,
                arguments.epochs,
                arguments.broken,
                arguments.timeout_ns,
                arguments.npackets,
                arguments.ncomponents,
                arguments.root,
                arguments.record,
            )
            body(here, rank, u32(cuda.grid(1)), u32(cuda.gridsize(1)), cuda.blockDim.x)
        elapsed_ns = u64(memory.globaltimer_ns() - start_ns)
        if cuda.threadIdx.x == 0:
            at = times + u64(cuda.blockIdx.x) * u64(8)
            memory.st_b32(at, elapsed_ns)
            memory.st_b32(at + u64(4), u64(elapsed_ns >> u64(32)))

    parameters = [numba_type(spec)]
    if looped:
        parameters += [types.int64] * 5 + [types.uint64]
    text, _ = cuda.compile(
        looped_entry if looped else programmatic_entry if programmatic else entry,
        types.void(*parameters),
        device=False,
        abi="numba",
        cc=compute_capability,
    )
    return _tidy(str(text), spec.symbol)


def _tidy(ptx: str, name: str) -> str:
    """Name the entry and drop what is not used, so that the same kernel is the same text.

    numba's names hold a number that counts the functions of the process.
    """
    lines = [
        line
        for line in ptx.splitlines()
        if not line.startswith("//") and "_ZN08NumbaEnv" not in line
    ]
    text = "\n".join(lines)
    found = re.search(r"\.entry\s+(\w+)", text)
    if not found:
        raise ShmemarError(f"the PTX of {name} has no entry; numba-cuda changed its output.")
    return text.replace(found[1], name)


class CudaKernel:
    """A loaded kernel and its prepared arguments. Not for use by several threads at once.

    Attributes:
        pdl: When it is launched programmatically (:mod:`shmemar.device.programmatic`).
        function: Handle of the function.
        registers: Registers a thread.
        local_nbytes: Local memory a thread, 0 for every kernel here.
        resident_blocks: Blocks of `BLOCK_THREADS` threads that the whole GPU holds at once.
        max_blocks: Blocks that may be launched, as the ranks agreed.
    """

    def __init__(
        self,
        cubin: Any,
        name: str,
        nparameters: int,
        device: Any,
        *,
        pdl: Pdl = Pdl.NEVER,
    ) -> None:
        """Load the entry `name` of a cubin; nothing is left to load at the first launch."""
        from cuda.bindings import driver

        self._object = cubin
        self._kernel = cubin.get_kernel(name)
        attributes = self._kernel.attributes
        self.registers = int(attributes.num_regs)
        self.local_nbytes = int(attributes.local_size_bytes)
        per_multiprocessor = self._kernel.occupancy.max_active_blocks_per_multiprocessor(
            BLOCK_THREADS, 0
        )
        self.resident_blocks = int(per_multiprocessor) * int(device.properties.multiprocessor_count)
        self.max_blocks: int | None = None
        self.pdl = pdl
        self.function = int(_checked(driver.cuKernelGetFunction(self._kernel.handle)))
        _checked(driver.cuFuncLoad(self.function))
        self._launch = DriverCalls.load().launch_kernel
        self._prepared = {
            is_programmatic: PreparedLaunch(
                self.function, nparameters, is_programmatic=is_programmatic
            )
            for is_programmatic in (False, True)
        }

    def leave_shared_memory(self) -> None:
        """Run on multiprocessors set up for kernels with shared memory, of which this one has none.

        A multiprocessor is set up anew only when it is empty. Where ranks share a GPU, and blocks
        that wait for a peer are on all of its multiprocessors, a kernel of that peer's that wants
        more shared memory than they are set up for would wait for them, and they for it.
        """
        from cuda.bindings import driver

        attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT
        all_of_it = driver.CUshared_carveout.CU_SHAREDMEM_CARVEOUT_MAX_SHARED
        _checked(driver.cuFuncSetAttribute(self.function, attribute, int(all_of_it)))

    def launch(
        self, grid: Grid, values: list[int], stream: int, *, is_programmatic: bool = False
    ) -> None:
        """Enqueue the kernel with its parameters' values, 64 bits each.

        Args:
            grid: Blocks and threads.
            values: The parameters.
            stream: Handle of the stream.
            is_programmatic: Whether it may start before the kernel before it has ended.
        """
        prepared = self._prepared[is_programmatic]
        prepared.set_grid(grid.blocks, grid.block_threads)
        prepared.values[:] = values
        prepared.set_stream(stream)
        status = self._launch(prepared.config, self.function, prepared.parameters, 0)
        if status:
            raise_refusal(status)


def load_kernel(
    spec: AnyKernelSpec,
    layout: AnyLayout,
    *,
    rank: int,
    device: Any,
    looped: bool = False,
    pdl: Pdl = Pdl.NEVER,
) -> CudaKernel:
    """Compile for `device`, or find on disk what was compiled before, and load it."""
    from cuda.core import Program, ProgramOptions

    major, minor = device.compute_capability
    options: dict[str, Any] = {
        "rank": rank,
        "compute_capability": (int(major), int(minor)),
        "looped": looped,
        "programmatic": pdl is not Pdl.NEVER,
    }

    def compiled() -> str:
        return compile_ptx(spec, layout, **options)

    if isinstance(spec, UserKernelSpec):
        ptx = compiled()
    else:
        ptx = kept_ptx((spec, layout, options), compiled)
    program = Program(ptx, "ptx", ProgramOptions(arch=f"sm_{device.arch}", name=spec.symbol))
    cubin = kept_cubin(program)
    entry = ptx[ptx.index(f".entry {spec.symbol}") :].partition(")")[0]
    nparameters = len(re.findall(r"\.param \.[busf]64", entry))
    return CudaKernel(cubin, spec.symbol, nparameters, device, pdl=pdl)


@contextmanager
def current_context(context: int) -> Iterator[None]:
    """Make a context current in this thread, and afterwards the one that was before.

    Also when a library that the body called has left another one.
    """
    before = current_context_handle()
    set_current_context(context)
    try:
        yield
    finally:
        set_current_context(before)


def current_context_handle() -> int:
    """The context that is current in this thread; 0 for none."""
    from cuda.bindings import driver

    return int(_checked(driver.cuCtxGetCurrent()))


def set_current_context(context: int) -> None:
    """Make a context current in this thread, unless it is; 0 for none."""
    from cuda.bindings import driver

    if current_context_handle() != context:
        _checked(driver.cuCtxSetCurrent(context))


def copy_to_host(address: int, nbytes: int, ordinal: int) -> NDArray[np.uint8]:
    """Copy memory of a GPU, after everything that this process has enqueued there has ended."""
    from cuda.bindings import driver

    gpu = _checked(driver.cuDeviceGet(ordinal))
    context = _checked(driver.cuDevicePrimaryCtxRetain(gpu))
    try:
        with current_context(int(context)):
            _checked(driver.cuCtxSynchronize())
            contents = np.empty(nbytes, np.uint8)
            _checked(driver.cuMemcpyDtoH(contents.ctypes.data, address, nbytes))
    finally:
        _checked(driver.cuDevicePrimaryCtxRelease(gpu))
    return contents


def copy_on_stream(destination: int, source: int, nbytes: int, stream: int) -> None:
    """Enqueue a copy between two addresses on the GPU, unless they are the same.

    Raises:
        DeviceError: The driver refused it.
    """
    from cuda.bindings import driver

    if destination != source:
        _checked(driver.cuMemcpyAsync(destination, source, nbytes, stream))


def is_done(stream: int) -> bool:
    """Whether all that was enqueued on a stream has ended.

    Raises:
        DeviceError: Some of it failed.
    """
    from cuda.bindings import driver

    result = driver.cuStreamQuery(stream)
    if result[0] == driver.CUresult.CUDA_ERROR_NOT_READY:
        return False
    _checked(result)
    return True


def is_capturing(stream: int) -> bool:
    """Return whether a stream is being captured into a CUDA graph."""
    from cuda.bindings import driver

    none = driver.CUstreamCaptureStatus.CU_STREAM_CAPTURE_STATUS_NONE
    return bool(_checked(driver.cuStreamIsCapturing(stream)) != none)


class Capture(NamedTuple):
    """A capture into a CUDA graph that a stream is in.

    Attributes:
        number: Its number, unique in the process.
        follows: Handles of the nodes that the stream's next one will depend on.
    """

    number: int
    follows: tuple[int, ...]


def capture_of(stream: int) -> Capture | None:
    """The capture that a stream is in; None when it is in none.

    Raises:
        ArgumentError: The capture was invalidated.
    """
    if not is_capturing(stream):
        return None
    from cuda.bindings import driver

    result, status, number, _, follows, *_ = driver.cuStreamGetCaptureInfo(stream)
    _checked((result,))
    if status != driver.CUstreamCaptureStatus.CU_STREAM_CAPTURE_STATUS_ACTIVE:
        raise ArgumentError(
            f"the capture of stream {stream:#x} into a CUDA graph was invalidated by an earlier "
            "error; expected a capture that goes on. Look for what was not allowed in it."
        )
    return Capture(int(number), tuple(int(node) for node in follows or ()))


NO_STREAM = (1 << 64) - 1
"""In the place of a stream's id."""


class StreamOrder:
    """Orders launches on different streams one behind the other, by an event.

    Kernels of one communicator share slots and epochs, so two of them must never run at once. What
    is captured into a graph is ordered likewise within it; replays are for the caller to order.

    Attributes:
        last_stream: Id of the stream of the last launch outside of captures, as an array that
            prepared launches read (:mod:`shmemar.host.fast_launch`).
    """

    def __init__(self) -> None:
        """Make the events, in the current context."""
        from cuda.bindings import driver

        self._driver = driver
        flags = driver.CUevent_flags.CU_EVENT_DISABLE_TIMING
        # An event that was recorded in a capture means nothing outside of it.
        self._events = {
            is_captured: _checked(driver.cuEventCreate(flags)) for is_captured in (False, True)
        }
        self._producers = _checked(driver.cuEventCreate(flags))
        self._last: dict[bool, tuple[int | None, int]] = {}
        self._triggering: Capture | None = None
        self.last_stream = np.full(1, NO_STREAM, np.uint64)

    def before_launch(self, stream: int, capture: Capture | None) -> None:
        """Make `stream`, in `capture`, wait for the last launch, if that was on another one."""
        is_captured = capture is not None
        number = None if capture is None else capture.number
        # Not the handle: a new stream may get that of a destroyed one whose work still runs. A
        # stream that is being captured can't be asked, and can't be destroyed meanwhile.
        own = stream if is_captured else int(_checked(self._driver.cuStreamGetId(stream)))
        last = self._last.get(is_captured)
        if last is not None and last[0] == number and last[1] != own:
            _checked(self._driver.cuStreamWaitEvent(stream, self._events[is_captured], 0))
        self._last[is_captured] = number, own
        if not is_captured:
            self.last_stream[0] = own

    @property
    def event(self) -> int:
        """Handle of the event behind launches outside of captures."""
        return int(self._events[False])

    @property
    def producers(self) -> int:
        """Handle of an event for work of another stream that a launch has to wait for."""
        return int(self._producers)

    def is_behind_trigger(self, capture: Capture | None) -> bool:
        """Whether the next launch of a capture comes right behind one that triggers, and no other.

        To be asked behind `before_launch`, which may make it wait for another one.
        """
        return capture is not None and capture == self._triggering

    def after_launch(self, stream: int, capture: Capture | None, *, triggers: bool = False) -> None:
        """Mark the launch, and whether it lets the next one start early."""
        if capture is not None:
            self._triggering = capture_of(stream) if triggers else None
        _checked(self._driver.cuEventRecord(self._events[capture is not None], stream))

    def close(self) -> None:
        """Free the events."""
        for event in (*self._events.values(), self._producers):
            _checked(self._driver.cuEventDestroy(event))


def raise_refusal(status: int) -> None:
    """Raise what the driver meant by a status that is not 0.

    Raises:
        DeviceError: Always.
    """
    from cuda.bindings import driver

    _checked((driver.CUresult(status),))
    raise DeviceError(f"CUDA refused a call: {status}.")


def _checked(result: tuple[Any, ...]) -> Any:
    """Unpack what cuda.bindings returns, or raise what it says."""
    from cuda.bindings import driver

    status, *values = result
    if status != driver.CUresult.CUDA_SUCCESS:
        _, text = driver.cuGetErrorString(status)
        raise DeviceError(f"CUDA refused a call: {status.name}: {text.decode()}.")
    return values[0] if values else None
