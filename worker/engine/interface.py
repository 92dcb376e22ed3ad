"""What goes into the engine, what comes out, and what it asks of a model runner."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from msgspec import Struct

from shared.messages import FinishReason, JobClass, SamplingParams


class SequenceId(NamedTuple):
    request_id: str
    choice: int


@dataclass(frozen=True, slots=True)
class Submit:
    """Start a sequence, or go on with one that another worker began."""

    sequence_id: SequenceId
    prompt_ids: Sequence[int]
    sampling: SamplingParams
    seed: int
    """Unsigned, 64 bits. With the choice and the position it decides every random draw."""
    max_tokens: int
    """Output tokens in all, ``output_ids`` included; prompt and output fit the model's context."""
    eos_ids: frozenset[int] = frozenset()
    output_ids: Sequence[int] = ()
    """Tokens that were generated before; the first new one is at position len(output_ids)."""
    job_class: JobClass = "interactive"
    tenant: str = ""
    """Only sequences of one tenant share blocks."""


@dataclass(frozen=True, slots=True)
class Cancel:
    """Forget a sequence and free its blocks before the next step; unknown ids are ignored."""

    sequence_id: SequenceId


@dataclass(frozen=True, slots=True)
class StepOutput:
    """One new token of one sequence. The token with a finish reason is the sequence's last."""

    sequence_id: SequenceId
    token_id: int
    finish_reason: FinishReason | None = None
    num_cached_tokens: int = 0
    """Tokens of the sequence's prompt that came out of the prefix cache; so with each token."""


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

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)


@dataclass(frozen=True, slots=True)
class ScheduledBatch:
    """One step. Row r of its result is the r-th sequence with ``is_sampled``."""

    sequences: Sequence[ScheduledSequence]

    @property
    def num_tokens(self) -> int:
        return sum(sequence.num_tokens for sequence in self.sequences)


class StepHandle(Protocol):
    """A step that was launched."""

    def result(self) -> list[int]:
        """Wait for the step; one token id a sampled sequence. Raises what the step raised."""
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
