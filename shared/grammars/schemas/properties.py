"""The number of properties, which llguidance counts only if all declared properties are
required."""

from itertools import chain, combinations
from typing import Any

from shared.grammars.schemas.tree import Schema, Subschema

_MAX_OPTIONAL = 5
"""Maximum number of optional properties that are counted: each subset is an alternative."""
_OF_OBJECT = ("properties", "patternProperties", "additionalProperties", "required")
_COUNTS = ("minProperties", "maxProperties")


def count_properties(place: Subschema) -> None:
    """Replace ``minProperties`` and ``maxProperties`` by what llguidance can count. Raises
    `ValueError`."""
    schema = place.schema
    types = schema.get("type", "object")
    if "object" not in (types if isinstance(types, list) else [types]):
        return
    least, most = (schema.get(name) for name in _COUNTS)
    required, optional = _names(schema)
    is_closed = schema.get("additionalProperties") is False and not schema.get("patternProperties")
    if not isinstance(least, int) or least <= len(required):
        schema.pop("minProperties", None)
        least = 0
    if is_closed and isinstance(most, int) and most >= len(required) + len(optional):
        del schema["maxProperties"]
    most = schema.get("maxProperties")
    if is_closed and least > len(required) + len(optional):
        place.refuse(
            "minProperties", f"the object can have {len(required) + len(optional)} properties only"
        )
    if not optional or not (least or isinstance(most, int)):
        return
    if is_closed and least <= len(required) + 1 and most in (None, len(required) + 1):
        return
    if len(optional) > _MAX_OPTIONAL:
        keyword = "minProperties" if least else "maxProperties"
        place.refuse(keyword, f"more than {_MAX_OPTIONAL} optional properties cannot be counted")
    _replace_by_subsets(place, least, most, is_closed=is_closed)


def _replace_by_subsets(place: Subschema, least: int, most: int | None, *, is_closed: bool) -> None:
    schema = place.schema
    required, optional = _names(schema)
    properties = schema.get("properties", {})
    others = {name: schema[name] for name in _OF_OBJECT[1:3] if name in schema}
    subsets = chain.from_iterable(combinations(optional, k) for k in range(len(optional) + 1))
    alternatives: list[Schema] = []
    for subset in subsets:
        names = [*required, *subset]
        if (most is not None and len(names) > most) or (is_closed and len(names) < least):
            continue
        present = {one: part for one, part in properties.items() if one in names}
        absent = {one: False for one in properties if one not in names}
        one = {"type": "object", "properties": {**present, **absent}, "required": names, **others}
        if least > len(names):
            one["minProperties"] = least
        if most is not None and not is_closed:
            one["maxProperties"] = most
        alternatives.append(one)
    if not alternatives:
        place.refuse("maxProperties", "more properties are required")
    types = schema.get("type")
    if isinstance(types, list) and (rest := [one for one in types if one != "object"]):
        alternatives.append({"type": rest})
    for name in (*_OF_OBJECT, *_COUNTS, "type"):
        schema.pop(name, None)
    if "anyOf" in schema:
        schema["allOf"] = [*schema.get("allOf", []), {"anyOf": alternatives}]
    else:
        schema["anyOf"] = alternatives


def _names(schema: Schema) -> tuple[list[str], list[str]]:
    """The required properties, and the declared properties that are optional."""
    required: Any = schema.get("required")
    properties: Any = schema.get("properties")
    names = (
        [name for name in required if isinstance(name, str)] if isinstance(required, list) else []
    )
    declared = properties if isinstance(properties, dict) else {}
    known = set(names)
    return list(dict.fromkeys(names)), [
        name for name, part in declared.items() if name not in known and part is not False
    ]
