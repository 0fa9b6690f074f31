"""Failure records, read on the host."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from shmemar.errors import CollectiveTimeoutError
from shmemar.host.ranks import name_ranks
from shmemar.layout import FAILURE_DTYPE, NO_SLOT
from shmemar.spec import MULTICAST_CODE, Protocol
from shmemar.user_spec import describe_code

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["failure_from"]


def failure_from(read: Callable[[], bytes], timeout_s: float) -> CollectiveTimeoutError | None:
    """Return the error that a rank's failure record tells of, or None when it tells of none.

    Args:
        read: Returns the record's bytes, which a kernel may be writing.
        timeout_s: The deadline that passed, in seconds.
    """
    if not _record(read())["valid"]:
        return None
    # Again: of the first reading the other words may be older than the one that says all are there.
    record = _record(read())
    bits = int(record["missing_hi"]) << 32 | int(record["missing_lo"])
    missing = tuple(rank for rank in range(bits.bit_length()) if bits >> rank & 1)
    block, thread = divmod(int(record["thread"]), int(record["block_threads"]))
    name, protocol, packets_per_slot = describe_code(int(record["kernel"]))
    if protocol in (Protocol.PULL, Protocol.PUSH):
        where = "its block's barrier"
        expected, seen = (f"{record[name]:#x}" for name in ("expected", "seen"))
    elif record["slot"] == NO_SLOT:
        where, expected, seen = "a signal", f"{record['expected']} or more", str(record["seen"])
    else:
        where = f"slot {record['slot'] // packets_per_slot}"
        expected = f"{record['expected']:#x}" if protocol is Protocol.LL else "data"
        seen = f"{record['seen']:#x}"
    whom, source = name_ranks(missing), f"from rank {record['peer']}"
    if int(record["kernel"]) & MULTICAST_CODE and protocol in (Protocol.PULL, Protocol.PUSH):
        # A count does not say whose part of it is missing.
        whom, source = f"one or more of {whom}", "as the count of all"
    message = (
        f"rank {record['rank']} waited more than {timeout_s:g} s for {whom} in "
        f"{name}: block {block}, thread {thread}, {where}, epoch "
        f"{record['epoch']}, expected {expected} {source}, saw "
        f"{seen}. It failed, is in another call, called "
        "with other arguments (SHMEMAR_CHECK=1 compares them), or is slower than the deadline "
        "(SHMEMAR_TIMEOUT_S). The communicator is broken: close it."
    )
    return CollectiveTimeoutError(message, rank=int(record["rank"]), missing=missing)


def _record(contents: bytes) -> Any:
    return np.frombuffer(contents, FAILURE_DTYPE)[0]
