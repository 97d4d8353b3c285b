"""``paged-kv demo``: many threads, one cache, one shared system prompt, and what paging saved."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import takewhile
from typing import TYPE_CHECKING

from rich.console import Console

from paged_kv.cli.blas import few_blas_threads
from paged_kv.cli.demo_report import DemoResult, Meter, print_report
from paged_kv.cli.demo_view import View, open_view
from paged_kv.cli.publish import publishing
from paged_kv.llm import DenseCache, Engine, LanguageModel, SamplingParams, load, new_cache

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from paged_kv.llm.backend import KvBackend

SYSTEM_PROMPT = """\
You are the assistant at the front desk of a public library. People come to you with all kinds of questions, \
about science, history, language, cooking, travel and daily life, and you answer every one of them.
Follow these rules in every answer:
- Answer the question that was asked, in the first sentence, before anything else.
- Use short sentences and plain words that a child of ten understands. Explain any other word.
- Give at most three facts. If you list things, name at most three.
- Be friendly and calm. Do not make jokes about people, and never talk down to anyone.
- If you do not know something, say so, and say where in the library one could look it up.
- Do not give medical, legal or financial advice; say who could help instead.
- Do not mention these rules, and do not say that you are a computer program unless you are asked.
- The library is open from nine in the morning to eight in the evening, and closed on Mondays. Reading rooms \
are on the first floor, children's books on the ground floor, maps and newspapers in the basement."""

QUESTIONS = (
    "What is the capital of France?",
    "Why is the sky blue?",
    "Who wrote Romeo and Juliet?",
    "How do plants make their food?",
    "What is the largest ocean on Earth?",
    "Why do cats purr?",
    "How does a refrigerator stay cold?",
    "What is a prime number?",
    "What do bees make?",
    "At what temperature does water boil?",
    "What is the difference between a crocodile and an alligator?",
    "How many planets are there in the solar system?",
)


@dataclass(frozen=True, slots=True)
class Work:
    """What is to be served: tokens that all requests begin with, and how each one goes on."""

    questions: list[str]
    shared_ids: list[int]
    tail_ids: list[list[int]]
    params: SamplingParams


def run_demo(
    *,
    threads: int,
    max_tokens: int,
    model: Path | None,
    page_size: int,
    dtype: str,
    check: bool,
    telemetry: Path | None,
) -> None:
    """Serve `threads` requests at once and print the answers and the accounts.

    Parameters
    ----------
    threads : int
        Requests, each submitted and read by a thread of its own.
    max_tokens : int
        Tokens per answer at most.
    model : Path, optional
        GGUF file; None takes the reference model.
    page_size, dtype
        Of the cache.
    check : bool
        Compute all answers again without paging and compare the tokens.
    telemetry : Path, optional
        File to publish the cache's state in meanwhile.

    Raises
    ------
    RuntimeError
        `check` found a difference.
    """
    console = Console()
    language_model = load(model)
    work = plan_work(language_model, threads, max_tokens)
    longest = max(len(ids) for ids in work.tail_ids) + max_tokens + page_size
    cache = new_cache(
        language_model.config,
        num_tokens=len(work.shared_ids) + threads * (longest + page_size),
        page_size=page_size,
        dtype=dtype,
    )
    meter = Meter(cache, page_size, len(work.shared_ids))
    with (
        publishing(cache, telemetry, "paged-kv demo"),
        few_blas_threads(),
        open_view(console, work.questions) as view,
    ):
        result = serve(language_model, cache, work, view, meter)
    print_report(console, language_model.config, result, meter, dtype)
    if check:
        check_answers(console, language_model, work, result)


def plan_work(language_model: LanguageModel, threads: int, max_tokens: int) -> Work:
    """Encode the requests and split off the tokens that all of them begin with."""
    tokenizer = language_model.tokenizer
    questions = [QUESTIONS[index % len(QUESTIONS)] for index in range(threads)]
    prompts = [tokenizer.encode_chat(question, system=SYSTEM_PROMPT) for question in questions]
    # At least one token of each prompt must be left to compute: it is what the first answer token follows.
    shared = min(_common_length(prompts), min(len(prompt) for prompt in prompts) - 1)
    return Work(
        questions=questions,
        shared_ids=prompts[0][:shared],
        tail_ids=[prompt[shared:] for prompt in prompts],
        params=SamplingParams(max_tokens=max_tokens, stop_ids=tokenizer.stop_ids),
    )


def _common_length(prompts: Sequence[Sequence[int]]) -> int:
    """Count the leading tokens that all prompts agree on."""
    agreed = takewhile(lambda column: len(set(column)) == 1, zip(*prompts, strict=False))
    return sum(1 for _ in agreed)


def serve(
    language_model: LanguageModel, cache: KvBackend, work: Work, view: View, meter: Meter | None = None
) -> DemoResult:
    """Answer all questions at once, each in a thread that forks the shared prompt and streams its answer."""
    with Engine(language_model.model, cache, on_step=meter) as engine:
        began = time.perf_counter()
        prefix = engine.prefill(work.shared_ids)
        prefilled = time.perf_counter()

        def answer(index: int) -> list[int]:
            request = engine.submit(work.tail_ids[index], work.params, prefix=prefix)
            stream = language_model.tokenizer.stream()
            view.started(index)
            for token in request:
                view.extend(index, stream.step(token))
            view.extend(index, stream.finish())
            view.finished(index, request.finish_reason)
            return request.output_ids

        with ThreadPoolExecutor(max_workers=len(work.questions), thread_name_prefix="request") as pool:
            answers = list(pool.map(answer, range(len(work.questions))))
        ended = time.perf_counter()
        prefix.free()
    return DemoResult(
        answers=answers,
        prefill_seconds=prefilled - began,
        answer_seconds=ended - prefilled,
        engine=engine.stats,
    )


def check_answers(console: Console, language_model: LanguageModel, work: Work, result: DemoResult) -> None:
    """Compute the answers without paging and compare them token by token."""
    config = language_model.config
    unpaged = DenseCache(
        num_layers=config.num_layers, num_kv_heads=config.num_kv_heads, head_dim=config.head_dim
    )
    with few_blas_threads():
        expected = serve(language_model, unpaged, work, View(work.questions)).answers
    pairs = enumerate(zip(result.answers, expected, strict=True), start=1)
    differing = [number for number, (paged, dense) in pairs if paged != dense]
    if differing:
        raise RuntimeError(f"answers {differing} differ from those without paging")
    tokens = sum(len(answer) for answer in expected)
    console.print(f"All {tokens} tokens of {len(expected)} answers are the same without paging.")
