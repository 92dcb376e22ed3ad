"""GET and DELETE /v1/streams/{id}: streams whose client went away, or wants no more of them."""

from typing import Any

from fastapi import APIRouter, Header, Path, Query, Request, Response

from gateway.api.responders import resumption
from gateway.log.framing import EventId, Framer
from gateway.wiring import Gateway
from shared.errors import InvalidApiKey

_STREAM_ID = Path(description="The `id` of the response, or its `x-request-id`.")
_TOKEN = Query(None, description="The `x-stream-token` of the stream, instead of an API key.")


def router(gateway: Gateway) -> APIRouter:
    routes = APIRouter(tags=["streams"])

    def right_to(request_id: str, request: Request, token: str | None) -> str | None:
        """The tenant whose request it must be; None where the token proves the right to it."""
        tenant: str | None = request.state.tenant
        if token is not None and gateway.signer.is_stream_token(request_id, token):
            return None
        if token is not None or tenant is None:
            raise InvalidApiKey("This token is not the stream's.", param="token")
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
        token: str | None = _TOKEN,
        last_event_id: str = Header(
            "", description="The same as `after`, which it overrides. An `EventSource` sends it."
        ),
    ) -> Response:
        """Go on with a stream, from any gateway: 204 where there is nothing more, 410 where it is
        no longer kept."""
        place = EventId.parse(last_event_id or after)
        tenant = right_to(stream_id, request, token)
        request.state.request_id = resumption.checked_id(stream_id)
        return resumption.resume(gateway, stream_id, tenant, Framer(place))

    @routes.delete("/v1/streams/{stream_id}")
    async def cancel_stream(
        request: Request, stream_id: str = _STREAM_ID, token: str | None = _TOKEN
    ) -> dict[str, Any]:
        """Cancel a request, from any gateway: its stream ends, and nothing of it is kept."""
        await resumption.cancel(gateway, stream_id, right_to(stream_id, request, token))
        return {"id": stream_id, "object": "stream", "deleted": True}

    return routes
