"""What a JSON schema allows a model to write."""

import json
import time
from typing import Any

import pytest

from shared.grammars import for_generation, grammar_source
from shared.messages import Constraint
from tests.support.models.grammars import matches

A = {"type": "object", "properties": {"a": {"type": "integer"}}}
B = {"type": "object", "properties": {"b": {"type": "integer"}}}
BOTH = '{"a": 1, "b": 2}'


def allows(schema: Any, text: str) -> bool:
    return matches(Constraint(kind="json_schema", source=json.dumps(schema)), text)


@pytest.mark.parametrize(
    ("schema", "declared", "undeclared"),
    [
        (A, '{"a": 1}', BOTH),
        ({"type": "object", "properties": {}}, "{}", '{"a": 1}'),
        ({"type": "array", "items": A}, '[{"a": 1}]', f"[{BOTH}]"),
        ({"properties": {"x": A}}, '{"x": {"a": 1}}', f'{{"x": {BOTH}}}'),
        ({"anyOf": [A, B, {"type": "null"}]}, '{"b": 2}', BOTH),
        ({"$defs": {"A": A}, "$ref": "#/$defs/A"}, '{"a": 1}', BOTH),
        ({"$defs": {"A": A}, "allOf": [{"$ref": "#/$defs/A"}]}, '{"a": 1}', BOTH),
        ({"type": "object", "additionalProperties": A}, '{"x": {"a": 1}}', f'{{"x": {BOTH}}}'),
        ({**A, "patternProperties": {"^x": {}}}, '{"a": 1, "x1": 2}', BOTH),
    ],
)
def test_an_object_has_the_properties_that_are_declared(
    schema: dict[str, Any], declared: str, undeclared: str
) -> None:
    assert allows(schema, declared)
    assert not allows(schema, undeclared)


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object"},
        {**A, "additionalProperties": True},
        {**A, "additionalProperties": {"type": "integer"}},
        {**A, "required": ["a", "b"]},
    ],
)
def test_an_object_has_more_properties_if_they_are_asked_for(schema: dict[str, Any]) -> None:
    assert allows(schema, BOTH)


@pytest.mark.parametrize(
    "schema",
    [
        {"allOf": [A, B]},
        {**A, "anyOf": [B, {"type": "object", "properties": {"c": {}}, "required": ["c"]}]},
        {"$defs": {"A": A}, "allOf": [{"$ref": "#/$defs/A"}, B]},
        {"$defs": {"B": B}, **A, "$ref": "#/$defs/B"},
        {"$defs": {"B": B, "C": {"$ref": "#/$defs/B"}}, **A, "$ref": "#/$defs/C"},
        {"definitions": {"b/~": B}, **A, "$ref": "#/definitions/b~1~0"},
    ],
)
def test_schemas_that_describe_one_object_together_do_not_exclude_each_other(
    schema: dict[str, Any],
) -> None:
    assert allows(schema, BOTH)


def test_a_chain_of_references_takes_linear_time() -> None:
    chain = {str(k + 1): {"$ref": f"#/$defs/{k}"} for k in range(2_500)}
    schema = {"$defs": {"0": B, **chain}, **A, "$ref": "#/$defs/2500"}
    began = time.process_time()

    result = for_generation(schema)

    assert time.process_time() - began < 1
    assert result["$defs"]["0"] == B


@pytest.mark.parametrize("target", ["http://x/$defs/B", "#B", "#/$defs/A", "#/enum/9", "#/enum/x"])
def test_a_reference_that_names_nothing_shares_nothing(target: str) -> None:
    schema = {"$defs": {"B": B}, **A, "enum": [{}], "$ref": target}

    assert for_generation(schema)["$defs"]["B"]["additionalProperties"] is False


@pytest.mark.parametrize("keyword", ["const", "default", "enum", "examples"])
def test_values_within_a_schema_are_no_schemas(keyword: str) -> None:
    schema = {"type": "object", keyword: [{"properties": {"a": 1}}]}

    assert for_generation(schema) == {**schema, "x-guidance": for_generation({})["x-guidance"]}


@pytest.mark.parametrize(
    ("text", "is_allowed"),
    [
        ('{"a":1,"b":[1,2]}', True),
        ('{"a": 1, "b": [1, 2]}', True),
        ('{"a":  1}', False),
        ('{ "a": 1}', False),
        ('{"a": 1,\n"b": []}', False),
        ('{"a": 1}\n', False),
    ],
)
@pytest.mark.parametrize("options", [{}, {"whitespace_pattern": "\\s*"}])
def test_no_whitespace_but_a_space_between_values(
    options: dict[str, Any], text: str, is_allowed: bool
) -> None:
    numbers = {"type": "array", "items": {"type": "integer"}}
    schema = {"properties": {"a": {"type": "integer"}, "b": numbers}, "x-guidance": options}

    assert allows(schema, text) is is_allowed


def test_a_schema_that_is_nested_too_deeply_is_refused() -> None:
    source = '{"items": ' * 5000 + "{}" + "}" * 5000

    with pytest.raises(ValueError, match="nested too deeply"):
        grammar_source(Constraint(kind="json_schema", source=source))
