"""Every example does what it shows: the same tokens as without pages, and all pages back at the end."""

from __future__ import annotations

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import continuous_batching
import paged_kv
from paged_kv.llm import new_cache
from tiny_llama import CONFIG, dense_greedy, random_prompts, tiny_llama

if TYPE_CHECKING:
    from collections.abc import Sequence

EXAMPLES = Path(__file__).parents[2] / "examples"
PROGRAMS = sorted(path.name for path in EXAMPLES.glob("*.py") if "\ndef main()" in path.read_text())
MODEL = tiny_llama()


def assert_all_pages_are_back(cache: paged_kv.KvCache) -> None:
    cache.validate()
    assert cache.pool.num_free == cache.num_pages
    assert cache.stats()["sequences"] == 0


@pytest.mark.parametrize("program", PROGRAMS)
def test_it_runs_as_a_program(program: str) -> None:
    run = subprocess.run([sys.executable, EXAMPLES / program], capture_output=True, text=True, check=False)
    assert (run.returncode, run.stderr) == (0, "")
    assert len(run.stdout.splitlines()) >= 3
    assert "False" not in run.stdout


def test_every_example_is_a_program_but_what_they_share() -> None:
    assert {path.name for path in EXAMPLES.glob("*.py")} == {*PROGRAMS, "tiny_llama.py"}


# Continuous batching


class AbortingModel:
    """The model, in the middle of whose forward pass another thread aborts a request of the batch."""

    def __init__(self, *, every: int, at_most: int) -> None:
        self.scheduler: continuous_batching.Scheduler
        self.aborted: list[continuous_batching.Request] = []
        self._every, self._at_most, self._forwards = every, at_most, 0
        self._other_thread = ThreadPoolExecutor(1)

    def forward(self, token_ids: Any, cache: Any, batch: Any) -> Any:
        self._forwards += 1
        if self._forwards % self._every == 0 and len(self.aborted) < self._at_most:
            running = self.scheduler.running
            victim = running[self._forwards % len(running)]
            with pytest.raises(paged_kv.SequenceBusyError):
                victim.sequence.append(1)  # it is in the open batch
            self._other_thread.submit(victim.abort).result()
            self.aborted.append(victim)
        return MODEL.forward(token_ids, cache, batch)

    def logits(self, hidden: Any) -> Any:
        return MODEL.logits(hidden)


class WatchedScheduler(continuous_batching.Scheduler):
    def step(self) -> None:
        self.victims: list[continuous_batching.Request] = []
        super().step()
        assert not set(self.victims) & set(self.running), "a victim came back in the step that preempted it"

    def _preempt(self, request: continuous_batching.Request) -> None:
        self.victims.append(request)
        super()._preempt(request)


def test_two_hundred_requests_from_a_small_pool_with_preemptions_and_aborts() -> None:
    cache = new_cache(CONFIG, num_tokens=160, page_size=4)
    model = AbortingModel(every=12, at_most=25)
    model.scheduler = scheduler = WatchedScheduler(model, cache, max_batch_tokens=96)  # type: ignore[arg-type]
    random = np.random.default_rng(21)
    prompts = random_prompts(22, random.integers(1, 40, size=200).tolist())
    requests = [
        scheduler.submit(prompt, int(n))
        for prompt, n in zip(prompts, random.integers(10, 50, size=200), strict=True)
    ]
    scheduler.run()

    counts = scheduler.counts
    assert counts.preemptions >= 100
    assert len(model.aborted) >= 20
    assert counts.mixed_steps >= 50
    assert counts.overtakings >= 50
    assert not any(request.is_finished or request.error for request in model.aborted)
    finished = [request for request in requests if request not in model.aborted]
    for request in finished:
        assert request.output == dense_greedy(MODEL, request.prompt, request.max_tokens)
    assert_all_pages_are_back(cache)


@pytest.mark.parametrize(("at_most", "expected"), [(0, [0]), (5, [5]), (1000, range(6, 101))])
def test_small_requests_pass_a_big_one_as_often_as_they_may(
    monkeypatch: pytest.MonkeyPatch, at_most: int, expected: Sequence[int]
) -> None:
    monkeypatch.setattr(continuous_batching, "MAX_OVERTAKEN", at_most)
    cache = new_cache(CONFIG, num_tokens=64, page_size=4)
    scheduler = continuous_batching.Scheduler(MODEL, cache)
    first, big = (
        scheduler.submit(prompt, 20 - 16 * i) for i, prompt in enumerate(random_prompts(23, [20, 55]))
    )
    small = [scheduler.submit(prompt, 3) for prompt in random_prompts(24, [3] * 100)]
    requests = [first, big, *small]
    order: list[continuous_batching.Request] = []
    while scheduler.running or scheduler.waiting:
        scheduler.step()
        order += [request for request in requests if request.is_finished and request not in order]
    assert len(order) == len(requests)
    assert len([request for request in small if order.index(request) < order.index(big)]) in expected
    assert big.output == dense_greedy(MODEL, big.prompt, big.max_tokens)
    assert_all_pages_are_back(cache)


def test_a_request_that_never_fits_fails_alone() -> None:
    cache = new_cache(CONFIG, num_tokens=32, page_size=4)
    scheduler = continuous_batching.Scheduler(MODEL, cache)
    fits, never = (scheduler.submit(prompt, 5) for prompt in random_prompts(26, [10, 40]))
    scheduler.run()
    assert isinstance(never.error, paged_kv.NeverFitsError)
    assert fits.output == dense_greedy(MODEL, fits.prompt, 5)
    assert_all_pages_are_back(cache)


def test_pages_that_others_hold_are_reported_and_nothing_is_lost() -> None:
    cache = new_cache(CONFIG, num_tokens=32, page_size=4)
    scheduler = continuous_batching.Scheduler(MODEL, cache)
    [prompt] = random_prompts(27, [20])
    request = scheduler.submit(prompt, 5)
    handles = cache.pool.alloc(4)
    with pytest.raises(paged_kv.OutOfPagesError):
        scheduler.step()
    cache.pool.release(handles)
    scheduler.run()
    assert request.output == dense_greedy(MODEL, prompt, 5)
    assert_all_pages_are_back(cache)
