"""Variables of the environment that steer what is measured, to be kept with results."""

from __future__ import annotations

import os

__all__ = ["nvshmem_may_use_nccl", "steering_variables"]

_PREFIXES = ("SHMEMAR_", "NVSHMEM_", "NCCL_", "CUDA_", "TORCH_SYMM_MEM_", "OMP_")


def steering_variables() -> dict[str, str]:
    """Those of shmemar, of what it is compared with, and of CUDA, by name; paths are left out."""
    return {
        name: os.environ[name]
        for name in sorted(os.environ)
        if name.startswith(_PREFIXES) and "PATH" not in name
    }


def nvshmem_may_use_nccl() -> bool:
    """Whether NVSHMEM hands its collectives over to NCCL where it finds one."""
    return os.environ.get("NVSHMEM_DISABLE_NCCL", "").lower() in ("", "0", "false", "no")
