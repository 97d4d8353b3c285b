"""Greedy takes the best token; sampling draws from what it should, repeatably."""

from __future__ import annotations

import numpy as np
import pytest

from paged_kv.llm.sampling import Sampler, SamplingParams

LOGITS = np.log(np.array([0.1, 0.4, 0.2, 0.3], np.float32))


def draws(count: int, **params: float) -> list[int]:
    sampler = Sampler(SamplingParams(**params))
    return [sampler.sample(LOGITS) for _ in range(count)]


def test_greedy_takes_the_most_likely_token() -> None:
    assert draws(5) == [1] * 5


def test_a_seed_repeats_and_another_differs() -> None:
    assert draws(50, temperature=1.0, seed=7) == draws(50, temperature=1.0, seed=7)
    assert draws(50, temperature=1.0, seed=7) != draws(50, temperature=1.0, seed=8)


def test_frequencies_follow_the_temperature() -> None:
    count = 20_000
    for temperature in (0.5, 1.0, 2.0):
        expected = np.exp(LOGITS / temperature) / np.exp(LOGITS / temperature).sum()
        found = np.bincount(draws(count, temperature=temperature, seed=1), minlength=4) / count
        np.testing.assert_allclose(found, expected, atol=5 * np.sqrt(0.25 / count))


@pytest.mark.parametrize(("top_p", "kept"), [(1e-9, {1}), (0.39, {1}), (0.41, {1, 3}), (0.75, {1, 2, 3})])
def test_top_p_keeps_the_smallest_set_that_reaches_it(top_p: float, kept: set[int]) -> None:
    assert set(draws(500, temperature=1.0, top_p=top_p, seed=3)) == kept


def test_scores_are_left_as_they_were() -> None:
    before = LOGITS.copy()
    draws(3, temperature=0.7, top_p=0.5, seed=0)
    np.testing.assert_array_equal(LOGITS, before)


def test_extreme_scores_are_no_trouble() -> None:
    sampler = Sampler(SamplingParams(temperature=1e-3, seed=0))
    assert sampler.sample(np.array([-1e30, 1e30, -np.inf, 0.0], np.float32)) == 1


@pytest.mark.parametrize(
    "params",
    [
        {"max_tokens": -1},
        {"temperature": -0.1},
        {"temperature": float("nan")},
        {"temperature": float("inf")},
        {"top_p": 0.0},
        {"top_p": 1.1},
        {"top_p": float("nan")},
        {"seed": -1},
    ],
)
def test_values_out_of_range_are_refused(params: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(params))):
        SamplingParams(**params)
