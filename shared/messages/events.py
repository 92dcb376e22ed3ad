"""Events and replies of workers."""

from typing import Annotated, TypeAlias

from msgspec import Meta, Struct

from shared.messages.fields import (
    Context,
    Count,
    Execution,
    FinishReason,
    Hedge,
    PrefixHash,
    RequestId,
    TokenId,
    TokenIds,
    Wire,
)
from shared.messages.receipts import Provenance


class Logprob(Struct, frozen=True, array_like=True):
    """A token and its log probability."""

    token_id: TokenId
    logprob: float
    token: bytes
    """The bytes that the token adds to the text; may be an incomplete character."""


class TokenLogprobs(Struct, frozen=True, array_like=True):
    """The log probability of a generated or given token, and of the most likely tokens, best
    first."""

    chosen: Logprob
    top: tuple[Logprob, ...] = ()
    num_chars: Count | None = None
    """The number of characters of the text that the token completes, before any text is held back
    for a stop string. A special token may complete none. None: as many as its bytes."""


class Accepted(Wire, frozen=True, kw_only=True):
    """A gateway has accepted a request that may outlive its reader. Only the first `Accepted` in a
    log counts."""

    body_hash: Annotated[str, Meta(max_length=128)]
    """The hash of the body of a request with an Idempotency-Key or of a line of a batch; empty
    otherwise."""
    context: Context = b""
    """The context of the job."""
    execution: Execution = 0
    """The number of the log's execution. A mark up to which a reader reads the log has none."""


class Started(Wire, frozen=True, kw_only=True):
    """A worker has started the job. Each new ticket of a newer delivery opens an attempt."""

    worker: str
    """The worker's address: the routing key of its commands."""
    ticket: Annotated[str, Meta(max_length=64)]
    """The fencing token of this run of the job; commands to it contain the ticket."""
    num_prompt_tokens: tuple[Count, ...]
    """The number of tokens of each prompt, including the chat template's."""
    is_waiting: bool = False
    """The job was delivered before, so the worker waits for `Continue`, even in attempt 1."""
    publication: Count = 0
    """The publication number of the job."""
    num_returns: Count = 0
    """How often this publication of the job was returned to its queue."""
    hedge: Hedge | None = None
    """The job's. A run beside it that is the log's writer stays the writer until this run writes
    tokens or scores."""
    is_alone: bool = False
    """The job runs in quarantine, with nothing else in the worker."""
    num_moves: Count = 0
    """How often this run has moved to a log that was recreated. Each time it asks again where to
    continue."""
    execution: Execution = 0
    """The job's number. Events of other executions than the log's do not count."""
    numerics: Annotated[str, Meta(max_length=256)] = ""
    """The worker's, as in its announcement; empty if it does not state them."""
    context: Context = b""
    """The context of the job."""
    prompt_texts: tuple[str, ...] = ()
    """The text of each prompt, if the job requests it."""
    provenance: Provenance | None = None
    """What the answer is computed from, if the job requests it."""


class HandedOver(Wire, frozen=True, kw_only=True):
    """A run has returned or lost its job without a crash."""

    ticket: str
    """The ticket of the run."""


class PromptScores(Wire, frozen=True, kw_only=True):
    """Log probabilities of a prompt's tokens from ``start`` on, before any tokens of its choices.

    The first token of a prompt has no predecessor, and hence no log probability.
    """

    prompt: Count
    """The number of the prompt, from 0."""
    attempt: Count
    start: Count
    """The position of the first of these tokens in the prompt."""
    token_ids: TokenIds
    logprobs: tuple[TokenLogprobs | None, ...]
    execution: Execution = 0
    """The job's number, as in `Started`."""


class TokenDelta(Wire, frozen=True, kw_only=True, omit_defaults=True):
    """New tokens of a choice."""

    choice: Count
    """The number of the choice, from 0."""
    attempt: Count
    """The attempt of the run, from 1."""
    index: Count
    """The number of the choice's tokens before these."""
    prefix_hash: PrefixHash
    """The hash of the choice's tokens before these (`shared.log.extend_hash`), and of the job's
    execution, unless it is 0."""
    token_ids: TokenIds
    text: str
    """The text that these tokens complete. It depends only on the token ids sent so far, not on how
    they were divided into events."""
    num_chars: tuple[Count, ...] = ()
    """The number of characters of ``text`` that each token but the last completes; the last token
    completes the remainder."""
    logprobs: tuple[TokenLogprobs, ...] = ()
    """An entry for each of ``token_ids``, if the job requests logprobs."""
    has_end_token: bool = False
    """The same as in `Finished`. Only a gateway sets it, in the tokens that it splits off a
    `Finished`."""


class Finished(Wire, frozen=True, kw_only=True):
    """The last tokens of a choice. The request ends with the `Finished` of its last choice."""

    choice: Count
    attempt: Count
    index: Count
    prefix_hash: PrefixHash
    token_ids: TokenIds
    text: str
    """The text of these tokens, with held-back text: an incomplete character or a partial stop
    string."""
    finish_reason: FinishReason
    stop_reason: str | int | None = None
    """The stop string that was matched, or the matching id of ``stop_token_ids``."""
    num_cached_tokens: Count = 0
    """Tokens of the choice's prompt that were found in the prefix cache."""
    num_predicted_tokens: Count = 0
    """Tokens of the choice that drafts had predicted, in the run that finished it."""
    num_chars: tuple[Count, ...] = ()
    """The same as in `TokenDelta`; the last token completes the held-back text as well."""
    logprobs: tuple[TokenLogprobs, ...] = ()
    has_end_token: bool = False
    """The last of ``token_ids`` ended the choice, and is not part of the text: an end-of-sequence
    token, or a token of ``stop_token_ids``."""


class Failed(Wire, frozen=True, kw_only=True):
    """The request ends here with an error; ``code`` is a code of `shared.errors`.

    With attempt 0 it rejects a job before any `Started`, or, with a ticket, ends a run at any
    position. Otherwise the position is that of ``choice``.
    """

    code: str
    """The stable code of the error."""
    message: str
    param: str | None = None
    """The parameter of the request that is at fault; None if no parameter is."""
    choice: Count = 0
    attempt: Count = 0
    index: Count = 0
    prefix_hash: PrefixHash = 0
    ticket: Annotated[str, Meta(max_length=64)] | None = None
    """The ticket of a run that waits for `Continue`, or whose event the broker refused."""
    execution: Execution = 0
    """The job's number, as in `Started`."""


class Restored(Wire, frozen=True, kw_only=True):
    """The events that counted in a log whose node of the broker died, in their order. Adjacent
    events of a choice may be joined. A log that is recreated starts with it: nothing before it
    counts."""

    events: tuple[Accepted | Started | HandedOver | PromptScores | TokenDelta | Finished, ...]


class Choice(Struct, frozen=True, kw_only=True):
    """A choice of a `Completed`. The fields have the meaning that they have in `Finished`."""

    token_ids: TokenIds
    text: str
    finish_reason: FinishReason
    stop_reason: str | int | None = None
    num_prompt_tokens: Count
    num_cached_tokens: Count = 0
    """Prompt tokens that were found in the prefix cache."""
    num_predicted_tokens: Count = 0
    logprobs: tuple[TokenLogprobs, ...] = ()
    has_end_token: bool = False


class Completed(Wire, frozen=True, kw_only=True):
    """The complete answer, for jobs of mode ``final``."""

    request_id: RequestId
    choices: tuple[Choice, ...]
    prompt_texts: tuple[str, ...] = ()
    prompt_logprobs: tuple[tuple[TokenLogprobs | None, ...], ...] = ()
    """The log probabilities of each prompt's tokens, if the job requests them."""

    @property
    def text(self) -> str:
        """The text of the first choice."""
        return self.choices[0].text


class Tokenized(Wire, frozen=True, kw_only=True):
    """The answer to a `TokenizeJob`."""

    request_id: RequestId
    token_ids: TokenIds
    tokens: tuple[str, ...]
    """The tokens as the vocabulary spells them."""
    max_seq_len: Count
    """The model's context length in tokens."""


class Detokenized(Wire, frozen=True, kw_only=True):
    """The answer to a `DetokenizeJob`."""

    request_id: RequestId
    text: str


class Embedded(Wire, frozen=True, kw_only=True):
    """The answer to an `EmbeddingJob`."""

    request_id: RequestId
    vectors: tuple[tuple[float, ...], ...]
    """A vector of length 1 for each prompt."""
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
    | Restored
    | Completed
    | QuickAnswer
)
