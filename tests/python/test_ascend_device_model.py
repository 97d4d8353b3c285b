"""Models generate through a cache on the device token for token as through one in host memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from ascend_fake import environment
from ascend_support import fake_runtime
from llm_support import reference_model, tiny_model, tiny_path
from paged_kv import ascend
from paged_kv.llm import LanguageModel, SamplingParams, generate, new_cache

PROMPT = "The capital of France is"


def answers(
    model: LanguageModel, prompts: list[list[int]], max_tokens: int, **options: object
) -> list[list[int]]:
    """Generate for all prompts in one batch; give the cache back."""
    cache = new_cache(model.config, num_tokens=2048, **options)
    params = SamplingParams(max_tokens=max_tokens)
    done = generate(model.model, cache, prompts, params, max_batch_tokens=32)
    cache.validate()
    return [completion.token_ids for completion in done]


@pytest.mark.usefixtures("fake")
@pytest.mark.parametrize("page_size", [16, 32])
def test_the_tiny_model_answers_many_prompts_as_on_the_host(page_size) -> None:
    model = tiny_model()
    prompts = [model.tokenizer.encode(text) for text in ("a", "the thing on the hill", "in" * 20, "x y z")]
    options = {"page_size": page_size}
    got = answers(model, prompts, 8, device="ascend:0", **options)
    assert got == answers(model, prompts, 8, dtype="float16", **options)
    ascend.open_device(0).synchronize()


@pytest.mark.model
@pytest.mark.timeout(600)
def test_the_command_generates_on_the_device_what_it_does_on_the_host() -> None:
    """The fake runtime is found as CANN is where no variable names it: on the loader's path."""
    variables = os.environ | environment() | {"LD_LIBRARY_PATH": str(fake_runtime())}
    del variables["ASCEND_HOME_PATH"]
    command = [sys.executable, "-m", "paged_kv", "generate", "--device", "ascend:0", "--raw", "--json"]
    done = subprocess.run(
        [*command, "--max-tokens", "4", PROMPT], env=variables, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    model = reference_model()
    (want,) = answers(model, [model.tokenizer.encode(PROMPT)], 4, dtype="float16")
    answer = json.loads(done.stdout)
    assert answer["token_ids"] == want
    assert "Paris" in answer["text"]


def test_the_command_says_what_is_missing_without_a_runtime() -> None:
    clean = {k: v for k, v in os.environ.items() if k not in environment()}
    command = [sys.executable, "-m", "paged_kv", "generate", "--device", "ascend:0", "hello"]
    command += ["--model", str(tiny_path())]
    done = subprocess.run(command, env=clean, capture_output=True, text=True, timeout=300)
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert done.stderr.startswith("paged-kv: no CANN runtime: ")
