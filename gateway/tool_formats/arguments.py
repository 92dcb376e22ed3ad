"""What a model may write as the arguments of a call: JSON, parameters between tags, or literals.

Parameters come in the order of the schema, as in llguidance's grammars of JSON, or sorted if the
model has seen them sorted.
"""

import hashlib
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

import msgspec

from gateway.tool_formats.rules import BLANK, Budget, Rules, json_rule, quoted, until
from shared.messages import Tool

_DEFINITIONS = ("$defs", "definitions")
_NO_PARAMETERS: Mapping[str, Any] = {"type": "object", "properties": {}}
_MAX_REFERENCES = 16
_MAX_DEPTH = 3
"""The depth of lists and objects up to which their values are bound to their schemas."""

Arguments: TypeAlias = Callable[[str, Tool, Budget], Rules]
"""The rules of a tool's arguments; the first rule has the given name. Raises `GrammarTooLong`."""
ValueKind: TypeAlias = Literal["text", "choices", "json", "any"]
"""The kind of a parameter's values: any text, a text of a list, anything but texts, or either."""


def parameters(tool: Tool) -> dict[str, Any]:
    """The schema of a tool's arguments. A function without parameters is called with ``{}``."""
    return {"type": "object", **(tool.parameters or _NO_PARAMETERS)}


def text_parameters(tool: Tool) -> tuple[str, ...]:
    """The parameters whose values are strings in any case, or whose type is unknown."""
    root = _Root(parameters(tool))
    return tuple(
        name
        for name, part in _properties(root.schema).items()
        if root.kind_of(part) in ("text", "choices")
    )


class _Root:
    """A tool's schema, in which references start. The target of each reference is found and
    classified once."""

    def __init__(self, schema: Mapping[str, Any]) -> None:
        self.schema = schema
        self._named: dict[str, Any] = {}
        """Targets of references."""
        self._kinds: dict[int, ValueKind] = {}
        """The kind of the values of each schema, by the schema's identity."""

    def resolved(self, schema: Any) -> Any:
        """The schema that a reference names; any other schema as it is."""
        for _ in range(_MAX_REFERENCES):
            if not isinstance(schema, dict) or not isinstance(target := schema.get("$ref"), str):
                break
            if target not in self._named:
                self._named[target] = _named(target, self.schema)
            if self._named[target] is None:
                break
            schema = self._named[target]
        return schema

    def kind_of(self, schema: Any) -> ValueKind:
        """The kind of a parameter's values."""
        schema = self.resolved(schema)
        if id(schema) not in self._kinds:
            self._kinds[id(schema)] = _kind_of(schema)
        return self._kinds[id(schema)]


def _kind_of(schema: Any) -> ValueKind:
    if not isinstance(schema, dict):
        return "text"
    values = _values(schema)
    if values is not None:
        are_texts = {isinstance(value, str) for value in values}
        if len(are_texts) > 1:
            return "any"
        return "choices" if are_texts == {True} else "json"
    if not {"type", "anyOf", "oneOf", "allOf", "$ref"} & schema.keys():
        return "text"
    types = schema.get("type")
    if types == "string":
        return "text"
    is_open = types is None or not isinstance(types, str | list) or "string" in types
    return "any" if is_open else "json"


def json_arguments(rule: str, tool: Tool, budget: Budget) -> Rules:
    return {rule: _json_rule(parameters(tool), budget)}


def whole_call(key: str) -> Arguments:
    """A JSON object with the name and, as ``key``, the arguments."""

    def rules(rule: str, tool: Tool, budget: Budget) -> Rules:
        schema = parameters(tool)
        # References in a tool's schema start at its root, and the schema now becomes part of
        # another schema.
        definitions = {name: schema.pop(name) for name in _definitions(schema)}
        call = {
            "type": "object",
            "properties": {"name": {"const": tool.name}, key: schema},
            "required": ["name", key],
            **definitions,
        }
        return {rule: _json_rule(call, budget)}

    return rules


@dataclass(frozen=True)
class TaggedArguments:
    """Parameters between tags; texts are written as they are, other values as JSON."""

    before_name: str
    after_name: str
    """Between a parameter's name and its value."""
    end: str
    """The text after a value."""
    entries: Rules = field(default_factory=dict)

    def __call__(self, rule: str, tool: Tool, budget: Budget) -> Rules:
        root = _Root(parameters(tool))
        required = _required(root.schema)
        sequence = []
        values: dict[str, str] = {}
        for name, part in _properties(root.schema).items():
            value = self._value(part, root, budget)
            values |= value
            one = f"{self.before_name} {quoted(name)} {self.after_name} {next(iter(value))}"
            sequence.append(budget.spend(one if name in required else f"({one})?"))
        if _is_open(root.schema):
            sequence.append("other*")
        return {
            rule: " ".join(sequence) or '""',
            **values,
            "other": rf"{self.before_name} /[^<>\n]+/ {self.after_name} text",
            "text": "text_value blank?",
            **until("text_value", "value_end", self.end),
            **self.entries,
            **BLANK,
        }

    def _value(self, part: Any, root: _Root, budget: Budget) -> Rules:
        """The rule of a value. Equal rules have the same name."""
        kind, schema = root.kind_of(part), root.resolved(part)
        if kind in ("text", "any"):
            return {"text": "text_value blank?"}
        if kind == "choices":
            value = _any_of(_values(schema) or (), quoted, budget)
        elif schema.get("type") == "boolean":
            value = '("true" | "false" | "True" | "False")'
        else:
            has_references = b'"$ref"' in msgspec.json.encode(schema)
            definitions = _definitions(root.schema) if has_references else {}
            value = _json_rule({**schema, **definitions}, budget)
        name = f"value_{hashlib.sha256(value.encode()).hexdigest()[:8]}"
        return {name: f"blank? {value} blank? entry_value_end blank?"}


@dataclass(frozen=True)
class _Scope:
    """The state that the values of a tool's arguments share."""

    root: _Root
    budget: Budget
    rules: dict[str, str] = field(default_factory=dict)
    """The rules of objects."""
    objects: dict[tuple[int, int], str] = field(default_factory=dict)
    """Their names, by the identity of a schema and the depth, because references may recur."""


@dataclass(frozen=True)
class LiteralArguments:
    """Arguments by name, with commas between them, whose values are literals of some language."""

    assign: str
    """Between a parameter's name and its value."""
    separator: str
    literals: Rules
    """The rules ``string``, ``boolean``, ``null``, and ``key`` of an object."""
    quote: Callable[[str], str]
    """Returns the rule of a string."""
    key: "re.Pattern[str] | None" = None
    """The keys of an object that stand without quotes."""
    is_sorted: bool = False

    def __call__(self, rule: str, tool: Tool, budget: Budget) -> Rules:
        schema = parameters(tool)
        scope = _Scope(_Root(schema), budget)
        written = {
            name: budget.spend(f"{quoted(name)} {self.assign} {self._value(part, scope)}")
            for name, part in self._ordered(schema)
        }
        return {
            **self._sequence(rule, schema, written, "pair"),
            **scope.rules,
            **self._any(),
        }

    def _ordered(self, schema: Mapping[str, Any]) -> list[tuple[str, Any]]:
        properties = list(_properties(schema).items())
        if self.is_sorted:
            properties.sort(key=lambda item: item[0].lower())
        return properties

    def _sequence(
        self, rule: str, schema: Mapping[str, Any], named: Mapping[str, str], other: str
    ) -> dict[str, str]:
        """The rules of the ``named`` properties, in this order, and of other properties if the
        schema is open."""
        comma, required, written = self.separator, _required(schema), list(named.values())
        needed = {k for k, name in enumerate(named) if name in required}
        more = f" ({comma} {other})*" if _is_open(schema) else ""
        if needed:
            first = min(needed)
            before = [f"({one} {comma})?" for one in written[:first]]
            after = [
                f"{comma} {one}" if k in needed else f"({comma} {one})?"
                for k, one in enumerate(written[first + 1 :], first + 1)
            ]
            return {rule: " ".join([*before, written[first], *after]) + more}
        # All are optional: the first that is written has no comma before it.
        rules = {rule: f"{rule}_0"}
        for k, one in enumerate(written):
            rules[f"{rule}_{k}"] = f"{one} {rule}_n{k + 1} | {rule}_{k + 1}"
            rules[f"{rule}_n{k}"] = f"({comma} {one})? {rule}_n{k + 1}"
        last = len(written)
        rules[f"{rule}_{last}"] = f"({other}{more})?" if more else '""'
        rules[f"{rule}_n{last}"] = more or '""'
        return rules

    def _any(self) -> Rules:
        """The rules of any value."""
        comma = self.separator
        return {
            **self.literals,
            "integer": "/-?[0-9]+/",
            "number": r"/-?[0-9]+(\.[0-9]+)?([eE][+-]?[0-9]+)?/",
            "list": f'"[" (value ({comma} value)*)? "]"',
            "object": f'"{{" (member ({comma} member)*)? "}}"',
            "member": 'key ":" " "? value',
            "pair": rf"/[A-Za-z_][\w.-]*/ {self.assign} value",
            "value": "string | number | boolean | null | list | object",
        }

    def _value(self, schema: Any, scope: _Scope, depth: int = 0) -> str:
        if depth > _MAX_DEPTH:
            return "value"
        kind, schema = scope.root.kind_of(schema), scope.root.resolved(schema)
        if kind == "choices":
            return _any_of(_values(schema) or (), self.quote, scope.budget)
        if not isinstance(schema, dict) or kind == "any" or _values(schema) is not None:
            return "value"
        match schema.get("type"):
            case "object" if _properties(schema):
                return self._object(schema, scope, depth)
            case "string" | "integer" | "number" | "boolean" | "null" | "object" as name:
                return str(name)
            case "array":
                item = self._value(schema.get("items", {}), scope, depth + 1)
                return f'("[" ({item} ({self.separator} {item})*)? "]")'
            case _:
                return "value"

    def _object(self, schema: Mapping[str, Any], scope: _Scope, depth: int) -> str:
        """The rule of an object. Equal rules have the same name."""
        known = scope.objects.get((id(schema), depth))
        if known is not None:
            return known
        members = {
            name: scope.budget.spend(
                f'{self._key(name)} ":" " "? {self._value(part, scope, depth + 1)}'
            )
            for name, part in self._ordered(schema)
        }
        parts = repr((members, _required(schema), _is_open(schema)))
        rule = f"object_{hashlib.sha256(parts.encode()).hexdigest()[:8]}"
        scope.objects[id(schema), depth] = rule
        scope.rules[rule] = f'"{{" {rule}_in "}}"'
        scope.rules.update(self._sequence(f"{rule}_in", schema, members, "member"))
        return rule

    def _key(self, name: str) -> str:
        return quoted(name) if self.key and self.key.fullmatch(name) else self.quote(name)


def _values(schema: Mapping[str, Any]) -> list[Any] | None:
    """All values that a schema lists, if it does."""
    values = schema.get("enum", [schema["const"]] if "const" in schema else None)
    return values if isinstance(values, list) and values else None


def _json_rule(schema: dict[str, Any], budget: Budget) -> str:
    budget.spend(msgspec.json.encode(schema).decode())
    return json_rule(schema)


def _any_of(texts: Iterable[str], quote: Callable[[str], str], budget: Budget) -> str:
    return f"({' | '.join(budget.spend(quote(text)) for text in texts)})"


def _named(target: str, root: Mapping[str, Any]) -> Any:
    """The target of a reference within ``root``, or None."""
    found: Any = root if target.startswith("#") else None
    for name in target.removeprefix("#").split("/")[1:]:
        name = name.replace("~1", "/").replace("~0", "~")
        found = found.get(name) if isinstance(found, dict) else None
    return found


def _definitions(schema: Mapping[str, Any]) -> dict[str, Any]:
    return {name: schema[name] for name in _DEFINITIONS if name in schema}


def _properties(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    properties = schema.get("properties")
    return properties if isinstance(properties, dict) else {}


def _required(schema: Mapping[str, Any]) -> dict[str, None]:
    """The names of the required properties, in their order."""
    required = schema.get("required")
    names = required if isinstance(required, list) else ()
    return dict.fromkeys(name for name in names if isinstance(name, str))


def _is_open(schema: Mapping[str, Any]) -> bool:
    """Whether there may be parameters that the schema does not declare."""
    others = schema.get("additionalProperties", "properties" not in schema)
    return others is not False or "patternProperties" in schema
