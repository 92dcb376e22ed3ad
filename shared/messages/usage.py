"""What requests have used: reports to all gateways for the limits of API keys and tenants, and the
durable record of each request."""

from typing import Annotated, Literal, TypeAlias

from msgspec import Meta, Struct, field

from shared.messages.fields import (
    Count,
    JobClass,
    KeyId,
    ModelName,
    RequestId,
    Tenant,
    UnixTime,
    Wire,
)

UsageClass: TypeAlias = JobClass | Literal["quick"]
Duration: TypeAlias = Annotated[float, Meta(ge=0.0)]


class KeyUsage(Struct, frozen=True, array_like=True):
    """The use of an API key, or of a tenant, at a single gateway."""

    seconds: dict[int, tuple[Count, Count]] = field(default_factory=dict)
    """The requests and tokens of each second of the last minute, by Unix time."""
    num_running: Count = 0
    """Requests in progress."""


class DetachedJob(Struct, frozen=True, array_like=True):
    """A detached job that counts against its tenant."""

    tenant: Tenant
    deadline: UnixTime
    """When it ends at the latest."""
    key_id: KeyId = ""
    """The API key of its request."""


class LeftJob(Struct, frozen=True, array_like=True):
    """A job that goes on although its client has left: it counts as a running request of its API
    key and its tenant."""

    key_id: KeyId
    deadline: UnixTime
    """When it ends at the latest."""
    tenant: Tenant = ""


class UsageReport(Wire, frozen=True, kw_only=True):
    """To all gateways: the requests that a gateway has admitted, and is about to admit.

    The use of a key or tenant replaces its use in the gateway's earlier reports. Each gateway sends
    a report before it admits a request, and counts the reports that it has received when its own
    report has come back.
    """

    gateway: Annotated[str, Meta(max_length=64)]
    number: Count
    """The number of the message among the gateway's messages."""
    keys: dict[str, KeyUsage] = field(default_factory=dict)
    """The use of each key, by key id, and of each tenant with limits, by ``tenant:`` and its name.
    Keys and tenants whose use has not changed are left out."""
    detached: dict[RequestId, DetachedJob] = field(default_factory=dict)
    """New detached jobs, by request id."""
    left: dict[RequestId, LeftJob] = field(default_factory=dict)
    """Jobs whose clients have left since the last report, by request id."""
    is_new: bool = False
    """The gateway may have missed reports of the others: each answers with the use of all its keys
    and tenants and all jobs without a client that it knows."""


class Ended(Wire, frozen=True, kw_only=True):
    """To all gateways: a job has ended that is detached or counts against the limits of its API
    key or its tenant. A gateway also sends this for a job that counts with a request of its own
    again."""

    request_id: RequestId
    num_tokens: Count | None = None
    """The tokens of its prompts and answers, if the sender knows them."""


class AdmissionRequest(Wire, frozen=True, kw_only=True):
    """To one gateway, from a worker: a job has come from a publisher over AMQP whose tenant has
    limits. The gateway answers with `AdmissionAnswer`. The message reaches all gateways, and the
    others ignore it."""

    gateway: Annotated[str, Meta(max_length=64)]
    """The name of the gateway, as in its `LimitedTenants`."""
    worker: str
    """The address of the worker."""
    number: Count
    """Returned in the answer."""
    request_id: RequestId
    tenant: Tenant
    num_tokens: Count = 0
    """About how many tokens the prompts and answers have, at most."""
    deadline: UnixTime
    """When the job ends at the latest."""


class UsageRecord(Wire, frozen=True, kw_only=True):
    """The use of a request, recorded when it ends. It contains neither prompt nor answer.

    A request may be recorded several times. The latest record with the highest ``attempt`` counts,
    or the first record if all have attempt 0.
    """

    request_id: RequestId
    tenant: Tenant = ""
    key_id: KeyId = ""
    model: ModelName
    job_class: UsageClass
    outcome: Annotated[str, Meta(min_length=1, max_length=64)]
    """``completed``, ``cancelled``, or the code of the error."""
    attempt: Count = 0
    """The attempt whose event ended the request; 0 if its log was gone, or if the run that ended it
    did not know its position in the log."""
    num_prompt_tokens: Count = 0
    num_cached_tokens: Count = 0
    """Prompt tokens that were found in the prefix cache."""
    num_output_tokens: Count = 0
    """The tokens of all choices, whichever workers generated them."""
    num_takeovers: Count = 0
    """How often another run continued the request."""
    queue_s: Duration = 0.0
    """Seconds from the creation of the job until the engine of the worker that ended it began; 0 if
    unknown."""
    compute_s: Duration = 0.0
    """Machine time: of each step of the engine, the part of the request's sequences in the tokens
    that the step computed."""
    run_s: Duration | None = None
    """Seconds from the beginning of the engine until the end. Old workers leave it out, and
    ``compute_s`` is this time."""
    ended_at: UnixTime
    is_cached: bool = False
    """The answer was computed for another request, which has a record of its own."""
