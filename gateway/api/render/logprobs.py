"""Logprobs in the formats of chats, of completions, and of vLLM's prompt logprobs."""

import codecs
from collections.abc import Sequence
from typing import TypeAlias

from msgspec import Struct

from shared.messages import Logprob, TokenLogprobs

LEAST_LIKELY = -9999.0
"""OpenAI's value for an almost impossible token; JSON has no infinity."""


class TopLogprob(Struct, frozen=True, kw_only=True):
    token: str
    logprob: float
    bytes: tuple[int, ...]


class ContentLogprob(TopLogprob, frozen=True, kw_only=True):
    top_logprobs: tuple[TopLogprob, ...]


class ChatLogprobs(Struct, frozen=True, kw_only=True):
    content: Sequence[ContentLogprob]
    refusal: None = None


class TextLogprobs(Struct, frozen=True, kw_only=True):
    """Parallel lists with an entry for each token."""

    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]


class PromptLogprob(Struct, frozen=True, kw_only=True):
    logprob: float
    rank: int | None
    """Starts at 1; None if the token is not among the requested alternatives."""
    decoded_token: str


RenderedPromptLogprobs: TypeAlias = list[dict[int, PromptLogprob] | None]


def chat_logprobs(tokens: Sequence[TokenLogprobs], *, as_ids: bool) -> ChatLogprobs:
    return ChatLogprobs(content=[_content(token, as_ids) for token in tokens])


class Ruler:
    """Measures the text of a choice's tokens."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def measure(self, token: TokenLogprobs) -> int:
        """The number of characters that the next token completes."""
        num_chars = len(self._decoder.decode(token.chosen.token))
        return num_chars if token.num_chars is None else token.num_chars


class TextScale:
    """Renders the tokens of a choice for completions, with their offsets in the text."""

    def __init__(self, *, as_ids: bool) -> None:
        self._as_ids = as_ids
        self._ruler = Ruler()
        self._offset = 0

    def read(self, tokens: Sequence[TokenLogprobs]) -> TextLogprobs:
        """The next tokens of the output."""
        words = _no_tokens()
        for token in tokens:
            self._add(words, token)
        return words

    def echo(
        self, text: str, token_ids: Sequence[int], tokens: Sequence[TokenLogprobs | None]
    ) -> TextLogprobs:
        """All tokens of the prompt; the first token has no logprob."""
        words = _no_tokens()
        scored = [token for token in tokens if token is not None]
        if len(scored) < len(tokens):
            first = _beginning(text, scored)
            self._append(words, f"token_id:{token_ids[0]}" if self._as_ids else first, None, None)
            self._offset = len(first)
        for token in scored:
            self._add(words, token)
        self._ruler = Ruler()
        self._offset = len(text)
        return words

    def _add(self, words: TextLogprobs, token: TokenLogprobs) -> None:
        word = _word(token.chosen, self._as_ids)
        self._append(words, word, _finite(token.chosen.logprob), self._alternatives(token))
        self._offset += self._ruler.measure(token)

    def _append(
        self,
        words: TextLogprobs,
        word: str,
        logprob: float | None,
        alternatives: dict[str, float] | None,
    ) -> None:
        words.text_offset.append(self._offset)
        words.tokens.append(word)
        words.token_logprobs.append(logprob)
        words.top_logprobs.append(alternatives)

    def _alternatives(self, token: TokenLogprobs) -> dict[str, float]:
        best: dict[str, float] = {}
        # Parts of a character look alike: the likelier part counts, and it comes first.
        for other in (*token.top, token.chosen):
            best.setdefault(_word(other, self._as_ids), _finite(other.logprob))
        return best


def _no_tokens() -> TextLogprobs:
    return TextLogprobs(text_offset=[], token_logprobs=[], tokens=[], top_logprobs=[])


def _beginning(text: str, rest: Sequence[TokenLogprobs]) -> str:
    """The part of ``text`` before the tokens ``rest``; empty if ``text`` does not end with
    them."""
    counts = [token.num_chars for token in rest if token.num_chars is not None]
    if rest and len(counts) == len(rest):
        return text[: max(0, len(text) - sum(counts))]
    end = b"".join(token.chosen.token for token in rest).decode(errors="replace")
    return text[: len(text) - len(end)] if text.endswith(end) else ""


def joined(first: TextLogprobs, then: TextLogprobs) -> TextLogprobs:
    return TextLogprobs(
        text_offset=first.text_offset + then.text_offset,
        token_logprobs=first.token_logprobs + then.token_logprobs,
        tokens=first.tokens + then.tokens,
        top_logprobs=first.top_logprobs + then.top_logprobs,
    )


def prompt_logprobs(tokens: Sequence[TokenLogprobs | None]) -> RenderedPromptLogprobs:
    """In vLLM's format: by token id."""
    return [None if token is None else _ranked(token) for token in tokens]


def _ranked(token: TokenLogprobs) -> dict[int, PromptLogprob]:
    ranked = {
        other.token_id: _prompt_logprob(other, rank) for rank, other in enumerate(token.top, 1)
    }
    ranked.setdefault(token.chosen.token_id, _prompt_logprob(token.chosen, None))
    return ranked


def _prompt_logprob(token: Logprob, rank: int | None) -> PromptLogprob:
    return PromptLogprob(
        logprob=_finite(token.logprob), rank=rank, decoded_token=_word(token, as_ids=False)
    )


def _content(token: TokenLogprobs, as_ids: bool) -> ContentLogprob:
    return ContentLogprob(
        token=_word(token.chosen, as_ids),
        logprob=_finite(token.chosen.logprob),
        bytes=tuple(token.chosen.token),
        top_logprobs=tuple(
            TopLogprob(
                token=_word(other, as_ids),
                logprob=_finite(other.logprob),
                bytes=tuple(other.token),
            )
            for other in token.top
        ),
    )


def _word(token: Logprob, as_ids: bool) -> str:
    return f"token_id:{token.token_id}" if as_ids else token.token.decode(errors="replace")


def _finite(logprob: float) -> float:
    return max(logprob, LEAST_LIKELY)
