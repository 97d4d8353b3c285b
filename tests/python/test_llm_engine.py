"""Continuous batching gives every request what it would have got alone, whatever happens around it."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

import numpy as np
import pytest

from llm_support import dense_cache, tiny_model
from paged_kv.llm import Engine, SamplingParams, generate, new_cache

if TYPE_CHECKING:
    from collections.abc import Callable

    from paged_kv.llm.backend import KvBackend

MODEL = tiny_model().model
VOCAB = MODEL.config.vocab_size
RANDOM = np.random.default_rng(11)
PROMPTS = [RANDOM.integers(3, VOCAB, length).tolist() for length in (1, 2, 5, 16, 17, 31, 40, 64)]
TWENTY = SamplingParams(max_tokens=20)

CACHES: dict[str, Callable[[], KvBackend]] = {
    "dense": lambda: dense_cache(MODEL.config),
    "paged": lambda: new_cache(MODEL.config, num_tokens=4096, page_size=4),
}


@pytest.fixture(params=CACHES)
def cache(request: pytest.FixtureRequest) -> KvBackend:
    return CACHES[request.param]()


@pytest.fixture(scope="module")
def alone() -> list[list[int]]:
    """What each prompt leads to without paging and without company."""
    return [generate(MODEL, dense_cache(MODEL.config), [prompt], TWENTY)[0].token_ids for prompt in PROMPTS]


def assert_all_pages_are_back(cache: KvBackend) -> None:
    if hasattr(cache, "validate"):
        cache.validate()
        assert cache.pool.num_free == cache.stats()["total_pages"]


def test_a_batch_gives_what_each_prompt_gives_alone(cache, alone) -> None:
    answers = generate(MODEL, cache, PROMPTS, TWENTY)
    assert [answer.token_ids for answer in answers] == alone
    assert {answer.finish_reason for answer in answers} == {"length"}
    assert len({tuple(tokens) for tokens in alone}) == len(PROMPTS)
    assert_all_pages_are_back(cache)


@pytest.mark.parametrize("max_batch_tokens", [1, 7, 16])
def test_prompts_in_pieces_change_nothing(cache, alone, max_batch_tokens: int) -> None:
    answers = generate(MODEL, cache, PROMPTS, TWENTY, max_batch_tokens=max_batch_tokens)
    assert [answer.token_ids for answer in answers] == alone


def test_many_threads_submit_and_stream(cache, alone) -> None:
    found: dict[int, list[int]] = {}
    with Engine(MODEL, cache, max_batch_size=5) as engine:

        def serve(index: int) -> None:
            found[index] = list(engine.submit(PROMPTS[index % len(PROMPTS)], TWENTY))

        threads = [threading.Thread(target=serve, args=(index,)) for index in range(24)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert [found[index] for index in range(24)] == alone * 3
    assert_all_pages_are_back(cache)


def test_forks_of_a_shared_prefix_continue_it(cache) -> None:
    shared = PROMPTS[6][:38]  # ends in the middle of a page
    tails = [[*prompt[:3], index] for index, prompt in enumerate(PROMPTS[2:], start=3)]
    with Engine(MODEL, cache) as engine:
        prefix = engine.prefill(shared)
        requests = [engine.submit(tail, TWENTY, prefix=prefix) for tail in tails]
        found = [request.result() for request in requests]
        assert prefix.num_computed_tokens == len(shared)
        prefix.free()
    expected = [
        generate(MODEL, dense_cache(MODEL.config), [shared + tail], TWENTY)[0].token_ids for tail in tails
    ]
    assert found == expected
    if hasattr(cache, "pool"):
        assert cache.stats()["copied_pages"] == len(
            tails
        )  # each wrote into the shared last page, so each got its own
    assert_all_pages_are_back(cache)


def test_a_sequence_is_truncated_and_generated_again(cache) -> None:
    with Engine(MODEL, cache) as engine:
        sequence = engine.prefill(PROMPTS[5])
        sibling = sequence.fork()
        first = engine.submit(PROMPTS[2], TWENTY, sequence=sequence).result()
        sequence.truncate(len(PROMPTS[5]) - 9)
        again = engine.submit(PROMPTS[5][-9:] + PROMPTS[2], TWENTY, sequence=sequence).result()
        assert again == first
        sequence.free()
        assert engine.submit(PROMPTS[2], TWENTY, sequence=sibling).result() == first
        sibling.free()
    assert_all_pages_are_back(cache)


def test_stop_tokens_end_an_answer_and_are_not_part_of_it(cache, alone) -> None:
    stop = alone[3][7]
    cut = alone[3].index(stop)
    request_params = SamplingParams(max_tokens=20, stop_ids=frozenset({stop}))
    (answer,) = generate(MODEL, cache, [PROMPTS[3]], request_params)
    assert (answer.token_ids, answer.finish_reason) == (alone[3][:cut], "stop")


def test_sampling_does_not_depend_on_the_neighbours(cache) -> None:
    params = SamplingParams(max_tokens=20, temperature=1.0, top_p=0.9, seed=5)
    together = generate(MODEL, cache, PROMPTS, params)
    single = [generate(MODEL, dense_cache(MODEL.config), [prompt], params)[0] for prompt in PROMPTS]
    assert [answer.token_ids for answer in together] == [answer.token_ids for answer in single]


def test_abort_from_another_thread_leaves_the_others_alone(cache, alone) -> None:
    endless = SamplingParams(max_tokens=400)
    with Engine(MODEL, cache) as engine:
        victims = [engine.submit(prompt, endless) for prompt in PROMPTS[:4]]
        others = [engine.submit(prompt, TWENTY) for prompt in PROMPTS]
        for victim in victims:
            next(iter(victim))  # it is in the middle of it
            victim.abort()
        assert [other.result() for other in others] == alone
        assert [len(victim.result()) < 400 for victim in victims] == [True] * 4
        assert [victim.finish_reason for victim in victims] == ["abort"] * 4
    assert_all_pages_are_back(cache)


def test_close_ends_what_runs(cache) -> None:
    engine = Engine(MODEL, cache)
    request = engine.submit(PROMPTS[0], SamplingParams(max_tokens=400))
    next(iter(request))
    engine.close()
    assert request.result() == request.output_ids
    assert request.finish_reason == "abort"
    with pytest.raises(RuntimeError, match="closed"):
        engine.submit(PROMPTS[0])
    assert_all_pages_are_back(cache)


def test_an_error_in_the_model_reaches_whoever_waits(cache) -> None:
    class Broken(type(MODEL)):
        def forward(self, *_: object) -> None:
            raise ZeroDivisionError("broken on purpose")

    with Engine(Broken(MODEL.config, MODEL._weights), cache) as engine:
        request = engine.submit(PROMPTS[4])
        with pytest.raises(ZeroDivisionError, match="on purpose"):
            request.result()
        with pytest.raises(ZeroDivisionError, match="on purpose"):
            list(request)
        engine.close()
        with pytest.raises(RuntimeError, match="closed") as caught:
            engine.submit(PROMPTS[4])
        assert isinstance(caught.value.__cause__, ZeroDivisionError)
    assert_all_pages_are_back(cache)


def test_the_context_bounds_what_is_generated(cache) -> None:
    length = MODEL.config.context_length
    (answer,) = generate(MODEL, cache, [[5] * (length - 3)], TWENTY)
    assert (len(answer.token_ids), answer.finish_reason) == (3, "length")


def test_bad_requests_are_refused_at_once(cache) -> None:
    with Engine(MODEL, cache) as engine:
        for bad in ([], [-1], [VOCAB], [5] * (MODEL.config.context_length + 1)):
            with pytest.raises(ValueError, match="token"):
                engine.submit(bad)
        sequence = engine.prefill([5])
        with pytest.raises(ValueError, match="either"):
            engine.submit([5], prefix=sequence, sequence=sequence)
        with pytest.raises(TimeoutError):
            engine.submit([5], SamplingParams(max_tokens=400)).result(timeout=0)
        sequence.free()
    assert_all_pages_are_back(cache)


# What follows needs a pool that can run out.


def test_a_pool_too_small_for_all_at_once_serves_them_one_after_the_other(alone) -> None:
    # The longest request alone needs 84 of 96 slots; together they need 336.
    cache = new_cache(MODEL.config, num_tokens=96, page_size=4)
    with Engine(MODEL, cache) as engine:
        requests = [engine.submit(prompt, TWENTY) for prompt in PROMPTS]
        assert [request.result() for request in requests] == alone
        assert engine.stats.preemptions > 0
    assert_all_pages_are_back(cache)


def test_a_request_larger_than_the_pool_fails_alone(alone) -> None:
    cache = new_cache(MODEL.config, num_tokens=48, page_size=4)
    with Engine(MODEL, cache, page_patience=0.1) as engine:
        large = engine.submit(PROMPTS[7], TWENTY)
        small = engine.submit(PROMPTS[3], TWENTY)
        assert small.result() == alone[3]
        with pytest.raises(Exception, match="page") as caught:
            large.result()
        assert type(caught.value).__name__ in ("NeverFitsError", "OutOfPagesError")
        assert large.finish_reason == "error"
    assert_all_pages_are_back(cache)


def test_pages_held_by_others_are_waited_for(alone) -> None:
    cache = new_cache(MODEL.config, num_tokens=48, page_size=4)
    other = cache.sequence()
    other.append(44)
    with Engine(MODEL, cache, page_patience=30.0) as engine:
        request = engine.submit(PROMPTS[3], TWENTY)
        time.sleep(0.1)
        assert request.finish_reason is None
        other.free()
        assert request.result() == alone[3]
    assert_all_pages_are_back(cache)


def test_eight_threads_submit_and_abort_over_a_pool_that_keeps_running_out(alone) -> None:
    cache = new_cache(MODEL.config, num_tokens=160, page_size=4)
    wrong: list[str] = []

    def serve(engine: Engine, seed: int) -> None:
        random = np.random.default_rng(seed)
        for _ in range(12):
            index, patience = int(random.integers(len(PROMPTS))), int(random.integers(1, 30))
            request = engine.submit(PROMPTS[index], TWENTY)
            for count, _token in enumerate(request, start=1):
                if count == patience:
                    request.abort()
            expected = alone[index][: len(request.output_ids)]
            if request.output_ids != expected or request.finish_reason not in ("length", "abort"):
                wrong.append(f"prompt {index}: {request.output_ids} ({request.finish_reason})")

    with Engine(MODEL, cache, max_batch_tokens=48) as engine:
        threads = [threading.Thread(target=serve, args=(engine, seed)) for seed in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert engine.stats.preemptions > 0
    assert wrong == []
    assert_all_pages_are_back(cache)
