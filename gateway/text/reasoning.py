"""Separates a model's reasoning from its content."""

from collections.abc import Mapping
from typing import NamedTuple

from gateway.text.pieces import Parser, Piece, Reasoning
from gateway.text.tags import Opening, Until

HARMONY = "harmony"
"""The name of the format in workers' announcements, of calls and of reasoning."""


class Thought(NamedTuple):
    """How a family marks a thought."""

    opening: str
    closing: str
    is_open: bool = False
    """Whether the prompt has the opening tag."""
    label: str = ""
    """The text that follows the opening tag."""
    label_end: str = ""
    """The tag that follows the label."""
    are_special: bool = False
    """Whether the tags are special tokens."""


THOUGHTS: Mapping[str, Thought] = {
    "deepseek_r1": Thought("<think>", "</think>", is_open=True),
    "gemma4": Thought("<|channel>", "<channel|>", label="thought", are_special=True),
    # Harmony has a parser of its own: thoughts, calls and text are messages of the same kind.
    HARMONY: Thought(
        "<|channel|>", "<|end|>", label="analysis", label_end="<|message|>", are_special=True
    ),
    "qwen3": Thought("<think>", "</think>"),
}
"""The form of reasoning of each parser, by its name in workers' announcements."""
CLOSED: Mapping[str, str] = {"deepseek_r1": "qwen3"}
"""The parser for prompts that do not open a thought, by the name of the parser for prompts that
do."""


class ReasoningSplit:
    """Treats the text before the closing tag as reasoning, without surrounding whitespace.

    The text after the tag is passed to ``rest``, from its first non-whitespace character on. If the
    prompt already opens the reasoning, the text may omit the opening tag.
    """

    def __init__(self, thought: Thought, rest: Parser) -> None:
        self.is_thinking = thought.is_open
        self.num_thought_chars = 0
        """The number of characters up to the end of the closing tag, once that was read."""
        self._rest = rest
        self._opening: Opening | None = Opening(thought.opening + thought.label)
        self._until = Until(thought.closing)
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
