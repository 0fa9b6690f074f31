"""ptxas, from the package index, and what it reports."""

from __future__ import annotations

import re
import subprocess
from dataclasses import dataclass
from functools import cache
from importlib.metadata import files
from pathlib import Path
from tempfile import TemporaryDirectory


@dataclass(frozen=True)
class Assembly:
    """A kernel's PTX and what ptxas made of it."""

    ptx: str
    registers: int
    stack_nbytes: int
    spill_nbytes: int

    def lines(self, opcode: str) -> list[str]:
        """Instructions that begin with `opcode`."""
        pattern = re.compile(rf"(?<![\w.]){re.escape(opcode)}[\s.][^;]*;")
        return pattern.findall(self.ptx)

    def fused(self) -> list[str]:
        """Products that are added to without being rounded, except those by 1."""
        return [line for line in self.lines("fma") if ", 0d3FF0000000000000, " not in line]

    def count(self, opcode: str) -> int:
        """Number of instructions that begin with `opcode`."""
        return len(self.lines(opcode))


@cache
def ptxas() -> Path:
    """Return the assembler that the test dependencies bring."""
    found = [file.locate() for file in files("nvidia-cuda-nvcc") or () if file.name == "ptxas"]
    assert found, "nvidia-cuda-nvcc brings no ptxas; install the test dependencies"
    return Path(str(found[0]))


def assemble(ptx: str, architecture: str = "sm_90") -> Assembly:
    """Assemble a kernel and read ptxas's report."""
    with TemporaryDirectory() as folder:
        source = Path(folder) / "kernel.ptx"
        source.write_text(ptx)
        output = Path(folder) / "kernel.cubin"
        done = subprocess.run(
            [ptxas(), f"-arch={architecture}", "-v", "-o", output, source],
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
    assert done.returncode == 0, done.stderr
    return Assembly(
        ptx=ptx,
        registers=_number(r"Used (\d+) registers", done.stderr),
        stack_nbytes=_number(r"(\d+) bytes stack frame", done.stderr),
        spill_nbytes=_number(r"(\d+) bytes spill stores", done.stderr)
        + _number(r"(\d+) bytes spill loads", done.stderr),
    )


def _number(pattern: str, report: str) -> int:
    found = re.search(pattern, report)
    assert found, f"ptxas's report has no {pattern!r}:\n{report}"
    return int(found[1])
