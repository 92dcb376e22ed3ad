"""One sequence: what it is to compute, what is computed, and what is still on its way."""

from shared.messages import FinishReason
from worker.engine.interface import ScheduledSequence, Submit

_PLACEHOLDER_ID = 0


class Sequence:
    """The engine's view of one `Submit`.

    ``num_computed`` counts launches, not results: a token counts as soon as its step is launched,
    because later steps execute after it. A sampled token counts as pending until its step was
    collected; at most one is pending when a step is planned. A preempted sequence starts over with
    all its known tokens, which is also how it goes on with another worker's.
    """

    def __init__(self, submit: Submit, arrival: int) -> None:
        self.submit = submit
        self.priority = (submit.job_class == "batch", arrival)
        """Smaller is served first and preempted last."""
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
        self._row = 0

    @property
    def is_batch(self) -> bool:
        return self.submit.job_class == "batch"

    @property
    def num_tokens(self) -> int:
        """All tokens, the pending one included."""
        return len(self.token_ids) + self.num_pending

    @property
    def num_uncomputed(self) -> int:
        """Tokens that the next steps have to compute: 1 is a decode."""
        return self.num_tokens - self.num_computed

    @property
    def is_complete(self) -> bool:
        """Whether its last token, by count, is known or on its way."""
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
        is_sampled = end == self.num_tokens
        share = ScheduledSequence(
            sequence_id=self.submit.sequence_id,
            start=start,
            token_ids=token_ids,
            block_table=self.block_table[: -(-end // block_size)],
            is_sampled=is_sampled,
            sampling=self.submit.sampling,
            seed=self.submit.seed,
            position=end - len(self.submit.prompt_ids),
            previous_row=self._row if is_pending else None,
        )
        self.num_computed = end
        if is_sampled:
            self.num_pending += 1
            self._row = row
        return share

    def append(self, token_id: int) -> FinishReason | None:
        """Learn the oldest pending token; returns why it is the last one, if it is."""
        self.num_pending -= 1
        self.token_ids.append(token_id)
        if token_id in self.submit.eos_ids and not self.submit.sampling.ignore_eos:
            return "stop"
        return "length" if len(self.token_ids) == self.max_len else None
