"""What the OpenAPI page says of bodies that handlers read themselves, and of answers.

A test holds answers against their schemas.
"""

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel

_STRING = {"type": "string"}
_INTEGER = {"type": "integer"}
_NUMBER = {"type": "number"}
_MAYBE_STRING = {"type": ["string", "null"]}


def _object(
    properties: Mapping[str, Any], *, optional: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    return {
        "type": "object",
        "required": list(properties),
        "properties": {**properties, **(optional or {})},
        "additionalProperties": False,
    }


def _list(items: Any) -> dict[str, Any]:
    return {"type": "array", "items": items}


_USAGE = _object(
    {
        "prompt_tokens": _INTEGER,
        "completion_tokens": _INTEGER,
        "total_tokens": _INTEGER,
        "prompt_tokens_details": _object({"cached_tokens": _INTEGER}),
    },
    optional={"completion_tokens_details": _object({"reasoning_tokens": _INTEGER})},
)
_TOP = {"token": _STRING, "logprob": _NUMBER, "bytes": _list(_INTEGER)}
_CHAT_LOGPROBS = _object(
    {
        "content": _list(_object({**_TOP, "top_logprobs": _list(_object(_TOP))})),
        "refusal": {"type": "null"},
    }
)
_TEXT_LOGPROBS = _object(
    {
        "text_offset": _list(_INTEGER),
        "token_logprobs": _list({"type": ["number", "null"]}),
        "tokens": _list(_STRING),
        "top_logprobs": _list({"type": ["object", "null"], "additionalProperties": _NUMBER}),
    }
)
_PROMPT_LOGPROBS = _list(
    {
        "type": ["object", "null"],
        "additionalProperties": _object(
            {"logprob": _NUMBER, "rank": {"type": ["integer", "null"]}, "decoded_token": _STRING}
        ),
    }
)
_CALL = _object(
    {
        "id": _STRING,
        "type": {"const": "function"},
        "function": _object({"name": _STRING, "arguments": _STRING}),
    }
)
_STOP_REASON = {"stop_reason": {"type": ["string", "integer"]}}


def _answer(kind: str, choice: Mapping[str, Any], more: Mapping[str, Any]) -> dict[str, Any]:
    return _object(
        {
            "id": _STRING,
            "object": {"const": kind},
            "created": _INTEGER,
            "model": _STRING,
            "choices": _list(choice),
            "usage": _USAGE,
        },
        optional={"system_fingerprint": _STRING, **more},
    )


CHAT_COMPLETION = _answer(
    "chat.completion",
    _object(
        {
            "index": _INTEGER,
            "message": _object(
                {"role": {"const": "assistant"}, "content": _MAYBE_STRING, "refusal": {}},
                optional={"reasoning_content": _STRING, "tool_calls": _list(_CALL)},
            ),
            "logprobs": {"anyOf": [_CHAT_LOGPROBS, {"type": "null"}]},
            "finish_reason": {"enum": ["stop", "length", "tool_calls"]},
        },
        optional=_STOP_REASON,
    ),
    {"prompt_logprobs": _PROMPT_LOGPROBS},
)
COMPLETION = _answer(
    "text_completion",
    _object(
        {
            "index": _INTEGER,
            "text": _STRING,
            "logprobs": {"anyOf": [_TEXT_LOGPROBS, {"type": "null"}]},
            "finish_reason": {"enum": ["stop", "length"]},
        },
        optional={**_STOP_REASON, "prompt_logprobs": _PROMPT_LOGPROBS},
    ),
    {},
)
TOKENS = _object(
    {
        "count": _INTEGER,
        "max_model_len": _INTEGER,
        "tokens": _list(_INTEGER),
        "token_strs": {"anyOf": [_list(_STRING), {"type": "null"}]},
    }
)
TEXT = _object({"prompt": _STRING})
EMBEDDINGS = _object(
    {
        "object": {"const": "list"},
        "model": _STRING,
        "data": _list(
            _object(
                {
                    "object": {"const": "embedding"},
                    "index": _INTEGER,
                    "embedding": {"anyOf": [_list(_NUMBER), _STRING]},
                }
            )
        ),
        "usage": _object({"prompt_tokens": _INTEGER, "total_tokens": _INTEGER}),
    }
)
MODEL = _object(
    {
        "id": _STRING,
        "object": {"const": "model"},
        "created": _INTEGER,
        "owned_by": _STRING,
        "root": _STRING,
        "parent": {"type": "null"},
        "max_model_len": _INTEGER,
    }
)
MODELS = _object({"object": {"const": "list"}, "data": _list(MODEL)})
RESPONSE = {
    "type": "object",
    "required": [
        "id",
        "object",
        "created_at",
        "model",
        "status",
        "output",
        "error",
        "incomplete_details",
        "usage",
        "instructions",
        "metadata",
        "tools",
        "tool_choice",
        "parallel_tool_calls",
        "temperature",
        "top_p",
        "text",
    ],
    "properties": {
        "id": _STRING,
        "object": {"const": "response"},
        "created_at": _INTEGER,
        "model": _STRING,
        "status": {
            "enum": ["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]
        },
        "output": _list(
            {
                "type": "object",
                "required": ["id", "type", "status"],
                "properties": {
                    "id": _STRING,
                    "type": {"enum": ["message", "reasoning", "function_call"]},
                    "status": {"enum": ["in_progress", "completed", "incomplete"]},
                },
            }
        ),
        "error": {"type": ["object", "null"]},
        "incomplete_details": {"type": ["object", "null"]},
        "usage": {"type": ["object", "null"]},
    },
}
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
