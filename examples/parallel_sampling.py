"""Parallel sampling: n answers to one prompt, whose keys and values are computed and kept once.

`cache.reorder` does both things that sampling needs. Picking the prompt's sequence n times forks it, which
takes no pages: all share the prompt's, and only a last page that is half full is copied when the
answers begin to differ. Leaving a sequence out frees it, which is how an answer that has ended goes.

Run it: ``python examples/parallel_sampling.py``
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from paged_kv.llm import SamplingParams, new_cache
from paged_kv.llm.sampling import Sampler
from tiny_llama import CONFIG, random_prompts, step, tiny_llama

if TYPE_CHECKING:
    from collections.abc import Sequence

    import paged_kv
    from paged_kv.llm import LlamaModel


def sample(
    model: LlamaModel, cache: paged_kv.KvCache, prompt: Sequence[int], params: Sequence[SamplingParams]
) -> list[list[int]]:
    """Draw one answer for each element of `params`; it ends after a stop token or `max_tokens`."""
    samplers = [Sampler(each) for each in params]
    answers: list[list[int]] = [[] for _ in params]

    prompt_seq = cache.sequence()
    scores = step(model, cache, [prompt_seq], [prompt]).repeat(len(params), axis=0)
    seqs = cache.reorder([prompt_seq], [0] * len(params))
    running = list(range(len(params)))  # whose answer each sequence holds
    while running:
        for i, row in zip(running, scores, strict=True):
            answers[i].append(samplers[i].sample(row))
        going = [k for k, i in enumerate(running) if not _has_ended(answers[i], params[i])]
        seqs, running = cache.reorder(seqs, going), [running[k] for k in going]
        if running:
            scores = step(model, cache, seqs, [answers[i][-1:] for i in running])
    return answers


def _has_ended(answer: list[int], params: SamplingParams) -> bool:
    return len(answer) >= params.max_tokens or answer[-1] in params.stop_ids


def main() -> None:
    """Draw eight answers to one prompt of 200 tokens and say what they cost."""
    model, cache = tiny_llama(), new_cache(CONFIG, num_tokens=1024, page_size=16)
    [prompt] = random_prompts(3, [200])
    params = [SamplingParams(max_tokens=20, temperature=0.5, seed=seed) for seed in range(8)]
    for answer in sample(model, cache, prompt, params):
        print(*answer)
    apart = len(params) * -(-len(prompt) // cache.page_size)
    print(
        f"the prompt took {-(-len(prompt) // cache.page_size)} pages instead of {apart}, "
        f"and {cache.stats()['copied_pages']} copies of its last one"
    )


if __name__ == "__main__":
    main()
