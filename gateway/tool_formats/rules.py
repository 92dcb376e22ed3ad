"""Rules of llguidance's grammars, in its dialect of Lark: the parts of which grammars are made."""

import json
import re
from collections.abc import Mapping
from typing import Any, TypeAlias

import msgspec

from shared.grammars import ENTRY_RULE, for_generation
from shared.messages import MAX_GRAMMAR_CHARS

Rules: TypeAlias = Mapping[str, str]
"""Definitions by the names of rules, with their attributes."""
ANYTHING: Rules = {"anything": "/(?s:.*)/"}
BLANK: Rules = {"blank": r"/[ \t\r\n]/"}
"""Not every space of Unicode: the parsers of calls read JSON's."""
_REFUSED_SCHEMA: dict[str, Any] = {"not": {}}
_ENCODER = json.JSONEncoder(ensure_ascii=False)
_MAX_BUILT_CHARS = 8 * MAX_GRAMMAR_CHARS
"""More than a grammar may have: equal rules are built several times, but are part of it once."""


class GrammarTooLong(Exception):
    """A grammar has become too long before it is complete."""


class Budget:
    """Limits the size of a grammar, because a short body can require a long grammar."""

    def __init__(self) -> None:
        self._num_chars = 0

    def spend(self, text: str) -> str:
        """Count a part of the grammar, and return it. Raises `GrammarTooLong`."""
        self._num_chars += len(text)
        if self._num_chars > _MAX_BUILT_CHARS:
            raise GrammarTooLong
        return text


def quoted(text: str) -> str:
    """A text as a literal of a grammar."""
    return _ENCODER.encode(text)


def pattern(text: str) -> str:
    """The regular expression of a text, as it stands between slashes."""
    return re.escape(text).replace("/", "\\/")


def entry(name: str, text: str) -> Rules:
    """The rule ``entry_NAME``: the token ``text`` if the vocabulary has it, or else that text. A
    special token cannot be written as text."""
    return {f"{ENTRY_RULE}{name}": quoted(text)}


def entries(**texts: str) -> Rules:
    """The rules of several entries, by their names."""
    return {rule: text for name in texts for rule, text in entry(name, texts[name]).items()}


def until(rule: str, name: str, text: str) -> Rules:
    """``rule``: anything up to the first ``text`` and with it, whether it is written as the token
    ``entry_NAME`` or not."""
    return {
        rule: f"{rule}_spelled | anything {ENTRY_RULE}{name}",
        f"{rule}_spelled[lazy]": f"/(?s:.*){pattern(text)}/",
        **entry(name, text),
        **ANYTHING,
    }


def json_rule(schema: dict[str, Any]) -> str:
    """The rule for a schema in a grammar. It allows the same texts as the schema alone.

    A grammar with a schema that cannot be obeyed is refused when it is compiled; the check of the
    schema itself names the reason.
    """
    try:
        schema = for_generation(schema)
    except ValueError:
        schema = _REFUSED_SCHEMA
    return f"%json {msgspec.json.encode(schema).decode()}"
