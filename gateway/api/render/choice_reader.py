"""Splits the text of a choice into content, reasoning and tool calls, as its request requires, and
selects the logprobs that belong to the text."""

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import accumulate, groupby
from typing import TypeAlias

from gateway.api.render.formats import Rendering
from gateway.api.render.logprobs import Ruler
from gateway.text.custom import CustomInputs
from gateway.text.pieces import (
    CallArguments,
    CallInput,
    CallStart,
    Content,
    Parser,
    Piece,
    PlainText,
    Reasoning,
)
from gateway.text.reasoning import HARMONY, THOUGHTS, ReasoningSplit
from gateway.tool_formats import TOOL_FORMATS
from gateway.tool_formats.harmony import HarmonyParser
from shared.messages import Choice, Finished, TokenDelta, TokenLogprobs

_PART_CHARS = 1024
"""A long text is parsed in parts, because parsers copy the unread rest of a part."""

Part: TypeAlias = tuple[list[Piece], Sequence[TokenLogprobs]]
"""The pieces that tokens complete, and the tokens' logprobs."""


class ShownLogprobs:
    """Selects the logprobs of a choice that the client is shown.

    While a text is held back because it may be a stop string, its tokens are held back as well. A
    token that begins before the stop string is shown, even if the stop string begins within it.
    """

    def __init__(self, rendering: Rendering) -> None:
        self._rendering = rendering
        self._ruler = Ruler()
        self._held: list[tuple[int, TokenLogprobs]] = []
        """Tokens, each with its offset."""
        self._offset = 0
        self._num_chars = 0

    def read(self, event: TokenDelta | Finished | Choice) -> list[TokenLogprobs]:
        """The tokens that are shown with an event's text."""
        shown = self.next(self._rendering.shown_logprobs(event), len(event.text))
        return shown if isinstance(event, TokenDelta) else shown + self.end(event)

    def next(self, tokens: Sequence[TokenLogprobs], num_chars: int) -> list[TokenLogprobs]:
        """The tokens that are shown with the next ``num_chars`` of the text."""
        if not self._rendering.holds_logprobs:
            return list(tokens)
        self._num_chars += num_chars
        for token in tokens:
            self._held.append((self._offset, token))
            self._offset += self._ruler.measure(token)
        num_shown = sum(offset < self._num_chars for offset, _ in self._held)
        shown, self._held = self._held[:num_shown], self._held[num_shown:]
        return [token for _, token in shown]

    def end(self, event: Finished | Choice) -> list[TokenLogprobs]:
        """The tokens that are shown after the text; none if these are of a stop string."""
        held, self._held = self._held, []
        return [] if isinstance(event.stop_reason, str) else [token for _, token in held]


class ChoiceReader:
    """Turns the text of a choice into its pieces."""

    def __init__(self, rendering: Rendering) -> None:
        self.num_calls = 0
        self.num_reasoning_tokens = 0
        self.rendering = rendering
        self._shown = ShownLogprobs(rendering)
        self._num_tokens = 0
        self._num_chars = 0
        self._parser = _tool_parser(rendering)
        self._custom = CustomInputs(rendering.custom_tools) if rendering.custom_tools else None
        self._split: ReasoningSplit | HarmonyParser | None = None
        if rendering.reasoning_parser == HARMONY:
            names = rendering.tool_names if rendering.tool_parser == HARMONY else ()
            self._parser = self._split = HarmonyParser(names)
        elif rendering.reasoning_parser is not None:
            thought = THOUGHTS[rendering.reasoning_parser]
            self._parser = self._split = ReasoningSplit(thought, self._parser)
        self.is_plain = isinstance(self._parser, PlainText)
        """Whether all text is content, and is passed on at once."""

    def read(self, text: str, num_tokens: int, num_chars: Sequence[int] = ()) -> list[Piece]:
        """Take the next part of the text, of so many tokens; ``num_chars`` is as in
        `TokenDelta`."""
        if self.is_plain:
            return self._parser.read(text)
        pieces: list[Piece] = []
        for start in range(0, len(text), _PART_CHARS):
            pieces += self._parser.read(text[start : start + _PART_CHARS])
        if self._split is not None:
            self._count(self._split, len(text), num_tokens, num_chars)
        return self._kept(pieces)

    def read_parts(self, event: TokenDelta | Finished | Choice) -> list[Part]:
        """Read the next tokens; all events except `TokenDelta` contain the last tokens.

        Each token with logprobs becomes a separate part, so that the pieces that belong to a
        token's logprobs do not depend on the division into events.
        """
        num_chars = () if isinstance(event, Choice) else event.num_chars
        told = self.rendering.shown_logprobs(event)
        parts: list[Part]
        if num_chars and event.logprobs:
            ends = [*accumulate(num_chars), len(event.text)]
            starts = [0, *ends]
            alone: list[tuple[TokenLogprobs, ...]] = [*((token,) for token in told), ()]
            parts = [
                (self.read(event.text[start:end], 1), self._shown.next(tokens, end - start))
                for start, end, tokens in zip(starts, ends, alone, strict=False)
            ]
        else:
            pieces = self.read(event.text, len(event.token_ids), num_chars)
            parts = [(pieces, self._shown.next(told, len(event.text)))]
        if not isinstance(event, TokenDelta):
            parts.append((self.end(), self._shown.end(event)))
        return parts

    def end(self) -> list[Piece]:
        """End the text; returns the pieces that were held back."""
        rest = self._kept(self._parser.end())
        return rest if self._custom is None else merged([*rest, *self._custom.end()])

    @property
    def has_open_call(self) -> bool:
        """Whether the last call has not ended."""
        open_call = self._parser.open_call
        return open_call is not None and open_call < self.num_calls

    @property
    def has_called(self) -> bool:
        """Whether there are calls and all of them are complete."""
        return self.num_calls > 0 and not self.has_open_call

    def _count(
        self,
        split: ReasoningSplit | HarmonyParser,
        text_len: int,
        num_tokens: int,
        num_chars: Sequence[int],
    ) -> None:
        """Count the tokens up to the token that completes the end of the reasoning."""
        num_thought_chars = split.num_thought_chars - self._num_chars
        if split.is_thinking:
            self.num_reasoning_tokens = self._num_tokens + num_tokens
        elif num_thought_chars > 0:
            ends = list(accumulate(num_chars))
            num_thought = bisect_left(ends, num_thought_chars) + 1 if ends else num_tokens
            self.num_reasoning_tokens = self._num_tokens + num_thought
        self._num_tokens += num_tokens
        self._num_chars += text_len

    def _kept(self, pieces: list[Piece]) -> list[Piece]:
        kept = [piece for piece in pieces if self._is_wanted(piece)]
        self.num_calls += sum(isinstance(piece, CallStart) for piece in kept)
        return merged(kept if self._custom is None else self._custom.read(kept))

    def _is_wanted(self, piece: Piece) -> bool:
        match piece:
            case Reasoning():
                return self.rendering.include_reasoning
            case CallStart(index) | CallArguments(index) | CallInput(index):
                return not (self.rendering.is_single_call and index)
            case Content():
                # The rest of a call that was cut off before its name was complete.
                return not self.rendering.is_forced


def merged(pieces: Iterable[Piece]) -> list[Piece]:
    """Join adjacent pieces of the same kind."""
    joined: list[Piece] = []
    for _, group in groupby(pieces, _kind):
        alike = list(group)
        texts = [piece.text for piece in alike if not isinstance(piece, CallStart)]
        first = alike[0]
        if len(texts) > 1 and not isinstance(first, CallStart):
            joined.append(replace(first, text="".join(texts)))
        else:
            joined += alike
    return joined


def _kind(piece: Piece) -> tuple[type[Piece], int | None]:
    """The properties that adjacent pieces must share to be joined."""
    return type(piece), getattr(piece, "index", None)


def _tool_parser(rendering: Rendering) -> Parser:
    if rendering.tool_parser is None:
        return PlainText()
    form = TOOL_FORMATS[rendering.tool_parser]
    untagged = form.untagged_parser if rendering.is_forced else None
    return (untagged or form.parser)(rendering.text_parameters or rendering.tool_names)
