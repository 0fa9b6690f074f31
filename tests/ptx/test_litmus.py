"""What the litmus test of lines becomes: one addition a peer, and nothing on the stack."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest

from shmemar.device.litmus import litmus, planted_litmus
from shmemar.host.launch import compile_ptx
from shmemar.user_spec import ADDRESSES, BufferSpec, UserKernelSpec
from tests.ptx.assembler import Assembly, assemble

if TYPE_CHECKING:
    from collections.abc import Callable


def compiled(kernel: Callable[..., None], nranks: int) -> Assembly:
    buffer = BufferSpec.of(nranks, "uint32", threads=1024, slots=1, protocol="ll")
    spec = UserKernelSpec(kernel, buffer, (ADDRESSES, ADDRESSES, "int64", "int64"))
    return assemble(compile_ptx(spec, buffer.layout, rank=1, compute_capability=(9, 0)))


@pytest.mark.parametrize("nranks", [2, 4, 8])
@pytest.mark.parametrize(
    ("kernel", "additions"), [(litmus, 1), (planted_litmus, 2)], ids=["litmus", "planted"]
)
def test_a_line_is_added_to_by_one_instruction_a_peer(
    kernel: Callable[..., None], additions: int, nranks: int
) -> None:
    assembly = compiled(kernel, nranks)
    added = len(re.findall(r"red\.relaxed\.sys\.global\.add\.v4\.f32", assembly.ptx))
    assert added == additions * nranks
    # The count, and the line behind the meeting: of the own warp's, and of another's.
    assert assembly.count("ld.relaxed.sys.global.b32") == 2
    assert assembly.count("ld.relaxed.sys.global.v2.b64") == 2
    assert assembly.count("call") == 0
    assert ".local" not in assembly.ptx
    assert (assembly.stack_nbytes, assembly.spill_nbytes) == (0, 0)
