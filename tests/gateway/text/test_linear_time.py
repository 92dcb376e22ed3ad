"""Whatever a model writes, a parser takes time in proportion to its length: an answer with a
hundred thousand tokens of spaces, for example, holds up no other answer."""

import time
from collections.abc import Callable, Iterator
from functools import partial

import pytest

from gateway.text.custom import CustomInputs
from gateway.text.pieces import Content, Parser, Piece, PlainText
from gateway.text.reasoning import THOUGHTS, ReasoningSplit, Thought
from gateway.tool_formats import TOOL_FORMATS
from gateway.tool_formats.mistral import MistralParser

PIECE_CHARS = 8
NUM_CHARS = 1 << 14
FACTOR = 4
MAX_RATIO = 6.0
"""Of the times for `FACTOR` times as many characters; that of quadratic time is 16."""
MAX_TRIES = 5
FILLS = (" ", "a<arg_value>[TOOL_CALLS]<tool_call>")
BEGINNINGS = {
    "deepseek_v3": ["", "<｜tool▁call▁begin｜>", "<｜tool▁call▁begin｜>f<｜tool▁sep｜>{"],
    "functiongemma": ["call:f{", "call:f{a:"],
    "gemma4": ["call:f", "call:f{a:", 'call:f{a:<|"|>'],
    "glm45": ["", "f<arg_key>", "f<arg_key>a</arg_key><arg_value>"],
    "harmony": ["analysis<|message|>", "commentary to=f<|message|>"],
    "hermes": ["", '{"name": "f", "arguments": {', '{"arguments": '],
    "kimi_k2": ["", "<|tool_call_begin|>"],
    "llama3_json": ["", '{"name": "', '{"name": "f", "parameters": {"a": "'],
    "mistral": ["", '[{"arguments": ', "f{"],
    "pythonic": ["[", "[f", "[f(a='"],
    "qwen3_coder": ["\n<function=f>\n<parameter=", "\n<function=f>\n<parameter=a>"],
}
OPENINGS = {
    "deepseek_v3": "<｜tool▁calls▁begin｜>",
    "functiongemma": "<start_function_call>",
    "gemma4": "<|tool_call>",
    "harmony": "<|channel|>",
    "kimi_k2": "<|tool_calls_section_begin|>",
    "llama3_json": "<|python_tag|>",
    "mistral": "[TOOL_CALLS]",
    "pythonic": "",
}
"""What precedes the beginnings, unless it is ``<tool_call>``."""


class _Custom:
    """A parser of calls of a custom tool."""

    def __init__(self) -> None:
        self._calls = TOOL_FORMATS["hermes"].parser(("f",))
        self._inputs = CustomInputs(("f",))

    def read(self, text: str) -> list[Piece]:
        return self._inputs.read(self._calls.read(text))

    def end(self) -> list[Piece]:
        return self._inputs.end()


def _reasoning(thought: Thought) -> Parser:
    return ReasoningSplit(thought, PlainText())


def parsers() -> Iterator[tuple[str, Callable[[], Parser | _Custom], str]]:
    for name, form in TOOL_FORMATS.items():
        opening = OPENINGS.get(name, "<tool_call>")
        for beginning in ("", *(opening + begun for begun in BEGINNINGS[name])):
            yield name, partial(form.parser, None), beginning
    yield "mistral, open", partial(MistralParser, is_open=True), ""
    for name, thought in THOUGHTS.items():
        for beginning in ("", thought.opening + thought.label):
            yield name, partial(_reasoning, thought), beginning
    for head in ('{"input": "', '{"a": "'):
        yield "custom", _Custom, f'<tool_call>{{"name": "f", "arguments": {head}'


def parsing_s(parser: Parser | _Custom, beginning: str, fill: str, num_chars: int) -> float:
    """The CPU time of an answer in small pieces."""
    text = beginning + fill * (num_chars // len(fill))
    pieces = [text[k : k + PIECE_CHARS] for k in range(0, len(text), PIECE_CHARS)]
    began = time.thread_time()
    for piece in pieces:
        parser.read(piece)
    parser.end()
    return time.thread_time() - began


@pytest.mark.parametrize(("name", "new", "beginning"), [*parsers()])
def test_an_answer_is_parsed_in_linear_time(
    name: str, new: Callable[[], Parser | _Custom], beginning: str
) -> None:
    for fill in FILLS:
        ratios: list[float] = []
        while not ratios or (min(ratios) > MAX_RATIO and len(ratios) < MAX_TRIES):
            short_s = parsing_s(new(), beginning, fill, NUM_CHARS)
            long_s = parsing_s(new(), beginning, fill, FACTOR * NUM_CHARS)
            ratios.append(long_s / short_s)
        assert min(ratios) < MAX_RATIO, (name, fill, ratios)


def test_what_can_be_no_call_is_content() -> None:
    parser = TOOL_FORMATS["pythonic"].parser(None)

    assert parser.read(f"[{'a' * 1000}") == [Content(f"[{'a' * 1000}")]
