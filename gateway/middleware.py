"""Middleware for every request: request ids, paths, spans, checks of Host and Origin,
authentication, and the handler of unexpected errors."""

import ipaddress
import logging
import re
import secrets
from collections.abc import Iterable
from contextlib import suppress
from urllib.parse import urlsplit

from opentelemetry.trace import SpanKind, StatusCode
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gateway.api.compute_once import CACHE_HEADER
from gateway.api.openapi import IGNORED_PARAMETERS_HEADER, IGNORED_TOOLS_HEADER
from gateway.errors import (
    error_response,
    http_error_response,
    internal_error_response,
    report,
    status_of,
)
from gateway.intake.keys.accepted import Keys, authorization_of
from gateway.intake.keys.api_key import ApiKey
from gateway.intake.limits import Limits
from gateway.metrics import Metrics
from gateway.sign_in.signing_in import SignIn
from shared.errors import (
    InternalError,
    InvalidApiKey,
    PermissionDenied,
    RateLimited,
    Unavailable,
)
from shared.settings import GatewaySettings
from shared.telemetry import audit, incidents, requests
from shared.telemetry.audit import Refusals

logger = logging.getLogger(__name__)

_STATUS = "/admin/v1/status"
_POLLED = frozenset({"/live", "/health", "/metrics", _STATUS})
"""The paths that probes, Prometheus and consoles request every few seconds."""
_OPERATORS = ("/admin", "/health", "/metrics")
_STREAMS = "/v1/streams/"
_MAX_NAMES, _MAX_NAME_CHARS = 16, 64
_MAX_PATH_CHARS = 256
_UNFIT = re.compile(r"[^A-Za-z0-9_.-]")
_WITHOUT_VERSION = (
    "/batches",
    "/chat/completions",
    "/completions",
    "/conversations",
    "/embeddings",
    "/files",
    "/messages",
    "/models",
    "/rerank",
    "/responses",
    "/score",
    "/uploads",
    "/usage",
)
_NEVER_VERSIONED = ("/v1/tokenize", "/v1/detokenize")


class RequestIds:
    """Assigns each request an unguessable id, as ``state["request_id"]`` and response header
    ``x-request-id``, which Anthropic calls ``request-id``. Routes whose responses contain an id
    replace it with that id.

    Two headers list what a route left out: the types of tools in ``state["ignored_tools"]``, and
    unknown parameters of the body in ``state["ignored_parameters"]``.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        state = scope.setdefault("state", {})
        state["request_id"] = f"req-{secrets.token_hex(16)}"

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers["x-request-id"] = state["request_id"]
                headers["request-id"] = state["request_id"]
                if result := state.get("cache_result"):
                    headers[CACHE_HEADER] = result
                if kinds := state.get("ignored_tools"):
                    headers[IGNORED_TOOLS_HEADER] = _listed(kinds)
                if names := state.get("ignored_parameters"):
                    headers[IGNORED_PARAMETERS_HEADER] = _listed(names)
            await send(message)

        return await self._app(scope, receive, send_with_id)


def _listed(given: Iterable[str]) -> str:
    """Clients choose these names, so they may not be fit for a header."""
    names = sorted({_UNFIT.sub("_", name[:_MAX_NAME_CHARS]) for name in given})
    return ", ".join(names[:_MAX_NAMES])


class Paths:
    """Serves paths that end with a slash, OpenAI's paths without ``/v1``, and vLLM's paths with it:
    clients' base URLs have either form.

    The paths of `_OPERATORS` each have a single spelling, so that a proxy can refuse them.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            path = scope["path"].rstrip("/") or "/"
            if any(path == exact or path.startswith(f"{exact}/") for exact in _OPERATORS):
                path = scope["path"]
            is_bare = any(path == bare or path.startswith(f"{bare}/") for bare in _WITHOUT_VERSION)
            if path in _NEVER_VERSIONED:
                path = path.removeprefix("/v1")
            scope["path"] = f"/v1{path}" if is_bare else path
        await self._app(scope, receive, send)


class Traces:
    """Starts the span of each request, as a child of the client's if it sent ``traceparent``. The
    log lines and jobs of the request have its trace. Spans of `_POLLED` are not exported."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        path, headers = scope["path"], Headers(scope=scope)
        attributes = {"http.request.method": scope["method"], "url.path": path[:_MAX_PATH_CHARS]}
        with requests.request_span(
            "gateway.request", SpanKind.SERVER, attributes, headers, is_exported=path not in _POLLED
        ) as span:

            async def send_observed(message: Message) -> None:
                if message["type"] == "http.response.start":
                    status = message["status"]
                    span.set_attribute("http.response.status_code", status)
                    if status >= 500:
                        span.set_status(StatusCode.ERROR)
                await send(message)

            try:
                await self._app(scope, receive, send_observed)
            finally:
                state = scope["state"]
                span.set_attribute("warren.request_id", state["request_id"])
                if model := state.get("model"):
                    span.set_attribute("model", model)


class KnownSites:
    """Rejects requests that a foreign web page makes the browser of a user send to a gateway
    without API keys: requests with the page's ``Origin``, and requests whose ``Host`` is a name of
    the page that now resolves to the gateway (DNS rebinding).

    A ``Host`` may be an address or a name without a dot, neither of which a foreign page can be
    loaded from, the gateway's configured host, or the host of an allowed origin. An ``Origin`` may
    be allowed for CORS, the gateway itself, or of this machine.
    """

    def __init__(self, app: ASGIApp, settings: GatewaySettings, metrics: Metrics) -> None:
        self._app = app
        self._metrics = metrics
        self._origins = frozenset(settings.cors_origins)
        self._names = {settings.host.lower()} | {_name_of(origin) for origin in self._origins}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            fault = self._fault_of(Headers(scope=scope))
            if fault is not None:
                error = HTTPException(403, fault)
                response = http_error_response(error, self._metrics, scope)
                return await response(scope, receive, send)
        return await self._app(scope, receive, send)

    def _fault_of(self, headers: Headers) -> str | None:
        host, origin = headers.get("host", ""), headers.get("origin")
        if not self._is_known(_name_of(f"//{host}")):
            return (
                "Unknown Host header. Without API keys, the gateway accepts only its own host, IP "
                "addresses and local names."
            )
        if origin is None or {origin, "*"} & self._origins:
            return None
        is_same = bool(host) and origin.partition("://")[2] == host
        if not is_same and not _is_of_this_machine(_name_of(origin)):
            return "This Origin is not allowed."
        return None

    def _is_known(self, name: str) -> bool:
        is_reachable = "." not in name or name in self._names or _is_of_this_machine(name)
        return is_reachable or _address_of(name) is not None


def _name_of(url: str) -> str:
    """The host of a URL in lower case; empty if it has none, and "." if it is malformed."""
    try:
        return urlsplit(url).hostname or ""
    except ValueError:
        return "."


def _is_of_this_machine(name: str) -> bool:
    address = _address_of(name)
    is_loopback = address is not None and address.is_loopback
    return is_loopback or name == "localhost" or name.endswith(".localhost")


def _address_of(name: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    with suppress(ValueError):
        return ipaddress.ip_address(name)
    return None


class Authentication:
    """Rejects requests without a valid API key, and requests whose key lacks the scope; stores the
    key as ``state["caller"]``, and its tenant as ``state["tenant"]``. Answers say how much of the
    key's limits is left. Without a key, the session of a person who has signed in replaces the key.

    Both are None if the request has a stream token instead of a key, because an ``EventSource``
    cannot send headers. The route verifies the token.
    """

    def __init__(
        self,
        app: ASGIApp,
        keys: Keys,
        sign_in: SignIn | None,
        limits: Limits,
        refusals: Refusals,
        metrics: Metrics,
    ) -> None:
        self._app = app
        self._sign_in = sign_in
        self._refusals = refusals
        self._keys = keys
        self._limits = limits
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        needed = self._keys.scope_of(scope["method"], scope["path"])
        if needed is None:
            return await self._app(scope, receive, send)
        state = scope["state"]
        try:
            caller = state["caller"] = await self._caller_of(scope)
            state["tenant"] = None if caller is None else caller.tenant
            if caller is not None:
                caller.require(needed)
        except (InvalidApiKey, PermissionDenied, Unavailable) as error:
            report(self._metrics, scope, error.code, status_of(error).code)
            if not isinstance(error, Unavailable):
                self._record_refusal(error, scope)
            return await error_response(error, scope)(scope, receive, send)
        if caller is not None:
            send = self._with_limits(caller, send)
            try:
                self._limits.count_any(caller)
            except RateLimited as error:
                report(self._metrics, scope, error.code, status_of(error).code, error.limit)
                return await error_response(error, scope)(scope, receive, send)
        if caller is not None and needed == "operator" and not _is_poll(scope):
            send = _recorded(caller, scope, send)
        return await self._app(scope, receive, send)

    def _record_refusal(self, error: InvalidApiKey | PermissionDenied, scope: Scope) -> None:
        known: ApiKey | None = scope["state"].get("caller")
        named = known or self._keys.named(authorization_of(Headers(scope=scope)))
        self._refusals.record(
            "login refused" if isinstance(error, InvalidApiKey) else "access refused",
            tenant="" if named is None else named.tenant,
            key_id="" if named is None else named.key_id,
            person="" if named is None else named.person,
            reason=error.message,
            **_fields_of(scope),
        )

    def _with_limits(self, caller: ApiKey, send: Send) -> Send:
        """Add the state of the key's limits to the response."""

        async def send_with_limits(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], *self._limits.headers(caller)]
            await send(message)

        return send_with_limits if caller.has_rates else send

    async def _caller_of(self, scope: Scope) -> ApiKey | None:
        headers = Headers(scope=scope)
        authorization = authorization_of(headers)
        has_token = scope["path"].startswith(_STREAMS) and b"token=" in scope["query_string"]
        if not authorization and has_token and self._keys.are_needed:
            return None
        if self._sign_in is not None:
            if not authorization and self._sign_in.has_session(headers.get("cookie", "")):
                return self._sign_in.caller_of(scope["method"], headers)
            if self._sign_in.is_token(authorization):
                return await self._sign_in.caller_of_token(authorization)
        return self._keys.find(authorization)


def _is_poll(scope: Scope) -> bool:
    """Whether it only reads the status, as a console does every second: no administrative act."""
    return (scope["method"], scope["path"]) == ("GET", _STATUS)


def _recorded(caller: ApiKey, scope: Scope, send: Send) -> Send:
    """Record an operator's request when it is answered."""

    async def send_recorded(message: Message) -> None:
        if message["type"] == "http.response.start":
            fields = {**_fields_of(scope), "status": message["status"]}
            audit.record(
                "operator's request",
                tenant=caller.tenant,
                key_id=caller.key_id,
                person=caller.person,
                **fields,
            )
        await send(message)

    return send_recorded


def _fields_of(scope: Scope) -> dict[str, object]:
    """The audit log's fields of a request. The query is omitted, because it may contain tokens."""
    client = scope.get("client")
    return {
        "method": scope["method"],
        "path": scope["path"][:_MAX_PATH_CHARS],
        "address": client[0] if client else "",
        "request_id": scope["state"]["request_id"],
    }


class ErrorBoundary:
    """Answers unexpected errors with a 500 without details, and reports them."""

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_started = False

        async def watched_send(message: Message) -> None:
            nonlocal is_started
            await send(message)
            is_started = True

        try:
            await self._app(scope, receive, watched_send)
        except (ClientDisconnect, ConnectionAbortedError):
            logger.debug("client disconnected before its request or its response was complete")
        except Exception as error:
            if scope["type"] != "http":
                raise
            fields = {"request_id": scope["state"]["request_id"]}
            incidents.report("request", "request failed", error, **fields)
            if not is_started:
                report(self._metrics, scope, InternalError.code, 500)
                with incidents.survived("request", "error not answered", **fields):
                    await internal_error_response(scope)(scope, receive, send)
