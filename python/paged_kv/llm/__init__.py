"""A reference runner for Llama models: GGUF weights, numpy arithmetic, keys and values in the paged cache.

It is installed with ``pip install "paged-kv[llm]"``. It exists to show and to prove the cache on a real
model: batched continuous decoding, forks of a shared prompt, and the same tokens as without paging.
"""

try:
    from paged_kv.llm.config import LlamaConfig
    from paged_kv.llm.dense import DenseCache
    from paged_kv.llm.engine import Engine, EngineStats
    from paged_kv.llm.errors import DownloadError, ModelError, UnsupportedModelError
    from paged_kv.llm.generate import Completion, generate
    from paged_kv.llm.loader import LanguageModel, load, new_cache
    from paged_kv.llm.model import LlamaModel
    from paged_kv.llm.request import FinishReason, Request
    from paged_kv.llm.sampling import SamplingParams
    from paged_kv.llm.tokenizer import TextStream, Tokenizer
except ModuleNotFoundError as error:
    error.add_note("Install what paged_kv.llm needs with: pip install 'paged-kv[llm]'")
    raise

__all__ = [
    "Completion",
    "DenseCache",
    "DownloadError",
    "Engine",
    "EngineStats",
    "FinishReason",
    "LanguageModel",
    "LlamaConfig",
    "LlamaModel",
    "ModelError",
    "Request",
    "SamplingParams",
    "TextStream",
    "Tokenizer",
    "UnsupportedModelError",
    "generate",
    "load",
    "new_cache",
]
