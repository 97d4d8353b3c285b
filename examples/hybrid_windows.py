"""A hybrid model: some layers see everything, others a sliding window, each kind with a cache of its own.

A cache has one window, its `window_left`, which `attend` applies unless told otherwise; layers of another
kind need a cache of their own, with a pool sized for them. So every request has a sequence in each cache,
and a step opens a batch in both in one `with`: both commit, or both are as they were. When the second is
out of pages, the first has its own back, and the scheduler may preempt somebody and try again.

Here the window saves reading, not memory: pages that it has left behind stay with their sequence.

Run it: ``python examples/hybrid_windows.py``
"""

from __future__ import annotations

from contextlib import contextmanager
from itertools import count
from typing import TYPE_CHECKING, Any, NamedTuple

import paged_kv
from tiny_llama import CONFIG, random_prompts, step, tiny_llama

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import numpy as np
    from numpy.typing import NDArray

    from paged_kv.llm.weights import Floats

FULL_LAYERS = {2}
"""Layers of the model that see everything; the others see a window."""


class HybridSequence(NamedTuple):
    """One request: its sequence in the cache of each kind."""

    full: paged_kv.Sequence
    window: paged_kv.Sequence

    def free(self) -> None:
        """Give back the pages of both."""
        self.full.free()
        self.window.free()


class HybridBatch(NamedTuple):
    """A batch in the cache of each kind, over the same tokens."""

    full: paged_kv.Batch
    window: paged_kv.Batch

    @property
    def positions(self) -> NDArray[np.int64]:
        """Absolute position of each new token [tokens], the same in both."""
        return self.full.positions


class HybridCache:
    """Two caches that a model uses as one.

    Parameters
    ----------
    window : int
        Tokens that a token sees in layers with a window, itself included.
    num_pages, num_window_pages : int
        Pages of the cache for full attention, and of the one for windows.
    page_size : int
        Tokens per page in both.
    """

    def __init__(self, *, window: int, num_pages: int, num_window_pages: int, page_size: int = 8) -> None:
        def cache(num_layers: int, num_pages: int, window_left: int) -> paged_kv.KvCache:
            return paged_kv.KvCache(
                num_layers=num_layers,
                num_kv_heads=CONFIG.num_kv_heads,
                head_dim=CONFIG.head_dim,
                page_size=page_size,
                num_pages=num_pages,
                window_left=window_left,
                dtype="float32",
            )

        self.full = cache(len(FULL_LAYERS), num_pages, -1)
        self.window = cache(CONFIG.num_layers - len(FULL_LAYERS), num_window_pages, window - 1)
        full, windowed = count(), count()
        # Of each of the model's layers: whether it is a full one, and which of its kind.
        self._places = [
            (True, next(full)) if layer in FULL_LAYERS else (False, next(windowed))
            for layer in range(CONFIG.num_layers)
        ]

    def sequence(self) -> HybridSequence:
        """Create an empty sequence in both."""
        return HybridSequence(self.full.sequence(), self.window.sequence())

    @contextmanager
    def batch(self, seqs: Sequence[HybridSequence], num_new_tokens: Sequence[int]) -> Iterator[HybridBatch]:
        """Open a batch in both; if the second doesn't fit, the first is undone."""
        with (
            self.full.batch([seq.full for seq in seqs], num_new_tokens) as full,
            self.window.batch([seq.window for seq in seqs], num_new_tokens) as window,
        ):
            yield HybridBatch(full, window)

    def write(self, layer: int, key: Floats, value: Floats, batch: HybridBatch) -> None:
        """Write to the cache of the layer's kind."""
        is_full, own_layer = self._places[layer]
        if is_full:
            self.full.write(own_layer, key, value, batch.full)
        else:
            self.window.write(own_layer, key, value, batch.window)

    def attend(self, layer: int, query: Floats, batch: HybridBatch) -> Any:
        """Attend in the cache of the layer's kind, which knows its window."""
        is_full, own_layer = self._places[layer]
        if is_full:
            return self.full.attend(own_layer, query, batch.full)
        return self.window.attend(own_layer, query, batch.window)


def main() -> None:
    """Let two texts grow far beyond the window, the second of them out of a smaller pool's reach."""
    model, cache = tiny_llama(), HybridCache(window=32, num_pages=64, num_window_pages=40)
    prompts = random_prompts(9, [40, 11])
    seqs, new = [cache.sequence() for _ in prompts], prompts
    texts = [list(prompt) for prompt in prompts]
    try:
        while True:
            new = [[int(scores.argmax())] for scores in step(model, cache, seqs, new)]
            for text, tokens in zip(texts, new, strict=True):
                text += tokens
    except paged_kv.OutOfPagesError as error:
        print(f"the window's cache: {error}")
    for name, kind in (("full", cache.full), ("window", cache.window)):
        stats = kind.stats()
        print(f"{name:>6}: {stats['tokens']} tokens in {stats['live_pages']} of {stats['total_pages']} pages")
    for text in texts:
        print("…", *text[-16:])


if __name__ == "__main__":
    main()
