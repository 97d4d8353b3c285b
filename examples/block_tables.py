"""Tables only: `paged_kv` says where tokens lie, kernels of your own read and write them.

A cache with `num_layers=0` has pages, sequences and batches but no memory. Here the memory is a numpy
array, as it would be a tensor on a device, and two toy kernels stand for real ones:

- prefill takes a compressed table, `kv_indptr`, `kv_indices`, `kv_last_page_len`, as FlashInfer does;
- decode takes a rectangular one, `block_table`, `seq_lens`, as vLLM does, in buffers of a fixed shape
  whatever the batch, as a captured graph needs them. `batch.fill` writes and pads them; with
  `null_page` the padding points at page 0, which holds zeros and belongs to nobody, so the kernel reads
  it without asking.

What the cache can't do without memory is copy on write: `batch.copies` lists what the caller has to
copy before it writes.

Run it: ``python examples/block_tables.py``
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import takewhile
from typing import TYPE_CHECKING

import numpy as np

import paged_kv
from tiny_llama import CONFIG, dense_greedy, random_prompts, step, tiny_llama

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from paged_kv.llm import LlamaConfig, LlamaModel
    from paged_kv.llm.weights import Floats

    Ints = NDArray[np.integer]


@dataclass
class Buffers:
    """Arrays of fixed shape that every step is written into, padded to their end."""

    block_table: Ints  # [max_batch, max_pages]
    seq_lens: Ints  # [max_batch]
    cu_seqlens_q: Ints  # [max_batch + 1]
    slot_mapping: Ints  # [max_tokens]
    kv_indptr: Ints  # [max_batch + 1]
    kv_indices: Ints  # [max_batch * max_pages]
    kv_last_page_len: Ints  # [max_batch]

    @classmethod
    def new(cls, max_batch: int, max_tokens: int, max_pages: int) -> Buffers:
        """Allocate for so many sequences, new tokens, and pages of one sequence."""
        return cls(
            block_table=np.zeros((max_batch, max_pages), np.int32),
            seq_lens=np.zeros(max_batch, np.int32),
            cu_seqlens_q=np.zeros(max_batch + 1, np.int32),
            slot_mapping=np.zeros(max_tokens, np.int64),
            kv_indptr=np.zeros(max_batch + 1, np.int32),
            kv_indices=np.zeros(max_batch * max_pages, np.int32),
            kv_last_page_len=np.zeros(max_batch, np.int32),
        )


class OwnKernels:
    """A backend with memory and kernels of its own; a model runs on it as on a `paged_kv.KvCache`."""

    def __init__(
        self,
        config: LlamaConfig,
        *,
        num_pages: int,
        page_size: int,
        max_batch: int = 8,
        max_tokens: int = 128,
        max_pages: int = 32,
    ) -> None:
        self.tables = paged_kv.KvCache(num_layers=0, num_pages=num_pages, page_size=page_size, null_page=True)
        self.buffers = Buffers.new(max_batch, max_tokens, max_pages)
        # The null page comes on top of `num_pages`.
        shape = (config.num_layers, num_pages + 1, page_size, config.num_kv_heads, config.head_dim)
        self.keys, self.values = np.zeros(shape, np.float32), np.zeros(shape, np.float32)

    def sequence(self) -> paged_kv.Sequence:
        """Create an empty sequence."""
        return self.tables.sequence()

    def batch(self, seqs: Sequence[paged_kv.Sequence], num_new_tokens: Sequence[int]) -> paged_kv.Batch:
        """Open a batch, carry out its copies, and fill the buffers."""
        batch = self.tables.batch(seqs, num_new_tokens)
        sources, destinations = batch.copies.T
        self.keys[:, destinations] = self.keys[:, sources]
        self.values[:, destinations] = self.values[:, sources]
        batch.fill(**vars(self.buffers))
        return batch

    def write(self, layer: int, key: Floats, value: Floats, _: paged_kv.Batch) -> None:
        """Scatter keys and values [tokens, num_kv_heads, head_dim] to their slots; padding has slot -1."""
        slots = self.buffers.slot_mapping[: len(key)]
        self.keys[layer].reshape(-1, *key.shape[1:])[slots] = key
        self.values[layer].reshape(-1, *value.shape[1:])[slots] = value

    def attend(self, layer: int, query: Floats, batch: paged_kv.Batch) -> Floats:
        """Attend with the kernel for the case, which knows nothing but pages and buffers."""
        keys, values = self.keys[layer], self.values[layer]
        if (np.diff(batch.cu_seqlens_q) != 1).any():
            return prefill(query, keys, values, self.buffers)
        padded = np.zeros((len(self.buffers.seq_lens), *query.shape[1:]), np.float32)
        padded[: len(query)] = query
        return decode(padded, keys, values, self.buffers)[: len(query)]


def prefill(query: Floats, keys: Floats, values: Floats, b: Buffers) -> Floats:
    """Any number of queries a sequence, compressed table; pages [.., page_size, num_kv_heads, head_dim]."""
    out = np.zeros_like(query)
    for i, last_page_len in enumerate(b.kv_last_page_len):
        rows = slice(b.cu_seqlens_q[i], b.cu_seqlens_q[i + 1])
        pages = b.kv_indices[b.kv_indptr[i] : b.kv_indptr[i + 1]]
        length = (len(pages) - 1) * keys.shape[1] + last_page_len
        positions = np.arange(length)[length - len(out[rows]) :]
        if len(positions) == 0:  # cumulative arrays repeat their last value as padding
            continue
        key = keys[pages].reshape(1, -1, *keys.shape[2:])[:, :length]
        value = values[pages].reshape(1, -1, *values.shape[2:])[:, :length]
        out[rows] = attention(query[rows], key, value, np.arange(length) <= positions[:, None])
    return out


def decode(query: Floats, keys: Floats, values: Floats, b: Buffers) -> Floats:
    """One query a row, rectangular table: every row reads `max_pages` pages, whatever it needs."""
    rows = len(b.block_table)
    key = keys[b.block_table].reshape(rows, -1, *keys.shape[2:])
    value = values[b.block_table].reshape(rows, -1, *values.shape[2:])
    return attention(query, key, value, np.arange(key.shape[1]) < b.seq_lens[:, None])


def attention(query: Floats, key: Floats, value: Floats, seen: NDArray[np.bool_]) -> Floats:
    """Attend: queries [n, num_heads, head_dim], keys [n or 1, length, num_kv_heads, head_dim]."""
    grouped = query.reshape(len(query), key.shape[2], -1, query.shape[2])
    scores = grouped @ key.transpose(0, 2, 3, 1) / np.sqrt(np.float32(query.shape[2]))
    # A large number instead of infinity: rows of padding see nothing, and NaN would be reported.
    scores = np.where(seen[:, None, None], scores, np.float32(-1e30))
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    out: Floats = weights @ value.transpose(0, 2, 1, 3) / weights.sum(axis=-1, keepdims=True)
    return out.reshape(query.shape)


def generate(
    model: LlamaModel, backend: OwnKernels, prompts: Sequence[Sequence[int]], num_tokens: int
) -> list[list[int]]:
    """Generate greedily; the prompts must begin alike, and share what they have in common."""
    shared = [
        alike[0] for alike in takewhile(lambda alike: len(set(alike)) == 1, zip(*prompts, strict=False))
    ]
    shared = shared[: min(map(len, prompts)) - 1]  # each needs one token of its own to go on from
    prefix = backend.sequence()
    step(model, backend, [prefix], [shared])
    seqs = [prefix.fork() for _ in prompts]
    answers: list[list[int]] = [[] for _ in prompts]
    new = [list(prompt[len(shared) :]) for prompt in prompts]
    for _ in range(num_tokens):
        new = [[int(scores.argmax())] for scores in step(model, backend, seqs, new)]
        for answer, tokens in zip(answers, new, strict=True):
            answer += tokens
    for seq in (prefix, *seqs):
        seq.free()
    return answers


def main() -> None:
    """Generate after three prompts that begin alike, and compare with the dense reference."""
    model = tiny_llama()
    backend = OwnKernels(CONFIG, num_pages=64, page_size=8)
    [shared, *tails] = random_prompts(6, [45, 1, 3, 20])
    prompts = [shared + tail for tail in tails]
    answers = generate(model, backend, prompts, 20)
    for answer in answers:
        print(*answer)
    print(f"equal to the dense reference: {answers == [dense_greedy(model, p, 20) for p in prompts]}")
    print(f"{backend.tables.stats()['copied_pages']} pages were copied by this program on the cache's word")


if __name__ == "__main__":
    main()
