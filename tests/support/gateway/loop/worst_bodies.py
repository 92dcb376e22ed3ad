"""The largest bodies of an endpoint, generated from its schema: each has one field with the
longest, the deepest or the most values that pass the limits of sizes, valid or not.

A value is JSON text, because building millions of Python objects would take longer than the tests.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache, partial
from operator import mul
from typing import Any, NamedTuple

import msgspec

from gateway.api.bodies.input_items import _KINDS
from gateway.intake.admission import MAX_CONTAINERS, MAX_VALUES
from shared.messages import MAX_GRAMMAR_CHARS, MAX_MESSAGES

Schema = Mapping[str, Any]

_TEXT: Schema = {"type": "string"}
_OF_OUTPUTS: Schema = {
    "type": "object",
    "properties": {
        "json": {},
        "regex": _TEXT,
        "grammar": _TEXT,
        "choice": {"type": "array", "items": _TEXT},
    },
}


def _items() -> Schema:
    """The schema of the items of the Responses API."""
    schemas, definitions = msgspec.json.schema_components(_KINDS.values())
    kinds = [
        {**definitions[schema["$ref"].rpartition("/")[2]], "kind": kind}
        for schema, kind in zip(schemas, _KINDS, strict=True)
    ]
    tagged = [
        {
            **one,
            "properties": {"type": {"const": one["kind"]}, **one["properties"]},
            "required": ["type", *one["required"]],
        }
        for one in kinds
    ]
    items = {"items": {"anyOf": tagged}, "maxItems": MAX_MESSAGES}
    return {"$defs": definitions, "type": "array", **items}


OPEN: Mapping[str, Schema] = {
    "structured_outputs": _OF_OUTPUTS,
    "input": _items(),
    "items": _items(),
}
"""What the document leaves open, and the gateway reads nevertheless, by the name of the field."""
_NUM_KEYS = 1 << 15
_NUM_NUMBERS = MAX_VALUES // 2
_MAX_DIGITS = 4000
_DEPTH = 60
_RULE = "root ::= "
_ESCAPES = r"[(\u0000"


class Worst(NamedTuple):
    """A value of a field."""

    place: str
    """The part of the field that is large."""
    way: str
    """In what way it is large."""
    text: Callable[[], str]
    """The value as JSON."""


def worst_bodies(
    schema: Schema, example: Mapping[str, Any], size: int
) -> Iterator[tuple[Worst, Callable[[], bytes]]]:
    """Bodies of up to ``size`` bytes, made from an ``example`` that is valid."""
    root = _Schemas(schema.get("$defs", {}))
    for branch in root.branches(schema):
        for name, part in branch.get("properties", {}).items():
            rest = {key: value for key, value in example.items() if key != name}
            start = f'{json.dumps(rest)[:-1]}{", " if rest else ""}"{name}": '
            for known in (part, OPEN[name]) if name in OPEN else (part,):
                values = _Schemas(known.get("$defs", root.definitions))
                for worst in values.worst(known, size - 1000, name):
                    yield worst, partial(_body, start, worst.text)


def _body(start: str, text: Callable[[], str]) -> bytes:
    return f"{start}{text()}}}".encode()


@dataclass(frozen=True)
class _Schemas:
    definitions: Mapping[str, Any]

    def branches(self, schema: Schema) -> Iterator[Schema]:
        """The alternatives of a schema."""
        if "$ref" in schema:
            yield from self.branches(self.definitions[schema["$ref"].rpartition("/")[2]])
            return
        parts = schema.get("anyOf", schema.get("oneOf"))
        for part in parts or ():
            yield from self.branches(part)
        if parts is None and schema.get("type") != "null":
            yield schema

    def minimal(self, schema: Schema) -> str:
        """A short valid value."""
        one = next(self.branches(schema))
        for key in ("const", "default"):
            if one.get(key) is not None:
                return json.dumps(one[key])
        if "enum" in one:
            return json.dumps(one["enum"][-1])
        match one.get("type"):
            case "string":
                return json.dumps("a" * max(1, one.get("minLength", 1)))
            case "boolean":
                return "true"
            case "array":
                items = [self.minimal(one.get("items", {}))] * one.get("minItems", 0)
                return f"[{', '.join(items)}]"
            case "object":
                return self._object(one, {})
            case _:
                return "1"

    def worst(self, schema: Schema, size: int, place: str) -> Iterator[Worst]:
        """Values of about ``size`` bytes at most."""
        for one in self.branches(schema):
            if "const" in one or "enum" in one or one.get("type") == "boolean":
                continue
            match one.get("type"):
                case "string":
                    yield from _texts(min(size, one.get("maxLength", size)), place)
                case "integer" | "number":
                    yield Worst(place, "digits", partial(mul, "9", min(size, _MAX_DIGITS)))
                case "array":
                    yield from self._arrays(one, size, place)
                case "object" if one.get("properties"):
                    for name, part in one["properties"].items():
                        for worst in self.worst(part, size - 1000, f"{place}.{name}"):
                            yield worst._replace(text=partial(self._holding, one, name, worst.text))
                case kind:
                    yield from _anything(size, place, is_object=kind == "object")

    def _arrays(self, schema: Schema, size: int, place: str) -> Iterator[Worst]:
        """Many small items, or a single large item."""
        item, most = schema.get("items", {}), schema.get("maxItems", MAX_VALUES)
        for one in self.branches(item):
            small = self._object(one, {}) if one.get("properties") else self.minimal(one)
            yield Worst(place, "items", partial(_array, small, most, size))
            if one.get("properties"):
                every = {name: self.minimal(part) for name, part in one["properties"].items()}
                full = self._object(one, every)
                yield Worst(place, "full items", partial(_array, full, most, size))
        for worst in self.worst(item, size, f"{place}[0]"):
            yield worst._replace(text=partial(_list_of, worst.text))

    def _holding(self, schema: Schema, name: str, text: Callable[[], str]) -> str:
        return self._object(schema, {name: text()})

    def _object(self, schema: Schema, given: Mapping[str, str]) -> str:
        """An object with what is required, and with what is ``given`` as JSON."""
        properties = schema.get("properties", {})
        needed = {name: self.minimal(properties[name]) for name in schema.get("required", ())}
        members = (f'"{name}": {text}' for name, text in {**needed, **given}.items())
        return f"{{{', '.join(members)}}}"


def _texts(num_chars: int, place: str) -> Iterator[Worst]:
    for way, text in (("text", "a"), ("escapes", _ESCAPES)):
        yield Worst(place, way, partial(_quoted, text, num_chars))
    if num_chars > len(_RULE):
        yield Worst(place, "groups", partial(_groups, (num_chars - len(_RULE)) // 2))


def _anything(size: int, place: str, *, is_object: bool) -> Iterator[Worst]:
    for way in _objects(size):
        yield Worst(place, way, partial(_object_of, size, way))
    if not is_object:
        yield from _texts(size, place)
        yield Worst(place, "list", partial(_array, "1", MAX_VALUES, size))


def _quoted(text: str, num_chars: int) -> str:
    return f'"{text * (num_chars // len(text))}"'


def _groups(depth: int) -> str:
    """A grammar in llama.cpp's form."""
    return f'"{_RULE}{"(" * depth}a{")" * depth}"'


def _list_of(text: Callable[[], str]) -> str:
    return f"[{text()}]"


def _object_of(size: int, way: str) -> str:
    return _objects(size)[way]


@cache
def _objects(size: int) -> Mapping[str, str]:
    """Objects that may be anything, such as JSON schemas."""
    keys = (f'"k{k:05}":1' for k in range(min(_NUM_KEYS, size // 12)))
    properties = (f'"p{k:04}":{{"type":"string"}}' for k in range(min(_NUM_KEYS // 4, size // 30)))
    choices = (f'"c{k:04}"' for k in range(min(MAX_GRAMMAR_CHARS, size) // 12))
    return {
        "keys": f"{{{','.join(keys)}}}",
        "objects": f'{{"a":{_array("{}", MAX_CONTAINERS - 100, size)}}}',
        "numbers": f'{{"a":{_array("1", _NUM_NUMBERS, size)}}}',
        "deep": '{"a":' * _DEPTH + "1" + "}" * _DEPTH,
        "properties": f'{{"type":"object","properties":{{{",".join(properties)}}}}}',
        "choices": f'{{"type":"object","properties":{{"a":{{"enum":[{",".join(choices)}]}}}}}}',
    }


def _array(item: str, most: int, size: int) -> str:
    return f"[{','.join([item] * max(1, min(most, size // (len(item) + 1))))}]"
