"""Maps errors to HTTP statuses and OpenAI's error format; the only place that does so."""

import http
import logging
import math
import re
from dataclasses import dataclass
from typing import Any, Literal

import msgspec
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import Scope

from gateway.metrics import Metrics
from shared import errors, job_lines
from shared.errors import (
    BusError,
    InternalError,
    InvalidRequest,
    Overloaded,
    RateLimited,
    WarrenError,
)

logger = logging.getLogger(__name__)

ACCEPTED = "is_accepted"
"""The entry of a request's state that says that it was accepted, and has an end of its own."""
SERVICE_FAILURES = (500, 503)
"""The statuses of failures of the service; those of clients, limits and deadlines are no
warnings."""
_MAX_PATH_CHARS = 128
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


@dataclass(frozen=True, slots=True)
class HttpStatus:
    code: int
    type: Literal["invalid_request_error", "rate_limit_error", "server_error"] = "server_error"
    is_retryable: bool | None = None
    """Sent to the client as a retry hint, if not None; otherwise the client decides by the
    status."""


_INTERNAL = HttpStatus(500)
_STATUS: dict[str, HttpStatus] = {
    errors.InvalidRequest.code: HttpStatus(400, "invalid_request_error"),
    errors.ContextLengthExceeded.code: HttpStatus(400, "invalid_request_error"),
    errors.InvalidApiKey.code: HttpStatus(401, "invalid_request_error"),
    errors.PermissionDenied.code: HttpStatus(403, "invalid_request_error"),
    errors.ModelNotFound.code: HttpStatus(404, "invalid_request_error"),
    errors.StreamNotFound.code: HttpStatus(404, "invalid_request_error"),
    errors.Cancelled.code: HttpStatus(409, "invalid_request_error", is_retryable=False),
    # What took over may be the request's own first sending, which came late.
    errors.TakenOver.code: HttpStatus(409, "invalid_request_error", is_retryable=True),
    errors.StreamExpired.code: HttpStatus(410, "invalid_request_error"),
    errors.IdempotencyMismatch.code: HttpStatus(422, "invalid_request_error"),
    errors.Overloaded.code: HttpStatus(429, "rate_limit_error"),
    errors.PublishRefused.code: HttpStatus(429, "rate_limit_error"),
    # A retry would crash as many workers again.
    errors.WorkerLost.code: HttpStatus(500, is_retryable=False),
    errors.Unavailable.code: HttpStatus(503),
    errors.BusUnavailable.code: HttpStatus(503),
    errors.PublishUnconfirmed.code: HttpStatus(503),
    errors.DeadlineExceeded.code: HttpStatus(504, is_retryable=False),
}
_BROKER_SAYS = {
    429: "The queue is full.",
    500: "The broker refused an operation that the request requires.",
    503: "The broker is unreachable.",
}


def status_of(error: WarrenError) -> HttpStatus:
    return _STATUS.get(error.code, _INTERNAL)


def error_body(error: WarrenError) -> ErrorBody:
    status = status_of(error)
    # The broker's message names users and queues.
    message = _BROKER_SAYS[status.code] if isinstance(error, BusError) else error.message
    # OpenAI's type of a limit says what is limited.
    kind = error.kind if isinstance(error, RateLimited) else status.type
    return ErrorBody(ErrorDetail(message=message, type=kind, param=error.param, code=error.code))


def error_response(error: WarrenError) -> Response:
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
    return _response(status.code, error_body(error), headers)


def internal_error_response() -> Response:
    """The response to an unexpected error, without details."""
    return error_response(InternalError("The gateway failed on this request."))


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
    trace_parent = Headers(scope=scope).get("traceparent", "")
    facts = {
        "request_id": state.get("request_id"),
        "tenant": state.get("tenant") or None,
        "trace_id": job_lines.trace_id_of({"traceparent": trace_parent}),
        "method": scope.get("method"),
        "path": scope["path"][:_MAX_PATH_CHARS],
        "status": status,
        "code": code,
        "limit": limit or None,
    }
    job_lines.write("request refused", None, facts, is_warning=status in SERVICE_FAILURES)


def http_error_response(
    error: HTTPException, metrics: Metrics, scope: Scope | None = None
) -> Response:
    """The response to a request that is at fault as HTTP, which it reports. The code is the
    status's name, such as ``not_found``."""
    status = error.status_code
    code = "_".join(re.findall(r"[a-z]+", http.HTTPStatus(status).phrase.lower()))
    report(metrics, scope, code, status)
    kind = "invalid_request_error" if status < 500 else "server_error"
    detail = ErrorDetail(message=error.detail, type=kind, param=None, code=code)
    return _response(status, ErrorBody(detail), dict(error.headers or {}))


def install(app: FastAPI, metrics: Metrics) -> None:
    """Handle every error of ``app`` with a response in OpenAI's format."""

    async def on_warren_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, WarrenError)
        if isinstance(error, BusError):
            facts = {"path": request.url.path, "code": error.code, "reason": error.message}
            logger.warning("request failed by the broker", extra=facts)
        limit = error.limit if isinstance(error, Overloaded) else ""
        report(metrics, request.scope, error.code, status_of(error).code, limit)
        return error_response(error)

    async def on_http_exception(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
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


def _response(status: int, body: ErrorBody, headers: dict[str, str]) -> Response:
    return Response(_ENCODER.encode(body), status, headers, media_type="application/json")
