"""Reads llama.cpp's grammars (GBNF), in linear time."""

import json
import re
from collections.abc import Iterator, Mapping
from typing import NoReturn

from shared.grammars.lark_rules import (
    Alternatives,
    Literal,
    Node,
    Repeat,
    RuleReference,
    TokenReference,
    Translation,
)

MAX_DEPTH = 64
"""Maximum depth of groups within a rule."""
_MAX_REPETITIONS = 1 << 16
_DEFINES = re.compile(r"^[ \t]*+[A-Za-z0-9_-]++[ \t]*+::=", re.MULTILINE)
_LEXEME = re.compile(
    r"""[ \t]*+(?:\#[^\r\n]*+)?+(?:
    (?P<end>\Z)
  | (?P<line>[\r\n]++)
  | (?P<name>[A-Za-z0-9_-]++)
  | (?P<define>::=)
  | (?P<literal>"(?:[^"\\\r\n]|\\.)*+")
  | (?P<chars>\[(?:[^\]\\\r\n]|\\.)*+\])
  | (?P<token><\[\^?[0-9][0-9, -]*+\]>|<[^<>\s\[\]]++>)
  | (?P<any>\.)
  | (?P<repeat>[*+?]|\{[ \t]*+[0-9]*+[ \t]*+,?+[ \t]*+[0-9]*+[ \t]*+\})
  | (?P<sign>[()|])
    )""",
    re.VERBOSE,
)
_CHAR = re.compile(
    r"\\(?:x([0-9A-Fa-f]{2})|u([0-9A-Fa-f]{4})|U([0-9A-Fa-f]{8})|(.))|(.)", re.DOTALL
)
_ESCAPES: Mapping[str, str] = {"n": "\n", "r": "\r", "t": "\t", **{c: c for c in '"\\[]-^'}}
_PLAIN = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789")


def is_gbnf(grammar: str) -> bool:
    """Whether a grammar defines rules as GBNF does, with ``::=``. In Lark, a line cannot begin
    so."""
    return _DEFINES.search(grammar) is not None


def to_lark(grammar: str) -> str:
    """Translate a grammar. Raises `ValueError` with the line and the reason."""
    rules = _Parser(grammar).rules()
    if "root" not in rules:
        raise ValueError("there is no rule named root")
    return Translation(rules).lark()


class _Parser:
    """Reads rules without recursion: open groups are on a stack."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._lexemes = _lexemes(text)
        self._kind, self._value, self._at = "", "", 0

    def rules(self) -> dict[str, Alternatives]:
        """The rules by their names. Raises `ValueError`."""
        rules: dict[str, Alternatives] = {}
        named_at: dict[str, int] = {}
        self._next()
        self._skip_lines()
        while self._kind != "end":
            name = self._value
            if self._kind != "name":
                self._fail("expected the name of a rule")
            if name in rules:
                self._fail(f"the rule {name[:64]!r} is defined twice")
            self._next()
            if self._kind != "define":
                self._fail("expected ::= after the name of a rule")
            self._next()
            self._skip_lines()
            rules[name] = self._alternatives(named_at)
        for name, at in named_at.items():
            if name not in rules:
                self._at = at
                self._fail(f"the rule {name[:64]!r} is not defined")
        return rules

    def _alternatives(self, named_at: dict[str, int]) -> Alternatives:
        """The definition of a rule, up to the end of its line. Its further alternatives may be on
        lines of their own."""
        groups: list[list[list[Node]]] = [[[]]]
        while self._kind != "end":
            if self._kind == "line":
                self._skip_lines()
                if len(groups) == 1 and self._value != "|":
                    break
            elif self._kind == "sign":
                self._bracket(groups)
            else:
                if self._kind == "name":
                    named_at.setdefault(self._value, self._at)
                self._append(groups[-1][-1])
                self._next()
        if len(groups) > 1:
            self._fail("a group is not closed")
        return Alternatives(tuple(map(tuple, groups[0])))

    def _bracket(self, groups: list[list[list[Node]]]) -> None:
        """Begin or end a group, or begin another alternative."""
        match self._value:
            case "|":
                groups[-1].append([])
            case "(" if len(groups) > MAX_DEPTH:
                self._fail(f"groups are nested more than {MAX_DEPTH} levels deep")
            case "(":
                groups.append([[]])
            case _ if len(groups) > 1:
                group = groups.pop()
                groups[-1][-1].append(Alternatives(tuple(map(tuple, group))))
                self._next()
                return
            case _:
                self._fail("')' is not expected here")
        self._next()
        self._skip_lines()

    def _append(self, sequence: list[Node]) -> None:
        """Add a node to a sequence, or repeat its last node."""
        value = self._value
        match self._kind:
            case "name":
                sequence.append(RuleReference(value))
            case "literal":
                text = "".join(map(chr, self._chars(value[1:-1])))
                sequence.append(Literal(json.dumps(text, ensure_ascii=False)))
            case "chars":
                sequence.append(Literal(f"/{self._char_class(value[1:-1])}/"))
            case "any":
                sequence.append(Literal("/(?s:.)/"))
            case "token":
                sequence.append(TokenReference(value))
            case "repeat" if sequence and not isinstance(sequence[-1], Repeat):
                sequence[-1] = Repeat(sequence[-1], self._times(value))
            case "repeat":
                self._fail(f"{value[:16]!r} has nothing to repeat")
            case _:
                self._fail(f"{value[:16]!r} is not expected here")

    def _char_class(self, source: str) -> str:
        """A class of characters as a regular expression."""
        negated = source.startswith("^")
        source = source[negated:]
        parts: list[str] = []
        chars = self._chars(source)
        # An escaped hyphen is a character, and so is one at the end.
        hyphens = [match[0] == "-" for match in _CHAR.finditer(source)]
        k = 0
        while k < len(chars):
            if k + 2 < len(chars) and hyphens[k + 1]:
                if chars[k] > chars[k + 2]:
                    self._fail("a range of characters ends before it begins")
                parts.append(f"{_in_class(chars[k])}-{_in_class(chars[k + 2])}")
                k += 3
            else:
                parts.append(_in_class(chars[k]))
                k += 1
        if not parts:
            self._fail("a class of characters is empty")
        return f"[{'^' if negated else ''}{''.join(parts)}]"

    def _chars(self, source: str) -> list[int]:
        """The characters that a literal or a class spells."""
        chars = []
        for match in _CHAR.finditer(source):
            *codes, escape, plain = match.groups()
            code = next((code for code in codes if code), None)
            if code is not None:
                char = int(code, 16)
            elif escape is None:
                char = ord(plain)
            elif escape in _ESCAPES:
                char = ord(_ESCAPES[escape])
            else:
                self._fail(f"\\{escape} is not an escape sequence")
            if char > 0x10FFFF or 0xD800 <= char < 0xE000:
                self._fail(f"{match[0]} is not a character")
            chars.append(char)
        return chars

    def _times(self, operator: str) -> str:
        if operator in "*+?":
            return operator
        low, comma, high = re.sub(r"[ \t{}]", "", operator).partition(",")
        if not low and not high:
            self._fail("expected a number of repetitions")
        if any(len(number) > 6 or int(number or 0) > _MAX_REPETITIONS for number in (low, high)):
            self._fail(f"more than {_MAX_REPETITIONS} repetitions")
        if high and int(low or 0) > int(high):
            self._fail("the maximum of repetitions is below the minimum")
        return f"{{{low or 0},{high}}}" if comma else f"{{{low}}}"

    def _next(self) -> None:
        self._kind, self._value, self._at = next(self._lexemes)

    def _skip_lines(self) -> None:
        while self._kind == "line":
            self._next()

    def _fail(self, reason: str) -> NoReturn:
        raise _error(self._text, self._at, reason)


def _lexemes(text: str) -> Iterator[tuple[str, str, int]]:
    """Kind, text and position of each lexeme; the last lexeme is ``end``. Raises `ValueError`."""
    position = 0
    while True:
        match = _LEXEME.match(text, position)
        if match is None:
            at = re.compile(r"[ \t]*").match(text, position)
            assert at is not None
            raise _error(text, at.end(), f"{text[at.end() : at.end() + 16]!r} cannot be read")
        kind = match.lastgroup or "end"
        yield kind, match[kind], match.start(kind)
        position = match.end()


def _error(text: str, at: int, reason: str) -> ValueError:
    return ValueError(f"line {text.count(chr(10), 0, at) + 1}: {reason}")


def _in_class(char: int) -> str:
    text = chr(char)
    return text if text in _PLAIN else f"\\x{{{char:x}}}"
