"""A device for numba-cuda to ask, so that kernels compile where there is none."""

from __future__ import annotations

from types import SimpleNamespace

import numba.cuda.dispatcher
import pytest


@pytest.fixture(autouse=True)
def compute_capability_9(monkeypatch: pytest.MonkeyPatch) -> None:
    """Answer numba-cuda's question for the current device."""
    device = SimpleNamespace(compute_capability=(9, 0))
    monkeypatch.setattr(numba.cuda.dispatcher, "get_current_device", lambda: device)
