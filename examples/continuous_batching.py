"""Continuous batching: a scheduler that mixes prefill and decode, preempts, and survives aborts.

Every step is one batch: one token for each request that decodes, and what is left of the step's token
budget for pieces of prompts. The cache says whether that fits. Three rules make it work when memory is
short:

- Who doesn't fit makes the youngest running request give its pages back (`OutOfPagesError`). The
  victim keeps its tokens and computes them again later; so the oldest request always gets on.
- Requests are admitted once, at the start of a step. A victim can't come back within the step that
  took its pages, which would go round in circles.
- A waiting request that doesn't fit lets smaller ones pass, but only `MAX_OVERTAKEN` of them; then it
  blocks the way until it is in.

Aborting needs no lock and no flag: it is `request.sequence.free()`, from any thread, at any time. A
batch in flight finishes on what it holds, and its commit skips the sequence.

Run it: ``python examples/continuous_batching.py``
"""

from __future__ import annotations

import threading
import time
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

import paged_kv
from paged_kv.llm import new_cache
from tiny_llama import CONFIG, dense_greedy, random_prompts, tiny_llama

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from paged_kv.llm import LlamaModel

MAX_OVERTAKEN = 16
"""How many requests may pass one that waits for pages before it blocks the way."""


@dataclass(eq=False)
class Request:
    """A prompt, its answer so far, and the sequence that holds keys and values of both."""

    sequence: paged_kv.Sequence
    prompt: list[int]
    max_tokens: int
    output: list[int] = field(default_factory=list)
    error: Exception | None = None
    overtaken: int = 0

    def abort(self) -> None:
        """End the request; its pages come back at once, or when the batch that uses them ends."""
        self.sequence.free()

    def pending(self) -> list[int]:
        """Tokens that are not computed yet: never empty while the request is unfinished."""
        tokens = self.prompt + self.output
        try:
            return tokens[self.sequence.num_computed_tokens :]
        except paged_kv.SequenceFreedError:  # aborted this very moment; the batch will say so
            return tokens[-1:]

    @property
    def is_finished(self) -> bool:
        """Whether all tokens are there."""
        return len(self.output) == self.max_tokens


@dataclass
class Counts:
    """What a scheduler did."""

    steps: int = 0
    mixed_steps: int = 0
    computed_tokens: int = 0
    preemptions: int = 0
    overtakings: int = 0
    most_running: int = 0


class Scheduler:
    """Runs requests over one cache; every method but `Request.abort` belongs to one thread."""

    def __init__(self, model: LlamaModel, cache: paged_kv.KvCache, *, max_batch_tokens: int = 64) -> None:
        self.model, self.cache, self.max_batch_tokens = model, cache, max_batch_tokens
        self.running: list[Request] = []  # oldest first
        self.waiting: deque[Request] = deque()
        self.counts = Counts()

    def submit(self, prompt: Sequence[int], max_tokens: int) -> Request:
        """Queue a prompt; its sequence takes no page before the first step."""
        request = Request(self.cache.sequence(), list(prompt), max_tokens)
        self.waiting.append(request)
        return request

    def run(self) -> None:
        """Step until every request has ended."""
        while self.running or self.waiting:
            self.step()

    def step(self) -> None:
        """Compute one batch: a token for each request that decodes, then pieces of prompts."""
        self._drop_aborted()
        self._admit()
        plan, batch = self._open_batch()
        if batch is None:
            return
        with batch:  # an exception in here would put everything back
            hidden = self.model.forward(np.concatenate([new for _, new in plan]), self.cache, batch)
        ends = np.cumsum([len(new) for _, new in plan])
        logits = self.model.logits(hidden[:, ends - 1])
        for (request, _), scores in zip(plan, logits, strict=True):
            if not request.pending():  # never so for one that was aborted meanwhile
                request.output.append(int(scores.argmax()))
            if request.is_finished:
                self.running.remove(request)
                request.sequence.free()
        self._count(plan)

    def _admit(self) -> None:
        """Let waiting requests in, oldest first, as far as their tokens fit."""
        # One page in reserve for each running request. Should that be too few, opening the batch will tell.
        free = self.cache.pool.num_free - len(self.running)
        passed: list[Request] = []
        for request in list(self.waiting):
            if any(other.overtaken >= MAX_OVERTAKEN for other in passed):
                break
            pages = -(-(len(request.prompt) + len(request.output) + 1) // self.cache.page_size)
            if pages > free and self.running:
                passed.append(request)
                continue
            self.waiting.remove(request)
            self.running.append(request)
            free -= pages + 1
            for other in passed:
                other.overtaken += 1
            self.counts.overtakings += bool(passed)

    def _open_batch(self) -> tuple[list[tuple[Request, list[int]]], paged_kv.Batch | None]:
        """Open a batch over what fits, taking pages from the youngest as often as needed."""
        while plan := self._plan():
            try:
                seqs = [request.sequence for request, _ in plan]
                return plan, self.cache.batch(seqs, [len(new) for _, new in plan])
            except paged_kv.SequenceFreedError:
                self._drop_aborted()
            except paged_kv.NeverFitsError as error:
                self._fail(plan[error.index or 0][0], error)
            except paged_kv.OutOfPagesError:
                if len(self.running) == 1:
                    raise  # others hold the pages: no request has any to give back
                self._preempt(self.running.pop())
        return [], None

    def _plan(self) -> list[tuple[Request, list[int]]]:
        """Which tokens to compute: single ones first, so that long prompts hold up nobody's answer."""
        pending = [(request, request.pending()) for request in self.running]
        pending.sort(key=lambda entry: len(entry[1]) > 1)
        plan, budget = [], self.max_batch_tokens
        for request, tokens in pending:
            if budget:
                plan.append((request, tokens[:budget]))
                budget -= len(plan[-1][1])
        return plan

    def _preempt(self, request: Request) -> None:
        try:
            request.sequence.truncate(0)
        except paged_kv.SequenceFreedError:
            return  # aborted: its pages are back already
        self.waiting.appendleft(request)
        self.counts.preemptions += 1

    def _fail(self, request: Request, error: Exception) -> None:
        request.error = error
        self.running.remove(request)
        request.sequence.free()

    def _drop_aborted(self) -> None:
        self.running = [request for request in self.running if not request.sequence.is_freed]
        self.waiting = deque(request for request in self.waiting if not request.sequence.is_freed)

    def _count(self, plan: list[tuple[Request, list[int]]]) -> None:
        lengths = {len(new) > 1 for _, new in plan}
        self.counts.steps += 1
        self.counts.mixed_steps += len(lengths) == 2
        self.counts.computed_tokens += sum(len(new) for _, new in plan)
        self.counts.most_running = max(self.counts.most_running, len(plan))


def main() -> None:
    """Serve 60 requests from a pool that is far too small, while another thread aborts some."""
    model = tiny_llama()
    cache = new_cache(CONFIG, num_tokens=256, page_size=4)
    scheduler = Scheduler(model, cache)
    lengths = np.random.default_rng(1).integers(1, 60, size=60).tolist()
    requests = [scheduler.submit(prompt, 24) for prompt in random_prompts(2, lengths)]

    def abort_some(victims: Iterable[Request]) -> None:
        for victim in victims:
            time.sleep(0.01)
            victim.abort()

    thread = threading.Thread(target=abort_some, args=(requests[::9],))
    thread.start()
    scheduler.run()
    thread.join()

    finished = [request for request in requests if request.is_finished]
    right = all(r.output == dense_greedy(model, r.prompt, r.max_tokens) for r in finished)
    counts = scheduler.counts
    print(f"{len(requests)} requests over {cache.num_pages} pages of {cache.page_size} tokens")
    print(
        f"{counts.steps} steps ({counts.mixed_steps} mixed prefill and decode), "
        f"{counts.most_running} requests at once at most"
    )
    print(
        f"{counts.preemptions} preemptions, {counts.overtakings} small requests passed a big one, "
        f"{len(requests) - len(finished)} aborted"
    )
    print(f"the {len(finished)} finished answers equal the dense reference: {right}")
    print(f"{cache.pool.num_free} of {cache.num_pages} pages are free again")


if __name__ == "__main__":
    main()
