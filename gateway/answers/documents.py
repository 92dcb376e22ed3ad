"""JSON schemas of answers, for the OpenAPI page; a test holds answers against them."""

from collections.abc import Mapping
from typing import Any

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
