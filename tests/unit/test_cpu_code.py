"""Code of the CPU that another process has compiled."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from shmemar.config import Config
from shmemar.device.kernels import KernelArguments
from shmemar.dtypes import DTYPES, ReduceOp
from shmemar.host import cpu_code
from shmemar.host.cpu_code import CpuCode, generate, load
from shmemar.host.scratch import layout_for
from shmemar.spec import Kernel, KernelSpec, Protocol

if TYPE_CHECKING:
    from pathlib import Path

ARGUMENTS = KernelArguments((1, 2), *range(12))

SUM_OF_WORDS = """
define void @f(ptr %words, i64 %rank, i64 %nthreads, i64 %block_threads, ptr %done) {
  %first = load i64, ptr %words
  %at = getelementptr i64, ptr %words, i64 2
  %third = load i64, ptr %at
  %sum = add i64 %first, %third
  %is_right = icmp eq i64 %sum, %rank
  %found = zext i1 %is_right to i64
  store i64 %found, ptr %done
  ret void
}
"""
"""Comes to its end where the first word and the third, peers[0] and source, make the rank."""


def test_arguments_are_passed_as_words_in_their_order() -> None:
    run = load(CpuCode("f", SUM_OF_WORDS))
    run(ARGUMENTS, 1, 0, 0)
    run(ARGUMENTS._replace(source=8), 9, 0, 0)


def test_a_kernel_that_does_not_come_to_its_end_is_an_error() -> None:
    run = load(CpuCode("f", SUM_OF_WORDS))
    with pytest.raises(MemoryError, match="ended early"):
        run(ARGUMENTS, 2, 0, 0)


def test_the_same_code_is_loaded_once() -> None:
    assert load(CpuCode("f", SUM_OF_WORDS)) is load(CpuCode("f", SUM_OF_WORDS))


def test_code_of_two_kernels_may_have_the_same_names() -> None:
    other = load(CpuCode("f", SUM_OF_WORDS.replace("add i64", "sub i64")))
    other(ARGUMENTS, 1, 0, 0)
    with pytest.raises(MemoryError):
        other(ARGUMENTS._replace(source=8), 9, 0, 0)
    load(CpuCode("f", SUM_OF_WORDS))(ARGUMENTS._replace(source=8), 9, 0, 0)


def test_a_kernel_is_compiled_once_and_its_code_names_no_address(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    spec = KernelSpec(Kernel.ONE_SHOT, Protocol.LL, DTYPES["int32"], ReduceOp.SUM, 1)
    what: Any = spec, layout_for(spec, Config())
    generate.cache_clear()
    code = generate(*what)
    assert generate(*what) is code

    def never(*_: Any) -> CpuCode:
        raise AssertionError("it was compiled again")

    monkeypatch.setattr(cpu_code, "_compile", never)
    generate.cache_clear()  # as in another process
    assert generate(*what) == code
    assert f"@{code.symbol}(" in code.ir.replace('"', "")
    assert "inttoptr (i64" not in code.ir  # an address of this process


@pytest.mark.parametrize(
    ("kernel", "protocol", "dtype"),
    [
        (Kernel.TWO_SHOT, Protocol.SENTINEL, "float64"),
        (Kernel.LL128_ATOMIC, Protocol.SENTINEL, "float32"),
    ],
)
def test_code_names_no_address(kernel: Kernel, protocol: Protocol, dtype: str) -> None:
    spec = KernelSpec(kernel, protocol, DTYPES[dtype], ReduceOp.SUM, 2)
    assert "inttoptr (i64" not in generate(spec, layout_for(spec, Config())).ir
