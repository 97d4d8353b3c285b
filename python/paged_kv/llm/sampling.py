"""Choose the next token from the model's scores."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from paged_kv.llm.weights import Floats


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How one request's tokens are chosen, and when it ends.

    Attributes
    ----------
    max_tokens : int
        Tokens to generate at most; 0 only computes the prompt.
    temperature : float
        0 takes the most likely token; otherwise scores are divided by it before sampling.
    top_p : float
        Sample only from the smallest set of most likely tokens whose probabilities reach this sum
        (nucleus sampling: Holtzman et al., "The curious case of neural text degeneration", 2020).
    seed : int or None
        Makes sampling repeatable; None draws a fresh one.
    stop_ids : frozenset of int
        Tokens that end the answer; they are not part of it.

    Raises
    ------
    ValueError
        A value outside its range.
    """

    max_tokens: int = 64
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int | None = None
    stop_ids: frozenset[int] = frozenset()

    def __post_init__(self) -> None:
        if self.max_tokens < 0:
            raise ValueError(f"max_tokens is {self.max_tokens}, expected 0 or more")
        if not 0.0 <= self.temperature < float("inf"):
            raise ValueError(f"temperature is {self.temperature}, expected 0 or more")
        if not 0.0 < self.top_p <= 1.0:
            raise ValueError(f"top_p is {self.top_p}, expected more than 0 and at most 1")
        if self.seed is not None and self.seed < 0:
            raise ValueError(f"seed is {self.seed}, expected 0 or more")


class Sampler:
    """Draws the tokens of one request, one after another.

    Parameters
    ----------
    params : SamplingParams
        The request's choices.

    Notes
    -----
    Its random numbers are its own, so what a request draws does not depend on its neighbours in the
    batch.
    """

    def __init__(self, params: SamplingParams) -> None:
        self._params = params
        self._random = np.random.default_rng(params.seed)

    def sample(self, logits: Floats) -> int:
        """Pick a token.

        Parameters
        ----------
        logits : ndarray
            Scores of all tokens [vocab]; unchanged.

        Returns
        -------
        int
            The token's id.
        """
        if self._params.temperature == 0.0:
            return int(logits.argmax())
        scores = logits.astype(np.float64) / self._params.temperature
        probabilities = np.exp(scores - scores.max())
        probabilities /= probabilities.sum()
        order = np.argsort(-probabilities, kind="stable")
        cumulative = np.cumsum(probabilities[order])
        # The token that crosses top_p belongs to the set, so it is never empty.
        kept = int(np.searchsorted(cumulative, self._params.top_p)) + 1
        cumulative = cumulative[:kept]
        drawn = self._random.random() * cumulative[-1]
        return int(order[np.searchsorted(cumulative, drawn, side="right").clip(max=len(cumulative) - 1)])
