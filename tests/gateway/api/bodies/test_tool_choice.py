"""Which tools may be called, and what a model that has to call a tool may write."""

import json
from typing import Any, get_args

import pytest

from gateway.api.bodies.call_grammars import MAX_CALLS
from gateway.api.bodies.structured_output import RequestedConstraint, check_now
from gateway.api.render.choice_reader import ChoiceReader, merged
from gateway.text.pieces import CallArguments, CallStart
from gateway.tool_formats import TOOL_FORMATS
from shared.errors import InvalidRequest, Unavailable
from shared.messages import MAX_GRAMMAR_CHARS
from shared.settings import ModelSettings
from tests.support.gateway.rendering import context_of
from tests.support.gateway.tool_calls import FORMS, NAMED, PATCH, TIME, WEATHER, chat, use_of
from tests.support.models.grammars import matches


@pytest.mark.parametrize(("tools", "choice"), [([WEATHER], "none"), (None, None), (None, "auto")])
def test_nothing_is_called_unasked(tools: Any, choice: Any) -> None:
    assert use_of(tools, choice) is None


@pytest.mark.parametrize("choice", [None, "auto", "none", NAMED])
def test_tools_that_cannot_be_called_are_left_out(choice: Any) -> None:
    request = chat([{"type": "web_search"}, TIME, PATCH])

    use = use_of([{"type": "web_search"}, TIME], choice)

    assert request.ignored_tools == {"web_search"}
    assert (use is None) is (choice == "none")
    assert use is None or [tool.name for tool in use.tools] == ["get_time"]


def test_there_are_calls_of_every_format() -> None:
    assert FORMS.keys() == TOOL_FORMATS.keys()


def test_workers_can_be_set_to_every_format() -> None:
    settable = get_args(ModelSettings.model_fields["tool_parser"].annotation)

    assert set(settable) == {"auto", "none", *TOOL_FORMATS}


def test_a_parser_may_need_to_know_what_is_text() -> None:
    properties = {
        "a": {"type": "string"},
        "b": {"enum": ["x", "y"]},
        "c": {"description": "anything"},
        "d": {"type": ["string", "null"]},
        "e": {"type": "integer"},
        "f": {"anyOf": [{"type": "string"}, {"type": "integer"}]},
        "g": {"enum": ["x", 1]},
    }
    tool = {"type": "function", "function": {"name": "t", "parameters": {"properties": properties}}}

    tagged, other = (use_of([tool], parser=parser) for parser in ("qwen3_coder", "hermes"))

    assert tagged is not None
    assert tagged.text_parameters() == {"t": ("a", "b", "c")}
    assert other is not None
    assert other.text_parameters() is None


def allowed(mode: str, *names: str) -> dict[str, Any]:
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


@pytest.mark.parametrize("mode", ["auto", "required"])
def test_only_allowed_tools_may_be_called_but_all_are_in_the_prompt(mode: str) -> None:
    use = use_of([WEATHER, TIME], allowed(mode, "get_time"))

    assert use is not None
    assert use.is_required is (mode == "required")
    assert [tool.name for tool in use.tools] == ["get_weather", "get_time"]
    assert [tool.name for tool in use.callable.values()] == ["get_time"]


@pytest.mark.parametrize("mode", ["auto", "required"])
def test_allowed_tools_that_cannot_be_called_are_left_out(mode: str) -> None:
    choice = allowed(mode, "get_time")
    choice["allowed_tools"]["tools"].append({"type": "web_search"})

    use = use_of([{"type": "web_search"}, WEATHER, TIME], choice)

    assert use is not None
    assert [tool.name for tool in use.callable.values()] == ["get_time"]


NAMELESS = {"mode": "auto", "tools": [{"type": "function"}]}
OTHERS = {"mode": "required", "tools": [{"type": "web_search"}]}


@pytest.mark.parametrize(
    "choice",
    [
        allowed("auto", "nothing"),
        allowed("required"),
        {"type": "allowed_tools", "allowed_tools": NAMELESS},
        {"type": "allowed_tools", "allowed_tools": OTHERS},
    ],
)
def test_what_is_allowed_has_to_be_there(choice: Any) -> None:
    with pytest.raises(InvalidRequest) as caught:
        use_of([WEATHER], choice)

    assert caught.value.param == "tool_choice"


def custom(**more: Any) -> dict[str, Any]:
    return {"type": "custom", "custom": {"name": "sql", **more}}


def test_a_custom_tool_is_a_function_of_a_text() -> None:
    use = use_of([TIME, custom(description="Asks the database.")])

    assert use is not None
    assert use.custom == ("sql",)
    assert (use.tools[1].name, use.tools[1].description) == ("sql", "Asks the database.")
    assert use.tools[1].parameters["properties"] == {"input": {"type": "string"}}


@pytest.mark.parametrize("choice", [custom(), allowed("required") | {"type": "allowed_tools"}])
def test_a_custom_tool_may_be_chosen(choice: dict[str, Any]) -> None:
    if "allowed_tools" in choice:
        choice["allowed_tools"]["tools"] = [custom()]

    use = use_of([custom(), TIME], choice)

    assert use is not None
    assert use.is_required
    assert [tool.name for tool in use.callable.values()] == ["sql"]


def grammar(syntax: str, definition: str) -> dict[str, Any]:
    return {"type": "grammar", "grammar": {"syntax": syntax, "definition": definition}}


@pytest.mark.parametrize("parser", ["hermes", "llama3_json", "kimi_k2", "mistral"])
def test_a_regular_expression_binds_the_input(parser: str) -> None:
    use = use_of(
        [custom(format=grammar("regex", 'SELECT "[a-z]+"|\\n'))], "required", parser=parser
    )

    assert use is not None
    (schema,) = use.schemas()
    assert matches(schema.constraint, json.dumps({"input": 'SELECT "é'.replace("é", 'ab"')}))
    assert matches(schema.constraint, json.dumps({"input": "\n"}))
    assert not matches(schema.constraint, json.dumps({"input": "DROP"}))
    assert schema.param == "tools[0].custom.format"
    check_now(RequestedConstraint("tools", use.constraint(None), use.schemas()))


def test_a_lark_grammar_is_described_to_the_model() -> None:
    use = use_of([custom(description="Asks.", format=grammar("lark", 'start: "a"+'))])

    assert use is not None
    assert use.tools[0].description == 'Asks.\n\nThe input matches this Lark grammar:\nstart: "a"+'


@pytest.mark.parametrize(
    ("tool", "param"),
    [
        ({"type": "custom"}, "tools[0].custom"),
        (custom(format={"type": "grammar", "syntax": "lark"}), "tools[0].custom.format"),
        (custom(format=grammar("regex", "(")), "tools[0].custom.format"),
    ],
)
def test_a_custom_tool_that_is_not_whole_is_refused(tool: dict[str, Any], param: str) -> None:
    def call() -> None:
        use = use_of([tool], "required")
        assert use is not None
        check_now(RequestedConstraint("tools", use.constraint(None), use.schemas()))

    with pytest.raises(InvalidRequest) as caught:
        call()

    assert caught.value.param == param


def test_a_model_that_may_call_is_free() -> None:
    use = use_of([WEATHER, TIME], "auto")

    assert use is not None
    assert not use.is_required
    assert [tool.name for tool in use.tools] == ["get_weather", "get_time"]


@pytest.mark.parametrize("parser", FORMS)
def test_a_model_that_has_to_call_writes_what_its_parser_reads(parser: str) -> None:
    weather, now, between, (opening, closing) = FORMS[parser]
    use = use_of([WEATHER, TIME], "required", parser=parser)
    assert use is not None
    constraint = use.constraint(None)
    check_now(RequestedConstraint("tools", constraint))
    text = f"{opening}{weather}{between}{now}{closing}"

    assert matches(constraint, text)
    assert not matches(constraint, f"{opening}{weather.replace('city', 'town')}{closing}")
    assert not matches(constraint, "It rains.")
    reader = ChoiceReader(context_of(tool_parser=parser, is_forced=True))
    assert merged(reader.read(text, 1) + reader.end()) == [
        CallStart(0, "get_weather"),
        CallArguments(0, '{"city": "Rome"}'),
        CallStart(1, "get_time"),
        CallArguments(1, "{}"),
    ]


@pytest.mark.parametrize("parser", FORMS)
def test_a_named_tool_is_called_once(parser: str) -> None:
    weather, now, between, (opening, closing) = FORMS[parser]
    use = use_of([WEATHER, TIME], NAMED, parser=parser)
    assert use is not None
    constraint = use.constraint(None)

    assert use.is_single
    assert matches(constraint, f"{opening}{now}{closing}")
    assert not matches(constraint, f"{opening}{weather}{closing}")
    assert not matches(constraint, f"{opening}{now}{between}{now}{closing}")


@pytest.mark.parametrize("parser", FORMS)
def test_a_model_that_cannot_stop_calling_is_stopped(parser: str) -> None:
    _, now, between, (opening, closing) = FORMS[parser]
    use = use_of([TIME], "required", parser=parser)
    assert use is not None
    constraint = use.constraint(None)

    def calls(count: int) -> str:
        return f"{opening}{between.join([now] * count)}{closing}"

    assert matches(constraint, calls(1))
    assert matches(constraint, calls(MAX_CALLS))
    assert not matches(constraint, calls(MAX_CALLS + 1))


@pytest.mark.parametrize("choice", ["required", NAMED])
def test_a_model_that_has_to_call_writes_at_most_one_blank(choice: Any) -> None:
    use = use_of([TIME], choice, parser="llama3_json")
    assert use is not None
    constraint = use.constraint(None)
    call = FORMS["llama3_json"][1]

    assert matches(constraint, call.replace(": {", ":{"))
    assert not matches(constraint, call.replace(": {", ":  {"))


@pytest.mark.parametrize("choice", ["auto", "required"])
def test_calls_have_no_blanks_that_json_has_not(choice: Any) -> None:
    use = use_of([TIME], choice)
    assert use is not None
    constraint = use.constraint(None) if choice == "required" else use.constraint_after_tag(None)
    assert constraint is not None
    call = FORMS["hermes"][1]

    assert "\n" in call
    assert all(matches(constraint, call.replace("\n", blank)) for blank in ("", " ", "\t"))
    assert not any(matches(constraint, call.replace("\n", blank)) for blank in ("\xa0", "\u3000"))


def test_a_model_thinks_before_it_has_to_call() -> None:
    use = use_of([TIME], "required")
    assert use is not None
    constraint = use.constraint("deepseek_r1")

    assert matches(constraint, "hm</think>\n" + FORMS["hermes"][1])


@pytest.mark.parametrize(
    ("tools", "choice", "param"),
    [
        ([TIME, {"type": "web_search"}], "required", "tools[1].type"),
        ([3], None, "tools[0]"),
        ([{"type": "function"}], None, "tools[0].function"),
        ([{"type": "function", "function": {}}], None, "tools[0].function.name"),
        ([{"type": "function", "function": {"name": "a b"}}], None, "tools[0].function.name"),
        ([{"type": "function", "function": {"name": "a" * 300}}], None, "tools[0].function.name"),
        (
            [TIME, {"type": "function", "function": {"name": "a", "parameters": [1]}}],
            None,
            "tools[1].function.parameters",
        ),
        ([TIME] * 129, None, "tools"),
        (None, "required", "tool_choice"),
        ([TIME], "sometimes", "tool_choice"),
        ([TIME], {"type": "function", "function": {"name": "other"}}, "tool_choice"),
        ([TIME], {"type": "allowed_tools"}, "tool_choice.allowed_tools"),
        ([TIME], 3, "tool_choice"),
    ],
)
def test_what_cannot_be_called_is_named(tools: Any, choice: Any, param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        use_of(tools, choice)

    assert caught.value.param == param


def test_a_deep_schema_is_refused() -> None:
    schema: dict[str, Any] = {}
    for _ in range(100):
        schema = {"items": schema}

    with pytest.raises(InvalidRequest) as caught:
        use_of([{"type": "function", "function": {"name": "a", "parameters": schema}}])

    assert caught.value.param == "tools[0].function.parameters"


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "f"}}])
def test_a_schema_that_nobody_can_obey_is_named_and_not_its_grammar(choice: Any) -> None:
    broken = {"type": "object", "properties": {"x": {"type": "nonsense"}}}
    use = use_of(
        [TIME, {"type": "function", "function": {"name": "f", "parameters": broken}}],
        choice,
    )
    assert use is not None
    constraint = use.constraint(None)

    with pytest.raises(InvalidRequest) as caught:
        check_now(RequestedConstraint("tools", constraint, use.schemas()))

    assert caught.value.param == "tools[1].function.parameters"
    assert caught.value.message == "tools[1].function.parameters: Invalid type: nonsense"


def test_a_model_whose_calls_nobody_can_read_refuses_tools() -> None:
    with pytest.raises(InvalidRequest, match="does not support tool calls"):
        use_of([TIME], parser=None)


def test_a_tool_that_is_too_long_for_a_grammar_can_be_called() -> None:
    schema = {"type": "object", "properties": {"x": {"enum": ["x" * MAX_GRAMMAR_CHARS]}}}
    use = use_of([{"type": "function", "function": {"name": "f", "parameters": schema}}])

    assert use is not None
    assert use.constraint_after_tag(None) is None


@pytest.mark.parametrize("choice", ["required", NAMED])
def test_any_model_can_be_made_to_call(choice: Any) -> None:
    use = use_of([TIME], choice, parser=None)
    assert use is not None

    assert use.parser == "hermes"
    assert matches(use.constraint(None), FORMS["hermes"][1])


def test_a_function_without_parameters_is_called_without_arguments() -> None:
    use = use_of([TIME], "required")
    assert use is not None

    assert not matches(use.constraint(None), FORMS["hermes"][1].replace("{}", '{"zone": "UTC"}'))


def test_while_no_worker_is_there_nobody_knows_how_to_call() -> None:
    with pytest.raises(Unavailable):
        chat([TIME]).tool_use(None)
