"""Answer a list of prompts in one call."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from paged_kv.llm.engine import Engine

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paged_kv.llm.backend import KvBackend
    from paged_kv.llm.model import LlamaModel
    from paged_kv.llm.request import FinishReason
    from paged_kv.llm.sampling import SamplingParams


@dataclass(frozen=True, slots=True)
class Completion:
    """What a prompt led to.

    Attributes
    ----------
    prompt_ids, token_ids : list of int
        The prompt's tokens, and the generated ones.
    finish_reason : str
        Why it ended, see `Request.finish_reason`.
    """

    prompt_ids: list[int]
    token_ids: list[int]
    finish_reason: FinishReason | None


def generate(
    model: LlamaModel,
    cache: KvBackend,
    prompts: Sequence[Sequence[int]],
    params: SamplingParams | None = None,
    *,
    max_batch_tokens: int = 256,
) -> list[Completion]:
    """Generate for several prompts in one batch.

    Parameters
    ----------
    model : LlamaModel
        The model.
    cache : KvBackend
        Where keys and values are kept while it runs; nothing of it remains.
    prompts : sequence of token id sequences
        Any number.
    params : SamplingParams, optional
        The same for all; None takes the defaults.
    max_batch_tokens : int
        Tokens per step at most.

    Returns
    -------
    list of Completion
        In the order of the prompts.
    """
    with Engine(model, cache, max_batch_tokens=max_batch_tokens) as engine:
        requests = [engine.submit(prompt, params) for prompt in prompts]
        return [
            Completion(list(prompt), request.result(), request.finish_reason)
            for prompt, request in zip(prompts, requests, strict=True)
        ]
