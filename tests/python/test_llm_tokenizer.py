"""Text survives the way to tokens and back, also piece by piece, and only known rules are applied."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llm_support import CHATML, CONTROL_TOKENS, MERGES, byte_alphabet, reference_model, tiny_model, vocabulary
from paged_kv.llm import ModelError, Tokenizer, UnsupportedModelError

TEXTS = st.text(max_size=60)


def metadata(**changes: Any) -> dict[str, Any]:
    """GGUF metadata of a small byte-level tokenizer."""
    known = {
        "model": "gpt2",
        "pre": "smollm",
        "tokens": vocabulary(),
        "token_type": [3] * len(CONTROL_TOKENS) + [1] * (len(vocabulary()) - len(CONTROL_TOKENS)),
        "merges": MERGES,
        "bos_token_id": 1,
        "eos_token_id": 2,
    } | changes
    return {f"tokenizer.ggml.{key}": value for key, value in known.items() if value is not None}


def sentencepiece_metadata(**changes: Any) -> dict[str, Any]:
    """A small Llama 2 vocabulary: control tokens, all bytes, then pieces with scores."""
    pieces = ["▁", "a", "b", "c", "ab", "▁a", "▁ab", "bc", "abc", "▁abc"]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *pieces]
    scores = [0.0] * 259 + [-30.0, -31.0, -32.0, -33.0, -4.0, -3.0, -5.0, -2.0, -6.0, -7.0]
    kinds = [2, 3, 3] + [6] * 256 + [1] * len(pieces)
    return metadata(
        model="llama", pre=None, merges=None, tokens=tokens, scores=scores, token_type=kinds, **changes
    )


@given(TEXTS)
def test_any_text_comes_back(text: str) -> None:
    tokenizer = tiny_model().tokenizer
    assert tokenizer.decode(tokenizer.encode(text), skip_special=False) == text


@given(TEXTS)
def test_a_stream_joins_to_the_whole_text_and_never_breaks_a_character(text: str) -> None:
    tokenizer = tiny_model().tokenizer
    stream = tokenizer.stream()
    pieces = [stream.step(token) for token in tokenizer.encode(text)]
    assert "".join(pieces) + stream.finish() == tokenizer.decode(tokenizer.encode(text))
    if "\N{REPLACEMENT CHARACTER}" not in text:
        assert not any("\N{REPLACEMENT CHARACTER}" in piece for piece in pieces)


@given(st.lists(st.integers(0, len(vocabulary()) - 1), max_size=40))
def test_a_stream_of_arbitrary_tokens_joins_to_their_text(ids: list[int]) -> None:
    tokenizer = tiny_model().tokenizer
    stream = tokenizer.stream()
    assert "".join(stream.step(token) for token in ids) + stream.finish() == tokenizer.decode(ids)


def test_an_unfinished_character_is_held_back_until_its_last_byte() -> None:
    tokenizer = tiny_model().tokenizer
    ids = tokenizer.encode("é🌊")
    assert len(ids) == 6
    stream = tokenizer.stream()
    assert [stream.step(token) for token in ids] == ["", "é", "", "", "", "🌊"]
    stream.step(ids[0])
    assert stream.finish() == "\N{REPLACEMENT CHARACTER}"


def test_control_tokens_are_whole_and_left_out_of_the_text() -> None:
    tokenizer = tiny_model().tokenizer
    ids = tokenizer.encode("<|im_start|>a<|im_end|>")
    assert (ids[0], ids[-1], len(ids)) == (1, 2, 3)
    assert tokenizer.decode(ids) == "a"
    assert tokenizer.stop_ids == {0, 2}


def test_digits_stand_apart_where_the_rule_says_so() -> None:
    tokens = [*vocabulary(), "12"]
    changes = {"tokens": tokens, "token_type": [1] * len(tokens), "merges": [*MERGES, "1 2"]}
    assert len(Tokenizer(metadata(pre="smollm", **changes)).encode("12")) == 2
    assert len(Tokenizer(metadata(pre="gpt-2", **changes)).encode("12")) == 1
    assert len(Tokenizer(metadata(pre="llama-bpe", **changes)).encode("12", add_bos=False)) == 1


def test_llama_3_begins_with_its_first_token() -> None:
    tokenizer = Tokenizer(metadata(pre="llama-bpe"))
    assert tokenizer.encode("a")[0] == tokenizer.bos_id == 1
    assert Tokenizer(metadata(pre="llama-bpe", add_bos_token=False)).bos_id is None
    assert tiny_model().tokenizer.bos_id is None


def test_sentencepiece_merges_by_score() -> None:
    tokenizer = Tokenizer(sentencepiece_metadata())
    tokens = sentencepiece_metadata()["tokenizer.ggml.tokens"]

    def pieces(text: str) -> list[str]:
        return [tokens[token] for token in tokenizer.encode(text)]

    # "bc" has the best score, then "▁a", and only then "ab": so "ab" never forms in the second one.
    assert pieces("abb") == ["<s>", "▁ab", "b"]
    assert pieces("aabc") == ["<s>", "▁a", "abc"]
    assert pieces("abc") == ["<s>", "▁abc"]


@given(st.text(alphabet="abc é🌊\n", max_size=30).filter(lambda text: not text.startswith(" ")))
def test_sentencepiece_text_comes_back(text: str) -> None:
    tokenizer = Tokenizer(sentencepiece_metadata())
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    stream = tokenizer.stream()
    assert "".join(stream.step(token) for token in ids) + stream.finish() == text


def test_unknown_rules_are_refused_by_name() -> None:
    with pytest.raises(UnsupportedModelError, match="tokenizer 'bert'"):
        Tokenizer(metadata(model="bert"))
    with pytest.raises(UnsupportedModelError, match="pre-tokenizer 'viking'"):
        Tokenizer(metadata(pre="viking"))
    with pytest.raises(ModelError, match="no vocabulary"):
        Tokenizer(metadata(tokens=None))


def test_chat_follows_the_models_template() -> None:
    tokenizer = tiny_model().tokenizer
    expected = "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nQ<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.encode_chat("Q", system="S") == tokenizer.encode(expected)


def test_a_broken_or_missing_chat_template_is_an_error() -> None:
    with pytest.raises(ModelError, match="no chat template"):
        Tokenizer(metadata()).encode_chat("Q")
    for template in (
        "{% if %}",
        "{{ raise_exception('roles must alternate') }}",
        "{{ ''.__class__.__mro__ }}",
    ):
        broken = metadata() | {"tokenizer.chat_template": template}
        with pytest.raises(ModelError, match="chat template failed"):
            Tokenizer(broken).encode_chat("Q")
    assert Tokenizer(metadata() | {"tokenizer.chat_template": CHATML}).encode_chat("Q")


def test_the_byte_alphabet_is_gpt2s() -> None:
    assert (byte_alphabet()[0x20], byte_alphabet()[ord("A")], len(set(byte_alphabet()))) == ("Ġ", "A", 256)


@pytest.mark.model
def test_reference_tokens() -> None:
    tokenizer = reference_model().tokenizer
    text = "The capital of France is 1234 km  away, don't you think?\n\n  Yes"
    pieces = ["The", " capital", " of", " France", " is", " ", "1", "2", "3", "4", " km", " ", " away", ","]
    pieces += [" don", "'t", " you", " think", "?", "\n\n ", " Yes"]
    ids = tokenizer.encode(text)
    assert [tokenizer.decode([token]) for token in ids] == pieces
    assert tokenizer.stop_ids == {0, 2}
    assert tokenizer.encode_chat("Hi", system="S")[:3] == [1, *tokenizer.encode("system\n")]
