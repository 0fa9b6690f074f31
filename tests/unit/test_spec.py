"""KernelSpec: what may be compiled, what it is called, and its code in failure records."""

from __future__ import annotations

import pytest

from shmemar.dtypes import DTYPES, ReduceOp, supported_ops
from shmemar.errors import ArgumentError
from shmemar.spec import (
    MAX_RANKS,
    PACKET_PROTOCOLS,
    PART_RANKS,
    Kernel,
    KernelSpec,
    Protocol,
    why_impossible,
)


def spec(dtype: str = "float32", op: ReduceOp = ReduceOp.SUM, nranks: int = 4) -> KernelSpec:
    return KernelSpec(Kernel.ONE_SHOT, Protocol.LL, DTYPES[dtype], op, nranks)


SPECS = [
    KernelSpec(kernel, protocol, dtype, op, nranks)
    for kernel in Kernel
    for protocol in kernel.protocols
    for dtype in DTYPES.values()
    for op in supported_ops(dtype)
    for nranks in (1, 2, 3, MAX_RANKS)
    if not why_impossible(kernel, protocol, dtype, op, nranks)
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


def test_an_average_of_integers_is_refused() -> None:
    with pytest.raises(ArgumentError, match=r"op is 'avg', which uint8 .*\(an average of integers"):
        spec("uint8", ReduceOp.AVG)


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
    assert original.unit_words == (4 if is_pair else 2)
    needs_two = is_pair and original.protocol is Protocol.LL
    assert original.packets_per_thread == (2 if needs_two else 1)
    assert original.packets_per_thread * original.payload_nbytes % (4 * original.unit_words) == 0


@pytest.mark.parametrize(
    ("nranks", "lanes"),
    [(1, 1), (8, 1), (15, 1), (16, 2), (17, 4), (32, 4), (33, 8), (63, 8), (64, 8)],
)
def test_lanes_share_the_packets_of_many_ranks_and_none_has_more_than_8(
    nranks: int, lanes: int
) -> None:
    specs = {
        kernel: KernelSpec(kernel, Protocol.LL, DTYPES["float32"], ReduceOp.SUM, nranks)
        for kernel in Kernel
        if Protocol.LL in kernel.protocols
    }
    assert specs[Kernel.ONE_SHOT].lanes == lanes
    assert specs[Kernel.TWO_SHOT].lanes == specs[Kernel.BROADCAST].lanes == 1
    assert lanes == 1 or -(-nranks // lanes) <= PART_RANKS


@pytest.mark.parametrize("dtype", [name for name, each in DTYPES.items() if each.is_integer])
def test_integers_have_no_sentinel(dtype: str) -> None:
    with pytest.raises(ArgumentError, match=rf"protocol is sentinel, and dtype {dtype}.*ll"):
        KernelSpec(Kernel.ONE_SHOT, Protocol.SENTINEL, DTYPES[dtype], ReduceOp.SUM, 2)


@pytest.mark.parametrize(
    ("kernel", "protocol", "nbytes", "ngroups"),
    [
        (Kernel.ONE_SHOT, Protocol.LL, 8, 1),
        (Kernel.ONE_SHOT, Protocol.LL, 9, 2),
        (Kernel.ONE_SHOT, Protocol.SENTINEL, 33, 3),
        (Kernel.TWO_SHOT, Protocol.LL, 1, 1),
        (Kernel.TWO_SHOT, Protocol.LL, 32, 1),
        (Kernel.TWO_SHOT, Protocol.LL, 33, 2),
        (Kernel.TWO_SHOT, Protocol.SENTINEL, 65, 2),
    ],
)
def test_threads_of_a_two_shot_kernel_take_a_packet_of_each_share(
    kernel: Kernel, protocol: Protocol, nbytes: int, ngroups: int
) -> None:
    spec = KernelSpec(kernel, protocol, DTYPES["float32"], ReduceOp.SUM, 4)
    assert spec.group_count(nbytes) == ngroups


def atomic(name: str = "float32", op: ReduceOp = ReduceOp.SUM, nranks: int = 4) -> KernelSpec:
    return KernelSpec(Kernel.LL128_ATOMIC, Protocol.SENTINEL, DTYPES[name], op, nranks)


@pytest.mark.parametrize("name", sorted(set(DTYPES) - {"float32", "float16", "bfloat16"}))
def test_lines_are_of_types_that_16_bytes_are_added_of(name: str) -> None:
    with pytest.raises(ArgumentError, match=rf"dtype is {name}.*expected one of.*two_shot"):
        atomic(name)


@pytest.mark.parametrize("op", [ReduceOp.PROD, ReduceOp.MIN, ReduceOp.MAX])
def test_lines_are_added(op: ReduceOp) -> None:
    with pytest.raises(ArgumentError, match=rf"op is '{op.value}'.*sum or avg.*two_shot"):
        atomic(op=op)


@pytest.mark.parametrize(("name", "most"), [("float32", 24), ("float16", 11), ("bfloat16", 8)])
def test_lines_are_of_as_many_ranks_as_their_marks_tell_apart(name: str, most: int) -> None:
    assert atomic(name, nranks=most).nranks == most
    with pytest.raises(ArgumentError, match=rf"nranks is {most + 1}.*at most {most}.*two_shot"):
        atomic(name, nranks=most + 1)


@pytest.mark.parametrize(
    ("name", "count", "lines"),
    [
        # 4 ranks; a share's data lines, and one more for each 31 of them (63 of 16-bit types).
        ("float32", 1, 4),
        ("float32", 4 * 32, 4),
        ("float32", 4 * 3 * 32, 4),
        ("float32", 4 * 3 * 32 + 1, 8),
        ("float32", 4 * 31 * 32, 32),
        ("float32", 4 * 31 * 32 + 1, 36),
        ("bfloat16", 4 * 31 * 64, 32),
        ("bfloat16", 4 * 63 * 64, 64),
        ("bfloat16", 4 * 63 * 64 + 1, 68),
    ],
)
def test_whole_warps_of_lines_carry_a_share_and_what_it_displaces(
    name: str, count: int, lines: int
) -> None:
    spec = atomic(name)
    assert spec.group_count(count * spec.dtype.itemsize) == 8 * lines


REFUSED = [
    (kernel, protocol)
    for kernel in Kernel
    for protocol in Protocol
    if protocol not in kernel.protocols
]


@pytest.mark.parametrize(("kernel", "protocol"), REFUSED)
def test_a_protocol_that_a_kernel_has_not_is_refused(kernel: Kernel, protocol: Protocol) -> None:
    with pytest.raises(ArgumentError) as caught:
        KernelSpec(kernel, protocol, DTYPES["float32"], ReduceOp.SUM, 2)
    text = str(caught.value)
    assert text.startswith(f"protocol is {protocol.value}, and kernel {kernel.value}, ")
    assert f"expected protocol {' or '.join(each.value for each in kernel.protocols)}." in text


def test_protocols_of_kernels_with_barriers_are_others_than_those_of_packets() -> None:
    assert len(REFUSED) == 3 + 3 + 4 + 4 + 3 + 3 + 4 + 4
    for kernel in Kernel:
        assert kernel.has_barriers == (Protocol.PUSH in kernel.protocols)
        has_packets = bool(set(kernel.protocols) & {*PACKET_PROTOCOLS})
        assert kernel.has_code == (kernel.has_barriers != has_packets)


def test_the_alternative_is_named() -> None:
    with pytest.raises(ArgumentError, match="push is for SHMEMAR_KERNEL=barrier_one_shot or bar"):
        KernelSpec(Kernel.TWO_SHOT, Protocol.PUSH, DTYPES["float32"], ReduceOp.SUM, 2)
    with pytest.raises(ArgumentError, match="ll is for SHMEMAR_KERNEL=one_shot or two_shot"):
        KernelSpec(Kernel.BARRIER_ONE_SHOT, Protocol.LL, DTYPES["float32"], ReduceOp.SUM, 2)


@pytest.mark.parametrize(
    ("kernel", "protocol"),
    [
        (Kernel.ONE_SHOT, Protocol.LL),
        (Kernel.TWO_SHOT, Protocol.LL),
        (Kernel.BROADCAST, Protocol.LL),
        (Kernel.LL128_ATOMIC, Protocol.SENTINEL),
        (Kernel.BARRIER_ONE_SHOT, Protocol.PULL),
        (Kernel.BARRIER_TWO_SHOT, Protocol.PUSH),
        (Kernel.BARRIER, Protocol.PUSH),
        (Kernel.STOCK, Protocol.STREAM),
    ],
)
def test_each_kernel_has_a_default_protocol(kernel: Kernel, protocol: Protocol) -> None:
    assert kernel.default_protocol is protocol


@pytest.mark.parametrize("nranks", [1, 2, 8])
def test_places_hold_what_a_pass_stages(nranks: int) -> None:
    def places(kernel: Kernel, protocol: Protocol) -> int:
        return KernelSpec(kernel, protocol, DTYPES["float32"], ReduceOp.SUM, nranks).nplaces

    assert places(Kernel.BARRIER_ONE_SHOT, Protocol.PULL) == 2
    assert places(Kernel.BARRIER_ONE_SHOT, Protocol.PUSH) == 2 * nranks
    assert places(Kernel.BARRIER_TWO_SHOT, Protocol.PULL) == nranks + 1
    assert places(Kernel.BARRIER_TWO_SHOT, Protocol.PUSH) == 2 * nranks
    assert places(Kernel.BARRIER, Protocol.PUSH) == places(Kernel.ONE_SHOT, Protocol.LL) == 0
