"""Text to token ids and back, from the vocabulary inside a GGUF file."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE

from paged_kv.llm.errors import ModelError, UnsupportedModelError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

# GGUF's token types (gguf.TokenType): these are matched as a whole in the text, never split by BPE.
_CONTROL, _USER_DEFINED = 3, 4

# GGUF names the way to cut text before BPE only by a nickname; llama.cpp (src/llama-vocab.cpp) says what
# each means. Names with the same rule stand together.
_DIGITS_APART = ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b")
_GPT2 = ("gpt-2", "mpt", "olmo", "jais", "jais-2", "trillion")
_LLAMA3 = ("llama3", "llama-v3", "llama-bpe", "falcon3", "pixtral")
_LLAMA3_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)

# Tokens that end a turn where the file names only the token that ends a document.
_END_OF_TURN = ("<|im_end|>", "<|eot_id|>", "<|end|>", "</s>", "<|endoftext|>", "<|end_of_text|>")


class Tokenizer:
    """The tokenizer of a GGUF file.

    Parameters
    ----------
    metadata : Mapping
        The file's metadata.

    Attributes
    ----------
    stop_ids : frozenset of int
        Tokens that end an answer.
    bos_id : int or None
        Token that starts every document, where the model wants one.
    chat_template : str or None
        Jinja source of the model's chat format.

    Raises
    ------
    UnsupportedModelError
        The kind of tokenizer, or its way to cut text, is not known here; the message names it.
    ModelError
        The vocabulary is missing.
    """

    def __init__(self, metadata: Mapping[str, Any]) -> None:
        kind = metadata.get("tokenizer.ggml.model")
        builders = {"gpt2": _byte_level_bpe, "llama": _sentencepiece_bpe}
        if kind not in builders:
            raise UnsupportedModelError(f"tokenizer {kind!r}", f"known are {', '.join(builders)}")
        tokens: list[str] | None = metadata.get("tokenizer.ggml.tokens")
        if not tokens:
            raise ModelError("the file has no vocabulary (tokenizer.ggml.tokens)")
        self._tokenizer = builders[kind](tokens, metadata)
        types = metadata.get("tokenizer.ggml.token_type") or [1] * len(tokens)
        self._tokenizer.add_tokens(_whole_tokens(tokens, types, _USER_DEFINED, special=False))
        self._tokenizer.add_special_tokens(_whole_tokens(tokens, types, _CONTROL, special=True))

        ids = {token: index for index, token in enumerate(tokens)}
        named = (metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot"))
        self.stop_ids = frozenset(index for index in named if index is not None) | frozenset(
            ids[token] for token in _END_OF_TURN if token in ids and types[ids[token]] == _CONTROL
        )
        wants_bos = metadata.get("tokenizer.ggml.add_bos_token", kind == "llama" or _pre(metadata) in _LLAMA3)
        bos_id: int | None = metadata.get("tokenizer.ggml.bos_token_id")
        self.bos_id = bos_id if wants_bos else None
        self.chat_template: str | None = metadata.get("tokenizer.chat_template")
        self._template_tokens = {
            f"{name}_token": tokens[index]
            for name in ("bos", "eos")
            if (index := metadata.get(f"tokenizer.ggml.{name}_token_id")) is not None
        }

    def encode(self, text: str, *, add_bos: bool = True) -> list[int]:
        """Token ids of a text; control tokens written out in it count as themselves.

        Parameters
        ----------
        text : str
            Any text.
        add_bos : bool
            Begin with `bos_id`, if the model has one.
        """
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return [self.bos_id, *ids] if add_bos and self.bos_id is not None else ids

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        """Text of token ids, without control tokens unless asked for."""
        text: str = self._tokenizer.decode(ids, skip_special_tokens=skip_special)
        return text

    def encode_chat(self, prompt: str, *, system: str | None = None) -> list[int]:
        """Token ids of a conversation that asks for an answer to `prompt`.

        Parameters
        ----------
        prompt : str
            The user's words.
        system : str, optional
            The system prompt; None leaves it to the model's template.

        Raises
        ------
        ModelError
            The file has no chat template.
        """
        messages = [{"role": "system", "content": system}] if system is not None else []
        messages.append({"role": "user", "content": prompt})
        return self.encode(self.render_chat(messages), add_bos=False)

    def render_chat(
        self, messages: Sequence[Mapping[str, str]], *, add_generation_prompt: bool = True
    ) -> str:
        """Apply the model's chat template.

        Parameters
        ----------
        messages : sequence of mappings
            Each with ``role`` and ``content``.
        add_generation_prompt : bool
            End with the opening of the assistant's turn.

        Raises
        ------
        ModelError
            The file has no chat template, or the template rejects the messages.
        """
        # Rendering comes from the model file: sandboxed, since a file is not to be trusted.
        from jinja2 import TemplateError
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        if self.chat_template is None:
            raise ModelError("the model file has no chat template; prompts must be given raw")

        def raise_exception(message: str) -> None:
            raise TemplateError(message)

        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
        environment.globals["raise_exception"] = raise_exception
        try:
            return environment.from_string(self.chat_template).render(
                messages=messages, add_generation_prompt=add_generation_prompt, **self._template_tokens
            )
        except TemplateError as error:
            raise ModelError(f"the model's chat template failed: {error}") from error

    def stream(self) -> TextStream:
        """Return a decoder for ids that come one at a time."""
        return TextStream(self)


class TextStream:
    """Turns a stream of token ids into pieces of text that join to the text of all of them.

    A character may span several tokens (its bytes are split by BPE), and a token's text may depend on
    its neighbour (a leading space). So a piece is given out only once it ends in a whole character, and
    it is found as the difference of two decodings that both start at an earlier whole piece.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        self._given = 0
        """How many of `_ids` have had their text given out; they only serve as context."""

    def step(self, token_id: int) -> str:
        """Text that has become certain with one more token; often one token's, sometimes none."""
        self._ids.append(token_id)
        piece = self._pending()
        return self._give(piece) if piece and not piece.endswith("\N{REPLACEMENT CHARACTER}") else ""

    def finish(self) -> str:
        """Whatever is left when no more tokens come; an unfinished character becomes U+FFFD."""
        return self._give(self._pending())

    def _pending(self) -> str:
        before = self._tokenizer.decode(self._ids[: self._given])
        return self._tokenizer.decode(self._ids)[len(before) :]

    def _give(self, piece: str) -> str:
        self._ids = self._ids[self._given :]
        self._given = len(self._ids)
        return piece


def _pre(metadata: Mapping[str, Any]) -> str | None:
    return metadata.get("tokenizer.ggml.pre")


def _whole_tokens(
    tokens: Sequence[str], types: Sequence[int], kind: int, *, special: bool
) -> list[AddedToken]:
    return [
        AddedToken(token, special=special, normalized=False)
        for token, found in zip(tokens, types, strict=True)
        if found == kind
    ]


def _byte_level_bpe(tokens: list[str], metadata: Mapping[str, Any]) -> tokenizers.Tokenizer:
    """GPT-2's BPE over bytes; merges are in the file."""
    pre = _pre(metadata)
    merges = [_pair(merge) for merge in metadata.get("tokenizer.ggml.merges", ())]
    vocab = {token: index for index, token in enumerate(tokens)}
    # Llama 3 takes a word that is a token as it is, even if no sequence of merges leads to it.
    tokenizer = tokenizers.Tokenizer(BPE(vocab=vocab, merges=merges, ignore_merges=pre in _LLAMA3))
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pre not in _LLAMA3)
    if pre in _DIGITS_APART:
        steps = [pre_tokenizers.Digits(individual_digits=True), byte_level]
    elif pre in _GPT2:
        steps = [byte_level]
    elif pre in _LLAMA3:
        steps = [pre_tokenizers.Split(Regex(_LLAMA3_PATTERN), behavior="isolated"), byte_level]
    else:
        known = ", ".join((*_DIGITS_APART, *_GPT2, *_LLAMA3))
        raise UnsupportedModelError(f"pre-tokenizer {pre!r}", f"known are {known}")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _pair(merge: str) -> tuple[str, str]:
    left, _, right = merge.partition(" ")
    return left, right


def _sentencepiece_bpe(tokens: list[str], metadata: Mapping[str, Any]) -> tokenizers.Tokenizer:
    """SentencePiece's BPE (Llama 2): the file has scores, from which the order of merges follows."""
    vocab = {token: index for index, token in enumerate(tokens)}
    scores = metadata.get("tokenizer.ggml.scores")
    if not scores:
        raise ModelError("the file has no tokenizer.ggml.scores")
    unknown = tokens[metadata.get("tokenizer.ggml.unknown_token_id", 0)]
    tokenizer = tokenizers.Tokenizer(
        BPE(
            vocab=vocab,
            merges=_merges_by_score(vocab, scores),
            unk_token=unknown,
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    spaces: list[Any] = [normalizers.Replace(" ", "▁")]
    undo: list[Any] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if metadata.get("tokenizer.ggml.add_space_prefix", True):
        spaces.insert(0, normalizers.Prepend("▁"))
        undo.append(decoders.Strip(" ", 1, 0))
    tokenizer.normalizer = normalizers.Sequence(spaces)
    tokenizer.decoder = decoders.Sequence(undo)
    return tokenizer


def _merges_by_score(vocab: Mapping[str, int], scores: Sequence[float]) -> list[tuple[str, str]]:
    """Every way to join two tokens into a third, best-scored result first."""

    def splits(token: str) -> Iterable[tuple[str, str]]:
        pairs = ((token[:cut], token[cut:]) for cut in range(1, len(token)))
        return (pair for pair in pairs if pair[0] in vocab and pair[1] in vocab)

    found = [
        (-scores[index], vocab[left], vocab[right], (left, right))
        for token, index in vocab.items()
        for left, right in splits(token)
    ]
    return [pair for *_, pair in sorted(found)]
