"""Which kernel is fastest at which size, before anything was measured on the machine at hand.

Thresholds stand between the sizes that were measured. Where nothing was, the origin says so;
``python -m shmemar tune`` measures.
"""

from __future__ import annotations

from shmemar.host.selector import Band, Candidate, Table
from shmemar.spec import MAX_RANKS, Kernel, Protocol

__all__ = ["default_table"]

_KI, _MI = 1 << 10, 1 << 20

_ONE_LL = Candidate(Kernel.ONE_SHOT, Protocol.LL)
_ONE_SENTINEL = Candidate(Kernel.ONE_SHOT, Protocol.SENTINEL)
_TWO_LL = Candidate(Kernel.TWO_SHOT, Protocol.LL)
_TWO_SENTINEL = Candidate(Kernel.TWO_SHOT, Protocol.SENTINEL)
_BARRIER_PULL = Candidate(Kernel.BARRIER_TWO_SHOT, Protocol.PULL)
_BARRIER_PUSH = Candidate(Kernel.BARRIER_TWO_SHOT, Protocol.PUSH)

_LL_FIRST = (_ONE_LL, _ONE_SENTINEL)
_SENTINEL_FIRST = (_ONE_SENTINEL, _ONE_LL)
_TWO_SHOT = (_TWO_SENTINEL, _TWO_LL)
_BARRIER = (_BARRIER_PULL, _BARRIER_PUSH)


def _table(origin: str, *bands: tuple[int | None, tuple[Candidate, ...]]) -> Table:
    return Table(origin, tuple(Band(up_to, candidates) for up_to, candidates in bands))


_ONE_RANK = _table("the design: with one rank there is nobody to wait for", (None, _LL_FIRST))

_OWN_GPUS = {
    2: _table(
        "two H200s over NVLink (graphs, float32, 128 bytes to 8 MiB, 2026-11)",
        (8 * _KI, _LL_FIRST),
        (1 * _MI, _SENTINEL_FIRST),
        (None, (_TWO_SENTINEL, _BARRIER_PUSH, _BARRIER_PULL, _TWO_LL)),
    ),
    4: _table(
        "four H200s over NVLink (graphs, float32, 128 bytes to 8 MiB, 2026-11; not of 3)",
        (8 * _KI, _LL_FIRST),
        (64 * _KI, _SENTINEL_FIRST),
        (256 * _KI, (_ONE_SENTINEL, _TWO_LL, _ONE_LL)),
        (1 * _MI, (_TWO_SENTINEL, _TWO_LL, _BARRIER_PUSH, _BARRIER_PULL)),
        (None, (_TWO_SENTINEL, _BARRIER_PUSH, _BARRIER_PULL, _TWO_LL)),
    ),
    8: _table(
        "four H200s and bytes sent: 5 to 8 GPUs were not measured",
        (8 * _KI, _LL_FIRST),
        (128 * _KI, _SENTINEL_FIRST),
        (4 * _MI, _TWO_SHOT + _BARRIER),
        (None, _BARRIER + _TWO_SHOT),
    ),
    MAX_RANKS: _table(
        "four H200s and bytes sent: more than 8 GPUs were not measured",
        (2 * _KI, _LL_FIRST),
        (32 * _KI, _SENTINEL_FIRST),
        (4 * _MI, _TWO_SHOT + _BARRIER),
        (None, _BARRIER + _TWO_SHOT),
    ),
}

_SHARED_GPU = {
    2: _table(
        "2 ranks on one H200 (graphs, float32, 128 bytes to 8 MiB, 2026-11)",
        (2 * _KI, _LL_FIRST),
        (1 * _MI, _SENTINEL_FIRST),
        (None, _TWO_SHOT + _BARRIER),
    ),
    4: _table(
        "4 ranks on one H200 (graphs, float32, 128 bytes to 8 MiB, 2026-11)",
        (2 * _KI, _LL_FIRST),
        (128 * _KI, _SENTINEL_FIRST),
        (2 * _MI, _TWO_SHOT + _BARRIER),
        (None, _BARRIER + _TWO_SHOT),
    ),
    8: _table(
        "8 ranks on one H200 (graphs, float32, 128 bytes to 256 KiB, 2026-11), and beyond 4",
        (8 * _KI, _LL_FIRST),
        (64 * _KI, (_ONE_SENTINEL, _TWO_LL, _ONE_LL)),
        (4 * _MI, _TWO_SHOT + _BARRIER),
        (None, _BARRIER + _TWO_SHOT),
    ),
    MAX_RANKS: _table(
        "16 ranks on one H200 (graphs, float32, 128 bytes to 64 KiB, 2026-11), and beyond 4",
        (2 * _KI, _LL_FIRST),
        (16 * _KI, _SENTINEL_FIRST),
        (4 * _MI, (_TWO_LL, _TWO_SENTINEL, *_BARRIER)),
        (None, _BARRIER + _TWO_SHOT),
    ),
}


def default_table(nranks: int, *, shares_gpu: bool) -> Table:
    """Return the table of a number of ranks.

    Args:
        nranks: Ranks of the communicator.
        shares_gpu: Whether any of them run on the same GPU.
    """
    if nranks == 1:
        return _ONE_RANK
    tables = _SHARED_GPU if shares_gpu else _OWN_GPUS
    return next(table for most, table in tables.items() if nranks <= most)
