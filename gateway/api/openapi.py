"""The OpenAPI document: the parts that routes add to it, and the parts that all operations share.

Handlers read bodies themselves, so the schemas are generated from the structs that parse bodies and
render responses.
"""

import asyncio
import inspect
import re
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import msgspec
from fastapi import APIRouter, FastAPI
from fastapi.routing import APIRoute
from msgspec import Struct

from gateway.api.bodies.parsing import Body
from gateway.errors import ErrorBody, MessagesErrorBody, is_messages
from gateway.intake.keys.accepted import needs_key
from gateway.intake.limits import RATE_HEADERS
from gateway.intake.signer import KEY_HEADER

_DESCRIPTION = (
    "An LLM service on a message broker. Any client of OpenAI or Anthropic can use it. If the "
    "gateway has API keys, press **Authorize** and enter one before you send requests from this "
    "page."
)
_ERRORS: Mapping[int, str] = {
    400: "The request is invalid; `param` names the part that is at fault.",
    401: "The API key is missing, unknown or revoked.",
    403: "The API key lacks the scope; or the gateway has no API keys, and the `Host` or the "
    "`Origin` is a foreign site's.",
    404: "The model or the id is unknown.",
    405: "The method is not allowed for this path.",
    408: "The headers or the body did not arrive in time.",
    409: "The request was cancelled, or another reader has taken over its stream.",
    410: "The stream is no longer kept.",
    413: "The body is too long.",
    414: "The URL is too long.",
    415: "The body is not JSON.",
    422: "The Idempotency-Key was used with a different body.",
    429: "Too many requests. `Retry-After` says when to try again.",
    431: "The headers are too long.",
    500: "The gateway or a worker failed on this request.",
    503: "The service is unavailable. `Retry-After` says when to try again.",
    504: "The deadline has passed.",
}
_KEY_SCHEME, _KEY_HEADER_SCHEME = "ApiKey", "ApiKeyHeader"
_HEALTH = "/health"
_SECURITY_SCHEMES: Mapping[str, Any] = {
    _KEY_SCHEME: {
        "type": "http",
        "scheme": "bearer",
        "description": "An API key (`wk-...`). Required only if the gateway has a keys file.",
    },
    _KEY_HEADER_SCHEME: {
        "type": "apiKey",
        "in": "header",
        "name": "x-api-key",
        "description": "The same key, as Anthropic's clients send it.",
    },
}
IGNORED_TOOLS_HEADER = "x-warren-ignored-tools"
IGNORED_PARAMETERS_HEADER = "x-warren-ignored-parameters"
_HEADERS: Mapping[str, Any] = {
    "x-request-id": {
        "description": "The id of the request in logs and traces. For a generation it is also the "
        "`id` of the response, with which the stream can be resumed or cancelled.",
        "required": True,
        "schema": {"type": "string"},
    },
    "request-id": {
        "description": "The same, as Anthropic calls it.",
        "required": True,
        "schema": {"type": "string"},
    },
    "x-stream-token": {
        "description": "Only if the response is streamed: a token that permits reading this "
        "stream, for clients that cannot send an API key.",
        "schema": {"type": "string"},
    },
    "x-cancel-token": {
        "description": "Only if the response is streamed and the API key has the scope `cancel`: a "
        "token that permits cancelling this stream.",
        "schema": {"type": "string"},
    },
    IGNORED_TOOLS_HEADER: {
        "description": "Only if the request has tools that are neither functions nor custom tools: "
        "their types. They are left out.",
        "schema": {"type": "string"},
    },
    IGNORED_PARAMETERS_HEADER: {
        "description": "Only if the body has parameters that the gateway does not know: the names "
        "of the first 16. They have no effect.",
        "schema": {"type": "string"},
    },
    "Retry-After": {
        "description": "Seconds after which the request may be sent again.",
        "schema": {"type": "integer", "minimum": 0},
    },
    "retry-after-ms": {
        "description": "The same in milliseconds, which OpenAI's clients prefer.",
        "schema": {"type": "integer", "minimum": 0},
    },
    "x-should-retry": {
        "description": "Whether a retry can succeed. If it is absent, the status decides.",
        "schema": {"type": "string", "enum": ["true", "false"]},
    },
    **{
        name: {
            "description": "Only if the API key has such a limit: OpenAI's header about it.",
            "schema": {"type": "string"},
        }
        for name in RATE_HEADERS
    },
    "WWW-Authenticate": {
        "description": "The scheme in which the API key is expected.",
        "schema": {"type": "string", "enum": ["Bearer"]},
    },
}
_HEADERS_OF_STATUS: Mapping[str, tuple[str, ...]] = {
    "401": ("WWW-Authenticate",),
    "409": ("x-should-retry",),
    "429": ("Retry-After", "retry-after-ms", "x-should-retry"),
    "500": ("x-should-retry",),
    "503": ("Retry-After", "retry-after-ms"),
    "504": ("x-should-retry",),
}
_TRACE_PARENT = {
    "name": "traceparent",
    "in": "header",
    "description": "W3C trace context: the client's span becomes the parent of the request's.",
    "schema": {"type": "string"},
    "example": "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01",
}
IDEMPOTENCY_KEY = {
    "name": KEY_HEADER,
    "in": "header",
    "description": "Chosen by the client, for safe retries: a request with the key and the body of "
    "an earlier one receives the earlier response. 1 to 255 visible ASCII characters.",
    "schema": {"type": "string", "minLength": 1, "maxLength": 255, "pattern": "^[\\x21-\\x7e]+$"},
}


class DocumentedAPI(FastAPI):
    """An application whose OpenAPI document also describes API keys and response headers."""

    def __init__(self, **options: Any) -> None:
        """The pages of FastAPI, which load their scripts from a CDN, are turned off, and so are its
        own spans, metrics and log records: Warren's describe every request. `routes.docs` serves
        the document."""
        super().__init__(
            telemetry={"tracing": False, "metrics": False, "logs": False},
            title="Warren",
            description=_DESCRIPTION,
            openapi_url=None,
            docs_url=None,
            redoc_url=None,
            responses=_errors(),
            **options,
        )
        self._building = asyncio.Lock()
        self._encoded = b""

    def serve(self, group: APIRouter) -> None:
        """Add the routes of ``group`` as they are. `include_router` would analyse the parameters of
        each again at the first request, and look for the route of a request in every group."""
        for route in group.routes:
            if isinstance(route, APIRoute):
                route.responses = {**self.router.responses, **route.responses}
        self.router.routes.extend(group.routes)

    async def encoded(self) -> bytes:
        """The document as JSON. It is built once, in a thread: that takes a quarter of a second."""
        async with self._building:
            self._encoded = self._encoded or await asyncio.to_thread(self._encode)
        return self._encoded

    def _encode(self) -> bytes:
        return msgspec.json.encode(self.openapi())

    def openapi(self) -> dict[str, Any]:
        document = super().openapi()
        components = document.setdefault("components", {})
        components["securitySchemes"] = _SECURITY_SCHEMES
        components["headers"] = _HEADERS
        for path, operations in document["paths"].items():
            for operation in operations.values():
                _complete(path, operation)
        return document


def _complete(path: str, operation: dict[str, Any]) -> None:
    """Add the parts that every operation has. A second call changes nothing."""
    takes_token = any(parameter["name"] == "token" for parameter in operation.get("parameters", ()))
    if needs_key(path) or path == _HEALTH:
        # A stream token replaces the key, and the health endpoint shows details to clients that
        # have a key.
        keys: list[dict[str, list[str]]] = [{_KEY_SCHEME: []}, {_KEY_HEADER_SCHEME: []}]
        is_optional = takes_token or path == _HEALTH
        operation["security"] = [*keys, *([{}] if is_optional else [])]
    of_key = RATE_HEADERS if needs_key(path) else ()
    for status, response in operation["responses"].items():
        headers = response.setdefault("headers", {})
        if is_messages(path) and int(status) >= 400:
            error = {"schema": schema_of(MessagesErrorBody)}
            response["content"] = {"application/json": error}
        for name in ("x-request-id", "request-id", *of_key, *_HEADERS_OF_STATUS.get(status, ())):
            headers[name] = _header(name)


def _header(name: str) -> dict[str, str]:
    return {"$ref": f"#/components/headers/{name}"}


def headers_named(*names: str) -> dict[str, Any]:
    """References to the descriptions of these headers of a response."""
    return {name: _header(name) for name in names}


def documented(
    kind: type[Body], example: Mapping[str, Any], answer: type[Struct], *, streams: bool
) -> dict[str, Any]:
    """The parts that a route adds to the document: its body with an example, its headers and its
    responses. The body has no parameters that are refused, though its struct may inherit them.

    ``streams``: whether the route generates, so that its response can be streamed.
    """
    schema, refused = schema_of(kind), kind.neutral.keys() | kind.renamed.keys()
    properties = {name: one for name, one in schema["properties"].items() if name not in refused}
    body = {"schema": {**schema, "properties": properties}, "example": dict(example)}
    return {
        "parameters": [IDEMPOTENCY_KEY, _TRACE_PARENT] if streams else [],
        "requestBody": {"required": True, "content": {"application/json": body}},
        "responses": {"200": answered(answer, streams=streams)},
    }


def form(required: Sequence[str], properties: Mapping[str, Any]) -> dict[str, Any]:
    """The parts that a route whose body is a form adds to the document."""
    schema = {"type": "object", "required": [*required], "properties": dict(properties)}
    content = {"multipart/form-data": {"schema": schema}}
    return {"requestBody": {"required": True, "content": content}}


def answered(answer: type[Struct], *, streams: bool = False) -> dict[str, Any]:
    """A response with a body of the type ``answer``."""
    content: dict[str, Any] = {"application/json": {"schema": schema_of(answer)}}
    if not streams:
        return {"description": "The response.", "content": content}
    content["text/event-stream"] = {"schema": {"type": "string"}}
    return {
        "description": "The response, or with `stream` its events. Events have an `id:` if the "
        "request accepts `text/event-stream`.",
        "headers": headers_named(
            "x-stream-token", "x-cancel-token", IGNORED_TOOLS_HEADER, IGNORED_PARAMETERS_HEADER
        ),
        "content": content,
    }


def _errors() -> dict[int | str, dict[str, Any]]:
    """The errors that any route may answer with, in OpenAI's format."""
    content = {"application/json": {"schema": schema_of(ErrorBody)}}
    return {
        status: {"description": reason, "content": content} for status, reason in _ERRORS.items()
    }


@cache
def schema_of(kind: type[Struct]) -> dict[str, Any]:
    """The JSON schema of a struct, with the schemas of its parts inlined. All callers share it, and
    change nothing in it: to build all schemas takes as long as to build the rest of a gateway."""
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
        plain["pattern"] = re.sub(r"\\Z$", "$", plain["pattern"])  # \Z exists only in Python
    if isinstance(plain.get("description"), str):
        plain["description"] = inspect.cleandoc(plain["description"])
    return plain
