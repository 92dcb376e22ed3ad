"""What readers of logs ask of workers and of each other, and what workers say of themselves."""

from typing import Annotated, TypeAlias

from msgspec import Meta, Struct

from shared.messages.fields import Count, ModelName, RequestId, Tenant, TokenIds, Wire


class Cancel(Wire, frozen=True, kw_only=True):
    """Stop work on a request: on the run that bears ``ticket``, or on any when None."""

    request_id: RequestId
    ticket: str | None = None
    is_replaced: bool = False
    """Another run has the stream: the job itself goes back to its queue, lest that run was the late
    word of a worker that no longer has it."""


class Progress(Struct, frozen=True, kw_only=True):
    """What a reader has accepted of one choice."""

    token_ids: TokenIds = ()
    is_finished: bool = False


class Continue(Wire, frozen=True, kw_only=True):
    """A reader's answer to a `Started` that waits or that is not the first: go on from here."""

    request_id: RequestId
    ticket: str
    attempt: Count
    choices: tuple[Progress, ...]
    num_crashes: Count = 0
    """Attempts before this one that ended without a word."""
    num_crashes_alone: Count = 0
    """Those of them that ran this publication of the job, and nothing else, in their workers."""


class Release(Wire, frozen=True, kw_only=True):
    """To all gateways: whoever reads this request's log lets go of it, or cancels it."""

    request_id: RequestId
    is_cancelled: bool = False
    """Cancel the job, end its stream and delete its log."""
    reader: Annotated[str, Meta(max_length=64)] = ""
    """Names who wants to read: it is not meant itself."""
    tenant: Tenant | None = None
    """Whose request it must be; None: the right to it was proved."""
    body_hash: Annotated[str, Meta(max_length=128)] = ""
    """Of the request that it must be, where an Idempotency-Key named it."""


class Withheld(Wire, frozen=True, kw_only=True):
    """To all gateways: the log stays where it is, because ``reader`` has no right to it."""

    request_id: RequestId
    reader: Annotated[str, Meta(max_length=64)]
    code: str
    """What to answer: one of `shared.errors`."""


Command: TypeAlias = Cancel | Continue | Release | Withheld


class Announcement(Wire, frozen=True, kw_only=True):
    """What a worker says of itself, every few seconds and when it leaves."""

    worker: str
    model: ModelName
    vocab_size: Count
    max_seq_len: Count
    fingerprint: str
    """Of weights and tokenizer: workers of one model name agree on it."""
    max_num_seqs: Count
    num_running: Count = 0
    num_waiting: Count = 0
    num_answered: Count = 0
    """Jobs since the worker's start."""
    kv_usage: Annotated[float, Meta(ge=0.0, le=1.0)] = 0.0
    tool_parser: str | None = None
    """The form in which the model writes calls of tools; None: it does not."""
    reasoning_parser: str | None = None
    """The form in which it thinks aloud; None: it does not."""
    is_leaving: bool = False
