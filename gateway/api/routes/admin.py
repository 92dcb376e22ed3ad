"""/admin/v1: the endpoints for operators, which the console and ``warren status`` use.

With API keys, an operator's key has the scope ``operator``. Without them, everyone is an operator
if the gateway listens on the loopback interface only, and otherwise nobody.
"""

import math
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from typing import Literal

from fastapi import APIRouter, Path, Query, Response
from msgspec import Struct, field
from starlette.exceptions import HTTPException

from gateway.api.openapi import answered
from gateway.api.render.formats import decode_rendering
from gateway.api.routes import json_response
from gateway.api.routes.history import HistorySample, history_sample
from gateway.api.routes.second_runs import (
    DisagreementStatus,
    ModelRuns,
    disagreements,
    runs_by_model,
)
from gateway.fleet.gauges import DUE_WITHIN_S
from gateway.fleet.queue_watch import QueueReading
from gateway.intake.keys.api_key import ApiKey
from gateway.log.cursor import LogEnd
from gateway.log.relay import LogRelay
from gateway.wiring import Gateway, GatewayState
from shared import topology
from shared.bus.base import Message
from shared.errors import StreamNotFound, Unroutable
from shared.messages import Announcement, Drain, JobClass, encode
from shared.topology import Lane
from shared.version import VERSION

MAX_STREAMS = 200
_MAX_KEYS = 200
_WORKER_ID = Path(description="The id of the worker, as `/admin/v1/status` lists it.")


class GatewayStatus(Struct, frozen=True, kw_only=True):
    id: str
    """Differs between gateways: behind a proxy, each answer may come from another gateway."""
    version: str
    started_at: float
    """Unix time in seconds."""
    status: GatewayState
    num_requests: int
    """Requests in flight at this gateway, of all kinds."""


class WorkerStatus(Struct, frozen=True, kw_only=True):
    id: str
    model: str
    state: Literal["serving", "engine_away", "leaving"]
    """With `engine_away`, its engine's server does not answer, and it takes no jobs."""
    end_notice: str
    """The notice that its machine ends soon, for which it leaves; empty if there is none."""
    engine: str
    """The kind and version of the engine's server; empty for Warren's own engine."""
    device: str
    """`cpu` or `cuda`; empty if the worker does not say."""
    numerics: str
    """The worker's arithmetic: device, instructions, data type and kernels."""
    num_running: int
    """Sequences in the batch."""
    num_waiting: int
    """Sequences that the worker has taken and that wait for a place in the batch."""
    num_free: int
    """Places in the batch that are free."""
    max_num_seqs: int
    max_seq_len: int
    num_answered: int
    """Jobs answered since the worker's start."""
    kv_usage: float
    """Share of the KV cache in use, 0 to 1."""
    started_at: float | None
    """Unix time in seconds; null if the worker does not say."""
    heard_s: float
    """Seconds since the worker's last heartbeat."""


class QueueStatus(Struct, frozen=True, kw_only=True):
    model: str
    lane: Lane
    """The class of the jobs; `quick` are tokenization and embeddings, `suspect` jobs whose workers
    crashed."""
    num_waiting: int
    """Jobs that wait for a worker."""
    num_consumers: int
    oldest_s: float | None
    """The age of the oldest waiting job in seconds, at most; null if none waits."""


class StreamStatus(Struct, frozen=True, kw_only=True):
    id: str
    tenant: str
    model: str
    state: Literal["waiting", "running", "ended"]
    worker: str | None
    """The id of the worker that runs the request."""
    num_workers: int
    """Workers that have started the request."""
    num_crashes: int
    """Workers that were lost while they ran it."""
    num_tokens: int
    """Tokens generated so far."""
    created_at: float
    """Unix time in seconds."""
    is_detached: bool


class TenantStatus(Struct, frozen=True, kw_only=True):
    """The generation requests of a tenant at this gateway, since the gateway's start."""

    tenant: str
    num_requests: int
    num_in_flight: int
    num_interactive: int
    """The requests in flight of the class ``interactive``."""
    num_failed: int
    num_cancelled: int
    """Requests that were cancelled, also by the end of their batch. They did not fail."""
    num_prompt_tokens: int
    num_cached_tokens: int
    num_generated_tokens: int


class KeyStatus(Struct, frozen=True, kw_only=True):
    """The limits of an API key, and its use at all gateways. A limit of null is no limit, and the
    use of a key without limits is not counted: it is null."""

    id: str
    tenant: str
    label: str
    requests_per_minute: int | None
    num_requests: int | None
    """Requests of the last minute."""
    tokens_per_minute: int | None
    num_tokens: int | None
    """Tokens of the last minute."""
    max_concurrent: int | None
    num_running: int | None
    """Requests in flight."""
    expires_at: float | None
    """Unix time in seconds."""


class DeadlineStatus(Struct, frozen=True, kw_only=True):
    """The requests of a model and a class at this gateway that no worker has started."""

    model: str
    job_class: JobClass = field(name="class")
    slack_s: float
    """Seconds to the nearest deadline; negative if it has passed."""
    due_tokens: Mapping[str, int]
    """About how many tokens, prompts and answers together, are due within so many seconds."""


class ServiceStatus(Struct, frozen=True, kw_only=True):
    gateway: GatewayStatus
    workers: Sequence[WorkerStatus]
    queues: Sequence[QueueStatus]
    streams: Sequence[StreamStatus]
    """The oldest streams in flight at this gateway, at most 200."""
    num_streams: int
    tenants: Sequence[TenantStatus]
    keys: Sequence[KeyStatus]
    """The API keys in the order of their file, at most 200."""
    num_dead_letters: int
    runs: Sequence[ModelRuns]
    """What became of hedges, audits and equal requests."""
    deadlines: Sequence[DeadlineStatus]
    """The deadlines of the requests of this gateway that no worker has started."""
    disagreements: Sequence[DisagreementStatus]
    """The newest 20 answers about which workers disagree, the newest first."""
    recent: HistorySample | None
    """The measurements of this gateway in its last interval of 15 seconds; null before the first
    interval has ended."""


class Done(Struct, frozen=True, kw_only=True):
    id: str
    status: Literal["draining"]


def router(gateway: Gateway) -> APIRouter:
    routes = APIRouter(prefix="/admin/v1", tags=["operators"])

    @routes.get("/status", openapi_extra={"responses": {"200": answered(ServiceStatus)}})
    async def get_status() -> Response:
        """Show live workers, queues, streams and tenants, as this gateway sees them."""
        relays = gateway.relays.current()
        streams = [stream_status(relay) for relay in relays[:MAX_STREAMS]]
        tenants = sorted(gateway.metrics.tenant_usage.by_tenant.items())
        status = ServiceStatus(
            gateway=_gateway(gateway),
            workers=[_worker(*heard) for heard in gateway.workers.announced()],
            queues=[_queue(*item) for item in gateway.queues.readings.items()],
            streams=streams,
            num_streams=len(relays),
            tenants=[TenantStatus(tenant=tenant, **asdict(usage)) for tenant, usage in tenants],
            keys=[_key(key, gateway) for key in gateway.keys.known[:_MAX_KEYS]],
            num_dead_letters=gateway.queues.num_dead,
            runs=runs_by_model(gateway),
            deadlines=_deadlines(gateway),
            disagreements=disagreements(gateway),
            recent=history_sample(gateway.samples.latest[-1]) if gateway.samples.latest else None,
        )
        return json_response(status)

    @routes.post("/workers/{worker_id}/drain", openapi_extra={"responses": {"200": answered(Done)}})
    async def drain_worker(
        worker_id: str = _WORKER_ID,
        immediate: bool = Query(
            False, description="Hand running requests over to other workers at once."
        ),
    ) -> Response:
        """Make a worker exit once it has no more requests. It takes no new requests; running
        requests may finish within its `WARREN_DRAIN_GRACE_S` and then continue on other workers."""
        # Log lines name a worker by its address.
        address = topology.worker_address(topology.worker_id_of(worker_id))
        if address not in {worker.worker for worker, _ in gateway.workers.announced()}:
            raise HTTPException(404, "There is no such worker.")
        command = Message(encode(Drain(is_immediate=immediate)))
        try:
            await gateway.bus.publish(topology.worker_binding(address), command)
        except Unroutable:
            raise HTTPException(404, "This worker has just disconnected.") from None
        return json_response(Done(id=worker_id, status="draining"))

    return routes


def _gateway(gateway: Gateway) -> GatewayStatus:
    return GatewayStatus(
        id=gateway.limits.name,
        version=VERSION,
        started_at=gateway.started_at,
        status=gateway.state,
        num_requests=gateway.admission.num_requests,
    )


def _key(key: ApiKey, gateway: Gateway) -> KeyStatus:
    use = gateway.limits.use_of(key)
    return KeyStatus(
        id=key.key_id,
        tenant=key.tenant,
        label=key.label,
        requests_per_minute=key.requests_per_minute,
        num_requests=None if use is None else use.num_requests,
        tokens_per_minute=key.tokens_per_minute,
        num_tokens=None if use is None else use.num_tokens,
        max_concurrent=key.max_concurrent,
        num_running=None if use is None else use.num_running,
        expires_at=None if key.expires is None else key.expires.timestamp(),
    )


def _state_of(worker: Announcement) -> Literal["serving", "engine_away", "leaving"]:
    if worker.is_leaving:
        return "leaving"
    return "engine_away" if worker.is_engine_away else "serving"


def _worker(worker: Announcement, heard_s: float) -> WorkerStatus:
    return WorkerStatus(
        id=topology.worker_id_of(worker.worker),
        model=worker.model,
        state=_state_of(worker),
        end_notice=worker.end_notice,
        engine=worker.engine,
        device=worker.numerics.partition(" ")[0],
        numerics=worker.numerics,
        num_running=worker.num_running,
        num_waiting=worker.num_waiting,
        num_free=max(0, worker.max_num_seqs - worker.num_running),
        max_num_seqs=worker.max_num_seqs,
        max_seq_len=worker.max_seq_len,
        num_answered=worker.num_answered,
        kv_usage=worker.kv_usage,
        started_at=worker.started_at or None,
        heard_s=heard_s,
    )


def _deadlines(gateway: Gateway) -> list[DeadlineStatus]:
    """Of each model and class with requests that no worker has started."""
    relays = gateway.relays
    found = []
    for model in sorted(gateway.workers.known_models):
        for job_class in topology.JOB_CLASSES:
            num_tokens = relays.due_tokens(model, job_class, (*DUE_WITHIN_S, math.inf))
            if not num_tokens[-1]:
                continue
            due = {str(s): num for s, num in zip(DUE_WITHIN_S, num_tokens, strict=False)}
            slack_s = relays.slack_s(model, job_class)
            found.append(
                DeadlineStatus(model=model, job_class=job_class, slack_s=slack_s, due_tokens=due)
            )
    return found


def _queue(name: tuple[str, Lane], reading: QueueReading) -> QueueStatus:
    model, lane = name
    return QueueStatus(
        model=model,
        lane=lane,
        num_waiting=reading.num_waiting,
        num_consumers=reading.num_consumers,
        oldest_s=reading.oldest_age_s if reading.num_waiting else None,
    )


def stream_status(relay: LogRelay) -> StreamStatus:
    tenant, model, created_at, is_detached = "", "", 0.0, False
    if relay.job is not None:
        job = relay.job
        tenant, model, created_at = job.tenant, job.model, job.created_at
        is_detached = job.is_detached
    elif relay.facts is not None:
        tenant, is_detached = relay.facts.tenant, relay.facts.is_detached
        with suppress(StreamNotFound):  # another program's, whose reader is being turned away
            rendering = decode_rendering(relay.facts)
            model, created_at = rendering.model, float(rendering.created)
    state: Literal["waiting", "running", "ended"] = "running"
    if relay.cursor.end is not LogEnd.OPEN:
        state = "ended"
    elif relay.worker is None:
        state = "waiting"
    return StreamStatus(
        id=relay.request_id,
        tenant=tenant,
        model=model,
        state=state,
        worker=topology.worker_id_of(relay.worker) if relay.worker is not None else None,
        num_workers=len(relay.cursor.lost_runs),
        num_crashes=relay.cursor.reader.num_lost_runs,
        num_tokens=sum(len(chain.token_ids) for chain in relay.cursor.reader.chains),
        created_at=created_at or time.time(),
        is_detached=is_detached,
    )
