"""Casts and bit patterns, against struct."""

from __future__ import annotations

import math
import struct
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shmemar.device import words

word = st.integers(0, 0xFFFFFFFF) | st.sampled_from(
    [0x80000000, 0x7FFFFFFF, 0x7F800000, 0xFF800000, 0x7FC00000, 0x7F800001, 0x00000001]
)
int64 = st.integers(-(1 << 63), (1 << 63) - 1)
f32 = st.floats(width=32).map(np.float32)
f64 = st.floats().map(np.float64)


def words_of(layout: str, value: Any) -> tuple[int, ...]:
    data = struct.pack("<" + layout, value)
    return struct.unpack(f"<{len(data) // 4}I", data)


@pytest.mark.parametrize(
    ("value", "low32", "low64"),
    [
        (0, 0, 0),
        (-1, 0xFFFFFFFF, 0xFFFFFFFFFFFFFFFF),
        (1 << 32, 0, 1 << 32),
        ((1 << 64) + 5, 5, 5),
        (np.int64(-2), 0xFFFFFFFE, 0xFFFFFFFFFFFFFFFE),
        (np.uint64(1 << 63), 0, 1 << 63),
    ],
)
def test_casts_wrap_to_plain_integers(value: int, low32: int, low64: int) -> None:
    assert words.u32(value) == low32
    assert words.u64(value) == low64
    assert type(words.u32(value)) is type(words.u64(value)) is int


def test_word_arrays_are_zeros_and_apart() -> None:
    one, other = words.word_array(3), words.word_array(3)
    one[0] = 1
    assert one == [1, 0, 0]
    assert other == [0, 0, 0]


@given(word)
def test_a_word_is_the_bits_of_a_float32_and_back(bits: int) -> None:
    value = words.f32_from_word(bits)
    (expected,) = struct.unpack("<f", struct.pack("<I", bits))
    assert type(value) is np.float32
    assert value == expected or (math.isnan(value) and math.isnan(expected))
    assert words.word_from_f32(value) == bits


@given(f32.filter(lambda value: not math.isnan(value)))
def test_a_float32_has_the_word_that_struct_gives_it(value: np.float32) -> None:
    assert (words.word_from_f32(value),) == words_of("f", float(value))


@given(word, word)
def test_two_words_are_the_bits_of_a_float64_and_back(low: int, high: int) -> None:
    value = words.f64_from_words(low, high)
    (expected,) = struct.unpack("<d", struct.pack("<II", low, high))
    assert type(value) is np.float64
    assert value == expected or (math.isnan(value) and math.isnan(expected))
    assert words.words_from_f64(value) == (low, high)


@given(f64.filter(lambda value: not math.isnan(value)))
def test_a_float64_has_the_words_that_struct_gives_it(value: np.float64) -> None:
    assert words.words_from_f64(value) == words_of("d", float(value))


@given(word)
def test_a_word_is_sign_extended(bits: int) -> None:
    (expected,) = struct.unpack("<i", struct.pack("<I", bits))
    assert words.i64_from_word(bits) == expected


@given(word, word)
def test_two_words_join_to_a_signed_integer(low: int, high: int) -> None:
    (expected,) = struct.unpack("<q", struct.pack("<II", low, high))
    assert words.i64_from_words(low, high) == expected


@given(int64)
def test_an_integer_splits_into_its_words(value: int) -> None:
    assert words.words_from_i64(value) == words_of("q", value)
    assert words.word_from_i64(value) == words_of("q", value)[0]


@given(int64, st.sampled_from([-(1 << 64), 1 << 64, 1 << 65]))
def test_an_integer_beyond_64_bits_wraps_when_it_is_split(value: int, excess: int) -> None:
    assert words.words_from_i64(value + excess) == words_of("q", value)
    assert words.word_from_i64(value + excess) == words_of("q", value)[0]


@given(st.floats(), st.floats())
def test_an_ordered_addition_is_an_addition(left: float, right: float) -> None:
    with np.errstate(all="ignore"):
        total = words.add_ordered(np.float64(left), np.float64(right))
        expected = np.float64(left) + np.float64(right)
    assert type(total) is np.float64
    assert total == expected or (math.isnan(total) and math.isnan(expected))


@given(f32, f32)
def test_a_product_of_float32_is_rounded_once(left: np.float32, right: np.float32) -> None:
    with np.errstate(all="ignore"):
        product = words.mul_rn(left, right)
        exact = float(left) * float(right)  # 48 bits: no rounding
        expected = np.float32(exact)
    assert type(product) is np.float32
    assert product == expected or (math.isnan(product) and math.isnan(expected))


def test_a_product_of_float64_stays_one() -> None:
    product = words.mul_rn(np.float64(1 + 2**-52), np.float64(3))
    assert type(product) is np.float64
    assert product == 3 + 2**-50
