"""The shape of a model's KV cache, read from a Hugging Face ``config.json``.

A config says much by leaving it out, and each family means something else by it. What can't be told for sure
is refused by name: a plan that is silently wrong by a factor of eight is worse than none.
"""

from __future__ import annotations

import json
from collections import Counter
from typing import TYPE_CHECKING, Any

from paged_kv.plan.errors import ConfigError
from paged_kv.plan.shape import LayerGroup, ModelShape

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

# Where a model with several parts keeps the one that generates text.
_NESTED = ("thinker_config", "text_config", "llm_config", "language_config")

# What a family's class fills in where its published configs are silent.
_DEFAULTS: dict[str, dict[str, Any]] = {
    "cohere2": {"sliding_window_pattern": 4},
    "gemma": {"head_dim": 256},
    "gemma2": {"head_dim": 256, "sliding_window_pattern": 2},
    "gemma3_text": {
        "head_dim": 256,
        "max_position_embeddings": 131072,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "sliding_window_pattern": 6,
    },
    "gpt_oss": {"head_dim": 64, "sliding_window_pattern": 2},
    "qwen3": {"head_dim": 128},
}

# Families whose configs leave out the KV heads where every query head has its own.
_MULTI_HEAD = {
    "bloom",
    "codegen",
    "cohere",
    "gpt2",
    "gpt_neox",
    "gptj",
    "llama",
    "olmo",
    "opt",
    "phi",
    "phi3",
}

# Families that apply `sliding_window` to every layer.
_WINDOW_EVERYWHERE = {"mistral", "mixtral", "phi3", "phimoe", "starcoder2"}

# Families that apply it from layer `max_window_layers` on, and only if `use_sliding_window` is set.
_WINDOW_ABOVE = {"qwen2", "qwen2_moe", "qwen3", "qwen3_moe"}

_FIXED_STATE = "layers with a state of fixed size, or some without attention, are not supported"
_SEVERAL_SHAPES = "layers of different shapes are not supported"
_SPARSE = "what sparse attention keeps besides keys and values is not counted"

# Keys that stand for something which the reading below would get wrong.
_UNSUPPORTED = {
    "attention_chunk_size": "attention in chunks is not supported",
    "attention_k_eq_v": "values that are the keys are not supported",
    "attention_types": "name the layers in layer_types",
    "attn_config": "nested attention settings are not supported",
    "attn_layer_indices": _FIXED_STATE,
    "attn_layer_period": _FIXED_STATE,
    "attn_type_list": _FIXED_STATE,
    "block_configs": _SEVERAL_SHAPES,
    "block_types": _FIXED_STATE,
    "compress_ratios": _SPARSE,
    "cross_attention_layers": "layers of cross-attention are not supported",
    "full_attention_interval": _FIXED_STATE,
    "global_head_dim": _SEVERAL_SHAPES,
    "hybrid_override_pattern": _FIXED_STATE,
    "index_head_dim": _SPARSE,
    "is_encoder_decoder": "encoder-decoder models are not supported",
    "layers_block_type": _FIXED_STATE,
    "linear_attn_config": _FIXED_STATE,
    "linear_num_key_heads": _FIXED_STATE,
    "num_global_key_value_heads": _SEVERAL_SHAPES,
    "num_key_value_heads_per_layer": _SEVERAL_SHAPES,
    "state_size": _FIXED_STATE,
    "swa_head_dim": _SEVERAL_SHAPES,
    "swa_num_key_value_heads": _SEVERAL_SHAPES,
}


def load_config(path: Path) -> ModelShape:
    """Read the shape of a model's KV cache from a file.

    Parameters
    ----------
    path : Path
        A Hugging Face ``config.json``, or the folder that holds it.

    Returns
    -------
    ModelShape
        As :func:`read_config` gives it.

    Raises
    ------
    ConfigError
        For a file that can't be read, a value that is missing, or a feature that is not supported; with its
        name as `feature`.
    """
    file = path / "config.json" if path.is_dir() else path
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(str(file), f"can't be read: {error}") from None
    if not isinstance(config, dict):
        raise ConfigError(str(file), "is not a JSON object")
    return read_config(config)


def read_config(config: Mapping[str, Any]) -> ModelShape:
    """Read the shape of a model's KV cache from a config.

    Parameters
    ----------
    config : Mapping
        What a ``config.json`` holds. Where a model has several parts, the nested ``text_config`` (or
        ``llm_config``, ``language_config``) is taken.

    Returns
    -------
    ModelShape
        One group of layers for each window.

    Raises
    ------
    ConfigError
        For a value that is missing, or a feature that is not supported; with its name as `feature`.
    """
    name = config.get("_name_or_path") or config.get("model_type") or "unnamed model"
    for key in _NESTED:
        config = config[key] if isinstance(config.get(key), dict) else config
    model_type = str(config.get("model_type", ""))
    given = {key: value for key, value in config.items() if value is not None}
    for key, why in _UNSUPPORTED.items():
        if given.get(key):
            raise ConfigError(key, why)
    given = _DEFAULTS.get(model_type, {}) | given

    num_layers = _positive(given, "num_hidden_layers", "n_layer", "num_layers", "n_layers")
    context = _optional(given, "max_position_embeddings", "n_positions", "max_seq_len", "seq_length")
    num_kv_heads, head_dim, v_head_dim = _head_shape(given, model_type)
    windows = _windows(given, model_type, num_layers)
    notes = []
    if shared := _optional(given, "num_kv_shared_layers"):
        notes.append(f"the last {shared} of {num_layers} layers read the keys and values of earlier ones")
        windows = windows[: max(num_layers - shared, 0)]
    if extra := _optional(given, "num_nextn_predict_layers"):
        notes.append(f"layers for multi-token prediction are not counted: {extra}")
    # A window that is no shorter than the longest sequence hides nothing.
    reach = [None if window and context and window >= context else window for window in windows]
    groups = tuple(
        LayerGroup(
            num_layers=count,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            v_head_dim=v_head_dim,
            window=window,
        )
        for window, count in Counter(reach).items()
    )
    return ModelShape(name=str(name), groups=groups, context_length=context, notes=tuple(notes))


def _head_shape(given: Mapping[str, Any], model_type: str) -> tuple[int, int, int]:
    """Find the KV heads of a layer, the elements of a key and those of a value."""
    if "kv_lora_rank" in given:
        # MLA keeps one latent for all heads, and the part of the keys that is rotated; values are read from
        # the latent. The heads that the config counts exist only while attention is computed.
        return 1, _positive(given, "kv_lora_rank") + _positive(given, "qk_rope_head_dim"), 0
    heads = _optional(given, "num_attention_heads", "n_head", "n_heads")
    if given.get("multi_query") and not given.get("new_decoder_architecture"):
        num_kv_heads: int | None = 1
    else:
        num_kv_heads = _optional(given, "num_key_value_heads", "num_kv_heads", "multi_query_group_num")
    if num_kv_heads is None:
        if model_type not in _MULTI_HEAD:
            raise ConfigError("num_key_value_heads", "is missing")
        num_kv_heads = heads or _positive(given, "num_attention_heads")
    head_dim = _optional(given, "head_dim", "kv_channels")
    if head_dim is None:
        hidden = _positive(given, "hidden_size", "n_embd", "d_model")
        heads = heads or _positive(given, "num_attention_heads")
        if hidden % heads:
            raise ConfigError(
                "head_dim", f"is missing, and hidden_size {hidden} / {heads} heads is not whole"
            )
        head_dim = hidden // heads
    return num_kv_heads, head_dim, _optional(given, "v_head_dim") or head_dim


def _windows(given: Mapping[str, Any], model_type: str, num_layers: int) -> list[int | None]:
    """Find the window of each layer; None for a layer that sees everything."""
    if "layer_types" in given:
        return _typed_windows(given, num_layers)
    unused = given.get("use_sliding_window") is False
    if unused or (model_type in _WINDOW_ABOVE and not given.get("use_sliding_window")):
        return [None] * num_layers
    window = given.get("interleaved_sliding_window", given.get("sliding_window"))
    if isinstance(window, list) and window:
        cycle = [None if w is None else _positive({"sliding_window": w}, "sliding_window") for w in window]
        return [cycle[layer % len(cycle)] for layer in range(num_layers)]
    if window is None:
        return [None] * num_layers
    window = _positive({"sliding_window": window}, "sliding_window")
    pattern = given.get("sliding_window_pattern", given.get("_sliding_window_pattern"))
    if isinstance(pattern, str) and pattern and set(pattern) <= {"L", "G"}:
        slides = [pattern[layer % len(pattern)] == "L" for layer in range(num_layers)]
    elif pattern is not None:
        period = _positive({"sliding_window_pattern": pattern}, "sliding_window_pattern")
        slides = [(layer + 1) % period != 0 for layer in range(num_layers)]
    elif model_type in _WINDOW_ABOVE:
        first = _whole(given, "max_window_layers")
        slides = [layer >= first for layer in range(num_layers)]
    elif model_type in _WINDOW_EVERYWHERE:
        slides = [True] * num_layers
    else:
        raise ConfigError(
            "layer_types",
            f"is missing: which layers of a {model_type or 'model'!r} have the window of {window}?",
        )
    return [window if slide else None for slide in slides]


def _typed_windows(given: Mapping[str, Any], num_layers: int) -> list[int | None]:
    types = given["layer_types"]
    if not isinstance(types, list) or len(types) != num_layers:
        raise ConfigError("layer_types", f"doesn't name {num_layers} layers")
    windows: list[int | None] = []
    for kind in types:
        if kind == "full_attention":
            windows.append(None)
        elif kind == "sliding_attention":
            windows.append(_positive(given, "sliding_window"))
        else:
            raise ConfigError(f"layer type {kind!r}", "only full and sliding attention are supported")
    return windows


def _positive(given: Mapping[str, Any], *names: str) -> int:
    """Return the value of the first of `names` that is there; it has to be, and to be positive."""
    for name in names:
        if name in given:
            value = _whole(given, name)
            if value == 0:
                raise ConfigError(name, "is 0, expected a positive integer")
            return value
    raise ConfigError(names[0], "is missing")


def _optional(given: Mapping[str, Any], *names: str) -> int | None:
    """Return the value of the first of `names` that is there; None for 0, which stands for none."""
    for name in names:
        if name in given:
            return _whole(given, name) or None
    return None


def _whole(given: Mapping[str, Any], name: str) -> int:
    if name not in given:
        raise ConfigError(name, "is missing")
    value = given[name]
    if isinstance(value, list):
        raise ConfigError(name, _SEVERAL_SHAPES)
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ConfigError(name, f"is {value!r}, expected an integer")
    return value
