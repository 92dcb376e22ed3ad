"""The state of a sequence: its known tokens, computed tokens and pending token."""

from collections.abc import Sequence as Items

from shared.messages import FinishReason
from worker.engine.cache.state_blocks import StateBlocks
from worker.engine.cache.token_blocks import TokenBlocks
from worker.engine.drafts import MAX_MATCH_LEN, NO_DRAFT, Drafter, TokenDraft
from worker.engine.interface import DraftSource, ScheduledSequence, Submit
from worker.engine.logit_edits import editor

PLACEHOLDER_ID = 0
"""Stands for a token that is still in flight."""


class Sequence:
    """The engine's state of a `Submit`.

    ``num_computed`` counts launches, not results: a token counts once its step is launched, because
    later steps execute after it. A sampled token is pending until its step is collected; at most
    one token is pending when a step is planned. A preempted sequence restarts with all its known
    tokens; a sequence taken over from another worker starts the same way.

    Drafted tokens are no part of ``token_ids`` and do not count as computed until they are drawn. A
    step with drafts is collected before the next step is planned. If a model keeps states, a step
    with a wrong draft has written a state that is of no use: the known tokens of the step are
    computed again, together with the next token.
    """

    def __init__(self, submit: Submit, arrival: int) -> None:
        self.submit = submit
        self.tenant = submit.tenant
        self.is_batch = submit.job_class == "batch"
        self._arrival = arrival
        self.token_ids = [*submit.prompt_ids, *submit.output_ids]
        """The prompt and the known output."""
        self.max_len = len(submit.prompt_ids) + submit.max_tokens
        self.num_computed = 0
        self.num_pending = 0
        self.held: Items[TokenBlocks | StateBlocks] = ()
        """The blocks that it holds in each group of the cache; empty unless it is running."""
        self.num_covered = 0
        """The length up to which it needs no more blocks."""
        self.block_names: list[bytes] = []
        """Names of its first full blocks, as far as computed; they are kept across preemption."""
        self.num_cached: int | None = None
        """Prompt tokens found in the cache when the sequence first started."""
        self.is_ended = False
        """Finished or cancelled; results still in flight are dropped."""
        self.num_scored = 0
        """Prompt tokens, from the second token on, whose scores are known or in flight."""
        self._num_scores_known = 0
        self.is_constrained = submit.constraint is not None
        self.is_drawn = submit.max_tokens > 0
        """False if only the prompt's scores are requested."""
        self._editor = editor(submit)
        self.needs_last_token = self._editor is not None and self._editor.needs_last_token
        """Whether its next draw can only be planned once the previous token is known."""
        eos_ids = frozenset() if submit.sampling.ignore_eos else submit.eos_ids
        self._end_ids = eos_ids.union(submit.sampling.stop_token_ids)
        self._row = 0
        self._drafter: Drafter | None = None
        self._drafts: list[int] = []
        """Tokens of the step in flight that may turn out to be the next tokens."""
        self.draft_source: DraftSource = "text"
        """Where they come from."""
        self.prediction: int | None = None
        """The token that the model's predictor expects after the last known token."""
        self.has_states = False
        """Whether the model keeps states, so that a wrong draft takes a whole step back."""
        self.num_redone = 0
        """The tokens of a step with a wrong draft, which are computed again."""
        self._step_start = 0
        """The first token of the latest step."""

    @property
    def priority(self) -> tuple[bool, int]:
        """Smaller values are served first, within a tenant, and preempted last."""
        return self.is_batch, self._arrival

    @property
    def num_tokens(self) -> int:
        """All tokens to compute, including the pending one.

        When only scores are requested, the prompt's last token is not computed.
        """
        return len(self.token_ids) + self.num_pending - (not self.is_drawn)

    @property
    def num_unscored(self) -> int:
        """Prompt tokens whose requested scores are still missing."""
        if not self.submit.scores_prompt:
            return 0
        return len(self.submit.prompt_ids) - 1 - self.num_scored

    @property
    def is_prepared(self) -> bool:
        """Whether its next token can be drawn: what edits its logits is known."""
        return self._editor is None or self._editor.is_prepared

    @property
    def has_prompt(self) -> bool:
        """Whether its prompt has been computed."""
        return self.num_computed >= len(self.submit.prompt_ids)

    @property
    def num_cacheable(self) -> int:
        """The length of the prefix that may come from the cache: the last token, and every token to
        be scored, must be computed."""
        return self.num_scored if self.num_unscored else self.num_tokens - 1

    @property
    def num_uncomputed(self) -> int:
        """Tokens that the next steps have to compute; see `is_prefilling`."""
        # `num_tokens`, without a call for every sequence in every step.
        return len(self.token_ids) + self.num_pending - (not self.is_drawn) - self.num_computed

    @property
    def is_prefilling(self) -> bool:
        """Whether the next tokens belong to its prompt, rather than to a decode."""
        return self.num_uncomputed > 1 + self.num_redone

    @property
    def is_complete(self) -> bool:
        """Whether its last possible token, by count, is known or in flight."""
        if not self.is_drawn:
            return not self.num_uncomputed
        return self.num_tokens >= self.max_len

    @property
    def num_drafts(self) -> int:
        """The drafted tokens of the step in flight."""
        return len(self._drafts)

    def draft(self, max_tokens: int, least_chance: float) -> TokenDraft:
        """Draft the tokens after the uncomputed one, as long as they have at least this chance to
        be drawn. The draft ends before the sequence does."""
        max_tokens = min(max_tokens, self.max_len - self.num_tokens - 2)
        if max_tokens <= 0:
            return NO_DRAFT
        if self._drafter is None:
            self._drafter = Drafter(self.token_ids, self._expected())
        token_ids = () if self._editor is None else self._editor.forced_tokens()[:max_tokens]
        num_tokens = min(max_tokens, self._drafter.num_worthwhile(least_chance))
        source: DraftSource = "grammar" if token_ids else "text"
        if not token_ids and num_tokens:
            token_ids = self._drafter.draft(num_tokens, self.num_pending)
        if not token_ids and self.prediction is not None:
            is_worthwhile = self._drafter.chance("predictor") >= least_chance
            token_ids, source = [self.prediction] * is_worthwhile, "predictor"
        if self._editor is None or not token_ids:
            return TokenDraft(token_ids, source=source)
        position = self.num_tokens - len(self.submit.prompt_ids)
        edits = self._editor.edits_after(token_ids, position)
        return TokenDraft(token_ids[: len(edits)], edits, source)

    def is_predictable(self, least_chance: float) -> bool:
        """Whether the token after the next is worth a prediction, which has to have at least this
        chance to be right."""
        if self.max_len - self.num_tokens <= 3:
            return False
        if self._drafter is None:
            self._drafter = Drafter(self.token_ids, self._expected())
        return self._drafter.chance("predictor") >= least_chance

    def _expected(self) -> list[int]:
        """The expected output, after the end of the prompt, so that its beginning is found."""
        submit = self.submit
        return [*submit.prompt_ids[-MAX_MATCH_LEN:], *submit.expected_ids] * bool(
            submit.expected_ids
        )

    def take(
        self,
        num_tokens: int,
        row: int,
        block_tables: Items[Items[int]],
        draft: TokenDraft = NO_DRAFT,
        *,
        is_predicted: bool = False,
    ) -> ScheduledSequence:
        """The sequence's share of the planned step: the next ``num_tokens`` uncomputed tokens, and
        after the last of all tokens the drafted tokens.

        ``row`` is its first row in the step's result if the share reaches the sequence's end. The
        block tables must cover the tokens.
        """
        start, end = self.num_computed, self.num_computed + num_tokens
        token_ids = self.token_ids[start:end]
        is_pending = end > len(self.token_ids)
        if is_pending:
            token_ids.append(PLACEHOLDER_ID)
        token_ids += draft.token_ids
        is_sampled = end == self.num_tokens and self.is_drawn
        position = end - len(self.submit.prompt_ids)
        scored_ids = self._take_scored(end) if self.submit.scores_prompt else ()
        is_continued = not is_sampled and end < len(self.token_ids)
        share = ScheduledSequence(
            sequence_id=self.submit.sequence_id,
            start=start,
            token_ids=token_ids,
            num_drafts=len(draft.token_ids),
            block_tables=block_tables,
            is_sampled=is_sampled,
            sampling=self.submit.sampling,
            seed=self.submit.seed,
            position=position,
            previous_row=self._row if is_pending else None,
            edits=self._editor.edits(position) if self._editor and is_sampled else None,
            draft_edits=draft.edits,
            scored_start=self.num_scored - len(scored_ids),
            scored_ids=scored_ids,
            next_id=self.token_ids[end] if is_continued else None,
            is_predicted=is_predicted,
        )
        self.num_computed = end
        self.num_redone, self._step_start, self.prediction = 0, start, None
        if is_sampled:
            self.num_pending += 1
            self._row = row
            self._drafts, self.draft_source = [*draft.token_ids], draft.source
        return share

    def prepare(self) -> None:
        """Prepare the next draw, which may take as long as the mask of a constraint.

        Raises `InvalidRequest` if no token can be drawn.
        """
        if self._editor is not None:
            self._editor.prepare(len(self.token_ids) - len(self.submit.prompt_ids))

    def restart(self) -> None:
        """Discard computed and pending tokens; steps in flight do not count."""
        self.num_computed = self.num_pending = self.num_covered = self.num_redone = 0
        self.prediction = None
        self.num_scored = self._num_scores_known
        self._drafts = []

    def learn_scores(self, num_tokens: int) -> FinishReason | None:
        """Record the scores of the next prompt tokens; returns the finish reason, if these are the
        last."""
        self._num_scores_known += num_tokens
        is_last = self._num_scores_known == len(self.submit.prompt_ids) - 1
        return "length" if is_last and not self.is_drawn else None

    def append(self, token_id: int) -> FinishReason | None:
        """Append the oldest pending token; returns the finish reason, if it is the last.

        If it was drafted, its successor is pending. Raises `InvalidRequest` if its constraint does
        not allow it.
        """
        self.num_pending -= 1
        self.token_ids.append(token_id)
        self._check_draft(token_id)
        if token_id in self._end_ids:
            return "stop"
        if self._editor is not None:
            self._editor.take(token_id)
            if self._editor.is_complete:
                return "stop"
        return "length" if len(self.token_ids) == self.max_len else None

    def _check_draft(self, token_id: int) -> None:
        if not self._drafts or self.num_pending:  # the drafts are of a later step
            if self._drafter is not None:
                self._drafter.append(token_id)
            return
        assert self._drafter is not None
        was_right = self._drafts.pop(0) == token_id
        self._drafter.learn(token_id, was_right=was_right, source=self.draft_source)
        if was_right:
            self.num_computed += 1
            self.num_pending += 1
            return
        self._drafts = []
        if self.has_states:
            self.num_redone = self.num_computed - self._step_start
            self.num_computed = self._step_start

    def _take_scored(self, end: int) -> list[int]:
        """The prompt tokens that are scored by computing the tokens before ``end``."""
        if not self.num_unscored or end <= self.num_scored:
            return []
        scored_ids = self.token_ids[self.num_scored + 1 : min(end + 1, len(self.submit.prompt_ids))]
        self.num_scored += len(scored_ids)
        return scored_ids
