"""KernelSpec: what may be compiled, what it is called, and its code in failure records."""

from __future__ import annotations

import pytest

from shmemar.dtypes import DTYPES, ReduceOp, supported_ops
from shmemar.errors import ArgumentError
from shmemar.spec import MAX_RANKS, Kernel, KernelSpec, Protocol


def spec(dtype: str = "float32", op: ReduceOp = ReduceOp.SUM, nranks: int = 4) -> KernelSpec:
    return KernelSpec(Kernel.ONE_SHOT, Protocol.LL, DTYPES[dtype], op, nranks)


SPECS = [
    KernelSpec(kernel, protocol, dtype, op, nranks)
    for kernel in Kernel
    for protocol in Protocol
    for dtype in DTYPES.values()
    for op in supported_ops(dtype)
    for nranks in (1, 2, 3, MAX_RANKS)
]


@pytest.mark.parametrize("nranks", [-1, 0, MAX_RANKS + 1])
def test_a_number_of_ranks_out_of_range_is_refused(nranks: int) -> None:
    with pytest.raises(ArgumentError, match=rf"nranks is {nranks}; expected 1 to {MAX_RANKS}"):
        spec(nranks=nranks)


@pytest.mark.parametrize("dtype", ["complex64", "complex128"])
@pytest.mark.parametrize("op", [ReduceOp.MIN, ReduceOp.MAX])
def test_an_operator_that_the_dtype_lacks_is_refused(dtype: str, op: ReduceOp) -> None:
    with pytest.raises(ArgumentError, match=rf"op is '{op.value}', which {dtype}"):
        spec(dtype, op)


def test_a_name_says_everything() -> None:
    assert spec("complex64", ReduceOp.PROD, 8).name == "one_shot_ll_complex64_prod_8"


@pytest.mark.parametrize("attribute", ["name", "code"])
def test_names_and_codes_are_unique(attribute: str) -> None:
    assert len({getattr(each, attribute) for each in SPECS}) == len(SPECS) > 0


@pytest.mark.parametrize("original", SPECS, ids=lambda each: each.name)
def test_a_code_is_one_word_and_reads_back(original: KernelSpec) -> None:
    assert 0 <= original.code < 1 << 32
    assert KernelSpec.from_code(original.code) == original


@pytest.mark.parametrize("original", SPECS, ids=lambda each: each.name)
def test_packets_of_a_thread_hold_whole_numbers_where_they_are_multiplied(
    original: KernelSpec,
) -> None:
    is_pair = original.dtype.name == "complex128" and original.op is ReduceOp.PROD
    assert original.packets_per_thread == (2 if is_pair else 1)
