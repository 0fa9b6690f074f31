"""The few array operations that the model is written in, of numpy and of torch.

Beside them the model uses what both libraries spell alike: ``+ * @ [...]``, ``reshape``, ``mT``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from shmemar.errors import BackendUnavailableError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from benchmarks.apps.communicators import Communicator

__all__ = ["NumpyOps", "Ops", "TorchOps", "ops_for"]

EPSILON = 1e-5
"""Of RMSNorm, as in Llama."""


class Ops(Protocol):
    """Operations on arrays of one library, whose activations have one type.

    Attributes:
        dtype: ``bfloat16`` or ``float32``, of what `narrow`, `matmul` and `zeros` return.
    """

    dtype: str

    def narrow(self, x: Any) -> Any:
        """Round to `dtype`."""

    def wide(self, x: Any) -> Any:
        """Convert to float32."""

    def zeros(self, *shape: int) -> Any:
        """An array of zeros."""

    def integers(self, values: Any) -> Any:
        """An int64 array."""

    def matmul(self, x: Any, w: Any) -> Any:
        """``x @ w.mT``, accumulated in float32; `w` is converted to the type of `x`."""

    def matmul_into(self, x: Any, w: Any, out: Any) -> None:
        """The same, of matrices, into `out`."""

    def rms_norm(self, x: Any, weight: Any) -> Any:
        """``x / sqrt(mean(x**2) + EPSILON) * weight`` over the last axis, rounded once."""

    def silu(self, x: Any) -> Any:
        """``x / (1 + exp(-x))`` of float32."""

    def masked_softmax(self, x: Any, mask: Any) -> Any:
        """Softmax of float32 over the last axis, where `mask` is True, and 0 elsewhere."""

    def concat(self, arrays: Sequence[Any], axis: int) -> Any:
        """Join along an axis."""

    def take(self, table: Any, index: Any) -> Any:
        """Rows of a table; the index is an array, of the same device."""

    def put(self, array: Any, axis: int, index: Any, value: Any) -> None:
        """Overwrite entry `index` (an array of one) along an axis; `value` has extent 1 there."""

    def argmax(self, x: Any) -> Any:
        """Over the last axis; the first of equals."""

    def buffer(self, comm: Communicator, *shape: int) -> Any:
        """An array of `dtype` in memory that the communicator's collectives take as it is."""

    def host(self, x: Any) -> np.ndarray[Any, Any]:
        """Copy integers or float32 to numpy."""


class NumpyOps:
    """Operations of numpy. bfloat16 is that of ml_dtypes; its products are those of float32."""

    def __init__(self, dtype: str) -> None:
        """Choose the type of activations.

        Raises:
            BackendUnavailableError: It is bfloat16, and ml_dtypes is missing.
        """
        self.dtype = dtype
        if dtype == "bfloat16":
            try:
                import ml_dtypes  # noqa: F401 - gives numpy its bfloat16
            except ImportError as error:
                raise BackendUnavailableError(
                    "dtype is 'bfloat16', which numpy has with ml_dtypes alone; install that, or "
                    "take --dtype float32."
                ) from error
        self._dtype = np.dtype(dtype)

    def narrow(self, x: Any) -> Any:
        """As of `Ops`."""
        return x.astype(self._dtype, copy=False)

    def wide(self, x: Any) -> Any:
        """As of `Ops`."""
        return x.astype(np.float32, copy=False)

    def zeros(self, *shape: int) -> Any:
        """As of `Ops`."""
        return np.zeros(shape, self._dtype)

    def integers(self, values: Any) -> Any:
        """As of `Ops`."""
        return np.array(values, np.int64)

    def matmul(self, x: Any, w: Any) -> Any:
        """As of `Ops`."""
        return self.narrow(self.wide(x) @ self.wide(w).mT)

    def matmul_into(self, x: Any, w: Any, out: Any) -> None:
        """As of `Ops`."""
        out[...] = self.matmul(x, w)

    def rms_norm(self, x: Any, weight: Any) -> Any:
        """As of `Ops`."""
        wide = self.wide(x)
        scale = 1 / np.sqrt((wide * wide).mean(-1, keepdims=True) + np.float32(EPSILON))
        return self.narrow(wide * scale * self.wide(weight))

    def silu(self, x: Any) -> Any:
        """As of `Ops`."""
        with np.errstate(over="ignore"):  # exp(-x) is infinite, and the quotient zero
            return x / (1 + np.exp(-x))

    def masked_softmax(self, x: Any, mask: Any) -> Any:
        """As of `Ops`."""
        masked = np.where(mask, x, -np.inf).astype(np.float32, copy=False)
        weights = np.exp(masked - masked.max(-1, keepdims=True))
        return weights / weights.sum(-1, keepdims=True)

    def concat(self, arrays: Sequence[Any], axis: int) -> Any:
        """As of `Ops`."""
        return np.concatenate(arrays, axis)

    def take(self, table: Any, index: Any) -> Any:
        """As of `Ops`."""
        return np.take(table, index, 0)

    def put(self, array: Any, axis: int, index: Any, value: Any) -> None:
        """As of `Ops`."""
        np.moveaxis(array, axis, 0)[index] = np.moveaxis(value, axis, 0)

    def argmax(self, x: Any) -> Any:
        """As of `Ops`."""
        return x.argmax(-1)

    def buffer(self, comm: Communicator, *shape: int) -> Any:
        """As of `Ops`."""
        return comm.empty(shape, self._dtype)

    def host(self, x: Any) -> np.ndarray[Any, Any]:
        """As of `Ops`."""
        return np.array(x)


class TorchOps:
    """Operations of torch on the current GPU; all of them can be captured into a CUDA graph."""

    def __init__(self, dtype: str, ordinal: int) -> None:
        """Choose the type of activations, and make the GPU torch's current one.

        Raises:
            BackendUnavailableError: torch is missing, or sees no GPU.
        """
        try:
            import torch
        except ImportError as error:
            raise BackendUnavailableError(
                f"torch could not be loaded ({error}), which decode uses on GPUs; install it."
            ) from error
        if not torch.cuda.is_available():
            raise BackendUnavailableError("torch finds no GPU; install a build for this CUDA.")
        torch.cuda.set_device(ordinal)
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
        self.torch = torch
        self.dtype = dtype
        self._dtype = getattr(torch, dtype)
        self._device = torch.device("cuda", ordinal)

    def narrow(self, x: Any) -> Any:
        """As of `Ops`."""
        return x.to(self._dtype)

    def wide(self, x: Any) -> Any:
        """As of `Ops`."""
        return x.float()

    def zeros(self, *shape: int) -> Any:
        """As of `Ops`."""
        return self.torch.zeros(shape, dtype=self._dtype, device=self._device)

    def integers(self, values: Any) -> Any:
        """As of `Ops`."""
        return self.torch.tensor(values, dtype=self.torch.int64, device=self._device)

    def matmul(self, x: Any, w: Any) -> Any:
        """As of `Ops`."""
        return self.torch.matmul(x, w.to(x.dtype).mT)

    def matmul_into(self, x: Any, w: Any, out: Any) -> None:
        """As of `Ops`."""
        self.torch.matmul(x, w.to(x.dtype).mT, out=out)

    def rms_norm(self, x: Any, weight: Any) -> Any:
        """As of `Ops`: torch's, which computes in float32."""
        return self.torch.nn.functional.rms_norm(x, weight.shape, weight.to(x.dtype), EPSILON)

    def silu(self, x: Any) -> Any:
        """As of `Ops`."""
        return self.torch.nn.functional.silu(x)

    def masked_softmax(self, x: Any, mask: Any) -> Any:
        """As of `Ops`."""
        return self.torch.softmax(x.masked_fill(~mask, float("-inf")), -1)

    def concat(self, arrays: Sequence[Any], axis: int) -> Any:
        """As of `Ops`."""
        return self.torch.cat(list(arrays), axis)

    def take(self, table: Any, index: Any) -> Any:
        """As of `Ops`."""
        return self.torch.index_select(table, 0, index)

    def put(self, array: Any, axis: int, index: Any, value: Any) -> None:
        """As of `Ops`."""
        array.index_copy_(axis, index, value)

    def argmax(self, x: Any) -> Any:
        """As of `Ops`; which of equals is torch's choice, the same on all ranks."""
        return x.argmax(-1)

    def buffer(self, comm: Communicator, *shape: int) -> Any:
        """As of `Ops`: integers of CuPy's, seen as floats, as CuPy may have no bfloat16."""
        bits = {"bfloat16": "int16", "float32": "int32"}[self.dtype]
        return self.torch.from_dlpack(comm.empty(shape, bits)).view(self._dtype)

    def host(self, x: Any) -> np.ndarray[Any, Any]:
        """As of `Ops`, behind what is enqueued."""
        return np.asarray(x.cpu().numpy())


def ops_for(xp: Any, dtype: str) -> Ops:
    """Choose by the module of a communicator's arrays: numpy's operations, or torch's for CuPy.

    Raises:
        BackendUnavailableError: What it needs is missing.
    """
    if xp is np:
        return NumpyOps(dtype)
    return TorchOps(dtype, int(xp.cuda.Device().id))
