"""The inputs of custom tools, which models call as functions with a string."""

import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from gateway.api.render.choice_reader import ChoiceReader, merged
from gateway.text.custom import CustomInputs
from gateway.text.pieces import CallArguments, CallInput, CallStart, Content, Piece
from tests.support.gateway.rendering import context_of


def inputs_of(parts: list[str]) -> list[Piece]:
    reader = CustomInputs(("patch",))
    arguments = (CallArguments(0, part) for part in parts)
    return merged(reader.read([CallStart(0, "patch"), *arguments]) + reader.end())


def given_to_patch(text: str) -> list[Piece]:
    begun: list[Piece] = [CallStart(0, "patch", is_custom=True)]
    return [*begun, CallInput(0, text)] if text else begun


@given(text=st.text(), is_ascii=st.booleans(), cuts=st.lists(st.integers(0, 60)))
@example(text='🙂\\"\n\ud7ff', is_ascii=True, cuts=list(range(60)))
def test_the_input_is_the_text_wherever_its_arguments_are_cut(
    text: str, is_ascii: bool, cuts: list[int]
) -> None:
    arguments = json.dumps({"input": text}, ensure_ascii=is_ascii)
    places = [0, *sorted(min(cut, len(arguments)) for cut in cuts), len(arguments)]

    read = inputs_of([arguments[a:b] for a, b in pairwise(places)])

    assert read == given_to_patch(text)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ('{"input": "a\\', "a"),
        ('{"input": "a\\u00', "a"),
        ('{"input": "a\\ud83d', "a"),
        ('{"input": "\\ud83d!"}', "\ufffd!"),
        ('{"input": "\\ud83d\\u0041"}', "\ufffdA"),
        ('{"input": "a\\xb"}', "a\\xb"),
        ('{"input": "a\nb"}', "a\nb"),
        (' { "input" : "a"}', "a"),
        ('{"patch": "a"}', "a"),
        ('{"more": 1, "input": "a"}', "a"),
        ('{"input": {"a": "é"}}', '{"a": "é"}'),
        ('{"a": "b", "c": "d"}', ""),
        ("{}", ""),
        ('{"inp', ""),
        ("[1]", ""),
    ],
)
def test_other_arguments_become_the_best_text(arguments: str, text: str) -> None:
    whole, streamed = inputs_of([arguments]), inputs_of(list(arguments))

    assert whole == streamed == given_to_patch(text)


@pytest.mark.parametrize("is_single_call", [False, True])
def test_only_custom_tools_are_given_texts(is_single_call: bool) -> None:
    def called(name: str, arguments: dict[str, Any]) -> str:
        return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"

    text = "Well." + "".join(
        [called("patch", {"diff": "+a"}), called("f", {"input": "b"}), called("patch", {})]
    )
    reader = ChoiceReader(
        context_of(
            tool_parser="hermes",
            tool_names=("patch", "f"),
            custom_tools=("patch",),
            is_single_call=is_single_call,
        )
    )

    pieces = merged([piece for char in text for piece in reader.read(char, 1)] + reader.end())

    first: list[Piece] = [Content("Well."), *given_to_patch("+a")]
    others = [
        CallStart(1, "f"),
        CallArguments(1, '{"input": "b"}'),
        CallStart(2, "patch", is_custom=True),
    ]
    assert pieces == (first if is_single_call else first + others)
