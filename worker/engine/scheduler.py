"""Scheduling: which sequences compute which tokens in the next step, and which blocks they hold.

Interactive sequences are admitted before batch sequences. Within a class, the tenant with the
lowest virtual token counter is next (`worker.engine.shares`), with its oldest sequence.

When blocks run out, sequences are preempted in the reverse order of class and arrival, so the
oldest sequence always progresses. A sequence that finds no room preempts batch sequences if it is
interactive, or the youngest sequences of a tenant that runs more than its share. A preempted
sequence loses its blocks but keeps its place; later it recomputes the tokens whose blocks are no
longer in the prefix cache.
"""

import math
from bisect import insort
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as Items
from dataclasses import dataclass, field
from itertools import takewhile
from operator import attrgetter

from shared.errors import StartupError
from worker.engine.drafts import NO_DRAFT, TokenDraft
from worker.engine.interface import DraftSource
from worker.engine.sequence import Sequence
from worker.engine.sequence_cache import SequenceCache
from worker.engine.shares import OUTPUT_TOKEN_COST, PROMPT_TOKEN_COST, Shares
from worker.engine.step_cost import StepCost, StepWork
from worker.engine.step_plan import StepPlan

MIN_PROMPT_TOKENS = 32
"""Prompt tokens that a step computes regardless of its duration; more if it has more decodes.

A step with as many prompt tokens as decodes keeps up with requests whose answers are as long as
their prompts. With fewer, sequences would queue for prefill while the batch drains.
"""

MIN_DEBT = 512.0
"""How much lower the counter of a tenant must be for it to preempt another tenant's sequences,
unless it runs none itself. Smaller differences are settled when sequences end.

Without a minimum, a tenant whose sequence has just been admitted in turn may lose it a few tokens
later, because the counters are nearly equal.
"""

MIN_CHANCE = 0.05
"""The chance below which no token is drafted, however cheap it seems."""

DRAFT_GAIN = 1.3
"""How many times faster than the step without it a draft must yield tokens, because no step can be
planned while a step with drafts runs."""

_AIM = 0.9
"""The fraction of the time limit that a step is planned to take, because predictions have an
error."""

_priority = attrgetter("priority")
_prompt_order = attrgetter("is_batch", "num_uncomputed")


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """The limits of a scheduler. Raises `StartupError` if they are inconsistent."""

    max_num_seqs: int
    """Maximum number of running sequences."""
    max_num_batched_tokens: int
    """Maximum number of tokens in a step."""
    batch_reserve: int = 0
    """Sequence slots reserved for interactive sequences; at least one batch sequence can always
    run."""
    prefix_cache: bool = True
    """Whether sequences share the blocks of common prefixes."""
    max_step_s: float | None = None
    """Maximum duration of a step while an interactive sequence decodes; None: unlimited.

    Prompts are chunked so that a step stays within it, as far as its duration can be predicted and
    except for `MIN_PROMPT_TOKENS`; running streams pause for no longer. The cost is a longer time
    to first token of other requests: a prompt takes more steps, each of which also decodes, and its
    sequence joins the batch later. A limit only slightly above the duration of the decodes costs
    throughput, and a limit below it cannot be kept.
    """
    tenant_weights: Mapping[str, float] = field(default_factory=dict)
    """The weights of tenants whose weight is not 1."""
    max_draft_tokens: int = 0
    """Maximum number of tokens that are drafted for a sequence in a step. More than 0 only if a
    token's draw is the same whatever else is in the step."""
    prediction_cost: float | None = None
    """The work with which the model's predictor predicts a token, as a share of the work of a
    decode; None: it has no predictor."""

    def __post_init__(self) -> None:
        if self.max_num_seqs < 1:
            raise StartupError(f"max_num_seqs is {self.max_num_seqs}; it must be at least 1")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise StartupError(
                f"max_num_batched_tokens is {self.max_num_batched_tokens}; it must be at least "
                f"max_num_seqs, {self.max_num_seqs}: each running sequence has a token in a step"
            )

    def max_num_seqs_for(self, sequence: Sequence) -> int:
        """The maximum number of running sequences if ``sequence`` is among them."""
        if sequence.is_batch:
            return max(1, self.max_num_seqs - self.batch_reserve)
        return self.max_num_seqs


class Scheduler:
    """Owns the waiting and running sequences, and through the cache their blocks."""

    def __init__(self, limits: SchedulerLimits, cache: SequenceCache) -> None:
        self.num_preemptions = 0
        self.num_begun_tokens = 0
        self.num_cached_tokens = 0
        self.num_drafted: Counter[DraftSource] = Counter()
        self.num_accepted: Counter[DraftSource] = Counter()
        self._limits = limits
        self._cache = cache
        self._cost = StepCost()
        self._interactive_shares = Shares(limits.tenant_weights)
        self._batch_shares = Shares(limits.tenant_weights)
        self._waiting: list[Sequence] = []
        self._running: list[Sequence] = []

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_waiting_batch(self) -> int:
        return sum(sequence.is_batch for sequence in self._waiting)

    def add(self, sequence: Sequence) -> None:
        """Add a waiting sequence. Its ``max_len`` must fit into the pool."""
        self._shares(sequence).enter(sequence.tenant)
        insort(self._waiting, sequence, key=_priority)

    def remove(self, sequence: Sequence) -> None:
        """Remove a sequence, waiting or running, and free its blocks."""
        for sequences in (self._running, self._waiting):
            if sequence in sequences:
                sequences.remove(sequence)
                self._shares(sequence).leave(sequence.tenant)
        self._cache.release(sequence)

    def forget(self, sequence: Sequence) -> None:
        """Let no other sequence find the blocks of this removed sequence."""
        self._cache.forget(sequence)

    def promote(self, sequence: Sequence) -> None:
        """Give a batch sequence interactive priority, ordered by its arrival."""
        if not sequence.is_batch:
            return
        for sequences in (self._running, self._waiting):
            if sequence in sequences:
                self._batch_shares.leave(sequence.tenant)
                self._interactive_shares.enter(sequence.tenant)
        sequence.is_batch = False
        self._running.sort(key=_priority)
        self._waiting.sort(key=_priority)

    def schedule(self, has_time: Callable[[], bool]) -> StepPlan:
        """Plan the next step; it has no shares if there is nothing to compute. ``has_time`` returns
        whether the step has time left for constraints.

        Every planned step must be launched: sequences count its tokens as computed, and other
        sequences may find them in the cache from then on.
        """
        plan = StepPlan(self._limits.max_num_batched_tokens, self._cache)
        self._make_room()
        self._decode(plan, has_time)
        self._prefill(plan)
        self._admit(plan)
        self._publish(plan)
        for sequence in plan.sampled:
            self._shares(sequence).charge(sequence.tenant, OUTPUT_TOKEN_COST)
        self._retire(plan)
        return plan

    def accept(self, sequence: Sequence) -> None:
        """Record that a step has another token of a sequence, because a draft was right."""
        self.num_accepted[sequence.draft_source] += 1
        self._shares(sequence).charge(sequence.tenant, OUTPUT_TOKEN_COST)

    def restart(self, sequences: Iterable[Sequence]) -> None:
        """Return ``sequences``, which must be all, to waiting, and recompute them from the start.

        The contents of all blocks are discarded.
        """
        self.num_preemptions += len(self._running)
        self._cache.discard(self._running)
        known = {*self._running, *self._waiting}
        self._running.clear()
        self._waiting.clear()
        for sequence in sequences:
            sequence.restart()
            if sequence in known:
                insort(self._waiting, sequence, key=_priority)
            else:  # its last token was in flight, or it waited for its leader
                self.add(sequence)

    def learn(self, work: StepWork, seconds: float) -> None:
        """Record the duration of a planned step."""
        self._cost.learn(work, seconds)

    def _shares(self, sequence: Sequence) -> Shares:
        return self._batch_shares if sequence.is_batch else self._interactive_shares

    def _first(self) -> Sequence | None:
        """The waiting sequence that is admitted next."""
        if not self._waiting:
            return None
        first = self._waiting[0]
        shares = self._shares(first)
        if shares.num_active == 1:
            return first
        of_class = takewhile(lambda other: other.is_batch == first.is_batch, self._waiting)
        return min(of_class, key=lambda other: shares.counter(other.tenant))

    def _make_room(self) -> None:
        """Preempt as many sequences as it takes to admit the first waiting sequence, if that admits
        it."""
        first = self._first()
        if first is None or self._has_room(first):
            return
        batch = [other for other in self._running if other.is_batch and not first.is_batch]
        for leaving in (batch, self._surplus(first)):
            if leaving and self._has_room(first, leaving):
                while not self._has_room(first):
                    self._preempt(leaving.pop())
                return

    def _surplus(self, first: Sequence) -> list[Sequence]:
        """The running sequences that a tenant of the same class has in excess of the share of the
        tenant of ``first``, the youngest last.

        Of all tenants that were served more, this tenant runs the most for its weight. It keeps as
        many sequences, for its weight, as the other tenant has with one more. Each exchange
        therefore makes the shares more equal, and no tenant loses its last sequence.
        """
        shares = self._shares(first)
        of_class = [other for other in self._running if other.is_batch == first.is_batch]
        num_running = Counter(other.tenant for other in of_class)
        min_debt = MIN_DEBT if num_running[first.tenant] else 0.0
        served_more = [
            tenant
            for tenant in num_running
            if shares.counter(tenant) - shares.counter(first.tenant) > min_debt
        ]
        if not served_more:
            return []
        tenant = max(served_more, key=lambda tenant: num_running[tenant] / shares.weight(tenant))
        wanted = (num_running[first.tenant] + 1) / shares.weight(first.tenant)
        num_kept = math.ceil(wanted * shares.weight(tenant))
        return [other for other in of_class if other.tenant == tenant][num_kept:]

    def _decode(self, plan: StepPlan, has_time: Callable[[], bool]) -> None:
        """Schedule the next token of each sequence in decode whose draw is prepared, and its
        drafted tokens: with a constraint, only as long as there is time."""
        least_chance = self._least_chance()
        # A step has room for the next tokens of all sequences. So has the step after it: a wrong
        # draft leaves no more tokens to a sequence than it has in this step.
        num_reserved = sum(1 + sequence.num_redone for sequence in self._running)
        # Preemption shortens the list at its end, after the current sequence.
        for sequence in self._running:
            is_due = not sequence.is_prefilling and sequence.is_prepared
            if is_due and self._has_next_slot(sequence):
                is_drafted = least_chance < 1 and (not sequence.is_constrained or has_time())
                num_left = plan.num_tokens_left - num_reserved if is_drafted else 0
                draft = self._draft(sequence, num_left, least_chance) if num_left > 0 else NO_DRAFT
                is_predicted = self._is_predicted(sequence, least_chance)
                plan.add_decode(sequence, draft, is_predicted=is_predicted)
            elif not is_due:
                plan.num_tokens_left -= sequence.num_redone

    def _least_chance(self) -> float:
        """The chance from which on a drafted token is worth its time; 1 if nothing is drafted.

        While prompts are computed, or wait for anything but a slot, they have the time that is
        left.
        """
        if not (self._limits.max_draft_tokens and self._running):
            return 1.0
        first = self._first()
        if first is not None and len(self._running) < self._limits.max_num_seqs_for(first):
            return 1.0
        if any(sequence.is_prefilling for sequence in self._running):
            return 1.0
        starts = [sequence.num_computed for sequence in self._running]
        num = len(starts)
        step_s = self._cost.seconds(StepWork(num_decodes=num, num_decode_pairs=sum(starts) + num))
        if not step_s:
            return 1.0
        seconds_per_token = step_s / num
        draft_s = self._cost.next_prompt_token_s(max(starts))
        if self._cache.has_states:  # after a wrong draft the tokens of its step are computed again
            draft_s *= 2
        return max(MIN_CHANCE, DRAFT_GAIN * draft_s / seconds_per_token)

    def _is_predicted(self, sequence: Sequence, least_chance: float) -> bool:
        """Whether a draft of the model's predictor for the next step is worth its time, and the
        time of the prediction."""
        cost = self._limits.prediction_cost
        if cost is None or least_chance >= 1:
            return False
        return sequence.is_predictable(least_chance + DRAFT_GAIN * cost)

    def _draft(self, sequence: Sequence, num_left: int, least_chance: float) -> TokenDraft:
        """Draft tokens of a sequence, up to ``num_left`` as far as they fit, and give it blocks for
        them.

        Drafts neither preempt anybody nor take the blocks that are reserved for others.
        """
        max_tokens = min(self._limits.max_draft_tokens, num_left)
        num_next = sequence.num_computed + 1 + sequence.num_redone
        num_slots = self._cache.room_for_drafts(sequence) - num_next
        draft = sequence.draft(min(max_tokens, num_slots), least_chance)
        num_drafts = len(draft.token_ids)
        if num_drafts:
            self._cache.extend_for_drafts(sequence, num_next + num_drafts)
        self.num_drafted[draft.source] += num_drafts
        return draft

    def _prefill(self, plan: StepPlan) -> None:
        """Continue prompts that earlier steps started.

        The longest prompt gets at least half of the step, and of its scores. The other half is for
        prompts that are at most half as long as its remainder, or interactive if it is not: no
        prompt waits for the whole length of another prompt.
        """
        begun = [sequence for sequence in self._running if sequence.is_prefilling]
        if not begun:
            return
        *short, longest = sorted(begun, key=_prompt_order)
        num_for_short = self._max_prompt_tokens(plan, start=0) // 2
        num_scores_kept = plan.num_scores_left // 2 if longest.num_unscored else 0
        plan.num_scores_left -= num_scores_kept
        for sequence in short:
            num_for_short -= self._continue(sequence, plan, num_for_short)
        while (
            num_for_short
            and (first := self._first()) is not None
            and self._is_shorter(first, longest)
            and (plan.num_scores_left or not first.num_unscored)
            and self._has_room(first)
        ):
            num_for_short -= self._begin(first, plan, num_for_short)
        plan.num_scores_left += num_scores_kept
        in_time = self._max_prompt_tokens(plan, longest.num_computed)
        self._continue(longest, plan, max(1, in_time))

    def _continue(self, sequence: Sequence, plan: StepPlan, max_tokens: int) -> int:
        """Add tokens of a prompt that an earlier step started; returns how many."""
        has_room = self._cache.extend(sequence, sequence.num_tokens)
        assert has_room, "the blocks of a prompt are reserved when it is admitted"
        return plan.add_prompt(sequence, max_tokens)

    def _is_shorter(self, first: Sequence, longest: Sequence) -> bool:
        """Whether a waiting sequence is short compared with the longest prompt in progress."""
        if first.is_batch != longest.is_batch:
            return longest.is_batch
        return 2 * self._num_uncached(first) <= longest.num_uncomputed

    def _admit(self, plan: StepPlan) -> None:
        """Admit waiting sequences strictly in order: a smaller sequence never overtakes."""
        while (
            (first := self._first()) is not None
            and not plan.is_cut
            and (num_tokens := self._max_prompt_tokens(plan, start=0))
            and self._has_room(first)
        ):
            self._begin(first, plan, num_tokens)

    def _begin(self, sequence: Sequence, plan: StepPlan, max_tokens: int) -> int:
        """Give a waiting sequence its blocks; returns how many of its tokens are computed."""
        self._waiting.remove(sequence)
        insort(self._running, sequence, key=_priority)
        self._cache.begin(sequence)
        self._count_cached(sequence)
        # After a long cached prefix, fewer tokens fit the time limit.
        in_time = self._max_prompt_tokens(plan, sequence.num_computed)
        return plan.add_prompt(sequence, max(1, min(max_tokens, in_time)))

    def _count_cached(self, sequence: Sequence) -> None:
        """Record how much of its prompt was cached when a sequence first started."""
        if sequence.num_cached is None:
            num_prompt = len(sequence.submit.prompt_ids)
            sequence.num_cached = min(sequence.num_computed, num_prompt)
            self.num_begun_tokens += num_prompt
            self.num_cached_tokens += sequence.num_cached
            num_computed = num_prompt - sequence.num_cached
            self._shares(sequence).charge(sequence.tenant, PROMPT_TOKEN_COST * num_computed)

    def _max_prompt_tokens(self, plan: StepPlan, start: int) -> int:
        """The number of prompt tokens from ``start`` on that the step has room and time for."""
        max_step_s = self._limits.max_step_s
        if max_step_s is None or not plan.has_streams:
            return plan.num_tokens_left
        at_least = max(MIN_PROMPT_TOKENS, plan.work.num_decodes) - plan.work.num_prompt_tokens
        seconds_left = _AIM * max_step_s - self._cost.seconds(plan.work)
        in_time = self._cost.num_prompt_tokens(start, seconds_left)
        return int(min(plan.num_tokens_left, max(0, at_least, in_time)))

    def _num_uncached(self, sequence: Sequence) -> int:
        """The tokens that a waiting sequence would have to compute."""
        return sequence.num_tokens - self._cache.find(sequence).num_tokens

    def _publish(self, plan: StepPlan) -> None:
        """Publish the blocks that this step fills; later steps can find them.

        Blocks filled by decodes are published together with the next block.
        """
        for sequence in plan.prompts:
            self._cache.publish(sequence)

    def _retire(self, plan: StepPlan) -> None:
        """Free the slots and blocks of sequences whose last token is in flight."""
        for sequence in plan.sampled:
            if sequence.is_complete:
                self.remove(sequence)
        for sequence in plan.scored:
            if sequence.is_complete and not sequence.is_drawn:
                self.remove(sequence)

    def _has_room(self, sequence: Sequence, leaving: Items[Sequence] = ()) -> bool:
        """Whether a waiting sequence may run once the sequences in ``leaving`` have freed their
        blocks.

        No sequence is preempted and admitted in the same step, because its computation would be
        lost.
        """
        num_others = len(self._running) - len(leaving)
        if num_others >= self._limits.max_num_seqs_for(sequence):
            return False
        return self._cache.has_room(sequence, num_others, leaving)

    def _has_next_slot(self, sequence: Sequence) -> bool:
        """Give the sequence room for its next token; false if it had to be preempted itself."""
        num_next = sequence.num_computed + 1 + sequence.num_redone
        if num_next <= sequence.num_covered:
            return True
        while not self._cache.extend(sequence, num_next):
            last = self._running[-1]
            self._preempt(last)
            if last is sequence:
                return False
        return True

    def _preempt(self, sequence: Sequence) -> None:
        self._running.remove(sequence)
        self._cache.release(sequence)
        insort(self._waiting, sequence, key=_priority)
        self.num_preemptions += 1

    def check_invariants(self) -> None:
        """Assert that no block is lost or held twice and that the order is kept."""
        self._cache.check_invariants(self._running)
        for sequences in (self._running, self._waiting):
            assert sequences == sorted(sequences, key=_priority)
        for shares, is_batch in ((self._interactive_shares, False), (self._batch_shares, True)):
            sequences = [*self._running, *self._waiting]
            shares.check_invariants(Counter(s.tenant for s in sequences if s.is_batch == is_batch))
        assert len(self._running) <= self._limits.max_num_seqs
        assert not any(sequence.is_ended for sequence in [*self._running, *self._waiting])
        assert not any(sequence.num_computed or sequence.held for sequence in self._waiting)
