"""What becomes of a body that was read: checked to the end, named, and ready to be published."""

import time

from fastapi import Request

from gateway.api.bodies.draft import Draft, GenerationBody, Submission, draft
from gateway.api.bodies.structured_output import check
from gateway.intake.body import read_body
from gateway.intake.signer import KEY_HEADER, hash_body
from gateway.wiring import Gateway
from shared.messages import Announcement


async def received(gateway: Gateway, request: Request) -> bytes:
    """Read a request's body in one of the gateway's places: uploads are bounded, too.

    Raises `Overloaded`, `Unavailable` and what `read_body` raises.
    """
    with gateway.admission.upload():
        return await read_body(request, gateway.settings.max_body_bytes)


def draft_of(gateway: Gateway, request: Request, body: GenerationBody) -> Draft:
    """Build the job of a body, under the id that the request has so far. Raises what
    `gateway.api.bodies.draft.draft` raises."""
    now = time.time()
    settings = gateway.settings
    timeout_s = settings.detach_ttl_s if body.detach else settings.request_timeout_s
    return draft(
        body,
        request_id=request.state.request_id,
        created_at=now,
        deadline=now + min(timeout_s, body.timeout or timeout_s),
        served=announcement(gateway, body.model),
    )


async def submitted(
    gateway: Gateway, request: Request, draft: Draft, raw_body: bytes, kind: str
) -> Submission:
    """The job to publish, under the id ``kind-...`` that its answer bears.

    Raises `InvalidRequest`, `ModelNotFound`, `Overloaded` and `BusError`.
    """
    with gateway.admission.admit():
        await gateway.workers.require(draft.job.model)
        if draft.wanted is not None:
            await check(draft.wanted)
    # After the checks: a bad request takes no spare queue, and no place among the metrics.
    tenant, key = request.state.tenant, request.headers.get(KEY_HEADER)
    request.state.request_id = gateway.new_request_id(
        kind, tenant=tenant, key=key, is_detached=draft.job.is_detached
    )
    body_hash = "" if key is None else hash_body(raw_body)
    return draft.identified(request.state.request_id, tenant=tenant, body_hash=body_hash)


def announcement(gateway: Gateway, model: str) -> Announcement | None:
    """What a live worker says of a model: workers of one name agree on it."""
    workers = gateway.workers.of_model(model)
    return workers[0] if workers else None
