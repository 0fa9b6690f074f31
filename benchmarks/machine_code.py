"""What the compilers made of each kernel: registers, spills and the mix of instructions.

Needs no GPU, but CUDA's ``ptxas`` and ``cuobjdump`` on the PATH.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from shmemar.config import Config
from shmemar.errors import ShmemarError
from shmemar.host.launch import compile_ptx
from shmemar.host.scratch import layout_for

if TYPE_CHECKING:
    from shmemar.spec import KernelSpec

__all__ = ["TOOLS", "MachineCode", "disassemble"]

TOOLS = ("ptxas", "cuobjdump")

_MEMORY = ("LD", "ST", "ATOM", "RED", "MEMBAR", "FENCE", "CCTL", "ERRBAR")


@dataclass(frozen=True)
class MachineCode:
    """One kernel, assembled.

    Attributes:
        kernel: Its name.
        architecture: Such as ``sm_90``.
        registers: Registers a thread.
        stack_nbytes: Stack frame.
        spill_nbytes: Spilled, stores and loads together.
        instructions: How many there are.
        mix: How many of each operation; operations on memory in full, others without modifiers.
    """

    kernel: str
    architecture: str
    registers: int
    stack_nbytes: int
    spill_nbytes: int
    instructions: int
    mix: dict[str, int]

    def __str__(self) -> str:
        """One line: numbers, then what touches memory."""
        memory = {name: n for name, n in self.mix.items() if name.startswith(_MEMORY)}
        listed = ", ".join(f"{n} {name}" for name, n in sorted(memory.items()))
        return (
            f"{self.kernel} {self.architecture}: {self.registers} registers, {self.stack_nbytes} B "
            f"stack, {self.spill_nbytes} B spilled, {self.instructions} instructions: {listed}"
        )


def disassemble(spec: KernelSpec, *, rank: int = 0, looped: bool = False) -> MachineCode:
    """Compile a kernel for Hopper and take it apart again.

    Raises:
        ShmemarError: A tool is missing.
    """
    missing = [tool for tool in TOOLS if not shutil.which(tool)]
    if missing:
        raise ShmemarError(f"{missing[0]} is not on the PATH; expected CUDA's. Add cuda/bin to it.")
    layout = layout_for(spec, Config())
    ptx = compile_ptx(spec, layout, rank=rank, compute_capability=(9, 0), looped=looped)
    with tempfile.TemporaryDirectory() as folder:
        source, cubin = Path(folder, "kernel.ptx"), Path(folder, "kernel.cubin")
        source.write_text(ptx)
        report = _run("ptxas", "-arch=sm_90", "-v", source, "-o", cubin)
        listing = _run("cuobjdump", "-sass", cubin)
    spills = re.findall(r"(\d+) bytes spill", report)
    mix = _mix(listing)
    return MachineCode(
        kernel=f"{spec.name}{'_looped' if looped else ''}",
        architecture="sm_90",
        registers=int(_found(r"Used (\d+) registers", report)),
        stack_nbytes=int(_found(r"(\d+) bytes stack frame", report)),
        spill_nbytes=sum(map(int, spills)),
        instructions=sum(mix.values()),
        mix=dict(mix.most_common()),
    )


def _mix(listing: str) -> Counter[str]:
    found = re.findall(
        r"^\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_.]*)", listing, re.MULTILINE
    )
    return Counter(
        name if name.startswith(_MEMORY) else name.partition(".")[0]
        for name in found
        if name != "NOP"
    )


def _found(pattern: str, text: str) -> str:
    match = re.search(pattern, text)
    if not match:
        raise ShmemarError(f"ptxas said nothing like {pattern!r}; its output changed:\n{text}")
    return match[1]


def _run(*command: str | Path) -> str:
    done = subprocess.run(
        [*map(str, command)], capture_output=True, text=True, timeout=120, check=False
    )
    if done.returncode:
        raise ShmemarError(f"{command[0]} failed:\n{done.stderr or done.stdout}")
    return done.stdout + done.stderr
