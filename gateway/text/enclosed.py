"""Finds calls that begin with an opening tag; the family's parser reads the call itself."""

from collections.abc import Callable
from typing import Protocol

from gateway.text.calls import Outside
from gateway.text.pieces import Content, Piece


class EnclosedCall(Protocol):
    """A call, after its opening tag."""

    index: int
    has_begun: bool
    """Whether it is certain to be a call."""
    is_complete: bool
    is_broken: bool
    """Whether it has turned out to be none."""

    @property
    def raw(self) -> str:
        """Its text so far, as long as it has not begun."""
        ...

    def read(self, text: str) -> tuple[list[Piece], str]:
        """Returns the pieces, and the text after the call if it has ended."""
        ...

    def end(self) -> str:
        """All text of a call that has not begun."""
        ...


class EnclosedParser:
    """Text that is not a call remains content, including tags."""

    def __init__(
        self,
        opening: str,
        new_call: Callable[[int], EnclosedCall],
        *,
        ending: str = "",
        last: str = "",
    ) -> None:
        """Next to calls, ``ending`` means nothing; after ``last`` there are no calls."""
        self._opening = opening
        self._new_call = new_call
        self._last = last
        self._num_calls = 0
        self._outside = Outside(*filter(None, (opening, ending, last)))
        self._tag = opening
        self._call: EnclosedCall | None = None
        self._is_over = False

    @property
    def open_call(self) -> int | None:
        return self._call.index if self._call is not None and self._call.has_begun else None

    def read(self, text: str) -> list[Piece]:
        pieces: list[Piece] = []
        while text and not self._is_over:
            if self._call is None:
                text = self._read_content(text, pieces)
            else:
                text = self._read_call(self._call, text, pieces)
        return pieces

    def end(self) -> list[Piece]:
        if self._call is not None:
            return [] if self._call.has_begun else [Content(self._tag + self._call.end())]
        return self._outside.end()

    def _read_content(self, text: str, pieces: list[Piece]) -> str:
        tag, rest = self._outside.read(text, pieces)
        if tag is None:
            return rest
        if tag.endswith(self._opening):
            self._tag, self._call = tag, self._new_call(self._num_calls)
        elif not self._outside.follows_call:
            pieces.append(Content(tag))
        else:
            self._is_over = bool(self._last) and tag.endswith(self._last)
        return rest

    def _read_call(self, call: EnclosedCall, text: str, pieces: list[Piece]) -> str:
        read, rest = call.read(text)
        pieces += read
        if call.is_broken:
            pieces.append(Content(self._tag + call.raw))
            self._call, self._outside.follows_call = None, False
        elif call.is_complete:
            self._num_calls += 1
            self._call, self._outside.follows_call = None, True
        return rest
