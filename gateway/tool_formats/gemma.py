"""Tool calls as Gemma models write them, such as
``<|tool_call>call:f{city:<|"|>Rome<|"|>,days:3}<tool_call|>``. Strings stand between quotes that
are special tokens; keys and other values do not.
"""

import json
import re
from typing import NamedTuple

from gateway.text.calls import FunctionNames, is_declared, json_of
from gateway.text.enclosed import EnclosedParser
from gateway.text.pieces import CallArguments, CallStart, Piece
from gateway.text.tags import Until
from gateway.tool_formats.arguments import LiteralArguments
from gateway.tool_formats.rules import entries, quoted, until
from gateway.tool_formats.tool_format import ToolFormat

_HEADER = re.compile(r"\s*call:\s*([\w.-]+)\s*")
_MAX_HEADER_CHARS = 512
_KEY = re.compile(r"[^\s:,{}\[\]<>]+")
"""A key of an object, without quotes."""


class GemmaTokens(NamedTuple):
    """The special tokens of a family."""

    opening: str
    closing: str
    quote: str
    """Around a string."""
    response: str
    """Written after calls, to wait for their outputs."""


class _Call:
    """A call, after its opening tag: a header up to ``{``, which is held until it names a declared
    function, and the arguments, which are written as JSON while they come."""

    def __init__(self, index: int, tokens: GemmaTokens, names: FunctionNames) -> None:
        self.index = index
        self.has_begun = False
        self.is_complete = False
        self.is_broken = False
        self.raw = ""
        """The header."""
        self._tokens = tokens
        self._names = names
        self._arguments: _Arguments | None = None

    def read(self, text: str) -> tuple[list[Piece], str]:
        pieces: list[Piece] = []
        if self._arguments is None:
            text = self._read_header(text, pieces)
        if self._arguments is not None:
            written, text = self._arguments.read(text)
            pieces += [CallArguments(self.index, written)] if written else []
            self.is_complete = self._arguments.is_complete
        return pieces, text

    def end(self) -> str:
        return self.raw

    def _read_header(self, text: str, pieces: list[Piece]) -> str:
        head, brace, rest = text.partition("{")
        room = _MAX_HEADER_CHARS - len(self.raw)
        self.raw += head[:room]
        if len(head) > room:
            self.is_broken = True
            return text[room:]
        if not brace:
            return ""
        match = _HEADER.fullmatch(self.raw)
        if match is None or not is_declared(match[1], self._names):
            self.raw += brace
            self.is_broken = True
            return rest
        self._arguments, self.has_begun = _Arguments(self._tokens), True
        pieces.append(CallStart(self.index, match[1]))
        return brace + rest


class _Arguments:
    """Writes arguments as JSON, from their opening brace on. The JSON of a call that has ended is
    valid even if the model's brackets do not match."""

    def __init__(self, tokens: GemmaTokens) -> None:
        self.is_complete = False
        self._quote = tokens.quote
        self._closing = tokens.closing
        self._closers: list[str] = []
        """The closing brackets of the open brackets."""
        self._is_empty = True
        """Whether there is nothing in the innermost bracket so far."""
        self._expected = "value"
        """Or a key, or after a value nothing until the next comma or bracket."""
        self._word: list[str] = []
        """The current word outside of strings, or a quoted key."""
        self._last_chars = ""
        """The last characters of the word, which may be a token."""
        self._is_blank = True
        """Whether the word has only whitespace."""
        self._string: Until | None = None
        self._written: list[str] = []

    def read(self, text: str) -> tuple[str, str]:
        """Returns the JSON that is certain, and the text after the arguments if they have ended."""
        while text and not self.is_complete:
            if self._string is not None:
                text = self._read_string(self._string, text)
            else:
                self._read_char(text[0])
                text = text[1:]
        written, self._written = "".join(self._written), []
        return written, text

    def _read_string(self, string: Until, text: str) -> str:
        sure, tag, rest = string.read(text)
        part = sure if tag is None else sure + tag.removesuffix(self._quote)
        if self._expected == "key":
            self._add(part)
        else:
            self._written.append(json.dumps(part, ensure_ascii=False)[1:-1])
        if tag is not None:
            self._string = None
            if self._expected == "value":
                self._written.append('"')
                self._expected = "nothing"
        return rest

    def _read_char(self, char: str) -> None:
        is_first = self._is_blank
        self._add(char)
        if self._expected != "nothing" and self._last_chars.endswith(self._quote):
            self._begin_string()
        elif self._last_chars.endswith(self._closing):
            self._end_word(self._taken_word().removesuffix(self._closing))
            while self._closers:
                self._close()
        elif self._expected == "value" and char in "{[" and is_first:
            self._open(char)
        elif self._expected == "key" and char == ":":
            self._separate()
            key = self._taken_word()[:-1].strip()
            self._written.append(f"{json.dumps(key, ensure_ascii=False)}: ")
            self._expected = "value"
        elif char in ",}]":
            self._end_word(self._taken_word()[:-1])
            if char == ",":
                self._expected = "key" if self._closers[-1] == "}" else "value"
            else:
                self._close()

    def _add(self, part: str) -> None:
        self._word.append(part)
        num_kept = max(len(self._quote), len(self._closing))
        self._last_chars = (self._last_chars + part)[-num_kept:]
        self._is_blank = self._is_blank and (not part or part.isspace())

    def _taken_word(self) -> str:
        word = "".join(self._word)
        self._word.clear()
        self._last_chars, self._is_blank = "", True
        return word

    def _begin_string(self) -> None:
        self._taken_word()
        self._string = Until(self._quote)
        if self._expected == "value":
            self._begin_value()
            self._written.append('"')

    def _end_word(self, word: str) -> None:
        """End a value that is no string, or a key without a value, which is dropped."""
        word = word.strip()
        is_missing = not word and self._closers[-1] == "}"
        if self._expected == "value" and (word or is_missing):
            self._begin_value()
            self._written.append("null" if is_missing else json_of(word))

    def _open(self, bracket: str) -> None:
        self._begin_value()
        self._written.append(bracket)
        self._closers.append("}" if bracket == "{" else "]")
        self._taken_word()
        self._is_empty = True
        self._expected = "key" if bracket == "{" else "value"

    def _close(self) -> None:
        self._written.append(self._closers.pop())
        self._is_empty, self._expected = False, "nothing"
        self.is_complete = not self._closers

    def _begin_value(self) -> None:
        if self._closers and self._closers[-1] == "]":
            self._separate()

    def _separate(self) -> None:
        if not self._is_empty:
            self._written.append(", ")
        self._is_empty = False


def _gemma(tokens: GemmaTokens) -> ToolFormat:
    literals = {
        "string": "entry_quote string_rest",
        "boolean": '"true" | "false"',
        "null": '"null" | "None"',
        "key": f"/{_KEY.pattern}/ | string",
        **until("string_rest", "quote", tokens.quote),
    }
    return ToolFormat(
        parser=lambda names: EnclosedParser(
            tokens.opening,
            lambda index: _Call(index, tokens, names),
            ending=tokens.closing,
            last=tokens.response,
        ),
        tag=tokens.opening,
        inside="call entry_end",
        calls={"call": 'blank? "call:NAME{" ARGUMENTS "}"'},
        between="",
        entries=entries(end=tokens.closing, response=tokens.response),
        arguments=LiteralArguments(
            '":"',
            '","',
            literals,
            lambda text: f"entry_quote {quoted(text)} entry_quote",
            key=_KEY,
            is_sorted=True,
        ),
        after="entry_response",
    )


FUNCTIONGEMMA = _gemma(
    GemmaTokens(
        "<start_function_call>", "<end_function_call>", "<escape>", "<start_function_response>"
    )
)
GEMMA4 = _gemma(GemmaTokens("<|tool_call>", "<tool_call|>", '<|"|>', "<|tool_response>"))
