"""Tool calls as FunctionGemma writes them: ``<start_function_call>call:f{city:<escape>Rome<escape>,
days:3}<end_function_call>``. Strings stand between two ``<escape>``; keys and other values do not.
"""

import json
import re

from gateway.text.pieces import CallArguments, CallStart, Content, Piece
from gateway.text.tags import Until
from gateway.text.tools.calls import Names, Outside, is_declared, json_of

OPEN, CLOSE = "<start_function_call>", "<end_function_call>"
RESPONSE = "<start_function_response>"
"""Written after calls, to wait for their outputs."""
ESCAPE = "<escape>"
_HEADER = re.compile(r"\s*call:\s*([\w.-]+)\s*")
_MAX_HEADER_CHARS = 512


class FunctionGemmaParser:
    """Text that is not a call remains content, including tags."""

    def __init__(self, names: Names = None) -> None:
        self._names = names
        self._num_calls = 0
        self._outside = Outside(OPEN, CLOSE, RESPONSE)
        self._tag = OPEN
        self._call: _Call | None = None
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
            return [] if self._call.has_begun else [Content(self._tag + self._call.raw)]
        return self._outside.end()

    def _read_content(self, text: str, pieces: list[Piece]) -> str:
        tag, rest = self._outside.read(text, pieces)
        if tag is None:
            return rest
        if tag.endswith(OPEN):
            self._tag, self._call = tag, _Call(self._num_calls, self._names)
        elif not self._outside.follows_call:
            pieces.append(Content(tag))
        else:
            self._is_over = tag.endswith(RESPONSE)
        return rest

    def _read_call(self, call: "_Call", text: str, pieces: list[Piece]) -> str:
        read, rest = call.read(text)
        pieces += read
        if call.is_broken:
            pieces.append(Content(self._tag + call.raw))
            self._call, self._outside.follows_call = None, False
        elif call.is_complete:
            self._num_calls += 1
            self._call, self._outside.follows_call = None, True
        return rest


class _Call:
    """One call, after its opening tag: a header up to ``{``, which is held until it names a
    declared function, and the arguments, which are written as JSON while they come."""

    def __init__(self, index: int, names: Names) -> None:
        self.index = index
        self.is_broken = False
        self.raw = ""
        """The header."""
        self._names = names
        self._arguments: _Arguments | None = None

    @property
    def has_begun(self) -> bool:
        return self._arguments is not None

    @property
    def is_complete(self) -> bool:
        return self._arguments is not None and self._arguments.is_complete

    def read(self, text: str) -> tuple[list[Piece], str]:
        """Returns the pieces, and the text after the call if it has ended."""
        pieces: list[Piece] = []
        if self._arguments is None:
            text = self._read_header(text, pieces)
        if self._arguments is not None:
            written, text = self._arguments.read(text)
            pieces += [CallArguments(self.index, written)] if written else []
        return pieces, text

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
        self._arguments = _Arguments()
        pieces.append(CallStart(self.index, match[1]))
        return brace + rest


class _Arguments:
    """Writes arguments as JSON, from their opening brace on. The JSON of a call that has ended is
    valid even if the model's brackets do not match."""

    def __init__(self) -> None:
        self.is_complete = False
        self._closers: list[str] = []
        """What closes the brackets that are open."""
        self._is_empty = True
        """Whether there is nothing in the innermost bracket so far."""
        self._expected = "value"
        """Or a key, or after a value nothing until the next comma or bracket."""
        self._word = ""
        """What stands outside of strings, or an escaped key."""
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
        part = sure if tag is None else sure + tag.removesuffix(ESCAPE)
        if self._expected == "key":
            self._word += part
        else:
            self._written.append(json.dumps(part, ensure_ascii=False)[1:-1])
        if tag is not None:
            self._string = None
            if self._expected == "value":
                self._written.append('"')
                self._expected = "nothing"
        return rest

    def _read_char(self, char: str) -> None:
        self._word += char
        if self._expected != "nothing" and self._word.endswith(ESCAPE):
            self._begin_string()
        elif self._word.endswith(CLOSE):
            self._end_word(self._word.removesuffix(CLOSE))
            while self._closers:
                self._close()
        elif self._expected == "value" and char in "{[" and self._word.strip() == char:
            self._open(char)
        elif self._expected == "key" and char == ":":
            self._separate()
            self._written.append(f"{json.dumps(self._word[:-1].strip(), ensure_ascii=False)}: ")
            self._word, self._expected = "", "value"
        elif char in ",}]":
            self._end_word(self._word[:-1])
            if char == ",":
                self._expected = "key" if self._closers[-1] == "}" else "value"
            else:
                self._close()

    def _begin_string(self) -> None:
        self._word, self._string = "", Until(ESCAPE)
        if self._expected == "value":
            self._begin_value()
            self._written.append('"')

    def _end_word(self, word: str) -> None:
        """End a value that is no string, or a key without a value, which is dropped."""
        self._word = ""
        word = word.strip()
        is_missing = not word and self._closers[-1] == "}"
        if self._expected == "value" and (word or is_missing):
            self._begin_value()
            self._written.append("null" if is_missing else json_of(word))

    def _open(self, bracket: str) -> None:
        self._begin_value()
        self._written.append(bracket)
        self._closers.append("}" if bracket == "{" else "]")
        self._word, self._is_empty = "", True
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
