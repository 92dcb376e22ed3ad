"""Requests that are computed once: their headers, their keys or a setting ask for it, and equal
requests share an execution."""

import time
from typing import NamedTuple

from fastapi import Request
from msgspec import structs

from gateway.api.bodies.parsing import refused
from gateway.api.bodies.submission import Submission, facts_of
from gateway.api.observation import Observation
from gateway.intake.keys.api_key import ApiKey
from gateway.once.execution import ExecutionTerms
from gateway.once.relay import SharedRelay
from gateway.once.sameness import sameness_of
from gateway.wiring import Gateway
from shared.messages import JobClass, UsageRecord

CACHE_HEADER = "x-warren-cache"
_EXACT, _OFF = "exact", "off"
_BYPASS = "bypass"


class SharedSubmission(NamedTuple):
    """A request that shares an execution."""

    own: Submission
    """Under the id of its client's stream."""
    terms: ExecutionTerms


def wants_once(gateway: Gateway, request: Request) -> bool:
    """Whether a request is to be computed once: its header decides, otherwise its API key or the
    gateway's setting. Raises `InvalidRequest`."""
    caller: ApiKey = request.state.caller
    default = _EXACT if gateway.settings.exact_cache else caller.cache
    wanted = request.headers.get(CACHE_HEADER, default)
    if wanted not in (_EXACT, _OFF, ""):
        raise refused(CACHE_HEADER, f"expected {_EXACT} or {_OFF}.")
    return wanted == _EXACT


def shared(
    gateway: Gateway,
    submitted: Submission,
    prefix: str,
    lane: JobClass,
    request_sha256: str = "",
) -> SharedSubmission | None:
    """A request as one of several that share an execution; None if no other request can be equal,
    or if it has to begin its own because the deadline of the execution is too close.

    ``prefix`` begins the ids of its kind; ``request_sha256`` is for the receipt of its answer.
    """
    job = submitted.job
    neutral = structs.replace(submitted.rendering, request_id="", created=0)
    rendering = neutral.encode() + request_sha256.encode()
    same = sameness_of(job, rendering, gateway.workers.of_model(job.model))
    if same is None or job.is_detached:
        return None
    execution_id, stream_id = gateway.executions.name(prefix, job.tenant, same.digest)
    assert job.deadline is not None
    if not gateway.executions.is_open_to(execution_id, job.created_at, job.deadline):
        return None
    execution = _renamed(submitted, execution_id, same.digest)
    if request_sha256:
        execution = execution.with_receipt(request_sha256)
    published = structs.replace(execution.job, is_counted=False)
    terms = ExecutionTerms(published, execution.facts, lane, same.numerics)
    return SharedSubmission(_renamed(submitted, stream_id), terms)


def note_bypass(gateway: Gateway, request: Request, model: str) -> None:
    """Note that a request that asked for it is not computed once."""
    request.state.cache_result = _BYPASS
    gateway.executions.count(model, _BYPASS)


def note_share(request: Request, relay: SharedRelay) -> None:
    """Say in the headers of the answer how the request is answered."""
    request.state.cache_result = relay.share


def record_share(
    gateway: Gateway, relay: SharedRelay, submitted: Submission, lane: JobClass, seen: Observation
) -> None:
    """Record the use of a request whose answer was computed for another request. The other request
    is recorded by the worker."""
    job = submitted.job
    gateway.executions.count(job.model, relay.share)
    if relay.is_payer or not seen.num_prompt_tokens:
        return
    outcome = "completed" if relay.is_ended else "cancelled"
    gateway.recorder.note(
        UsageRecord(
            request_id=job.request_id,
            tenant=job.tenant,
            key_id=job.key_id,
            model=job.model,
            job_class=lane,
            outcome=outcome if seen.error is None else seen.error.code,
            num_prompt_tokens=seen.num_prompt_tokens,
            num_output_tokens=seen.num_tokens,
            ended_at=time.time(),
            is_cached=True,
        )
    )


def _renamed(submitted: Submission, request_id: str, body_hash: str = "") -> Submission:
    """The same request under another id."""
    facts = submitted.facts
    rendering = structs.replace(submitted.rendering, request_id=request_id)
    facts, context = facts_of(
        rendering,
        tenant=facts.tenant,
        body_hash=body_hash,
        is_detached=facts.is_detached,
        trace_id=facts.trace_id,
    )
    job = structs.replace(submitted.job, request_id=request_id, context=context)
    return submitted._replace(job=job, facts=facts, rendering=rendering)
