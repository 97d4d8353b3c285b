"""Hugging Face configs are read rightly: known-good bytes per token of public models, and refusals by name.

The configs are those fields of the published ``config.json`` files that say anything about the KV cache, with
the values they had when the models came out.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

import paged_kv
from paged_kv.plan import ELEMENT_TYPES, ConfigError, LayerGroup, load_config, read_config

LLAMA_8B = {
    "model_type": "llama",
    "hidden_size": 4096,
    "max_position_embeddings": 131072,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
}
QWEN2_7B = {
    "model_type": "qwen2",
    "hidden_size": 3584,
    "max_position_embeddings": 131072,
    "max_window_layers": 28,
    "num_attention_heads": 28,
    "num_hidden_layers": 28,
    "num_key_value_heads": 4,
    "sliding_window": 131072,
    "use_sliding_window": False,
}
MISTRAL_7B = {
    "model_type": "mistral",
    "hidden_size": 4096,
    "max_position_embeddings": 32768,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "sliding_window": 4096,
}
GEMMA2_9B = {
    "model_type": "gemma2",
    "head_dim": 256,
    "hidden_size": 3584,
    "max_position_embeddings": 8192,
    "num_attention_heads": 16,
    "num_hidden_layers": 42,
    "num_key_value_heads": 8,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
}
DEEPSEEK_V3 = {
    "model_type": "deepseek_v3",
    "hidden_size": 7168,
    "kv_lora_rank": 512,
    "max_position_embeddings": 163840,
    "num_attention_heads": 128,
    "num_hidden_layers": 61,
    "num_key_value_heads": 128,
    "num_nextn_predict_layers": 1,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}
PHI3_MINI = {
    "model_type": "phi3",
    "hidden_size": 3072,
    "max_position_embeddings": 4096,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 32,
    "sliding_window": 2047,
}
GEMMA3_4B = {  # its text_config leaves heads and head_dim to the class
    "model_type": "gemma3",
    "text_config": {
        "model_type": "gemma3_text",
        "hidden_size": 2560,
        "num_hidden_layers": 34,
        "sliding_window": 1024,
    },
    "vision_config": {"hidden_size": 1152, "num_attention_heads": 16, "num_hidden_layers": 27},
}
GPT_OSS_20B = {
    "model_type": "gpt_oss",
    "head_dim": 64,
    "hidden_size": 2880,
    "layer_types": ["sliding_attention", "full_attention"] * 12,
    "max_position_embeddings": 131072,
    "num_attention_heads": 64,
    "num_hidden_layers": 24,
    "num_key_value_heads": 8,
    "sliding_window": 128,
}

# Model, config, windows of the layers by number of layers, and bytes per token in 16 bits computed by hand:
# 2 (key and value) x layers x KV heads x head_dim x 2 bytes.
KNOWN = [
    ("meta-llama/Llama-3.1-8B", LLAMA_8B, {None: 32}, 2 * 32 * 8 * 128 * 2, 131_072),
    (
        "meta-llama/Llama-3.1-70B",
        LLAMA_8B | {"hidden_size": 8192, "num_attention_heads": 64, "num_hidden_layers": 80},
        {None: 80},
        2 * 80 * 8 * 128 * 2,
        327_680,
    ),
    # A window is named, and not used. 3584 / 28 = 128.
    ("Qwen/Qwen2.5-7B", QWEN2_7B, {None: 28}, 2 * 28 * 4 * 128 * 2, 57_344),
    (
        "Qwen/Qwen3-8B",
        {
            "model_type": "qwen3",
            "head_dim": 128,
            "hidden_size": 4096,
            "max_position_embeddings": 40960,
            "max_window_layers": 36,
            "num_attention_heads": 32,
            "num_hidden_layers": 36,
            "num_key_value_heads": 8,
            "sliding_window": None,
            "use_sliding_window": False,
        },
        {None: 36},
        2 * 36 * 8 * 128 * 2,
        147_456,
    ),
    # head_dim is not hidden_size / num_attention_heads (1024 / 16 = 64).
    (
        "Qwen/Qwen3-0.6B",
        {
            "model_type": "qwen3",
            "head_dim": 128,
            "hidden_size": 1024,
            "max_position_embeddings": 40960,
            "max_window_layers": 28,
            "num_attention_heads": 16,
            "num_hidden_layers": 28,
            "num_key_value_heads": 8,
            "sliding_window": None,
            "use_sliding_window": False,
        },
        {None: 28},
        2 * 28 * 8 * 128 * 2,
        114_688,
    ),
    ("mistralai/Mistral-7B-v0.1", MISTRAL_7B, {4096: 32}, 2 * 32 * 8 * 128 * 2, 131_072),
    (
        "mistralai/Mistral-7B-v0.3",
        MISTRAL_7B | {"sliding_window": None},
        {None: 32},
        2 * 32 * 8 * 128 * 2,
        131_072,
    ),
    # Every other layer has the window, beginning with the first; 256 is not 3584 / 16.
    ("google/gemma-2-9b", GEMMA2_9B, {4096: 21, None: 21}, 2 * 42 * 8 * 256 * 2, 344_064),
    # Layers 6, 12, 18, 24 and 30 of 34 see everything.
    ("google/gemma-3-4b-it", GEMMA3_4B, {1024: 29, None: 5}, 2 * 34 * 4 * 256 * 2, 139_264),
    # MLA: one latent of 512 and a rotated part of 64 for all 128 heads, and no value beside them.
    ("deepseek-ai/DeepSeek-V3", DEEPSEEK_V3, {None: 61}, 61 * (512 + 64) * 2, 70_272),
    ("microsoft/Phi-3-mini-4k-instruct", PHI3_MINI, {2047: 32}, 2 * 32 * 32 * 96 * 2, 393_216),
    # A window longer than the context hides nothing.
    (
        "microsoft/Phi-3-mini-128k-instruct",
        PHI3_MINI | {"max_position_embeddings": 131072, "sliding_window": 262144},
        {None: 32},
        2 * 32 * 32 * 96 * 2,
        393_216,
    ),
    (
        "HuggingFaceTB/SmolLM2-135M",
        {
            "model_type": "llama",
            "hidden_size": 576,
            "max_position_embeddings": 8192,
            "num_attention_heads": 9,
            "num_hidden_layers": 30,
            "num_key_value_heads": 3,
        },
        {None: 30},
        2 * 30 * 3 * 64 * 2,
        23_040,
    ),
    ("openai/gpt-oss-20b", GPT_OSS_20B, {128: 12, None: 12}, 2 * 24 * 8 * 64 * 2, 49_152),
    (
        "tiiuae/falcon-7b",
        {
            "model_type": "falcon",
            "hidden_size": 4544,
            "multi_query": True,
            "new_decoder_architecture": False,
            "num_attention_heads": 71,
            "num_hidden_layers": 32,
        },
        {None: 32},
        2 * 32 * 1 * 64 * 2,
        8_192,
    ),
    (
        "openai-community/gpt2",
        {
            "model_type": "gpt2",
            "n_ctx": 1024,
            "n_embd": 768,
            "n_head": 12,
            "n_layer": 12,
            "n_positions": 1024,
        },
        {None: 12},
        2 * 12 * 12 * 64 * 2,
        36_864,
    ),
]


@pytest.mark.parametrize(("name", "config", "windows", "by_hand", "value"), KNOWN, ids=[k[0] for k in KNOWN])
def test_known_models(
    name: str, config: dict[str, Any], windows: dict[int | None, int], by_hand: int, value: int
) -> None:
    assert by_hand == value
    shape = read_config({"_name_or_path": name} | config)
    assert shape.name == name
    assert {group.window: group.num_layers for group in shape.groups} == windows
    assert shape.bytes_per_token(ELEMENT_TYPES["bfloat16"]) == value
    assert shape.bytes_per_token(ELEMENT_TYPES["float16"]) == value
    assert shape.bytes_per_token(ELEMENT_TYPES["float32"]) == 2 * value
    assert shape.bytes_per_token(ELEMENT_TYPES["fp8"]) == value // 2
    vectors = sum(g.num_layers * g.num_kv_heads * (2 if g.v_head_dim else 1) for g in shape.groups)
    assert shape.bytes_per_token(ELEMENT_TYPES["int8"]) == value // 2 + 4 * vectors
    full = sum(count for window, count in windows.items() if window is None)
    assert shape.bytes_per_token_beyond(ELEMENT_TYPES["bfloat16"]) == value * full // shape.num_layers


def test_int8_counts_a_scale_per_token_and_head() -> None:
    # 2 x 32 layers x 8 heads x (128 elements + 4 bytes of scale); for MLA 61 layers x (576 + 4)
    assert read_config(LLAMA_8B).bytes_per_token(ELEMENT_TYPES["int8"]) == 67_584
    assert read_config(DEEPSEEK_V3).bytes_per_token(ELEMENT_TYPES["int8"]) == 35_380


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "int8"])
def test_the_cache_itself_takes_as_much(dtype: str) -> None:
    for config in (LLAMA_8B, QWEN2_7B, GEMMA2_9B, PHI3_MINI, GPT_OSS_20B, DEEPSEEK_V3):
        shape = read_config(config)
        group = shape.groups[0]
        assert shape.bytes_per_token(ELEMENT_TYPES[dtype]) == paged_kv.kv_bytes_per_token(
            num_layers=shape.num_layers,
            num_kv_heads=group.num_kv_heads,
            head_dim=group.head_dim,
            v_head_dim=group.v_head_dim,
            dtype=dtype,
        )


def windows_of(config: dict[str, Any]) -> dict[int | None, int]:
    return {group.window: group.num_layers for group in read_config(config).groups}


def test_which_layers_have_the_window() -> None:
    windowed = LLAMA_8B | {"sliding_window": 512}
    assert windows_of(windowed | {"sliding_window_pattern": 4}) == {512: 24, None: 8}
    assert windows_of(windowed | {"_sliding_window_pattern": 4}) == {512: 24, None: 8}
    assert windows_of(windowed | {"sliding_window_pattern": 1}) == {None: 32}
    assert windows_of(windowed | {"sliding_window_pattern": "LLLG"}) == {512: 24, None: 8}
    assert windows_of(windowed | {"sliding_window": [None, 64, 128]}) == {None: 11, 64: 11, 128: 10}
    assert windows_of(windowed | {"interleaved_sliding_window": [512, None]}) == {512: 16, None: 16}
    assert windows_of(windowed | {"use_sliding_window": False}) == {None: 32}
    # layer_types has the last word.
    types = ["full_attention"] * 31 + ["sliding_attention"]
    assert windows_of(windowed | {"layer_types": types, "sliding_window_pattern": 2}) == {None: 31, 512: 1}


def test_a_window_from_some_layer_on() -> None:
    used = QWEN2_7B | {"use_sliding_window": True, "sliding_window": 4096, "max_window_layers": 21}
    assert windows_of(used) == {None: 21, 4096: 7}
    assert windows_of(used | {"use_sliding_window": None}) == {None: 28}  # the class's default is no


def test_layers_without_keys_of_their_own_are_left_out() -> None:
    config = {
        "model_type": "gemma3n_text",
        "head_dim": 256,
        "layer_types": (["sliding_attention"] * 4 + ["full_attention"]) * 7,
        "num_attention_heads": 8,
        "num_hidden_layers": 35,
        "num_key_value_heads": 2,
        "num_kv_shared_layers": 15,
        "sliding_window": 512,
    }
    shape = read_config(config)
    assert {group.window: group.num_layers for group in shape.groups} == {512: 16, None: 4}
    assert "last 15 of 35 layers" in shape.notes[0]


def test_what_is_left_out_is_noted() -> None:
    assert read_config(DEEPSEEK_V3).notes == ("layers for multi-token prediction are not counted: 1",)
    assert read_config(LLAMA_8B).notes == ()


def test_values_of_another_length_than_keys() -> None:
    shape = read_config(LLAMA_8B | {"head_dim": 192, "v_head_dim": 128})
    assert shape.groups == (LayerGroup(num_layers=32, num_kv_heads=8, head_dim=192, v_head_dim=128),)


@pytest.mark.parametrize("part", ["text_config", "llm_config", "language_config"])
def test_the_language_model_of_several_parts_is_taken(part: str) -> None:
    outer = {"model_type": "sees_and_talks", "num_hidden_layers": 3, part: LLAMA_8B}
    assert read_config(outer).groups == read_config(LLAMA_8B).groups
    assert read_config({"thinker_config": outer}).groups == read_config(LLAMA_8B).groups


def without(config: dict[str, Any], *keys: str) -> dict[str, Any]:
    return {key: value for key, value in config.items() if key not in keys}


@pytest.mark.parametrize(
    ("config", "feature"),
    [
        ({}, "num_hidden_layers"),
        (without(LLAMA_8B, "num_hidden_layers"), "num_hidden_layers"),
        (without(LLAMA_8B, "hidden_size"), "hidden_size"),
        (without(LLAMA_8B, "num_attention_heads"), "num_attention_heads"),
        (without(QWEN2_7B, "num_key_value_heads"), "num_key_value_heads"),
        (without(DEEPSEEK_V3, "qk_rope_head_dim"), "qk_rope_head_dim"),
        (LLAMA_8B | {"hidden_size": 4097}, "head_dim"),
        (LLAMA_8B | {"num_hidden_layers": "32"}, "num_hidden_layers"),
        (LLAMA_8B | {"num_hidden_layers": True}, "num_hidden_layers"),
        (LLAMA_8B | {"num_hidden_layers": 0}, "num_hidden_layers"),
        (LLAMA_8B | {"num_key_value_heads": [8] * 32}, "num_key_value_heads"),
        (LLAMA_8B | {"sliding_window": 4096}, "layer_types"),
        (GPT_OSS_20B | {"sliding_window": None}, "sliding_window"),
        (GPT_OSS_20B | {"num_hidden_layers": 23}, "layer_types"),
        (GPT_OSS_20B | {"layer_types": ["linear_attention"] * 24}, "layer type 'linear_attention'"),
        (without(QWEN2_7B, "max_window_layers") | {"use_sliding_window": True}, "max_window_layers"),
        (MISTRAL_7B | {"sliding_window": -1}, "sliding_window"),
        (LLAMA_8B | {"is_encoder_decoder": True}, "is_encoder_decoder"),
        (LLAMA_8B | {"attn_layer_period": 8}, "attn_layer_period"),
        (LLAMA_8B | {"hybrid_override_pattern": "M-M*"}, "hybrid_override_pattern"),
        (LLAMA_8B | {"attention_chunk_size": 8192}, "attention_chunk_size"),
        (LLAMA_8B | {"cross_attention_layers": [3, 8]}, "cross_attention_layers"),
        (DEEPSEEK_V3 | {"index_head_dim": 128}, "index_head_dim"),
        ({"model_type": "mamba", "num_hidden_layers": 64, "state_size": 16}, "state_size"),
    ],
)
def test_what_cannot_be_told_is_refused_by_name(config: dict[str, Any], feature: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        read_config(config)
    assert refusal.value.feature == feature
    assert feature in str(refusal.value)


def test_a_file_or_its_folder_is_read(tmp_path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_8B))
    assert load_config(tmp_path) == load_config(tmp_path / "config.json") == read_config(LLAMA_8B)


def test_a_file_that_cannot_be_read_is_named(tmp_path) -> None:
    bad = tmp_path / "bad.json"
    for content in (b"{", b"[]", b"\xff\xfe"):
        bad.write_bytes(content)
        with pytest.raises(ConfigError, match=r"bad\.json"):
            load_config(bad)
    with pytest.raises(ConfigError, match=r"config\.json: can't be read"):
        load_config(tmp_path)
