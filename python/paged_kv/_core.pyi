"""The extension module behind the package ``paged_kv``."""

from typing import Any, Literal, Protocol, TypeAlias, final

import numpy as np
import numpy.typing as npt

__all__ = [
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

__version__: str

class _DLPack(Protocol):
    """What torch, jax and others hand over without copying."""

    def __dlpack__(self, *, max_version: tuple[int, int] = ...) -> Any: ...
    def __dlpack_device__(self) -> tuple[int, int]: ...

_Array: TypeAlias = npt.NDArray[Any] | _DLPack
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

def paged_attention(
    query: _Array,
    key_pages: _Array,
    value_pages: _Array,
    block_table: _Array,
    seq_lens: _Array,
    cu_seqlens_q: _Array,
    *,
    layout: _Layout = "HND",
    scale: float | None = None,
    causal: bool = True,
    window_left: int = -1,
    logits_soft_cap: float = 0.0,
    alibi_slopes: _Array | None = None,
    sinks: _Array | None = None,
    return_lse: bool = False,
    out: _Array | None = None,
    num_threads: int | None = None,
) -> Any: ...
def write_pages(
    key: _Array,
    value: _Array,
    key_pages: _Array,
    value_pages: _Array,
    slot_mapping: _Array,
    *,
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
