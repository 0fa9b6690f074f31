"""The GPUs that a process can see, and the one that it is bound to."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from shmemar.errors import BackendUnavailableError

__all__ = [
    "MIN_COMPUTE_CAPABILITY",
    "GpuFacts",
    "bind_gpu",
    "facts_of",
    "has_multicast",
    "is_under_mps",
    "visible_gpus",
]

MIN_COMPUTE_CAPABILITY = (7, 0)
"""Relaxed operations of system scope; kernels are tuned and tested for 9.0."""


def visible_gpus() -> Any:
    """List the GPUs of this process, as cuda.core devices.

    Raises:
        BackendUnavailableError: There is none, or no driver.
    """
    try:
        from cuda.core import Device

        devices = Device.get_all_devices()
    except Exception as error:
        raise BackendUnavailableError(
            f"no GPU can be used ({type(error).__name__}: {error}). Install a driver and "
            "`pip install shmemar[cu13]`, or use backend='emulated'."
        ) from error
    if not devices:
        raise BackendUnavailableError(
            "no GPU is visible; check CUDA_VISIBLE_DEVICES, or use backend='emulated'."
        )
    return devices


def bind_gpu(ordinal: int | None, local_rank: int, bound: Any) -> Any:
    """Choose a GPU and make it current.

    Args:
        ordinal: The one asked for; None for that of the local rank, modulo the number of GPUs.
        local_rank: Number of this process on its host.
        bound: The GPU that this process is bound to already, or None.

    Raises:
        BackendUnavailableError: It is not there, too old, or not the one that is bound.
    """
    devices = visible_gpus()
    if ordinal is not None and not 0 <= ordinal < len(devices):
        raise BackendUnavailableError(
            f"device is {ordinal}; expected 0 to {len(devices) - 1}, the GPUs that are visible."
        )
    if bound is not None:
        if ordinal not in (None, bound.device_id):
            raise BackendUnavailableError(
                f"device is {ordinal}; expected {bound.device_id}, the GPU that this process's "
                "NVSHMEM started on, or None."
            )
        ordinal = bound.device_id
    device = devices[local_rank % len(devices) if ordinal is None else ordinal]
    capability = tuple(device.compute_capability)
    if capability < MIN_COMPUTE_CAPABILITY:
        raise BackendUnavailableError(
            f"GPU {device.device_id} ({device.name}) has compute capability {capability}; expected "
            f"{MIN_COMPUTE_CAPABILITY} or newer."
        )
    device.set_current()
    return device


def is_under_mps(device: Any) -> bool:
    """Return whether CUDA MPS runs this process's work on a GPU."""
    from cuda.bindings import driver

    attribute = getattr(driver.CUdevice_attribute, "CU_DEVICE_ATTRIBUTE_MPS_ENABLED", None)
    if attribute is None:
        return False
    status, value = driver.cuDeviceGetAttribute(attribute, device.device_id)
    return bool(status == driver.CUresult.CUDA_SUCCESS and value)


def has_multicast(device: Any) -> bool | None:
    """Return whether the driver says that a GPU has multicast; None where it does not know."""
    from cuda.bindings import driver

    attribute = getattr(driver.CUdevice_attribute, "CU_DEVICE_ATTRIBUTE_MULTICAST_SUPPORTED", None)
    if attribute is None:
        return None
    status, value = driver.cuDeviceGetAttribute(attribute, device.device_id)
    return bool(value) if status == driver.CUresult.CUDA_SUCCESS else None


@dataclass(frozen=True)
class GpuFacts:
    """What a rank tells the others of its GPU.

    Attributes:
        name: The model's.
        uuid: Of this one alone.
        compute_capability: Such as ``(9, 0)``.
        atomics: By the uuid of another GPU that the process sees: whether atomic operations on its
            memory are performed there as they are at home, as over NVLink. Empty for what is not
            known.
    """

    name: str
    uuid: str
    compute_capability: tuple[int, int]
    atomics: dict[str, bool] = field(default_factory=dict)


def facts_of(device: Any) -> GpuFacts:
    """Ask the driver about a GPU."""
    from cuda.bindings import driver

    native = driver.CUdevice_P2PAttribute.CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED
    atomics = {}
    for other in visible_gpus():
        if other.uuid != device.uuid:
            pair = device.device_id, other.device_id
            status, value = driver.cuDeviceGetP2PAttribute(native, *pair)
            if status == driver.CUresult.CUDA_SUCCESS:
                atomics[str(other.uuid)] = bool(value)
    major, minor = device.compute_capability
    return GpuFacts(str(device.name), str(device.uuid), (int(major), int(minor)), atomics)
