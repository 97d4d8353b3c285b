"""Speculative decoding: guess the next tokens, check all guesses in one step, keep those that were right.

The draft is free: if the last tokens have occurred before, guess that what followed then follows now
(prompt lookup decoding: Saxena, 2023). The model computes the guesses together with the last token and
says after each what it would have chosen. `batch.commit(num_tokens)` keeps the last token and the guesses
that agree; slots and pages of the rest go back as if they had never been reserved. So the answers are
those of plain greedy decoding, in fewer steps.

Run it: ``python examples/speculative_decoding.py``
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import takewhile
from typing import TYPE_CHECKING

import numpy as np

from paged_kv.llm import new_cache
from tiny_llama import CONFIG, dense_greedy, random_prompts, step, tiny_llama

if TYPE_CHECKING:
    from collections.abc import Sequence

    import paged_kv
    from paged_kv.llm import LlamaModel


@dataclass
class Counts:
    """What became of the guesses."""

    steps: int = 0
    accepted: int = 0
    rejected: int = 0


def generate(
    model: LlamaModel,
    cache: paged_kv.KvCache,
    prompts: Sequence[Sequence[int]],
    max_tokens: int,
    *,
    num_drafts: int = 4,
) -> tuple[list[list[int]], Counts]:
    """Generate greedily for several prompts at once; returns the answers and what the guesses did."""
    counts = Counts()
    texts = [list(prompt) for prompt in prompts]
    ends = [len(prompt) + max_tokens for prompt in prompts]
    seqs = [cache.sequence() for _ in prompts]
    for text, scores in zip(texts, step(model, cache, seqs, prompts), strict=True):
        text.append(int(scores.argmax()))

    while running := [i for i, text in enumerate(texts) if len(text) < ends[i]]:
        # A step gives one token more than it accepts, so the last one needs no guess.
        drafts = [lookup(texts[i], min(num_drafts, ends[i] - len(texts[i]) - 1)) for i in running]
        new = [texts[i][-1:] + draft for i, draft in zip(running, drafts, strict=True)]
        lengths = [len(tokens) for tokens in new]
        with cache.batch([seqs[i] for i in running], lengths) as batch:
            hidden = model.forward(np.concatenate(new), cache, batch)
            chosen = np.split(model.logits(hidden).argmax(axis=1), np.cumsum(lengths)[:-1])
            agreed = [agreement(draft, after.tolist()) for draft, after in zip(drafts, chosen, strict=True)]
            batch.commit([1 + n for n in agreed])
        for i, after, n in zip(running, chosen, agreed, strict=True):
            texts[i] += after[: n + 1].tolist()
        counts.steps += 1
        counts.accepted += sum(agreed)
        counts.rejected += sum(map(len, drafts)) - sum(agreed)

    for seq in seqs:
        seq.free()
    return [text[len(prompt) :] for text, prompt in zip(texts, prompts, strict=True)], counts


def lookup(text: Sequence[int], num_drafts: int, *, longest: int = 3) -> list[int]:
    """Guess what follows `text`: what followed the latest earlier place that ends like it."""
    for n in range(min(longest, len(text) - 1), 0, -1):
        for start in range(len(text) - n - 1, -1, -1):
            if text[start : start + n] == text[-n:]:
                return list(text[start + n : start + n + num_drafts])
    return []


def agreement(draft: Sequence[int], chosen: Sequence[int]) -> int:
    """How many guesses from the first on are what the model chose."""
    pairs = zip(draft, chosen, strict=False)  # there is one more choice than guesses
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


def main() -> None:
    """Generate for six prompts with guesses and compare with decoding token by token."""
    # A model that hardly looks back repeats itself, which is what there is to guess.
    model, cache = tiny_llama(memory=0.01), new_cache(CONFIG, num_tokens=2048)
    prompts = random_prompts(5, [30, 17, 64, 5, 41, 12])
    answers, counts = generate(model, cache, prompts, 100)
    tokens = sum(map(len, answers))
    print(f"{tokens} tokens for {len(prompts)} prompts in {counts.steps} steps instead of 99")
    print(f"{counts.accepted} guesses accepted, {counts.rejected} rejected")
    plain = [dense_greedy(model, prompt, 100) for prompt in prompts]
    print(f"equal to plain greedy decoding: {answers == plain}")
    print(f"{cache.pool.num_free} of {cache.num_pages} pages are free again")


if __name__ == "__main__":
    main()
