"""The schemas within a JSON schema, each with its path."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NoReturn, TypeAlias

Schema: TypeAlias = dict[str, Any]
BY_NAME = ("$defs", "definitions", "patternProperties", "properties")
DEFINITIONS = ("$defs", "definitions")
COMBINING = ("allOf", "anyOf", "oneOf")
LISTS = (*COMBINING, "prefixItems")
SINGLE = ("additionalProperties", "items")
REFUSED = "x-refused"
"""The key for the fault of a definition, beside its keywords."""


class Subschema:
    """A schema within another."""

    __slots__ = ("_key", "_parent", "is_definition", "schema")

    def __init__(self, schema: Schema, parent: "Subschema | None", key: str) -> None:
        self.schema = schema
        self._parent = parent
        self._key = key
        self.is_definition: bool = key.startswith(DEFINITIONS) or (
            parent is not None and parent.is_definition
        )
        """Whether it concerns nothing unless it is referred to."""

    def path(self, keyword: str = "") -> str:
        """The path from the root, such as ``properties.a.items``."""
        keys, place = [keyword] if keyword else [], self
        while place._parent is not None:
            keys.append(place._key)
            place = place._parent
        return ".".join(reversed(keys))

    def refuse(self, keyword: str, reason: str) -> NoReturn:
        """Raise `ValueError`."""
        path = self.path(keyword)
        raise ValueError(f"{path if len(path) < 200 else '...' + path[-200:]}: {reason}")


class Tree:
    """A copy of a schema and of the schemas within it."""

    def __init__(self, schema: Schema) -> None:
        self.num_steps = 0
        """How much the comparison of its schemas has taken."""
        self.places: list[Subschema] = []
        """The schemas, parents before children."""
        self.root: Schema = self._copied(schema, None, "")

    def resolved(self, schema: Any) -> Any:
        """What a schema refers to, if a reference is all it is."""
        for _ in range(16):
            if not isinstance(schema, dict) or not isinstance(target := schema.get("$ref"), str):
                break
            schema = named(target, self.root)
        return schema

    def require_sense(self) -> None:
        """Refuse problems of definitions that are used, and schemas without a finite value. Raises
        `ValueError`."""
        if any(REFUSED in place.schema for place in self.places):
            for schema in self._reachable():
                if REFUSED in schema:
                    raise ValueError(schema[REFUSED])
        has_references = any("$ref" in place.schema for place in self.places)
        if has_references and _is_endless(self.root, self._reachable()):
            raise ValueError(
                "no finite value matches: a reference leads back to itself without an alternative"
            )

    def _copied(self, schema: Any, parent: Subschema | None, key: str) -> Any:
        if not isinstance(schema, dict) or not schema:
            return schema
        result = dict(schema)
        place = Subschema(result, parent, key)
        self.places.append(place)
        for name in BY_NAME:
            if isinstance(parts := schema.get(name), dict):
                result[name] = {
                    one: self._copied(part, place, f"{name}.{one}") for one, part in parts.items()
                }
        for name in LISTS:
            if isinstance(parts := schema.get(name), list):
                result[name] = [
                    self._copied(part, place, f"{name}.{k}") for k, part in enumerate(parts)
                ]
        for name in SINGLE:
            if isinstance(part := schema.get(name), dict):
                result[name] = self._copied(part, place, name)
        return result

    def _reachable(self) -> Iterator[Schema]:
        found: set[int] = set()
        waiting: list[Any] = [self.root]
        while waiting:
            schema = waiting.pop()
            if not isinstance(schema, dict) or id(schema) in found:
                continue
            found.add(id(schema))
            yield schema
            waiting += children(schema)
            if isinstance(target := schema.get("$ref"), str):
                waiting.append(named(target, self.root))


def children(schema: Mapping[str, Any]) -> Iterator[Any]:
    """The schemas that a schema contains, without its definitions."""
    for name in ("patternProperties", "properties"):
        if isinstance(parts := schema.get(name), dict):
            yield from parts.values()
    for name in LISTS:
        if isinstance(parts := schema.get(name), list):
            yield from parts
    for name in SINGLE:
        if name in schema:
            yield schema[name]


def named(target: str, root: Any) -> Any:
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


def _is_endless(root: Schema, schemas: Iterable[Schema]) -> bool:
    """Whether each value of ``root`` would have to contain itself, as far as references tell: none
    of the ``schemas`` that it uses can come to an end first."""
    num_open: dict[int, int] = {}
    waiting_for: dict[int, list[tuple[int, list[None]]]] = {}
    ready: list[int] = []
    for schema in schemas:
        own = id(schema)
        groups = [one for one in _needed(schema, root) if all(isinstance(s, dict) for s in one)]
        num_open[own] = len(groups)
        for group in groups:
            has_ended: list[None] = []
            for alternative in group:
                waiting_for.setdefault(id(alternative), []).append((own, has_ended))
        if not groups:
            ready.append(own)
    while ready:
        for waiting, has_ended in waiting_for.get(ready.pop(), ()):
            if not has_ended:
                has_ended.append(None)
                num_open[waiting] -= 1
                if not num_open[waiting]:
                    ready.append(waiting)
    return num_open[id(root)] > 0


def _needed(schema: Schema, root: Schema) -> Iterator[Sequence[Any]]:
    """Groups of schemas: a value, or a part that each value has, must match a schema of each
    group."""
    if isinstance(target := schema.get("$ref"), str):
        yield [named(target, root)]
    if isinstance(parts := schema.get("allOf"), list):
        yield from ([part] for part in parts)
    for name in ("anyOf", "oneOf"):
        if isinstance(parts := schema.get(name), list):
            yield parts
    properties, required = schema.get("properties"), schema.get("required")
    if isinstance(properties, dict) and isinstance(required, list) and _is(schema, "object"):
        yield from (
            [properties[name]] for name in required if isinstance(name, str) and name in properties
        )
    least, first = schema.get("minItems"), schema.get("prefixItems", [])
    if _is(schema, "array") and isinstance(least, int) and isinstance(first, list):
        yield from ([part] for part in first[:least])
        if least > len(first):
            yield [schema.get("items")]


def _is(schema: Schema, kind: str) -> bool:
    return bool(schema.get("type") == kind)
