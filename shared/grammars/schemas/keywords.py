"""Rewrites the keywords of a JSON schema that llguidance approximates, or refuses them."""

import math
from collections.abc import Callable, Mapping
from typing import Any

from shared.grammars.schemas.tree import Schema, Subschema

_FORMATS = frozenset(
    ("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri")
)
"""The formats of strings that llguidance knows. Other formats describe, and bind nothing."""
_LARGEST = 2**63 - 1024
"""The largest number that llguidance writes between two bounds."""
_LARGEST_ALONE = 10**18 - 1
"""The largest bound, in either direction, that needs no bound on the other side."""
_MAX_MULTIPLE = 2**32 - 1
_IN_PLACE = frozenset(("$ref", "allOf", "anyOf", "oneOf"))
_UPPER = {"minimum": "maximum", "exclusiveMinimum": "maximum"}
_LOWER = {"maximum": "minimum", "exclusiveMaximum": "minimum"}
_LEFT_OUT = "is not supported; leave it out and check the answer yourself"

Rewrite = Callable[[Subschema, str, Any], None]


def rewrite_keywords(place: Subschema) -> None:
    """Rewrite a schema in place. Raises `ValueError`."""
    for keyword in list(place.schema):
        if (rewrite := _REWRITES.get(keyword)) is not None and keyword in place.schema:
            rewrite(place, keyword, place.schema[keyword])


def check_multiples(multiples: set[tuple[int, int]]) -> None:
    """Refuse multiples that llguidance cannot combine, each as ``number / 10**digits``. Raises
    `ValueError`."""
    if len(multiples) < 2:
        return
    digits = max(digits for _, digits in multiples)
    numbers = [number * 10 ** (digits - own) for number, own in multiples]
    if math.lcm(*numbers) * max(numbers) > _MAX_MULTIPLE:
        raise ValueError("multipleOf: the numbers are too large together")


def multiple_of(place: Subschema) -> tuple[int, int] | None:
    """The schema's ``multipleOf`` as llguidance reads it: a number, and how many of its digits are
    decimals. Raises `ValueError`."""
    value: Any = place.schema.get("multipleOf")
    if not _is_number(value):
        return None
    if value <= 0:
        place.refuse("multipleOf", "expected a number above 0")
    number, digits = float(value), 0
    while number % 1 and number <= _MAX_MULTIPLE:
        number, digits = number * 10, digits + 1
    if number > _MAX_MULTIPLE or number % 1:
        place.refuse("multipleOf", f"{value} has too many digits")
    return int(number), digits


def _format(place: Subschema, keyword: str, value: Any) -> None:
    if value not in _FORMATS:
        del place.schema[keyword]


def _count(place: Subschema, keyword: str, value: Any) -> None:
    if isinstance(value, float) and value.is_integer():
        place.schema[keyword] = int(value)


def _lower_bound(place: Subschema, keyword: str, value: Any) -> None:
    if not _is_number(value):
        return
    if value > _LARGEST:
        place.refuse(keyword, f"bounds above {_LARGEST} are not supported")
    if value > _LARGEST_ALONE:
        _bound_other_side(place.schema, _UPPER[keyword], _LARGEST)
    place.schema[keyword] = -_LARGEST if value < -_LARGEST else _representable(value, math.inf)


def _upper_bound(place: Subschema, keyword: str, value: Any) -> None:
    if not _is_number(value):
        return
    if value < -_LARGEST:
        place.refuse(keyword, f"bounds below -{_LARGEST} are not supported")
    if value < -_LARGEST_ALONE:
        _bound_other_side(place.schema, _LOWER[keyword], -_LARGEST)
    place.schema[keyword] = _LARGEST if value > _LARGEST else _representable(value, -math.inf)


def _bound_other_side(schema: Schema, keyword: str, bound: int) -> None:
    exclusive = f"exclusive{keyword.capitalize()}"
    if keyword not in schema and exclusive not in schema:
        schema[keyword] = bound


def _representable(value: int | float, toward: float) -> int | float:
    """The nearest number in this direction that a float can be: bounds are compared as floats."""
    if isinstance(value, float) or int(float(value)) == value:
        return value
    rounded = int(float(value))
    if (rounded < value) is (toward > 0):
        rounded = int(math.nextafter(float(value), toward))
    return rounded


def _multiple(place: Subschema, keyword: str, value: Any) -> None:
    multiple_of(place)


def _constant(place: Subschema, keyword: str, value: Any) -> None:
    waiting = [value]
    while waiting:
        match waiting.pop():
            case bool():
                pass
            case int(number) if abs(number) > _LARGEST or int(float(number)) != number:
                place.refuse(keyword, f"{number} is too large to be written exactly; use a string")
            case list(values):
                waiting += values
            case dict(values):
                waiting += values.values()


def _unless_neutral(*neutral: Any) -> Rewrite:
    """Leaves out a value that allows everything, and refuses others."""

    def rewrite(place: Subschema, keyword: str, value: Any) -> None:
        if not any(value is one or (value == one and value is not True) for one in neutral):
            place.refuse(keyword, _LEFT_OUT)
        del place.schema[keyword]

    return rewrite


def _beside(*others: str) -> Rewrite:
    """Leaves out a keyword that means nothing without another keyword of ``others``."""

    def rewrite(place: Subschema, keyword: str, value: Any) -> None:
        if not any(other in place.schema for other in others):
            del place.schema[keyword]

    return rewrite


def _condition(place: Subschema, keyword: str, value: Any) -> None:
    if "then" in place.schema or "else" in place.schema:
        place.refuse(keyword, "is not supported; use anyOf with a schema for each case")
    del place.schema[keyword]


def _additional_items(place: Subschema, keyword: str, value: Any) -> None:
    # llguidance would ignore prefixItems.
    if not isinstance(place.schema.get("items"), list):
        del place.schema[keyword]


def _property_names(place: Subschema, keyword: str, value: Any) -> None:
    schema = place.schema
    binding = value.keys() - {"type", "title", "description"} if isinstance(value, dict) else {""}
    others = schema.get("additionalProperties", True)
    is_map = not {"properties", "patternProperties"} & schema.keys()
    names = value.get("enum") if binding == {"enum"} else None
    if value is True or not binding:
        pass
    elif is_map and isinstance(names, list) and all(isinstance(name, str) for name in names):
        schema |= {"properties": dict.fromkeys(names, others), "additionalProperties": False}
    elif is_map and binding == {"pattern"}:
        pattern = {value["pattern"]: others}
        schema |= {"patternProperties": pattern, "additionalProperties": False}
    else:
        place.refuse(keyword, "is supported as a pattern or an enum without properties only")
    del schema[keyword]


def _unevaluated(additional: str) -> Rewrite:
    def rewrite(place: Subschema, keyword: str, value: Any) -> None:
        if value not in (True, {}) and _IN_PLACE & place.schema.keys():
            place.refuse(
                keyword, f"is not supported beside allOf, anyOf, oneOf and $ref; use {additional}"
            )
        if value not in (True, {}):
            place.schema.setdefault(additional, value)
        del place.schema[keyword]

    return rewrite


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


_REWRITES: Mapping[str, Rewrite] = {
    "format": _format,
    **dict.fromkeys(("minLength", "maxLength", "minItems", "maxItems"), _count),
    **dict.fromkeys(("minProperties", "maxProperties"), _count),
    **dict.fromkeys(_UPPER, _lower_bound),
    **dict.fromkeys(_LOWER, _upper_bound),
    "multipleOf": _multiple,
    "const": _constant,
    "enum": _constant,
    "uniqueItems": _unless_neutral(False),
    "contains": _unless_neutral(),
    "minContains": _beside("contains"),
    "maxContains": _beside("contains"),
    "not": _unless_neutral(False),
    "if": _condition,
    "then": _beside("if"),
    "else": _beside("if"),
    "dependentRequired": _unless_neutral({}),
    "dependentSchemas": _unless_neutral({}),
    "dependencies": _unless_neutral({}),
    "additionalItems": _additional_items,
    "propertyNames": _property_names,
    "unevaluatedProperties": _unevaluated("additionalProperties"),
    "unevaluatedItems": _unevaluated("items"),
    "$dynamicRef": _unless_neutral(),
    "$recursiveRef": _unless_neutral(),
}
