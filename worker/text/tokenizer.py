"""A model's tokenizer, from the files of a Hugging Face directory and without transformers."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers

from shared.errors import InvalidRequest, StartupError
from shared.messages import ChatPrompt, Prompt, TextPrompt, TokenPrompt
from worker.text.chat_template import ChatTemplate
from worker.text.detokenizer import DetokenizerFactory, detokenizer_factory
from worker.text.stop_strings import StopFinder
from worker.text.stream import TextStream


class Tokenizer:
    """Prompts to token ids, and token ids to text. Safe to use from several threads."""

    def __init__(
        self,
        encoder: tokenizers.Tokenizer,
        detokenizer: DetokenizerFactory,
        template: ChatTemplate | None,
        *,
        vocab_size: int,
        eos_ids: frozenset[int],
    ) -> None:
        self.vocab_size = vocab_size
        """Ids of the model's vocabulary; a larger id in a prompt is refused."""
        self.eos_ids = eos_ids
        self._encoder = encoder
        self._detokenizer = detokenizer
        self._template = template

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
            detokenizer_factory(encoder, json.loads(source).get("decoder")),
            _template(directory, tokenizer_config, special_tokens),
            vocab_size=config.get("vocab_size") or encoder.get_vocab_size(),
            eos_ids=_id_set(generation_config.get("eos_token_id"))
            | _id_set(config.get("eos_token_id"))
            | _id_set(encoder.token_to_id(special_tokens.get("eos_token", ""))),
        )

    def encode(self, prompt: Prompt) -> list[int]:
        """The prompt's token ids, at least one. Raises `InvalidRequest`."""
        param = "messages" if isinstance(prompt, ChatPrompt) else "prompt"
        token_ids = self._encode(prompt)
        if not token_ids:
            raise InvalidRequest("The prompt is empty.", param=param)
        if max(token_ids) >= self.vocab_size:
            raise InvalidRequest(
                f"Token id {max(token_ids)} is not in the vocabulary of {self.vocab_size}.",
                param=param,
            )
        return token_ids

    def text_stream(self, stop: Sequence[str] = ()) -> TextStream:
        """A new choice's text."""
        return TextStream(self._detokenizer(), StopFinder(stop))

    def _encode(self, prompt: Prompt) -> list[int]:
        match prompt:
            case ChatPrompt(messages=messages):
                if self._template is None:
                    raise InvalidRequest("The model has no chat template.", param="messages")
                # The template writes the special tokens itself.
                text = self._template.render(messages)
                return self._encoder.encode(text, add_special_tokens=False).ids
            case TextPrompt(text=text):
                return self._encoder.encode(text).ids
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
