"""GET and DELETE /v1/streams/{id}: resumes and cancels streams."""

import re
from functools import partial
from typing import Any

from fastapi import APIRouter, Header, Path, Query, Request, Response
from starlette.types import Receive, Scope, Send

from gateway.api import response_storage
from gateway.api.event_stream import (
    STREAM_HEADERS,
    ClientGone,
    EventStream,
    raise_failure,
    until_disconnect,
)
from gateway.api.render.formats import decode_rendering
from gateway.errors import SERVICE_FAILURES, status_of
from gateway.intake.keys.api_key import ApiKey
from gateway.intake.signer import Verb
from gateway.log.cursor import NOT_FOUND, Departure
from gateway.log.framing import EventId, Framer
from gateway.log.relay import LogRelay
from gateway.wiring import Gateway
from shared.errors import InvalidApiKey, StreamNotFound, TakenOver, Unavailable, WarrenError
from shared.telemetry import requests

_REPLAY_PAUSE_S = 0.1
"""Seconds without a further event after which the log is considered read to its current end."""
_CONTINUED_ELSEWHERE = (TakenOver, Unavailable)
"""The errors of a stream that another connection or another gateway continues."""
_START = {"type": "http.response.start"}
_ID = re.compile(r"[a-z]{1,16}[-_][0-9a-f]{32}")
STREAM_ID = Path(description="The `id` of the response, or its `x-request-id`.")
READ_TOKEN = Query(None, description="The stream's `x-stream-token`, instead of an API key.")
_CANCEL_TOKEN = Query(None, description="The stream's `x-cancel-token`, instead of an API key.")


def checked_id(request_id: str) -> str:
    """Return the id if it can be the id of a request. Raises `StreamNotFound`."""
    if _ID.fullmatch(request_id) is None:
        raise StreamNotFound(NOT_FOUND)
    return request_id


class ResumedStream(Response):
    """Answers with the rest of a request's stream, or with 204 if there is none, whichever gateway
    started it. Until the first byte is sent, errors of the log are raised."""

    def __init__(
        self,
        gateway: Gateway,
        request_id: str,
        tenant: str | None,
        framer: Framer,
        *,
        admitted_as: str = "",
    ) -> None:
        """``tenant`` must be the tenant of the request; None if the right to the stream is already
        proved, and the client takes its slot as ``admitted_as``."""
        super().__init__()
        self._gateway = gateway
        self._request_id = request_id
        self._tenant = tenant
        self._admitted_as = admitted_as if tenant is None else tenant
        self._framer = framer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._gateway.admission.admit_without_body(self._admitted_as):
            async with self._gateway.executions.resume(self._request_id, self._tenant) as relay:
                self._gateway.metrics.resumed.inc()
                try:
                    await self._stream(relay, receive, send)
                    relay.close(Departure.SERVED)
                except ClientGone:
                    relay.close(Departure.LEFT)
                except WarrenError:
                    relay.close(Departure.LEFT)
                    raise

    async def _stream(self, relay: LogRelay, receive: Receive, send: Send) -> None:
        finish = partial(response_storage.finish, self._gateway)
        stream = EventStream(
            relay,
            self._gateway.tuning.ping_interval_s,
            self._framer,
            self._gateway.receipts.sign,
            finish,
        )
        async with until_disconnect(receive):
            data = await self._first(relay, stream)
            requests.write_line("stream resumed", None, self._fields_of(relay))
            status = 200
            if not relay.is_ended:
                await send({**_START, "status": 200, "headers": STREAM_HEADERS})
                last = await stream.send_all(data, send)
            else:
                last = data + stream.end()
                if self._framer.has_sent:
                    await send({**_START, "status": 200, "headers": STREAM_HEADERS})
                else:
                    status, last = 204, b""
                    await send({**_START, "status": status, "headers": []})
            self._write_end(relay, stream.failure, status)
        await stream.send_last(last, send)

    def _write_end(self, relay: LogRelay, failure: WarrenError | None, status: int) -> None:
        """Write that the request has ended, unless another reader continues its stream. Its first
        reader has counted the request, so its metrics are not."""
        if isinstance(failure, _CONTINUED_ELSEWHERE):
            return
        reader = relay.cursor.reader
        fields = {
            "resumed": True,
            "status": status,
            "code": None if failure is None else failure.code,
            "completion_tokens": sum(len(chain.token_ids) for chain in reader.chains),
            "worker": reader.worker,
            "attempt": reader.attempt or None,
        }
        is_warning = failure is not None and status_of(failure).code in SERVICE_FAILURES
        requests.write_line(
            "request ended", None, self._fields_of(relay) | fields, is_warning=is_warning
        )

    def _fields_of(self, relay: LogRelay) -> dict[str, object]:
        """The facts of the request as fields of a log line, as far as they have been read."""
        fields: dict[str, object] = {"request_id": self._request_id, "tenant": self._tenant or None}
        if relay.facts is not None:
            fields |= {
                "model": decode_rendering(relay.facts).model,
                "tenant": relay.facts.tenant or None,
                "trace_id": relay.facts.trace_id or None,
            }
        return fields

    async def _first(self, relay: LogRelay, stream: EventStream) -> bytes:
        """The first bytes that the client has not received yet, or a ping if they take too long;
        empty if the log ends first."""
        data, timeout_s = b"", self._gateway.tuning.first_event_timeout_s
        while not data and not relay.is_ended:
            items = await relay.take(timeout_s)
            if relay.facts is None:
                raise_failure(items)
            data = stream.render(items) if items else stream.ping
            timeout_s = _REPLAY_PAUSE_S
        return data


def right_to(
    gateway: Gateway, verb: Verb, request_id: str, request: Request, token: str | None
) -> tuple[str | None, str]:
    """The tenant that must own the request, None if the token proves the right to it; and the
    tenant of the client. Raises `InvalidApiKey`."""
    tenant: str | None = request.state.tenant
    if token is not None:
        tag = gateway.signer.tag_in_token(request_id, verb, token)
        owner = None if tag is None else gateway.tenant_of(tag, verb)
        if owner is not None:
            return None, owner
    if token is not None or tenant is None:
        fields = {"reason": f"token not valid to {verb}", "path": request.url.path[:256]}
        caller: ApiKey | None = request.state.caller
        key_id = "" if caller is None else caller.key_id
        gateway.refusals.record("login refused", tenant=tenant or "", key_id=key_id, **fields)
        raise InvalidApiKey(
            f"This token does not permit you to {verb} this stream, it has expired, or its API "
            "key was revoked.",
            param="token",
        )
    return tenant, tenant


def router(gateway: Gateway) -> APIRouter:
    routes = APIRouter(tags=["streams"])

    @routes.get(
        "/v1/streams/{stream_id}",
        response_class=Response,
        responses={204: {"description": "There is nothing more."}},
    )
    async def resume_stream(
        request: Request,
        stream_id: str = STREAM_ID,
        after: str = Query(
            "", description="The `id:` of the last event that was received; empty: the start."
        ),
        token: str | None = READ_TOKEN,
        last_event_id: str = Header(
            "", description="The same as `after`, which it overrides. An `EventSource` sends it."
        ),
    ) -> Response:
        """Continue a stream, at any gateway. The status is 204 if there is nothing more, and 410 if
        the stream is no longer kept."""
        position = EventId.parse(last_event_id or after)
        tenant, client = right_to(gateway, "read", stream_id, request, token)
        request.state.request_id = checked_id(stream_id)
        return ResumedStream(gateway, stream_id, tenant, Framer(position), admitted_as=client)

    @routes.delete("/v1/streams/{stream_id}")
    async def cancel_stream(
        request: Request, stream_id: str = STREAM_ID, token: str | None = _CANCEL_TOKEN
    ) -> dict[str, Any]:
        """Cancel a request, at any gateway. Its stream ends and is deleted."""
        tenant, _ = right_to(gateway, "cancel", stream_id, request, token)
        await gateway.cancel(checked_id(stream_id), tenant)
        return {"id": stream_id, "object": "stream", "deleted": True}

    return routes
