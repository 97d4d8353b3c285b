"""The KV cache of LLM serving as paged virtual memory.

Memory is handed out in pages, shared by fork and copied on write; leases keep what attention reads
from being overwritten; attention reads straight from scattered pages. See ``docs/design.md``.
"""

from paged_kv._core import __version__

__all__ = ["__version__"]
