"""``paged-kv generate``: answer prompts in one batch, one after the other on the screen."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from typing import TYPE_CHECKING

from rich.console import Console

from paged_kv.cli.blas import few_blas_threads
from paged_kv.cli.publish import publishing
from paged_kv.cli.text import printable
from paged_kv.llm import Engine, LanguageModel, Request, SamplingParams, load, new_cache

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path


def run_generate(
    prompts: Sequence[str],
    params: SamplingParams,
    *,
    system: str | None,
    raw: bool,
    model: Path | None,
    page_size: int,
    dtype: str | None,
    device: str,
    json_lines: bool,
    telemetry: Path | None,
) -> None:
    """Answer all prompts and print the answers in order, the first one while it is generated.

    Parameters
    ----------
    prompts : sequence of str
        The user's prompts.
    params : SamplingParams
        How to choose tokens; the model's stop tokens are added.
    system : str, optional
        System prompt; None leaves it to the model's template.
    raw : bool
        Continue the prompts as plain text.
    model : Path, optional
        GGUF file; None takes the reference model.
    page_size, dtype, device
        Of the cache.
    json_lines : bool
        Print one JSON object per prompt instead of text.
    telemetry : Path, optional
        File to publish the cache's state in meanwhile.
    """
    if raw and system is not None:
        raise ValueError("--raw has no system prompt")
    language_model = load(model)
    tokenizer = language_model.tokenizer
    encoded = [
        tokenizer.encode(prompt) if raw else tokenizer.encode_chat(prompt, system=system)
        for prompt in prompts
    ]
    params = replace(params, stop_ids=tokenizer.stop_ids)
    # Room for every answer at full length, each with a partly filled page of its own.
    num_tokens = sum(len(ids) + params.max_tokens + page_size for ids in encoded)
    cache = new_cache(
        language_model.config, num_tokens=num_tokens, page_size=page_size, dtype=dtype, device=device
    )
    headings = Console(stderr=True, highlight=False)
    with (
        publishing(cache, telemetry, "paged-kv generate"),
        few_blas_threads(),
        Engine(language_model.model, cache) as engine,
    ):
        requests = [engine.submit(ids, params) for ids in encoded]
        for index, (prompt, request) in enumerate(zip(prompts, requests, strict=True)):
            if json_lines:
                _print_json(index, prompt, request, language_model)
                continue
            if len(prompts) > 1:
                headings.print(f"[{index + 1}/{len(prompts)}] {prompt}", style="bold", markup=False)
            _stream_text(request, language_model)


def _stream_text(request: Request, language_model: LanguageModel) -> None:
    stream = language_model.tokenizer.stream()
    for token in request:
        sys.stdout.write(printable(stream.step(token)))
        sys.stdout.flush()
    sys.stdout.write(printable(stream.finish()) + "\n")
    sys.stdout.flush()


def _print_json(index: int, prompt: str, request: Request, language_model: LanguageModel) -> None:
    token_ids = request.result()
    answer = {
        "index": index,
        "prompt": prompt,
        "prompt_token_ids": request.prompt_ids,
        "token_ids": token_ids,
        "text": language_model.tokenizer.decode(token_ids),
        "finish_reason": request.finish_reason,
    }
    print(json.dumps(answer, ensure_ascii=False), flush=True)
