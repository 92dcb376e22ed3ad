"""What a model may write as calls, in the form of its family."""

import time
from contextlib import suppress
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.api.bodies.grammars import after_reasoning
from gateway.api.bodies.structured_output import RequestedConstraint, check_now
from gateway.api.bodies.tool_choice import ToolUse
from gateway.api.render.choice_reader import ChoiceReader, merged
from gateway.text.pieces import CallArguments, CallStart, Content
from gateway.tool_formats import TOOL_FORMATS
from shared.errors import InvalidRequest
from shared.messages import MAX_GRAMMAR_CHARS, Constraint
from tests.support.gateway.rendering import context_of
from tests.support.gateway.tool_calls import FORMS, TIME, WEATHER, use_of
from tests.support.models.grammars import matches

TAGGED = [parser for parser, form in TOOL_FORMATS.items() if form.tag and not form.has_other_tokens]
"""The families whose calls begin with a tag."""


def calls_of(parser: str, count: int = 2) -> str:
    """A call of `WEATHER`, and of `TIME`."""
    weather, now, between, (opening, closing) = FORMS[parser]
    tag = "[TOOL_CALLS]" if parser == "mistral" else ""
    return f"{tag}{opening}{between.join((weather, now)[:count])}{closing}"


def bound(parser: str, reasoning: str | None = None, *, is_parallel: bool = True) -> Constraint:
    use = use_of([WEATHER, TIME], "auto", parser=parser, is_parallel=is_parallel)
    assert use is not None
    constraint = use.constraint_after_tag(reasoning)
    assert constraint is not None
    check_now(RequestedConstraint("tools", constraint))
    return constraint


@pytest.mark.parametrize("parser", FORMS)
@pytest.mark.parametrize(
    ("answer", "text"),
    [
        (Constraint(kind="json_schema", source='{"properties": {"a": {}}}'), '{"a": 1}'),
        (Constraint(kind="regex", source="a/b"), "a/b"),
        (Constraint(kind="lark", source='start: "yes" | "no"'), "yes"),
    ],
)
def test_a_model_that_may_call_calls_or_answers(parser: str, answer: Constraint, text: str) -> None:
    weather, _, _, (opening, closing) = FORMS[parser]
    use = use_of([WEATHER], "auto", parser=parser)
    assert use is not None
    tag = "[TOOL_CALLS]" if parser == "mistral" else ""
    call = f"{tag}{opening}{weather}{closing}"

    constraint = use.constraint(None, answer)

    check_now(RequestedConstraint("tools", constraint))
    assert matches(constraint, text)
    assert matches(constraint, call)
    assert not matches(constraint, f"{call}{text}")
    assert not matches(constraint, "It rains.")
    reader = ChoiceReader(context_of(tool_parser=parser))
    assert merged(reader.read(text, 1) + reader.end()) == [Content(text)]


HARMONY_THOUGHT = "<|channel|>analysis<|message|>Hm.<|end|>"
HARMONY_TEXT = "<|channel|>final<|message|>"


@pytest.mark.parametrize("thought", ["", f"{HARMONY_THOUGHT}<|start|>assistant"])
def test_harmony_calls_or_answers_after_its_thought(thought: str) -> None:
    weather, now, between, _ = FORMS["harmony"]
    use = use_of([WEATHER, TIME], "auto", parser="harmony")
    assert use is not None
    answer = Constraint(kind="json_schema", source='{"properties": {"a": {}}}')

    either, forced = use.constraint("harmony", answer), use.constraint("harmony")
    format_alone = after_reasoning(answer, "harmony")

    check_now(RequestedConstraint("tools", either))
    check_now(RequestedConstraint("tools", forced))
    for constraint in (either, format_alone):
        assert matches(constraint, f'{thought}{HARMONY_TEXT}{{"a": 1}}')
        assert not matches(constraint, f"{thought}{HARMONY_TEXT}It rains.")
        assert not matches(constraint, f'{thought}{{"a": 1}}')
    for constraint in (either, forced):
        assert matches(constraint, f"{thought}{weather}{between}{now}")
        assert not matches(constraint, f"{thought}{weather.replace('city', 'town')}")
    assert not matches(forced, f'{thought}{HARMONY_TEXT}{{"a": 1}}')


@pytest.mark.parametrize("parser", TAGGED)
def test_what_follows_the_tag_of_a_call_is_a_call(parser: str) -> None:
    constraint, calls = bound(parser), calls_of(parser)

    assert matches(constraint, "")
    assert matches(constraint, "It <rains>.")
    assert matches(constraint, calls)
    assert matches(constraint, f"Let me see.\n{calls}\nDone.")
    assert not matches(constraint, calls.replace("weather", "whether"))
    assert not matches(constraint, calls.replace("city", "town"))
    assert not matches(constraint, f"{TOOL_FORMATS[parser].tag}rain")


@pytest.mark.parametrize("parser", TAGGED)
@pytest.mark.parametrize(
    ("reasoning", "thought"),
    [
        ("qwen3", "<think>\nhm {}\n</think>\n\n"),
        ("deepseek_r1", "hm {}</think>"),
        ("gemma4", "<|channel>thought\nhm {}\n<channel|>"),
    ],
)
def test_calls_are_bound_after_a_thought_and_not_in_it(
    parser: str, reasoning: str, thought: str
) -> None:
    constraint, calls, tag = bound(parser, reasoning), calls_of(parser), TOOL_FORMATS[parser].tag
    thought = thought.format(f"{tag}rain")

    assert matches(constraint, f"{thought}{calls}\nDone.")
    assert matches(constraint, f"{thought}It rains.")
    assert matches(constraint, thought.partition("rain")[0])
    assert not matches(constraint, f"{thought}{tag}rain")
    assert not matches(constraint, f"{thought}{calls.replace('city', 'town')}")


@pytest.mark.parametrize("parser", TAGGED)
@pytest.mark.parametrize("reasoning", ["qwen3", "gemma4"])
def test_calls_are_bound_without_a_thought(parser: str, reasoning: str) -> None:
    constraint, calls = bound(parser, reasoning), calls_of(parser)

    assert matches(constraint, "")
    assert matches(constraint, "It rains.")
    assert matches(constraint, f"Let me see.\n{calls}\nDone.")
    assert not matches(constraint, f"{TOOL_FORMATS[parser].tag}rain")
    assert not matches(constraint, f"{calls}\n{TOOL_FORMATS[parser].tag}rain")


@pytest.mark.parametrize("parser", TAGGED)
@pytest.mark.parametrize("reasoning", [None, "qwen3"])
def test_a_single_call_is_the_end(parser: str, reasoning: str | None) -> None:
    constraint = bound(parser, reasoning, is_parallel=False)

    assert matches(constraint, f"Look: {calls_of(parser, 1)}")
    assert matches(constraint, "It rains.")
    assert not matches(constraint, calls_of(parser))


@pytest.mark.parametrize("parser", sorted(TOOL_FORMATS.keys() - set(TAGGED)))
def test_text_without_tags_is_free(parser: str) -> None:
    use = use_of([WEATHER], "auto", parser=parser)

    assert use is not None
    assert use.constraint_after_tag(None) is None


PLAN = {
    "type": "function",
    "function": {
        "name": "plan",
        "parameters": {
            "type": "object",
            "properties": {
                "text": {"type": "string"},
                "unit": {"$ref": "#/$defs/unit"},
                "days": {"type": "integer"},
                "dry": {"type": "boolean"},
                "tags": {"type": "array", "items": {"type": "string"}},
                "more": {"type": "object"},
                "id": {"type": ["string", "integer"]},
            },
            "required": ["text", "days"],
            "$defs": {"unit": {"type": "string", "enum": ["c", "f"]}},
        },
    },
}
ARGUMENTS = {
    "text": 'a "b" ]}',
    "unit": "c",
    "days": 3,
    "dry": True,
    "tags": ["x", "y"],
    "more": {"k": [1, None]},
    "id": 7,
}


def tagged(before: str, after: str, end: str) -> dict[str, str]:
    values = {
        name: value if isinstance(value, str) else msgspec.json.encode(value).decode()
        for name, value in ARGUMENTS.items()
    }
    values["more"] = '{"k": [1, null]}'
    values["tags"] = '["x", "y"]'
    return {name: f"{before}{name}{after}{value}{end}" for name, value in values.items()}


def gemma(quote: str) -> dict[str, str]:
    return {
        "days": "days:3",
        "dry": "dry:true",
        "id": "id:7",
        "more": "more:{k:[1,null]}",
        "tags": f"tags:[{quote}x{quote},{quote}y{quote}]",
        "text": f'text:{quote}a "b" ]}}{quote}',
        "unit": f"unit:{quote}c{quote}",
    }


PYTHON = {
    "text": 'text="a \\"b\\" ]}"',
    "unit": 'unit="c"',
    "days": "days=3",
    "dry": "dry=True",
    "tags": "tags=['x', \"y\"]",
    "more": 'more={"k": [1, None]}',
    "id": "id=7",
}
WRITTEN = {
    "functiongemma": (
        "<start_function_call>call:plan{",
        gemma("<escape>"),
        ",",
        "}<end_function_call>",
    ),
    "gemma4": ("<|tool_call>call:plan{", gemma('<|"|>'), ",", "}<tool_call|>"),
    "glm45": (
        "<tool_call>plan\n",
        tagged("<arg_key>", "</arg_key>\n<arg_value>", "</arg_value>"),
        "\n",
        "\n</tool_call>",
    ),
    "pythonic": ("[plan(", PYTHON, ", ", ")]"),
    "qwen3_coder": (
        "<tool_call>\n<function=plan>\n",
        tagged("<parameter=", ">\n", "\n</parameter>"),
        "\n",
        "\n</function>\n</tool_call>",
    ),
}
"""What precedes arguments, each argument, and what stands between them and follows them."""


def plan_of(parser: str) -> tuple[ToolUse, Constraint]:
    use = use_of([PLAN], "required", parser=parser)
    assert use is not None
    constraint = use.constraint(None)
    check_now(RequestedConstraint("tools", constraint))
    return use, constraint


def plan(parser: str, **changed: str | None) -> str:
    opening, arguments, between, closing = WRITTEN[parser]
    written = {**arguments, **changed}
    return f"{opening}{between.join(filter(None, written.values()))}{closing}"


@pytest.mark.parametrize("parser", WRITTEN)
def test_arguments_are_written_as_the_family_does(parser: str) -> None:
    use, constraint = plan_of(parser)
    text = plan(parser)
    context = context_of(
        tool_parser=parser, tool_names=("plan",), text_parameters=use.text_parameters()
    )
    reader = ChoiceReader(context)

    assert matches(constraint, text)
    started, arguments = merged(reader.read(text, 1) + reader.end())
    assert started == CallStart(0, "plan")
    assert isinstance(arguments, CallArguments)
    assert msgspec.json.decode(arguments.text) == ARGUMENTS


@pytest.mark.parametrize("parser", WRITTEN)
def test_arguments_match_their_schemas(parser: str) -> None:
    _, constraint = plan_of(parser)
    arguments = WRITTEN[parser][1]

    assert matches(constraint, plan(parser, **dict.fromkeys(["unit", "dry", "tags", "more", "id"])))
    assert not matches(constraint, plan(parser, text=None))
    assert not matches(constraint, plan(parser, days=None))
    for name, (good, bad) in {
        "unit": ("c", "k"),
        "days": ("3", "x"),
        "dry": ("rue", "ruth"),
        "tags": ("[", ""),
        "more": ("{", "["),
        "text": ("text", "txet"),
    }.items():
        before, found, after = arguments[name].rpartition(good)
        assert found
        assert not matches(constraint, plan(parser, **{name: f"{before}{bad}{after}"})), name


ROUTE = {
    "type": "function",
    "function": {
        "name": "route",
        "parameters": {
            "type": "object",
            "properties": {"from": {"$ref": "#/$defs/place"}},
            "required": ["from"],
            "$defs": {
                "place": {
                    "type": "object",
                    "properties": {
                        "at": {"type": "array", "items": {"$ref": "#/$defs/point"}},
                        "name": {"enum": ["Rome"]},
                        "next to": {"$ref": "#/$defs/place"},
                    },
                    "required": ["name"],
                },
                "point": {
                    "type": "object",
                    "properties": {"x": {"type": "integer"}, "y": {"type": "integer"}},
                },
            },
        },
    },
}
PLACES = {
    "functiongemma": "{at:[{x:1,y:2},{y:3},{}],name:'Rome','next to':{name:'Rome'}}",
    "gemma4": "{at:[{x:1,y:2},{y:3},{}],name:'Rome','next to':{name:'Rome'}}",
    "pythonic": "{'at': [{'x': 1, 'y': 2}, {'y': 3}, {}], 'name': 'Rome', "
    "'next to': {'name': 'Rome'}}",
}
QUOTES = {"functiongemma": "<escape>", "gemma4": '<|"|>', "pythonic": '"'}


@pytest.mark.parametrize("parser", PLACES)
def test_objects_in_arguments_match_their_schemas(parser: str) -> None:
    use = use_of([ROUTE], "required", parser=parser)
    assert use is not None
    constraint = use.constraint(None)
    check_now(RequestedConstraint("tools", constraint))
    opening, _, _, closing = WRITTEN[parser]
    opening = opening.replace("plan", "route")
    place = PLACES[parser]

    def written(place: str) -> str:
        name = "from=" if parser == "pythonic" else "from:"
        return opening + name + place.replace("'", QUOTES[parser]) + closing

    assert matches(constraint, written(place))
    for good, bad in [("at", "it"), ("Rome", "Oslo"), ("1", "true"), ("y", "z"), ("name", "x")]:
        assert not matches(constraint, written(place.replace(good, bad, 1))), bad


def test_schemas_that_recur_have_a_small_grammar() -> None:
    names = {f"p{k}": {"$ref": "#/$defs/all"} for k in range(40)}
    schema = {
        "type": "object",
        "properties": names,
        "$defs": {"all": {"type": "object", "properties": names}},
    }
    tool = {"type": "function", "function": {"name": "f", "parameters": schema}}

    use = use_of([tool], "required", parser="pythonic")

    assert use is not None
    assert len(use.constraint(None).source) < 50_000


@pytest.mark.parametrize("parser", FORMS)
def test_a_tool_that_takes_anything_is_given_anything(parser: str) -> None:
    anything = {
        "type": "function",
        "function": {"name": "get_weather", "parameters": {"type": "object"}},
    }
    use = use_of([anything], "required", parser=parser)
    assert use is not None
    weather, _, _, (opening, closing) = FORMS[parser]

    assert matches(use.constraint(None), f"{opening}{weather}{closing}")


words = st.sampled_from(
    ["", "a", 'b"', "type", "enum", "const", "$ref", "#", "#/$defs/a", "string", "array", "object"]
)


def objects(parts: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    named = st.dictionaries(words, parts, max_size=3)
    optional = {
        "type": words,
        "enum": st.lists(words),
        "items": parts,
        "properties": named,
        "required": st.lists(words),
        "$ref": words,
        "$defs": named,
        "additionalProperties": parts,
    }
    return st.fixed_dictionaries({}, optional=optional)


schemas = st.recursive(words | st.none() | st.booleans(), objects, max_leaves=8)


@settings(max_examples=30, deadline=None)
@given(schema=objects(schemas))
@pytest.mark.parametrize("parser", FORMS)
def test_any_schema_has_a_grammar(parser: str, schema: dict[str, Any]) -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
    try:
        use = use_of([tool], "required", parser=parser)
    except InvalidRequest:
        return
    assert use is not None

    assert use.constraint("qwen3").source.startswith("start: ")


@pytest.mark.parametrize("parser", FORMS)
def test_a_hundred_tools_fit_into_a_grammar(parser: str) -> None:
    kinds = ("string", "integer", "array", "object", "boolean")
    schema = {
        "type": "object",
        "properties": {f"p{k}": {"type": kinds[k % len(kinds)]} for k in range(10)},
        "required": ["p0"],
    }
    functions = ({"name": f"tool_{k}", "parameters": schema} for k in range(100))
    tools = [{"type": "function", "function": function} for function in functions]

    for choice in ("required", "auto"):
        use = use_of(tools, choice, parser=parser)
        assert use is not None
        assert use.constraint("qwen3", Constraint(kind="regex", source="x")).source
        assert (use.constraint_after_tag("qwen3") is not None) is (parser in TAGGED)


NAMES = [f"p{k}" for k in range(8_000)]
LONG_DEFINITIONS = {
    "type": "object",
    "properties": {
        **{f"one_{k}": {"$ref": "#/$defs/texts"} for k in range(500)},
        **{
            f"list_{k}": {"type": "array", "maxItems": k, "items": {"$ref": "#/$defs/texts"}}
            for k in range(500)
        },
    },
    "$defs": {
        "texts": {"enum": [f"{k:0100}" for k in range(2_000)]},
        **{str(k): {} for k in range(10_000)},
    },
}
CHAIN = {
    "type": "object",
    "$defs": {"0": {}, **{str(k + 1): {"$ref": f"#/$defs/{k}"} for k in range(2_500)}},
    "properties": {},
    "$ref": "#/$defs/2500",
}
LONG_ENUM = {
    "type": "object",
    "properties": {name: {"$ref": "#/$defs/any"} for name in NAMES},
    "required": NAMES,
    "$defs": {"any": {"enum": [*range(8_000), "x"]}},
}


@pytest.mark.parametrize("parser", FORMS)
@pytest.mark.parametrize(
    "schema",
    [
        pytest.param(LONG_DEFINITIONS, id="definitions"),
        pytest.param(CHAIN, id="chain"),
        pytest.param(LONG_ENUM, id="enum"),
    ],
)
def test_what_makes_a_long_grammar_is_soon_too_long(parser: str, schema: dict[str, Any]) -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
    use = use_of([tool], parser=parser)
    assert use is not None
    began = time.process_time()

    bound = use.constraint_after_tag(None)
    use.text_parameters()
    with suppress(InvalidRequest):
        use.constraint(None)

    assert time.process_time() - began < 1
    assert bound is None or len(bound.source) <= MAX_GRAMMAR_CHARS


@pytest.mark.parametrize("parser", FORMS)
def test_tools_that_are_too_long_together_are_refused(parser: str) -> None:
    function = {"name": "f", "parameters": LONG_DEFINITIONS}
    use = use_of([{"type": "function", "function": function}], "required", parser=parser)
    assert use is not None

    with pytest.raises(InvalidRequest, match="longer than 65536 characters together") as caught:
        use.constraint(None)

    assert caught.value.param == "tools"


def test_equal_parameters_of_many_tools_fit_into_a_grammar() -> None:
    zones = {"enum": [f"Continent/City {k}" for k in range(600)]}
    schema = {"type": "object", "properties": {"zone": zones}}
    functions = ({"name": f"tool_{k}", "parameters": schema} for k in range(25))
    tools = [{"type": "function", "function": function} for function in functions]

    use = use_of(tools, "required", parser="glm45")

    assert use is not None
    assert use.constraint(None).source


@pytest.mark.parametrize("text", ["", 'a "b"\\n', "x\ny", "é/"])
def test_a_listed_text_is_escaped_in_python(text: str) -> None:
    schema = {"type": "object", "properties": {"a": {"enum": [text]}}, "required": ["a"]}
    tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
    use = use_of([tool], "required", parser="pythonic")
    assert use is not None
    arguments = msgspec.json.encode(text).decode()
    reader = ChoiceReader(context_of(tool_parser="pythonic"))

    assert matches(use.constraint(None), f"[f(a={arguments})]")
    _, written = reader.read(f"[f(a={arguments})]", 1) + reader.end()
    assert isinstance(written, CallArguments)
    assert msgspec.json.decode(written.text) == {"a": text}
