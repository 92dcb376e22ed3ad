"""Where two answers to the same request part, and how sure the model was there."""

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from typing import NamedTuple

from cli.replay.kinds import SpokenChoice

_SHOWN_CHARS = 40


class Parting(NamedTuple):
    """The first place at which two answers differ."""

    choice: int
    part: str
    """The part of the answer: reasoning, text, calls or ending."""
    char: int
    """The number of equal characters at the beginning of this part."""
    token: int | None
    """The number of equal tokens of the new answer before this place; None if the new answer has no
    logprobs there."""
    margin: float | None
    """By how much the new model prefers its token to the token of the stored answer, as a
    difference of natural logarithms of probabilities. None if either answer has ended there, or
    the tokens are not known."""
    is_at_least: bool
    """The stored answer's token is not among the likeliest tokens, so that the margin is larger."""
    stored: str
    """How the stored answer goes on."""
    replayed: str
    """How the new answer goes on."""


def parting(stored: Sequence[SpokenChoice], replayed: Sequence[SpokenChoice]) -> Parting | None:
    """Where an answer parts from the stored answer; None if all choices are equal. Raises
    `ValueError` if the answers have different numbers of choices."""
    for place, (old, new) in enumerate(zip(stored, replayed, strict=True)):
        for part, text in old.parts.items():
            if text != new.parts[part]:
                return _parting(place, part, old, new)
    return None


def _parting(place: int, part: str, old: SpokenChoice, new: SpokenChoice) -> Parting:
    before, after = old.parts[part], new.parts[part]
    char = _num_equal(before, after)
    token: int | None = None
    margin: float | None = None
    is_at_least = False
    begins_at = new.spelled.rfind(after) if after else -1
    starts = [one.start for one in new.tokens]
    if begins_at >= 0 and char < len(after):
        # A token may begin before the first character that differs.
        last = bisect_right(starts, begins_at + char) - 1
        token, begun = bisect_left(starts, starts[last]), starts[last] - begins_at
        # Tokens that share a character are compared with none: their texts are not known alone.
        is_whole = token == last and begun >= 0
        margin, is_at_least = _margin(new, token, before[begun:] if is_whole else "")
    elif begins_at >= 0:
        token = bisect_left(starts, begins_at + char)  # the first token after the part
    ends = (text[char : char + _SHOWN_CHARS] for text in (before, after))
    return Parting(place, part, char, token, margin, is_at_least, *ends)


def _num_equal(first: str, second: str) -> int:
    """The length of the common beginning of two texts."""
    differing = (
        k for k, (one, other) in enumerate(zip(first, second, strict=False)) if one != other
    )
    return next(differing, min(len(first), len(second)))


def _margin(choice: SpokenChoice, token: int, wanted: str) -> tuple[float | None, bool]:
    """By how much a token is likelier than the token with which the text ``wanted`` begins, and
    whether that is a lower bound, because no such token is known."""
    _, logprob, alternatives = choice.tokens[token]
    if logprob is None or not wanted or not alternatives:
        return None, False
    # Of several tokens that the text begins with, a tokenizer usually takes the longest.
    fitting = [text for text in alternatives if text and wanted.startswith(text)]
    if fitting:
        return logprob - alternatives[max(fitting, key=len)], False
    return logprob - min(alternatives.values()), True
