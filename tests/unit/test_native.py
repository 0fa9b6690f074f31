"""Primitives as numba compiles them for the CPU."""

from __future__ import annotations

import inspect
from threading import Thread
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numba import njit, types
from numba.core.errors import TypingError

from shmemar.device import memory, native
from shmemar.device.narrow import two_bf16_from_word, word_from_two_bf16
from shmemar.device.words import (
    two_f16_from_word,
    u32,
    u64,
    word_from_f32,
    word_from_two_f16,
)
from tests.unit.rounding import beside_halfway

native.install()
ADDRESS = types.uint64


def address_of(array: Any) -> np.uint64:
    return np.uint64(array.__array_interface__["data"][0])


def test_additions_of_several_threads_are_all_there() -> None:
    def add_often(address: int, times: int) -> None:
        for _ in range(times):
            memory.red_relaxed_sys_add_u32(address, u32(3))

    compiled = njit(types.void(ADDRESS, types.int64), nogil=True)(add_often)
    word = np.array([7], np.uint32)
    threads = [Thread(target=compiled, args=(address_of(word), 100_000)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert word[0] == 7 + 4 * 3 * 100_000


def test_an_addition_wraps() -> None:
    compiled = njit(types.void(ADDRESS))(
        lambda address: memory.red_relaxed_sys_add_u32(address, u32(2))
    )
    word = np.array([0xFFFFFFFF], np.uint32)
    compiled(address_of(word))
    assert word[0] == 1


def test_an_exchange_returns_what_stood_there() -> None:
    compiled = njit(types.uint32(ADDRESS))(
        lambda address: memory.exch_relaxed_sys_b32(address, u32(5))
    )
    word = np.array([9], np.uint32)
    assert (compiled(address_of(word)), word[0]) == (9, 5)


@pytest.mark.parametrize("nwords", [1, 2, 4])
def test_what_was_stored_is_loaded(nwords: int) -> None:
    def copy_1(source: int, destination: int) -> None:
        memory.st_b32(destination, memory.ld_b32(source))

    def copy_2(source: int, destination: int) -> None:
        first, second = memory.ld_no_allocate_v2_b32(source)
        memory.st_v2_b32(destination, first, second)

    def copy_4(source: int, destination: int) -> None:
        first, second, third, fourth = memory.ld_relaxed_sys_v4_b32(source)
        memory.st_relaxed_sys_v4_b32(destination, first, second, third, fourth)

    copy = njit(types.void(ADDRESS, ADDRESS))({1: copy_1, 2: copy_2, 4: copy_4}[nwords])
    source = np.arange(0xFFFFFF00, 0xFFFFFF08, dtype=np.uint32)
    destination = np.zeros(8, np.uint32)
    copy(address_of(source), address_of(destination))
    assert destination.tolist() == [*source[:nwords].tolist(), *[0] * (8 - nwords)]


def test_four_plain_words_are_copied() -> None:
    def copy(source: int, destination: int) -> None:
        first, second, third, fourth = memory.ld_no_allocate_v4_b32(source)
        memory.st_v4_b32(destination, first, second, third, fourth)

    source, destination = np.arange(7, 13, dtype=np.uint32), np.zeros(6, np.uint32)
    njit(types.void(ADDRESS, ADDRESS))(copy)(address_of(source), address_of(destination))
    assert destination.tolist() == [7, 8, 9, 10, 0, 0]


@pytest.mark.parametrize("nbytes", [1, 2])
def test_parts_of_a_word_are_copied_and_nothing_beside_them(nbytes: int) -> None:
    def copy_1(source: int, destination: int) -> None:
        memory.st_b8(destination, u32(memory.ld_b8(source) | u32(0xABCD00)))

    def copy_2(source: int, destination: int) -> None:
        memory.st_b16(destination, u32(memory.ld_b16(source) | u32(0xABCD0000)))

    copy = njit(types.void(ADDRESS, ADDRESS))({1: copy_1, 2: copy_2}[nbytes])
    source, destination = np.arange(0xF1, 0xF9, dtype=np.uint8), np.zeros(8, np.uint8)
    copy(address_of(source[2:]), address_of(destination[4:]))
    expected = [*[0] * 4, *source[2 : 2 + nbytes].tolist(), *[0] * (4 - nbytes)]
    assert destination.tolist() == expected


def test_the_clock_goes_on_in_nanoseconds() -> None:
    def wait_ns(duration: int) -> int:
        start = memory.globaltimer_ns()
        while u64(memory.globaltimer_ns() - start) < u64(duration):
            memory.relax()
        return u64(memory.globaltimer_ns() - start)

    waited = njit(types.uint64(types.int64))(wait_ns)(20_000_000)
    assert 20_000_000 <= waited < 5_000_000_000


READERS = {"float16": two_f16_from_word, "bfloat16": two_bf16_from_word}
WRITERS = {"float16": word_from_two_f16, "bfloat16": word_from_two_bf16}


@pytest.mark.parametrize("name", READERS)
def test_every_16_bit_float_is_read_as_python_reads_it(name: str) -> None:
    read = READERS[name]

    def read_all(words: Any, bits: Any) -> None:
        for i in range(len(words)):
            low, high = read(words[i])
            bits[2 * i], bits[2 * i + 1] = word_from_f32(low), word_from_f32(high)

    words = np.arange(1 << 16, dtype=np.uint16).view(np.uint32)
    got, expected = np.zeros(1 << 16, np.uint32), np.zeros(1 << 16, np.uint32)
    njit(types.void(types.uint32[:], types.uint32[:]))(read_all)(words, got)
    read_all(words.tolist(), expected)
    numbers = ~np.isnan(expected.view(np.float32))
    assert np.count_nonzero(~numbers) == (2046 if name == "float16" else 254)
    assert (got[numbers] == expected[numbers]).all()
    assert np.isnan(got[~numbers].view(np.float32)).all()


@pytest.mark.parametrize("name", WRITERS)
def test_every_midpoint_is_rounded_as_python_rounds_it(name: str) -> None:
    write = WRITERS[name]

    def write_all(values: Any, words: Any) -> None:
        for i in range(len(words)):
            words[i] = write(values[2 * i], values[2 * i + 1])

    nans = np.array([0x7F800001, 0x7FC01234, 0xFF801000, 0xFFFFFFFF], np.uint32).view(np.float32)
    anywhere = np.random.default_rng(7).integers(0, 1 << 32, 1 << 16).astype(np.uint32)
    values = np.concatenate(
        [beside_halfway(np.dtype(getattr(ml_dtypes, name, name))), nans, anywhere.view(np.float32)]
    )
    got, expected = (np.zeros(len(values) // 2, np.uint32) for _ in range(2))
    njit(types.void(types.float32[:], types.uint32[:]))(write_all)(values, got)
    write_all(values, expected)
    assert (got == expected).all()


@pytest.mark.parametrize("primitive", native._MULTICAST, ids=lambda each: each.__name__)
def test_what_needs_multicast_is_refused_by_its_name(primitive: Any) -> None:
    operands = [ADDRESS] + [types.uint32] * (len(inspect.signature(primitive).parameters) - 1)
    if primitive is memory.fence_proxy_alias:
        operands = []
    expected = f"{primitive.__name__} needs multicast, which the emulated backend has none of"
    with pytest.raises(TypingError, match=expected):
        njit(tuple(operands))(_call_of(primitive, len(operands)))


def _call_of(primitive: Any, noperands: int) -> Any:
    def of_none() -> None:
        primitive()

    def of_one(address: int) -> None:
        primitive(address)

    def of_two(address: int, word: int) -> None:
        primitive(address, word)

    def of_five(address: int, first: int, second: int, third: int, fourth: int) -> None:
        primitive(address, first, second, third, fourth)

    return {0: of_none, 1: of_one, 2: of_two, 5: of_five}[noperands]
