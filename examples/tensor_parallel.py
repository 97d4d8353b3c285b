"""Tensor parallelism: two processes with half of the heads each, and one scheduler that owns the tables.

The scheduler's cache has no layers: it says where tokens lie, and its batch, pickled, becomes a
`BatchView` that says the same to each rank. Ranks have caches of as many pages of the same size, but
with their own KV heads; they carry out the view's copies, compute, and know nothing of sequences. A
view holds no lease: the scheduler keeps the batch open until the ranks have answered.

Weights are split as in Megatron-LM (Shoeybi et al., 2019): query, key, value, gate and up by rows, the
two projections after them by columns, and what those give is summed over the ranks.

Run it: ``python examples/tensor_parallel.py``
"""

from __future__ import annotations

import multiprocessing as mp
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Self, cast

import numpy as np

import paged_kv
from paged_kv.llm import LlamaConfig, LlamaModel
from tiny_llama import CONFIG, random_prompts, random_weights, step, tiny_llama

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from multiprocessing.connection import Connection

    from paged_kv.llm.weights import Floats, LayerWeights, LlamaWeights

NUM_RANKS = 2
NUM_PAGES, PAGE_SIZE = 64, 8
"""What scheduler and ranks must agree on."""


class RowParallel:
    """A matrix of which each rank holds some columns: the partial products are summed over the ranks."""

    def __init__(self, columns: Floats, rank: int, peer: Connection) -> None:
        self.columns, self.rank, self.peer = columns, rank, peer

    def __matmul__(self, x: Floats) -> Floats:
        """Multiply and sum up: an all-reduce for two ranks."""
        part: Floats = self.columns @ x
        if self.rank == 0:
            self.peer.send_bytes(part.tobytes())
        other = np.frombuffer(self.peer.recv_bytes(), np.float32).reshape(part.shape)
        if self.rank == 1:  # not before it has received, or large messages would block both
            self.peer.send_bytes(part.tobytes())
        return part + other


def shard(config: LlamaConfig, weights: LlamaWeights, rank: int, peer: Connection) -> LlamaModel:
    """Make the model of one rank: its heads, its part of the feed-forward layer."""

    def rows(matrix: Floats) -> Floats:
        return np.split(matrix, NUM_RANKS)[rank]

    def summed(matrix: Floats) -> Floats:
        # The forward pass does nothing with it but `matrix @ x`.
        return cast("Floats", RowParallel(np.split(matrix, NUM_RANKS, axis=1)[rank], rank, peer))

    def layer(full: LayerWeights) -> LayerWeights:
        q_rows, kv_rows = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        query, key, value = np.split(full.qkv, [q_rows, q_rows + kv_rows])
        gate, up = np.split(full.gate_up, 2)
        return replace(
            full,
            qkv=np.concatenate([rows(query), rows(key), rows(value)]),
            attn_output=summed(full.attn_output),
            gate_up=np.concatenate([rows(gate), rows(up)]),
            ffn_down=summed(full.ffn_down),
        )

    mine = replace(
        config, num_heads=config.num_heads // NUM_RANKS, num_kv_heads=config.num_kv_heads // NUM_RANKS
    )
    return LlamaModel(mine, replace(weights, layers=[layer(full) for full in weights.layers]))


def run_rank(rank: int, scheduler: Connection, peer: Connection) -> None:
    """Answer the scheduler's batches until it closes the connection."""
    model = shard(CONFIG, random_weights(CONFIG, seed=0), rank, peer)
    cache = cache_of(model.config)
    while True:
        try:
            view, token_ids, last_rows = scheduler.recv()
        except EOFError:
            return
        cache.copy_pages(view.copies)
        hidden = model.forward(token_ids, cache, view)
        scheduler.send(model.logits(hidden[:, last_rows]) if rank == 0 else None)


def cache_of(config: LlamaConfig) -> paged_kv.KvCache:
    """Make a cache for the heads that a configuration has."""
    return paged_kv.KvCache(
        num_layers=config.num_layers,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        dtype="float32",
        num_threads=1,
        num_pages=NUM_PAGES,
        page_size=PAGE_SIZE,
    )


class TensorParallel:
    """The scheduler: sequences and tables here, keys, values and arithmetic in the ranks."""

    def __init__(self) -> None:
        self.tables = paged_kv.KvCache(num_layers=0, num_pages=NUM_PAGES, page_size=PAGE_SIZE)

    def __enter__(self) -> Self:
        """Start the ranks."""
        context = mp.get_context("spawn")
        peers = context.Pipe()
        pipes = [context.Pipe() for _ in range(NUM_RANKS)]
        self._processes = [
            context.Process(target=run_rank, args=(rank, theirs, peer), daemon=True)
            for rank, ((_, theirs), peer) in enumerate(zip(pipes, peers, strict=True))
        ]
        for process in self._processes:
            process.start()
        for connection in (*peers, *(theirs for _, theirs in pipes)):
            connection.close()  # so that the end of a process shows as the end of its connection
        self._ranks = [ours for ours, _ in pipes]
        return self

    def __exit__(self, *_: object) -> None:
        """Let the ranks end."""
        for rank in self._ranks:
            rank.close()
        for process in self._processes:
            process.join()

    def step(self, seqs: Sequence[paged_kv.Sequence], new: Sequence[Sequence[int]]) -> Floats:
        """Compute the tokens `new[i]` of each sequence; scores after the last one [B, vocab]."""
        lengths = [len(tokens) for tokens in new]
        with self.tables.batch(seqs, lengths) as batch:
            for rank in self._ranks:
                rank.send((batch, np.concatenate(new), np.cumsum(lengths) - 1))
            scores, *_ = [rank.recv() for rank in self._ranks]
        return cast("Floats", scores)


def forked_answers(
    next_scores: Callable[[Sequence[paged_kv.Sequence], Sequence[Sequence[int]]], Floats],
    tables: paged_kv.KvCache,
    prompts: Sequence[Sequence[int]],
    num_tokens: int,
) -> tuple[list[list[int]], list[Floats]]:
    """Answer each prompt twice, by the best first token and the next best, on a fork; and all scores."""
    parents = [tables.sequence() for _ in prompts]
    all_scores = [next_scores(parents, prompts)]
    seqs = tables.reorder(parents, [i // 2 for i in range(2 * len(prompts))])
    new = [[int(token)] for row in all_scores[0] for token in np.argsort(row)[:-3:-1]]
    answers = [list(tokens) for tokens in new]
    for _ in range(num_tokens - 1):
        all_scores.append(next_scores(seqs, new))
        new = [[int(row.argmax())] for row in all_scores[-1]]
        for answer, tokens in zip(answers, new, strict=True):
            answer += tokens
    tables.reorder(seqs, [])  # picks none: all are freed
    return answers, all_scores


def main() -> None:
    """Answer on two processes and on one, and compare."""
    prompts = random_prompts(7, [20, 33])
    with TensorParallel() as ranks:
        answers, scores = forked_answers(ranks.step, ranks.tables, prompts, 16)
    for answer in answers:
        print(*answer)

    model, whole = tiny_llama(), cache_of(CONFIG)
    expected, expected_scores = forked_answers(partial(step, model, whole), whole, prompts, 16)
    print(f"{NUM_RANKS} processes, {CONFIG.num_kv_heads // NUM_RANKS} of {CONFIG.num_kv_heads} KV heads each")
    print(f"{ranks.tables.stats()['copied_pages']} pages were copied on write in every rank")
    print(f"equal to a single process: {answers == expected}")
    worst = max(np.abs(a - b).max() for a, b in zip(scores, expected_scores, strict=True))
    print(f"scores differ by {worst:.1e} at most, for sums are added up in another order")


if __name__ == "__main__":
    main()
