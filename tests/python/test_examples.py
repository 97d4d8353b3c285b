"""Every example does what it shows: the same tokens as without pages, and all pages back at the end."""

from __future__ import annotations

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import beam_search
import block_tables
import continuous_batching
import cross_attention
import hybrid_windows
import oracle
import paged_kv
import parallel_sampling
import speculative_decoding
import tensor_parallel
from paged_kv.llm import DenseCache, LlamaModel, SamplingParams, new_cache
from paged_kv.llm.sampling import Sampler
from tiny_llama import CONFIG, dense_cache, dense_greedy, random_prompts, step, tiny_llama

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


# Parallel sampling and beams


def sampled_alone(prompt: Sequence[int], params: SamplingParams) -> list[int]:
    cache, sampler, answer = dense_cache(), Sampler(params), list[int]()
    seq, new = cache.sequence(), list(prompt)
    while len(answer) < params.max_tokens and not set(answer) & params.stop_ids:
        new = [sampler.sample(step(MODEL, cache, [seq], [new])[0])]
        answer += new
    return answer


@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_eight_samples_are_those_drawn_alone(page_size: int) -> None:
    cache = new_cache(CONFIG, num_tokens=512, page_size=page_size)
    [prompt] = random_prompts(31, [45])
    stops = frozenset(range(0, 256, 13))
    params = [
        SamplingParams(max_tokens=20, temperature=0.8, top_p=0.95, seed=seed, stop_ids=stops)
        for seed in range(8)
    ]
    answers = parallel_sampling.sample(MODEL, cache, prompt, params)
    assert answers == [sampled_alone(prompt, each) for each in params]
    assert len({len(answer) for answer in answers}) > 2, "they ended at different times"
    assert (cache.stats()["copied_pages"] > 0) == (page_size > 1), "45 tokens end inside a page"
    assert_all_pages_are_back(cache)


def beams_from_scratch(
    prompt: list[int], width: int, max_tokens: int, stop_id: int | None
) -> list[tuple[float, list[int]]]:
    """Beam search by its definition: every hypothesis is computed anew, alone and without pages."""
    beams: list[tuple[float, list[int]]] = [(0.0, [])]
    ended = []
    for _ in range(max_tokens):
        candidates = []
        for total, tokens in beams:
            cache = dense_cache()
            scores = step(MODEL, cache, [cache.sequence()], [prompt + tokens])[0].astype(np.float64)
            log_probs = scores - np.logaddexp.reduce(scores)
            candidates += [(total + float(log_probs[t]), [*tokens, t]) for t in range(len(log_probs))]
        candidates.sort(reverse=True)
        ended += [beam for beam in candidates[:width] if beam[1][-1] == stop_id]
        beams = [beam for beam in candidates if beam[1][-1] != stop_id][:width]
    return sorted(beams + ended, reverse=True)[:width]


@pytest.mark.parametrize(("page_size", "stops"), [(1, False), (4, True), (16, False), (16, True)])
def test_four_beams_are_those_computed_from_scratch(page_size: int, stops: bool) -> None:
    cache = new_cache(CONFIG, num_tokens=512, page_size=page_size)
    [prompt] = random_prompts(32, [29])
    [(_, likeliest), *_] = beams_from_scratch(prompt, 4, 12, None)
    stop_id = likeliest[3] if stops else None
    expected = beams_from_scratch(prompt, 4, 12, stop_id)
    found = beam_search.beam_search(MODEL, cache, prompt, width=4, max_tokens=12, stop_id=stop_id)
    assert [beam.tokens for beam in found] == [tokens for _, tokens in expected]
    np.testing.assert_allclose([beam.log_prob for beam in found], [total for total, _ in expected], atol=1e-4)
    assert any(beam.tokens[-1] == stop_id for beam in found) == stops
    assert_all_pages_are_back(cache)


# Speculation


@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_speculation_gives_the_tokens_of_plain_decoding(page_size: int) -> None:
    model = tiny_llama(memory=0.01)
    cache = new_cache(CONFIG, num_tokens=1024, page_size=page_size)
    prompts = random_prompts(41, [1, 30, 17, 64, 5, 41])
    answers, counts = speculative_decoding.generate(model, cache, prompts, 60)
    assert answers == [dense_greedy(model, prompt, 60) for prompt in prompts]
    assert counts.rejected >= 100
    assert counts.accepted >= 50
    assert counts.steps < 59
    assert_all_pages_are_back(cache)


def test_lookup_continues_the_latest_place_that_ends_alike() -> None:
    text = [7, 8, 1, 7, 8, 2, 3, 9, 8, 4, 7, 8]
    assert speculative_decoding.lookup(text, 4) == [2, 3, 9, 8]
    assert speculative_decoding.lookup(text, 2) == [2, 3]
    assert speculative_decoding.lookup([1, 2, 3], 4) == []
    assert speculative_decoding.lookup([5], 4) == []
    assert speculative_decoding.lookup(text, 0) == []


# Tables only


@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_own_kernels_give_the_tokens_of_the_dense_reference(page_size: int) -> None:
    backend = block_tables.OwnKernels(CONFIG, num_pages=200, page_size=page_size, max_pages=100)
    [shared, *tails] = random_prompts(51, [37, 1, 3, 20])
    prompts = [shared + tail for tail in tails]
    answers = block_tables.generate(MODEL, backend, prompts, 20)
    assert answers == [dense_greedy(MODEL, prompt, 20) for prompt in prompts]
    assert (backend.tables.stats()["copied_pages"] > 0) == (page_size > 1)
    assert not backend.keys[:, 0].any()
    assert not backend.values[:, 0].any()
    assert_all_pages_are_back(backend.tables)


def test_both_tables_lead_to_the_same_tokens_and_are_padded_to_their_end() -> None:
    backend = block_tables.OwnKernels(CONFIG, num_pages=64, page_size=4)
    seqs = [backend.sequence() for _ in range(3)]
    step(MODEL, backend, seqs, random_prompts(52, [9, 1, 30]))
    buffers = backend.buffers
    for array in vars(buffers).values():
        array.fill(77)
    query = np.random.default_rng(53).standard_normal((3, CONFIG.num_heads, CONFIG.head_dim), np.float32)
    with backend.batch(seqs, [1, 1, 1]) as batch:
        backend.write(0, query[:, :2], query[:, 2:], batch)
        pages = backend.keys[0], backend.values[0]
        padded = np.zeros((len(buffers.seq_lens), *query.shape[1:]), np.float32)
        padded[:3] = query
        by_rectangle = block_tables.decode(padded, *pages, buffers)
        by_lists = block_tables.prefill(query, *pages, buffers)
        np.testing.assert_allclose(by_rectangle[:3], by_lists, atol=1e-6)
        assert not by_rectangle[3:].any(), "padding reads zeros"
        for row, pages_used in enumerate([3, 1, 8]):
            assert (buffers.block_table[row, :pages_used] > 0).all()
            assert (buffers.block_table[row, pages_used:] == 0).all()
        assert not buffers.block_table[3:].any()
        assert buffers.seq_lens.tolist() == [10, 2, 31, 0, 0, 0, 0, 0]
        assert buffers.kv_indptr.tolist() == [0, 3, 4, 12, 12, 12, 12, 12, 12]
        assert buffers.kv_last_page_len.tolist() == [2, 2, 3, 0, 0, 0, 0, 0]
        assert (buffers.slot_mapping[3:] == -1).all()


# Tensor parallelism


def test_two_processes_answer_as_one_does() -> None:
    prompts = random_prompts(61, [20, 33, 5])
    with tensor_parallel.TensorParallel() as ranks:
        answers, scores = tensor_parallel.forked_answers(ranks.step, ranks.tables, prompts, 12)
    dense = [dense_greedy(MODEL, prompt, 12) for prompt in prompts]
    assert answers[::2] == dense
    for prompt, answer in zip(prompts, answers[1::2], strict=True):
        assert answer[1:] == dense_greedy(MODEL, [*prompt, answer[0]], 11)
    cache = tensor_parallel.cache_of(CONFIG)

    def step_of_one(*arguments: Any) -> Any:
        return step(MODEL, cache, *arguments)

    expected, expected_scores = tensor_parallel.forked_answers(step_of_one, cache, prompts, 12)
    assert answers == expected
    for found, wanted in zip(scores, expected_scores, strict=True):
        np.testing.assert_allclose(found, wanted, atol=1e-4)
    assert ranks.tables.stats()["copied_pages"] == cache.stats()["copied_pages"] > 0
    assert_all_pages_are_back(ranks.tables)


# Two caches


class DenseDecoder(cross_attention.Decoder):
    """The decoder without a cache: float64, all target tokens of one target at once."""

    def run(self, x: Any, source: Any) -> Any:
        heads, normalised = cross_attention.heads, cross_attention.normalised
        x, source = x.astype(np.float64), source.astype(np.float64)
        for own, cross in self.layers:
            normed = normalised(x)
            out, _ = oracle.attention(*(heads(normed @ own[i]) for i in range(3)))
            x = x + out.reshape(x.shape) @ own.output
            query = heads(normalised(x) @ cross.query)
            out, _ = oracle.attention(
                query, heads(source @ cross.key), heads(source @ cross.value), causal=False
            )
            x = x + out.reshape(x.shape) @ cross.output
        return normalised(x)


def test_cross_attention_is_that_of_a_dense_decoder() -> None:
    decoder, dense = cross_attention.Decoder(), DenseDecoder()
    random = np.random.default_rng(71)

    def draw(*shape: int) -> Any:
        return random.standard_normal((*shape, cross_attention.HIDDEN), np.float32)

    targets, sources = cross_attention.cache_of(8), cross_attention.cache_of(16)
    states = [draw(50), draw(3)]  # the second is shorter than its target
    long, short = (decoder.read_source(sources, each) for each in states)
    pages = sources.pool.num_free
    source_seqs = [long, long.fork(), short]
    assert sources.pool.num_free == pages, "forks of a source cost no pages"
    target_seqs = [targets.sequence() for _ in source_seqs]
    texts = [draw(12) for _ in source_seqs]
    outputs: list[list[Any]] = [[], [], []]
    done = [0, 0, 0]
    for chunk in ([4, 2, 6], [1, 1, 1], [1, 1, 1], [3, 5, 2]):
        x = np.concatenate([text[n : n + new] for text, n, new in zip(texts, done, chunk, strict=True)])
        out = decoder.step(x, targets, target_seqs, sources, source_seqs, chunk)
        for output, rows in zip(outputs, np.split(out, np.cumsum(chunk)[:-1]), strict=True):
            output.append(rows)
        done = [n + new for n, new in zip(done, chunk, strict=True)]
    for text, n, output, source in zip(texts, done, outputs, [states[0], states[0], states[1]], strict=True):
        np.testing.assert_allclose(np.concatenate(output), dense.run(text[:n], source), atol=2e-4)

    held = [len(seq) for seq in target_seqs]
    with pytest.raises(paged_kv.OutOfPagesError):
        decoder.step(draw(90), targets, target_seqs, sources, source_seqs, [30, 30, 30])
    assert [len(seq) for seq in target_seqs] == held
    for seq in (*source_seqs, *target_seqs):
        seq.free()
    assert_all_pages_are_back(targets)
    assert_all_pages_are_back(sources)


class DenseWindows(DenseCache):
    """The dense cache, some of whose layers see a window."""

    def __init__(self, window: int) -> None:
        super().__init__(
            num_layers=CONFIG.num_layers, num_kv_heads=CONFIG.num_kv_heads, head_dim=CONFIG.head_dim
        )
        self._window = window

    def attend(self, layer: int, query: Any, batch: Any) -> Any:
        if layer in hybrid_windows.FULL_LAYERS:
            return super().attend(layer, query, batch)
        rows, outputs = 0, []
        for storage, start, new in batch.views:
            key, value = storage[layer, :, :, : start + new].astype(np.float64).transpose(0, 2, 1, 3)
            one = query[rows : rows + new].astype(np.float64)
            outputs.append(oracle.attention(one, key, value, window_left=self._window - 1)[0])
            rows += new
        return np.concatenate(outputs).astype(np.float32)


def generated(model: LlamaModel, cache: Any, seqs: Any, prompts: list[list[int]], n: int) -> list[list[int]]:
    answers: list[list[int]] = [[] for _ in prompts]
    new = prompts
    for _ in range(n):
        new = [[int(scores.argmax())] for scores in step(model, cache, seqs, new)]
        for answer, tokens in zip(answers, new, strict=True):
            answer += tokens
    return answers


def test_a_hybrid_of_two_caches_gives_the_tokens_of_a_dense_one() -> None:
    prompts = random_prompts(81, [40, 11, 1])
    hybrid = hybrid_windows.HybridCache(window=16, num_pages=64, num_window_pages=64, page_size=4)
    seqs = [hybrid.sequence() for _ in prompts]
    answers = generated(MODEL, hybrid, seqs, prompts, 25)
    dense = DenseWindows(16)
    assert answers == generated(MODEL, dense, [dense.sequence() for _ in prompts], prompts, 25)
    assert answers != [dense_greedy(MODEL, prompt, 25) for prompt in prompts], "the window matters"
    for seq in seqs:
        seq.free()
    assert_all_pages_are_back(hybrid.full)
    assert_all_pages_are_back(hybrid.window)


def test_when_the_second_cache_is_out_of_pages_the_first_is_as_it_was() -> None:
    [prompt] = random_prompts(82, [30])
    hybrid = hybrid_windows.HybridCache(window=16, num_pages=16, num_window_pages=8, page_size=4)
    other, seq = hybrid.sequence(), hybrid.sequence()
    step(MODEL, hybrid, [other], random_prompts(83, [3]))
    before = hybrid.full.stats(), hybrid.window.stats()
    with pytest.raises(paged_kv.OutOfPagesError):
        step(MODEL, hybrid, [seq], [prompt])
    assert (hybrid.full.stats(), hybrid.window.stats()) == before
    other.free()
    dense = DenseWindows(16)
    assert generated(MODEL, hybrid, [seq], [prompt], 3) == generated(
        MODEL, dense, [dense.sequence()], [prompt], 3
    )
