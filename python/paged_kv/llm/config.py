"""The shape of a Llama model, read from GGUF metadata; what we can't run is refused by name."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from paged_kv.llm.errors import ModelError, UnsupportedModelError

if TYPE_CHECKING:
    from collections.abc import Mapping

ARCHITECTURE = "llama"

# Keys below "llama." that are read here, or that change nothing in the arithmetic. Any other key may
# ask for something that the forward pass does not do, so it is refused rather than overlooked.
_KNOWN_KEYS = {
    "attention.causal",
    "attention.head_count",
    "attention.head_count_kv",
    "attention.key_length",
    "attention.layer_norm_rms_epsilon",
    "attention.value_length",
    "block_count",
    "context_length",
    "embedding_length",
    "expert_count",
    "expert_used_count",
    "feed_forward_length",
    "rope.dimension_count",
    "rope.freq_base",
    "rope.scale_linear",
    "rope.scaling.factor",
    "rope.scaling.finetuned",
    "rope.scaling.original_context_length",
    "rope.scaling.type",
    "tensor_data_layout",
    "vocab_size",
}


@dataclass(frozen=True, slots=True)
class LlamaConfig:
    """Dimensions and constants of a Llama model.

    Attributes
    ----------
    name : str
        The model's own name.
    num_layers, hidden_size, intermediate_size : int
        Depth, width of the residual stream, width of the feed-forward part.
    num_heads, num_kv_heads, head_dim : int
        Query heads, key/value heads (grouped-query attention), elements per head.
    rope_dim : int
        How many leading elements of each head are rotated.
    rope_base, rope_scale : float
        Base of the rotary frequencies; positions are divided by `rope_scale` (1 = no scaling).
    norm_eps : float
        Epsilon of every RMSNorm.
    context_length : int
        Longest sequence that the model was trained for.
    vocab_size : int
        Rows of the embedding table.
    """

    name: str
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope_dim: int
    rope_base: float
    rope_scale: float
    norm_eps: float
    context_length: int
    vocab_size: int

    @classmethod
    def from_metadata(cls, metadata: Mapping[str, Any]) -> LlamaConfig:
        """Read the configuration from GGUF metadata.

        Parameters
        ----------
        metadata : Mapping
            Keys and decoded values of a GGUF file.

        Raises
        ------
        UnsupportedModelError
            Another architecture, or a feature that the forward pass lacks.
        ModelError
            A value is missing or contradicts another.
        """
        architecture = metadata.get("general.architecture")
        if architecture != ARCHITECTURE:
            raise UnsupportedModelError(f"architecture {architecture!r}", f"only {ARCHITECTURE!r} runs here")
        if metadata.get("split.count", 1) > 1:
            parts = metadata["split.count"]
            raise UnsupportedModelError(f"model split into {parts} files", "merge them first")
        llama = {
            key.removeprefix("llama."): value for key, value in metadata.items() if key.startswith("llama.")
        }
        _refuse_unsupported(llama)

        num_heads = _positive(llama, "attention.head_count")
        num_kv_heads = _positive(llama, "attention.head_count_kv", num_heads)
        hidden_size = _positive(llama, "embedding_length")
        head_dim = _positive(llama, "attention.key_length", hidden_size // num_heads)
        rope_dim = _positive(llama, "rope.dimension_count", head_dim)
        if num_heads % num_kv_heads:
            raise ModelError(f"{num_heads} query heads can't share {num_kv_heads} key/value heads evenly")
        if rope_dim > head_dim or rope_dim % 2:
            raise ModelError(f"rope.dimension_count {rope_dim} must be even and at most head_dim {head_dim}")
        return cls(
            name=str(metadata.get("general.name", "unnamed")),
            num_layers=_positive(llama, "block_count"),
            hidden_size=hidden_size,
            intermediate_size=_positive(llama, "feed_forward_length"),
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            rope_dim=rope_dim,
            rope_base=float(llama.get("rope.freq_base", 10000.0)),
            rope_scale=_rope_scale(llama),
            norm_eps=float(llama.get("attention.layer_norm_rms_epsilon", 1e-5)),
            context_length=_positive(llama, "context_length"),
            vocab_size=_positive(llama, "vocab_size", len(metadata.get("tokenizer.ggml.tokens", ()))),
        )


def _positive(llama: Mapping[str, Any], key: str, default: int | None = None) -> int:
    value = llama.get(key, default)
    if isinstance(value, list):
        raise UnsupportedModelError(f"llama.{key} that differs from layer to layer")
    if value is None:
        raise ModelError(f"the file has no llama.{key}")
    if not isinstance(value, int) or value < 1:
        raise ModelError(f"llama.{key} is {value!r}, expected a positive integer")
    return value


def _rope_scale(llama: Mapping[str, Any]) -> float:
    kind = llama.get("rope.scaling.type", "linear")
    if kind not in ("none", "linear"):
        raise UnsupportedModelError(f"rope scaling {kind!r}", "'none', 'linear' and rope_freqs run here")
    scale = float(llama.get("rope.scaling.factor", llama.get("rope.scale_linear", 1.0)))
    return 1.0 if kind == "none" or scale == 0.0 else scale


def _refuse_unsupported(llama: Mapping[str, Any]) -> None:
    if llama.get("expert_count", 0):
        raise UnsupportedModelError(f"mixture of {llama['expert_count']} experts")
    if llama.get("attention.causal", True) is False:
        raise UnsupportedModelError("attention that is not causal")
    if llama.get("attention.value_length") != llama.get("attention.key_length"):
        raise UnsupportedModelError("values of another length than keys")
    unknown = sorted(llama.keys() - _KNOWN_KEYS)
    if unknown:
        raise UnsupportedModelError("metadata " + ", ".join(f"llama.{key}" for key in unknown))
