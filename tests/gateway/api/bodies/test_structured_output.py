"""Structured output: what is asked for, what it allows, and what is refused before any queue."""

import asyncio
import time
from itertools import islice, pairwise, product
from string import ascii_lowercase
from typing import Any

import pytest

from gateway.api.bodies.grammars import after_reasoning
from gateway.api.bodies.parsing import MAX_DEPTH, read
from gateway.api.bodies.structured_output import (
    RequestedConstraint,
    ResponseFormat,
    check,
    check_now,
    wanted_constraint,
)
from shared.errors import InvalidRequest
from shared.messages import Constraint
from tests.support.models.grammars import matches

AGE = {
    "type": "object",
    "properties": {"age": {"type": "integer"}},
    "required": ["age"],
    "additionalProperties": False,
}
BOB = '{"age": 42}'


def wanted_of(**body: Any) -> RequestedConstraint | None:
    if wanted_format := body.get("response_format"):
        body["response_format"] = read(wanted_format, ResponseFormat, "response_format")
    return wanted_constraint(body)


def constraint_of(**body: Any) -> Constraint:
    wanted = wanted_of(**body)
    assert wanted is not None
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


def test_rules_that_precede_those_they_need_are_translated_soon() -> None:
    names = ["".join(letters) for letters in islice(product(ascii_lowercase, repeat=3), 6_000)]
    steps = (f"{name}::={needed}" for name, needed in pairwise(["root", *names]))
    grammar = "\n".join([*steps, f'{names[-1]}::="x"'])
    began = time.process_time()

    wanted = wanted_constraint({"guided_grammar": grammar})

    assert time.process_time() - began < 1
    assert wanted is not None
    assert f"{names[-2]}: {names[-1]}\n{names[-1]}: ".upper() in wanted.constraint.source


def test_rules_of_a_translated_grammar_recur() -> None:
    constraint = constraint_of(
        guided_grammar='root ::= item-list "."\n'
        'item-list ::= item (comma item)*\nitem ::= letter+ | "(" item-list ")"\n'
        'comma ::= "," space?\nspace ::= " "\nletter ::= [a-z]'
    )

    assert matches(constraint, "a, (b,(cd)), e.")
    assert not matches(constraint, "a, (b,(cd), e.")


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
