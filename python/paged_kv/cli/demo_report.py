"""What the demo's answers cost in memory, and what they would have cost in other ways."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from rich.table import Table

import paged_kv

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import Console

    from paged_kv.llm import EngineStats, LlamaConfig, Request


@dataclass(frozen=True, slots=True)
class DemoResult:
    """What came out of a run.

    Attributes
    ----------
    answers : list of list of int
        Tokens of each answer.
    prefill_seconds, answer_seconds : float
        Time to compute the shared prompt, and from there to the end of the last answer.
    engine : EngineStats
        The engine's counters.
    """

    answers: list[list[int]]
    prefill_seconds: float
    answer_seconds: float
    engine: EngineStats


@dataclass(frozen=True, slots=True)
class Moment:
    """The cache at one step.

    Attributes
    ----------
    requests : int
        Requests that took part.
    used_bytes : int
        Bytes of all pages in use.
    waste : float
        Part of the slots in use that holds no token, 0 to 1.
    unshared_pages : int
        Pages that the requests would hold if each had all of its tokens to itself.
    longest_tokens : int
        Slots that reserving each request's longest possible length takes, summed.
    """

    requests: int
    used_bytes: int
    waste: float
    unshared_pages: int
    longest_tokens: int


class Meter:
    """Remembers the step at which the cache was fullest; handed to the engine as `on_step`.

    Parameters
    ----------
    cache : KvCache
        The cache.
    page_size : int
        Its tokens per page.
    shared_tokens : int
        Length of what all requests begin with.
    """

    def __init__(self, cache: paged_kv.KvCache, page_size: int, shared_tokens: int) -> None:
        self._cache, self.page_size, self.shared_tokens = cache, page_size, shared_tokens
        self.fullest = Moment(0, 0, 0.0, 0, 0)
        self.copied_pages = 0

    def __call__(self, requests: Sequence[Request]) -> None:
        """Look at the cache after a step."""
        stats = self._cache.stats()
        self.copied_pages = stats["copied_pages"]
        if stats["used_bytes"] <= self.fullest.used_bytes:
            return
        self.fullest = Moment(
            requests=len(requests),
            used_bytes=stats["used_bytes"],
            waste=stats["waste"],
            unshared_pages=sum(-(-len(request.sequence) // self.page_size) for request in requests),
            longest_tokens=sum(
                self.shared_tokens + len(request.prompt_ids) + request.params.max_tokens
                for request in requests
            ),
        )


def print_report(console: Console, config: LlamaConfig, result: DemoResult, meter: Meter, dtype: str) -> None:
    """Print the accounts of a run as two tables."""
    moment, page = meter.fullest, meter.page_size
    per_token = paged_kv.kv_bytes_per_token(
        num_layers=config.num_layers,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        dtype=dtype,
    )
    unshared = moment.unshared_pages * page * per_token
    table = Table(
        title=f"KV cache at its fullest: {moment.requests} requests at once,\n"
        f"{meter.shared_tokens} tokens of prompt in common"
    )
    table.add_column("how it is kept")
    table.add_column("memory", justify="right")
    table.add_column("against ours", justify="right")
    whole_context = moment.requests * config.context_length * per_token
    for label, size in (
        (f"contiguous, room for all {config.context_length} tokens each", whole_context),
        ("contiguous, room for the longest answer each", moment.longest_tokens * per_token),
        (f"pages of {page}, nothing shared", unshared),
        (f"pages of {page}, shared by fork", moment.used_bytes),
    ):
        ratio = size / moment.used_bytes if moment.used_bytes else 0.0
        ours = label.endswith("fork")
        table.add_row(label, _mebibytes(size), f"{ratio:.1f} x", style="bold green" if ours else None)
    console.print(table)

    tokens = sum(len(answer) for answer in result.answers)
    facts = Table(show_header=False)
    facts.add_column()
    facts.add_column(justify="right")
    facts.add_row("saved by sharing", _mebibytes(unshared - moment.used_bytes))
    facts.add_row("pages copied on write", str(meter.copied_pages))
    facts.add_row("waste (slots in pages that hold no token)", f"{moment.waste:.1%}")
    facts.add_row("tokens generated, all answers together", f"{tokens} in {result.answer_seconds:.1f} s")
    facts.add_row("tokens/s", f"{tokens / result.answer_seconds:.1f}")
    facts.add_row(
        "system prompt, computed once", f"{meter.shared_tokens} tokens in {result.prefill_seconds:.1f} s"
    )
    facts.add_row("requests that had to wait for pages", str(result.engine.preemptions))
    console.print(facts)


def _mebibytes(size: float) -> str:
    return f"{size / 2**20:,.1f} MiB"
