"""Variables of the environment that steer what is measured, to be kept with results."""

from __future__ import annotations

import os

__all__ = ["steering_variables"]

_PREFIXES = ("SHMEMAR_", "NVSHMEM_", "NCCL_", "CUDA_", "TORCH_SYMM_MEM_", "OMP_")


def steering_variables() -> dict[str, str]:
    """Those of shmemar, of what it is compared with, and of CUDA, by name; paths are left out."""
    return {
        name: os.environ[name]
        for name in sorted(os.environ)
        if name.startswith(_PREFIXES) and "PATH" not in name
    }
