"""Structured output: what is asked for, what it allows, and what is refused before any queue."""

import asyncio
import time
from contextlib import suppress
from typing import Any

import pytest

from gateway.api.bodies.grammars import after_reasoning
from gateway.api.bodies.parsing import MAX_DEPTH, read
from gateway.api.bodies.structured_output import (
    RequestedConstraint,
    ResponseFormat,
    check,
    check_now,
    translated,
    translated_now,
    wanted_constraint,
)
from shared.errors import InvalidRequest
from shared.messages import Constraint
from tests.shared.grammars.test_gbnf import WORST
from tests.support.models.grammars import matches

AGE = {
    "type": "object",
    "properties": {"age": {"type": "integer"}},
    "required": ["age"],
    "additionalProperties": False,
}
BOB = '{"age": 42}'
_MAX_LOOP_S = 0.02
"""Maximum CPU time that reading a body may take from the event loop."""


def wanted_of(**body: Any) -> RequestedConstraint | None:
    if wanted_format := body.get("response_format"):
        body["response_format"] = read(wanted_format, ResponseFormat, "response_format")
    return wanted_constraint(body)


def constraint_of(**body: Any) -> Constraint:
    wanted = wanted_of(**body)
    assert wanted is not None
    wanted = translated_now(wanted)
    check_now(wanted)
    return wanted.constraint


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "object"}
    for _ in range(depth):
        schema = {"type": "array", "items": schema}
    return schema


@pytest.mark.parametrize(
    ("body", "good", "bad"),
    [
        ({"response_format": {"type": "json_object"}}, '{"a": [1]}', "[1]"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": AGE}}},
            BOB,
            '{"age": "x"}',
        ),
        ({"response_format": {"type": "json_schema", "schema": AGE}}, BOB, "{}"),
        ({"response_format": {"type": "json_object", "schema": AGE}}, BOB, "{}"),
        ({"guided_json": AGE}, BOB, "{}"),
        ({"guided_json": '{"type": "integer"}'}, "7", "x"),
        ({"guided_regex": r"\d{3}-\d{4}"}, "555-1234", "555"),
        ({"guided_choice": ['say "hi"', "ü\n"]}, 'say "hi"', "say"),
        ({"guided_grammar": 'start: "a" "b"+'}, "abb", "a"),
        ({"guided_grammar": 'root ::= "a" ("b" | "c")'}, "ac", "a"),
        ({"guided_grammar": 'start: "a" "::=" "b"'}, "a::=b", "a"),
        ({"structured_outputs": {"json": AGE}}, BOB, "{}"),
        ({"structured_outputs": {"regex": "a+"}}, "aa", "b"),
        ({"structured_outputs": {"choice": ["x", "y"]}}, "y", "z"),
        ({"structured_outputs": {"grammar": 'start: "a"'}}, "a", "b"),
        ({"structured_outputs": {"json_object": True}}, "{}", "1"),
    ],
)
def test_what_is_asked_for_is_what_is_allowed(body: dict[str, Any], good: str, bad: str) -> None:
    constraint = constraint_of(**body)

    assert matches(constraint, good)
    assert not matches(constraint, bad)


@pytest.mark.parametrize(
    "body", [{}, {"response_format": {"type": "text"}}, {"guided_regex": None}]
)
def test_nothing_is_asked_for(body: dict[str, Any]) -> None:
    assert wanted_of(**body) is None


def test_one_grammar_may_have_two_names() -> None:
    grammar = 'start: "a" "b"+'

    constraint = constraint_of(guided_grammar=grammar, structured_outputs={"grammar": grammar})

    assert constraint == Constraint(kind="lark", source=grammar)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "no"}}}},
            "response_format.json_schema.schema",
        ),
        ({"guided_json": "{"}, "guided_json"),
        ({"guided_json": [1]}, "guided_json"),
        ({"guided_json": {"$ref": "https://example.com/x"}}, "guided_json"),
        ({"guided_json": {"$ref": "#/nowhere"}}, "guided_json"),
        ({"guided_json": nested(MAX_DEPTH)}, "guided_json"),
        ({"guided_json": {"enum": ["x" * 70_000]}}, "guided_json"),
        ({"guided_regex": "(a"}, "guided_regex"),
        ({"guided_regex": "(?=a)b"}, "guided_regex"),
        ({"guided_regex": 3}, "guided_regex"),
        ({"guided_regex": "a" * 70_000}, "guided_regex"),
        ({"guided_choice": []}, "guided_choice"),
        ({"guided_choice": ["a", ""]}, "guided_choice"),
        ({"guided_choice": ["a"] * 1025}, "guided_choice"),
        ({"guided_choice": "a"}, "guided_choice"),
        ({"guided_grammar": "start: nothing"}, "guided_grammar"),
        ({"guided_grammar": 'root ::= "a'}, "guided_grammar"),
        ({"structured_outputs": {"structural_tag": "x"}}, "structured_outputs.structural_tag"),
        ({"structured_outputs": {"k" * 9999: 1}}, f"structured_outputs.{'k' * 64}"),
        ({"guided_regex": "a", "guided_choice": ["a"]}, "guided_choice"),
        ({"guided_regex": "a", "response_format": {"type": "json_object"}}, "guided_regex"),
    ],
)
def test_what_no_worker_could_obey_is_refused(body: dict[str, Any], param: str) -> None:
    """A bad schema or regular expression is a 400 before queueing."""
    with pytest.raises(InvalidRequest) as caught:
        constraint_of(**body)

    assert caught.value.param == param
    assert caught.value.message.startswith(param)


@pytest.mark.parametrize(
    ("schema", "reason"),
    [
        (
            {"properties": {"a": {"uniqueItems": True}}},
            "properties.a.uniqueItems: is not supported;",
        ),
        ({"$ref": "#"}, "no finite value matches: a reference leads back to itself"),
        ({"items": {"$ref": "#/$defs/x"}}, "the reference #/$defs/x names nothing"),
        ({"$ref": "https://x.test/y"}, "the reference https://x.test/y leaves the schema;"),
        ({"patternProperties": {"^a": {}, "b$": {}}}, "the patterns /^a/ and /b$/ of patternProp"),
        (
            {"allOf": [{"type": "null"}, {"type": "integer"}]},
            "no value matches: incompatible types",
        ),
        (
            {"$defs": {"a": {"$ref": "#/$defs/a", "minLength": 1}}, "$ref": "#/$defs/a"},
            "no finite value matches: a reference leads back to itself",
        ),
    ],
)
@pytest.mark.parametrize("parser", [None, "deepseek_r1"])
def test_a_refusal_says_what_to_change(
    parser: str | None, schema: dict[str, Any], reason: str
) -> None:
    wanted = wanted_of(guided_json=schema)
    assert wanted is not None
    whole = RequestedConstraint(wanted.param, after_reasoning(wanted.constraint, parser), (wanted,))

    with pytest.raises(InvalidRequest) as caught:
        check_now(whole)

    assert caught.value.param == "guided_json"
    assert caught.value.message.startswith(f"guided_json: {reason}")
    assert "<" not in caught.value.message


def test_a_grammar_that_never_ends_is_refused_in_plain_words() -> None:
    with pytest.raises(InvalidRequest) as caught:
        constraint_of(guided_grammar='start: rule\nrule: rule "a"')

    assert caught.value.message == (
        "guided_grammar: nothing matches: a rule or a reference leads back to itself only"
    )


def test_what_costs_too_much_is_refused_by_name() -> None:
    with pytest.raises(InvalidRequest, match="guided_json: it takes too much") as caught:
        constraint_of(guided_json={"type": "integer", "multipleOf": 999_983})

    assert caught.value.param == "guided_json"


async def test_one_is_checked_beside_the_event_loop() -> None:
    wanted = wanted_constraint({"guided_choice": [f"choice {time.time()}"]})
    assert wanted is not None
    checking = asyncio.create_task(check(wanted, "tenant"))

    await asyncio.sleep(0)

    assert not checking.done()
    await checking


@pytest.mark.parametrize("grammar", WORST, ids=lambda grammar: grammar[:24])
@pytest.mark.parametrize("fields", [1, 2])
def test_the_worst_grammars_cost_the_event_loop_little(fields: int, grammar: str) -> None:
    body: dict[str, Any] = {"guided_grammar": grammar, "structured_outputs": {"grammar": grammar}}
    body = dict(list(body.items())[:fields])

    def cpu_s() -> float:
        began = time.thread_time()
        with suppress(InvalidRequest):  # too long
            wanted_constraint(body)
        return time.thread_time() - began

    # The collection of the whole session's garbage takes longer.
    assert min(cpu_s() for _ in range(3)) < _MAX_LOOP_S


async def test_a_grammar_is_translated_beside_the_event_loop() -> None:
    wanted = wanted_constraint({"guided_grammar": f'root ::= "{time.time()}"'})
    assert wanted is not None
    translating = asyncio.create_task(translated(wanted, "tenant"))

    await asyncio.sleep(0)

    assert not translating.done()
    assert (await translating).constraint.source.startswith("%llguidance {}\nstart: ")


def test_a_mistake_in_a_grammar_of_llama_cpp_is_named_with_its_line() -> None:
    with pytest.raises(InvalidRequest) as caught:
        constraint_of(structured_outputs={"grammar": 'root ::= "a"\nword ::= wrod'})

    assert caught.value.param == "structured_outputs.grammar"
    assert caught.value.message == (
        "structured_outputs.grammar: line 2: the rule 'wrod' is not defined"
    )


@pytest.mark.parametrize(
    ("parser", "good", "bad"),
    [
        ("deepseek_r1", "hm {\n</think>\n\n" + BOB, BOB),
        ("qwen3", "<think>hm</think>" + BOB, "<think>hm" + BOB),
        ("qwen3", BOB, "hm" + BOB),
        (None, BOB, "<think>hm</think>" + BOB),
    ],
)
def test_a_model_thinks_before_it_obeys(parser: str | None, good: str, bad: str) -> None:
    constraint = after_reasoning(constraint_of(guided_json=AGE), parser)

    assert matches(constraint, good)
    assert not matches(constraint, bad)


def test_a_schema_is_the_same_after_a_thought() -> None:
    ages = {"type": "object", "properties": {"age": {"type": "integer"}}}
    constraint = after_reasoning(constraint_of(guided_json=ages), "deepseek_r1")

    assert matches(constraint, "x</think>" + BOB)
    assert not matches(constraint, "x</think>" + BOB.replace(" ", "  "))
    assert not matches(constraint, "x</think>" + BOB.replace("age", "years"))


def test_a_thought_comes_before_a_regex_with_slashes() -> None:
    constraint = after_reasoning(constraint_of(guided_regex=r"a/\/b\\/"), "deepseek_r1")

    assert matches(constraint, "x</think>a//b\\/")
