"""Jobs: the work that clients request of workers."""

import hashlib
import time
from typing import Annotated, Literal, TypeAlias

from msgspec import Meta, field

from shared.messages.fields import (
    MAX_CHOICES,
    MAX_EMBEDDING_DIMENSIONS,
    MAX_EMBEDDING_INPUTS,
    MAX_PROMPTS,
    WIRE_VERSION,
    Context,
    Count,
    Execution,
    Hedge,
    KeyId,
    ModelName,
    RequestId,
    Tenant,
    TokenIds,
    TraceContext,
    UnixTime,
    Wire,
)
from shared.messages.prompts import Prompt
from shared.messages.sampling import SamplingParams


class GenerationJob(Wire, frozen=True, kw_only=True):
    """A generation request. Choice k of the answer continues ``prompts[k // num_choices]``."""

    request_id: RequestId
    """The id of the request, which its publisher chooses."""
    model: ModelName
    """The name of the model, as workers announce it."""
    prompts: Annotated[tuple[Prompt, ...], Meta(min_length=1, max_length=MAX_PROMPTS)]
    num_choices: Annotated[int, Meta(ge=1, le=MAX_CHOICES)] = 1
    """The number of answers to each prompt."""
    sampling: SamplingParams = SamplingParams()
    mode: Literal["stream", "final"] = "final"
    """``stream``: a log of events. ``final``: a single `Completed` or `Failed`."""
    deadline: UnixTime | None = None
    """Unix time in seconds after which the job fails with ``deadline_exceeded``."""
    created_at: UnixTime = 0.0
    """Unix time in seconds at the publisher; 0 if unknown."""
    tenant: Tenant = ""
    """Whom the job is for. Prefix caches are not shared between tenants."""
    key_id: KeyId = ""
    """The id of the API key of the request, for its usage record; empty without one."""
    is_detached: bool = False
    """The client may be disconnected: a reply queue without a reader does not cancel the job."""
    each_token: bool = False
    """Send every token in an event of its own. Otherwise a worker gathers tokens, so that a stream
    has about ten events a second."""
    is_counted: bool = False
    """The job counts against the limits of its API key or its tenant until a worker reports its
    end: `Ended`."""
    max_total_tokens: Count | None = None
    """The most tokens that all prompts and answers may have together; None: no limit."""
    given_ids: TokenIds = ()
    """The tokens with which each choice begins, from an answer that the request continues. They
    count as tokens of the choice."""
    wants_prompt_text: bool = False
    """Request the text of each prompt in `Started`."""
    wants_provenance: bool = False
    """Request in `Started` what the answer is computed from, for its receipt."""
    publication: Count = 0
    """How often this request was published before. Runs of an older publication are superseded once
    a run of a newer publication has started."""
    expected_ids: Annotated[tuple[TokenIds, ...], Meta(max_length=MAX_CHOICES)] = ()
    """The tokens that each choice is expected to have, if that is known: a worker that checks
    drafts computes many of them in a step. They do not change the answer."""
    hedge: Hedge | None = None
    """The job still runs elsewhere, and that run is silent. The run of this job becomes the log's
    writer only if it writes first. None: the job is no hedge."""
    execution: Execution = 0
    """The number of the execution that the job belongs to; 0 if the request's id is used only once.
    A log may be deleted while its job still waits, and another request may have the same id because
    it has the same Idempotency-Key. Only gateways number executions."""
    context: Context = b""
    """Opaque data for readers of the log, returned in `Started`."""
    trace: TraceContext = field(default_factory=dict)
    """The W3C trace context of the publisher."""
    version: int = WIRE_VERSION
    """The version of the messages. A reader refuses a version that is newer than its own."""

    @property
    def total_choices(self) -> int:
        """The number of choices of all prompts."""
        return len(self.prompts) * self.num_choices

    @property
    def seed(self) -> int:
        """The seed of choice 0 as an unsigned 64-bit number."""
        if self.sampling.seed is not None:
            return self.sampling.seed % (1 << 64)
        return int.from_bytes(hashlib.sha256(self.request_id.encode()).digest()[:8], "big")


class TokenizeJob(Wire, frozen=True, kw_only=True):
    """A request to tokenize text, answered with `Tokenized`."""

    request_id: RequestId
    model: ModelName
    prompt: Prompt
    tenant: Tenant = ""
    key_id: KeyId = ""
    deadline: UnixTime | None = None
    created_at: UnixTime = 0.0
    trace: TraceContext = field(default_factory=dict)
    version: int = WIRE_VERSION


class DetokenizeJob(Wire, frozen=True, kw_only=True):
    """A request to detokenize token ids, answered with `Detokenized`."""

    request_id: RequestId
    model: ModelName
    token_ids: TokenIds
    tenant: Tenant = ""
    key_id: KeyId = ""
    deadline: UnixTime | None = None
    created_at: UnixTime = 0.0
    trace: TraceContext = field(default_factory=dict)
    version: int = WIRE_VERSION


class EmbeddingJob(Wire, frozen=True, kw_only=True):
    """A request for embeddings, answered with `Embedded`."""

    request_id: RequestId
    model: ModelName
    prompts: Annotated[tuple[Prompt, ...], Meta(min_length=1, max_length=MAX_EMBEDDING_INPUTS)]
    num_dimensions: Annotated[int, Meta(ge=1, le=MAX_EMBEDDING_DIMENSIONS)] | None = None
    """Truncate vectors to this many dimensions and normalize them again; None: all dimensions."""
    tenant: Tenant = ""
    key_id: KeyId = ""
    deadline: UnixTime | None = None
    created_at: UnixTime = 0.0
    trace: TraceContext = field(default_factory=dict)
    version: int = WIRE_VERSION


QuickJob: TypeAlias = TokenizeJob | DetokenizeJob | EmbeddingJob
"""Quick jobs: they have a queue apart from generations, and are answered with a single message."""


def seconds_left(job: GenerationJob | QuickJob) -> float | None:
    """Seconds until the job's deadline, never 0; None without a deadline."""
    return None if job.deadline is None else max(0.001, job.deadline - time.time())
