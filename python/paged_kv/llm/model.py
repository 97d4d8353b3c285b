"""The Llama forward pass in numpy, with attention left to a KV cache.

Activations are columns, [features, tokens]: a layer is then ``weight @ x`` with the weight as the file
holds it, the fastest orientation for a handful of tokens, and every normalisation and gate runs along
contiguous rows. Tokens of all sequences lie side by side; only attention knows which belong together.

Sources: Touvron et al., "LLaMA" (2023); Zhang and Sennrich, "Root mean square layer normalization"
(2019); Su et al., "RoFormer" (2021); Shazeer, "GLU variants improve transformer" (2020); Ainslie et
al., "GQA" (2023).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from paged_kv.llm.config import LlamaConfig
from paged_kv.llm.weights import Floats, GgufFile, LayerWeights, LlamaWeights, load_weights

if TYPE_CHECKING:
    from numpy.typing import ArrayLike, NDArray

    from paged_kv.llm.backend import KvBackend, KvBatch


class LlamaModel:
    """A Llama model that computes in float32 and keeps no state between calls.

    Parameters
    ----------
    config : LlamaConfig
        Its dimensions.
    weights : LlamaWeights
        Its tensors.

    Notes
    -----
    Calls from several threads are independent of each other.
    """

    def __init__(self, config: LlamaConfig, weights: LlamaWeights) -> None:
        self.config = config
        self._weights = weights
        pairs = np.arange(config.rope_dim // 2, dtype=np.float64)
        frequencies = config.rope_base ** (-2.0 * pairs / config.rope_dim) / config.rope_scale
        if weights.rope_factors is not None:
            frequencies /= weights.rope_factors
        self._frequencies = frequencies

    @classmethod
    def from_gguf(cls, file: GgufFile) -> LlamaModel:
        """Load a model from an opened GGUF file.

        Raises
        ------
        UnsupportedModelError
            The file asks for something that this forward pass lacks.
        ModelError
            The file is incomplete or contradicts itself.
        """
        config = LlamaConfig.from_metadata(file.metadata)
        return cls(config, load_weights(file, config))

    def forward(self, token_ids: ArrayLike, cache: KvBackend, batch: KvBatch) -> Floats:
        """Run new tokens through all layers; their keys and values go to the cache.

        Parameters
        ----------
        token_ids : array_like of int
            The batch's new tokens, sequence after sequence [tokens].
        cache : KvBackend
            Holds keys and values; called once to write and once to attend in each layer.
        batch : KvBatch
            The open batch over the sequences that the tokens belong to.

        Returns
        -------
        numpy.ndarray
            Final hidden states, before the output norm, float32 [hidden, tokens].
        """
        weights, eps = self._weights, self.config.norm_eps
        x = np.ascontiguousarray(weights.embedding[np.asarray(token_ids)].T)
        rotation = self._rotation(batch.positions)
        for index, layer in enumerate(weights.layers):
            normed = _rms_norm(x, layer.attn_norm, eps)
            attended = self._attention(index, layer, normed, rotation, cache, batch)
            x += layer.attn_output @ attended
            x += _swiglu(layer, _rms_norm(x, layer.ffn_norm, eps))
        return x

    def logits(self, hidden: Floats) -> Floats:
        """Scores of every vocabulary entry.

        Parameters
        ----------
        hidden : ndarray
            Columns of `forward`'s result, those that are wanted [hidden, rows].

        Returns
        -------
        numpy.ndarray
            float32 [rows, vocab].
        """
        weights = self._weights
        return _rms_norm(hidden, weights.output_norm, self.config.norm_eps).T @ weights.output.T

    def _rotation(self, positions: NDArray[np.int64]) -> tuple[Floats, Floats]:
        """Cosine and sine of each pair's angle [rope_dim / 2, tokens]; angles are exact in float64."""
        angles = self._frequencies[:, None] * positions[None, :]
        return np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)

    def _attention(
        self,
        index: int,
        layer: LayerWeights,
        x: Floats,
        rotation: tuple[Floats, Floats],
        cache: KvBackend,
        batch: KvBatch,
    ) -> Floats:
        """Attention of one layer without its output projection [num_heads · head_dim, tokens]."""
        config, tokens = self.config, x.shape[1]
        heads = (layer.qkv @ x).reshape(-1, config.head_dim, tokens)
        num_rotated = config.num_heads + config.num_kv_heads  # queries and keys, not values
        _rotate_pairs(heads[:num_rotated, : config.rope_dim], *rotation)
        rows = np.ascontiguousarray(heads.transpose(2, 0, 1))  # [tokens, heads, head_dim]
        query, key, value = np.split(rows, [config.num_heads, num_rotated], axis=1)
        cache.write(index, key, value, batch)
        out: Floats = cache.attend(index, query, batch)
        return out.reshape(tokens, -1).T


def _rms_norm(x: Floats, gain: Floats, eps: float) -> Floats:
    mean_square = np.einsum("ft,ft->t", x, x) / x.shape[0]
    normed: Floats = x / np.sqrt(mean_square + np.float32(eps))
    normed *= gain[:, None]
    return normed


def _rotate_pairs(heads: Floats, cos: Floats, sin: Floats) -> None:
    """Rotate neighbouring elements (2i, 2i + 1) of each head in place: how GGUF orders Llama's heads."""
    even, odd = heads[:, 0::2], heads[:, 1::2]
    turned = even * cos - odd * sin
    odd *= cos
    odd += even * sin
    even[...] = turned


def _swiglu(layer: LayerWeights, x: Floats) -> Floats:
    gate, up = np.split(layer.gate_up @ x, 2)
    # silu(gate) · up; exp of a very negative gate overflows to inf, and gate / inf is the right 0.
    with np.errstate(over="ignore"):
        gate /= 1.0 + np.exp(-gate)
    gate *= up
    down: Floats = layer.ffn_down @ gate
    return down
