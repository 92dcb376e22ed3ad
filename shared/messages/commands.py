"""Commands of log readers to workers and to each other, and the announcements of workers."""

from typing import Annotated, TypeAlias

from msgspec import Meta, Struct, field

from shared.messages.fields import (
    Count,
    JobClass,
    KeyId,
    ModelName,
    ReplyKey,
    RequestId,
    Tenant,
    TokenIds,
    UnixTime,
    Wire,
)


class Cancel(Wire, frozen=True, kw_only=True):
    """Stop work on a request."""

    request_id: RequestId
    ticket: str | None = None
    """The run to stop; None: any run."""
    is_replaced: bool = False
    """Another run owns the stream. The job is requeued rather than acknowledged, in case that other
    run no longer holds it."""
    is_outrun: bool = False
    """The run is a hedge, and the run that it hedges has written first. The job is acknowledged
    without a word, because the other run still holds it."""
    is_foreign: bool = False
    """The log is of a later execution of the request, so that the job is acknowledged without a
    word."""


class Progress(Struct, frozen=True, kw_only=True):
    """The tokens of a choice that a reader has accepted."""

    token_ids: TokenIds = ()
    is_finished: bool = False
    num_cached_tokens: Count = 0
    """The cached prompt tokens of a finished choice, from its `Finished`."""


class Replaced(Struct, frozen=True, kw_only=True):
    """The run that another run replaces, for logs and traces."""

    worker: str
    """The address of its worker."""
    ticket: str
    reason: str
    """``worker lost``, ``worker silent``, ``connection lost`` (to the broker), ``handed over``,
    ``outrun`` (by a hedge), or ``requested again`` (with the same Idempotency-Key, so that the job
    was published twice)."""

    @property
    def is_planned(self) -> bool:
        """Whether nothing has failed."""
        return self.reason in ("handed over", "outrun", "requested again")


class Continue(Wire, frozen=True, kw_only=True):
    """The reader's answer to a `Started` that waits or that replaces a run: continue from here."""

    request_id: RequestId
    ticket: str
    """The ticket of the `Started`."""
    attempt: Count
    """The attempt that the run opens."""
    choices: tuple[Progress, ...]
    """What the reader has of each choice."""
    numerics: Annotated[str, Meta(max_length=256)] = ""
    """The numerics of the run that generated the last of these tokens; empty if there are none, or
    if they are not known."""
    num_moves: Count = 0
    """The ``num_moves`` of the `Started` that is answered: an answer to an earlier `Started` has no
    effect."""
    num_crashes: Count = 0
    """Earlier attempts whose worker was lost. The first six such attempts that generated accepted
    output are not counted."""
    num_crashes_alone: Count = 0
    """The attempts among ``num_crashes`` that ran this publication of the job in quarantine."""
    replaced: Replaced | None = None
    """The run that this run replaces; None if it replaces no run."""
    is_contested: bool = False
    """The run is a hedge, and ``replaced`` is the log's writer until this run writes. When it has
    become the writer, it is told again, without this and without ``choices``."""


class Release(Wire, frozen=True, kw_only=True):
    """To all gateways: stop reading this request's log, or cancel the request."""

    request_id: RequestId
    is_cancelled: bool = False
    """Cancel the job, end its stream and delete its log."""
    reader: Annotated[str, Meta(max_length=64)] = ""
    """The reader that sends the command, which ignores it."""
    tenant: Tenant | None = None
    """The tenant that must own the request; None if the sender has already proved its right."""
    body_hash: Annotated[str, Meta(max_length=128)] = ""
    """The required body hash, if the request was found by its Idempotency-Key."""
    claimed_at: float = 0.0
    """When the sender claimed the log, a Unix time. 0 is unknown."""


class Withheld(Wire, frozen=True, kw_only=True):
    """To all gateways: the current reader keeps the log, because ``reader`` has no right to it."""

    request_id: RequestId
    reader: Annotated[str, Meta(max_length=64)]
    code: str
    """The code of the error to return, from `shared.errors`."""


class Follow(Wire, frozen=True, kw_only=True):
    """To all gateways: the reader of this request's log copies it to ``reply_to``, too, as long as
    that queue exists. Gateways whose clients share an execution send it."""

    request_id: RequestId
    """The id of the execution."""
    reply_to: ReplyKey
    """The routing key of the queue of the gateway that follows."""


class Drain(Wire, frozen=True, kw_only=True):
    """To one worker, from an operator: take no more jobs, and exit once no job is left.

    Jobs may finish within the worker's grace period; then they are handed over.
    """

    is_immediate: bool = False
    """Hand running jobs over at once. A worker that is draining already obeys this as well."""


class StopWork(Wire, frozen=True, kw_only=True):
    """To all gateways: cancel all requests of a tenant, and forget what was counted of it; or
    cancel all requests of an API key."""

    tenant: Tenant = ""
    key_id: KeyId = ""
    """If it is not empty, the requests of this key are cancelled, and no others."""

    def covers(self, tenant: str | None, key_id: str) -> bool:
        """Whether a request of this key and tenant, None if it is not known, is cancelled."""
        return key_id == self.key_id if self.key_id else tenant == self.tenant


class Declare(Wire, frozen=True, kw_only=True):
    """To one worker, from a gateway: declare and bind your queues again, because a message for them
    found no queue."""


class LimitedTenants(Wire, frozen=True, kw_only=True):
    """To one worker, from a gateway: these tenants have limits or budgets, and no other tenants
    have. Before the worker runs a new job that such a tenant has published itself, it sends the
    gateway an `AdmissionRequest`."""

    gateway: Annotated[str, Meta(max_length=64)]
    """The name of the gateway."""
    tenants: tuple[Tenant, ...]
    valid_s: Annotated[float, Meta(ge=0.0)]
    """Seconds after which the command has no effect any more, unless it is repeated."""


class AdmissionAnswer(Wire, frozen=True, kw_only=True):
    """To one worker, from a gateway: the answer to its `AdmissionRequest`."""

    number: Count
    """The number of the request."""
    code: str = ""
    """The code of the error with which the worker answers the job; empty if the job may run."""
    message: str = ""
    """The message of the error."""
    param: str | None = None
    """The parameter of the request that is at fault; None if no parameter is."""
    is_counted: bool = False
    """The job counts against the limits of its tenant until the worker reports its end: `Ended`."""
    max_total_tokens: Count | None = None
    """The most tokens that the job may have, as in `GenerationJob`."""


Command: TypeAlias = (
    Cancel
    | Continue
    | Release
    | Withheld
    | Follow
    | Drain
    | StopWork
    | Declare
    | LimitedTenants
    | AdmissionAnswer
)


class ReasoningSwitch(Struct, frozen=True, kw_only=True):
    """A variable of the chat template that changes the format of the model's reasoning."""

    variable: str
    """The name of the variable."""
    value: bool
    """The value with which the format is ``parser``."""
    parser: str
    """The format of the reasoning with this value."""


class Announcement(Wire, frozen=True, kw_only=True):
    """A worker's heartbeat: what it serves and its load, every few seconds and when it stops."""

    worker: str
    """The worker's address: the routing key of its commands."""
    model: ModelName
    vocab_size: Count
    max_seq_len: Count
    """The model's context length in tokens."""
    fingerprint: str
    """A digest of weights and tokenizer, equal for all workers of a model name."""
    numerics: str = ""
    """Names the worker's arithmetic: device, instruction set, data type and kernels. Workers with
    equal numerics generate the same tokens. A request that has tokens prefers workers with the
    numerics that generated them."""
    is_exact: bool = False
    """Whether that holds for every answer, whatever else the workers compute at the time."""
    max_num_seqs: Count
    """The most sequences that run at once."""
    num_running: Count = 0
    """Sequences that run."""
    num_running_batch: Count = 0
    """Running sequences that belong to batch jobs."""
    batch_reserve: Count = 0
    """Slots that batch jobs leave free."""
    num_waiting: Count = 0
    """Sequences that wait for a place in the batch."""
    num_answered: Count = 0
    """Jobs answered since the worker's start."""
    kv_usage: Annotated[float, Meta(ge=0.0, le=1.0)] = 0.0
    """The share of the KV cache's blocks that is in use."""
    newest_taken: dict[JobClass, UnixTime] = field(default_factory=dict)
    """When the newest job taken from each queue was created, a Unix time. Jobs that still wait in
    the queue are newer."""
    mean_job_tokens: Annotated[float, Meta(ge=0.0)] = 0.0
    """The mean number of tokens of the jobs answered recently, prompt and answer together."""
    mean_job_work_s: Annotated[float, Meta(ge=0.0)] = 0.0
    """The mean worker-seconds of these jobs: how long each ran, times the share of the worker's
    sequence slots that it occupied."""
    tool_parser: str | None = None
    """The format in which the model writes tool calls; None if it does not support tools."""
    reasoning_parser: str | None = None
    """The format in which the model writes its reasoning; None if it does not."""
    reasoning_switches: tuple[ReasoningSwitch, ...] = ()
    """The variables of the chat template that change this format."""
    template_tells_time: bool = False
    """Whether the chat template may print more of a request's time than its date in UTC."""
    engine: Annotated[str, Meta(max_length=256)] = ""
    """The kind and version of the engine over HTTP that computes the tokens; empty for Warren's
    own."""
    is_engine_away: bool = False
    """The engine does not answer, and the worker takes no jobs until it does."""
    unsupported: tuple[str, ...] = ()
    """The sampling parameters that the engine lacks, by their names in `SamplingParams`."""
    engine_constraints: tuple[str, ...] = ()
    """The kinds of constraints that the engine over HTTP takes in its own form. The worker applies
    the other kinds itself, unless ``unsupported`` has ``constraint``."""
    takes_near_jobs: bool = False
    """Jobs whose prefix the worker may have in its cache can be published to its own queue."""
    is_leaving: bool = False
    """The worker takes no more jobs."""
    end_notice: Annotated[str, Meta(max_length=1024)] = ""
    """The notice that the worker's machine ends soon; empty if there is none."""
    started_at: UnixTime = 0.0
    """Unix time in seconds at which the worker was ready; 0 if unknown."""
    sent_at: UnixTime = 0.0
    """When the worker sent this, by its own clock; 0 from workers that do not say."""
