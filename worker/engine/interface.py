"""The inputs and outputs of engines, and the protocols of an engine and of a model runner."""

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, Protocol, TypeAlias, get_args

from msgspec import Struct

from shared.errors import WarrenError
from shared.messages import FinishReason, JobClass, SamplingParams
from worker.engine.cache.block_pool import BlockCounts
from worker.engine.cache.layout import CacheGroup
from worker.engine.step_times import StepFacts, StepTimes

NO_TOKEN = -1
"""The result of a row whose logits are not finite."""

DraftSource: TypeAlias = Literal["text", "grammar", "predictor"]
"""Where a draft comes from: the text of the sequence, its grammar, or the model's predictor."""
DRAFT_SOURCES: tuple[DraftSource, ...] = get_args(DraftSource)


class SequenceId(NamedTuple):
    request_id: str
    choice: int


class TokenConstraint(Protocol):
    """The constraint on a sequence's output; used only by the engine thread once submitted.

    It has already been advanced through the existing output tokens.
    """

    @property
    def is_complete(self) -> bool:
        """Whether no further token is allowed."""
        ...

    def advance(self, token_id: int) -> None:
        """Advance by a token. Raises `InvalidRequest` if no token can follow."""
        ...

    def mask(self) -> bytes:
        """The allowed next tokens: bit t % 8 of byte t // 8, padded to whole int32."""
        ...

    def forced_tokens(self) -> Sequence[int]:
        """The next tokens, as far as the constraint leaves no choice of text."""
        ...

    def masks_after(self, token_ids: Sequence[int]) -> Sequence[bytes]:
        """The masks after each of these tokens, up to a token that is not allowed or ends the
        output, or until the masks take too long. The constraint does not advance."""
        ...


@dataclass(frozen=True, slots=True)
class Submit:
    """Start a sequence, or continue a sequence that another worker began."""

    sequence_id: SequenceId
    prompt_ids: Sequence[int]
    sampling: SamplingParams
    seed: int
    """Unsigned, 64 bits. Together with choice and position it determines every random draw."""
    max_tokens: int
    """Maximum number of output tokens, including ``output_ids``; prompt and output must fit the
    context. 0 only scores the prompt."""
    eos_ids: frozenset[int] = frozenset()
    output_ids: Sequence[int] = ()
    """Tokens that were generated before; the first new token is at position len(output_ids)."""
    job_class: JobClass = "interactive"
    tenant: str = ""
    """Only sequences of the same tenant share blocks."""
    leader: SequenceId | None = None
    """A sequence with the same prompt; this sequence starts once the leader has computed it."""
    scores_prompt: bool = False
    """Whether the prompt's tokens are scored, with ``sampling.prompt_logprobs`` alternatives each,
    before the first token is drawn."""
    bad_words: Sequence[Sequence[int]] = ()
    """Sequences of token ids; the last token of each is never drawn after the others."""
    allowed: bytes | None = None
    """The tokens that may be drawn, as `TokenConstraint.mask`; not needed with a constraint."""
    constraint: TokenConstraint | None = None
    expected_ids: Sequence[int] = ()
    """The output that is expected. Steps check it as drafts, so that its tokens take few steps."""


@dataclass(frozen=True, slots=True)
class CancelSequence:
    """Remove a sequence and free its blocks before the next step; unknown ids are ignored."""

    sequence_id: SequenceId


@dataclass(frozen=True, slots=True)
class Promote:
    """Give a batch sequence interactive priority from the next step on; unknown ids are ignored."""

    sequence_id: SequenceId


EngineCommand: TypeAlias = Submit | CancelSequence | Promote


class TokenScore(NamedTuple):
    """The log probability of a token, from the logits before processing."""

    logprob: float
    """NaN if the logits are not finite."""
    top_ids: Sequence[int]
    """The most likely tokens at its position, best first."""
    top_logprobs: Sequence[float]


class StepOutput(Struct, frozen=True, gc=False):
    """A new token of a sequence. A token with a finish reason is the sequence's last."""

    sequence_id: SequenceId
    token_id: int
    finish_reason: FinishReason | None = None
    num_cached_tokens: int = 0
    """Prompt tokens that were found in the prefix cache; the same for all tokens of a sequence."""
    score: TokenScore | None = None
    """Set if the sequence's sampling parameters request logprobs."""
    is_predicted: bool = False
    """A draft had predicted the token, so that no step of its own was needed for it."""


class PromptScored(Struct, frozen=True):
    """The scores of the next prompt tokens of a sequence, starting with the second token.

    With a finish reason, the sequence ends here because only scores were requested.
    """

    sequence_id: SequenceId
    scores: list[TokenScore]
    finish_reason: FinishReason | None = None


Output: TypeAlias = StepOutput | PromptScored


@dataclass(frozen=True, slots=True)
class SequenceFailed:
    """A sequence that could not continue; no further token follows."""

    sequence_id: SequenceId
    error: WarrenError


class StepFailed(Exception):
    """A step failed, but the runner can continue.

    The results of this step, and of any launched since, are undefined.
    """


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """The engine's load, for announcements and metrics."""

    num_running: int
    num_waiting: int
    num_blocks: int
    num_free_blocks: int
    """Including cached blocks, which can be evicted."""
    num_preemptions: int
    """Since the start, like the two fields below."""
    num_begun_tokens: int = 0
    """Prompt tokens of all sequences that started."""
    num_cached_tokens: int = 0
    """Prompt tokens of these that were found in the prefix cache."""
    num_running_batch: int = 0
    """Running sequences of batch jobs."""
    num_waiting_batch: int = 0
    num_drafted: Mapping[DraftSource, int] = field(default_factory=dict)
    """Tokens that were drafted since the start, by the source of the draft; ``num_accepted`` of
    them were drawn as drafted."""
    num_accepted: Mapping[DraftSource, int] = field(default_factory=dict)
    last_step: StepFacts | None = None
    num_failures: Mapping[str, int] = field(default_factory=dict)
    """Failures of an engine over HTTP since the start, by kind."""
    block_counts: BlockCounts | None = None
    """The cache's blocks by their content; None for an engine over HTTP."""

    @property
    def num_drafted_tokens(self) -> int:
        return sum(self.num_drafted.values())

    @property
    def num_accepted_tokens(self) -> int:
        return sum(self.num_accepted.values())


Charges: TypeAlias = Mapping[SequenceId, float]
"""Seconds of machine time that sequences have used. What runs beside others pays for a part."""


class EngineListener(Protocol):
    """Hears what an engine does. The methods are called in the engine's thread and must not
    block."""

    def hear_outputs(self, outputs: Sequence[Output], charges: Charges) -> None:
        """New tokens and scores, after each step that yielded some, and the machine time that
        sequences have used since the previous call. Either may be empty."""
        ...

    def hear_failed(self, failed: Sequence[SequenceFailed]) -> None:
        """Sequences that ended without a last token."""
        ...

    def hear_failure(self, error: BaseException) -> None:
        """The engine has ended and ignores further commands. Called at most once."""
        ...

    def hear_ready(self, is_ready: bool) -> None:
        """Whether the engine can run sequences now. An engine is ready until it says otherwise."""
        ...


class TokenEngine(Protocol):
    """Takes token ids and returns token ids: the engine in this process (`EngineThread`), or an
    engine over HTTP (`worker.engines`). It runs in a thread of its own."""

    @property
    def step_times(self) -> StepTimes: ...

    @property
    def stalled_s(self) -> float:
        """Seconds for which there has been work without a completed step; 0 while idle."""
        ...

    def start(self, listener: EngineListener) -> None: ...

    def stop(self) -> None:
        """End the engine, even if sequences are running. Returns when it has ended."""
        ...

    def send(self, command: EngineCommand) -> None:
        """Queue a command. Thread-safe. Raises `ContextLengthExceeded` and `ValueError` for a
        submit that can never run."""
        ...

    def load(self) -> EngineLoad:
        """The load after the last step. Thread-safe."""
        ...


class LogitEdits(NamedTuple):
    """The logits processing of a row before its draw: biases, penalties and bans, in this order."""

    biases: Mapping[int, float]
    """The numbers that are added to the logits of these tokens."""
    penalties: "TokenPenalties | None"
    banned_ids: Sequence[int]
    """Never drawn."""
    mask: bytes | None
    """The allowed tokens, as `TokenConstraint.mask`."""


class TokenPenalties(NamedTuple):
    """Penalties for the tokens that occurred before, without duplicates."""

    token_ids: "array[int]"
    """int64."""
    subtracted: "array[float]"
    """float32: the sum of presence and frequency penalty, subtracted from each token's logit."""
    repetition: float
    """Before the subtraction, divides each token's logit if it is positive, and multiplies it
    otherwise."""


# A step has hundreds; none is part of a cycle, so the garbage collector need not visit them.
class ScheduledSequence(Struct, frozen=True, kw_only=True, gc=False):
    """A sequence's share of a step: the tokens at ``start`` .. ``start + num_tokens - 1``."""

    sequence_id: SequenceId
    start: int
    token_ids: Sequence[int]
    """The tokens to compute. If ``previous_row`` is set, the last token that is not drafted is a
    placeholder."""
    block_tables: Sequence[Sequence[int]]
    """The blocks of each group of the runner's cache. In a group of tokens they are the blocks of
    tokens 0 .. start + num_tokens - 1: token t is in slot t % block_size of table[t // block_size],
    unless no token of the step reads its block (`worker.engine.cache.token_blocks.RELEASED`). In a
    group of states they are the blocks of the state that the step reads, none if ``start`` is 0,
    and then the blocks to which it writes the state after its tokens. The two may be the same."""
    is_sampled: bool
    """Whether the step yields this sequence's next token: false for all but the last chunk."""
    sampling: SamplingParams
    seed: int
    position: int
    """The index of the first drawn token among the output tokens."""
    num_drafts: int = 0
    """The number of guesses at the end of ``token_ids``. The token after each guess is drawn, too,
    in a row of its own."""
    previous_row: int | None = None
    """The last token that is not drafted is the result of row ``previous_row`` of the previous
    launch, which may not have reached the host yet."""
    edits: LogitEdits | None = None
    """The edits of the first row."""
    draft_edits: Sequence[LogitEdits] = ()
    """The edits of the other rows; empty if they have none."""
    scored_start: int = 0
    scored_ids: Sequence[int] = ()
    """Prompt tokens to score, with the logits of the positions from ``scored_start`` on."""
    stated_ids: Sequence[int] = ()
    """Tokens that an answer has in place of the draws, one for each row, to be judged by their
    logits; empty: none."""
    next_id: int | None = None
    """The token after the last token, if it is known."""
    is_predicted: bool = False
    """Whether the model's predictor is to predict the token after the last token that is drawn and
    counts."""

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)


@dataclass(frozen=True, slots=True)
class ScheduledBatch:
    """A step. Its result has the rows of the sequences with ``is_sampled``, in their order: a row,
    and another for each drafted token. Its prompt scores belong to the sequences with
    ``scored_ids``, in their order."""

    sequences: Sequence[ScheduledSequence]

    @property
    def num_tokens(self) -> int:
        return sum(sequence.num_tokens for sequence in self.sequences)


class Judgement(NamedTuple):
    """How well the logits after processing explain a token that an answer states."""

    margin: float
    """How far the token is from being drawn: by how much the most likely token's log probability is
    higher, at temperature 0, and otherwise the distance of the random number to the numbers that
    draw the token. 0: the token is drawn; infinity: it is banned. A token that top-k, top-p or
    min-p leave out is judged as if they left out none."""
    logprob: float
    """The token's log probability before temperature and filters."""
    rank: int
    """The number of tokens that are more likely, and 1."""
    is_kept: bool
    """Whether top-k, top-p and min-p leave the token."""


class StepScores(NamedTuple):
    """The scores of a step, and the predictions of the model's predictor."""

    drawn: Mapping[int, TokenScore]
    """The score of the token that was drawn in each row of the result, for sequences that request
    logprobs."""
    prompts: Sequence[list[TokenScore]]
    """For each sequence with ``scored_ids``."""
    predicted: Sequence[int] = ()
    """A token id, or `NO_TOKEN`, for each sequence with ``is_predicted``."""
    judged: Sequence[Judgement] = ()
    """For each token of ``stated_ids``, in the order of the rows."""


class StepHandle(Protocol):
    """A launched step."""

    def result(self) -> list[int]:
        """Wait for the step; returns for each row a token id or `NO_TOKEN`.

        Raises the step's error. After `StepFailed` the runner can continue, after any other error
        not.
        """
        ...

    def scores(self) -> StepScores:
        """The scores and predictions that the step's sequences request. Raises as `result` does."""
        ...


class ModelRunner(Protocol):
    """Executes steps in launch order.

    Steps never overlap, so blocks that a step still reads may be reallocated to the next step.
    """

    @property
    def num_blocks(self) -> int: ...

    @property
    def block_size(self) -> int: ...

    @property
    def groups(self) -> Sequence[CacheGroup]:
        """The groups of layers that have block tables of their own."""
        ...

    @property
    def vocab_size(self) -> int: ...

    @property
    def max_seq_len(self) -> int: ...

    def launch(self, batch: ScheduledBatch) -> StepHandle:
        """Start a step and return before it is complete. ``batch`` is not kept."""
        ...

    def close(self) -> None: ...
