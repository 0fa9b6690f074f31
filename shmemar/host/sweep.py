"""The sweep behind ``python -m shmemar allreduce``: every size checked, timed and tabled."""

from __future__ import annotations

import hashlib
import time
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING

import numpy as np

from shmemar.errors import ArgumentError
from shmemar.host.arrays import Arrays
from shmemar.host.exact import count_wrong, exact_input, exact_result, numpy_dtype, poison

if TYPE_CHECKING:
    from collections.abc import Iterator

    from shmemar.dtypes import DType, ReduceOp
    from shmemar.host.communicator import Communicator

__all__ = ["HEADER", "Row", "message_sizes", "parse_nbytes", "sweep"]

HEADER = (
    f"#{'size':>11}{'count':>12}{'type':>12}{'op':>6}{'kernel':>24}{'time':>12}{'#wrong':>8}\n"
    f"#{'(B)':>11}{'(elements)':>12}{'':>12}{'':>6}{'':>24}{'(us)':>12}{'':>8}"
)


@dataclass(frozen=True)
class Row:
    """One size of a sweep.

    Attributes:
        nbytes: Bytes of the message.
        count: Elements.
        dtype: Element type.
        op: Operator.
        kernel: Kernel and protocol that ran.
        time_us: Maximum over ranks of each rank's median time from a call to the result.
        wrong: Elements that differed from the exact result, over all calls and ranks, and a
            mismatch of bits between ranks counts as one.
    """

    nbytes: int
    count: int
    dtype: DType
    op: ReduceOp
    kernel: str
    time_us: float
    wrong: int

    def __str__(self) -> str:
        """The row as `HEADER` heads it."""
        return (
            f"{self.nbytes:>12}{self.count:>12}{self.dtype.name:>12}{self.op.value:>6}"
            f"{self.kernel:>24}{self.time_us:>12.1f}{self.wrong:>8}"
        )


def parse_nbytes(text: str) -> int:
    """Read a size such as 8, 64K, 1M or 1G (powers of 1024).

    Raises:
        ArgumentError: Not such a size.
    """
    number, suffix = text[:-1], text[-1:].upper()
    scale = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}.get(suffix)
    if scale is None:
        number, scale = text, 1
    if not number.isdecimal():
        raise ArgumentError(f"size is {text!r}; expected bytes such as 8, 64K or 1M.")
    return int(number) * scale


def message_sizes(smallest: int, largest: int, factor: int) -> list[int]:
    """Sizes in bytes from `smallest` to `largest`, each `factor` times the one before.

    Raises:
        ArgumentError: The sweep would be empty or would not end.
    """
    if smallest < 1 or largest < smallest:
        raise ArgumentError(
            f"sizes are {smallest} to {largest} bytes; expected 1 or more, in rising order."
        )
    if factor < 2:
        raise ArgumentError(f"factor is {factor}; expected 2 or more.")
    sizes = [smallest]
    while sizes[-1] * factor <= largest:
        sizes.append(sizes[-1] * factor)
    return sizes


def sweep(
    comm: Communicator,
    sizes: list[int],
    dtype: DType,
    op: ReduceOp,
    *,
    ncalls: int,
    nwarmups: int,
    in_place: bool,
) -> Iterator[Row]:
    """Yield a row a size. Collective: every rank must consume all rows.

    Args:
        comm: The communicator.
        sizes: Sizes in bytes; rounded down to whole elements, one at least.
        dtype: Element type.
        op: Operator.
        ncalls: Timed calls a size.
        nwarmups: Calls before them; checked like the others.
        in_place: True to reduce in place.
    """
    call = 0
    arrays = Arrays.of(comm.backend)
    for nbytes in sizes:
        count = max(nbytes // dtype.itemsize, 1)
        poisoned = np.empty(count, numpy_dtype(dtype))
        poison(poisoned)
        times_us: list[float] = []
        wrong = 0
        digest = hashlib.sha256()
        for repeat in range(nwarmups + ncalls):
            call += 1
            x = arrays.make(exact_input(dtype, op, count, rank=comm.rank, call=call))
            target = x if in_place else arrays.make(poisoned)
            arrays.synchronize()
            comm.host_barrier()
            start = time.perf_counter()
            comm.allreduce(x, out=target, op=op)
            arrays.synchronize()
            elapsed_us = (time.perf_counter() - start) * 1e6
            if repeat >= nwarmups:
                times_us.append(elapsed_us)
            expected = exact_result(dtype, op, count, nranks=comm.size, call=call)
            got = arrays.host(target)
            wrong += count_wrong(got, expected)
            digest.update(got.tobytes())
        gathered = comm.host_allgather((median(times_us), wrong, digest.hexdigest()))
        yield Row(
            nbytes=count * dtype.itemsize,
            count=count,
            dtype=dtype,
            op=op,
            kernel=comm.explain(nbytes=count * dtype.itemsize, dtype=dtype.name, op=op).kernel,
            time_us=max(item[0] for item in gathered),
            wrong=sum(item[1] for item in gathered) + (len({item[2] for item in gathered}) > 1),
        )
