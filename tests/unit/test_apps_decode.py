"""The decoder on one rank: against a plain forward pass, its weights, its check, its memory."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from benchmarks.apps.communicators import alone
from benchmarks.apps.decode import Result, summarise, without_communication
from benchmarks.apps.decode_model import Decoder
from benchmarks.apps.decode_ops import NumpyOps, TorchOps, ops_for
from benchmarks.apps.decode_runs import BOUND, ROUNDOFF, Generation, Reference, compare, reference
from benchmarks.apps.decode_shape import ModelShape
from benchmarks.apps.decode_weights import MASK, Weights, _mix, make_weights, uniform
from shmemar.errors import ArgumentError

SMALL = ModelShape(
    hidden=48,
    layers=3,
    heads=6,
    kv_heads=3,
    intermediate=60,
    vocab=70,
    batch=2,
    context=12,
    dtype="float32",
)


def decoder_of(shape: ModelShape, dtype: str | None = None) -> tuple[Decoder, Weights]:
    weights = make_weights(NumpyOps(shape.dtype), shape, 0, 1, 1)
    return Decoder(NumpyOps(dtype or shape.dtype), shape, weights, alone()), weights


def forward(shape: ModelShape, weights: Weights, tokens: np.ndarray[Any, Any]) -> Any:
    """Logits behind every position of one sequence, in float64, without a cache."""

    def norm(x: Any, weight: Any) -> Any:
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-5) * weight

    def rotated(x: Any) -> Any:
        """Turn pairs as complex numbers."""
        half = shape.head_dim // 2
        angles = np.outer(np.arange(len(x)), 10000.0 ** (-np.arange(half) / half))
        turned = (x[:, :half] + 1j * x[:, half:]) * np.exp(1j * angles)
        return np.concatenate([turned.real, turned.imag], -1)

    dim, group = shape.head_dim, shape.heads // shape.kv_heads
    x = weights.embedding[tokens].astype(np.float64)
    causal = np.tril(np.ones((len(tokens), len(tokens)), bool))
    for layer in weights.layers:
        mixed = norm(x, layer.attention_norm) @ layer.query_key_value.T.astype(np.float64)
        each = np.split(mixed, shape.heads + 2 * shape.kv_heads, axis=1)
        outputs = []
        for head in range(shape.heads):
            query = rotated(each[head])
            key = rotated(each[shape.heads + head // group])
            value = each[shape.heads + shape.kv_heads + head // group]
            scores = np.where(causal, query @ key.T / math.sqrt(dim), -np.inf)
            chosen = np.exp(scores - scores.max(-1, keepdims=True))
            outputs.append(chosen / chosen.sum(-1, keepdims=True) @ value)
        x = x + np.concatenate(outputs, 1) @ layer.output.T
        gate, up = np.split(norm(x, layer.mlp_norm) @ layer.gate_up.T.astype(np.float64), 2, 1)
        x = x + (gate / (1 + np.exp(-gate)) * up) @ layer.down.T
    return norm(x, weights.final_norm) @ weights.lm_head.T


@pytest.mark.parametrize(
    "shape",
    [
        SMALL,
        replace(SMALL, kv_heads=6, batch=1),
        replace(SMALL, kv_heads=1, shared_weights=True),
    ],
    ids=["grouped heads", "one sequence", "one kv head, shared weights"],
)
def test_steps_are_a_forward_pass_with_a_cache(shape: ModelShape) -> None:
    decoder, weights = decoder_of(shape)
    logits = []
    for _ in range(shape.context):
        decoder.step()
        logits.append(decoder.logits)
    made = decoder.history(shape.context)
    assert made.shape == (shape.batch, shape.context)
    for row, first in enumerate(decoder.first_tokens()):
        given = np.array([first, *made[row, :-1]])
        expected = forward(shape, weights, given)
        found = np.array([each[row] for each in logits])
        np.testing.assert_allclose(found, expected, rtol=0, atol=2e-5)
        np.testing.assert_array_equal(made[row], expected.argmax(1))
    assert len(np.unique(made)) > 3


def test_a_decoder_begins_again() -> None:
    decoder, _ = decoder_of(SMALL)
    for _ in range(SMALL.context):
        decoder.step()
    first = decoder.history(SMALL.context)
    decoder.reset()
    for _ in range(SMALL.context):
        decoder.step()
    np.testing.assert_array_equal(decoder.history(SMALL.context), first)


def test_sequences_do_not_mix() -> None:
    decoder, _ = decoder_of(SMALL)
    decoder.feed(np.array([5, 9]))
    one, _ = decoder_of(replace(SMALL, batch=1))
    one.feed(np.array([9]))
    for _ in range(6):
        decoder.step()
        one.step()
    np.testing.assert_array_equal(decoder.history(6)[1:], one.history(6))


@pytest.mark.parametrize("size", [2, 3])
def test_ranks_have_slices_of_the_same_model(size: int) -> None:
    shape = replace(SMALL, kv_heads=6, heads=12)
    whole = make_weights(NumpyOps("float32"), shape, 0, 1, 1)
    parts = [make_weights(NumpyOps("float32"), shape, rank, size, 1) for rank in range(size)]
    for number, layer in enumerate(whole.layers):
        others = [each.layers[number] for each in parts]
        width = shape.heads * shape.head_dim
        at = [0, width, width * 3 // 2, width * 2]
        for start, stop in pairwise(at):  # queries, keys, values
            own = (stop - start) // size
            begin = start // size
            joined = [each.query_key_value[begin : begin + own] for each in others]
            np.testing.assert_array_equal(np.concatenate(joined), layer.query_key_value[start:stop])
        gates = np.concatenate([np.split(each.gate_up, 2)[0] for each in others])
        ups = np.concatenate([np.split(each.gate_up, 2)[1] for each in others])
        np.testing.assert_array_equal(np.concatenate([gates, ups]), layer.gate_up)
        for name in ("output", "down"):
            columns = np.concatenate([getattr(each, name) for each in others], 1)
            np.testing.assert_array_equal(columns, getattr(layer, name))
        for name in ("attention_norm", "mlp_norm"):
            np.testing.assert_array_equal(getattr(others[-1], name), getattr(layer, name))


def test_matrices_differ_and_have_the_variance_that_is_said() -> None:
    shape = replace(SMALL, hidden=240, intermediate=300)
    weights = make_weights(NumpyOps("float32"), shape, 0, 1, 1)
    first, second = weights.layers[:2]
    drawn = [
        (first.query_key_value, 1 / 240),
        (second.query_key_value, 1 / 240),
        (first.output, 1 / 240 / 6),
        (first.gate_up, 1 / 240),
        (first.down, 1 / 300 / 6),
        (weights.embedding, 1.0),
        (weights.lm_head, 1 / 240),
    ]
    for matrix, variance in drawn:
        assert matrix.var() == pytest.approx(variance, rel=0.03)
        assert abs(matrix.mean()) < 4 * math.sqrt(variance / matrix.size)
    rows = [matrix.ravel()[:4096] / math.sqrt(variance) for matrix, variance in drawn]
    correlations = np.corrcoef(rows) - np.eye(len(rows))
    assert np.abs(correlations).max() < 5 / math.sqrt(4096)
    other = make_weights(NumpyOps("float32"), shape, 0, 1, 2)
    assert not np.array_equal(other.embedding, weights.embedding)


def test_shared_weights_are_one_layers() -> None:
    shape = replace(SMALL, shared_weights=True)
    weights = make_weights(NumpyOps("float32"), shape, 0, 1, 1)
    assert [each is weights.layers[0] for each in weights.layers] == [True] * shape.layers


def test_integers_wrap_as_they_should() -> None:
    """int64 of numpy, and of torch, overflows; what is kept of it is what whole numbers give."""
    given = np.random.default_rng(0).integers(0, 1 << 32, 1000)
    assert _mix(given).tolist() == [_mix(int(each)) for each in given]
    assert len(set(_mix(np.arange(1000)).tolist())) == 1000
    assert 0 <= _mix(given).min() <= _mix(given).max() <= MASK


def test_slices_do_not_depend_on_how_they_are_made(monkeypatch: pytest.MonkeyPatch) -> None:
    ops = NumpyOps("float32")
    whole = uniform(ops, 7, 50, range(40), range(50), 1.0)
    monkeypatch.setattr("benchmarks.apps.decode_weights.CHUNK", 64)
    np.testing.assert_array_equal(uniform(ops, 7, 50, range(40), range(50), 1.0), whole)
    part = uniform(ops, 7, 50, range(10, 33), range(5, 25), 1.0)
    np.testing.assert_array_equal(part, whole[10:33, 5:25])
    assert -1 <= whole.min() < -0.99 < 0.99 < whole.max() < 1


@pytest.mark.parametrize(("layers", "hidden"), [(1, 64), (4, 128), (16, 128)])
def test_logits_of_bfloat16_are_off_by_less_than_half_the_bound(layers: int, hidden: int) -> None:
    shape = ModelShape(hidden, layers, 8, 4, 3 * hidden, 200, 3, 12, "bfloat16")
    narrow, weights = decoder_of(shape)
    wide = Decoder(NumpyOps("float32"), shape, weights, alone())
    unit = ROUNDOFF["bfloat16"] * math.sqrt(2 * layers + 1)
    off = []
    for _ in range(shape.context):
        narrow.step()
        wide.step()
        wide.feed(narrow._tokens)
        scale = np.sqrt((wide.logits**2).mean())
        off.append(np.abs(narrow.logits - wide.logits).max() / (unit * scale))
    assert 0.5 < max(off) < BOUND / 2


def test_the_check_follows_the_tokens_and_finds_a_wrong_one() -> None:
    shape = replace(SMALL, dtype="bfloat16", vocab=40)
    decoder, weights = decoder_of(shape)
    for _ in range(shape.context):
        decoder.step()
    made = decoder.history(shape.context)
    wide = NumpyOps("float32")
    expected = reference(wide, np, shape, weights, made)
    check = compare(shape, made, expected)
    assert check.is_right
    assert check.total == 24
    assert 12 < check.decided <= 24
    # A wrong token is found, and those behind it are compared with what follows from it.
    row, at = np.argwhere(expected.margins > 0.5)[0]
    planted = made.copy()
    planted[row, at] = (planted[row, at] + 1) % shape.vocab
    again = reference(wide, np, shape, weights, planted)
    np.testing.assert_array_equal(again.tokens[:, : at + 1], expected.tokens[:, : at + 1])
    assert compare(shape, planted, again).wrong >= 1
    assert not compare(shape, planted, again).is_right


def test_a_check_that_decides_nothing_is_not_right() -> None:
    tokens = np.zeros((1, 4), np.int64)
    ones = np.ones((1, 4))
    near = compare(SMALL, tokens, Reference(tokens, 1e-9 * ones, ones))
    assert (near.decided, near.wrong, near.is_right) == (0, 0, False)
    far = compare(SMALL, tokens, Reference(tokens, ones, ones))
    assert (far.decided, far.is_right) == (4, True)
    undecided = compare(SMALL, tokens, Reference(tokens + 1, 1e-9 * ones, ones))
    assert (undecided.wrong, undecided.different) == (0, 4)


@pytest.mark.parametrize("is_captured", [False, True])
def test_no_share_of_communication_where_launches_are_part_of_it(*, is_captured: bool) -> None:
    tokens = np.zeros((1, 3), np.int64)
    made = Generation(
        tokens=tokens,
        alike=True,
        milliseconds=[4.0, 4.0],
        is_captured=is_captured,
        allreduces=2,
        nbytes=96,
        call_s=0.1,
    )
    alike = replace(made, milliseconds=[1.0, 1.0])
    assert without_communication(made, None) is None
    assert without_communication(made, alike) == 1.0
    assert Result(made, 1.0, 3, None).share == 0.75
    unlike = replace(alike, is_captured=not is_captured)
    assert without_communication(made, unlike) is None
    assert summarise(Result(made, None, 3, None))["share of communication"] is None


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("size", [1, 3])
def test_the_memory_that_is_said_is_that_of_the_arrays(size: int, *, shared: bool) -> None:
    shape = replace(SMALL, shared_weights=shared)
    weights = make_weights(NumpyOps("float32"), shape, 0, size, 1)
    layers = {id(layer): layer for layer in weights.layers}.values()
    matrices = [array for layer in layers for array in vars(layer).values()]
    matrices += [weights.embedding, weights.lm_head, weights.final_norm]
    assert sum(each.nbytes for each in matrices) == shape.weight_nbytes(size)
    decoder = Decoder(NumpyOps("float32"), shape, weights, alone())
    caches = sum(each.nbytes for each in (*decoder._keys, *decoder._values))
    assert caches == shape.cache_nbytes(size)
    assert shape.nbytes(size) == shape.weight_nbytes(size) + caches


def test_the_default_model_is_llamas_of_70_billion() -> None:
    shape = ModelShape()
    assert shape.layers * shape.layer_parameters(1) == pytest.approx(68.45e9, rel=1e-3)
    assert ModelShape(shared_weights=True).weight_nbytes(1) < shape.weight_nbytes(1) / 40


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"hidden": 0}, "hidden is 0; expected 1"),
        ({"batch": 0}, "batch is 0; expected 1"),
        ({"vocab": 1}, "vocab is 1; expected 2"),
        ({"dtype": "float16"}, "dtype is 'float16'; expected one of bfloat16, float32"),
        ({"hidden": 50}, "hidden is 50 for 6 heads; expected an even number for each"),
        ({"kv_heads": 4}, "kv_heads is 4 for 6 heads; expected a divisor"),
        ({"vocab": 1 << 30}, r"2\*\*32 elements or more"),
    ],
)
def test_wrong_sizes_are_refused(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        replace(SMALL, **changed)


def test_what_does_not_divide_is_refused() -> None:
    with pytest.raises(ArgumentError, match="kv_heads is 3 for 2 ranks; expected a multiple"):
        SMALL.require_split(2)
    with pytest.raises(ArgumentError, match="intermediate is 60 for 9 ranks"):
        replace(SMALL, heads=9, kv_heads=9, hidden=54).require_split(9)
    SMALL.require_split(3)
    with pytest.raises(ArgumentError, match="tokens is 13; expected 3 to the 12 positions"):
        SMALL.require_tokens(13)
    with pytest.raises(ArgumentError, match="tokens is 2; expected"):
        SMALL.require_tokens(2)


def test_both_libraries_have_all_operations() -> None:
    """Torch's can't run here; that each is there can be seen."""
    names = {name for name in vars(NumpyOps) if not name.startswith("_")}
    assert names == {name for name in vars(TorchOps) if not name.startswith("_")}
    assert isinstance(ops_for(np, "float32"), NumpyOps)
