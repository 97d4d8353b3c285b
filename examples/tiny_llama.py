"""What the examples share: a tiny Llama with random weights, and one step of it.

Random weights give answers without sense that differ from prompt to prompt, which is all an example of
a cache needs; a real model is one `paged_kv.llm.load()` away.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from paged_kv.llm import DenseCache, LlamaConfig, LlamaModel
from paged_kv.llm.weights import LayerWeights, LlamaWeights

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

    from paged_kv.llm.backend import KvBackend
    from paged_kv.llm.weights import Floats

CONFIG = LlamaConfig(
    name="tiny random Llama",
    num_layers=3,
    hidden_size=64,
    intermediate_size=96,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    rope_dim=16,
    rope_base=10000.0,
    rope_scale=1.0,
    norm_eps=1e-5,
    context_length=512,
    vocab_size=256,
)


def tiny_llama(seed: int = 0, *, memory: float = 1.0) -> LlamaModel:
    """Make a model of `CONFIG`; see `random_weights`."""
    return LlamaModel(CONFIG, random_weights(CONFIG, seed, memory=memory))


def random_weights(config: LlamaConfig, seed: int, *, memory: float = 1.0) -> LlamaWeights:
    """Draw all tensors of a model; the same ones for the same seed.

    The smaller `memory`, the less attention counts, and the more a text repeats itself.
    """
    random = np.random.default_rng(seed)
    hidden, inner, q_rows = config.hidden_size, config.intermediate_size, config.num_heads * config.head_dim

    def matrix(rows: int, columns: int) -> Floats:
        return random.standard_normal((rows, columns), np.float32) * np.float32(1.5 / np.sqrt(columns))

    def gain() -> Floats:
        return random.uniform(0.5, 1.5, hidden).astype(np.float32)

    layers = [
        LayerWeights(
            attn_norm=gain(),
            qkv=matrix(q_rows + 2 * config.num_kv_heads * config.head_dim, hidden),
            attn_output=matrix(hidden, q_rows) * np.float32(memory),
            ffn_norm=gain(),
            gate_up=matrix(2 * inner, hidden),
            ffn_down=matrix(hidden, inner),
        )
        for _ in range(config.num_layers)
    ]
    return LlamaWeights(
        embedding=matrix(config.vocab_size, hidden),
        layers=layers,
        output_norm=gain(),
        output=matrix(config.vocab_size, hidden),
        rope_factors=None,
    )


def random_prompts(seed: int, lengths: Sequence[int]) -> list[list[int]]:
    """Draw a prompt of each length."""
    random = np.random.default_rng(seed)
    return [random.integers(CONFIG.vocab_size, size=length).tolist() for length in lengths]


def step(model: LlamaModel, cache: KvBackend, seqs: Sequence[Any], new: Sequence[Sequence[int]]) -> Floats:
    """Compute the tokens `new[i]` of each sequence in one batch; scores after the last one [B, vocab]."""
    lengths = [len(tokens) for tokens in new]
    with cache.batch(seqs, lengths) as batch:
        hidden = model.forward(np.concatenate(new), cache, batch)
    return model.logits(hidden[:, np.cumsum(lengths) - 1])


def dense_cache() -> DenseCache:
    """Make a cache of `CONFIG` without pages, whose answers the paged ones must equal."""
    return DenseCache(
        num_layers=CONFIG.num_layers, num_kv_heads=CONFIG.num_kv_heads, head_dim=CONFIG.head_dim
    )


def dense_greedy(model: LlamaModel, prompt: Sequence[int], num_tokens: int) -> list[int]:
    """Generate greedily, one sequence alone and without pages."""
    cache = dense_cache()
    seq, new = cache.sequence(), list(prompt)
    output: list[int] = []
    while len(output) < num_tokens:
        new = [int(step(model, cache, [seq], [new])[0].argmax())]
        output += new
    return output
