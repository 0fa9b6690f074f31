"""The report on machine code, with tools that say what CUDA's say."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from benchmarks.machine_code import disassemble
from shmemar.dtypes import DTYPES, ReduceOp
from shmemar.errors import ShmemarError
from shmemar.spec import Kernel, KernelSpec, Protocol

if TYPE_CHECKING:
    from pathlib import Path

SPEC = KernelSpec(Kernel.ONE_SHOT, Protocol.LL, DTYPES["float32"], ReduceOp.SUM, 2)

PTXAS = """
echo "ptxas info    : 0 bytes gmem" >&2
echo "    16 bytes stack frame, 8 bytes spill stores, 4 bytes spill loads" >&2
echo "ptxas info    : Used 28 registers, used 0 barriers" >&2
"""
CUOBJDUMP = """cat <<'END'
\tcode for sm_90
        /*0000*/                   LDC R1, c[0x0][0x28] ;           /* 0x00000a00ff017b82 */
                                                                     /* 0x000fe40000000800 */
        /*0010*/              @!P0 LDG.E.64 R4, desc[UR4][R2.64] ;  /* 0x0000000402048981 */
        /*0020*/                   LDG.E.64 R6, desc[UR4][R2.64] ;  /* 0x0000000402048981 */
        /*0030*/                   IMAD.WIDE.U32 R2, R0, 0x8, R2 ;  /* 0x0000000402048981 */
        /*0040*/                   IMAD.SHL.U32 R2, R0, 0x8, RZ ;   /* 0x0000000402048981 */
        /*0050*/                   NOP;                             /* 0x0000000402048981 */
END
"""


def install(folder: Path, **tools: str) -> None:
    for name, body in tools.items():
        tool = folder / name
        tool.write_text("#!/bin/sh\n" + body)
        tool.chmod(0o755)


def test_registers_spills_and_mix_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path, ptxas=PTXAS, cuobjdump=CUOBJDUMP)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    code = disassemble(SPEC)
    assert (code.registers, code.stack_nbytes, code.spill_nbytes) == (28, 16, 12)
    assert code.mix == {"LDG.E.64": 2, "IMAD": 2, "LDC": 1}
    assert code.instructions == 5
    assert str(code).endswith("16 B stack, 12 B spilled, 5 instructions: 1 LDC, 2 LDG.E.64")


def test_a_missing_tool_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path, ptxas=PTXAS)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ShmemarError, match="cuobjdump is not on the PATH"):
        disassemble(SPEC)


@pytest.mark.parametrize(
    ("tool", "body", "message"),
    [
        ("ptxas", "echo no such option >&2; exit 1", "ptxas failed:\nno such option"),
        ("ptxas", "echo Used many registers", "ptxas said nothing like"),
    ],
)
def test_a_tool_that_says_something_else_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tool: str, body: str, message: str
) -> None:
    install(tmp_path, **{"ptxas": PTXAS, "cuobjdump": CUOBJDUMP, tool: body})
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    with pytest.raises(ShmemarError, match=message):
        disassemble(SPEC)
