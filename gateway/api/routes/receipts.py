"""GET /v1/streams/{id}/receipt and /.well-known/jwks.json: receipts of answers, and the keys that
signed them."""

import time
from collections.abc import Sequence
from typing import Any

from fastapi import APIRouter, Request, Response
from msgspec import Struct

from gateway.api.event_stream import events_of, raise_failure
from gateway.api.openapi import answered
from gateway.api.render.formats import decode_rendering
from gateway.api.render.receipts import ReceiptRecorder
from gateway.api.routes import json_response
from gateway.api.routes.streams import READ_TOKEN, STREAM_ID, checked_id, right_to
from gateway.log.cursor import Departure, Item, Restarted
from gateway.log.relay import LogRelay
from gateway.wiring import Gateway
from shared.errors import InvalidRequest
from shared.messages import Receipt

_NOT_REQUESTED = (
    'This request did not ask for a receipt: send requests with "receipt": true, or with an API '
    "key that has receipts."
)


class SignedReceipt(Struct, frozen=True, kw_only=True, tag_field="object", tag="receipt"):
    id: str
    """The request's id."""
    receipt: str
    """A compact JWS (RFC 7515). Its payload is canonical JSON (RFC 8785)."""


class PublishedKeys(Struct, frozen=True, kw_only=True):
    """A JWK Set (RFC 7517)."""

    keys: Sequence[dict[str, Any]]


def router(gateway: Gateway) -> APIRouter:
    routes = APIRouter(tags=["streams"])

    @routes.get(
        "/v1/streams/{stream_id}/receipt",
        openapi_extra={"responses": {"200": answered(SignedReceipt)}},
    )
    async def get_receipt(
        request: Request, stream_id: str = STREAM_ID, token: str | None = READ_TOKEN
    ) -> Response:
        """The receipt of an answer, once it has ended. The stream must still be kept; the answer
        itself ends with the receipt, too. The stream's current reader is disconnected."""
        tenant, client = right_to(gateway, "read", stream_id, request, token)
        request.state.request_id = checked_id(stream_id)
        with gateway.admission.admit_without_body(client if tenant is None else tenant):
            async with gateway.executions.resume(stream_id, tenant) as relay:
                relay.close(Departure.LEFT)
                receipt = await _read(relay)
        signed = gateway.receipts.sign(receipt)
        return json_response(SignedReceipt(id=stream_id, receipt=signed))

    @routes.get(
        "/.well-known/jwks.json",
        openapi_extra={"responses": {"200": answered(PublishedKeys)}},
    )
    async def get_keys() -> Response:
        """The public keys of receipts, the current key first."""
        return json_response(gateway.receipts.published())

    return routes


async def _read(relay: LogRelay) -> Receipt:
    """Read a log to its end. Raises the error with which the job failed, and `InvalidRequest` if
    the request has no receipt."""
    recorder: ReceiptRecorder | None = None
    while not relay.is_ended:
        items: list[Item] = await relay.take()
        raise_failure(items)
        if recorder is None or isinstance(items[0], Restarted):
            assert relay.facts is not None
            recorder = ReceiptRecorder.of(decode_rendering(relay.facts))
        if recorder is None:
            raise InvalidRequest(_NOT_REQUESTED, param="stream_id")
        for event in events_of(items):
            recorder.read(event)
    assert recorder is not None
    return recorder.receipt(time.time())
