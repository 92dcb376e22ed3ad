"""What workers answer."""

from typing import Annotated, TypeAlias

from msgspec import Meta, Struct

from shared.messages.fields import Context, Count, FinishReason, RequestId, TokenId, TokenIds, Wire


class Logprob(Struct, frozen=True, array_like=True):
    """A token and how likely it was."""

    token_id: TokenId
    logprob: float
    token: bytes
    """What it adds to the text; may be part of a character."""


class TokenLogprobs(Struct, frozen=True, array_like=True):
    """The token that stands there, and the most likely ones in its place, best first."""

    chosen: Logprob
    top: tuple[Logprob, ...] = ()


class Accepted(Wire, frozen=True, kw_only=True):
    """A gateway has taken a request that may outlive its reader. The first one in a log counts."""

    body_hash: Annotated[str, Meta(max_length=128)]
    """Of a request with an Idempotency-Key; empty without one."""
    context: Context = b""
    """The job's."""


class Started(Wire, frozen=True, kw_only=True):
    """A worker has taken the job. Each new ticket of a newer delivery opens an attempt."""

    worker: str
    """The worker's address: the routing key of its commands."""
    ticket: Annotated[str, Meta(max_length=64)]
    """Names this run of the job: the commands of its reader bear it."""
    num_prompt_tokens: tuple[Count, ...]
    """Tokens of each prompt, the chat template's included."""
    is_waiting: bool = False
    """The job was delivered before: the worker waits for `Continue`, also in attempt 1."""
    publication: Count = 0
    """The job's."""
    num_returns: Count = 0
    """How often this publication of the job had come back to its queue."""
    is_alone: bool = False
    """Nothing else runs in the worker: the job is in quarantine."""
    context: Context = b""
    """The job's."""
    prompt_texts: tuple[str, ...] = ()
    """Of each prompt, where the job wants them."""


class HandedOver(Wire, frozen=True, kw_only=True):
    """The run of ``ticket`` gives its job back, or has lost it, and did not crash."""

    ticket: str


class PromptScores(Wire, frozen=True, kw_only=True):
    """Tokens ``start`` .. of a prompt with their logprobs, ahead of all tokens of its choices.

    The first token of a prompt follows nothing, and has none.
    """

    prompt: Count
    attempt: Count
    start: Count
    token_ids: TokenIds
    logprobs: tuple[TokenLogprobs | None, ...]


class TokenDelta(Wire, frozen=True, kw_only=True, omit_defaults=True):
    """New tokens of one choice.

    ``index`` is the number of the choice's tokens before these and ``prefix_hash`` their hash
    (`shared.log.extend_hash`). ``text`` is a function of the token ids sent so far, not of how
    they were cut into events.
    """

    choice: Count
    attempt: Count
    index: Count
    prefix_hash: Count
    token_ids: TokenIds
    text: str
    logprobs: tuple[TokenLogprobs, ...] = ()
    """One for each of ``token_ids``, where the job wants them."""


class Finished(Wire, frozen=True, kw_only=True):
    """The last tokens of one choice. The request ends with the `Finished` of its last choice."""

    choice: Count
    attempt: Count
    index: Count
    prefix_hash: Count
    token_ids: TokenIds
    text: str
    """What these tokens add, and what was held back: half a character, a possible stop string."""
    finish_reason: FinishReason
    stop_reason: str | int | None = None
    """The stop string that was met, or the one of ``stop_token_ids``."""
    num_cached_tokens: Count = 0
    """Tokens of the choice's prompt that the worker did not have to compute."""
    logprobs: tuple[TokenLogprobs, ...] = ()


class Failed(Wire, frozen=True, kw_only=True):
    """The request ends here with an error; ``code`` is one of `shared.errors`.

    Attempt 0 refuses a job before any `Started` or, with a ticket, ends the run that bears it while
    it waits for `Continue`; otherwise the position is that of ``choice``.
    """

    code: str
    message: str
    param: str | None = None
    choice: Count = 0
    attempt: Count = 0
    index: Count = 0
    prefix_hash: Count = 0
    ticket: Annotated[str, Meta(max_length=64)] | None = None
    """Of a run that waits, after its `Started`."""


class Choice(Struct, frozen=True, kw_only=True):
    token_ids: TokenIds
    text: str
    finish_reason: FinishReason
    stop_reason: str | int | None = None
    num_prompt_tokens: Count
    num_cached_tokens: Count = 0
    """Those of them that the worker did not have to compute."""
    logprobs: tuple[TokenLogprobs, ...] = ()


class Completed(Wire, frozen=True, kw_only=True):
    """The whole answer, for jobs of mode ``final``."""

    request_id: RequestId
    choices: tuple[Choice, ...]
    prompt_texts: tuple[str, ...] = ()
    prompt_logprobs: tuple[tuple[TokenLogprobs | None, ...], ...] = ()
    """Of each prompt, where the job wants them."""


class Tokenized(Wire, frozen=True, kw_only=True):
    request_id: RequestId
    token_ids: TokenIds
    tokens: tuple[str, ...]
    """As they stand in the vocabulary."""
    max_seq_len: Count


class Detokenized(Wire, frozen=True, kw_only=True):
    request_id: RequestId
    text: str


class Embedded(Wire, frozen=True, kw_only=True):
    request_id: RequestId
    vectors: tuple[tuple[float, ...], ...]
    """Of length 1, one for each prompt."""
    num_prompt_tokens: tuple[Count, ...]


QuickAnswer: TypeAlias = Tokenized | Detokenized | Embedded
ReplyEvent: TypeAlias = (
    Accepted
    | Started
    | HandedOver
    | PromptScores
    | TokenDelta
    | Finished
    | Failed
    | Completed
    | QuickAnswer
)
