"""What surrounds every request: its id, and the last resort for errors."""

import logging
import secrets

from starlette.datastructures import MutableHeaders
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gateway.http_errors import internal_error_response

logger = logging.getLogger(__name__)


class RequestIds:
    """Gives every request an id that cannot be guessed, as ``state["request_id"]`` and as the
    response's ``x-request-id``. Routes whose answers bear an id put that one in its place."""

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


class ErrorBoundary:
    """Answers what nobody expected with a 500 that tells nothing, and logs it."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_started = False

        async def watched_send(message: Message) -> None:
            nonlocal is_started
            is_started = True
            await send(message)

        try:
            await self._app(scope, receive, watched_send)
        except ClientDisconnect:
            logger.debug("client left before its body was complete")
        except Exception:
            if scope["type"] != "http":
                raise
            logger.exception("request failed", extra={"request_id": scope["state"]["request_id"]})
            if not is_started:
                await internal_error_response()(scope, receive, send)
