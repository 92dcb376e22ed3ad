"""What the OpenAPI page says of bodies that handlers read themselves, and of answers.

Its schemas are made from the structs that read the bodies and render the answers.
"""

import inspect
import re
from collections.abc import Mapping
from typing import Any

import msgspec
from msgspec import Struct


class ErrorDetails(Struct, frozen=True, kw_only=True):
    message: str
    type: str
    param: str | None
    """The part of the request that is at fault."""
    code: str | None


class ErrorBody(Struct, frozen=True):
    """The answer to what failed."""

    error: ErrorDetails


_REASONS: Mapping[int, str] = {
    400: "The request cannot be answered as it is: `param` names what is wrong.",
    401: "No valid API key.",
    404: "No such model, or nothing of that id.",
    405: "Not with this method.",
    408: "The body did not arrive in time.",
    409: "The request was cancelled, or another reader has taken its stream over.",
    410: "It is no longer kept.",
    413: "The body is too long.",
    415: "The body is not JSON.",
    422: "The Idempotency-Key was used with another body.",
    429: "Too many requests: `Retry-After` says when to come back.",
    500: "The service failed on this request.",
    503: "The service is not there: `Retry-After` says when to come back.",
    504: "The deadline has passed.",
}


def documented(
    kind: type[Struct], example: Mapping[str, Any], answer: type[Struct], *, streams: bool
) -> dict[str, Any]:
    """What a route adds to the page: its body with an example, and its answers."""
    body = {"schema": schema_of(kind), "example": dict(example)}
    return {
        "requestBody": {"required": True, "content": {"application/json": body}},
        "responses": {"200": answered(answer, streams=streams)},
    }


def answered(answer: type[Struct], *, streams: bool = False) -> dict[str, Any]:
    content: dict[str, Any] = {"application/json": {"schema": schema_of(answer)}}
    if streams:
        content["text/event-stream"] = {"schema": {"type": "string"}}
    return {"description": "The answer.", "content": content}


def errors() -> dict[int | str, dict[str, Any]]:
    """What any route may answer besides; all errors have one shape."""
    content = {"application/json": {"schema": schema_of(ErrorBody)}}
    return {
        status: {"description": reason, "content": content} for status, reason in _REASONS.items()
    }


def schema_of(kind: type[Struct]) -> dict[str, Any]:
    """The JSON schema of a struct, with those of its parts in their places."""
    (schema,), components = msgspec.json.schema_components((kind,), ref_template="{name}")
    inlined: dict[str, Any] = _inlined(schema, components)
    return inlined


def _inlined(schema: Any, components: Mapping[str, Any]) -> Any:
    if isinstance(schema, list):
        return [_inlined(item, components) for item in schema]
    if not isinstance(schema, dict):
        return schema
    if isinstance(schema.get("$ref"), str):
        return _inlined(components[schema["$ref"]], components)
    plain = {name: _inlined(value, components) for name, value in schema.items()}
    if isinstance(plain.get("pattern"), str):
        plain["pattern"] = re.sub(r"\\Z$", "$", plain["pattern"])  # \Z is Python's alone
    if isinstance(plain.get("description"), str):
        plain["description"] = inspect.cleandoc(plain["description"])
    return plain
