"""Parsing of models' texts."""

from collections.abc import Sequence
from itertools import pairwise

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from gateway.api.render.choice_reader import ChoiceReader, merged
from gateway.text.pieces import CallArguments, CallInput, CallStart, Content, Piece, Reasoning
from gateway.text.reasoning import HARMONY, THOUGHTS
from gateway.tool_formats import TOOL_FORMATS
from tests.support.gateway.rendering import context_of
from tests.support.gateway.tool_calls import FORMS


def pieces_of(
    parts: Sequence[str],
    tool_parser: str | None,
    reasoning_parser: str | None = None,
    *,
    is_single_call: bool = False,
    is_forced: bool = False,
) -> list[Piece]:
    reader = ChoiceReader(
        context_of(
            tool_parser=tool_parser,
            reasoning_parser=reasoning_parser,
            is_single_call=is_single_call,
            is_forced=is_forced,
        )
    )
    pieces = [piece for part in parts for piece in reader.read(part, 1)]
    return merged(pieces + reader.end())


def call(index: int, name: str, arguments: str) -> list[Piece]:
    return [CallStart(index, name), CallArguments(index, arguments)]


def test_adjacent_pieces_of_one_kind_are_joined() -> None:
    one = [Content("c"), *call(0, "f", "{"), *call(1, "f", "{"), CallStart(2, "g")]
    several: list[Piece] = [Reasoning("a"), Reasoning("b"), Content(""), *one, CallStart(2, "g")]
    split = [CallArguments(0, "1"), CallArguments(0, "2"), CallArguments(1, "3")]
    given = [CallInput(1, "4"), CallInput(1, "5"), CallInput(2, "6")]

    assert merged([*several, *split, *given]) == [
        Reasoning("ab"),
        *one,
        CallStart(2, "g"),
        CallArguments(0, "12"),
        CallArguments(1, "3"),
        CallInput(1, "45"),
        CallInput(2, "6"),
    ]


HERMES = [
    ("Hello.", [Content("Hello.")]),
    (
        '<tool_call>\n{"name": "f", "arguments": {"a": "}\\""}}\n</tool_call>',
        call(0, "f", '{"a": "}\\""}'),
    ),
    (
        'Sure. \n<tool_call>{"arguments": {"a": 1}, "name": "f"}</tool_call>\n'
        '<tool_call>{"name": "g"}</tool_call>\n done ',
        [Content("Sure."), *call(0, "f", '{"a": 1}'), *call(1, "g", "{}"), Content("done")],
    ),
    ("a <tool", [Content("a <tool")]),
    ("<tool_call>nothing</tool_call>", [Content("<tool_call>nothing</tool_call>")]),
    ('<tool_call>{"name": 1}</tool_call>', [Content('<tool_call>{"name": 1}</tool_call>')]),
    ('<tool_call>{"name": "f", "arguments": {"a": [1', call(0, "f", '{"a": [1')),
    ('<tool_call>{"name": "f", "argu', [Content('<tool_call>{"name": "f", "argu')]),
    ('<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>', call(0, "f", '{"a": 1}')),
    (
        '<tool_call>{"name": "f", "arguments": {}}<tool_call>{"name": "g", "arguments": {}}',
        call(0, "f", "{}") + call(1, "g", "{}"),
    ),
    ('<tool_call>{"name": "f", "arguments": "\\ud800"}</tool_call>', call(0, "f", "\ufffd")),
]
LLAMA3 = [
    ('{"name": "f", "parameters": {"q": 1}}', call(0, "f", '{"q": 1}')),
    ('<|python_tag|>{"name": "f", "parameters": {}}', call(0, "f", "{}")),
    ('<|python_start|><|python_end|>{"name": "f", "parameters": {}}', call(0, "f", "{}")),
    ("<|python_start|>1", [Content("<|python_start|>1")]),
    (
        '{"name": "f", "parameters": {}}; {"type": "function", "name": "g", "parameters": {}}\n',
        call(0, "f", "{}") + call(1, "g", "{}"),
    ),
    (' {"name": "Bob", "age": 3} x', [Content(' {"name": "Bob", "age": 3} x')]),
    ("It is {", [Content("It is {")]),
    ("<|python", [Content("<|python")]),
    ('{"name": "f"', [Content('{"name": "f"')]),
    ('{"name": "f", "parameters": {}} done', [*call(0, "f", "{}"), Content("done")]),
]
MISTRAL = [
    (
        '[TOOL_CALLS] [{"name": "f", "arguments": {"a": 1}}, {"name": "g", "arguments": {}}]',
        call(0, "f", '{"a": 1}') + call(1, "g", "{}"),
    ),
    (
        'Sure. [TOOL_CALLS]f[ARGS]{"a": "]"}[TOOL_CALLS]g{}',
        [Content("Sure."), *call(0, "f", '{"a": "]"}'), *call(1, "g", "{}")],
    ),
    ('[TOOL_CALLS]f[CALL_ID]x1y2z3a4b[ARGS]{"a": 1}', call(0, "f", '{"a": 1}')),
    ("x [TOOL", [Content("x [TOOL")]),
    ('[TOOL_CALLS]["a"] b', [Content('[TOOL_CALLS]["a"] b')]),
]
DEEPSEEK_V3 = [
    (
        "Sure.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>"
        '{"a": "}"}<｜tool▁call▁end｜>'
        "<｜tool▁call▁begin｜>g<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        [Content("Sure."), *call(0, "f", '{"a": "}"}'), *call(1, "g", "{}")],
    ),
    (
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n"
        '{"a": 1}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
        call(0, "f", '{"a": 1}'),
    ),
    ("a <｜tool▁calls▁begin｜> b", [Content("a <｜tool▁calls▁begin｜> b")]),
    (
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>{}",
        [Content("<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>{}")],
    ),
]
KIMI_K2 = [
    (
        "Sure.<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0"
        '<|tool_call_argument_begin|>{"a": 1}<|tool_call_end|><|tool_call_begin|>functions.g:1'
        "<|tool_call_argument_begin|>{}<|tool_call_end|><|tool_calls_section_end|>",
        [Content("Sure."), *call(0, "f", '{"a": 1}'), *call(1, "g", "{}")],
    ),
    ("x <|tool_calls_section_begin|>", [Content("x <|tool_calls_section_begin|>")]),
    (
        "<|tool_calls_section_begin|><|tool_calls_section_end|> y",
        [Content("<|tool_calls_section_begin|><|tool_calls_section_end|> y")],
    ),
]
QWEN3_CODER = [
    (
        "Sure.\n<tool_call>\n<function=f>\n<parameter=a>\n1 <b> \n\n</parameter>\n"
        '<parameter=c>\n\n\nd"é\n</parameter>\n</function>\n</tool_call>\n'
        "<tool_call>\n<function=g>\n</function>\n</tool_call> done",
        [
            Content("Sure."),
            *call(0, "f", '{"a": "1 <b> \\n", "c": "\\n\\nd\\"é"}'),
            *call(1, "g", "{}"),
            Content("done"),
        ],
    ),
    ("<tool_call>\n<func", [Content("<tool_call>\n<func")]),
    ("<tool_call>\n<function=f>\n<parameter=a>\n1", call(0, "f", '{"a": "1')),
    ("<tool_call>\nx</tool_call>", [Content("<tool_call>\nx</tool_call>")]),
]
GLM45 = [
    (
        "<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n<arg_key>b</arg_key>\n"
        "<arg_value> x\n</arg_value>\n</tool_call>\n<tool_call>g</tool_call>",
        [*call(0, "f", '{"a": "1", "b": " x\\n"}'), *call(1, "g", "{}")],
    ),
    ("<tool_call>f g</tool_call>", [Content("<tool_call>f g</tool_call>")]),
]
PYTHONIC = [
    ('[f(a="\\ud800é")]', call(0, "f", '{"a": "\ufffdé"}')),
    ("[f(a=1), g()", [*call(0, "f", '{"a": 1}'), *call(1, "g", "{}")]),
    ("[f(a=1), g(", [Content("[f(a=1), g(")]),
    (
        '[f(a="x)]", b=[1, -2.5, {"c": None}], d=true), g.h()]',
        call(0, "f", '{"a": "x)]", "b": [1, -2.5, {"c": null}], "d": true}') + call(1, "g.h", "{}"),
    ),
    ("<|python_start|>[f()]<|python_end|>", call(0, "f", "{}")),
    ("See [f](x).", [Content("See [f](x).")]),
    ("[f](x)", [Content("[f](x)")]),
    ("[f(1)]", [Content("[f(1)]")]),
    ("[f(a=g())]", [Content("[f(a=g())]")]),
    ("[f(a=1), x", [Content("[f(a=1), x")]),
    ("[f(**a)]", [Content("[f(**a)]")]),
]
FUNCTIONGEMMA = [
    (
        'Sure.\n<start_function_call>call:f{a:<escape>R"o,}me <escape>,b:3,c:[1,<escape>x<escape>,'
        "[]],d:{e:true,<escape>f:<escape>:None}}<end_function_call>"
        "<start_function_call>call:g{}<end_function_call><start_function_response>response:g{}",
        [
            Content("Sure."),
            *call(
                0,
                "f",
                '{"a": "R\\"o,}me ", "b": 3, "c": [1, "x", []], "d": {"e": true, "f:": null}}',
            ),
            *call(1, "g", "{}"),
        ],
    ),
    (
        "<start_function_call>call:f{a:1<end_function_call> done",
        [*call(0, "f", '{"a": 1}'), Content("done")],
    ),
    (
        "<start_function_call>call:f{a:,b, c : x y,}<end_function_call>",
        call(0, "f", '{"a": null, "c": "x y"}'),
    ),
    ("<start_function_call>call:f{a:<escape>x", call(0, "f", '{"a": "x')),
    (
        "<start_function_call>f{a:1}<end_function_call>",
        [Content("<start_function_call>f{a:1}<end_function_call>")],
    ),
    ("a <start_function_call>call:f", [Content("a <start_function_call>call:f")]),
    ("a <end_function_call> b", [Content("a <end_function_call> b")]),
]
GEMMA4 = [
    (
        'Sure.\n<|tool_call>call:f{a:<|"|>R"o,}me <|"|>,b:[1,<|"|>x<|"|>],c:{d:true}}<tool_call|>'
        "<|tool_call>call:g{}<tool_call|><|tool_response>",
        [
            Content("Sure."),
            *call(0, "f", '{"a": "R\\"o,}me ", "b": [1, "x"], "c": {"d": true}}'),
            *call(1, "g", "{}"),
        ],
    ),
    ('<|tool_call>call:f{a:<|"|>x', call(0, "f", '{"a": "x')),
    ("a <tool_call|> b <|tool_call>", [Content("a <tool_call|> b <|tool_call>")]),
]
HARMONY_CALL = (
    "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary "
    'to=functions.f <|constrain|>json<|message|>{"a": "}"}'
)
HARMONIES = [
    (
        "<|channel|>analysis<|message|>Hm.\n<|end|><|start|>assistant<|channel|>final<|message|>"
        "It is. ",
        [Reasoning("Hm."), Content("It is. ")],
    ),
    (HARMONY_CALL, [Reasoning("Hm."), *call(0, "f", '{"a": "}"}')]),
    (
        ' to=functions.f<|channel|>commentary json<|message|>{"a": 1}<|call|><|start|>assistant'
        " to=functions.g<|channel|>commentary<|message|>\n{}<|call|>",
        call(0, "f", '{"a": 1}') + call(1, "g", "{}"),
    ),
    (
        "<|channel|>commentary<|message|>I will see.<|end|><|start|>assistant<|channel|>analysis"
        "<|message|>a<|end|><|start|>assistant<|channel|>analysis<|message|>b<|end|><|start|>"
        "assistant<|channel|>final<|message|>Yes.<|return|>",
        [Content("I will see."), Reasoning("a\nb"), Content("Yes.")],
    ),
    (
        "<|channel|>commentary<|message|>Look:<|end|><|start|>assistant<|channel|>final<|message|>x",
        [Content("Look:\nx")],
    ),
    (
        "<|channel|>analysis<|message|>a<|start|>assistant<|channel|>final<|message|>b",
        [
            Reasoning("a"),
            Content("b"),
        ],
    ),
    ("It is.", [Content("It is.")]),
    (" to be", [Content(" to be")]),
    (" <|chan", [Content(" <|chan")]),
    ("<|channel|>analysis<|message|>Hm <|en", [Reasoning("Hm <|en")]),
    ("<|channel|>fin", []),
    ("<|channel|>analysis<|message|>a<|end|><|start|>assis", [Reasoning("a")]),
    (
        "<|channel|>commentary to=functions.f<|message|>print()<|call|>",
        [Content("<|channel|>commentary to=functions.f<|message|>print()")],
    ),
    ("<|channel|>commentary<|end|>x", [Content("<|channel|>commentary<|end|>x")]),
    ("<|channel|>" + "a" * 600, [Content("<|channel|>" + "a" * 600)]),
    ('<|channel|>commentary to=functions.f<|message|>{"a": [1', call(0, "f", '{"a": [1')),
]
CASES = [
    *(("harmony", *case) for case in HARMONIES),
    *(("gemma4", *case) for case in GEMMA4),
    *(("functiongemma", *case) for case in FUNCTIONGEMMA),
    *(("pythonic", *case) for case in PYTHONIC),
    *(("deepseek_v3", *case) for case in DEEPSEEK_V3),
    *(("kimi_k2", *case) for case in KIMI_K2),
    *(("qwen3_coder", *case) for case in QWEN3_CODER),
    *(("glm45", *case) for case in GLM45),
    *(("hermes", *case) for case in HERMES),
    *(("llama3_json", *case) for case in LLAMA3),
    *(("mistral", *case) for case in MISTRAL),
]


@pytest.mark.parametrize(("parser", "text", "pieces"), CASES)
def test_calls_are_separated_from_content(parser: str, text: str, pieces: list[Piece]) -> None:
    assert pieces_of([text], parser) == pieces


@pytest.mark.parametrize(("parser", "text", "pieces"), CASES)
def test_wherever_a_text_is_cut_its_pieces_are_the_same(
    parser: str, text: str, pieces: list[Piece]
) -> None:
    cuts = [[text[:k], text[k:]] for k in range(1, len(text))]

    read = [pieces_of(parts, parser) for parts in [*cuts, list(text)]]

    assert [one for one in read if one != pieces] == []


@pytest.mark.parametrize(("parser", "text", "pieces"), CASES)
def test_what_calls_no_declared_function_is_text(
    parser: str, text: str, pieces: list[Piece]
) -> None:
    reader = ChoiceReader(context_of(tool_parser=parser, tool_names=("h",)))

    read = merged(reader.read(text, 1) + reader.end())

    assert not any(isinstance(piece, CallStart | CallArguments) for piece in read)
    if not any(isinstance(piece, CallStart) for piece in pieces):
        assert read == pieces


@pytest.mark.parametrize(
    ("parser", "text", "pieces"),
    [
        (
            "qwen3",
            "<think>\nhm  m\n</think>\n\nIt is.",
            [Reasoning("hm  m"), Content("It is.")],
        ),
        ("qwen3", "It is.", [Content("It is.")]),
        ("qwen3", " <thin", [Content(" <thin")]),
        ("qwen3", "<think> hm ", [Reasoning("hm")]),
        (
            "gemma4",
            "<|channel>thought\nhm\n<channel|>It is.",
            [Reasoning("hm"), Content("It is.")],
        ),
        ("gemma4", "<|channel>thought\n<channel|>It is.", [Content("It is.")]),
        ("gemma4", "It is <|channel>", [Content("It is <|channel>")]),
        ("deepseek_r1", "hm\n</think> It is.", [Reasoning("hm"), Content("It is.")]),
        ("deepseek_r1", "<think>hm</think>It is.", [Reasoning("hm"), Content("It is.")]),
        ("deepseek_r1", "hm", [Reasoning("hm")]),
        *(("harmony", *HARMONIES[k]) for k in (0, 3, 4, 5, 6, 9)),
    ],
)
def test_thought_is_separated_from_content(parser: str, text: str, pieces: list[Piece]) -> None:
    assert pieces_of([text], None, parser) == pieces


def test_calls_follow_thought() -> None:
    text = '<think>hm</think>\n<tool_call>{"name": "f", "arguments": {}}</tool_call>'

    assert pieces_of([text], "hermes", "qwen3") == [Reasoning("hm"), *call(0, "f", "{}")]


@pytest.mark.parametrize("names", [None, ("f",)])
def test_one_parser_reads_thoughts_and_calls_of_harmony(names: tuple[str, ...] | None) -> None:
    reader = ChoiceReader(
        context_of(tool_parser="harmony", reasoning_parser="harmony", tool_names=names)
    )

    pieces = merged(reader.read(HARMONY_CALL, 1) + reader.end())

    assert pieces == [Reasoning("Hm."), *call(0, "f", '{"a": "}"}')]
    assert reader.has_called


def test_the_header_of_a_message_that_was_cut_off_is_no_text() -> None:
    assert pieces_of(["<|channel|>commentary to=functions.f<|message|> "], "harmony") == []


def test_the_tokens_of_all_thoughts_of_harmony_are_counted() -> None:
    reader = ChoiceReader(context_of(reasoning_parser="harmony"))
    thought = ["<|channel|>", "analysis", "<|message|>", "Hm", ".", "<|end|>"]

    for token in [*thought, "<|start|>", "assistant", *thought, "<|start|>", "assistant"]:
        reader.read(token, 1)

    assert reader.num_reasoning_tokens == len(thought) * 2 + 2


def test_a_call_of_harmony_without_tools_is_text() -> None:
    header = "<|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>"

    pieces = pieces_of([HARMONY_CALL], None, "harmony")

    assert pieces == [Reasoning("Hm."), Content(header + '{"a": "}"}')]


def test_calls_after_a_single_one_are_dropped() -> None:
    text = '{"name": "f", "parameters": {}}; {"name": "g", "parameters": {}}'

    assert pieces_of([text], "llama3_json", is_single_call=True) == call(0, "f", "{}")


def test_a_forced_mistral_call_needs_no_tag() -> None:
    text = '[{"name": "f", "arguments": {}}]'

    assert pieces_of([text], "mistral", is_forced=True) == call(0, "f", "{}")


WHOLE = [
    ("hermes", None, HERMES[1][0]),
    ("hermes", None, f"{HERMES[1][0]}\n{HERMES[1][0]}"),
    ("hermes", "qwen3", f"<think>hm</think>\n{HERMES[1][0]}"),
    ("hermes", None, HERMES[8][0]),
    ("llama3_json", None, LLAMA3[2][0]),
    ("mistral", None, '[{"name": "f", "arguments": {"a": 1}}, {"name": "g", "arguments": {}}]'),
    ("mistral", None, 'f[ARGS]{"a": "]"}'),
    *(
        (parser, None, f"{opening}{weather}{between}{now}{closing}")
        for parser, (weather, now, between, (opening, closing)) in FORMS.items()
    ),
]


@pytest.mark.parametrize(("parser", "reasoning", "text"), WHOLE)
@pytest.mark.parametrize("is_single_call", [False, True])
def test_wherever_a_forced_choice_is_cut_off_its_calls_are_known_to_be_whole_or_not(
    parser: str, reasoning: str | None, text: str, is_single_call: bool
) -> None:
    outcomes = set()
    for end in range(len(text) + 1):
        reader = ChoiceReader(
            context_of(
                tool_parser=parser,
                reasoning_parser=reasoning,
                is_forced=True,
                is_single_call=is_single_call,
            )
        )
        pieces = reader.read(text[:end], 1) + reader.end()
        arguments = {piece.index: "" for piece in pieces if isinstance(piece, CallStart)}
        for piece in pieces:
            if isinstance(piece, CallArguments):
                arguments[piece.index] += piece.text

        assert not any(isinstance(piece, Content) for piece in pieces)
        are_whole = all(map(is_json, arguments.values()))
        assert reader.has_open_call is not are_whole
        assert reader.has_called is (bool(arguments) and are_whole)
        outcomes.add((bool(arguments), are_whole))

    assert outcomes >= {(False, True), (True, True)}


def is_json(text: str) -> bool:
    try:
        msgspec.json.decode(text)
    except msgspec.DecodeError:
        return False
    return True


@pytest.mark.parametrize(
    ("parser", "text"),
    [
        (
            "qwen3_coder",
            "<tool_call>\n<function=f>\n<parameter=s>\n1\n</parameter>\n<parameter=n>\n1\n"
            '</parameter>\n<parameter=o>\n{"a": [1]}\n</parameter>\n<parameter=t>\nTrue\n'
            "</parameter>\n<parameter=x>\nNaN\n</parameter>\n</function>\n</tool_call>",
        ),
        (
            "glm45",
            "<tool_call>f"
            + "".join(
                f"\n<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>"
                for key, value in zip("snotx", ("1", "1", '{"a": [1]}', "true", "NaN"), strict=True)
            )
            + "\n</tool_call>",
        ),
    ],
)
def test_a_value_is_text_or_json_as_its_schema_says(parser: str, text: str) -> None:
    reader = ChoiceReader(
        context_of(tool_parser=parser, tool_names=("f",), text_parameters={"f": ("s",)})
    )

    pieces = merged([piece for char in text for piece in reader.read(char, 1)] + reader.end())

    arguments = '{"s": "1", "n": 1, "o": {"a": [1]}, "t": true, "x": "NaN"}'
    assert pieces == call(0, "f", arguments)


fragments = st.lists(
    st.sampled_from(
        [
            "<tool_call>",
            "</tool_call>",
            "<|python_tag|>",
            "<start_function_call>",
            "call:f{",
            "a:<escape>b",
            "<escape>",
            "<end_function_call>",
            "<|tool_call>",
            '<|"|>',
            'a:<|"|>b',
            "<tool_call|>",
            "<|tool_response>",
            "<|channel>thought",
            "<channel|>",
            "<start_function_response>",
            "[TOOL_CALLS]",
            "[ARGS]",
            "<|start|>assistant",
            "<|channel|>analysis",
            "<|channel|>final<|message|>",
            "<|channel|>commentary to=functions.f <|constrain|>json",
            " to=functions.g",
            "<|message|>",
            "<|end|>",
            "<｜tool▁calls▁begin｜>",
            "<｜tool▁call▁begin｜>",
            "f<｜tool▁sep｜>",
            "<｜tool▁calls▁end｜>",
            "<|tool_calls_section_begin|>",
            "<|tool_call_begin|>",
            "functions.f:0<|tool_call_argument_begin|>",
            "<|tool_calls_section_end|>",
            "<function=f>",
            "</function>",
            "<parameter=a>",
            "</parameter>",
            "f\n",
            "<arg_key>a</arg_key>\n<arg_value>",
            "</arg_value>",
            "{}",
            "<|python_start|>",
            "<|python_end|>",
            "[f(a=1)]",
            "f(b='x')",
            ")",
            "<think>",
            "</think>",
            '{"name": "f", "arguments": {"a": "b"}}',
            '{"name": "g", "parameters": {"a": [1, {}]}}',
            '{"name"',
            '"arguments": {',
            "}",
            "[",
            "]",
            ", ",
            "; ",
            "\n",
            '"',
            "\\",
            "word ",
            "é",
            "<",
        ]
    ),
    max_size=8,
).map("".join)


@settings(max_examples=400, deadline=None)
@given(
    text=fragments,
    cuts=st.lists(st.integers(0, 200), max_size=12),
    parser=st.sampled_from([None, *TOOL_FORMATS]),
    reasoning=st.sampled_from([None, *THOUGHTS]),
    is_forced=st.booleans(),
)
def test_pieces_do_not_depend_on_how_the_text_is_cut(
    text: str, cuts: list[int], parser: str | None, reasoning: str | None, is_forced: bool
) -> None:
    """Streamed calls equal the calls of the whole answer, with dense indexes from 0."""
    places = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    parts = [text[a:b] for a, b in pairwise(places)]

    whole = pieces_of([text], parser, reasoning, is_forced=is_forced)
    streamed = pieces_of(parts, parser, reasoning, is_forced=is_forced)

    assert streamed == whole
    starts = [piece.index for piece in whole if isinstance(piece, CallStart)]
    assert starts == list(range(len(starts)))


@settings(max_examples=200, deadline=None)
@given(text=fragments, parser=st.sampled_from([name for name in TOOL_FORMATS if name != HARMONY]))
@example(text="\n<|python_tag|>", parser="llama3_json")
@example(text="[TOOL_CALLS][]", parser="mistral")
@example(text="<tool_call><parameter=a>", parser="qwen3_coder")
def test_a_text_without_calls_stays_as_it_is(text: str, parser: str) -> None:
    pieces = pieces_of([text], parser)

    if not any(isinstance(piece, CallStart) for piece in pieces):
        assert "".join(piece.text for piece in pieces if isinstance(piece, Content)) == text
