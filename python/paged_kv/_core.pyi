"""The extension module behind the package ``paged_kv``."""

from collections.abc import Callable, Iterable
from collections.abc import Sequence as _Seq
from types import TracebackType
from typing import Any, Literal, NotRequired, Protocol, Self, TypeAlias, TypedDict, final

import numpy as np
import numpy.typing as npt

from paged_kv.explanation import Explanation

__all__ = [
    "Batch",
    "BatchView",
    "KvCache",
    "PageLease",
    "PagePool",
    "Sequence",
    "Tensor",
    "__version__",
    "alibi_slopes",
    "attention_shapes",
    "bench_attention",
    "bench_cases",
    "bench_pool",
    "compare_exchange_pairs",
    "isa",
    "kv_bytes_per_token",
    "merge_states",
    "paged_attention",
    "read_lines",
    "set_isa",
    "write_pages",
]

__version__: str

class _DLPack(Protocol):
    """What torch, jax and others hand over without copying."""

    def __dlpack__(self, *, max_version: tuple[int, int] = ...) -> Any: ...
    def __dlpack_device__(self) -> tuple[int, int]: ...

_Array: TypeAlias = npt.NDArray[Any] | _DLPack
_Integers: TypeAlias = _Array | _Seq[int]
_Scale: TypeAlias = float | _Array
_Layout: TypeAlias = Literal["HND", "NHD"]

@final
class Tensor:
    """An array in host memory that belongs to this library, for others to use without copying."""

    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def strides(self) -> tuple[int, ...]: ...
    @property
    def dtype(self) -> str: ...
    @property
    def data_ptr(self) -> int: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def readonly(self) -> bool: ...
    def __len__(self) -> int: ...
    def __dlpack_device__(self) -> tuple[int, int]: ...
    def __dlpack__(
        self,
        *,
        stream: int | None = None,
        max_version: tuple[int, int] | None = None,
        dl_device: tuple[int, int] | None = None,
        copy: bool | None = None,
    ) -> Any: ...
    def __array__(self, dtype: npt.DTypeLike | None = None, copy: bool | None = None) -> npt.NDArray[Any]: ...

class _SequenceStats(TypedDict):
    id: int
    len: int
    num_computed_tokens: int
    num_pages: int

class _Stats(TypedDict):
    total_pages: int
    free_pages: int
    live_pages: int
    shared_pages: int
    cached_pages: int
    deferred_pages: int
    copied_pages: int
    sequences: int
    tokens: int
    stored_tokens: int
    reserved_tokens: int
    total_bytes: int
    used_bytes: int
    waste: float
    detail: NotRequired[list[_SequenceStats]]

class _PageMap(TypedDict):
    state: npt.NDArray[np.uint8]
    ref_count: npt.NDArray[np.uint32]
    owner: npt.NDArray[np.int64]
    generation: npt.NDArray[np.uint32]
    copied: npt.NDArray[np.bool_]

@final
class KvCache:
    """A paged KV cache: pages of keys and values in all layers, and the sequences that hold them."""

    def __new__(
        cls,
        *,
        num_layers: int,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        v_head_dim: int | None = None,
        value_in_key: bool = False,
        page_size: int | None = None,
        page_bytes: int | None = None,
        num_pages: int | None = None,
        memory: int | str | None = None,
        dtype: object = None,
        k_scale: _Scale | None = None,
        v_scale: _Scale | None = None,
        layout: _Layout = "HND",
        window_left: int = -1,
        device: object = None,
        storage: Iterable[Iterable[_Array | None]] | None = None,
        null_page: bool = False,
        num_threads: int | None = None,
        huge_pages: Literal["auto", "on", "off"] = "auto",
        overcommit: bool = False,
    ) -> Self: ...
    @property
    def num_layers(self) -> int: ...
    @property
    def num_kv_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...
    @property
    def v_head_dim(self) -> int: ...
    @property
    def value_in_key(self) -> bool: ...
    @property
    def page_size(self) -> int: ...
    @property
    def num_pages(self) -> int: ...
    @property
    def dtype(self) -> str: ...
    @property
    def layout(self) -> str: ...
    @property
    def window_left(self) -> int: ...
    @property
    def null_page(self) -> bool: ...
    @property
    def num_threads(self) -> int: ...
    @property
    def device(self) -> str: ...
    @property
    def pool(self) -> PagePool: ...
    def sequence(self, token_ids: _Integers | None = None) -> Sequence: ...
    def reorder(self, seqs: Iterable[Sequence], indices: _Integers) -> list[Sequence]: ...
    def batch(
        self,
        seqs: Iterable[Sequence],
        num_new_tokens: int | _Integers | None = None,
        *,
        token_ids: _Integers | None = None,
        num_queries: int | _Integers | None = None,
        stream: object = None,
    ) -> Batch: ...
    def write(self, layer: int, key: _Array, value: _Array | None, batch: Batch | BatchView) -> None: ...
    def attend(
        self,
        layer: int,
        query: _Array,
        batch: Batch | BatchView,
        *,
        scale: float | None = None,
        causal: bool = True,
        window_left: int | None = None,
        logits_soft_cap: float = 0.0,
        alibi_slopes: _Array | None = None,
        sinks: _Array | None = None,
        return_lse: bool = False,
        return_error_bound: bool = False,
        out: _Array | None = None,
    ) -> Any: ...
    def copy_pages(self, copies: npt.NDArray[Any] | _Seq[tuple[int, int]]) -> None: ...
    # Any: a Tensor in host memory, a paged_kv.ascend.DeviceTensor on a device.
    def key_pages(self, layer: int, writable: bool = False) -> Any: ...
    def value_pages(self, layer: int, writable: bool = False) -> Any: ...
    def key_scales(self, layer: int, writable: bool = False) -> Tensor: ...
    def value_scales(self, layer: int, writable: bool = False) -> Tensor: ...
    def stats(self, detail: bool = False) -> _Stats: ...
    def validate(self) -> None: ...
    def page_map(self) -> _PageMap: ...
    def explain(self, *, max_cells: int = 0) -> Explanation: ...
    def track_leases(self, warn_after: float | None = None) -> None: ...

@final
class Sequence:
    """The tokens of one request: their page table, and how many of them are computed."""

    @property
    def id(self) -> int: ...
    @property
    def num_computed_tokens(self) -> int: ...
    @property
    def is_freed(self) -> bool: ...
    @property
    def block_table(self) -> npt.NDArray[np.int32]: ...
    @property
    def pending_token_ids(self) -> npt.NDArray[np.uint32]: ...
    def __len__(self) -> int: ...
    def append(self, n: int) -> None: ...
    def extend(self, token_ids: _Integers) -> None: ...
    def fork(self) -> Sequence: ...
    def truncate(self, n: int) -> None: ...
    def commit(self, n: int | None = None) -> None: ...
    def free(self) -> None: ...
    def physical_address(
        self, layer: int, position: int, which: Literal["key", "value"], *, head: int = 0
    ) -> int: ...
    def physical_offset(self, byte_offset: int) -> int: ...
    def prefetch(self, *, max_bytes: int = 1048576) -> int: ...

@final
class Batch:
    """An open batch: slots reserved, shared pages copied, and a lease on what attention reads."""

    @property
    def block_table(self) -> npt.NDArray[np.int32]: ...
    @property
    def seq_lens(self) -> npt.NDArray[np.int32]: ...
    @property
    def cu_seqlens_q(self) -> npt.NDArray[np.int32]: ...
    @property
    def slot_mapping(self) -> npt.NDArray[np.int64]: ...
    @property
    def positions(self) -> npt.NDArray[np.int64]: ...
    @property
    def kv_indptr(self) -> npt.NDArray[np.int32]: ...
    @property
    def kv_indices(self) -> npt.NDArray[np.int32]: ...
    @property
    def kv_last_page_len(self) -> npt.NDArray[np.int32]: ...
    @property
    def copies(self) -> npt.NDArray[np.int64]: ...
    def __len__(self) -> int: ...
    def fill(
        self,
        *,
        block_table: _Array | None = None,
        seq_lens: _Array | None = None,
        cu_seqlens_q: _Array | None = None,
        slot_mapping: _Array | None = None,
        positions: _Array | None = None,
        kv_indptr: _Array | None = None,
        kv_indices: _Array | None = None,
        kv_last_page_len: _Array | None = None,
    ) -> None: ...
    @property
    def is_ended(self) -> bool: ...
    def commit(self, num_tokens: _Integers | None = None) -> None: ...
    def close(self) -> None: ...
    def __enter__(self) -> Self: ...
    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc_value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None: ...

@final
class BatchView:
    """The arrays of a :class:`Batch` of another cache, as pickling it gives them."""

    def __new__(
        cls,
        page_size: int,
        num_pages: int,
        no_page: int,
        block_table: _Array,
        seq_lens: _Integers,
        cu_seqlens_q: _Integers,
        slot_mapping: _Integers,
        positions: _Integers,
        kv_indptr: _Integers,
        kv_indices: _Integers,
        kv_last_page_len: _Integers,
        copies: _Array,
    ) -> Self: ...
    @property
    def block_table(self) -> npt.NDArray[np.int32]: ...
    @property
    def seq_lens(self) -> npt.NDArray[np.int32]: ...
    @property
    def cu_seqlens_q(self) -> npt.NDArray[np.int32]: ...
    @property
    def slot_mapping(self) -> npt.NDArray[np.int64]: ...
    @property
    def positions(self) -> npt.NDArray[np.int64]: ...
    @property
    def kv_indptr(self) -> npt.NDArray[np.int32]: ...
    @property
    def kv_indices(self) -> npt.NDArray[np.int32]: ...
    @property
    def kv_last_page_len(self) -> npt.NDArray[np.int32]: ...
    @property
    def copies(self) -> npt.NDArray[np.int64]: ...
    def __len__(self) -> int: ...
    def fill(
        self,
        *,
        block_table: _Array | None = None,
        seq_lens: _Array | None = None,
        cu_seqlens_q: _Array | None = None,
        slot_mapping: _Array | None = None,
        positions: _Array | None = None,
        kv_indptr: _Array | None = None,
        kv_indices: _Array | None = None,
        kv_last_page_len: _Array | None = None,
    ) -> None: ...
    @property
    def page_size(self) -> int: ...
    @property
    def num_pages(self) -> int: ...

@final
class PageLease:
    """What work on a device holds of the pages."""

    def release(self) -> None: ...

@final
class PagePool:
    """The pages of a cache, for those who keep tables of their own."""

    @property
    def num_pages(self) -> int: ...
    @property
    def num_free(self) -> int: ...
    def alloc(self, n: int) -> npt.NDArray[np.uint64]: ...
    def page_ids(self, handles: _Integers) -> npt.NDArray[np.int32]: ...
    def retain(self, handles: _Integers) -> None: ...
    def release(self, handles: _Integers) -> None: ...
    def ref_count(self, handles: _Integers) -> npt.NDArray[np.uint32]: ...
    def owners(self, handles: _Integers) -> list[list[int]]: ...

def paged_attention(
    query: _Array,
    key_pages: _Array,
    value_pages: _Array | None,
    block_table: _Array,
    seq_lens: _Array,
    cu_seqlens_q: _Array,
    *,
    v_head_dim: int | None = None,
    k_scale: _Scale | None = None,
    v_scale: _Scale | None = None,
    layout: _Layout = "HND",
    scale: float | None = None,
    causal: bool = True,
    window_left: int = -1,
    logits_soft_cap: float = 0.0,
    alibi_slopes: _Array | None = None,
    sinks: _Array | None = None,
    return_lse: bool = False,
    return_error_bound: bool = False,
    out: _Array | None = None,
    num_threads: int | None = None,
) -> Any: ...
def write_pages(
    key: _Array,
    value: _Array | None,
    key_pages: _Array,
    value_pages: _Array | None,
    slot_mapping: _Array,
    *,
    k_scale: _Scale | None = None,
    v_scale: _Scale | None = None,
    layout: _Layout = "HND",
) -> None: ...
def merge_states(out_a: _Array, lse_a: _Array, out_b: _Array, lse_b: _Array) -> tuple[Any, Any]: ...
def alibi_slopes(num_heads: int) -> npt.NDArray[np.float32]: ...
def kv_bytes_per_token(
    *,
    num_layers: int,
    num_kv_heads: int,
    head_dim: int,
    v_head_dim: int | None = None,
    dtype: object = None,
) -> int: ...
def set_isa(name: str) -> None: ...
def isa() -> str: ...

# What `paged-kv bench` measures with.
def bench_attention(
    repetitions: int,
    *,
    cases: _Seq[str] | None = None,
    dtypes: _Seq[str] | None = None,
    page_sizes: _Seq[int] | None = None,
    threads: _Seq[int] | None = None,
    isas: _Seq[str] | None = None,
    rotated_bytes: int = 1073741824,
) -> list[dict[str, Any]]: ...
def attention_shapes() -> list[dict[str, Any]]: ...
def bench_pool(repetitions: int) -> list[dict[str, Any]]: ...
def bench_cases(
    cases: _Seq[tuple[int, Callable[[], object] | None, Callable[[int], object]]],
    repetitions: int,
) -> list[dict[str, Any]]: ...
def compare_exchange_pairs(n: int) -> None: ...
def read_lines(lines: bytes, n: int) -> None: ...
