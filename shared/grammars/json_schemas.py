"""JSON schemas as they constrain a model: with closed objects, and with little whitespace."""

from collections.abc import Iterable, Mapping
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
    schemas: list[dict[str, Any]] = []
    result = _copied(schema, schemas)
    together = _described_together(schemas, result)
    for part in schemas:
        if id(part) not in together and _declares_all(part):
            part["additionalProperties"] = False
    return {**result, "x-guidance": options}


def _copied(schema: Any, copies: list[dict[str, Any]]) -> Any:
    """A copy of a schema. It and those within it are added to ``copies``."""
    if not isinstance(schema, dict):
        return schema
    result = dict(schema)
    copies.append(result)
    for name in _BY_NAME:
        if isinstance(parts := schema.get(name), dict):
            result[name] = {key: _copied(part, copies) for key, part in parts.items()}
    for name in _LISTS:
        if isinstance(parts := schema.get(name), list):
            result[name] = [_copied(part, copies) for part in parts]
    for name in _SINGLE:
        if name in schema:
            result[name] = _copied(schema[name], copies)
    return result


def _described_together(schemas: Iterable[dict[str, Any]], root: Any) -> set[int]:
    """The identities of those of the ``schemas`` that describe an object together with others, and
    of what they combine and refer to. References start at ``root``."""
    found: set[int] = set()
    waiting: list[Any] = [schema for schema in schemas if _num_descriptions(schema) > 1]
    while waiting:
        schema = waiting.pop()
        if not isinstance(schema, dict) or id(schema) in found:
            continue
        found.add(id(schema))
        for name in _COMBINING:
            if isinstance(parts := schema.get(name), list):
                waiting += parts
        if isinstance(target := schema.get("$ref"), str):
            waiting.append(_named(target, root))
    return found


def _named(target: str, root: Any) -> Any:
    """What a reference names within ``root``, if anything."""
    start, *names = target.split("/")
    found: Any = root if start == "#" else None
    try:
        for name in names:
            key = name.replace("~1", "/").replace("~0", "~")
            found = found[int(key) if isinstance(found, list) else key]
    except (LookupError, TypeError, ValueError):
        return None
    return found


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
