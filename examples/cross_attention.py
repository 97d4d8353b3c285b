"""Cross-attention: a decoder that reads its own tokens in one cache and the source's in another.

The source is computed once and then only read: its batch has no new tokens, `num_new_tokens=0`, and as
many query rows as the target has new ones, `num_queries`. Attention over it is not causal, for every
target token sees the whole source. Both batches are opened in one `with`: if the second doesn't fit, or
anything fails inside, both caches are as they were.

A batch holds each sequence once, so several targets of one source each take a fork of it. That costs no
pages, and keeps the source alive as long as one of them does.

Run it: ``python examples/cross_attention.py``
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

import paged_kv

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from paged_kv.llm.weights import Floats

NUM_LAYERS, NUM_HEADS, NUM_KV_HEADS, HEAD_DIM = 2, 4, 2, 16
HIDDEN = NUM_HEADS * HEAD_DIM


class Projections(NamedTuple):
    """Matrices [in, out] of one attention."""

    query: Floats
    key: Floats
    value: Floats
    output: Floats


class Decoder:
    """Decoder layers with random weights: self-attention, then cross-attention, each added to the input."""

    def __init__(self, seed: int = 0) -> None:
        random = np.random.default_rng(seed)

        def matrix(width: int) -> Floats:
            return random.standard_normal((HIDDEN, width), np.float32) / np.float32(np.sqrt(HIDDEN))

        def projections() -> Projections:
            kv_width = NUM_KV_HEADS * HEAD_DIM
            return Projections(matrix(HIDDEN), matrix(kv_width), matrix(kv_width), matrix(HIDDEN))

        self.layers = [(projections(), projections()) for _ in range(NUM_LAYERS)]

    def read_source(self, cache: paged_kv.KvCache, states: Floats) -> paged_kv.Sequence:
        """Keep keys and values of the encoder's output [tokens, hidden] for all layers."""
        source = cache.sequence()
        with cache.batch([source], len(states)) as batch:
            for layer, (_, cross) in enumerate(self.layers):
                cache.write(layer, heads(states @ cross.key), heads(states @ cross.value), batch)
        return source

    def step(
        self,
        x: Floats,
        targets: paged_kv.KvCache,
        target_seqs: Sequence[paged_kv.Sequence],
        sources: paged_kv.KvCache,
        source_seqs: Sequence[paged_kv.Sequence],
        num_new_tokens: Sequence[int],
    ) -> Floats:
        """Run new tokens of the targets [tokens, hidden] through all layers; the same shape again."""
        with (
            targets.batch(target_seqs, num_new_tokens) as target,
            sources.batch(source_seqs, 0, num_queries=num_new_tokens) as source,
        ):
            for layer, (own, cross) in enumerate(self.layers):
                normed = normalised(x)
                targets.write(layer, heads(normed @ own.key), heads(normed @ own.value), target)
                out = targets.attend(layer, heads(normed @ own.query), target)
                x = x + out.reshape(x.shape) @ own.output

                query = heads(normalised(x) @ cross.query)
                out = sources.attend(layer, query, source, causal=False)
                x = x + out.reshape(x.shape) @ cross.output
        return normalised(x)


def normalised(x: Floats) -> Floats:
    """Scale each row to mean square 1."""
    scaled: Floats = x / np.sqrt(np.square(x).mean(axis=1, keepdims=True))
    return scaled


def heads(rows: Floats) -> Floats:
    """[tokens, num_heads · head_dim] as [tokens, num_heads, head_dim]."""
    return rows.reshape(len(rows), -1, HEAD_DIM)


def cache_of(num_pages: int) -> paged_kv.KvCache:
    """Make a cache of the decoder's shape; targets and sources each have one."""
    return paged_kv.KvCache(
        num_layers=NUM_LAYERS,
        num_kv_heads=NUM_KV_HEADS,
        head_dim=HEAD_DIM,
        page_size=8,
        num_pages=num_pages,
        dtype="float32",
    )


def main() -> None:
    """Run three targets over two sources, one of them shared, a chunk first and then token by token."""
    decoder, random = Decoder(), np.random.default_rng(8)
    targets, sources = cache_of(32), cache_of(32)

    def draw(n: int) -> NDArray[np.float32]:
        return random.standard_normal((n, HIDDEN), np.float32)

    long, short = (decoder.read_source(sources, draw(n)) for n in (90, 13))
    source_seqs = [long, long.fork(), short]
    print(
        f"three targets read {sum(map(len, source_seqs))} source tokens in "
        f"{sources.stats()['live_pages']} pages"
    )
    target_seqs = [targets.sequence() for _ in source_seqs]
    x = decoder.step(draw(9), targets, target_seqs, sources, source_seqs, [4, 2, 3])
    for _ in range(10):
        x = decoder.step(x[-3:], targets, target_seqs, sources, source_seqs, [1, 1, 1])
    print(f"targets hold {[len(seq) for seq in target_seqs]} tokens; last outputs begin with")
    for row in x:
        print(*(f"{value:8.3f}" for value in row[:6]))


if __name__ == "__main__":
    main()
