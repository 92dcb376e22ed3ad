"""Validates JSON by the types of the Python packages of OpenAI and Anthropic, strictly.

Their clients accept anything, because they construct their models without validation. Here all
required fields must be there, values must have their exact types, the ``type`` of an object decides
between the members of a union, and there may be no other fields than the packages, `EXTENSIONS` and
`REFERENCE` name.
"""

from collections import defaultdict
from collections.abc import Mapping
from functools import cache
from typing import Any, Literal, NotRequired, TypeAlias, get_args, get_origin

from anthropic.types import Message, RawMessageDeltaEvent
from openai.types import (
    Batch,
    Completion,
    CompletionChoice,
    Embedding,
    Model,
    completion_choice,
    webhooks,
)
from openai.types.chat import (
    ChatCompletion,
    ChatCompletionChunk,
    ChatCompletionMessage,
    chat_completion,
    chat_completion_chunk,
)
from openai.types.responses import (
    Response,
    ResponseCustomToolCall,
    ResponseCustomToolCallOutput,
    ResponseError,
    ResponseFunctionCallArgumentsDeltaEvent,
    ResponseFunctionCallArgumentsDoneEvent,
    ResponseReasoningTextDeltaEvent,
    ResponseTextDeltaEvent,
)
from pydantic import BaseModel, ConfigDict, TypeAdapter
from pydantic_core import SchemaValidator, ValidationError

Schema: TypeAlias = dict[str, Any]
"""A schema of pydantic's core."""
Fields: TypeAlias = Mapping[type, Mapping[str, Any]]
"""Types of fields, by their names, of some models."""


class _CustomDelta(BaseModel):
    """Part of a call of a custom tool."""

    model_config = ConfigDict(extra="forbid")

    name: str | None = None
    input: str


_FINGERPRINT = {"system_fingerprint": NotRequired[str]}
EXTENSIONS: Fields = {
    chat_completion.Choice: {"stop_reason": NotRequired[str | int]},
    chat_completion_chunk.Choice: {"stop_reason": NotRequired[str | int]},
    CompletionChoice: {
        "stop_reason": NotRequired[str | int],
        "prompt_logprobs": NotRequired[list[dict[str, Any] | None]],
    },
    ChatCompletion: {"prompt_logprobs": NotRequired[list[dict[str, Any] | None]]},
    ChatCompletionMessage: {"reasoning_content": NotRequired[str]},
    chat_completion_chunk.ChoiceDelta: {"reasoning_content": NotRequired[str]},
    # OpenAI's API sends these, too (openai/openai-openapi#576); its reference has only functions.
    chat_completion_chunk.ChoiceDeltaToolCall: {
        "type": NotRequired[Literal["function", "custom"]],
        "custom": NotRequired[_CustomDelta],
    },
    Model: {
        "root": str,
        "parent": None,
        "max_model_len": int,
        "fingerprint": str,
        "max_num_seqs": int,
        "engine": str,
        "unsupported_parameters": list[str],
        "engine_constraints": list[str],
    },
    Batch: {"num_promoted": int | None},
    Response: _FINGERPRINT,
    ResponseError: {"reason": str},
    Message: _FINGERPRINT,
    RawMessageDeltaEvent: _FINGERPRINT,
    webhooks.WebhookEndpoint: {"tenant": str},
    webhooks.WebhookEndpointWithSecret: {"tenant": str},
}
"""What Warren adds; most of it vLLM adds, too."""
_Status: TypeAlias = Literal["in_progress", "completed", "incomplete"]
_PADDED = {"obfuscation": NotRequired[str]}
REFERENCE: Fields = {
    Completion: _PADDED,
    ChatCompletionChunk: _PADDED,
    ResponseTextDeltaEvent: _PADDED,
    ResponseReasoningTextDeltaEvent: _PADDED,
    ResponseFunctionCallArgumentsDeltaEvent: _PADDED,
    ResponseFunctionCallArgumentsDoneEvent: {"name": str},
    Response: {"store": bool},
    Embedding: {"embedding": list[float] | str},  # as the request asks for it
    # As other items.
    ResponseCustomToolCall: {"status": NotRequired[_Status]},
    ResponseCustomToolCallOutput: {"status": NotRequired[Literal["completed"]]},
    # In a stream, all chunks but the last have no reason. An echoed prompt's first token has no
    # probability.
    CompletionChoice: {"finish_reason": Literal["stop", "length", "content_filter"] | None},
    completion_choice.Logprobs: {
        "token_logprobs": list[float | None],
        "top_logprobs": list[dict[str, float] | None],
    },
}
"""What OpenAI's API reference has, and the package has not, or otherwise."""


def problems(kind: Any, data: bytes | str) -> list[str]:
    """What is wrong with the JSON ``data`` as a value of the type ``kind``."""
    try:
        _validator(kind).validate_json(data, strict=True)
    except ValidationError as error:
        return [
            f"{'.'.join(map(str, one['loc']))}: {one['msg']}"
            for one in error.errors(include_url=False, include_context=False)
        ]
    return []


@cache
def _validator(kind: Any) -> SchemaValidator:
    schema = _core(kind)
    named = {one["ref"]: one for one in schema.get("definitions", ())}
    return SchemaValidator(_strict(schema, named))


def _core(kind: Any) -> Any:
    return dict(TypeAdapter(kind).core_schema)  # a class builds its schema only when it is read


def _strict(node: Any, named: Mapping[str, Schema]) -> Any:
    if isinstance(node, list | tuple):
        return [_strict(one, named) for one in node]
    if not isinstance(node, dict):
        return node
    strict = {name: _strict(value, named) for name, value in node.items()}
    match node.get("type"):
        case "model":
            return _only_fields(strict)
        case "union":
            return _tagged(strict, named)
        case _:
            pass
    return strict


def _only_fields(model: Schema) -> Schema:
    """The fields of a model, and no others, without its class, which has a validator of its own."""
    fields: Schema = model["schema"]
    for more in (EXTENSIONS, REFERENCE):
        of_model = more.get(model["cls"], {})
        fields["fields"] |= {name: _field(kind) for name, kind in of_model.items()}
    return {**fields, "extra_behavior": "forbid", "ref": model["ref"]}


def _field(kind: Any) -> Schema:
    if get_origin(kind) is not NotRequired:
        return {"type": "model-field", "schema": _core(kind)}
    schema = {"type": "default", "schema": _core(get_args(kind)[0]), "default": None}
    return {"type": "model-field", "schema": schema}


def _tagged(union: Schema, named: Mapping[str, Schema]) -> Schema:
    """The union, decided by the ``type`` of its members, if each member has a ``type``."""
    members: defaultdict[str, list[Schema]] = defaultdict(list)
    for member in union["choices"]:
        model = named.get(member.get("schema_ref", ""), member)
        fields = model.get("schema", model).get("fields", {})
        field = fields.get("type", {}).get("schema", {})
        literal = field.get("schema", field)
        if literal.get("type") != "literal":
            return union
        for tag in literal["expected"]:
            members[tag].append(member)
    choices = {
        tag: some[0] if len(some) == 1 else {"type": "union", "choices": some}
        for tag, some in members.items()
    }
    return {"type": "tagged-union", "discriminator": "type", "choices": choices}
