"""The parts of a choice's text."""

from dataclasses import dataclass
from typing import Protocol, TypeAlias


@dataclass(frozen=True, slots=True)
class Content:
    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    text: str


@dataclass(frozen=True, slots=True)
class CallStart:
    """The start of tool call ``index`` of the choice, from 0."""

    index: int
    name: str
    is_custom: bool = False
    """Whether the tool is given a text instead of arguments."""


@dataclass(frozen=True, slots=True)
class CallArguments:
    """The next part of the JSON arguments of call ``index``."""

    index: int
    text: str


@dataclass(frozen=True, slots=True)
class CallInput:
    """The next part of the text that call ``index`` gives to a custom tool."""

    index: int
    text: str


Piece: TypeAlias = Content | Reasoning | CallStart | CallArguments | CallInput


class Parser(Protocol):
    """Incrementally parses the text of a choice."""

    @property
    def open_call(self) -> int | None:
        """The call whose arguments have started but not ended."""
        ...

    def read(self, text: str) -> list[Piece]:
        """Parse the next part of the text; returns the pieces that are certain."""
        ...

    def end(self) -> list[Piece]:
        """End the text; returns the held-back pieces."""
        ...


class PlainText:
    """The parser for models without reasoning or tool calls."""

    open_call = None

    def read(self, text: str) -> list[Piece]:
        return [Content(text)] if text else []

    def end(self) -> list[Piece]:
        return []
