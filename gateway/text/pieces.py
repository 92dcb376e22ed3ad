"""What the text of a choice is made of."""

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
    """Call ``index`` of the choice, from 0."""

    index: int
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """The next part of the JSON that call ``index`` passes."""

    index: int
    text: str


Piece: TypeAlias = Content | Reasoning | CallStart | CallArguments


class Parser(Protocol):
    """Reads the text of one choice."""

    @property
    def open_call(self) -> int | None:
        """The call whose arguments have begun and not ended."""
        ...

    def read(self, text: str) -> list[Piece]:
        """Take the text's next part; returns what is sure by now."""
        ...

    def end(self) -> list[Piece]:
        """The text is over; returns what was held back."""
        ...


class PlainText:
    """For models that neither think aloud nor call tools."""

    open_call = None

    def read(self, text: str) -> list[Piece]:
        return [Content(text)] if text else []

    def end(self) -> list[Piece]:
        return []
