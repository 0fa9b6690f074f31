"""What kernels do for ``avg``, in numpy: for host arrays that MPI reduces, and to check results."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["scale_to_average"]


def scale_to_average(total: NDArray[Any], nranks: int) -> None:
    """Multiply the sum of `nranks` ranks by the reciprocal of their number, in place.

    The components of complex numbers one by one. The reciprocal is rounded to their precision
    first, and each product is rounded to it.

    Args:
        total: A contiguous array of float32, float64, complex64 or complex128.
        nranks: Number of ranks.
    """
    components = total.reshape(-1).view(total.real.dtype)
    components *= components.dtype.type(1) / components.dtype.type(nranks)
