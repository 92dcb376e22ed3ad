"""Maps errors to HTTP statuses and to OpenAI's error format, or Anthropic's on its routes; the only
place that does so."""

import http
import logging
import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import msgspec
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from starlette.exceptions import HTTPException
from starlette.types import Scope

from gateway.metrics import Metrics
from shared import errors
from shared.errors import (
    BusError,
    ContextLengthExceeded,
    InternalError,
    InvalidRequest,
    ModelNotFound,
    Overloaded,
    RateLimited,
    WarrenError,
)
from shared.telemetry import floods, requests

logger = logging.getLogger(__name__)

ACCEPTED = "is_accepted"
"""The key of a request's state that is set once it is accepted; `Observation` then logs its end."""
SERVICE_FAILURES = (500, 503)
"""The statuses of failures of the service; failures of clients, limits and deadlines are no
warnings."""
_MAX_PATH_CHARS = 128
_MAX_NAMED_MODELS = 10
_RETRY_AFTER_S = 1.0
_ENCODER = msgspec.json.Encoder()


class ErrorDetail(msgspec.Struct, frozen=True, kw_only=True):
    message: str
    type: str
    param: str | None
    """The part of the request that is at fault."""
    code: str | None


class ErrorBody(msgspec.Struct, frozen=True):
    """The error object that OpenAI's clients expect, in a response or in a stream."""

    error: ErrorDetail


class MessagesErrorDetail(msgspec.Struct, frozen=True):
    type: str
    message: str


class MessagesErrorBody(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="error"):
    """The error object that Anthropic's clients expect, in a response or in a stream."""

    error: MessagesErrorDetail
    request_id: str


@dataclass(frozen=True, slots=True)
class HttpStatus:
    code: int
    type: Literal["invalid_request_error", "rate_limit_error", "server_error"] = "server_error"
    is_retryable: bool | None = None
    """Sent to the client as a retry hint, if not None; otherwise the client decides by the
    status."""


_Body: TypeAlias = ErrorBody | MessagesErrorBody
_INTERNAL = HttpStatus(500)
_STATUS: dict[str, HttpStatus] = {
    errors.InvalidRequest.code: HttpStatus(400, "invalid_request_error"),
    errors.ContextLengthExceeded.code: HttpStatus(400, "invalid_request_error"),
    errors.InvalidApiKey.code: HttpStatus(401, "invalid_request_error"),
    errors.PermissionDenied.code: HttpStatus(403, "invalid_request_error"),
    errors.ModelNotFound.code: HttpStatus(404, "invalid_request_error"),
    errors.NotFound.code: HttpStatus(404, "invalid_request_error"),
    errors.PreviousResponseNotFound.code: HttpStatus(400, "invalid_request_error"),
    errors.StreamNotFound.code: HttpStatus(404, "invalid_request_error"),
    errors.Conflict.code: HttpStatus(409, "invalid_request_error", is_retryable=False),
    errors.Cancelled.code: HttpStatus(409, "invalid_request_error", is_retryable=False),
    # What took over may be the request's own first sending, which came late.
    errors.TakenOver.code: HttpStatus(409, "invalid_request_error", is_retryable=True),
    errors.StreamExpired.code: HttpStatus(410, "invalid_request_error"),
    errors.IdempotencyMismatch.code: HttpStatus(422, "invalid_request_error"),
    errors.Overloaded.code: HttpStatus(429, "rate_limit_error"),
    # OpenAI's clients would retry it like other limits.
    errors.QuotaExceeded.code: HttpStatus(429, "rate_limit_error", is_retryable=False),
    errors.PublishRefused.code: HttpStatus(429, "rate_limit_error"),
    # A retry would crash as many workers again.
    errors.WorkerLost.code: HttpStatus(500, is_retryable=False),
    errors.NotFinite.code: HttpStatus(500, is_retryable=False),
    errors.Unavailable.code: HttpStatus(503),
    errors.OutOfMemory.code: HttpStatus(503),
    errors.BusUnavailable.code: HttpStatus(503),
    errors.PublishUnconfirmed.code: HttpStatus(503),
    errors.DeadlineExceeded.code: HttpStatus(504, is_retryable=False),
}
_MESSAGES = "/v1/messages"
_MESSAGES_TYPES: Mapping[int, str] = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    503: "overloaded_error",
    504: "timeout_error",
}
"""Anthropic's types by status; the others are ``invalid_request_error``."""
_BROKER_SAYS: Mapping[type[BusError], str] = {
    BusError: "The broker refused an operation that the request requires.",
    errors.BusUnavailable: "The broker is unreachable.",
    errors.PublishersBlocked: "The broker is short of memory or disk space, and takes no messages.",
    errors.NoFreeChannel: "The gateway has no free channel to the broker.",
    errors.TooManyQueues: "The broker has as many queues as its limit permits.",
    errors.QueueDown: "The broker's node that this request needs is down.",
    errors.PublishUnconfirmed: "The broker did not confirm the request.",
    errors.PublishRefused: "The queue is full.",
    errors.Unroutable: "A queue that the request needs has lost its binding at the broker.",
}
"""The messages with which clients are told of an error of the broker, by the nearest class."""


def status_of(error: WarrenError) -> HttpStatus:
    return _STATUS.get(error.code, _INTERNAL)


def is_messages(path: str) -> bool:
    """Whether the path belongs to Anthropic's API."""
    return path == _MESSAGES or path.startswith(f"{_MESSAGES}/")


def error_body(error: WarrenError) -> ErrorBody:
    status = status_of(error)
    # OpenAI's type of a limit names the limited quantity.
    kind = error.kind if isinstance(error, RateLimited) else status.type
    return ErrorBody(
        ErrorDetail(message=_message(error), type=kind, param=error.param, code=error.code)
    )


def messages_error_body(error: WarrenError, request_id: str) -> MessagesErrorBody:
    message = _message(error)
    if isinstance(error, ContextLengthExceeded):
        # The words that Anthropic's clients look for, in order to shorten the conversation.
        message = f"prompt is too long: {message}"
    return _messages_body(status_of(error).code, message, request_id)


def error_response(error: WarrenError, scope: Scope | None = None) -> Response:
    """The response to a request that failed; ``scope`` is its own, if it was parsed."""
    status = status_of(error)
    headers = {}
    if status.code in (429, 503):
        retry_after_s = error.retry_after_s if isinstance(error, Overloaded) else _RETRY_AFTER_S
        headers["Retry-After"] = str(math.ceil(retry_after_s))
        headers["retry-after-ms"] = str(round(retry_after_s * 1000))
    if status.code == 401:
        headers["WWW-Authenticate"] = "Bearer"
    if status.is_retryable is not None:
        headers["x-should-retry"] = str(status.is_retryable).lower()
    if scope is not None and is_messages(scope["path"]):
        body: _Body = messages_error_body(error, scope["state"]["request_id"])
    else:
        body = error_body(error)
    return _response(status.code, body, headers)


def internal_error_response(scope: Scope) -> Response:
    """The response to an unexpected error, without details."""
    return error_response(InternalError("The gateway failed on this request."), scope)


def report(metrics: Metrics, scope: Scope | None, code: str, status: int, limit: str = "") -> None:
    """Count an error that is answered, and write the line of a request that is refused with it.

    ``limit`` is the setting of the limit that was reached, if any. Without ``scope`` a connection
    is refused, before its request is known.
    """
    metrics.count_error(code)
    state = {} if scope is None else scope.get("state", {})
    if state.get(ACCEPTED):
        return
    metrics.refused.labels(limit or code).inc()
    if scope is None:
        return
    fields = {
        "request_id": state.get("request_id"),
        "model": state.get("model") or None,
        "tenant": state.get("tenant") or None,
        "trace_id": requests.trace_id_of(requests.inject()),
        "method": scope.get("method"),
        "path": scope["path"][:_MAX_PATH_CHARS],
        "status": status,
        "code": code,
        "limit": limit or None,
    }
    requests.write_line("request refused", None, fields, is_warning=status in SERVICE_FAILURES)


def http_error_response(
    error: HTTPException, metrics: Metrics, scope: Scope | None = None, limit: str = ""
) -> Response:
    """The response to a request that is at fault as HTTP. Its code is the name of the status, such
    as ``not_found``. ``limit`` names the limit that it exceeds, for the log and the metrics."""
    status = error.status_code
    code = "_".join(re.findall(r"[a-z]+", http.HTTPStatus(status).phrase.lower()))
    report(metrics, scope, code, status, limit)
    if scope is not None and is_messages(scope["path"]):
        body: _Body = _messages_body(status, error.detail, scope["state"]["request_id"])
    else:
        kind = "invalid_request_error" if status < 500 else "server_error"
        body = ErrorBody(ErrorDetail(message=error.detail, type=kind, param=None, code=code))
    return _response(status, body, dict(error.headers or {}))


def install(app: FastAPI, metrics: Metrics, models: Callable[[], Iterable[str]]) -> None:
    """Handle every error of ``app`` with a response in the format of its route. ``models`` returns
    the names of the models that live workers serve."""

    async def on_warren_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, WarrenError)
        if isinstance(error, BusError):
            fields = {"path": request.url.path, "code": error.code, "reason": error.message}
            floods.warn(logger, "request failed by the broker", "broker error", fields)
        if isinstance(error, ModelNotFound):
            error = _with_models(error, request.scope, models())
        limit = error.limit if isinstance(error, Overloaded) else ""
        report(metrics, request.scope, error.code, status_of(error).code, limit)
        return error_response(error, request.scope)

    async def on_http_exception(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        if (error.status_code, error.detail) == (404, http.HTTPStatus.NOT_FOUND.phrase):
            error = _no_such_path(request.scope)
        return http_error_response(error, metrics, request.scope)

    async def on_validation_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        problem: dict[str, Any] = error.errors()[0]
        param = ".".join(str(part) for part in problem["loc"][1:])
        return await on_warren_error(
            request, InvalidRequest(f"{param}: {problem['msg']}", param=param)
        )

    app.add_exception_handler(WarrenError, on_warren_error)
    app.add_exception_handler(HTTPException, on_http_exception)
    app.add_exception_handler(RequestValidationError, on_validation_error)


def _with_models(error: ModelNotFound, scope: Scope, models: Iterable[str]) -> ModelNotFound:
    """The same error, which also names the models that the caller may use."""
    caller = scope["state"].get("caller")
    names = sorted(name for name in models if caller is None or caller.allows_model(name))
    if not names:
        return error
    named = ", ".join(f"'{name}'" for name in names[:_MAX_NAMED_MODELS])
    if len(names) > _MAX_NAMED_MODELS:
        named += f" and {len(names) - _MAX_NAMED_MODELS} more, which GET /v1/models lists"
    return ModelNotFound(f"{error.message} Available models: {named}.", param=error.param)


def _no_such_path(scope: Scope) -> HTTPException:
    """The error of a path without a route."""
    url = f"{scope['method']} {scope['path'][:_MAX_PATH_CHARS]}"
    return HTTPException(404, f"Unknown path: {url}. The page /docs lists the paths of this API.")


def _message(error: WarrenError) -> str:
    # The broker's message names users and queues.
    if not isinstance(error, BusError):
        return error.message
    return next(_BROKER_SAYS[kind] for kind in type(error).__mro__ if kind in _BROKER_SAYS)


def _messages_body(status: int, message: str, request_id: str) -> MessagesErrorBody:
    kind = _MESSAGES_TYPES.get(status, "invalid_request_error")
    return MessagesErrorBody(error=MessagesErrorDetail(kind, message), request_id=request_id)


def _response(status: int, body: _Body, headers: dict[str, str]) -> Response:
    return Response(_ENCODER.encode(body), status, headers, media_type="application/json")
