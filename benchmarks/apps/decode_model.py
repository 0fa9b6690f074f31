"""One step of a tensor-parallel Llama-shaped decoder, written once for numpy and torch.

Per layer, on each rank, whose share of the heads and of the MLP it has:

1. RMSNorm; queries, keys and values of the own heads; rotary embedding
2. keys and values go to the cache at the position, which stands in device memory
3. attention of each query head over the whole context, masked behind the position
4. the own columns of the output projection: partial sums of (batch, hidden): all-reduce
5. RMSNorm; the own part of the gated MLP: partial sums of (batch, hidden): all-reduce

Then RMSNorm, the replicated lm_head, and the likeliest token of each sequence, which is the next
step's input. Nothing leaves the device, so the step can be captured into a CUDA graph.
"""

from __future__ import annotations

import math
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks.apps.silence import silent

if TYPE_CHECKING:
    from collections.abc import Iterator

    from benchmarks.apps.communicators import Communicator
    from benchmarks.apps.decode_ops import Ops
    from benchmarks.apps.decode_shape import ModelShape
    from benchmarks.apps.decode_weights import LayerWeights, Weights

__all__ = ["ALLREDUCES_PER_LAYER", "Decoder"]

ALLREDUCES_PER_LAYER = 2

ROTARY_BASE = 10000.0


class Decoder:
    """Weights, caches, and the state of a generation.

    Attributes:
        logits: Of the last step, float32, (batch, vocab); None before the first one.
    """

    def __init__(self, ops: Ops, shape: ModelShape, weights: Weights, comm: Communicator) -> None:
        """Allocate caches and the buffer of the all-reduces. Collective.

        Args:
            ops: Whose arrays; its type is that of activations and caches. Weights may be narrower.
            shape: The model.
            weights: This rank's.
            comm: Sums over the ranks that the weights are split over; ``self`` may stand in its
                place for timing.
        """
        self._ops, self._shape, self._weights, self._comm = ops, shape, weights, comm
        size, dim = weights.size, shape.head_dim
        self._heads, self._kv_heads = shape.heads // size, shape.kv_heads // size
        rows = shape.batch, self._kv_heads, shape.context, dim
        self._keys = [ops.zeros(*rows) for _ in range(shape.layers)]
        self._values = [ops.zeros(*rows) for _ in range(shape.layers)]
        self._partial = ops.buffer(comm, shape.batch, shape.hidden)
        self._positions = ops.integers(range(shape.context))
        angles = np.arange(shape.context)[:, None] * ROTARY_BASE ** (
            -np.arange(0, dim, 2)[None, :] / dim
        )
        # Made on the host, so that all libraries turn by the same angles.
        self._cosines = self._table(np.cos(angles))
        self._sines = self._table(np.sin(angles))
        self._position = ops.integers([0])
        self._tokens = ops.integers(self.first_tokens())
        self._history = ops.integers(np.zeros((shape.batch, shape.context), np.int64).tolist())
        self.logits: Any = None

    def _table(self, values: np.ndarray[Any, Any]) -> Any:
        # Through integers, which all libraries take from Python: 30 bits behind the point.
        scaled = self._ops.integers(np.rint(values * (1 << 30)).astype(np.int64).tolist())
        return self._ops.wide(scaled) * (1.0 / (1 << 30))

    def first_tokens(self) -> list[int]:
        """The token that each sequence begins with."""
        return [(1 + 7919 * row) % self._shape.vocab for row in range(self._shape.batch)]

    @contextmanager
    def silence(self) -> Iterator[None]:
        """Leave out the sums of steps: to load what they run, before any rank waits for another."""
        comm, self._comm = self._comm, silent(self._comm)
        try:
            yield
        finally:
            self._comm = comm

    def prepare(self) -> None:
        """Sum the buffer of all sums once, so that what they run is loaded. Collective.

        It does what the communicator's `prepare` does, which would make an array of the model's
        type by itself: CuPy has no bfloat16 everywhere.
        """
        self._comm.allreduce(self._partial)

    def reset(self) -> None:
        """Begin again. What is in the caches is behind the mask until it is overwritten."""
        self._position[...] = 0
        self.feed(self._ops.integers(self.first_tokens()))

    def feed(self, tokens: Any) -> None:
        """Set the tokens, (batch,), that the next step takes."""
        self._tokens[...] = tokens

    def history(self, tokens: int) -> np.ndarray[Any, Any]:
        """The first `tokens` tokens of each sequence that were made, (batch, tokens), on the host.

        The token at 0 is what the step at position 0 made of the first one.
        """
        return self._ops.host(self._history)[:, :tokens]

    def step(self) -> None:
        """Make the next token of each sequence. Collective: 2 all-reduces a layer."""
        ops, weights = self._ops, self._weights
        position = self._position
        x = ops.narrow(ops.take(weights.embedding, self._tokens))
        turn = ops.take(self._cosines, position), ops.take(self._sines, position)
        visible = self._positions <= position
        for number, layer in enumerate(weights.layers):
            attended = self._attend(number, layer, x, turn, visible)
            x = x + self._summed(attended, layer.output)
            x = x + self._summed(self._gated(layer, x), layer.down)
        self.logits = ops.wide(ops.matmul(ops.rms_norm(x, weights.final_norm), weights.lm_head))
        tokens = ops.argmax(self.logits)
        ops.put(self._history, 1, position, tokens.reshape(-1, 1))
        self.feed(tokens)
        position += 1

    def _summed(self, x: Any, weight: Any) -> Any:
        """The product with all columns of a matrix of which each rank has some."""
        self._ops.matmul_into(x, weight, self._partial)
        self._comm.allreduce(self._partial)
        return self._partial

    def _attend(
        self, number: int, layer: LayerWeights, x: Any, turn: tuple[Any, Any], visible: Any
    ) -> Any:
        ops, batch, dim = self._ops, self._shape.batch, self._shape.head_dim
        heads, kv_heads = self._heads, self._kv_heads
        keys, values = self._keys[number], self._values[number]
        mixed = ops.matmul(ops.rms_norm(x, layer.attention_norm), layer.query_key_value)
        mixed = mixed.reshape(batch, heads + 2 * kv_heads, dim)
        queries = self._rotated(mixed[:, :heads], turn)
        new_keys = self._rotated(mixed[:, heads : heads + kv_heads], turn)
        new_values = mixed[:, heads + kv_heads :]
        at = self._position
        ops.put(keys, 2, at, new_keys.reshape(batch, kv_heads, 1, dim))
        ops.put(values, 2, at, new_values.reshape(batch, kv_heads, 1, dim))
        # Heads that share keys and values stand together.
        grouped = queries.reshape(batch, kv_heads, heads // kv_heads, dim)
        scores = ops.wide(ops.matmul(grouped, keys)) * (1 / math.sqrt(dim))
        chosen = ops.narrow(ops.masked_softmax(scores, visible))
        return ops.matmul(chosen, values.mT).reshape(batch, heads * dim)

    def _rotated(self, x: Any, turn: tuple[Any, Any]) -> Any:
        """Rotary embedding of pairs that are half a head apart, as Llama's checkpoints have it."""
        ops, half = self._ops, self._shape.head_dim // 2
        cosine, sine = turn
        wide = ops.wide(x)
        first, second = wide[..., :half], wide[..., half:]
        return ops.narrow(
            ops.concat([first * cosine - second * sine, second * cosine + first * sine], -1)
        )

    def _gated(self, layer: LayerWeights, x: Any) -> Any:
        ops = self._ops
        both = ops.wide(ops.matmul(ops.rms_norm(x, layer.mlp_norm), layer.gate_up))
        inner = both.shape[-1] // 2
        return ops.narrow(ops.silu(both[:, :inner]) * both[:, inner:])
