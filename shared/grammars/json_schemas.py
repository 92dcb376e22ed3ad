"""JSON schemas as they constrain a model: with closed objects, and with little whitespace."""

from collections.abc import Mapping
from typing import Any

_OPTIONS: Mapping[str, Any] = {
    "item_separator": ", ?",
    "key_separator": ": ?",
    "whitespace_flexible": False,
    "whitespace_pattern": None,
}
"""llguidance's options for the whitespace of JSON; separators are regular expressions. A small
model that may write any whitespace can fail to write anything else."""
_BY_NAME = ("$defs", "definitions", "patternProperties", "properties")
_COMBINING = ("allOf", "anyOf", "oneOf")
_LISTS = (*_COMBINING, "prefixItems")
_SINGLE = ("additionalProperties", "items")


def for_generation(schema: Any) -> Any:
    """The schema with llguidance's options, and without undeclared properties: an object with
    ``properties`` has no others, unless ``additionalProperties`` or ``patternProperties`` allow
    them.

    JSON Schema allows any others, and a small model invents them until its tokens are spent. An
    object that several schemas describe together stays open, because none of them declares all of
    its properties.
    """
    if not isinstance(schema, dict):
        return schema
    options = schema.get("x-guidance")
    options = {**options, **_OPTIONS} if isinstance(options, dict) else _OPTIONS
    shared: set[str] = set()
    while True:
        num_shared = len(shared)
        result = _closed(schema, "#", shared)
        if len(shared) == num_shared:
            return {**result, "x-guidance": options}


def _closed(schema: Any, pointer: str, shared: set[str], *, is_shared: bool = False) -> Any:
    """Close the schema at ``pointer``, unless it ``is_shared``: describes an object together with
    others. The targets of such schemas' references are added to ``shared``."""
    if not isinstance(schema, dict):
        return schema
    is_open = is_shared or pointer in shared or _num_descriptions(schema) > 1
    if is_open and isinstance(target := schema.get("$ref"), str):
        shared.add(target)
    result = dict(schema)
    for name in _BY_NAME:
        if isinstance(parts := schema.get(name), dict):
            result[name] = {
                key: _closed(part, f"{pointer}/{name}/{_escaped(key)}", shared)
                for key, part in parts.items()
            }
    for name in _LISTS:
        if isinstance(parts := schema.get(name), list):
            is_part = is_open and name in _COMBINING
            result[name] = [
                _closed(part, f"{pointer}/{name}/{k}", shared, is_shared=is_part)
                for k, part in enumerate(parts)
            ]
    for name in _SINGLE:
        if name in schema:
            result[name] = _closed(schema[name], f"{pointer}/{name}", shared)
    if not is_open and _declares_all(schema):
        result["additionalProperties"] = False
    return result


def _num_descriptions(schema: Mapping[str, Any]) -> int:
    """The number of schemas that a value has to match together."""
    all_of = schema.get("allOf")
    others = sum(name in schema for name in ("$ref", "anyOf", "oneOf", "properties"))
    return others + (len(all_of) if isinstance(all_of, list) else 0)


def _declares_all(schema: Mapping[str, Any]) -> bool:
    """Whether a schema declares properties, among them all required ones, and allows no others."""
    properties, required = schema.get("properties"), schema.get("required", [])
    return (
        isinstance(properties, dict)
        and "additionalProperties" not in schema
        and isinstance(required, list)
        and all(name in properties for name in required if isinstance(name, str))
    )


def _escaped(key: str) -> str:
    return key.replace("~", "~0").replace("/", "~1")
