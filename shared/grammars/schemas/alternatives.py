"""``oneOf`` as ``anyOf``: alternatives that exclude each other, or are made to.

JSON Schema allows a value that matches exactly one alternative. An object of one alternative does
not match another alternative if it leaves out a property that the other alternative requires.
"""

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from shared.grammars.schemas.tree import Schema, Subschema, Tree

_TYPES = frozenset(("null", "boolean", "number", "string", "array", "object"))
_EXCLUSIVE_FORMATS = frozenset(("date", "date-time", "time", "duration", "uuid", "ipv4", "ipv6"))
"""No string has two of these formats."""
_MAX_COMPARED = 32
"""Maximum number of alternatives that are compared with each other."""
_MAX_MERGED = 16
_MAX_STEPS = 4096
"""Maximum number of comparisons and looks at schemas, after which nothing more is known."""
_MAX_DEPTH = 3


def exclusive_alternatives(place: Subschema, tree: Tree) -> bool:
    """Replace ``oneOf``; returns whether the schema had it. Raises `ValueError`."""
    options = place.schema.get("oneOf")
    if not isinstance(options, list):
        return False
    facts = [_facts(option, tree) for option in options]
    context = _types(place.schema.get("type"))
    if not _have_own_values(facts):
        if len(options) > _MAX_COMPARED:
            place.refuse("oneOf", f"more than {_MAX_COMPARED} alternatives; use anyOf")
        options = [
            _without_others(place, k, options, facts, context, tree) for k in range(len(options))
        ]
    del place.schema["oneOf"]
    if "anyOf" in place.schema:
        place.schema["allOf"] = [*place.schema.get("allOf", []), {"anyOf": options}]
    else:
        place.schema["anyOf"] = options
    return True


@dataclass(slots=True)
class _Facts:
    """What all values of a schema have in common, or less."""

    types: frozenset[str] = _TYPES
    values: frozenset[tuple[str, str]] | None = None
    """The type and text of each, if they are listed."""
    required: dict[str, None] = field(default_factory=dict)
    properties: dict[str, list[Any]] = field(default_factory=dict)
    closed: list[frozenset[str]] = field(default_factory=list)
    """The only properties that there are, from each schema that says so."""
    low: float = float("-inf")
    high: float = float("inf")
    formats: frozenset[str] = frozenset()

    def forbids(self, name: str) -> bool:
        return any(name not in names for names in self.closed)


def _without_others(
    place: Subschema,
    k: int,
    options: list[Any],
    facts: list[_Facts],
    context: frozenset[str],
    tree: Tree,
) -> Any:
    """An alternative without the values that also match another alternative, and possibly without
    further values."""
    types = facts[k].types & context
    forbidden: dict[str, Any] = {}
    for j, other in enumerate(facts):
        if j == k:
            continue
        tree.num_steps += 1
        if tree.num_steps > _MAX_STEPS:
            place.refuse("oneOf", "too many alternatives to compare; use anyOf")
        common = _common_types(facts[k], other, tree) & types
        if "object" in common and (name := _missing(facts[k], other, forbidden)) is not None:
            forbidden[name] = False
            common -= {"object"}
        types -= common
        if not types:
            place.refuse(
                "oneOf",
                f"alternatives {min(j, k)} and {max(j, k)} do not exclude each other; use anyOf, "
                'set "additionalProperties" to false in both, or give them a required property '
                "with different constants",
            )
    option = options[k]
    if types == facts[k].types & context and not forbidden:
        return option
    narrowed: Schema = {"type": sorted(types)} if types != facts[k].types else {}
    if isinstance(option, dict) and "$ref" in option and option.keys() <= {"$ref", "title"}:
        option = tree.resolved(option)
    is_plain = isinstance(option, dict) and not {"$ref", "allOf", "anyOf", "oneOf"} & option.keys()
    if is_plain and isinstance(option.get("properties", {}), dict) and not narrowed:
        return {**option, "properties": {**option.get("properties", {}), **forbidden}}
    return {"allOf": [option, {**narrowed, "properties": forbidden}]}


def _missing(own: _Facts, other: _Facts, forbidden: Iterable[str]) -> str | None:
    """A property that the other alternative requires and the own alternative does not, if possible
    a property that the own alternative forbids already or does not declare."""
    names = [name for name in other.required if name not in own.required]
    known = next((name for name in names if name in forbidden), None)
    undeclared = next((name for name in names if name not in own.properties), None)
    return known or undeclared or next(iter(names), None)


def _have_own_values(facts: list[_Facts]) -> bool:
    """Whether all alternatives list their values, or the values of a required property, and have no
    value in common, as in discriminated unions."""
    if _are_disjoint(one.values for one in facts):
        return True
    shared = [name for name in facts[0].required if all(name in one.required for one in facts)]
    are_objects = all(one.types == {"object"} for one in facts)
    return are_objects and any(
        _are_disjoint(
            next((_values(part) for part in one.properties.get(name, ()) if _values(part)), None)
            for one in facts
        )
        for name in shared
    )


def _are_disjoint(sets: Iterable[frozenset[tuple[str, str]] | None]) -> bool:
    seen: set[tuple[str, str]] = set()
    for values in sets:
        if values is None or seen & values:
            return False
        seen |= values
    return True


def _common_types(one: _Facts, other: _Facts, tree: Tree, depth: int = 0) -> frozenset[str]:
    """The types of which a value may match both."""
    common = set(one.types & other.types)
    if one.values is not None and other.values is not None:
        common &= {kind for kind, _ in one.values & other.values}
    if one.high < other.low or other.high < one.low:
        common.discard("number")
    formats = one.formats | other.formats
    if len(formats) > 1 and formats <= _EXCLUSIVE_FORMATS:
        common.discard("string")
    if "object" in common and _exclude_by_property(one, other, tree, depth):
        common.discard("object")
    return frozenset(common)


def _exclude_by_property(one: _Facts, other: _Facts, tree: Tree, depth: int) -> bool:
    for name in {**one.required, **other.required}:
        if one.forbids(name) or other.forbids(name):
            return True
        if depth >= _MAX_DEPTH:
            continue
        for part in one.properties.get(name, ()):
            for opposite in other.properties.get(name, ()):
                facts = _facts(part, tree), _facts(opposite, tree)
                if not _common_types(*facts, tree, depth + 1):
                    return True
    return False


def _facts(schema: Any, tree: Tree, depth: int = 0) -> _Facts:
    """The facts of a schema and of all that it combines, as far as they are known."""
    facts = _Facts()
    waiting, num_merged = [schema], 0
    while waiting and num_merged < _MAX_MERGED and tree.num_steps < _MAX_STEPS:
        tree.num_steps += 1
        part = tree.resolved(waiting.pop())
        num_merged += 1
        if part is False:
            facts.types = frozenset()
        if not isinstance(part, dict):
            continue
        _merge(facts, part)
        if "$ref" in part:
            waiting.append({"$ref": part["$ref"]})
        if isinstance(parts := part.get("allOf"), list):
            waiting += parts
        for name in ("anyOf", "oneOf") if depth < _MAX_DEPTH else ():
            if isinstance(parts := part.get(name), list):
                options = [_facts(option, tree, depth + 1) for option in parts]
                facts.types &= frozenset().union(*(option.types for option in options))
                lists = [option.values for option in options if option.values is not None]
                if facts.values is None and len(lists) == len(options):
                    facts.values = frozenset().union(*lists)
    return facts


def _merge(facts: _Facts, schema: Schema) -> None:
    facts.types &= _types(schema.get("type"))
    if (values := _values(schema)) is not None:
        facts.values = values if facts.values is None else facts.values & values
        facts.types &= {kind for kind, _ in values}
    if isinstance(required := schema.get("required"), list):
        facts.required |= {name: None for name in required if isinstance(name, str)}
    properties = schema.get("properties")
    properties = properties if isinstance(properties, dict) else {}
    for name, part in properties.items():
        facts.properties.setdefault(name, []).append(part)
        if part is False:
            facts.closed.append(frozenset(properties.keys() - {name}))
    if schema.get("additionalProperties") is False and not schema.get("patternProperties"):
        facts.closed.append(frozenset(properties))
    facts.low = max(facts.low, *_numbers(schema, "minimum", "exclusiveMinimum"))
    facts.high = min(facts.high, *_numbers(schema, "maximum", "exclusiveMaximum"))
    if isinstance(name := schema.get("format"), str):
        facts.formats |= {name}


def _numbers(schema: Schema, *names: str) -> list[float]:
    default = float("-inf") if "minimum" in names else float("inf")
    found = [schema[name] for name in names if name in schema]
    numbers = [one for one in found if isinstance(one, int | float) and not isinstance(one, bool)]
    return [*numbers, default]


def _types(names: Any) -> frozenset[str]:
    if names is None:
        return _TYPES
    names = names if isinstance(names, list) else [names]
    return frozenset("number" if name == "integer" else name for name in names)


def _values(schema: Any) -> frozenset[tuple[str, str]] | None:
    """The values that a schema lists, if it does."""
    if not isinstance(schema, dict):
        return None
    values = schema.get("enum", [schema["const"]] if "const" in schema else None)
    return frozenset(map(_value, values)) if isinstance(values, list) else None


def _value(value: Any) -> tuple[str, str]:
    """The type and text of a value, which are the same for equal values."""
    match value:
        case bool():
            return "boolean", str(value)
        case int() | float():
            return "number", str(int(value) if value == value // 1 else value)
        case None:
            return "null", ""
        case str():
            return "string", value
        case list():
            return "array", json.dumps(list(map(_value, value)))
        case _:
            items = sorted((name, _value(one)) for name, one in value.items())
            return "object", json.dumps(items)
