"""Continuous batching: one thread runs the model, any number of threads submit, read, and abort.

Every step takes what each running request has pending, one generated token or a piece of its prompt,
and computes all of it in one batch of the cache. Submitting forks and reserves in the caller's thread,
and aborting frees there, at any time: the cache needs no lock for that, and neither does the engine.

When pages run out, the youngest request gives its own back and waits until another one has ended; its
tokens so far are kept and computed again. So the oldest request always gets on.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from paged_kv.errors import NeverFitsError, OutOfPagesError, SequenceFreedError
from paged_kv.llm.request import Request
from paged_kv.llm.sampling import SamplingParams

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from types import TracebackType

    from paged_kv.llm.backend import KvBackend, KvSequence
    from paged_kv.llm.model import LlamaModel

_POLL_SECONDS = 0.005
"""How often to try again when pages are held by others than the engine's own requests."""


@dataclass(slots=True)
class EngineStats:
    """What an engine has done so far.

    Attributes
    ----------
    steps : int
        Batches computed.
    computed_tokens, generated_tokens : int
        Tokens that went through the model (after a preemption once more), and tokens chosen.
    preemptions : int
        How often a request had to give its pages back.
    busy_seconds : float
        Time spent in steps.
    """

    steps: int = 0
    computed_tokens: int = 0
    generated_tokens: int = 0
    preemptions: int = 0
    busy_seconds: float = 0.0


class Engine:
    """Runs a model for many requests at once over one KV cache.

    Parameters
    ----------
    model : LlamaModel
        The model.
    cache : KvBackend
        A `paged_kv.KvCache` of the model's shape. Others may use it at the same time.
    max_batch_tokens : int
        Tokens per step at most; longer prompts are computed in pieces, so that they don't hold up
        running answers.
    max_batch_size : int
        Requests per step at most; further ones wait.
    page_patience : float
        Seconds that a request alone in the engine waits for pages that others hold, before it fails
        with `OutOfPagesError`.
    on_step : callable, optional
        Called in the engine's thread after every step with the requests that took part, before those
        that have ended give their pages back.

    Examples
    --------
    >>> with Engine(model, cache) as engine:  # doctest: +SKIP
    ...     for token in engine.submit(tokenizer.encode("Once upon a time")):
    ...         print(tokenizer.decode([token]), end="")
    """

    def __init__(
        self,
        model: LlamaModel,
        cache: KvBackend,
        *,
        max_batch_tokens: int = 256,
        max_batch_size: int = 64,
        page_patience: float = 10.0,
        on_step: Callable[[Sequence[Request]], None] | None = None,
    ) -> None:
        if max_batch_tokens < 1 or max_batch_size < 1:
            raise ValueError(f"a step needs room: {max_batch_tokens=}, {max_batch_size=}")
        self.stats = EngineStats()
        self._model, self._cache = model, cache
        self._max_batch_tokens, self._max_batch_size = max_batch_tokens, max_batch_size
        self._page_patience, self._on_step = page_patience, on_step
        self._incoming: queue.SimpleQueue[Request | None] = queue.SimpleQueue()
        self._running: list[Request] = []  # oldest first
        self._waiting: deque[Request] = deque()
        self._starving_since: float | None = None
        self._closing = threading.Lock()  # orders submit against close; never held during a step
        self._closed = False
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="paged-kv-engine", daemon=True)
        self._thread.start()

    def submit(
        self,
        prompt_ids: Sequence[int],
        params: SamplingParams | None = None,
        *,
        prefix: KvSequence | None = None,
        sequence: KvSequence | None = None,
    ) -> Request:
        """Queue a prompt; returns at once. May be called from any thread.

        Parameters
        ----------
        prompt_ids : sequence of int
            At least one token.
        params : SamplingParams, optional
            None takes the defaults: 64 greedy tokens.
        prefix : KvSequence, optional
            Tokens before the prompt that are computed already; the request works on a fork of it.
        sequence : KvSequence, optional
            Continue this sequence itself. It stays the caller's, who must leave it alone until the
            request has ended.

        Returns
        -------
        Request
            To be iterated, waited for, or aborted.

        Raises
        ------
        ValueError
            No tokens, a token outside the vocabulary, more tokens than the model's context, or both
            `prefix` and `sequence`.
        RuntimeError
            The engine is closed.
        """
        if prefix is not None and sequence is not None:
            raise ValueError("give either prefix or sequence")
        config = self._model.config
        if len(prompt_ids) == 0 or min(prompt_ids) < 0 or max(prompt_ids) >= config.vocab_size:
            raise ValueError(f"prompt_ids needs at least one token, all in 0…{config.vocab_size - 1}")
        base = prefix if prefix is not None else sequence
        room = config.context_length - len(prompt_ids) - (base.num_computed_tokens if base is not None else 0)
        if room < 0:
            raise ValueError(f"prompt is {-room} tokens longer than the context of {config.context_length}")
        params = params or SamplingParams()
        params = replace(params, max_tokens=min(params.max_tokens, room))

        if sequence is None:
            own: KvSequence = prefix.fork() if prefix is not None else self._cache.sequence()
        else:
            own = sequence
        request = Request(own, prompt_ids, params, owns_sequence=sequence is None)
        # Without pages right now, the engine finds room when the request's turn comes.
        with suppress(OutOfPagesError, NeverFitsError):
            own.append(min(len(prompt_ids), self._max_batch_tokens))
        with self._closing:
            if not self._closed:
                self._incoming.put(request)
                return request
        request.preempt()
        request.abort()
        raise RuntimeError("the engine is closed") from self._failure

    def prefill(self, token_ids: Sequence[int]) -> KvSequence:
        """Compute tokens that many prompts share, and wait until that is done.

        Returns
        -------
        KvSequence
            The caller's, to be given to `submit` as `prefix`, and freed in the end.
        """
        sequence: KvSequence = self._cache.sequence()
        try:
            self.submit(token_ids, SamplingParams(max_tokens=0), sequence=sequence).result()
        except BaseException:
            sequence.free()
            raise
        return sequence

    def close(self) -> None:
        """Abort what still runs and stop the engine's thread."""
        with self._closing:
            if not self._closed:
                self._closed = True
                self._incoming.put(None)
        self._thread.join()

    def __enter__(self) -> Self:
        """Return the engine itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the engine."""
        self.close()

    # From here on everything runs in the engine's thread.

    def _run(self) -> None:
        try:
            while self._take_incoming():
                self._step()
        except BaseException as error:  # a bug or a broken model: nobody may be left waiting
            self._failure = error
        with self._closing:
            self._closed = True
        while not self._incoming.empty():
            if (request := self._incoming.get()) is not None:
                self._waiting.append(request)
        for request in (*self._running, *self._waiting):
            failed = self._failure is not None and not request.aborted
            request.finish("error" if failed else "abort", self._failure if failed else None)

    def _take_incoming(self) -> bool:
        """Admit what was submitted, waiting for something if there is nothing to do; False to stop."""
        idle = not self._running and not self._waiting
        while idle or not self._incoming.empty():
            idle = False
            request = self._incoming.get()
            if request is None:
                return False
            if self._waiting or len(self._running) >= self._max_batch_size:
                self._postpone(request, first=False)
            else:
                self._running.append(request)
        return True

    def _step(self) -> None:
        began = time.perf_counter()
        plan, batch = self._open_batch()
        if batch is None:
            if self._running:
                time.sleep(_POLL_SECONDS)
            return
        lengths = [len(ids) for _, ids in plan]
        with batch:
            token_ids = np.concatenate([ids for _, ids in plan])
            hidden = self._model.forward(token_ids, self._cache, batch)
        self._starving_since = None
        if self._on_step is not None:
            self._on_step([request for request, _ in plan])

        lasts = np.cumsum(lengths) - 1
        chosen = [i for i, (request, ids) in enumerate(plan) if request.computed(len(ids))]
        if chosen:
            for i, row in zip(chosen, self._model.logits(hidden[:, lasts[chosen]]), strict=True):
                plan[i][0].choose(row)
        self._retire()
        self.stats.steps += 1
        self.stats.computed_tokens += sum(lengths)
        self.stats.generated_tokens += len(chosen)
        self.stats.busy_seconds += time.perf_counter() - began

    def _open_batch(self) -> tuple[list[tuple[Request, list[int]]], Any]:
        """Open a batch over what fits; preempts, and drops what can't run. None if nothing can."""
        while True:
            self._retire()
            plan = self._plan()
            if not plan:
                return plan, None
            try:
                sequences = [request.sequence for request, _ in plan]
                return plan, self._cache.batch(sequences, [len(ids) for _, ids in plan])
            except SequenceFreedError as error:
                # Aborted since the plan was made; one freed behind the engine's back ends with the error.
                for index in error.indices:
                    if not plan[index][0].aborted:
                        plan[index][0].finish("error", error)
            except NeverFitsError as error:
                plan[error.index or 0][0].finish("error", error)
            except OutOfPagesError as error:
                if not self._make_room(error):
                    return [], None

    def _plan(self) -> list[tuple[Request, list[int]]]:
        """Which tokens to compute next: all single tokens first, then prompts in order of arrival."""
        pending = [(request, request.pending_ids()) for request in self._running]
        pending.sort(key=lambda entry: len(entry[1]) > 1)
        plan, budget = [], self._max_batch_tokens
        for request, ids in pending:
            if budget == 0:
                break
            plan.append((request, ids[:budget]))
            budget -= len(plan[-1][1])
        return plan

    def _make_room(self, error: Exception) -> bool:
        """Take pages from the youngest request; False if only waiting for others can help."""
        if len(self._running) > 1:
            self._postpone(self._running.pop(), first=True)
            return True
        # It is alone, so others hold the pages it lacks.
        now = time.monotonic()
        self._starving_since = self._starving_since or now
        if now - self._starving_since > self._page_patience:
            self._running[0].finish("error", error)
            self._starving_since = None
        return False

    def _postpone(self, request: Request, *, first: bool) -> None:
        """Let a request wait without pages until a running one has ended."""
        with suppress(SequenceFreedError):  # aborted just now: `_retire` ends it
            request.preempt()
        if first:
            self.stats.preemptions += 1
            self._waiting.appendleft(request)
        else:
            self._waiting.append(request)

    def _retire(self) -> None:
        """Forget requests that have ended, and let as many waiting ones take their places."""
        for request in (*self._running, *self._waiting):
            if request.aborted and request.finish_reason is None:
                request.finish("abort")
        before = len(self._running)
        self._running = [request for request in self._running if request.finish_reason is None]
        self._waiting = deque(request for request in self._waiting if request.finish_reason is None)
        places = max(before - len(self._running), 0 if self._running else 1)
        while places > 0 and self._waiting:
            self._running.append(self._waiting.popleft())
            places -= 1
