"""One prompt on its way through the engine."""

from __future__ import annotations

import queue
import threading
from typing import TYPE_CHECKING, Literal, TypeAlias

from paged_kv.llm.sampling import Sampler, SamplingParams

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from paged_kv.llm.backend import KvSequence
    from paged_kv.llm.weights import Floats

FinishReason: TypeAlias = Literal["length", "stop", "abort", "error"]


class Request:
    """A submitted prompt: iterate over it for its tokens as they are generated.

    Parameters
    ----------
    sequence : KvSequence
        Where its keys and values go. Its computed tokens precede `prompt_ids`.
    prompt_ids : sequence of int
        Tokens to compute before the first one is generated.
    params : SamplingParams
        How to choose tokens and when to stop.
    owns_sequence : bool
        Whether the sequence is to be freed when the request ends.

    Attributes
    ----------
    output_ids : list of int
        Tokens generated so far, without the one that ended the answer.
    finish_reason : {"length", "stop", "abort", "error"} or None
        Why it ended; None while it runs.

    Notes
    -----
    One thread may iterate and any thread may abort, while the engine's thread brings the tokens.
    """

    def __init__(
        self, sequence: KvSequence, prompt_ids: Sequence[int], params: SamplingParams, *, owns_sequence: bool
    ) -> None:
        self.sequence = sequence
        self.prompt_ids = list(prompt_ids)
        self.params = params
        self.output_ids: list[int] = []
        self.finish_reason: FinishReason | None = None
        self._owns_sequence = owns_sequence
        self._prefix_len = sequence.num_computed_tokens
        self._num_computed = 0  # of prompt_ids + output_ids
        self._sampler = Sampler(params)
        self._error: BaseException | None = None
        self._tokens: queue.SimpleQueue[int | None] = queue.SimpleQueue()
        self._ended = threading.Event()
        self._aborted = threading.Event()

    # The side of whoever submitted it.

    def __iter__(self) -> Iterator[int]:
        """Yield tokens as they come, waiting for each; if an error ended the request, raise it."""
        while (token := self._tokens.get()) is not None:
            yield token
        if self._error is not None:
            raise self._error

    def result(self, timeout: float | None = None) -> list[int]:
        """Wait for the end and return all generated tokens.

        Parameters
        ----------
        timeout : float, optional
            Seconds to wait at most.

        Raises
        ------
        TimeoutError
            The request still runs.
        Exception
            Whatever ended the request, if that was an error: for example `paged_kv.NeverFitsError`.
        """
        if not self._ended.wait(timeout):
            raise TimeoutError(f"still running after {timeout} s, {len(self.output_ids)} tokens so far")
        if self._error is not None:
            raise self._error
        return self.output_ids

    def abort(self) -> None:
        """Stop generating; does nothing once the request has ended.

        The pages come back at once, even if a step is computing this very sequence: freeing neither
        waits for the open batch nor disturbs it.
        """
        if not self._ended.is_set():
            self._aborted.set()
            self._release()

    # The engine's side, called from its thread only.

    @property
    def aborted(self) -> bool:
        """Whether `abort` was called."""
        return self._aborted.is_set()

    def pending_ids(self) -> list[int]:
        """Tokens whose keys and values are still to be computed: of the prompt, then generated ones."""
        beyond_prompt = self._num_computed - len(self.prompt_ids)
        if beyond_prompt >= 0:
            return self.output_ids[beyond_prompt:]
        return self.prompt_ids[beyond_prompt:] + self.output_ids

    def computed(self, num_tokens: int) -> bool:
        """Take note of `num_tokens` more computed ones; True if a token is to be chosen next."""
        self._num_computed += num_tokens
        return self._num_computed == len(self.prompt_ids) + len(self.output_ids)

    def preempt(self) -> None:
        """Give back all slots but those it began with; everything since is computed again later."""
        self._num_computed = 0
        self.sequence.truncate(self._prefix_len)

    def choose(self, logits: Floats) -> None:
        """Choose the next token from scores [vocab] and hand it on, or end the request."""
        if len(self.output_ids) < self.params.max_tokens:
            token = self._sampler.sample(logits)
            if token in self.params.stop_ids:
                self.finish("stop")
                return
            self.output_ids.append(token)
            self._tokens.put(token)
        if len(self.output_ids) >= self.params.max_tokens:
            self.finish("length")

    def finish(self, reason: FinishReason, error: BaseException | None = None) -> None:
        """End the request and wake whoever waits for it."""
        self.finish_reason, self._error = reason, error
        self._release()
        self._ended.set()
        self._tokens.put(None)

    def _release(self) -> None:
        if self._owns_sequence:
            self.sequence.free()
