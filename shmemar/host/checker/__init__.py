"""The protocol checker: kernels as plain Python under hostile schedules, on any machine.

:mod:`shmemar.host.checker.checks` is what users call. Below it: runs and their reports
(`checked_run`, `check_runs`, `verdict`, `moves`), what is run (`calls`, `drawn_calls`,
`checked_calls`, `barrier_mail`, `checked_kernels`, `checked_arrays`), the machine
(`hostile_machine`, `turns`, `schedule`, `launcher`, `threads`, `meetings`), its memory
(`weak_memory`, `messages`, `memory_map`, `packet_log`), and the negative controls (`controls`,
`guards`, `control_kernels`).
"""

from __future__ import annotations

from shmemar.host.checker.checks import (
    MULTICAST_PAIRS,
    PAIRS,
    Call,
    CallSequence,
    CheckReport,
    Failure,
    ScheduleKind,
    Symmetric,
    Verdict,
    check,
    check_kernel,
    check_sequence,
)

__all__ = [
    "MULTICAST_PAIRS",
    "PAIRS",
    "Call",
    "CallSequence",
    "CheckReport",
    "Failure",
    "ScheduleKind",
    "Symmetric",
    "Verdict",
    "check",
    "check_kernel",
    "check_sequence",
]
