"""From a file to a model that is ready to answer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import paged_kv
from paged_kv.llm.download import resolve_model
from paged_kv.llm.model import LlamaModel
from paged_kv.llm.tokenizer import Tokenizer
from paged_kv.llm.weights import GgufFile

if TYPE_CHECKING:
    import os

    from paged_kv.llm.config import LlamaConfig


@dataclass(frozen=True, slots=True)
class LanguageModel:
    """A model with its tokenizer.

    Attributes
    ----------
    model : LlamaModel
        The forward pass.
    tokenizer : Tokenizer
        Text to token ids and back.
    """

    model: LlamaModel
    tokenizer: Tokenizer

    @property
    def config(self) -> LlamaConfig:
        """The model's dimensions."""
        return self.model.config


def load(path: str | os.PathLike[str] | None = None) -> LanguageModel:
    """Load a Llama-architecture GGUF file.

    Parameters
    ----------
    path : path-like, optional
        The file. None: ``$PAGED_KV_MODEL`` if set, else SmolLM2-135M-Instruct, downloaded at first use.

    Raises
    ------
    DownloadError
        The reference model could not be fetched.
    UnsupportedModelError
        The file needs something that is missing here; the message names it.
    ModelError
        The file is missing, broken or incomplete.
    """
    file = GgufFile(resolve_model(path))
    # The tokenizer first: if it is not supported, that shows before all weights are dequantised.
    tokenizer = Tokenizer(file.metadata)
    return LanguageModel(LlamaModel.from_gguf(file), tokenizer)


def new_cache(
    config: LlamaConfig,
    *,
    num_tokens: int,
    page_size: int = 16,
    dtype: str | None = None,
    num_threads: int | None = None,
    device: str = "cpu",
) -> paged_kv.KvCache:
    """Make a KV cache of a model's shape.

    Parameters
    ----------
    config : LlamaConfig
        The model's dimensions.
    num_tokens : int
        Slots it should have at least; rounded up to whole pages.
    page_size : int
        Tokens per page.
    dtype : str, optional
        Element type of keys and values. None: float32, on an NPU float16, which its kernels take.
    num_threads : int, optional
        Threads that attend; None leaves it to the cache.
    device : str
        Where keys and values are kept, and attention is computed; as for `paged_kv.KvCache`.
    """
    return paged_kv.KvCache(
        num_layers=config.num_layers,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        page_size=page_size,
        num_pages=-(-num_tokens // page_size),
        dtype=dtype or ("float32" if device == "cpu" else "float16"),
        num_threads=num_threads,
        device=device,
    )
