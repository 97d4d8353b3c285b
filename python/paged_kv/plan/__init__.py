"""What a model's KV cache takes: bytes per token, pages, requests that fit, and what is wasted.

Plain arithmetic on the shape of a model, which `load_config` reads from a Hugging Face ``config.json``.
Nothing here allocates a cache, and nothing but the standard library is needed.
"""

from paged_kv.plan.capacity import Fit, fit, request_bytes
from paged_kv.plan.config import load_config, read_config
from paged_kv.plan.errors import ConfigError, TraceError
from paged_kv.plan.pages import most_pages, pages_held, sum_of_pages
from paged_kv.plan.shape import ELEMENT_TYPES, ElementType, LayerGroup, ModelShape
from paged_kv.plan.trace import Reservation, compare, load_trace

__all__ = [
    "ELEMENT_TYPES",
    "ConfigError",
    "ElementType",
    "Fit",
    "LayerGroup",
    "ModelShape",
    "Reservation",
    "TraceError",
    "compare",
    "fit",
    "load_config",
    "load_trace",
    "most_pages",
    "pages_held",
    "read_config",
    "request_bytes",
    "sum_of_pages",
]
