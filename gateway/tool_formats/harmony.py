"""The messages in which gpt-oss models answer, in OpenAI's Harmony format.

An answer continues ``<|start|>assistant``. Each of its messages has a header, which names its
channel and perhaps its recipient, and ends with ``<|end|>``, such as
``<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Yes.`` A
message to a function is a call.
"""

import re
from collections.abc import Callable

from gateway.text.calls import FunctionNames, JsonValue, is_declared
from gateway.text.pieces import CallArguments, CallStart, Content, Piece, Reasoning
from gateway.text.tags import Until
from gateway.tool_formats.rules import Rules, entries
from gateway.tool_formats.tool_format import ToolFormat

_START, _CHANNEL, _MESSAGE = "<|start|>", "<|channel|>", "<|message|>"
_ENDS = ("<|end|>", "<|return|>", "<|call|>")
_HEADERS = (_START, _CHANNEL, "to=")
"""The beginnings of a header: ``<|start|>`` is missing from the first header."""
_MAX_HEADER_CHARS = 512
_CHANNEL_NAME = re.compile(re.escape(_CHANNEL) + r"\s*(\w+)")
_RECIPIENT = re.compile(r"\bto=(?:functions\.)?([\w.-]+)")


class HarmonyParser:
    """Analysis is reasoning, calls of ``names`` are calls, and all else is content.

    Text without a header is content. So is a message to another recipient, with its header.
    """

    def __init__(self, names: FunctionNames = None) -> None:
        self.is_thinking = False
        self.num_thought_chars = 0
        """The number of characters up to the end of the last thought that has ended."""
        self._names = names
        self._num_calls = 0
        self._num_chars = 0
        self._value: JsonValue | None = None
        """The arguments of the open call; None if there is none."""
        self._raw: list[str] = []
        """The text that may be a header, or is the header of what may be a call."""
        self._begun = ""
        """The end of this text that may be the beginning of a header."""
        self._header = Until(_MESSAGE, *_ENDS)
        self._body = Until(*_ENDS, _START)
        self._kind: type[Content] | type[Reasoning] = Content
        self._said: type[Content] | type[Reasoning] | None = None
        """The kind of the text before."""
        self._is_first = True
        """Whether the message has no text so far."""
        self._callee = ""
        self._state: Callable[[str, list[Piece]], str] = self._read_start

    @property
    def open_call(self) -> int | None:
        is_open = self._value is not None and not self._value.is_complete
        return self._num_calls - 1 if is_open else None

    def read(self, text: str) -> list[Piece]:
        pieces: list[Piece] = []
        self._num_chars += len(text)
        while text:
            text = self._state(text, pieces)
        return pieces

    def end(self) -> list[Piece]:
        pieces: list[Piece] = []
        if self._state == self._read_body:
            held = self._body.end()
            self._say(held if self._kind is Content else held.rstrip(), pieces)
        elif self._value is None:
            raw = self._taken_raw() + self._header.end()
            # A header that was cut off is none of the text.
            if _CHANNEL not in raw and _START not in raw:
                self._say(raw, pieces)
        return pieces

    def _read_start(self, text: str, pieces: list[Piece]) -> str:
        """Decide whether a header follows."""
        begun = self._begun + (text if self._begun else text.lstrip())
        if not self._begun:
            self._raw.append(text[: len(text) - len(begun)])
        self._begun = begun
        if begun.startswith(_HEADERS):
            self._state = self._read_header
        elif any(header.startswith(begun) for header in _HEADERS):
            return ""
        else:
            self._begin(Content)
        return self._taken_raw()

    def _taken_raw(self) -> str:
        raw = "".join([*self._raw, self._begun])
        self._raw.clear()
        self._begun = ""
        return raw

    def _read_header(self, text: str, pieces: list[Piece]) -> str:
        room = _MAX_HEADER_CHARS - sum(map(len, self._raw))
        sure, tag, rest = self._header.read(text[:room])
        self._raw.append(sure + (tag or ""))
        rest += text[room:]
        if tag is None and room > len(text):
            return ""
        header = self._taken_raw()
        if tag is None or not tag.endswith(_MESSAGE):
            return self._refuse(header + self._header.end(), rest, pieces)
        channel, recipient = _CHANNEL_NAME.search(header), _RECIPIENT.search(header)
        if recipient is None:
            is_thought = channel is not None and channel[1] == "analysis"
            self._begin(Reasoning if is_thought else Content)
            return rest
        if not is_declared(recipient[1], self._names):
            return self._refuse(header, rest, pieces)
        self._callee, self._raw, self._state = recipient[1], [header], self._read_callee
        return rest

    def _read_callee(self, text: str, pieces: list[Piece]) -> str:
        """The start of a call, which has arguments."""
        begun = text.lstrip()
        if begun and not begun.startswith("{"):
            return self._refuse(self._taken_raw(), text, pieces)
        self._raw.append(text[: len(text) - len(begun)])
        if begun:
            pieces.append(CallStart(self._num_calls, self._callee))
            self._raw, self._value, self._state = [], JsonValue(), self._read_arguments
            self._num_calls += 1
            self._said = None
        return begun

    def _read_arguments(self, text: str, pieces: list[Piece]) -> str:
        assert self._value is not None
        for position, char in enumerate(text):
            self._value.read(char)
            if self._value.is_complete:
                self._state = self._read_rest
                pieces.append(CallArguments(self._num_calls - 1, text[: position + 1]))
                return text[position + 1 :]
        pieces.append(CallArguments(self._num_calls - 1, text))
        return ""

    def _read_rest(self, text: str, pieces: list[Piece]) -> str:
        """Skip the text after the arguments of a call, which means nothing."""
        _, tag, rest = self._body.read(text)
        return rest if tag is None else self._end_message(tag, rest)

    def _read_body(self, text: str, pieces: list[Piece]) -> str:
        sure, tag, rest = self._body.read(text)
        self._say(sure, pieces)
        return rest if tag is None else self._end_message(tag, rest)

    def _begin(self, kind: type[Content] | type[Reasoning]) -> None:
        self._kind, self._is_first, self._state = kind, True, self._read_body
        self.is_thinking = kind is Reasoning

    def _end_message(self, tag: str, rest: str) -> str:
        if self.is_thinking:
            self.is_thinking = False
            self.num_thought_chars = self._num_chars - len(rest)
        self._value, self._state = None, self._read_start
        return _START + rest if tag.endswith(_START) else rest

    def _refuse(self, header: str, rest: str, pieces: list[Piece]) -> str:
        """Treat a message as content, from its header on."""
        self._begin(Content)
        self._say(header, pieces)
        return rest

    def _say(self, text: str, pieces: list[Piece]) -> None:
        if not text:
            return
        if self._is_first and self._said is self._kind:
            text = f"\n{text}"
        self._is_first, self._said = False, self._kind
        pieces.append(self._kind(text))


HARMONY_RULES: Rules = {
    "begin": '(entry_start "assistant")?',
    **entries(start=_START, channel=_CHANNEL, constrain="<|constrain|>", message=_MESSAGE),
}
"""``begin``: the start of a further message, and the other tags of a message's header."""
FORMAT = ToolFormat(
    parser=HarmonyParser,
    inside="begin call",
    calls={
        "call": 'entry_channel "commentary to=functions.NAME" " "? entry_constrain "json" '
        "entry_message ARGUMENTS"
    },
    between="entry_call",  # gpt-oss ends its answer after a call
    entries={**HARMONY_RULES, **entries(call="<|call|>")},
)
