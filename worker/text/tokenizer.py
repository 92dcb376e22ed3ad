"""A model's tokenizer, from the files of a Hugging Face directory and without transformers."""

import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers

from shared.errors import InvalidRequest, StartupError
from shared.messages import ChatPrompt, Prompt, TextPrompt, TokenPrompt
from worker.text.chat_template import ChatTemplate
from worker.text.detokenizer import detokenizer_factory, token_bytes_of
from worker.text.stop_strings import StopFinder
from worker.text.stream import TextStream


class Tokenizer:
    """Prompts to token ids, and token ids to text. Safe to use from several threads."""

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
        """Ids of the model's vocabulary; a larger id in a prompt is refused."""
        self.eos_ids = eos_ids
        self.template = template
        self._encoder = encoder
        self._detokenizer = detokenizer_factory(encoder, decoder)
        self._literal = detokenizer_factory(encoder, decoder, skips_special=False)
        self._token_bytes = token_bytes_of(encoder, decoder)

    @classmethod
    def load(cls, directory: Path) -> "Tokenizer":
        """Read ``tokenizer.json`` and what the configuration files beside it say.

        Raises `StartupError`.
        """
        source = _read(directory / "tokenizer.json")
        if source is None:
            raise StartupError(f"{directory.name} holds no tokenizer.json")
        try:
            encoder = tokenizers.Tokenizer.from_str(source)
        except Exception as error:  # tokenizers raises bare exceptions
            raise StartupError(f"{directory.name}/tokenizer.json: {error}") from error
        encoder.no_truncation()
        encoder.no_padding()
        config = _read_json(directory / "config.json")
        config = config | (config.get("text_config") or {})
        tokenizer_config = _read_json(directory / "tokenizer_config.json")
        generation_config = _read_json(directory / "generation_config.json")
        special_tokens = _special_tokens(tokenizer_config)
        return cls(
            encoder,
            json.loads(source).get("decoder"),
            _template(directory, tokenizer_config, special_tokens),
            vocab_size=config.get("vocab_size") or encoder.get_vocab_size(),
            eos_ids=_id_set(generation_config.get("eos_token_id"))
            | _id_set(config.get("eos_token_id"))
            | _id_set(encoder.token_to_id(special_tokens.get("eos_token", ""))),
        )

    def encode(
        self, prompt: Prompt, *, name: str = "prompt", may_be_empty: bool = False
    ) -> list[int]:
        """The prompt's token ids, at least one unless it may be empty; ``name`` is what the client
        calls a prompt that is no chat. Raises `InvalidRequest`."""
        param = "messages" if isinstance(prompt, ChatPrompt) else name
        token_ids = self._encode(prompt)
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

    @property
    def num_mask_bytes(self) -> int:
        """Of a mask with a bit for each token, in whole int32."""
        return -(-self.vocab_size // 32) * 4

    def has_entry(self, entry: str) -> bool:
        """Whether this is one token, as it stands in the vocabulary."""
        return self._encoder.token_to_id(entry) is not None

    def entry(self, token_id: int) -> str:
        """A token as it stands in the vocabulary; empty where nothing does."""
        return self._encoder.id_to_token(token_id) or ""

    def token_bytes(self, token_id: int) -> bytes:
        """What a token adds to a text that it does not begin; special ones are written out."""
        return self._token_bytes[token_id]

    def encode_text(self, text: str) -> list[int]:
        """The tokens of a piece of text, without special ones around it."""
        return self._encoder.encode(text, add_special_tokens=False).ids

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of tokens, special ones included."""
        detokenizer = self._literal()
        return "".join(map(detokenizer.push, token_ids)) + detokenizer.flush()

    def text_stream(
        self, stop: Sequence[str] = (), *, includes_stop: bool = False, skips_special: bool = True
    ) -> TextStream:
        """A new choice's text."""
        detokenizer = self._detokenizer() if skips_special else self._literal()
        return TextStream(detokenizer, StopFinder(stop, includes_stop=includes_stop))

    def _encode(self, prompt: Prompt) -> list[int]:
        match prompt:
            case ChatPrompt():
                if self.template is None:
                    raise InvalidRequest("The model has no chat template.", param="messages")
                # The template writes the special tokens itself.
                return self.encode_text(self.template.render(prompt))
            case TextPrompt(text=text, add_special_tokens=add_special_tokens):
                return self._encoder.encode(text, add_special_tokens=add_special_tokens).ids
            case TokenPrompt(token_ids=token_ids):
                return list(token_ids)


def _template(
    directory: Path, tokenizer_config: Mapping[str, Any], special_tokens: Mapping[str, str]
) -> ChatTemplate | None:
    """The template file, or else the one in the configuration: one, or several by name."""
    source = _read(directory / "chat_template.jinja") or tokenizer_config.get("chat_template")
    if isinstance(source, list):
        source = {entry["name"]: entry["template"] for entry in source}.get("default")
    return None if source is None else ChatTemplate(source, special_tokens)


def _special_tokens(tokenizer_config: Mapping[str, Any]) -> dict[str, str]:
    """``bos_token`` and the like; older files write a token as an object."""
    entries = {
        name: entry.get("content") if isinstance(entry, dict) else entry
        for name, entry in tokenizer_config.items()
        if name.endswith("_token")
    }
    return {name: token for name, token in entries.items() if isinstance(token, str)}


def _id_set(token_ids: int | list[int] | None) -> frozenset[int]:
    if token_ids is None:
        return frozenset()
    return frozenset([token_ids] if isinstance(token_ids, int) else token_ids)


def _read(path: Path) -> str | None:
    return path.read_text(encoding="utf-8") if path.is_file() else None


def _read_json(path: Path) -> dict[str, Any]:
    """The object in a file; empty if there is no such file."""
    try:
        content: dict[str, Any] = json.loads(_read(path) or "{}")
    except ValueError as error:
        raise StartupError(f"{path.name} is not JSON: {error}") from error
    return content
