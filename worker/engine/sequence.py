"""One sequence: what it is to compute, what is computed, and what is still on its way."""

from shared.messages import FinishReason
from worker.engine.interface import ScheduledSequence, Submit
from worker.engine.logit_edits import editor

_PLACEHOLDER_ID = 0


class Sequence:
    """The engine's view of one `Submit`.

    ``num_computed`` counts launches, not results: a token counts as soon as its step is launched,
    because later steps execute after it. A sampled token counts as pending until its step was
    collected; at most one is pending when a step is planned. A preempted sequence starts over with
    all its known tokens, which is also how it goes on with another worker's.
    """

    def __init__(self, submit: Submit, arrival: int) -> None:
        """Raises `InvalidRequest` where its first draw has no token to choose."""
        self.submit = submit
        self.is_batch = submit.job_class == "batch"
        self._arrival = arrival
        self.token_ids = [*submit.prompt_ids, *submit.output_ids]
        """The prompt and the known output."""
        self.max_len = len(submit.prompt_ids) + submit.max_tokens
        self.num_computed = 0
        self.num_pending = 0
        self.block_table: list[int] = []
        self.block_names: list[bytes] = []
        """Of its first full blocks, as far as they were asked for; they outlive preemption."""
        self.num_published = 0
        """Blocks at the front of the table that other sequences may find."""
        self.num_cached: int | None = None
        """Tokens of the prompt that need not be computed when it first began."""
        self.is_ended = False
        """Finished or cancelled: what is still on its way is dropped."""
        self.num_scored = 0
        """Tokens of the prompt, from the second one on, whose scores are known or on their way."""
        self._num_scores_known = 0
        self.is_drawn = submit.max_tokens > 0
        """False where the prompt's scores are all that is wanted."""
        self._editor = editor(submit)
        self.needs_last_token = self._editor is not None and self._editor.needs_last_token
        """Whether its next draw can be planned only when the token before that is known."""
        eos_ids = frozenset() if submit.sampling.ignore_eos else submit.eos_ids
        self._end_ids = eos_ids.union(submit.sampling.stop_token_ids)
        self._row = 0

    @property
    def priority(self) -> tuple[bool, int]:
        """Smaller is served first and preempted last."""
        return self.is_batch, self._arrival

    @property
    def num_tokens(self) -> int:
        """All tokens to compute, the pending one included; nothing follows a prompt's last one
        that is only scored."""
        return len(self.token_ids) + self.num_pending - (not self.is_drawn)

    @property
    def num_unscored(self) -> int:
        """Tokens of the prompt whose scores are wanted still."""
        if not self.submit.scores_prompt:
            return 0
        return len(self.submit.prompt_ids) - 1 - self.num_scored

    @property
    def has_prompt(self) -> bool:
        """Whether its prompt is computed."""
        return self.num_computed >= len(self.submit.prompt_ids)

    @property
    def num_cacheable(self) -> int:
        """Its first tokens that need not be computed if their blocks are found: at least one is
        left to compute, and nothing is scored without being computed."""
        return self.num_scored if self.num_unscored else self.num_tokens - 1

    @property
    def num_uncomputed(self) -> int:
        """Tokens that the next steps have to compute: 1 is a decode."""
        return self.num_tokens - self.num_computed

    @property
    def is_complete(self) -> bool:
        """Whether its last token, by count, is known or on its way."""
        if not self.is_drawn:
            return not self.num_uncomputed
        return self.num_tokens >= self.max_len

    def take(self, num_tokens: int, row: int, block_size: int) -> ScheduledSequence:
        """Its share of the step that is planned: the next ``num_tokens`` uncomputed tokens.

        ``row`` is the row of that step's result which is this sequence's if the share reaches its
        end. The block table must already cover the tokens.
        """
        start, end = self.num_computed, self.num_computed + num_tokens
        token_ids = self.token_ids[start:end]
        is_pending = end > len(self.token_ids)
        if is_pending:
            token_ids.append(_PLACEHOLDER_ID)
        is_sampled = end == self.num_tokens and self.is_drawn
        position = end - len(self.submit.prompt_ids)
        scored_ids = self._take_scored(end) if self.submit.scores_prompt else ()
        share = ScheduledSequence(
            sequence_id=self.submit.sequence_id,
            start=start,
            token_ids=token_ids,
            block_table=self.block_table[: -(-end // block_size)],
            is_sampled=is_sampled,
            sampling=self.submit.sampling,
            seed=self.submit.seed,
            position=position,
            previous_row=self._row if is_pending else None,
            edits=self._editor.edits(position) if self._editor and is_sampled else None,
            scored_start=self.num_scored - len(scored_ids),
            scored_ids=scored_ids,
        )
        self.num_computed = end
        if is_sampled:
            self.num_pending += 1
            self._row = row
        return share

    def restart(self) -> None:
        """Forget what was computed and what is pending: steps that were launched do not count."""
        self.num_computed = self.num_pending = self.num_published = 0
        self.num_scored = self._num_scores_known
        self.block_table = []

    def learn_scores(self, num_tokens: int) -> FinishReason | None:
        """Learn the scores of the prompt's next tokens; returns why that is all, if it is."""
        self._num_scores_known += num_tokens
        is_last = self._num_scores_known == len(self.submit.prompt_ids) - 1
        return "length" if is_last and not self.is_drawn else None

    def append(self, token_id: int) -> FinishReason | None:
        """Learn the oldest pending token; returns why it is the last one, if it is.

        Raises `InvalidRequest` where no token can be drawn behind it.
        """
        self.num_pending -= 1
        self.token_ids.append(token_id)
        if token_id in self._end_ids:
            return "stop"
        is_last = len(self.token_ids) == self.max_len
        if self._editor is not None:
            self._editor.take(token_id)
            if self._editor.is_complete:
                return "stop"
            if not is_last:
                self._editor.prepare(len(self.token_ids) - len(self.submit.prompt_ids))
        return "length" if is_last else None

    def _take_scored(self, end: int) -> list[int]:
        """The tokens of the prompt that computing those before ``end`` scores."""
        if not self.num_unscored or end <= self.num_scored:
            return []
        scored_ids = self.token_ids[self.num_scored + 1 : min(end + 1, len(self.submit.prompt_ids))]
        self.num_scored += len(scored_ids)
        return scored_ids
