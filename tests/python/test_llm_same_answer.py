"""The paged model answers token for token as the same model does without paging.

The reference model on real prompts: greedy tokens and teacher-forced logits for several page sizes,
then a history with forks, copy-on-write, truncation and generating again, told by eight threads at
once. The tiny model goes through the same history for many page sizes.
"""

from __future__ import annotations

import functools
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import pytest

from llm_support import dense_cache, reference_model, tiny_model
from paged_kv.llm import Engine, LanguageModel, SamplingParams, generate, new_cache

if TYPE_CHECKING:
    from paged_kv.llm.backend import KvBackend

# A test here runs a real model for a minute or so; much more on a busy machine.
pytestmark = pytest.mark.timeout(1200)

PAGE_SIZES = [1, 4, 16, 128]
QUESTIONS = [
    "What is the capital of France?",
    "Why is the sky blue?",
    "Write a haiku about the sea.",
    "What is 12 times 12?",
    "Who wrote Hamlet?",
    "Name three fruits and say where they grow.",
    "Explain gravity to a child.",
    "Translate 'good morning' into French.",
    "How do I boil an egg?",
    "What is the largest planet?",
]
BEGINNINGS = [
    "The capital of France is",
    "Once upon a time, in a village by the sea,",
    "def fibonacci(n):\n    ",
    "The three laws of thermodynamics are",
    "1, 1, 2, 3, 5, 8, 13,",
    "Dear Sir or Madam,\n\nI am writing to",
    "In 1969, Neil Armstrong",
    "Ingredients: flour, butter, sugar, eggs. Method:",
    "a",
    "Q: What is photosynthesis?\nA:",
    "Die Hauptstadt von Deutschland ist",
]


@dataclass(frozen=True)
class Reference:
    """What the model does without paging."""

    language_model: LanguageModel
    prompts: list[list[int]]
    answers: list[list[int]]
    logits: list[np.ndarray]  # of the position before each answer token, [64, vocab] per prompt


def teacher_forced(
    language_model: LanguageModel, cache: KvBackend, prompt: list[int], answer: list[int]
) -> np.ndarray:
    """Logits that each token of `answer` was chosen from, all computed in one forward. [answer, vocab]."""
    sequence, ids = cache.sequence(), prompt + answer[:-1]
    with cache.batch([sequence], [len(ids)]) as batch:
        hidden = language_model.model.forward(ids, cache, batch)
    sequence.free()
    return language_model.model.logits(hidden[:, len(prompt) - 1 :])


@functools.cache
def reference() -> Reference:
    language_model = reference_model()
    tokenizer = language_model.tokenizer
    prompts = [tokenizer.encode_chat(question) for question in QUESTIONS]
    prompts += [tokenizer.encode(text) for text in BEGINNINGS]
    cache = dense_cache(language_model.config)
    answers = generate(language_model.model, cache, prompts, SamplingParams(max_tokens=64))
    tokens = [answer.token_ids for answer in answers]
    logits = [teacher_forced(language_model, cache, *pair) for pair in zip(prompts, tokens, strict=True)]
    return Reference(language_model, prompts, tokens, logits)


@pytest.mark.model
def test_the_reference_model_makes_sense() -> None:
    known = reference()
    assert len(known.prompts) >= 20
    assert {len(answer) for answer in known.answers} == {64}
    texts = [known.language_model.tokenizer.decode(answer) for answer in known.answers]
    assert "Paris" in texts[0]
    assert texts[QUESTIONS.index("Who wrote Hamlet?")].count("Shakespeare")
    assert texts[len(QUESTIONS)].startswith(" Paris")


@pytest.mark.model
@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_greedy_tokens_are_those_without_paging(page_size: int) -> None:
    known = reference()
    model, config = known.language_model.model, known.language_model.config
    cache = new_cache(config, num_tokens=len(known.prompts) * 256, page_size=page_size)
    answers = generate(model, cache, known.prompts, SamplingParams(max_tokens=64))
    assert [answer.token_ids for answer in answers] == known.answers
    cache.validate()


@pytest.mark.model
@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_teacher_forced_logits_are_within_a_thousandth(page_size: int) -> None:
    known = reference()
    cache = new_cache(known.language_model.config, num_tokens=256, page_size=page_size)
    for prompt, answer, expected in zip(known.prompts, known.answers, known.logits, strict=True):
        found = teacher_forced(known.language_model, cache, prompt, answer)
        assert np.abs(found - expected).max() <= 1e-3
    cache.validate()


def history(
    language_model: LanguageModel, cache: KvBackend, prefix_ids: list[int], tails: list[list[int]], steps: int
) -> list[list[int]]:
    """Eight threads fork one prefix, generate, take tokens back, generate again, and fork once more.

    Returns all tokens that came out, thread after thread; they are the same for any interleaving.
    """
    params = SamplingParams(max_tokens=steps)
    told: list[list[int]] = [[] for _ in tails]
    together = threading.Barrier(len(tails))

    def tell(engine: Engine, prefix, index: int) -> None:
        together.wait()
        tail, sequence = tails[index], prefix.fork()
        first = engine.submit(tail, params, sequence=sequence).result()
        # The last token was chosen but not computed. Keep three of the generated ones, drop the rest,
        # and let something else follow: the slots written before are written over, or were shared.
        sibling = sequence.fork()
        sequence.truncate(len(prefix_ids) + len(tail) + 3)
        second = engine.submit(tail[::-1], params, sequence=sequence).result()
        third = engine.submit(first[-1:], params, sequence=sibling).result()
        # A grandchild continues the truncated branch, while the branch itself is cut back and told again.
        sibling.free()
        grandchild = engine.submit(second[-1:], params, prefix=sequence)
        fourth = grandchild.result()
        sequence.truncate(len(prefix_ids) - 1)
        fifth = engine.submit(prefix_ids[-1:] + tail, params, sequence=sequence).result()
        assert fifth == first
        sequence.free()
        told[index] = [*first, *second, *third, *fourth, *fifth]

    with Engine(language_model.model, cache, max_batch_tokens=96) as engine:
        prefix = engine.prefill(prefix_ids)
        threads = [threading.Thread(target=tell, args=(engine, prefix, index)) for index in range(len(tails))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        prefix.free()
    return told


@functools.cache
def tiny_history() -> tuple[list[int], list[list[int]]]:
    random = np.random.default_rng(3)
    draw = functools.partial(random.integers, 3, tiny_model().config.vocab_size)
    return draw(37).tolist(), [draw(length).tolist() for length in (1, 2, 3, 5, 8, 13, 16, 17)]


@functools.cache
def tiny_history_without_paging() -> list[list[int]]:
    return history(tiny_model(), dense_cache(tiny_model().config), *tiny_history(), steps=12)


@pytest.mark.parametrize("page_size", [1, 2, 3, 4, 7, 16, 64, 128])
def test_forks_truncation_and_generating_again_on_the_tiny_model(page_size: int) -> None:
    expected = tiny_history_without_paging()
    assert [len(tokens) for tokens in expected] == [60] * 8
    cache = new_cache(tiny_model().config, num_tokens=4096, page_size=page_size)
    assert history(tiny_model(), cache, *tiny_history(), steps=12) == expected
    cache.validate()


@functools.cache
def reference_history() -> tuple[list[int], list[list[int]]]:
    tokenizer = reference_model().tokenizer
    text = "<|im_start|>system\nYou answer in one short sentence.<|im_end|>\n<|im_start|>user\n"
    ends = [f"{question}<|im_end|>\n<|im_start|>assistant\n" for question in QUESTIONS[:8]]
    return tokenizer.encode(text), [tokenizer.encode(end) for end in ends]


@functools.cache
def reference_history_without_paging() -> list[list[int]]:
    return history(reference_model(), dense_cache(reference_model().config), *reference_history(), steps=16)


@pytest.mark.model
@pytest.mark.parametrize("page_size", [4, 16])
def test_forks_truncation_and_generating_again_on_the_reference_model(page_size: int) -> None:
    expected = reference_history_without_paging()
    assert [len(tokens) for tokens in expected] == [80] * 8
    cache = new_cache(reference_model().config, num_tokens=4096, page_size=page_size)
    assert history(reference_model(), cache, *reference_history(), steps=16) == expected
    cache.validate()
