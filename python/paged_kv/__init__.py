"""The KV cache of LLM serving as paged virtual memory.

Memory is handed out in pages, shared by fork and copied on write; leases keep what attention reads
from being overwritten; attention reads straight from scattered pages. See ``docs/design.md``.
"""

from paged_kv._core import (
    Batch,
    BatchView,
    KvCache,
    PagePool,
    Sequence,
    Tensor,
    __version__,
    alibi_slopes,
    isa,
    kv_bytes_per_token,
    merge_states,
    paged_attention,
    set_isa,
    write_pages,
)
from paged_kv.errors import (
    CacheMemoryError,
    CorruptionError,
    DeviceError,
    InvalidPageError,
    LayoutError,
    NeverFitsError,
    NotQuiescentError,
    OutOfPagesError,
    PagedKvError,
    RefCountError,
    SequenceBusyError,
    SequenceFreedError,
)
from paged_kv.explanation import Explanation, PageState

__all__ = [
    "Batch",
    "BatchView",
    "CacheMemoryError",
    "CorruptionError",
    "DeviceError",
    "Explanation",
    "InvalidPageError",
    "KvCache",
    "LayoutError",
    "NeverFitsError",
    "NotQuiescentError",
    "OutOfPagesError",
    "PagePool",
    "PageState",
    "PagedKvError",
    "RefCountError",
    "Sequence",
    "SequenceBusyError",
    "SequenceFreedError",
    "Tensor",
    "__version__",
    "alibi_slopes",
    "isa",
    "kv_bytes_per_token",
    "merge_states",
    "paged_attention",
    "set_isa",
    "write_pages",
]
