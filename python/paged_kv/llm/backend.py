"""What the forward pass and the engine ask of a KV cache.

`paged_kv.KvCache` answers from pages; `paged_kv.llm.dense.DenseCache` from one contiguous array per
sequence. Model and engine can't tell them apart, which is what makes the second a reference for the
first.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol, Self

if TYPE_CHECKING:
    from types import TracebackType

    import numpy as np
    from numpy.typing import NDArray


class KvSequence(Protocol):
    """Tokens of one request in a cache; a subset of `paged_kv.Sequence`."""

    @property
    def num_computed_tokens(self) -> int:
        """Tokens whose keys and values are written and committed."""

    def __len__(self) -> int:
        """Slots reserved, computed or not."""

    def append(self, n: int, /) -> None:
        """Reserve `n` further slots, or change nothing and raise."""

    def fork(self) -> KvSequence:
        """Return a new sequence with the same computed tokens."""

    def truncate(self, n: int, /) -> None:
        """Keep the first `n` tokens."""

    def free(self) -> None:
        """Give everything back; safe from any thread, also while a batch reads the sequence."""


class KvBatch(Protocol):
    """An open transaction over several sequences; a subset of `paged_kv.Batch`."""

    @property
    def positions(self) -> NDArray[np.int64]:
        """Absolute position of each new token [tokens]."""

    def __enter__(self) -> Self:
        """Return the batch itself."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        """Commit, or close if the body raised."""


class KvBackend(Protocol):
    """A KV cache; a subset of `paged_kv.KvCache`."""

    def sequence(self) -> Any:
        """Create an empty sequence."""

    def batch(self, seqs: Any, num_new_tokens: Any, /) -> Any:
        """Reserve `num_new_tokens[i]` slots in each sequence and open a batch: all or nothing."""

    def write(self, layer: int, key: Any, value: Any, batch: Any, /) -> None:
        """Store keys and values [tokens, num_kv_heads, head_dim] of the batch's new tokens."""

    def attend(self, layer: int, query: Any, batch: Any, /) -> Any:
        """Causal attention of queries [tokens, num_heads, head_dim] over each one's own sequence."""
