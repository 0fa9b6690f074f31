"""Sizes of a Llama-shaped model, what they ask of ranks, and the memory that they take."""

from __future__ import annotations

from dataclasses import dataclass

from shmemar.errors import ArgumentError

__all__ = ["DTYPES", "WORKING_NBYTES", "ModelShape"]

DTYPES = {"bfloat16": 2, "float32": 4}
"""Types of weights and activations, with their bytes."""

WORKING_NBYTES = 1 << 30
"""Set aside on a GPU for a rank's activations, libraries' workspaces and the making of weights."""


@dataclass(frozen=True)
class ModelShape:
    """A decoder-only transformer.

    Attributes:
        hidden: Width of the residual stream.
        layers: Layers.
        heads: Query heads, of ``hidden / heads`` each.
        kv_heads: Heads of keys and values; each serves ``heads / kv_heads`` query heads.
        intermediate: Width of the gated MLP.
        vocab: Tokens; embedding and lm_head are replicated on all ranks.
        batch: Sequences.
        context: Positions of the KV cache; attention always runs over all of them, masked.
        dtype: One of `DTYPES`.
        shared_weights: True to use one layer's weights in all layers.
    """

    hidden: int = 8192
    layers: int = 80
    heads: int = 64
    kv_heads: int = 8
    intermediate: int = 28672
    vocab: int = 4096
    batch: int = 1
    context: int = 128
    dtype: str = "bfloat16"
    shared_weights: bool = False

    def __post_init__(self) -> None:
        """Check that the sizes go together.

        Raises:
            ArgumentError: They don't.
        """
        sizes = ("hidden", "layers", "heads", "kv_heads", "intermediate", "batch", "context")
        for name in sizes:
            if getattr(self, name) < 1:
                raise ArgumentError(f"{name} is {getattr(self, name)}; expected 1 or more.")
        if self.vocab < 2:
            raise ArgumentError(f"vocab is {self.vocab}; expected 2 or more.")
        if self.dtype not in DTYPES:
            raise ArgumentError(f"dtype is {self.dtype!r}; expected one of {', '.join(DTYPES)}.")
        if self.hidden % (2 * self.heads):
            raise ArgumentError(
                f"hidden is {self.hidden} for {self.heads} heads; expected an even number for each "
                "head, as rotary embedding turns pairs."
            )
        if self.heads % self.kv_heads:
            raise ArgumentError(
                f"kv_heads is {self.kv_heads} for {self.heads} heads; expected a divisor."
            )
        if self.hidden * max(self.intermediate, self.vocab, self.hidden) >= 1 << 32:
            raise ArgumentError(
                f"hidden {self.hidden} with intermediate {self.intermediate} and vocab "
                f"{self.vocab} makes a matrix of 2**32 elements or more; expected fewer, as "
                "weights are drawn by a counter of 32 bits."
            )

    @property
    def head_dim(self) -> int:
        """Width of a head."""
        return self.hidden // self.heads

    def require_split(self, nranks: int) -> None:
        """Check that heads and MLP divide over ranks.

        Raises:
            ArgumentError: They don't.
        """
        for name in ("kv_heads", "intermediate"):
            if getattr(self, name) % nranks:
                raise ArgumentError(
                    f"{name} is {getattr(self, name)} for {nranks} ranks; expected a multiple, as "
                    "each rank has as many. Change one of them."
                )

    def require_tokens(self, tokens: int) -> None:
        """Check how many tokens are to be made.

        Raises:
            ArgumentError: Fewer than 3, or more than the context.
        """
        if not 3 <= tokens <= self.context:
            raise ArgumentError(
                f"tokens is {tokens}; expected 3 to the {self.context} positions of the context."
            )

    def layer_parameters(self, nranks: int) -> int:
        """Parameters of a layer on a rank."""
        projections = 2 * self.heads + 2 * self.kv_heads  # query and output, key and value
        attention = self.hidden * projections * self.head_dim
        return (attention + 3 * self.hidden * self.intermediate) // nranks + 2 * self.hidden

    def weight_nbytes(self, nranks: int) -> int:
        """Bytes of a rank's weights."""
        layers = 1 if self.shared_weights else self.layers
        replicated = 2 * self.vocab * self.hidden + self.hidden
        return DTYPES[self.dtype] * (layers * self.layer_parameters(nranks) + replicated)

    def cache_nbytes(self, nranks: int) -> int:
        """Bytes of a rank's KV cache."""
        positions = self.layers * self.batch * self.context
        return 2 * DTYPES[self.dtype] * positions * self.kv_heads * self.head_dim // nranks

    def nbytes(self, nranks: int) -> int:
        """Bytes of a rank's weights and KV cache."""
        return self.weight_nbytes(nranks) + self.cache_nbytes(nranks)

    def reference_nbytes(self) -> int:
        """Bytes that the float32 run on one rank needs beside: all weights, one matrix widened."""
        widest = 4 * self.hidden * max(2 * self.intermediate, self.vocab, self.hidden)
        return self.weight_nbytes(1) + 4 // DTYPES[self.dtype] * self.cache_nbytes(1) + widest
