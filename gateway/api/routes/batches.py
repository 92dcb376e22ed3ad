"""/v1/batches: files of requests, which run behind all other requests.

These routes only read and change the state of batches; `gateway.batches` runs them.
"""

import re
import secrets
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Annotated, Any, Literal

import msgspec
from fastapi import APIRouter, Path, Query, Request, Response
from msgspec import Meta, Struct

from gateway.api.bodies.parsing import Body, parse, refused
from gateway.api.openapi import IDEMPOTENCY_KEY, answered, documented
from gateway.api.render.responses import OutputTokensDetails
from gateway.api.routes import json_response
from gateway.api.routes.files import ExpiresAfter
from gateway.api.routes.generation import admitted
from gateway.intake.admission import read_body
from gateway.intake.keys.api_key import ApiKey
from gateway.intake.signer import KEY_HEADER, check_key, hash_body
from gateway.store.batches import BatchRecord, BatchStatus, Order, TokensUsed
from gateway.wiring import Gateway
from shared import topology
from shared.bus.base import Message
from shared.errors import BusError
from shared.messages import Release, encode
from shared.off_loop import off_loop

_EXAMPLE: Mapping[str, Any] = {
    "input_file_id": "file-0123456789abcdef0123456789abcdef",
    "endpoint": "/v1/chat/completions",
    "completion_window": "24h",
}
_WINDOW = re.compile(r"([1-9]\d{0,6})([smhd])")
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 24 * 3600}
_MAX_WINDOW_S = 14 * 24 * 3600
_MAX_LISTED = 100
_BATCH_ID = Path(description="The `id` of the batch.")

Endpoint = Literal["/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses"]


class BatchOrder(Body, frozen=True, kw_only=True):
    """The body of ``POST /v1/batches``."""

    input_file_id: Annotated[str, Meta(max_length=64)]
    endpoint: Endpoint
    completion_window: Annotated[
        str, Meta(description="`24h`, or another number of `s`, `m`, `h` or `d`, up to `14d`.")
    ]
    metadata: (
        Annotated[
            dict[Annotated[str, Meta(max_length=64)], Annotated[str, Meta(max_length=512)]],
            Meta(max_length=16),
        ]
        | None
    ) = None
    output_expires_after: ExpiresAfter | None = None

    @property
    def window_s(self) -> int:
        """Raises `InvalidRequest`."""
        match = _WINDOW.fullmatch(self.completion_window)
        seconds = int(match[1]) * _SECONDS[match[2]] if match is not None else 0
        if not 0 < seconds <= _MAX_WINDOW_S:
            raise refused("completion_window", "expected a duration such as 24h, up to 14d.")
        return seconds


class LineError(Struct, frozen=True, kw_only=True):
    code: str
    line: int | None
    message: str
    param: str | None


class LineErrors(Struct, frozen=True, tag_field="object", tag="list"):
    data: Sequence[LineError]


class RequestCounts(Struct, frozen=True, kw_only=True):
    total: int
    completed: int
    failed: int


class CachedTokens(Struct, frozen=True):
    cached_tokens: int


class BatchUsage(Struct, frozen=True, kw_only=True):
    """The sums over the answers so far."""

    input_tokens: int
    input_tokens_details: CachedTokens
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class Batch(Struct, frozen=True, kw_only=True, tag_field="object", tag="batch"):
    id: str
    endpoint: str
    errors: LineErrors | None
    input_file_id: str
    completion_window: str
    status: BatchStatus
    output_file_id: str | None
    error_file_id: str | None
    created_at: int
    in_progress_at: int | None
    expires_at: int
    finalizing_at: int | None
    completed_at: int | None
    failed_at: int | None
    expired_at: int | None
    cancelling_at: int | None
    cancelled_at: int | None
    request_counts: RequestCounts
    metadata: Mapping[str, str] | None
    model: str | None
    """That of all requests, once they are checked; null if there are several."""
    usage: BatchUsage | None
    num_promoted: int | None
    """Answered requests that ran with interactive priority, because the batch was late; null for
    batches of earlier versions."""


class BatchList(Struct, frozen=True, kw_only=True, tag_field="object", tag="list"):
    data: Sequence[Batch]
    first_id: str | None
    last_id: str | None
    has_more: bool


def router(gateway: Gateway) -> APIRouter:
    routes = APIRouter(tags=["batches"])
    documents: dict[str, Any] = {"responses": {"200": answered(Batch)}}
    document = documented(BatchOrder, _EXAMPLE, Batch, streams=False)
    document["parameters"] = [IDEMPOTENCY_KEY]

    @routes.post("/v1/batches", openapi_extra=document)
    async def create_batch(request: Request) -> Response:
        """Order the answers to all requests of a file. The file is checked first: the batch fails
        if any request is not valid."""
        with gateway.admission.admit_with_body(request.state.tenant) as entry:
            raw_body = await read_body(request, gateway.settings.max_body_bytes, entry)
            body = await off_loop(partial(parse, BatchOrder, raw_body), entry.num_bytes)
            key = request.headers.get(KEY_HEADER)
            expiry = body.output_expires_after
            caller: ApiKey = request.state.caller
            order = Order(
                endpoint=body.endpoint,
                input_file_id=body.input_file_id,
                completion_window=body.completion_window,
                window_s=body.window_s,
                metadata=body.metadata,
                output_expires_after_s=None if expiry is None else expiry.seconds,
                idempotency_key=None if key is None else check_key(key),
                body_hash=None if key is None else hash_body(raw_body),
                key_id=caller.key_id,
                key_limits=caller.limits,
            )
            state = await gateway.store.open()
            for space in state.spaces:
                await space.require()
            batch = await state.batches.create(request.state.tenant, order)
        gateway.batches_changed.set()
        return json_response(described(batch))

    @routes.get("/v1/batches", openapi_extra={"responses": {"200": answered(BatchList)}})
    async def list_batches(
        after: str | None = Query(None, description="The id after which the page begins."),
        limit: int = Query(20, ge=1, le=_MAX_LISTED, description="The size of a page."),
    ) -> Response:
        """List batches, newest first."""

        async def answer(request: Request) -> Response:
            state = await gateway.store.open()
            found = await state.batches.page(request.state.tenant, after=after, limit=limit + 1)
            page = [described(batch) for batch in found[:limit]]
            return json_response(
                BatchList(
                    data=page,
                    first_id=page[0].id if page else None,
                    last_id=page[-1].id if page else None,
                    has_more=len(found) > limit,
                )
            )

        return admitted(gateway, answer)

    @routes.get("/v1/batches/{batch_id}", openapi_extra=documents)
    async def get_batch(batch_id: str = _BATCH_ID) -> Response:
        """Describe a batch as it is at the moment."""

        async def answer(request: Request) -> Response:
            state = await gateway.store.open()
            return json_response(described(await state.batches.get(request.state.tenant, batch_id)))

        return admitted(gateway, answer)

    @routes.post("/v1/batches/{batch_id}/cancel", openapi_extra=documents)
    async def cancel_batch(request: Request, batch_id: str = _BATCH_ID) -> Response:
        """Cancel a batch. Running requests are stopped, and existing answers are kept."""
        batch = await cancelled(gateway, request.state.tenant, batch_id)
        return json_response(described(batch))

    return routes


async def cancelled(gateway: Gateway, tenant: str | None, batch_id: str) -> BatchRecord:
    """Begin to cancel a batch of a tenant, or of any tenant if ``tenant`` is None. Raises as
    `gateway.store.batches.Batches.cancel`."""
    state = await gateway.store.open()
    batch, is_new = await state.batches.cancel(tenant, batch_id)
    if is_new:
        gateway.batches_changed.set()
        release = Release(
            request_id=batch_id,
            is_cancelled=True,
            reader=secrets.token_hex(16),
            tenant=batch.tenant,
        )
        with suppress(BusError):  # the gateway that runs it looks regularly
            await gateway.bus.publish(topology.ALL_GATEWAYS, Message(encode(release)))
    return batch


def described(batch: BatchRecord) -> Batch:
    same = {name: getattr(batch, name) for name in _SAME}
    errors = None
    if batch.errors is not None:
        errors = LineErrors(msgspec.convert(batch.errors, list[LineError]))
    counts = RequestCounts(
        total=batch.num_lines, completed=batch.num_completed, failed=batch.num_failed
    )
    model = batch.models[0] if batch.models is not None and len(batch.models) == 1 else None
    usage = None if batch.used is None else _usage(batch.used)
    return Batch(**same, errors=errors, request_counts=counts, model=model, usage=usage)


_SAME = frozenset(Batch.__struct_fields__) - {"errors", "request_counts", "model", "usage"}


def _usage(used: TokensUsed) -> BatchUsage:
    return BatchUsage(
        input_tokens=used.num_input_tokens,
        input_tokens_details=CachedTokens(used.num_cached_tokens),
        output_tokens=used.num_output_tokens,
        output_tokens_details=OutputTokensDetails(used.num_reasoning_tokens),
        total_tokens=used.num_input_tokens + used.num_output_tokens,
    )
