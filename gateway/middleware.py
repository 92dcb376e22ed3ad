"""Middleware for every request: request ids, authentication, and the handler of unexpected
errors."""

import logging
import secrets

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gateway.errors import error_response, internal_error_response
from gateway.intake.api_keys import Keys, needs_key
from gateway.metrics import Metrics
from shared import incidents
from shared.errors import InternalError, InvalidApiKey

logger = logging.getLogger(__name__)

_STREAMS = "/v1/streams/"


class RequestIds:
    """Assigns each request an unguessable id, as ``state["request_id"]`` and response header
    ``x-request-id``. Routes whose responses contain an id replace it with that one."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        state = scope.setdefault("state", {})
        state["request_id"] = f"req-{secrets.token_hex(16)}"

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)["x-request-id"] = state["request_id"]
            await send(message)

        return await self._app(scope, receive, send_with_id)


class Authentication:
    """Rejects requests without a valid API key; stores the key's tenant as ``state["tenant"]``.

    The tenant is None if the request has a stream token instead of a key, because an
    ``EventSource`` cannot send headers. The route verifies the token.
    """

    def __init__(self, app: ASGIApp, keys: Keys, metrics: Metrics) -> None:
        self._app = app
        self._keys = keys
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not needs_key(scope["path"]):
            return await self._app(scope, receive, send)
        try:
            scope["state"]["tenant"] = self._tenant_of(scope)
        except InvalidApiKey as error:
            self._metrics.count_error(error.code)
            return await error_response(error)(scope, receive, send)
        return await self._app(scope, receive, send)

    def _tenant_of(self, scope: Scope) -> str | None:
        if not self._keys.are_needed:
            return ""
        authorization = Headers(scope=scope).get("authorization", "")
        has_token = scope["path"].startswith(_STREAMS) and b"token=" in scope["query_string"]
        if not authorization and has_token:
            return None
        return self._keys.tenant_of(authorization)


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
            facts = {"request_id": scope["state"]["request_id"]}
            incidents.report("request", "request failed", error, **facts)
            if not is_started:
                self._metrics.count_error(InternalError.code)
                with incidents.survived("request", "error not answered", **facts):
                    await internal_error_response()(scope, receive, send)
