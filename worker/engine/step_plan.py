"""A step under construction."""

from collections.abc import Sequence as Items
from dataclasses import dataclass, field

from worker.engine.drafts import NO_DRAFT, TokenDraft
from worker.engine.interface import NO_TOKEN, ScheduledSequence
from worker.engine.sequence import Sequence
from worker.engine.sequence_cache import SequenceCache
from worker.engine.step_cost import StepWork

MAX_SCORED_TOKENS = 256
"""Maximum number of prompt tokens scored in a step: each takes a row of logits, 200 KB for 50,000
tokens."""


@dataclass(slots=True)
class StepPlan:
    """A step under construction: the shares of sequences, and which rows of the result are
    whose."""

    num_tokens_left: int
    cache: SequenceCache
    shares: list[ScheduledSequence] = field(default_factory=list)
    sampled: list[Sequence] = field(default_factory=list)
    """Sequences that draw at least one token."""
    rows: list[Sequence] = field(default_factory=list)
    """The sequence of each row of the result."""
    prompts: list[Sequence] = field(default_factory=list)
    """Sequences with more than one token in this step."""
    scored: list[Sequence] = field(default_factory=list)
    """Sequences whose prompts are scored, in the order of the shares."""
    predicted: list[Sequence] = field(default_factory=list)
    """Sequences for which the model's predictor predicts a token, in the order of the shares."""
    num_scores_left: int = MAX_SCORED_TOKENS
    work: StepWork = field(default_factory=StepWork)
    has_streams: bool = False
    """An interactive sequence decodes in this step."""
    is_cut: bool = False
    """A prompt did not fit completely."""
    needs_result: bool = False
    """The next step can only be planned once this step's tokens are known."""
    has_scores: bool = False
    """A sequence of this step requests logprobs, or a prediction."""

    def add_decode(
        self, sequence: Sequence, draft: TokenDraft = NO_DRAFT, *, is_predicted: bool = False
    ) -> None:
        """Add the next token of a sequence in decode, and the tokens that are drafted after it."""
        self.has_streams = self.has_streams or not sequence.is_batch
        if is_predicted:
            self.predicted.append(sequence)
        self._add(sequence, 1 + sequence.num_redone, draft, is_predicted=is_predicted)

    def add_prompt(self, sequence: Sequence, max_tokens: int) -> int:
        """Add up to ``max_tokens`` of the sequence; returns how many were added. The last token is
        left to a later step if its draw is not prepared, and so are the tokens behind a snapshot of
        its state."""
        num_tokens = min(sequence.num_uncomputed - (not sequence.is_prepared), max_tokens)
        if sequence.num_unscored:
            num_tokens = min(num_tokens, self.num_scores_left)
        self.is_cut = self.is_cut or num_tokens < sequence.num_uncomputed
        if (most := self.cache.num_until_snapshot(sequence.num_computed)) is not None:
            num_tokens = min(num_tokens, most)
        if num_tokens:
            self.prompts.append(sequence)
            self._add(sequence, num_tokens)
        return num_tokens

    def _add(
        self,
        sequence: Sequence,
        num_tokens: int,
        draft: TokenDraft = NO_DRAFT,
        *,
        is_predicted: bool = False,
    ) -> None:
        num_drafts = len(draft.token_ids)
        self.work.add(sequence.num_computed, num_tokens + num_drafts)
        self.num_tokens_left -= num_tokens + num_drafts
        block_tables = self.cache.tables(sequence, sequence.num_computed + num_tokens + num_drafts)
        share = sequence.take(
            num_tokens, len(self.rows), block_tables, draft, is_predicted=is_predicted
        )
        self.shares.append(share)
        if share.scored_ids:
            self.has_scores = True
            self.scored.append(sequence)
            self.num_scores_left = max(0, self.num_scores_left - len(share.scored_ids))
        if share.is_sampled:
            depends = sequence.needs_last_token or num_drafts > 0 or is_predicted
            self.needs_result = self.needs_result or depends
            has_scores = share.sampling.logprobs is not None or is_predicted
            self.has_scores = self.has_scores or has_scores
            self.sampled.append(sequence)
            self.rows += [sequence] * (1 + num_drafts)

    def keep_predictions(self, token_ids: Items[int]) -> None:
        """Record what the model's predictor expects after this step: a token for each of
        ``predicted``, or `NO_TOKEN`."""
        for sequence, token_id in zip(self.predicted, token_ids, strict=True):
            sequence.prediction = None if token_id == NO_TOKEN else token_id
