"""Random fixed weights, each element a function of its place in the whole matrix.

So a rank makes its own slices alone, and they are those of the same model whatever the number of
ranks. numpy and torch make the same bits: integers of 64 bits that wrap, and one rounding.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from benchmarks.apps.decode_ops import Ops
    from benchmarks.apps.decode_shape import ModelShape

__all__ = ["LayerWeights", "Weights", "make_weights", "uniform"]

MASK = (1 << 32) - 1

CHUNK = 1 << 23
"""Elements that are made at once, in temporary arrays of 8 bytes each."""

MATRICES = ("embedding", "lm_head", "query", "key", "value", "output", "gate", "up", "down")
NORMS = ("attention_norm", "mlp_norm", "final_norm")

NORM_SPREAD = 0.1
"""Weights of norms are within 1 -+ this."""


@dataclass(frozen=True)
class LayerWeights:
    """A rank's part of a layer. Matrices are ``(outputs, inputs)``.

    Attributes:
        attention_norm: (hidden,)
        query_key_value: (own heads and twice own kv_heads, hidden), in that order.
        output: (hidden, own heads).
        mlp_norm: (hidden,)
        gate_up: (twice own intermediate, hidden): first the gates.
        down: (hidden, own intermediate).
    """

    attention_norm: Any
    query_key_value: Any
    output: Any
    mlp_norm: Any
    gate_up: Any
    down: Any


@dataclass(frozen=True)
class Weights:
    """A rank's weights.

    Attributes:
        rank: Whose they are.
        size: Over how many ranks the model is split.
        embedding: (vocab, hidden), of all ranks.
        lm_head: (vocab, hidden), of all ranks.
        final_norm: (hidden,)
        layers: One of each layer; of shared weights the same one.
    """

    rank: int
    size: int
    embedding: Any
    lm_head: Any
    final_norm: Any
    layers: Sequence[LayerWeights]


def _mix(x: Any) -> Any:
    """Permute integers below 2**32 (Wellons, hash-prospector, "lowbias32")."""
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & MASK
    x = ((x ^ (x >> 15)) * 0x846CA68B) & MASK
    return x ^ (x >> 16)


def _key(seed: int, layer: int, name: str) -> int:
    number = (*MATRICES, *NORMS).index(name)
    return int(_mix(_mix(_mix(seed & MASK) ^ layer) ^ number))


def uniform(ops: Ops, key: int, columns: int, rows: range, part: range, scale: float) -> Any:
    """Make a slice of a matrix of random numbers in [-scale, scale), rounded to the type of `ops`.

    Args:
        ops: Whose arrays.
        key: Which matrix.
        columns: Columns of the whole matrix.
        rows: Rows of the slice, one after the other.
        part: Columns of the slice, likewise.
        scale: The bound. The variance is a third of its square.
    """
    out = ops.zeros(len(rows), len(part))
    inside = ops.integers(range(part.start, part.stop))
    step = max(CHUNK // len(part), 1)
    for start in range(0, len(rows), step):
        some = rows[start : start + step]
        places = ops.integers(some).reshape(-1, 1) * columns + inside
        bits = _mix(_mix(places) ^ key) >> 8  # 24 bits, which float32 holds
        out[start : start + step] = ops.narrow(ops.wide(bits - (1 << 23)) * (scale / (1 << 23)))
    return out


class _Maker:
    """Makes slices of one model's matrices."""

    def __init__(self, ops: Ops, shape: ModelShape, rank: int, size: int, seed: int) -> None:
        self.ops, self.shape, self.rank, self.size, self.seed = ops, shape, rank, size, seed

    def own(self, extent: int) -> range:
        """This rank's part of an extent."""
        each = extent // self.size
        return range(self.rank * each, (self.rank + 1) * each)

    def matrix(
        self, layer: int, name: str, rows: range, columns: int, part: range | None, gain: float
    ) -> Any:
        """A slice of a matrix whose products with numbers of variance 1 have variance gain**2."""
        scale = gain * math.sqrt(3 / columns)
        whole = range(columns)
        key = _key(self.seed, layer, name)
        return uniform(self.ops, key, columns, rows, whole if part is None else part, scale)

    def norm(self, layer: int, name: str) -> Any:
        """Weights of a norm."""
        ops, hidden = self.ops, self.shape.hidden
        key = _key(self.seed, layer, name)
        drawn = uniform(ops, key, hidden, range(1), range(hidden), NORM_SPREAD)
        return ops.narrow(ops.wide(drawn[0]) + 1)

    def layer(self, number: int) -> LayerWeights:
        """This rank's part of a layer."""
        shape, concat = self.shape, self.ops.concat
        hidden, width = shape.hidden, shape.heads * shape.head_dim
        narrow_width = shape.kv_heads * shape.head_dim
        heads, kv_heads, inner = map(self.own, (width, narrow_width, shape.intermediate))
        # What is added to the residual stream grows no more than it, whatever the layers.
        gain = 1 / math.sqrt(2 * shape.layers)

        def of_hidden(name: str, rows: range) -> Any:
            return self.matrix(number, name, rows, hidden, None, 1.0)

        def to_hidden(name: str, columns: int, part: range) -> Any:
            return self.matrix(number, name, range(hidden), columns, part, gain)

        return LayerWeights(
            attention_norm=self.norm(number, "attention_norm"),
            query_key_value=concat(
                [
                    of_hidden("query", heads),
                    of_hidden("key", kv_heads),
                    of_hidden("value", kv_heads),
                ],
                0,
            ),
            output=to_hidden("output", width, heads),
            mlp_norm=self.norm(number, "mlp_norm"),
            gate_up=concat([of_hidden("gate", inner), of_hidden("up", inner)], 0),
            down=to_hidden("down", shape.intermediate, inner),
        )


def make_weights(
    ops: Ops,
    shape: ModelShape,
    rank: int,
    size: int,
    seed: int,
    progress: Callable[[str], None] = lambda _: None,
) -> Weights:
    """Make the part of a rank, in the type of `ops`. Not collective.

    Args:
        ops: Whose arrays.
        shape: The model.
        rank: Whose part.
        size: Over how many ranks it is split.
        seed: Another one makes another model.
        progress: Told which layer is made.
    """
    maker = _Maker(ops, shape, rank, size, seed)
    vocab, hidden = range(shape.vocab), shape.hidden
    layers = []
    for number in range(1 if shape.shared_weights else shape.layers):
        progress(f"weights of layer {number}")
        layers.append(maker.layer(number))
    if shape.shared_weights:
        layers *= shape.layers
    return Weights(
        rank=rank,
        size=size,
        # Elements of variance 1; and logits of variance 1.
        embedding=maker.matrix(-1, "embedding", vocab, hidden, None, math.sqrt(hidden)),
        lm_head=maker.matrix(-1, "lm_head", vocab, hidden, None, 1.0),
        final_norm=maker.norm(-1, "final_norm"),
        layers=layers,
    )
