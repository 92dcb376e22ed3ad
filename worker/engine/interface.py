"""What goes into the engine, what comes out, and what it asks of a model runner."""

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from msgspec import Struct

from shared.errors import WarrenError
from shared.messages import FinishReason, JobClass, SamplingParams


class SequenceId(NamedTuple):
    request_id: str
    choice: int


class TokenConstraint(Protocol):
    """What the output of one sequence has to match; belongs to the engine's thread once submitted.

    It has been through the output tokens that are there already.
    """

    @property
    def is_complete(self) -> bool:
        """Whether nothing can follow any more."""
        ...

    def advance(self, token_id: int) -> None:
        """Take the next token. Raises `InvalidRequest` where it can go on no further."""
        ...

    def mask(self) -> bytes:
        """Which tokens may come next: bit t % 8 of byte t // 8, filled up to whole int32."""
        ...


@dataclass(frozen=True, slots=True)
class Submit:
    """Start a sequence, or go on with one that another worker began."""

    sequence_id: SequenceId
    prompt_ids: Sequence[int]
    sampling: SamplingParams
    seed: int
    """Unsigned, 64 bits. With the choice and the position it decides every random draw."""
    max_tokens: int
    """Output tokens in all, ``output_ids`` included; prompt and output fit the model's context.
    0 only scores the prompt."""
    eos_ids: frozenset[int] = frozenset()
    output_ids: Sequence[int] = ()
    """Tokens that were generated before; the first new one is at position len(output_ids)."""
    job_class: JobClass = "interactive"
    tenant: str = ""
    """Only sequences of one tenant share blocks."""
    leader: SequenceId | None = None
    """A sequence of the same prompt: this one begins when that has computed it."""
    scores_prompt: bool = False
    """Whether the prompt's tokens are scored, ``sampling.prompt_logprobs`` places deep, before the
    first one is drawn."""
    bad_words: Sequence[Sequence[int]] = ()
    """Token ids whose last is never drawn behind the others."""
    allowed: bytes | None = None
    """The tokens that may be drawn at all, as `TokenConstraint.mask`; a constraint knows itself."""
    constraint: TokenConstraint | None = None


@dataclass(frozen=True, slots=True)
class CancelSequence:
    """Forget a sequence and free its blocks before the next step; unknown ids are ignored."""

    sequence_id: SequenceId


@dataclass(frozen=True, slots=True)
class Promote:
    """Schedule a batch sequence as an interactive one from the next step on; unknown ids are
    ignored."""

    sequence_id: SequenceId


class TokenScore(NamedTuple):
    """How likely a token was, by the logits as the model gave them."""

    logprob: float
    top_ids: Sequence[int]
    """The most likely tokens in its place, best first."""
    top_logprobs: Sequence[float]


class StepOutput(Struct, frozen=True):
    """One new token of one sequence. The token with a finish reason is the sequence's last."""

    sequence_id: SequenceId
    token_id: int
    finish_reason: FinishReason | None = None
    num_cached_tokens: int = 0
    """Tokens of the sequence's prompt that came out of the prefix cache; so with each token."""
    score: TokenScore | None = None
    """Where the sequence's sampling wants logprobs."""


class PromptScored(Struct, frozen=True):
    """The scores of the next tokens of a sequence's prompt, the second one on.

    With a finish reason they are all that was wanted of the sequence.
    """

    sequence_id: SequenceId
    scores: list[TokenScore]
    finish_reason: FinishReason | None = None


@dataclass(frozen=True, slots=True)
class SequenceFailed:
    """A sequence that could not go on; no token follows."""

    sequence_id: SequenceId
    error: WarrenError


class StepFailed(Exception):
    """A step was not computed, and the runner can go on.

    What this step, and any that was launched since, should have written is undefined.
    """


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """How full the engine is, for announcements and metrics."""

    num_running: int
    num_waiting: int
    num_blocks: int
    num_free_blocks: int
    """Those included whose content can still be found."""
    num_preemptions: int
    """Since the start, as the two that follow."""
    num_begun_tokens: int = 0
    """Tokens of the prompts of all sequences that began."""
    num_cached_tokens: int = 0
    """Those of them that the prefix cache held."""


class LogitEdits(NamedTuple):
    """What a draw does to its row of logits first: biases, penalties, bans, in this order."""

    biases: Mapping[int, float]
    """Added to the logits of these tokens."""
    penalties: "TokenPenalties | None"
    banned_ids: Sequence[int]
    """Never drawn."""
    mask: bytes | None
    """The only tokens that may be drawn, as `TokenConstraint.mask`."""


class TokenPenalties(NamedTuple):
    """Of tokens that were there before; each of them once."""

    token_ids: "array[int]"
    """int64."""
    subtracted: "array[float]"
    """float32: what presence and frequency take from each one's logit."""
    repetition: float
    """Divides each one's logit if it is positive, and multiplies it else, before that."""


class ScheduledSequence(Struct, frozen=True, kw_only=True):
    """One sequence's share of a step: the tokens at ``start`` .. ``start + num_tokens - 1``."""

    sequence_id: SequenceId
    start: int
    token_ids: Sequence[int]
    """The tokens to compute. Where ``previous_row`` is set, the last of these is a placeholder."""
    block_table: Sequence[int]
    """The blocks of tokens 0 .. start + num_tokens - 1; token t lies in slot t % block_size of
    block_table[t // block_size]."""
    is_sampled: bool
    """Whether the step yields this sequence's next token: false for all but the last chunk."""
    sampling: SamplingParams
    seed: int
    position: int
    """Index among the output tokens of the token that is drawn."""
    previous_row: int | None = None
    """The last token is what row ``previous_row`` of the previous launch drew; the host may not
    know it yet."""
    edits: LogitEdits | None = None
    scored_start: int = 0
    scored_ids: Sequence[int] = ()
    """Tokens of the prompt to score: the logits at ``scored_start`` and after foretell them."""

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)


@dataclass(frozen=True, slots=True)
class ScheduledBatch:
    """One step. Row r of its result is the r-th sequence with ``is_sampled``; its scored prompts
    are those of the sequences with ``scored_ids``, in their order."""

    sequences: Sequence[ScheduledSequence]

    @property
    def num_tokens(self) -> int:
        return sum(sequence.num_tokens for sequence in self.sequences)


class StepScores(NamedTuple):
    """The scores of one step."""

    drawn: Mapping[int, TokenScore]
    """By the row of the result, of those whose sampling wants logprobs."""
    prompts: Sequence[list[TokenScore]]
    """Of each sequence with ``scored_ids``."""


class StepHandle(Protocol):
    """A step that was launched."""

    def result(self) -> list[int]:
        """Wait for the step; one token id a sampled sequence.

        Raises what the step raised: after `StepFailed` the runner can go on, after all else not.
        """
        ...

    def scores(self) -> StepScores:
        """What the step's sequences want to know of their tokens. Raises as `result` does."""
        ...


class ModelRunner(Protocol):
    """Computes steps, in the order in which they are launched.

    Steps execute strictly one after another, so blocks that one step still reads may be given to
    the next one.
    """

    @property
    def num_blocks(self) -> int: ...

    @property
    def block_size(self) -> int: ...

    @property
    def vocab_size(self) -> int: ...

    @property
    def max_seq_len(self) -> int: ...

    def launch(self, batch: ScheduledBatch) -> StepHandle:
        """Start a step and return before it is computed. ``batch`` is not kept."""
        ...

    def close(self) -> None: ...
