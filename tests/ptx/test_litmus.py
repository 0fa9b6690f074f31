"""What the litmus test of lines becomes: one addition a peer, and nothing on the stack."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest

from shmemar.device.litmus import KERNELS, PLANTED_KERNELS
from shmemar.host.launch import compile_ptx
from shmemar.user_spec import ADDRESSES, BufferSpec, UserKernelSpec
from tests.ptx.assembler import Assembly, assemble

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping


def compiled(kernel: Callable[..., None], nranks: int) -> Assembly:
    buffer = BufferSpec.of(nranks, "uint32", threads=1024, slots=1, protocol="ll")
    spec = UserKernelSpec(kernel, buffer, (ADDRESSES, ADDRESSES, "int64"))
    return assemble(compile_ptx(spec, buffer.layout, rank=1, compute_capability=(9, 0)))


SUFFIXES = {"float32": "v4.f32", "float16": "noftz.v4.f16x2", "bfloat16": "noftz.v4.bf16x2"}


@pytest.mark.parametrize(
    ("name", "nranks"), [("float32", 2), ("float32", 8), ("float16", 4), ("bfloat16", 4)]
)
@pytest.mark.parametrize(("kernels", "additions"), [(KERNELS, 1), (PLANTED_KERNELS, 2)])
def test_a_line_is_added_to_by_one_instruction_a_peer(
    kernels: Mapping[str, Callable[..., None]], additions: int, name: str, nranks: int
) -> None:
    assembly = compiled(kernels[name], nranks)
    added = re.findall(r"red\.relaxed\.sys\.global\.add\.([\w.]+)", assembly.ptx)
    assert added == [SUFFIXES[name]] * (additions * nranks)
    # The packets of the exchange at the start. Then, of the own warp's lines and of another's, the
    # count, and behind a meeting the line.
    polls, lines = ["v2.b64"] * (nranks - 1), ["b32", "v2.b64"]
    loads = re.findall(r"ld\.relaxed\.sys\.global\.(b32|v2\.b64)", assembly.ptx)
    broken = ["b32"]  # a look at the broken word, in the polls
    assert loads in (polls + broken + 2 * lines, broken + polls + 2 * lines)
    assert assembly.count("call") == 0
    assert ".local" not in assembly.ptx
    assert (assembly.stack_nbytes, assembly.spill_nbytes) == (0, 0)
