"""/admin/v1/streams, /admin/v1/batches and /admin/v1/keys: running work of all tenants, which
operators may end."""

from collections.abc import Sequence

from fastapi import APIRouter, Path, Query, Response
from msgspec import Struct

from gateway.api.openapi import answered
from gateway.api.routes import json_response
from gateway.api.routes.admin import MAX_STREAMS, StreamStatus, stream_status
from gateway.api.routes.batches import Batch, cancelled, described
from gateway.api.routes.streams import checked_id
from gateway.store.batches import BatchRecord
from gateway.wiring import Gateway
from shared.messages import StopWork

_STREAM_ID = Path(description="The id of a stream, of a detached request or of a response.")
_BATCH_ID = Path(description="The id of a batch.")
_KEY_ID = Path(max_length=64, pattern="^[0-9a-f]+$", description="The id of an API key.")


class StreamList(Struct, frozen=True, kw_only=True):
    data: Sequence[StreamStatus]
    """The oldest streams in flight at this gateway, at most 200."""
    num_streams: int


class StoppedStream(Struct, frozen=True, kw_only=True):
    id: str
    status: str = "cancelled"


class TenantBatch(Struct, frozen=True, kw_only=True):
    tenant: str
    batch: Batch


class TenantBatches(Struct, frozen=True, kw_only=True):
    data: Sequence[TenantBatch]
    """The newest batches of all tenants."""


class StoppedKey(Struct, frozen=True, kw_only=True):
    id: str
    num_batches: int
    """Batches that are being cancelled."""
    num_detached: int
    """Requests without a client that were cancelled. Requests with a client end, too."""


def router(gateway: Gateway) -> APIRouter:
    routes = APIRouter(prefix="/admin/v1", tags=["operators"])

    @routes.get("/streams", openapi_extra={"responses": {"200": answered(StreamList)}})
    async def list_streams() -> Response:
        """List the streams of all tenants that this gateway relays."""
        relays = gateway.relays.current()
        data = [stream_status(relay) for relay in relays[:MAX_STREAMS]]
        return json_response(StreamList(data=data, num_streams=len(relays)))

    @routes.delete(
        "/streams/{stream_id}", openapi_extra={"responses": {"200": answered(StoppedStream)}}
    )
    async def stop_stream(stream_id: str = _STREAM_ID) -> Response:
        """Cancel a request of any tenant, at any gateway. Its stream ends and is deleted."""
        await gateway.cancel(checked_id(stream_id), None)
        return json_response(StoppedStream(id=stream_id))

    @routes.get("/batches", openapi_extra={"responses": {"200": answered(TenantBatches)}})
    async def list_all_batches(
        limit: int = Query(20, ge=1, le=100, description="How many at most."),
    ) -> Response:
        """List the newest batches of all tenants."""
        state = await gateway.store.open()
        batches = await state.batches.page(None, after=None, limit=limit)
        return json_response(TenantBatches(data=list(map(_of_tenant, batches))))

    @routes.post(
        "/batches/{batch_id}/cancel", openapi_extra={"responses": {"200": answered(TenantBatch)}}
    )
    async def stop_batch(batch_id: str = _BATCH_ID) -> Response:
        """Cancel a batch of any tenant. Running requests are stopped, and existing answers are
        kept."""
        return json_response(_of_tenant(await cancelled(gateway, None, batch_id)))

    @routes.post(
        "/keys/{key_id}/stop-work", openapi_extra={"responses": {"200": answered(StoppedKey)}}
    )
    async def stop_work(key_id: str = _KEY_ID) -> Response:
        """Cancel all streams, batches and detached requests of an API key, which should be revoked
        before."""
        batches = (await gateway.store.open()).batches
        stopped = await gateway.stopper.stop(StopWork(key_id=key_id), batches)
        return json_response(StoppedKey(id=key_id, **stopped._asdict()))

    return routes


def _of_tenant(batch: BatchRecord) -> TenantBatch:
    return TenantBatch(tenant=batch.tenant, batch=described(batch))
