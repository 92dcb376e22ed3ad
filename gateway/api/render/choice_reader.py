"""Reads the text of one choice as its request wants it read."""

from collections.abc import Iterable

from gateway.api.rendering import Rendering
from gateway.text.pieces import (
    CallArguments,
    CallStart,
    Content,
    Parser,
    Piece,
    PlainText,
    Reasoning,
)
from gateway.text.reasoning import REASONING_PARSERS, ReasoningSplit
from gateway.text.tools import TOOL_PARSERS
from gateway.text.tools.mistral import MistralParser


class ChoiceReader:
    """The text of one choice in, its pieces out."""

    def __init__(self, rendering: Rendering) -> None:
        self.num_calls = 0
        self.num_reasoning_tokens = 0
        self._rendering = rendering
        self._parser = _tool_parser(rendering)
        self._split: ReasoningSplit | None = None
        if rendering.reasoning_parser is not None:
            self._split = REASONING_PARSERS[rendering.reasoning_parser](self._parser)
            self._parser = self._split
        self.is_plain = isinstance(self._parser, PlainText)
        """Whether all text is content, and is told at once."""

    def read(self, text: str, num_tokens: int) -> list[Piece]:
        """Take the next part of the text, of so many tokens."""
        if self.is_plain:
            return self._parser.read(text)
        was_thinking = self._is_thinking
        pieces = self._parser.read(text)
        if was_thinking or self._is_thinking:
            self.num_reasoning_tokens += num_tokens
        return self._kept(pieces)

    def end(self) -> list[Piece]:
        """The text is over: what was held back."""
        return self._kept(self._parser.end())

    @property
    def has_open_call(self) -> bool:
        """Whether the last call has not ended."""
        open_call = self._parser.open_call
        return open_call is not None and open_call < self.num_calls

    @property
    def has_called(self) -> bool:
        """Whether there are calls, all of them whole."""
        return self.num_calls > 0 and not self.has_open_call

    @property
    def _is_thinking(self) -> bool:
        return self._split is not None and self._split.is_thinking

    def _kept(self, pieces: list[Piece]) -> list[Piece]:
        kept = merged(piece for piece in pieces if self._is_wanted(piece))
        self.num_calls += sum(isinstance(piece, CallStart) for piece in kept)
        return kept

    def _is_wanted(self, piece: Piece) -> bool:
        match piece:
            case Reasoning():
                return self._rendering.include_reasoning
            case CallStart(index) | CallArguments(index):
                return not (self._rendering.is_single_call and index)
            case Content():
                # Of a call that was cut off before it had begun.
                return not self._rendering.is_forced


def merged(pieces: Iterable[Piece]) -> list[Piece]:
    """Join neighbours of one kind."""
    joined: list[Piece] = []
    for piece in pieces:
        match (joined[-1] if joined else None), piece:
            case (Content(before), Content(text)):
                joined[-1] = Content(before + text)
            case (Reasoning(before), Reasoning(text)):
                joined[-1] = Reasoning(before + text)
            case (CallArguments(index, before), CallArguments(other, text)) if index == other:
                joined[-1] = CallArguments(index, before + text)
            case _:
                joined.append(piece)
    return joined


def _tool_parser(rendering: Rendering) -> Parser:
    if rendering.tool_parser is None:
        return PlainText()
    if rendering.tool_parser == "mistral" and rendering.is_forced:
        return MistralParser(is_open=True)
    return TOOL_PARSERS[rendering.tool_parser]()
