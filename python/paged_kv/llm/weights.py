"""Read a GGUF file: its metadata, and its tensors as float32 matrices ready for the forward pass."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import gguf
import numpy as np

from paged_kv.llm.errors import ModelError, UnsupportedModelError

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

    from paged_kv.llm.config import LlamaConfig

Floats: TypeAlias = "NDArray[np.float32]"


class GgufFile:
    """A GGUF file: decoded metadata, and tensors that are read from the mapped file when asked for.

    Parameters
    ----------
    path : Path
        The file; it stays mapped as long as this object lives.

    Attributes
    ----------
    metadata : dict
        Every key with its value as plain Python objects.

    Raises
    ------
    ModelError
        The file can't be read as GGUF (wrong magic, truncated, unknown version).
    """

    def __init__(self, path: Path) -> None:
        try:
            reader = gguf.GGUFReader(path)
            self.metadata: dict[str, Any] = {key: field.contents() for key, field in reader.fields.items()}
        except (ValueError, IndexError, KeyError, OSError) as error:
            raise ModelError(f"{path} is not a readable GGUF file: {error}") from error
        self.path = path
        self._tensors = {tensor.name: tensor for tensor in reader.tensors}

    @property
    def tensor_names(self) -> set[str]:
        """Names of all tensors in the file."""
        return set(self._tensors)

    def tensor(self, name: str, shape: tuple[int, ...]) -> Floats:
        """One tensor, dequantised.

        Parameters
        ----------
        name : str
            For example ``"blk.0.attn_q.weight"``.
        shape : tuple of int
            What it must be, outermost axis first (GGUF writes shapes the other way round).

        Returns
        -------
        numpy.ndarray
            float32, C-contiguous.

        Raises
        ------
        ModelError
            The tensor is missing or has another shape.
        UnsupportedModelError
            No dequantisation is known for its type.
        """
        tensor = self._tensors.get(name)
        if tensor is None:
            raise ModelError(f"{self.path.name} has no tensor {name}")
        found = tuple(int(extent) for extent in reversed(tensor.shape))
        if found != shape:
            raise ModelError(f"{name} has shape {list(found)}, expected {list(shape)}")
        try:
            values = gguf.dequantize(tensor.data, tensor.tensor_type)
        except NotImplementedError as error:
            raise UnsupportedModelError(f"quantisation {tensor.tensor_type.name} of {name}") from error
        # A plain array: the forward pass must not depend on the file staying as it is.
        return np.array(values, dtype=np.float32, order="C").reshape(shape)


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One transformer block. Matrices are [out, in], as in the file; the fused ones stack their parts.

    Attributes
    ----------
    attn_norm, ffn_norm : ndarray
        RMSNorm gains [hidden].
    qkv : ndarray
        Query, key and value projections [(num_heads + 2 num_kv_heads) head_dim, hidden].
    attn_output : ndarray
        [hidden, num_heads head_dim].
    gate_up : ndarray
        Gate and up projections [2 intermediate, hidden].
    ffn_down : ndarray
        [hidden, intermediate].
    """

    attn_norm: Floats
    qkv: Floats
    attn_output: Floats
    ffn_norm: Floats
    gate_up: Floats
    ffn_down: Floats


@dataclass(frozen=True, slots=True)
class LlamaWeights:
    """All tensors of a Llama model in float32.

    Attributes
    ----------
    embedding, output : ndarray
        [vocab, hidden]; one and the same array where the model ties them.
    layers : list of LayerWeights
        First block first.
    output_norm : ndarray
        RMSNorm gain before `output` [hidden].
    rope_factors : ndarray or None
        Divisors of the rotary frequencies [rope_dim / 2] (Llama 3.1 and later).
    """

    embedding: Floats
    layers: list[LayerWeights]
    output_norm: Floats
    output: Floats
    rope_factors: Floats | None


def load_weights(file: GgufFile, config: LlamaConfig) -> LlamaWeights:
    """Dequantise all weights of a model.

    Parameters
    ----------
    file : GgufFile
        The opened file.
    config : LlamaConfig
        Its configuration, which fixes every shape.

    Raises
    ------
    UnsupportedModelError
        The file holds tensors that a plain Llama has not (a bias, experts, …), or a quantisation
        that can't be read.
    ModelError
        A tensor is missing or has the wrong shape.
    """
    optional = {"output.weight", "rope_freqs.weight"} & file.tensor_names
    expected = {"token_embd.weight", "output_norm.weight"} | optional
    expected.update(f"blk.{i}.{part}.weight" for i in range(config.num_layers) for part in _LAYER_PARTS)
    unknown = sorted(file.tensor_names - expected)
    if unknown:
        more = f" and {len(unknown) - 3} more" if len(unknown) > 3 else ""
        raise UnsupportedModelError(f"tensor {', '.join(unknown[:3])}{more}")

    table = (config.vocab_size, config.hidden_size)
    # Dequantisation is numpy on large arrays, which releases the GIL; layers are independent.
    with ThreadPoolExecutor(max_workers=min(4, os.cpu_count() or 1)) as pool:
        layers = pool.map(lambda index: _load_layer(file, config, index), range(config.num_layers))
        embedding = file.tensor("token_embd.weight", table)
        output = file.tensor("output.weight", table) if "output.weight" in optional else embedding
        return LlamaWeights(
            embedding=embedding,
            layers=list(layers),
            output_norm=file.tensor("output_norm.weight", (config.hidden_size,)),
            output=output,
            rope_factors=(
                file.tensor("rope_freqs.weight", (config.rope_dim // 2,))
                if "rope_freqs.weight" in optional
                else None
            ),
        )


_LAYER_PARTS = (
    "attn_norm",
    "attn_q",
    "attn_k",
    "attn_v",
    "attn_output",
    "ffn_norm",
    "ffn_gate",
    "ffn_up",
    "ffn_down",
)


def _load_layer(file: GgufFile, config: LlamaConfig, index: int) -> LayerWeights:
    hidden, inner = config.hidden_size, config.intermediate_size
    q_rows, kv_rows = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim

    def part(name: str, *shape: int) -> Floats:
        return file.tensor(f"blk.{index}.{name}.weight", shape)

    return LayerWeights(
        attn_norm=part("attn_norm", hidden),
        qkv=np.concatenate(
            [part("attn_q", q_rows, hidden), part("attn_k", kv_rows, hidden), part("attn_v", kv_rows, hidden)]
        ),
        attn_output=part("attn_output", hidden, q_rows),
        ffn_norm=part("ffn_norm", hidden),
        gate_up=np.concatenate([part("ffn_gate", inner, hidden), part("ffn_up", inner, hidden)]),
        ffn_down=part("ffn_down", hidden, inner),
    )
