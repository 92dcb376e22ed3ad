"""The OpenAPI page's view of bodies that handlers read themselves, to bound them first."""

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel

_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}
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
    kind: type[BaseModel], example: Mapping[str, Any], answer: Mapping[str, Any], *, streams: bool
) -> dict[str, Any]:
    """What a route adds to the page: its body with an example, and its answers."""
    body = {"schema": kind.model_json_schema(), "example": dict(example)}
    return {
        "requestBody": {"required": True, "content": {"application/json": body}},
        "responses": {"200": answered(answer, streams=streams)},
    }


def answered(answer: Mapping[str, Any], *, streams: bool = False) -> dict[str, Any]:
    content: dict[str, Any] = {"application/json": {"schema": dict(answer)}}
    if streams:
        content["text/event-stream"] = {"schema": {"type": "string"}}
    return {"description": "The answer.", "content": content}


def errors() -> dict[int | str, dict[str, Any]]:
    """What any route may answer besides; all errors have one shape."""
    content = {"application/json": {"schema": _ERROR}}
    return {
        status: {"description": reason, "content": content} for status, reason in _REASONS.items()
    }
