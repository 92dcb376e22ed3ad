"""GET and DELETE /v1/streams/{id}: streams whose client went away, or wants no more of them."""

from typing import Any

from fastapi import APIRouter, Header, Path, Query, Request, Response

from gateway.api.responders import resumption
from gateway.intake.signer import Verb
from gateway.log.framing import EventId, Framer
from gateway.wiring import Gateway
from shared.errors import InvalidApiKey

_STREAM_ID = Path(description="The `id` of the response, or its `x-request-id`.")
_READ_TOKEN = Query(None, description="The stream's `x-stream-token`, instead of an API key.")
_CANCEL_TOKEN = Query(None, description="The stream's `x-cancel-token`, instead of an API key.")


def router(gateway: Gateway) -> APIRouter:
    routes = APIRouter(tags=["streams"])

    def right_to(verb: Verb, request_id: str, request: Request, token: str | None) -> str | None:
        """The tenant whose request it must be; None where the token proves the right to it."""
        tenant: str | None = request.state.tenant
        if token is not None and gateway.signer.is_stream_token(request_id, verb, token):
            return None
        if token is not None or tenant is None:
            raise InvalidApiKey(
                f"This token is not the stream's to {verb}, or has expired.", param="token"
            )
        return tenant

    @routes.get(
        "/v1/streams/{stream_id}",
        response_class=Response,
        responses={204: {"description": "There is nothing more."}},
    )
    async def resume_stream(
        request: Request,
        stream_id: str = _STREAM_ID,
        after: str = Query(
            "", description="The `id:` of the last event that was received; empty: the start."
        ),
        token: str | None = _READ_TOKEN,
        last_event_id: str = Header(
            "", description="The same as `after`, which it overrides. An `EventSource` sends it."
        ),
    ) -> Response:
        """Go on with a stream, from any gateway: 204 where there is nothing more, 410 where it is
        no longer kept."""
        place = EventId.parse(last_event_id or after)
        tenant = right_to("read", stream_id, request, token)
        request.state.request_id = resumption.checked_id(stream_id)
        return resumption.resume(gateway, stream_id, tenant, Framer(place))

    @routes.delete("/v1/streams/{stream_id}")
    async def cancel_stream(
        request: Request, stream_id: str = _STREAM_ID, token: str | None = _CANCEL_TOKEN
    ) -> dict[str, Any]:
        """Cancel a request, from any gateway: its stream ends, and nothing of it is kept."""
        tenant = right_to("cancel", stream_id, request, token)
        await resumption.cancel(gateway, stream_id, tenant)
        return {"id": stream_id, "object": "stream", "deleted": True}

    return routes
