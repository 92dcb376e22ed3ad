"""A model's tokenizer, loaded from a Hugging Face directory without transformers."""

import os
import time
from collections.abc import Mapping, Sequence
from copy import copy
from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec
import tokenizers
from msgspec import Struct

from shared.errors import ContextLengthExceeded, InvalidRequest, StartupError
from shared.messages import ChatPrompt, Prompt, TextPrompt, TokenPrompt
from shared.model_files import check_fields, read_json_object, read_text
from worker.text.added_tokens import CONFIG, add_tokens
from worker.text.chat_template import ChatTemplate
from worker.text.stream import StopFinder, TextStream, detokenizer_factory, token_bytes_of

# A single text needs no other threads: the calling thread, with its priority, does the work.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # noqa: TID251 (it reads nothing)

_BREATHER_TOKENS = 1_000
_BREATHER_S = 1e-4
_BEFORE = ("\n", ".", "a")
"""Texts before another text, at least one of which is not part of the other text's first token."""
_HARMONY_ENDS = ("<|return|>", "<|call|>")
"""The tokens that end an answer in the Harmony format, even if the model's configuration omits
them."""


class Tokenizer:
    """Converts between prompts and token ids. Thread-safe."""

    def __init__(
        self,
        encoder: tokenizers.Tokenizer,
        decoder: Mapping[str, Any] | None,
        template: ChatTemplate | None,
        *,
        vocab_size: int,
        eos_ids: frozenset[int],
    ) -> None:
        """``decoder`` is that entry of tokenizer.json."""
        self.vocab_size = vocab_size
        """The number of ids in the model's vocabulary; larger ids in a prompt are rejected."""
        self.eos_ids = eos_ids
        self.template = template
        self._encoder = encoder
        self._detokenizer = detokenizer_factory(encoder, decoder)
        self._literal = detokenizer_factory(encoder, decoder, skips_special=False)
        self._token_bytes = token_bytes_of(encoder, decoder)

    @classmethod
    def load(cls, directory: Path, *, vocab_size: int | None = None) -> "Tokenizer":
        """Load ``tokenizer.json`` and the configuration files beside it. Raises `StartupError`.

        ``vocab_size`` is the number of rows of the model's embedding; by default, what
        ``config.json`` says.
        """
        encoder, decoder = _encoder(directory)
        config = _end_fields(directory / "config.json")
        generation_config = _end_fields(directory / "generation_config.json")
        vocab_size = vocab_size or config.vocab_size or encoder.get_vocab_size()
        special_tokens = add_tokens(encoder, directory, vocab_size)
        template = _template(directory, special_tokens)
        ends = [special_tokens.get("eos_token", "")]
        if template is not None and template.is_harmony:
            ends += _HARMONY_ENDS
        # Fine-tunes often update only one of these files, and an answer that ends at a token of
        # another file is better than an answer that never ends.
        eos_ids = generation_config.eos_ids | config.eos_ids
        eos_ids |= {end_id for end in ends if (end_id := encoder.token_to_id(end)) is not None}
        return cls(
            encoder,
            decoder,
            template,
            vocab_size=vocab_size,
            eos_ids=frozenset(end_id for end_id in eos_ids if end_id < vocab_size),
        )

    @property
    def tells_time(self) -> bool:
        """Whether the chat template may print more of the time than the date."""
        return self.template is not None and self.template.tells_time

    def with_written_tools(self) -> "Tokenizer":
        """The same with tools in the messages, even if the chat template describes some."""
        tokenizer = copy(self)
        if self.template is not None:
            tokenizer.template = self.template.with_written_tools()
        return tokenizer

    def encode(
        self,
        prompt: Prompt,
        *,
        name: str = "prompt",
        may_be_empty: bool = False,
        max_bytes: int | None = None,
    ) -> list[int]:
        """The prompt's token ids: at least one, unless an empty prompt is allowed.

        ``name`` is the client's name for a prompt that is not a chat. A text of more than
        ``max_bytes`` is refused before it is tokenized, and a chat's as soon as that much of it is
        rendered. Raises `InvalidRequest` and `ContextLengthExceeded`.
        """
        param = "messages" if isinstance(prompt, ChatPrompt) else name
        text = self._text(prompt, max_bytes)
        if max_bytes is not None and len(text.encode()) > max_bytes:
            raise ContextLengthExceeded(
                f"The {name} is longer than {max_bytes} bytes.", param=param
            )
        token_ids = self._encode(prompt, text)
        if not token_ids and not may_be_empty:
            raise InvalidRequest(f"The {name} is empty.", param=param)
        largest = max(token_ids, default=0)
        if largest >= self.vocab_size:
            raise InvalidRequest(
                f"Token id {largest} is not in the vocabulary of {self.vocab_size}.", param=param
            )
        return token_ids

    @cached_property
    def source(self) -> str:
        """The tokenizer as JSON."""
        return self._encoder.to_str()

    @cached_property
    def num_entries(self) -> int:
        """The number of tokens that the tokenizer has. A few models generate only the first
        ``vocab_size`` of them."""
        return self._encoder.get_vocab_size()

    @property
    def special_entries(self) -> Sequence[str]:
        """The special tokens, such as the roles of a chat, by their ids."""
        added = self._encoder.get_added_tokens_decoder()
        ids = sorted(one for one, token in added.items() if token.special)
        return [added[one].content for one in ids if one < self.vocab_size]

    @property
    def num_mask_bytes(self) -> int:
        """The size of a mask with one bit per token, in bytes, padded to whole int32."""
        return -(-self.vocab_size // 32) * 4

    @cached_property
    def max_entry_bytes(self) -> int:
        """No token stands for a longer text."""
        return max(len(entry.encode()) for entry in self._encoder.get_vocab())

    def has_entry(self, entry: str) -> bool:
        """Whether ``entry`` is a single token of the vocabulary."""
        return self.token_id(entry) is not None

    def token_id(self, entry: str) -> int | None:
        """The id of an entry of the vocabulary."""
        return self._encoder.token_to_id(entry)

    def entries(self, token_ids: Sequence[int]) -> tuple[str, ...]:
        """The vocabulary's spelling of each token; empty for an unknown id."""
        known = {one: self._encoder.id_to_token(one) or "" for one in set(token_ids)}
        return tuple(map(known.__getitem__, token_ids))

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that a token adds within a text; special tokens are written out."""
        return self._token_bytes[token_id]

    def encode_text(self, text: str) -> list[int]:
        """The tokens of a piece of text, without special tokens around it."""
        return self._encode_now(text, add_special_tokens=False)

    def encode_within(self, text: str) -> list[int] | None:
        """The tokens of a text that follows other text: their bytes are those of ``text``, without
        the space that some tokenizers put before the first word of a text. None if no tokens have
        these bytes."""
        wanted = text.encode()
        for before in ("", *_BEFORE):
            start = self.encode_text(before)
            token_ids = self.encode_text(before + text)
            found = token_ids[len(start) :]
            is_cut = token_ids[: len(start)] == start
            if is_cut and b"".join(map(self.token_bytes, found)) == wanted:
                return found
        return None

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of tokens, special tokens included."""
        detokenizer = self._literal()
        texts: list[str] = []
        for start in range(0, len(token_ids), _BREATHER_TOKENS):
            texts += map(detokenizer.push, token_ids[start : start + _BREATHER_TOKENS])
            time.sleep(_BREATHER_S)  # other threads get the interpreter's lock
        return "".join(texts) + detokenizer.flush()

    def text_stream(
        self,
        stop: Sequence[str] = (),
        *,
        includes_stop: bool = False,
        skips_special: bool = True,
        min_tokens: int = 0,
    ) -> TextStream:
        """Create the text stream of a new choice."""
        detokenizer = self._detokenizer() if skips_special else self._literal()
        finder = StopFinder(stop, includes_stop=includes_stop)
        return TextStream(detokenizer, finder, min_tokens=min_tokens)

    def _text(self, prompt: Prompt, max_chars: int | None) -> str:
        """The text to tokenize; empty if the prompt consists of tokens already."""
        match prompt:
            case ChatPrompt():
                if self.template is None:
                    raise InvalidRequest("The model has no chat template.", param="messages")
                return self.template.render(prompt, max_chars=max_chars)
            case TextPrompt(text=text):
                return text
            case TokenPrompt():
                return ""

    def _encode(self, prompt: Prompt, text: str) -> list[int]:
        match prompt:
            case ChatPrompt():
                return self.encode_text(text)  # the template adds the special tokens itself
            case TextPrompt(add_special_tokens=add_special_tokens):
                return self._encode_now(text, add_special_tokens=add_special_tokens)
            case TokenPrompt(token_ids=token_ids):
                return list(token_ids)

    def _encode_now(self, text: str, *, add_special_tokens: bool) -> list[int]:
        # Unlike `encode`, this releases the interpreter's lock: otherwise a text of half a megabyte
        # would halt all other threads for a quarter of a second.
        encodings = self._encoder.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        return encodings[0].ids


def stated_vocab_size(directory: Path) -> int | None:
    """The number of ids in the model's vocabulary, if ``config.json`` states it."""
    return _end_fields(directory / "config.json").vocab_size


class _EndFields(Struct):
    """The fields of config.json and generation_config.json that concern the vocabulary."""

    eos_token_id: int | list[int] | None = None
    vocab_size: int | None = None

    @property
    def eos_ids(self) -> frozenset[int]:
        ids = [self.eos_token_id] if isinstance(self.eos_token_id, int) else self.eos_token_id
        return frozenset(ids or ())


class _DecoderField(Struct):
    """The field of tokenizer.json that says how tokens become text. The vocabulary is passed
    over."""

    decoder: dict[str, Any] | None = None


class _NamedTemplate(Struct):
    name: str
    template: str


class _TemplateFields(Struct):
    """The field of tokenizer_config.json that has the chat templates."""

    chat_template: str | dict[str, str] | list[_NamedTemplate] | None = None


def _encoder(directory: Path) -> tuple[tokenizers.Tokenizer, Mapping[str, Any] | None]:
    """tokenizer.json, and its decoder as JSON."""
    path = directory / "tokenizer.json"
    text = read_text(path)
    if text is None:
        raise StartupError(f"{directory.name} contains no tokenizer.json")
    try:
        decoder = msgspec.json.decode(text, type=_DecoderField).decoder
    except msgspec.DecodeError:  # the slower reader names what is wrong
        decoder = (read_json_object(path) or {}).get("decoder")
    try:
        encoder = tokenizers.Tokenizer.from_str(text)
    except Exception as error:  # tokenizers raises bare exceptions
        raise StartupError(f"{directory.name}/tokenizer.json: {error}") from error
    encoder.no_truncation()
    encoder.no_padding()
    return encoder, decoder


def _end_fields(path: Path) -> _EndFields:
    content = read_json_object(path) or {}
    own = content.get("text_config")
    return check_fields(content | (own if isinstance(own, dict) else {}), _EndFields, path.name)


def _template(directory: Path, special_tokens: Mapping[str, str]) -> ChatTemplate | None:
    """The templates ``default`` and, for tools, ``tool_use``: files, or else the template or the
    named templates of the configuration."""
    more = (directory / "additional_chat_templates").glob("*.jinja")
    sources: Any = {path.stem: read_text(path) for path in more}
    if source := read_text(directory / "chat_template.jinja"):
        sources["default"] = source
    if not sources:
        config = read_json_object(directory / CONFIG) or {}
        sources = check_fields(config, _TemplateFields, CONFIG).chat_template
    if isinstance(sources, list):
        sources = {entry.name: entry.template for entry in sources}
    if isinstance(sources, str):
        sources = {"default": sources}
    if not sources or "default" not in sources:
        return None
    return ChatTemplate(sources["default"], special_tokens, tool_source=sources.get("tool_use"))
