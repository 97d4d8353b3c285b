"""A tiny random Llama in a real GGUF file, and the reference model: both loaded once per test run."""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import gguf
import numpy as np
import pytest

from paged_kv.llm import DenseCache, DownloadError, LanguageModel, LlamaConfig, load
from paged_kv.llm.download import fetch_reference_model

if TYPE_CHECKING:
    from collections.abc import Callable

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] "
    "+ '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
CONTROL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MERGES = ["t h", "th e", "Ġ the", "i n", "Ġ a", "o n", "Ġ Ġ"]

HIDDEN, INNER, LAYERS, HEADS, KV_HEADS, HEAD_DIM = 64, 96, 3, 4, 2, 16


def byte_alphabet() -> list[str]:
    """GPT-2's printable stand-in for each of the 256 bytes."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = iter(range(0x100, 0x200))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]


def vocabulary() -> list[str]:
    return CONTROL_TOKENS + byte_alphabet() + [merge.replace(" ", "") for merge in MERGES]


def random_tensors(seed: int = 0) -> dict[str, np.ndarray]:
    """Weights that keep activations near 1 and make answers differ from prompt to prompt."""
    random = np.random.default_rng(seed)

    def matrix(rows: int, columns: int) -> np.ndarray:
        return (random.standard_normal((rows, columns)) * 1.5 / np.sqrt(columns)).astype(np.float32)

    def gain() -> np.ndarray:
        return random.uniform(0.5, 1.5, HIDDEN).astype(np.float32)

    tensors = {"token_embd.weight": matrix(len(vocabulary()), HIDDEN), "output_norm.weight": gain()}
    for layer in range(LAYERS):
        parts = {
            "attn_norm": gain(),
            "attn_q": matrix(HEADS * HEAD_DIM, HIDDEN),
            "attn_k": matrix(KV_HEADS * HEAD_DIM, HIDDEN),
            "attn_v": matrix(KV_HEADS * HEAD_DIM, HIDDEN),
            "attn_output": matrix(HIDDEN, HEADS * HEAD_DIM),
            "ffn_norm": gain(),
            "ffn_gate": matrix(INNER, HIDDEN),
            "ffn_up": matrix(INNER, HIDDEN),
            "ffn_down": matrix(HIDDEN, INNER),
        }
        tensors |= {f"blk.{layer}.{name}.weight": tensor for name, tensor in parts.items()}
    return tensors


def write_gguf(
    path: Path,
    tensors: dict[str, np.ndarray] | None = None,
    *,
    architecture: str = "llama",
    quantise: dict[str, gguf.GGMLQuantizationType] | None = None,
    extra: Callable[[gguf.GGUFWriter], Any] = lambda _: None,
) -> Path:
    """Write a complete model file; `extra` may add metadata of its own."""
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_name("tiny")
    writer.add_block_count(LAYERS)
    writer.add_context_length(512)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(vocabulary())
    kinds = [gguf.TokenType.CONTROL] * len(CONTROL_TOKENS)
    writer.add_token_types(kinds + [gguf.TokenType.NORMAL] * (len(vocabulary()) - len(kinds)))
    writer.add_token_merges(MERGES)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_chat_template(CHATML)
    extra(writer)
    for name, tensor in (tensors if tensors is not None else random_tensors()).items():
        kind = (quantise or {}).get(name)
        data = tensor if kind is None else gguf.quantize(tensor, kind)
        writer.add_tensor(name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@functools.cache
def tiny_path() -> Path:
    """The tiny model's file, in a folder that lasts as long as the test run."""
    folder = tempfile.TemporaryDirectory(prefix="paged-kv-tiny-")
    _folders.append(folder)
    return write_gguf(Path(folder.name) / "tiny.gguf")


_folders: list[tempfile.TemporaryDirectory[str]] = []


@functools.cache
def tiny_model() -> LanguageModel:
    return load(tiny_path())


@functools.cache
def _reference_model() -> LanguageModel | DownloadError:
    try:
        return load(fetch_reference_model())
    except DownloadError as error:
        return error


def reference_model() -> LanguageModel:
    """SmolLM2-135M-Instruct; without it and without a network, the test is skipped with the reason."""
    model = _reference_model()
    if isinstance(model, DownloadError):
        pytest.skip(f"reference model unavailable: {model}")
    return model


def dense_cache(config: LlamaConfig, dtype: type = np.float32) -> DenseCache:
    return DenseCache(
        num_layers=config.num_layers, num_kv_heads=config.num_kv_heads, head_dim=config.head_dim, dtype=dtype
    )
