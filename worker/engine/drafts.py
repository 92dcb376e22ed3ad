"""Drafts of a sequence's next tokens, most of them looked up in its own prompt and output.

Answers often repeat what came before: code that is edited, documents that are quoted, the keys of
JSON. The tokens that followed the last occurrence of the latest tokens are a draft of the next
tokens, and a single step checks them all: it draws the token after each of them, and the draws
count as far as the draft equals them. A draw depends on its context and its position alone, so a
sequence with drafts has the tokens that it has without. A grammar that leaves no choice, and a
model with a layer that predicts the token after the next, draft in the same way.

See "Inference with Reference", Yang et al., 2023, and "Fast Inference from Transformers via
Speculative Decoding", Leviathan et al., ICML 2023.
"""

import math
import struct
from collections.abc import Sequence
from itertools import cycle, islice
from typing import NamedTuple

from worker.engine.interface import DRAFT_SOURCES, DraftSource, LogitEdits

_TOKEN = struct.Struct("<I")
MAX_MATCH_LEN = 6
_MATCH_LENS = (MAX_MATCH_LEN, 3)
"""The numbers of latest tokens that are looked up; a longer match is the better draft."""
_MAX_SEARCHED = 1 << 14
"""The number of tokens that are searched, which bounds the time."""
_MAX_MISALIGNED = 8

_FIRST_CHANCE = 0.7
_MAX_CHANCE = 0.98
_LEARNING_RATE = 0.1
_FORGETTING_RATE = 0.01
"""Per token without a draft. A sequence whose drafts were wrong is tried again after a while."""


class TokenDraft(NamedTuple):
    """Tokens that may be the next tokens of a sequence."""

    token_ids: Sequence[int]
    edits: Sequence[LogitEdits] = ()
    """The edits of the draw after each token; empty if the sequence has no edits."""
    source: DraftSource = "text"


NO_DRAFT = TokenDraft(())


class Drafter:
    """Drafts the tokens of a sequence, and learns how often they are right."""

    def __init__(self, token_ids: Sequence[int], expected_ids: Sequence[int] = ()) -> None:
        """``expected_ids`` probably occur in the sequence, and are looked up like its beginning."""
        known = (*expected_ids, *token_ids)
        self._tokens = bytearray(b"".join(map(_TOKEN.pack, known)))
        self._chances = dict.fromkeys(DRAFT_SOURCES, _FIRST_CHANCE)
        if expected_ids:
            self._chances["text"] = _MAX_CHANCE
        """The estimated probability that a drafted token is drawn, if all drafted tokens before it
        were, by the source of the draft."""

    def append(self, token_id: int) -> None:
        """Add a token that was not drafted."""
        self._tokens += _TOKEN.pack(token_id)
        for source, chance in self._chances.items():
            self._chances[source] = chance + _FORGETTING_RATE * (_FIRST_CHANCE - chance)

    def learn(self, token_id: int, *, was_right: bool, source: DraftSource = "text") -> None:
        """Add a token that was drafted, rightly or wrongly."""
        chance = self._chances[source]
        self.append(token_id)
        self._chances[source] = chance + _LEARNING_RATE * (was_right - chance)

    def chance(self, source: DraftSource) -> float:
        """The estimated probability that the first token of a draft is right."""
        return min(self._chances[source], _MAX_CHANCE)

    def num_worthwhile(self, least_chance: float) -> int:
        """The length of the longest draft of the text whose last token has at least this chance."""
        chance = self.chance("text")
        return int(math.log(least_chance) / math.log(chance)) if chance > least_chance else 0

    def draft(self, num_tokens: int, num_skipped: int = 0) -> list[int]:
        """The next ``num_tokens`` tokens, after the ``num_skipped`` that are being drawn; empty
        without a match."""
        for length in _MATCH_LENS:
            start = self._find(length * _TOKEN.size)
            if start is not None:
                last = start + (num_skipped + num_tokens) * _TOKEN.size
                found = [token_id for (token_id,) in _TOKEN.iter_unpack(self._tokens[start:last])]
                # A text that repeats itself has a match that ends too early, and goes on.
                return list(islice(cycle(found), num_skipped, num_skipped + num_tokens))
        return []

    def _find(self, num_bytes: int) -> int | None:
        """Where the tokens begin that followed the last occurrence of the latest tokens."""
        latest = self._tokens[-num_bytes:]
        end = len(self._tokens) - _TOKEN.size
        first = max(0, end - _MAX_SEARCHED * _TOKEN.size)
        for _ in range(_MAX_MISALIGNED):
            place = self._tokens.rfind(latest, first, end) if len(latest) == num_bytes else -1
            if place < 0:
                return None
            if place % _TOKEN.size == 0:
                return place + num_bytes
            end = place + num_bytes - 1
        return None
