"""JSON schemas as they constrain a model: with closed objects, with little whitespace, and in the
words that llguidance understands.

Where llguidance approximates a keyword, or does not know it, the schema is rewritten so that it
allows the same values or fewer, or refused with the path of the keyword.
"""

import json
import re
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from shared.grammars.schemas.alternatives import exclusive_alternatives
from shared.grammars.schemas.keywords import check_multiples, multiple_of, rewrite_keywords
from shared.grammars.schemas.properties import count_properties
from shared.grammars.schemas.tree import COMBINING, REFUSED, Subschema, Tree, named

_OPTIONS: Mapping[str, Any] = {
    "item_separator": ", ?",
    "key_separator": ": ?",
    "whitespace_flexible": False,
    "whitespace_pattern": None,
}
"""llguidance's options for the whitespace of JSON; separators are regular expressions. A small
model that may write any whitespace can fail to write anything else."""
_ESCAPES = 'nrbtf\\"'
"""The letters after a backslash. With ``u``, llguidance would allow several spellings of a name, so
that the name of a declared property would pass for another name."""
_CONTROL_CHARACTER = re.compile(r"\\u00[01]|\\u007f")
_MAX_NESTED_ALTERNATIVES = 8


def for_generation(schema: Any) -> Any:
    """The schema with llguidance's options, and without undeclared properties: an object with
    ``properties`` has no others, unless ``additionalProperties`` or ``patternProperties`` allow
    them.

    JSON Schema allows any others, and a small model invents them until its tokens are spent. An
    object that several schemas describe together stays open, because none of them declares all of
    its properties.

    Raises `ValueError` with the path of a keyword that cannot be obeyed.
    """
    if not isinstance(schema, dict):
        return schema
    tree = Tree(schema)
    _each(tree, rewrite_keywords)
    tree = _without_one_of(tree)
    _close(tree)
    _each(tree, count_properties)
    usable = (place for place in tree.places if REFUSED not in place.schema)
    check_multiples({one for place in usable if (one := multiple_of(place)) is not None})
    tree.require_sense()
    needs_codes = _CONTROL_CHARACTER.search(json.dumps(tree.root)) is not None
    escapes = _ESCAPES + "u" if needs_codes else _ESCAPES
    return {**tree.root, "x-guidance": {**_OPTIONS, "json_allowed_escapes": escapes}}


def _each(tree: Tree, rewrite: Callable[[Subschema], object]) -> None:
    """Rewrite each schema in place. What cannot be obeyed in a definition is refused only if the
    definition is used. Raises `ValueError`."""
    for place in tree.places:
        try:
            rewrite(place)
        except ValueError as error:
            if not place.is_definition:
                raise
            place.schema.setdefault(REFUSED, str(error))


def _without_one_of(tree: Tree) -> Tree:
    """The tree with alternatives that exclude each other. Raises `ValueError`."""
    for _ in range(_MAX_NESTED_ALTERNATIVES):
        if all("oneOf" not in one.schema or REFUSED in one.schema for one in tree.places):
            return tree
        _each(tree, partial(exclusive_alternatives, tree=tree))
        tree = Tree(tree.root)
    raise ValueError("oneOf: nested too deeply; use anyOf")


def _close(tree: Tree) -> None:
    together = _described_together(tree)
    for place in tree.places:
        if id(place.schema) not in together and _declares_all(place.schema):
            place.schema["additionalProperties"] = False


def _described_together(tree: Tree) -> set[int]:
    """The identities of the schemas that describe an object together with others, and of what they
    combine and refer to."""
    found: set[int] = set()
    waiting: list[Any] = [
        place.schema for place in tree.places if _num_descriptions(place.schema) > 1
    ]
    while waiting:
        schema = waiting.pop()
        if not isinstance(schema, dict) or id(schema) in found:
            continue
        found.add(id(schema))
        for name in COMBINING:
            if isinstance(parts := schema.get(name), list):
                waiting += parts
        if isinstance(target := schema.get("$ref"), str):
            waiting.append(named(target, tree.root))
    return found


def _num_descriptions(schema: Mapping[str, Any]) -> int:
    """The number of schemas that a value has to match together."""
    all_of = schema.get("allOf")
    others = sum(name in schema for name in ("$ref", "anyOf", "oneOf", "properties"))
    return others + (len(all_of) if isinstance(all_of, list) else 0)


def _declares_all(schema: Mapping[str, Any]) -> bool:
    """Whether a schema declares properties, among them all that it requires and as many, and allows
    no others."""
    properties, required = schema.get("properties"), schema.get("required", [])
    return (
        isinstance(properties, dict)
        and "additionalProperties" not in schema
        and isinstance(required, list)
        and all(name in properties for name in required if isinstance(name, str))
        and _least(schema) <= sum(part is not False for part in properties.values())
    )


def _least(schema: Mapping[str, Any]) -> int:
    least = schema.get("minProperties")
    return least if isinstance(least, int) else 0
