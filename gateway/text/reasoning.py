"""Separates a model's reasoning from its content."""

from collections.abc import Callable, Mapping

from gateway.text.pieces import Parser, Piece, Reasoning
from gateway.text.tags import Opening, Until

OPEN, CLOSE = "<think>", "</think>"


class ReasoningSplit:
    """Treats the text before ``</think>`` as reasoning, without surrounding whitespace.

    What follows is passed to ``rest``, from its first non-whitespace character on. If the prompt
    already opens the reasoning, the text may omit the opening tag.
    """

    def __init__(self, rest: Parser, *, is_open: bool) -> None:
        self.is_thinking = is_open
        self.num_thought_chars = 0
        """The number of characters up to the end of ``</think>``, once that was read."""
        self._rest = rest
        self._opening: Opening | None = Opening(OPEN)
        self._until = Until(CLOSE)
        self._strips = False
        self._num_chars = 0

    @property
    def open_call(self) -> int | None:
        return self._rest.open_call

    def read(self, text: str) -> list[Piece]:
        self._num_chars += len(text)
        if self._opening is not None:
            has_tag, text = self._opening.read(text)
            if has_tag is None:
                return []
            self._opening = None
            self.is_thinking = self.is_thinking or has_tag
            self._strips = self.is_thinking
        return self._think(text) if self.is_thinking else self._say(text)

    def end(self) -> list[Piece]:
        held = "" if self._opening is None else self._opening.end()
        if not self.is_thinking:
            return [*self._say(held), *self._rest.end()]
        held = held.strip() or self._until.end().rstrip()
        return [Reasoning(held)] if held else []

    def _think(self, text: str) -> list[Piece]:
        text = self._strip(text)
        sure, tag, text = self._until.read(text)
        thought: list[Piece] = [Reasoning(sure)] if sure else []
        if tag is None:
            return thought
        self.is_thinking, self._strips = False, True
        self.num_thought_chars = self._num_chars - len(text)
        return thought + self._say(text)

    def _say(self, text: str) -> list[Piece]:
        text = self._strip(text)
        return self._rest.read(text) if text else []

    def _strip(self, text: str) -> str:
        if self._strips:
            text = text.lstrip()
            self._strips = not text
        return text


REASONING_PARSERS: Mapping[str, Callable[[Parser], ReasoningSplit]] = {
    "deepseek_r1": lambda rest: ReasoningSplit(rest, is_open=True),
    "qwen3": lambda rest: ReasoningSplit(rest, is_open=False),
}
"""By the names in workers' announcements."""
