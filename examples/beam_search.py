"""Beam search: the likeliest answers, kept as sequences that fork and die at every step.

After each token some beams continue in several ways and others in none. `cache.reorder(seqs, parents)`
carries that out in one call: the first pick of a parent moves it, further picks fork it, and parents
that nobody picked are freed. It takes no pages; what beams have in common they share.

Run it: ``python examples/beam_search.py``
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from paged_kv.llm import new_cache
from tiny_llama import CONFIG, random_prompts, step, tiny_llama

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    import paged_kv
    from paged_kv.llm import LlamaModel


class Hypothesis(NamedTuple):
    """An answer, or the beginning of one, and the logarithm of its probability."""

    tokens: list[int]
    log_prob: float


def beam_search(
    model: LlamaModel,
    cache: paged_kv.KvCache,
    prompt: Sequence[int],
    *,
    width: int,
    max_tokens: int,
    stop_id: int | None = None,
) -> list[Hypothesis]:
    """Find `width` likely answers, best first; one ends with `stop_id` or after `max_tokens`."""
    seqs = [cache.sequence()]
    beams, ended = [Hypothesis([], 0.0)], list[Hypothesis]()
    new = [list(prompt)]
    for _ in range(max_tokens):
        log_probs = log_softmax(step(model, cache, seqs, new))
        log_probs += np.array([[beam.log_prob] for beam in beams])
        # At most one continuation of each beam stops, so twice the width leaves enough that go on.
        best = np.argsort(-log_probs, axis=None)[: 2 * width]
        candidates = [(*divmod(int(i), log_probs.shape[1]), float(log_probs.flat[i])) for i in best]
        ended += [
            Hypothesis([*beams[parent].tokens, token], log_prob)
            for parent, token, log_prob in candidates[:width]
            if token == stop_id
        ]
        candidates = [candidate for candidate in candidates if candidate[1] != stop_id][:width]
        seqs = cache.reorder(seqs, [parent for parent, _, _ in candidates])
        beams = [Hypothesis([*beams[parent].tokens, token], score) for parent, token, score in candidates]
        new = [beam.tokens[-1:] for beam in beams]
    cache.reorder(seqs, [])  # picks none: all are freed
    return sorted(beams + ended, key=lambda beam: -beam.log_prob)[:width]


def log_softmax(scores: NDArray[np.float32]) -> NDArray[np.float64]:
    """Logarithms of the probabilities that each row of scores stands for."""
    shifted = scores - scores.max(axis=1, keepdims=True).astype(np.float64)
    log_probs: NDArray[np.float64] = shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
    return log_probs


def main() -> None:
    """Search four beams after one prompt and say what they shared."""
    model, cache = tiny_llama(), new_cache(CONFIG, num_tokens=1024, page_size=4)
    [prompt] = random_prompts(4, [50])
    for tokens, log_prob in beam_search(model, cache, prompt, width=4, max_tokens=16):
        print(f"{log_prob:8.3f}  {' '.join(map(str, tokens))}")
    print(f"{cache.stats()['copied_pages']} pages were copied in all; {cache.pool.num_free} are free again")


if __name__ == "__main__":
    main()
