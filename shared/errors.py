"""Every error that crosses a module boundary, in a hierarchy with stable codes.

    WarrenError
    ├── RequestError                  the request itself is invalid
    │   ├── InvalidRequest              invalid_request
    │   ├── ModelNotFound               model_not_found
    │   ├── ContextLengthExceeded       context_length_exceeded
    │   ├── InvalidApiKey               invalid_api_key
    │   ├── PermissionDenied            insufficient_permissions
    │   ├── IdempotencyMismatch         idempotency_mismatch
    │   ├── NotFound                    not_found
    │   ├── Conflict                    conflict
    │   ├── PreviousResponseNotFound    previous_response_not_found
    │   ├── StreamNotFound              stream_not_found
    │   └── StreamExpired               stream_expired
    ├── ServiceError                  a valid request that the service could not complete
    │   ├── Overloaded                  rate_limit_exceeded
    │   │   └── RateLimited               a limit of the API key or tenant
    │   │       └── QuotaExceeded           insufficient_quota
    │   ├── Unavailable                 service_unavailable
    │   │   └── ShuttingDown              the process ends
    │   ├── OutOfMemory                 out_of_memory
    │   ├── NotFinite                   not_finite
    │   ├── DeadlineExceeded            deadline_exceeded
    │   ├── Cancelled                   cancelled
    │   ├── WorkerLost                  worker_lost
    │   ├── TakenOver                   taken_over
    │   └── InternalError               internal_error
    │       └── LogLost                   the request's log was deleted while it was read
    ├── BusError                      the broker or the connection to it
    │   ├── BusUnavailable              not connected, or the connection was lost
    │   │   ├── PublishersBlocked         it is short of memory or disk space
    │   │   ├── NoFreeChannel             the connection has no channel left
    │   │   ├── TooManyQueues             the virtual host or the cluster has no queue left
    │   │   ├── Unanswered                no answer in time: the call may take effect
    │   │   └── QueueDown                 the node of the cluster that keeps the queue is down
    │   │       └── QueueSilent           or slow
    │   ├── PublishUnconfirmed          confirmation timed out: the message may have arrived
    │   ├── PublishRefused              the queue is full
    │   ├── Unroutable                  no queue is bound to that key
    │   ├── QueueNotFound
    │   ├── QueueBusy                   another connection or exclusive consumer holds the queue
    │   ├── AccessRefused               the broker's user lacks the permission
    │   └── MessageTooLarge
    ├── EngineFailed                  a worker's engine: the job continues elsewhere
    ├── UndecodableMessage            bytes that are not a valid message of this version
    └── StartupError                  an invalid setting, model or environment

A code is part of the public API and never changes its meaning. ``gateway.errors`` alone maps codes
to HTTP statuses.
"""

from typing import ClassVar


class WarrenError(Exception):
    """Root of the hierarchy. ``str(error)`` is safe to show to clients: it contains no paths or
    prompts."""

    code: ClassVar[str] = "internal_error"

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param


class RequestError(WarrenError):
    """The request is invalid; a retry would fail again."""


class InvalidRequest(RequestError):
    code = "invalid_request"


class ModelNotFound(RequestError):
    code = "model_not_found"


class ContextLengthExceeded(RequestError):
    code = "context_length_exceeded"


class InvalidApiKey(RequestError):
    code = "invalid_api_key"


class PermissionDenied(RequestError):
    """The API key lacks a scope."""

    code = "insufficient_permissions"


class IdempotencyMismatch(RequestError):
    """The Idempotency-Key was used before with another body."""

    code = "idempotency_mismatch"


class NotFound(RequestError):
    """No object has this id, or it belongs to another tenant."""

    code = "not_found"


class Conflict(RequestError):
    """The state of what the request names forbids it, until somebody changes that state."""

    code = "conflict"


class PreviousResponseNotFound(RequestError):
    """The response that a request continues, or a response before it, is not stored."""

    code = "previous_response_not_found"


class StreamNotFound(RequestError):
    """No stream has this id, or it belongs to another tenant."""

    code = "stream_not_found"


class StreamExpired(RequestError):
    """The stream's log has been deleted."""

    code = "stream_expired"


class ServiceError(WarrenError):
    """The request was valid but did not succeed."""


class Overloaded(ServiceError):
    """Too many requests. ``retry_after_s`` is the recommended delay before a retry; ``limit`` is
    the setting of the limit that was reached, for metrics."""

    code = "rate_limit_exceeded"

    def __init__(self, message: str, *, retry_after_s: float = 1.0, limit: str = "") -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s
        self.limit = limit


class RateLimited(Overloaded):
    """A limit of the API key or its tenant is reached; ``limit`` is its field in the file of keys,
    after ``tenant_`` if it is the tenant's. ``kind`` is OpenAI's type of the
    error: ``requests``, ``tokens`` or ``insufficient_quota``."""

    def __init__(
        self, message: str, *, limit: str, kind: str = "requests", retry_after_s: float = 1.0
    ) -> None:
        super().__init__(message, retry_after_s=retry_after_s, limit=limit)
        self.kind = kind


class QuotaExceeded(RateLimited):
    """The tenant has spent its budget of the month, which ends in ``retry_after_s``."""

    code = "insufficient_quota"

    def __init__(self, message: str, *, retry_after_s: float = 1.0) -> None:
        super().__init__(
            message,
            limit="tenant_monthly_budget",
            kind="insufficient_quota",
            retry_after_s=retry_after_s,
        )


class Unavailable(ServiceError):
    """This process accepts no new work; another process may."""

    code = "service_unavailable"


class ShuttingDown(Unavailable):
    """This process completes nothing any more; another process continues its streams."""


class OutOfMemory(ServiceError):
    """The request needs more memory than its worker has left. A retry would interrupt the other
    requests of a worker again."""

    code = "out_of_memory"


class NotFinite(ServiceError):
    """The model computed NaN or infinite numbers for this request. A retry computes them again."""

    code = "not_finite"


class DeadlineExceeded(ServiceError):
    code = "deadline_exceeded"


class Cancelled(ServiceError):
    code = "cancelled"


class WorkerLost(ServiceError):
    code = "worker_lost"


class TakenOver(ServiceError):
    code = "taken_over"


class InternalError(ServiceError):
    code = "internal_error"


class LogLost(InternalError):
    """The log was deleted while its reader had it."""


class BusError(WarrenError):
    """The broker refused a call or could not be reached."""

    code = "broker_error"


class BusUnavailable(BusError):
    code = "broker_unavailable"


class PublishersBlocked(BusUnavailable):
    """The broker reads nothing that is published, because it is short of memory or disk space."""


class NoFreeChannel(BusUnavailable):
    """All channels that the broker allows on the connection are in use."""


class TooManyQueues(BusUnavailable):
    """The virtual host, or the cluster, has as many queues as its limit permits."""


class Unanswered(BusUnavailable):
    """The broker has not answered in time; it is unknown whether the call takes effect."""


class QueueDown(BusUnavailable):
    """The queue's node is down. The queue cannot be declared again under its name until the node
    returns, possibly never."""


class QueueSilent(QueueDown):
    """The broker does not answer for the queue and answers other calls: it may also be slow."""


class PublishUnconfirmed(BusError):
    code = "publish_unconfirmed"


class PublishRefused(BusError):
    code = "queue_full"


class Unroutable(BusError):
    code = "unroutable"


class QueueNotFound(BusError):
    code = "queue_not_found"


class QueueBusy(BusError):
    code = "queue_busy"


class AccessRefused(BusError):
    code = "broker_access_refused"


class MessageTooLarge(BusError):
    code = "message_too_large"


class EngineFailed(WarrenError):
    """An engine that a worker uses ended or broke while it ran the request, or its answer makes no
    sense. The job is returned to its queue, and the run counts as a crash."""

    code = "engine_failed"


class UndecodableMessage(WarrenError):
    code = "undecodable_message"


class StartupError(WarrenError):
    code = "startup_error"


_FROM_WIRE: dict[str, type[WarrenError]] = {
    error.code: error
    for error in (
        InvalidRequest,
        ModelNotFound,
        ContextLengthExceeded,
        InvalidApiKey,
        PermissionDenied,
        IdempotencyMismatch,
        NotFound,
        Conflict,
        PreviousResponseNotFound,
        StreamNotFound,
        StreamExpired,
        Overloaded,
        QuotaExceeded,
        Unavailable,
        OutOfMemory,
        NotFinite,
        DeadlineExceeded,
        Cancelled,
        WorkerLost,
        TakenOver,
        InternalError,
    )
}


def from_code(code: str, message: str, param: str | None = None) -> WarrenError:
    """Rebuild the error of a `Failed` event; an unknown code becomes an `InternalError`."""
    error = _FROM_WIRE.get(code, InternalError)(message)
    error.param = param
    return error
