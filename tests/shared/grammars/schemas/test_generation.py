"""What a JSON schema allows a model to write."""

import json
import time
from typing import Any

import pytest

from shared.grammars import for_generation, grammar_source
from shared.messages import Constraint
from tests.support.models.grammars import matches

A: dict[str, Any] = {"type": "object", "properties": {"a": {"type": "integer"}}}
B: dict[str, Any] = {"type": "object", "properties": {"b": {"type": "integer"}}}
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


def refusal_of(schema: Any) -> str:
    with pytest.raises(ValueError, match=":") as caught:
        for_generation(schema)
    return str(caught.value)


@pytest.mark.parametrize("name", ["path", "uuid4", "password", "binary", "idn-email", "x", 3])
def test_an_unknown_format_binds_nothing(name: object) -> None:
    assert allows({"type": "string", "format": name}, '"anything"')


@pytest.mark.parametrize("name", ["date", "uuid", "ipv4"])
def test_a_known_format_binds(name: str) -> None:
    assert not allows({"type": "string", "format": name}, '"anything"')


P: dict[str, Any] = {
    "type": "object",
    "properties": {"name": {"type": "string"}},
    "required": ["name"],
}
C: dict[str, Any] = {
    "type": "object",
    "properties": {"title": {"type": "string"}},
    "required": ["title"],
}
NAMED, TITLED = '{"name": "x"}', '{"title": "x"}'


def one_of(*options: Any) -> dict[str, Any]:
    return {"$defs": {"P": P, "C": C}, "oneOf": list(options)}


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        (one_of({"$ref": "#/$defs/P"}, {"$ref": "#/$defs/C"}), [NAMED, TITLED], ["{}"]),
        (one_of(P, C), [NAMED, TITLED], ['{"name": "x", "title": "x"}']),
        (
            {"type": "object", "oneOf": [{"required": ["a"]}, {"required": ["b"]}]},
            ['{"a": 1}', '{"b": 1, "c": 2}'],
            ['{"a": 1, "b": 1}', "{}", "1"],
        ),
        (
            one_of({**P, "additionalProperties": True}, {**C, "additionalProperties": True}),
            ['{"name": "x", "y": 1}', TITLED],
            ['{"name": "x", "title": "x"}'],
        ),
        (one_of({"type": "string"}, {"type": "null"}), ['"x"', "null"], ["1"]),
        (one_of({"const": 1}, {"const": 2.0}, {"const": True}), ["1", "true"], ["3"]),
        (one_of({"type": ["string", "null"]}, {"enum": [1, None, 2]}), ['"x"', "2"], ["null"]),
        (
            one_of({"type": "number", "maximum": 3}, {"type": "integer", "minimum": 4}),
            ["2.5", "4"],
            ["3.5"],
        ),
        (
            one_of(
                *(
                    {
                        "type": "object",
                        "properties": {"kind": {"const": k}, "x": {"type": kind}},
                        "required": ["kind"],
                    }
                    for k, kind in enumerate(["integer", "null"])
                )
            ),
            ['{"kind": 0, "x": 5}', '{"kind": 1, "x": null}'],
            ['{"kind": 1, "x": 5}'],
        ),
        (
            {"type": "array", "items": {"oneOf": [{"oneOf": [P, C]}, {"type": "integer"}]}},
            [f"[{NAMED}, 1]"],
            ['["x"]'],
        ),
        (one_of(*({"const": f"c{k}", "title": "x"} for k in range(200))), ['"c199"'], ['"c200"']),
    ],
)
def test_a_value_matches_exactly_one_alternative(
    schema: dict[str, Any], good: list[str], bad: list[str]
) -> None:
    for text in good:
        assert allows(schema, text)
    for text in bad:
        assert not allows(schema, text)


@pytest.mark.parametrize(
    "options",
    [
        [{"type": "integer"}, {"type": "number"}],
        [{"enum": ["a"]}, {"type": "string"}],
        [A, B],
        [P, {**P, "properties": {**P["properties"], "x": {}}, "required": ["name", "x"]}],
        [{"$ref": "#/$defs/P"}, {"$ref": "#/$defs/P"}],
        [{"type": "integer", "minimum": k} for k in range(70)],
    ],
)
def test_alternatives_that_overlap_are_refused_by_name(options: list[Any]) -> None:
    refusal = refusal_of({"properties": {"x": one_of(*options)}, "$defs": {"P": P}})

    assert refusal.startswith("properties.x.oneOf: ")
    assert "use anyOf" in refusal


LONG = {"minimum": -(2**63), "maximum": 2**63 - 1}


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        ({"type": "integer", **LONG}, ["9007199254740993", "-9223372036854774784"], [f"{2**63}"]),
        ({"type": "integer", "minimum": -(2**63)}, ["-9000000000000000000"], [f"-{2**63 + 1}"]),
        (
            {"type": "integer", "minimum": 2 * 10**18},
            [f"{2 * 10**18}", f"{2**62}"],
            ["1", f"{2**63}"],
        ),
        (
            {"type": "number", "maximum": 1e19},
            ["9000000000000000000", "-1"],
            ["20000000000000000000"],
        ),
        ({"type": "number", "minimum": -3.4e38, "maximum": 3.4e38}, ["0.5"], ["1" + "0" * 39]),
        ({"type": "number", "minimum": -1.8e308, "maximum": 1.8e308}, ["0.5"], ["x"]),
        (
            {"type": "integer", "minimum": 2**53 + 1, "maximum": 2**53 + 5},
            [f"{2**53 + 2}", f"{2**53 + 4}"],
            [f"{2**53}", f"{2**53 + 6}"],
        ),
        ({"type": "number", "multipleOf": 0.05}, ["0.15", "2"], ["0.12"]),
    ],
)
def test_bounds_of_any_size_hold(schema: dict[str, Any], good: list[str], bad: list[str]) -> None:
    for text in good:
        assert allows(schema, text)
    for text in bad:
        assert not allows(schema, text)


MAP: dict[str, Any] = {"type": "object", "additionalProperties": {"type": "integer"}}


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        ({**A, "required": ["a"], "minProperties": 2}, ['{"a": 1, "x": 2}'], ['{"a": 1}']),
        ({"type": "object", "properties": {}, "minProperties": 1}, ['{"x": 2}'], ["{}"]),
        ({**A, "minProperties": 1}, ['{"a": 1}'], ["{}", BOTH]),
        ({**A, "maxProperties": 1}, ['{"a": 1}', "{}"], [BOTH]),
        ({**A, **MAP, "minProperties": 2}, ['{"a": 1, "b": 2}', '{"b": 1, "c": 2}'], ['{"a": 1}']),
        ({**A, **MAP, "maxProperties": 1}, ['{"a": 1}', '{"b": 1}', "{}"], [BOTH]),
        (
            {"type": ["object", "null"], "properties": {k: {} for k in "abc"}, "minProperties": 2},
            ['{"a": 1, "c": 1}', '{"a": 1, "b": 1, "c": 1}', "null"],
            ['{"c": 1}'],
        ),
    ],
)
def test_properties_are_counted(schema: dict[str, Any], good: list[str], bad: list[str]) -> None:
    for text in good:
        assert allows(schema, text)
    for text in bad:
        assert not allows(schema, text)


def test_no_property_is_spelled_in_another_way() -> None:
    schema = {**A, "additionalProperties": {"type": "string"}}

    assert allows(schema, '{"b": "x"}')
    assert not allows(schema, r'{"\u0061": "x"}')
    assert not allows(schema, r'{"\u0062": "x"}')


def test_control_characters_are_written_where_a_value_has_them() -> None:
    assert allows({"const": "a\x01"}, r'"a\u0001"')


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        ({"type": "array", "items": {"type": "null"}, "uniqueItems": False}, "[null, null]", "[1]"),
        (
            {"type": "array", "prefixItems": [{"type": "null"}], "additionalItems": True},
            "[null, 1]",
            "[1]",
        ),
        ({**MAP, "propertyNames": {"pattern": "^x"}}, '{"x1": 1}', '{"y": 1}'),
        ({**MAP, "propertyNames": {"enum": ["x", "y"]}}, '{"y": 1}', '{"z": 1}'),
        ({**MAP, "propertyNames": {"type": "string"}}, '{"z": 1}', '{"z": ""}'),
        ({**A, "unevaluatedProperties": False}, '{"a": 1}', BOTH),
        ({**A, "unevaluatedProperties": {"type": "integer"}}, BOTH, '{"b": ""}'),
        ({"type": "string", "if": {"const": "x"}, "minLength": 1.0}, '"y"', '""'),
        ({"type": "integer", "not": False, "dependentRequired": {}}, "1", '""'),
    ],
)
def test_a_keyword_is_written_in_words_that_are_known(
    schema: dict[str, Any], good: str, bad: str
) -> None:
    assert allows(schema, good)
    assert not allows(schema, bad)


@pytest.mark.parametrize(
    ("schema", "path"),
    [
        ({"uniqueItems": True}, "uniqueItems"),
        ({"contains": {}}, "contains"),
        ({"not": {}}, "not"),
        ({"if": {}, "then": {}}, "if"),
        ({"dependentRequired": {"a": ["b"]}}, "dependentRequired"),
        ({"propertyNames": {"minLength": 1}}, "propertyNames"),
        ({"allOf": [{}], "unevaluatedProperties": False}, "unevaluatedProperties"),
        ({"multipleOf": 0.07}, "multipleOf"),
        ({"multipleOf": 0}, "multipleOf"),
        ({"const": {"id": [2**53 + 1]}}, "const"),
        ({"enum": [-(2**64)]}, "enum"),
        ({"minimum": 2**63}, "minimum"),
        ({"maximum": -1e19}, "maximum"),
        ({"type": "object", "properties": {"a": {}}, "required": ["a"], "minProperties": 2,
          "additionalProperties": False}, "minProperties"),
        ({"properties": {str(k): {} for k in range(9)}, "maxProperties": 4}, "maxProperties"),
    ],
)  # fmt: skip
def test_what_cannot_be_obeyed_is_refused_with_its_path(schema: dict[str, Any], path: str) -> None:
    assert refusal_of(schema).startswith(f"{path}: ")
    assert refusal_of({"items": {"anyOf": [{}, schema]}}).startswith(f"items.anyOf.1.{path}: ")
    used = {"$defs": {"x": schema}, "properties": {"a": {"$ref": "#/$defs/x"}}}
    assert refusal_of(used).startswith(f"$defs.x.{path}: ")
    assert allows({"$defs": {"x": schema}, "type": "null"}, "null")


def test_multiples_that_are_too_large_together_are_refused() -> None:
    schema = {"allOf": [{"multipleOf": 65_537}, {"multipleOf": 65_536}], "type": "integer"}

    assert refusal_of(schema) == "multipleOf: the numbers are too large together"


@pytest.mark.parametrize(
    "schema",
    [
        {"$ref": "#"},
        {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"},
        {"type": "object", "properties": {"x": {"$ref": "#"}}, "required": ["x"]},
        {"type": "array", "items": {"$ref": "#"}, "minItems": 1},
        {"anyOf": [{"$ref": "#"}, {"allOf": [{"$ref": "#"}]}]},
    ],
)
def test_a_schema_without_a_finite_value_is_refused(schema: dict[str, Any]) -> None:
    assert refusal_of(schema).startswith(
        "no finite value matches: a reference leads back to itself"
    )


def test_a_schema_that_comes_to_an_end_may_refer_to_itself() -> None:
    tree = {**A, "properties": {"next": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}}}

    assert allows({**tree, "required": ["next"]}, '{"next": {"next": null}}')
