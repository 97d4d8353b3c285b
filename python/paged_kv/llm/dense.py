"""An unpaged KV cache: one contiguous array per sequence, attention by plain matrix products.

It has no pages, no tables and no sharing, so nothing that can go wrong in those can go wrong here: it
is what the paged cache's answers are compared with. It offers just the calls of
`paged_kv.llm.backend.KvBackend`, with the same meaning.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Self

import numpy as np

from paged_kv.errors import SequenceFreedError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import TracebackType

    from numpy.typing import DTypeLike, NDArray

    from paged_kv.llm.weights import Floats


class DenseSequence:
    """Keys and values of one sequence [num_layers, 2, num_kv_heads, capacity, head_dim]."""

    def __init__(self, storage: NDArray[np.floating]) -> None:
        self._storage: NDArray[np.floating] | None = storage
        self._len = 0
        self.num_computed_tokens = 0

    def __len__(self) -> int:
        return self._len

    @property
    def storage(self) -> NDArray[np.floating]:
        """The array itself; slots from `len` on hold anything."""
        if self._storage is None:
            raise SequenceFreedError("sequence was freed")
        return self._storage

    def append(self, n: int) -> None:
        """Reserve `n` further slots; capacity doubles when it runs out."""
        storage, capacity = self.storage, self.storage.shape[3]
        if self._len + n > capacity:
            capacity = max(2 * capacity, self._len + n)
            grown = np.empty((*storage.shape[:3], capacity, storage.shape[4]), storage.dtype)
            grown[:, :, :, : self._len] = storage[:, :, :, : self._len]
            self._storage = grown
        self._len += n

    def fork(self) -> DenseSequence:
        """Copy the computed tokens."""
        child = DenseSequence(self.storage.copy())
        child._len = child.num_computed_tokens = self.num_computed_tokens
        return child

    def truncate(self, n: int) -> None:
        """Keep the first `n` tokens."""
        self._len = min(self._len, n)
        self.num_computed_tokens = min(self.num_computed_tokens, n)

    def commit(self) -> None:
        """Count all reserved tokens as computed."""
        self.num_computed_tokens = self._len

    def free(self) -> None:
        """Drop the storage."""
        self._storage = None


class DenseBatch:
    """New tokens of several sequences, flat, one sequence after the other."""

    def __init__(self, seqs: Sequence[DenseSequence], num_new_tokens: Sequence[int]) -> None:
        freed = [i for i, seq in enumerate(seqs) if seq._storage is None]
        if freed:
            raise SequenceFreedError(f"sequences {freed} were freed", indices=freed)
        self._spans: list[tuple[DenseSequence, int, int]] = []
        self.views: list[tuple[NDArray[np.floating], int, int]] = []
        """Of each sequence: storage (kept, should it be freed meanwhile), first new position, how many."""
        for seq, new in zip(seqs, num_new_tokens, strict=True):
            start = seq.num_computed_tokens
            seq.append(max(0, start + new - len(seq)))
            self._spans.append((seq, start, new))
            self.views.append((seq.storage, start, new))
        self.positions = np.concatenate([np.arange(start, start + new) for _, start, new in self._spans])

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for seq, start, new in self._spans:
            seq.truncate(start + new if kind is None else start)
            if kind is None:
                seq.commit()


class DenseCache:
    """The unpaged counterpart of `paged_kv.KvCache`.

    Parameters
    ----------
    num_layers, num_kv_heads, head_dim : int
        Shape of the model.
    dtype : dtype-like
        What keys, values and attention are kept and computed in; ``float64`` makes attention exact
        beyond what any float32 implementation can tell apart.
    """

    def __init__(
        self, *, num_layers: int, num_kv_heads: int, head_dim: int, dtype: DTypeLike = np.float32
    ) -> None:
        self._shape = (num_layers, 2, num_kv_heads, 64, head_dim)
        self._dtype = np.dtype(dtype)

    def sequence(self) -> DenseSequence:
        """Create an empty sequence."""
        return DenseSequence(np.empty(self._shape, self._dtype))

    def batch(self, seqs: Sequence[DenseSequence], num_new_tokens: Sequence[int]) -> DenseBatch:
        """Reserve new tokens in each sequence."""
        return DenseBatch(seqs, num_new_tokens)

    def write(self, layer: int, key: Floats, value: Floats, batch: DenseBatch) -> None:
        """Store keys and values [tokens, num_kv_heads, head_dim]."""
        row = 0
        for storage, start, new in batch.views:
            slots = storage[layer, :, :, start : start + new]  # [2, num_kv_heads, new, head_dim]
            slots[0] = key[row : row + new].transpose(1, 0, 2)
            slots[1] = value[row : row + new].transpose(1, 0, 2)
            row += new

    def attend(self, layer: int, query: Floats, batch: DenseBatch) -> Floats:
        """Causal attention [tokens, num_heads, head_dim], scaled by 1 / sqrt(head_dim)."""
        out = np.empty_like(query)
        row = 0
        for storage, start, new in batch.views:
            keys, values = storage[layer, :, :, : start + new]  # [num_kv_heads, length, head_dim]
            out[row : row + new] = _attend_one(query[row : row + new], keys, values, start)
            row += new
        return out


def _attend_one(
    query: Floats, keys: NDArray[np.floating], values: NDArray[np.floating], start: int
) -> NDArray[np.floating]:
    """Attention of one sequence's queries [new, num_heads, head_dim] that sit at `start` and after."""
    (new, num_heads, head_dim), (num_kv_heads, length, _) = query.shape, keys.shape
    group = num_heads // num_kv_heads  # query heads that share a key/value head
    grouped = query.astype(keys.dtype).reshape(new, num_kv_heads, group, head_dim).transpose(1, 2, 0, 3)
    scores = grouped @ keys[:, None].swapaxes(2, 3) / np.sqrt(head_dim).astype(keys.dtype)
    future = np.arange(length) > start + np.arange(new)[:, None]
    scores[..., future] = -np.inf
    scores -= scores.max(axis=-1, keepdims=True)
    np.exp(scores, out=scores)
    scores /= scores.sum(axis=-1, keepdims=True)
    out: NDArray[np.floating] = (scores @ values[:, None]).transpose(2, 0, 1, 3)
    return out.reshape(new, num_heads, head_dim)
