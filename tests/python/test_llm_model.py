"""The forward pass agrees with Llama written out naively, and refuses by name what it can't run."""

from __future__ import annotations

import gguf
import numpy as np
import pytest

from llm_support import (
    HEAD_DIM,
    HEADS,
    HIDDEN,
    KV_HEADS,
    LAYERS,
    dense_cache,
    random_tensors,
    tiny_model,
    vocabulary,
    write_gguf,
)
from paged_kv.llm import LanguageModel, ModelError, UnsupportedModelError, load


def naive_logits(
    tensors: dict[str, np.ndarray],
    ids: list[int],
    *,
    rope_scale: float = 1.0,
    rope_factors: np.ndarray | None = None,
) -> np.ndarray:
    """Llama in float64, one token, one head at a time, rotation by complex numbers. [tokens, vocab]."""
    w = {name: tensor.astype(np.float64) for name, tensor in tensors.items()}
    factors = 1.0 if rope_factors is None else rope_factors.astype(np.float64)
    frequencies = 10000.0 ** (-2.0 * np.arange(HEAD_DIM // 2) / HEAD_DIM) / rope_scale / factors

    def norm(x: np.ndarray, gain: np.ndarray) -> np.ndarray:
        return x / np.sqrt((x * x).mean() + 1e-5) * gain

    def rotate(head: np.ndarray, position: int) -> np.ndarray:
        turned = (head[0::2] + 1j * head[1::2]) * np.exp(1j * frequencies * position)
        return np.stack([turned.real, turned.imag], axis=1).ravel()

    def heads(x: np.ndarray, matrix: np.ndarray) -> np.ndarray:
        return (matrix @ x).reshape(-1, HEAD_DIM)

    rows = [w["token_embd.weight"][token] for token in ids]
    for layer in range(LAYERS):
        part = {name: w[f"blk.{layer}.{name}.weight"] for name in ("attn_norm", "attn_q", "attn_k", "attn_v")}
        part |= {name: w[f"blk.{layer}.{name}.weight"] for name in ("attn_output", "ffn_norm", "ffn_gate")}
        part |= {name: w[f"blk.{layer}.{name}.weight"] for name in ("ffn_up", "ffn_down")}
        normed = [norm(x, part["attn_norm"]) for x in rows]
        keys = [[rotate(h, t) for h in heads(x, part["attn_k"])] for t, x in enumerate(normed)]
        values = [heads(x, part["attn_v"]) for x in normed]
        for t, x in enumerate(normed):
            attended = []
            for head, raw in enumerate(heads(x, part["attn_q"])):
                query, shared = rotate(raw, t), head // (HEADS // KV_HEADS)
                scores = np.array([query @ keys[s][shared] / np.sqrt(HEAD_DIM) for s in range(t + 1)])
                weights = np.exp(scores - scores.max())
                weights /= weights.sum()
                attended.append(sum(weights[s] * values[s][shared] for s in range(t + 1)))
            rows[t] = rows[t] + part["attn_output"] @ np.concatenate(attended)
            inner = norm(rows[t], part["ffn_norm"])
            gate = part["ffn_gate"] @ inner
            rows[t] = rows[t] + part["ffn_down"] @ (gate / (1 + np.exp(-gate)) * (part["ffn_up"] @ inner))
    output = w.get("output.weight", w["token_embd.weight"])
    return np.stack([output @ norm(x, w["output_norm.weight"]) for x in rows])


def model_logits(
    language_model: LanguageModel, ids: list[int], chunks: list[int] | None = None
) -> np.ndarray:
    """Logits of every position, computed in pieces of the given lengths. [tokens, vocab]."""
    cache = dense_cache(language_model.config)
    seq, rows, start = cache.sequence(), [], 0
    for length in chunks or [len(ids)]:
        with cache.batch([seq], [length]) as batch:
            hidden = language_model.model.forward(ids[start : start + length], cache, batch)
        rows.append(language_model.model.logits(hidden))
        start += length
    assert start == len(ids)
    return np.concatenate(rows)


IDS = [3, 77, 200, 5, 5, 131, 42, 99, 8, 250, 17, 60]


def test_forward_agrees_with_a_naive_llama() -> None:
    expected = naive_logits(random_tensors(), IDS)
    assert np.abs(expected).max() > 1.0  # else closeness would mean nothing
    np.testing.assert_allclose(model_logits(tiny_model(), IDS), expected, atol=2e-5)


def test_a_prompt_in_pieces_gives_the_same_logits() -> None:
    whole = model_logits(tiny_model(), IDS)
    for chunks in ([1] * 12, [5, 1, 6], [11, 1]):
        np.testing.assert_allclose(model_logits(tiny_model(), IDS, chunks), whole, atol=2e-5)


def test_several_sequences_side_by_side_do_not_see_each_other() -> None:
    model, cache = tiny_model().model, dense_cache(tiny_model().config)
    prompts = [IDS[:7], IDS[3:5], IDS]
    with cache.batch([cache.sequence() for _ in prompts], [len(ids) for ids in prompts]) as batch:
        together = model.logits(model.forward(np.concatenate(prompts), cache, batch))
    alone = np.concatenate([model_logits(tiny_model(), ids) for ids in prompts])
    np.testing.assert_allclose(together, alone, atol=2e-5)


def test_untied_output_and_scaled_rope(tmp_path) -> None:
    tensors = random_tensors(1)
    random = np.random.default_rng(2)
    tensors["output.weight"] = random.standard_normal((len(vocabulary()), HIDDEN)).astype(np.float32) / 8
    tensors["rope_freqs.weight"] = random.uniform(1, 8, HEAD_DIM // 2).astype(np.float32)

    def scaled(writer: gguf.GGUFWriter) -> None:
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(4.0)

    model = load(write_gguf(tmp_path / "m.gguf", tensors, extra=scaled))
    expected = naive_logits(tensors, IDS, rope_scale=4.0, rope_factors=tensors["rope_freqs.weight"])
    np.testing.assert_allclose(model_logits(model, IDS), expected, atol=2e-5)


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q8_0", "Q4_1", "Q5_0"])
def test_quantised_files_give_what_their_dequantised_weights_give(tmp_path, kind: str) -> None:
    quantisation = gguf.GGMLQuantizationType[kind]
    tensors = random_tensors()
    matrices = [name for name, tensor in tensors.items() if tensor.ndim == 2]
    model = load(write_gguf(tmp_path / "m.gguf", tensors, quantise=dict.fromkeys(matrices, quantisation)))
    rounded = tensors | {
        name: gguf.dequantize(gguf.quantize(tensors[name], quantisation), quantisation) for name in matrices
    }
    assert any(np.abs(rounded[name] - tensors[name]).max() > 0 for name in matrices)
    np.testing.assert_allclose(model_logits(model, IDS), naive_logits(rounded, IDS), atol=2e-5)


def with_key(key: str, value: object):
    def add(writer: gguf.GGUFWriter) -> None:
        writer.add_key_value(f"llama.{key}", value, gguf.GGUFValueType.get_type(value))

    return add


@pytest.mark.parametrize(
    ("key", "value", "named"),
    [
        ("rope.scaling.type", "yarn", "rope scaling 'yarn'"),
        ("expert_count", 8, "mixture of 8 experts"),
        ("attention.causal", False, "not causal"),
        ("attention.value_length", 8, "values of another length"),
        ("attention.sliding_window", 128, "llama.attention.sliding_window"),
    ],
)
def test_unsupported_metadata_is_refused_by_name(tmp_path, key: str, value: object, named: str) -> None:
    with pytest.raises(UnsupportedModelError, match=named):
        load(write_gguf(tmp_path / "m.gguf", extra=with_key(key, value)))


def test_another_architecture_is_refused_by_name(tmp_path) -> None:
    with pytest.raises(UnsupportedModelError, match="architecture 'qwen2'"):
        load(write_gguf(tmp_path / "m.gguf", architecture="qwen2"))


def test_a_split_model_is_refused_by_name(tmp_path) -> None:
    path = write_gguf(tmp_path / "m.gguf", extra=lambda writer: writer.add_uint16("split.count", 3))
    with pytest.raises(UnsupportedModelError, match="split into 3 files"):
        load(path)


def test_a_bias_is_refused_by_name(tmp_path) -> None:
    tensors = random_tensors() | {"blk.0.attn_q.bias": np.zeros(HEADS * HEAD_DIM, np.float32)}
    with pytest.raises(UnsupportedModelError, match=r"tensor blk\.0\.attn_q\.bias"):
        load(write_gguf(tmp_path / "m.gguf", tensors))


def test_a_missing_tensor_and_a_wrong_shape_are_named(tmp_path) -> None:
    tensors = random_tensors()
    removed = tensors.pop("blk.1.ffn_up.weight")
    with pytest.raises(ModelError, match=r"no tensor blk\.1\.ffn_up\.weight"):
        load(write_gguf(tmp_path / "missing.gguf", tensors))
    with pytest.raises(ModelError, match=r"blk\.1\.ffn_up\.weight has shape \[95, 64\], expected \[96, 64\]"):
        load(write_gguf(tmp_path / "shape.gguf", tensors | {"blk.1.ffn_up.weight": removed[:-1]}))


@pytest.mark.parametrize("content", [b"", b"not a model at all, just some text in a file", b"GGUF"])
def test_a_file_that_is_no_gguf_is_refused(tmp_path, content: bytes) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(content)
    with pytest.raises(ModelError, match="not a readable GGUF file"):
        load(path)


def test_a_truncated_file_is_refused(tmp_path) -> None:
    path = write_gguf(tmp_path / "m.gguf")
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    with pytest.raises(ModelError):
        load(path)
