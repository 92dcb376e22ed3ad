"""For any commands in any order, every sequence yields exactly its undisturbed stream."""

from collections.abc import Callable
from dataclasses import replace
from itertools import count
from math import isclose
from typing import NamedTuple

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule
from msgspec import structs

from shared.messages import JobClass
from tests.support.models.engine import VOCAB_SIZE, SmallEngine, expected_outputs, new_submit
from worker.engine.cache.layout import (
    ONE_FULL,
    CacheGroup,
    ChunkCache,
    FullCache,
    LatentCache,
    StateCache,
    WindowCache,
)
from worker.engine.interface import (
    CancelSequence,
    EngineCommand,
    Promote,
    ScheduledBatch,
    SequenceId,
    StepOutput,
    Submit,
)
from worker.engine.sequence import PLACEHOLDER_ID


class Request(NamedTuple):
    prompt: str
    """Requests with the same name have a common prefix."""
    num_prompt: int
    max_tokens: int
    ignore_eos: bool
    job_class: JobClass
    tenant: str


requests = st.lists(
    st.builds(
        Request,
        prompt=st.sampled_from("abc"),
        num_prompt=st.integers(1, 30),
        max_tokens=st.integers(1, 30),
        ignore_eos=st.booleans(),
        job_class=st.sampled_from(["interactive", "batch"]),
        tenant=st.sampled_from(["x", "y", "z"]),
    ),
    min_size=1,
    max_size=4,
)


def all_groups(block_size: int) -> list[CacheGroup]:
    return [
        FullCache(),
        WindowCache(3),
        ChunkCache(5),
        LatentCache(),
        StateCache(num_blocks=2, every=2 * block_size),
        WindowCache(9),
    ]


class Service(RuleBasedStateMachine):
    """A client that submits, cancels and waits, and records the tokens that it must receive."""

    vocab_size = VOCAB_SIZE
    eos_ids = frozenset(range(4))
    """One token in 16 ends a sequence that does not ignore them."""
    max_draft_tokens = 0
    prediction_cost: float | None = None
    layouts: tuple[Callable[[int], list[CacheGroup]], ...] = (lambda block_size: [*ONE_FULL],)
    """The groups of the cache, for a block size."""

    def __init__(self) -> None:
        super().__init__()
        self.engine = SmallEngine()
        self.commands: list[EngineCommand] = []
        self.owed: dict[SequenceId, list[StepOutput]] = {}
        self.submits: dict[SequenceId, Submit] = {}
        self.last_position: dict[SequenceId, int] = {}
        self.computed: set[SequenceId] = set()
        """The sequences of the step in flight."""
        self.num_submitted = 0
        self.max_num_seqs_with_batch = 1

    @initialize(
        num_blocks=st.integers(2, 14),
        block_size=st.sampled_from([1, 2, 4]),
        max_num_seqs=st.integers(1, 5),
        extra_tokens=st.integers(0, 12),
        batch_reserve=st.integers(0, 3),
        prefix_cache=st.booleans(),
        layout=st.integers(0, 99),
        requests=requests,
    )
    def start(
        self,
        num_blocks: int,
        block_size: int,
        max_num_seqs: int,
        extra_tokens: int,
        batch_reserve: int,
        prefix_cache: bool,
        layout: int,
        requests: list[Request],
    ) -> None:
        groups = self.layouts[layout % len(self.layouts)](block_size)
        num_of_states = sum(2 * g.num_blocks for g in groups if isinstance(g, StateCache))
        self.engine = SmallEngine(
            num_blocks=num_blocks * len(groups) + num_of_states,
            groups=groups,
            block_size=block_size,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_seqs + extra_tokens,
            batch_reserve=batch_reserve,
            prefix_cache=prefix_cache,
            vocab_size=self.vocab_size,
            max_draft_tokens=self.max_draft_tokens,
            prediction_cost=self.prediction_cost,
            clock=count(step=0.001).__next__,  # steps take the same time, whatever they compute
        )
        self.max_num_seqs_with_batch = max(1, max_num_seqs - batch_reserve)
        self.submit(requests)

    @rule(requests=requests)
    def submit(self, requests: list[Request]) -> None:
        for request in requests:
            num_prompt = min(request.num_prompt, self.engine.max_seq_len - 1)
            submit = new_submit(
                f"s{self.num_submitted}",
                prompt_ids=self._prompt_ids(request.prompt, num_prompt),
                max_tokens=min(request.max_tokens, self.engine.max_seq_len - num_prompt),
                eos_ids=self.eos_ids,
                ignore_eos=request.ignore_eos,
                seed=self.num_submitted,
                job_class=request.job_class,
                tenant=request.tenant,
            )
            self.num_submitted += 1
            self._send(submit)

    @rule(num_steps=st.integers(1, 12))
    def step(self, num_steps: int) -> None:
        for _ in range(num_steps):
            self._step()

    @rule(pick=st.integers(0, 99))
    def cancel(self, pick: int) -> None:
        if self.owed:
            sequence_id = sorted(self.owed)[pick % len(self.owed)]
            del self.owed[sequence_id]
            self.commands.append(CancelSequence(sequence_id))

    @rule(pick=st.integers(0, 99))
    def promote(self, pick: int) -> None:
        if self.owed:
            sequence_id = sorted(self.owed)[pick % len(self.owed)]
            submit = self.submits[sequence_id]
            self.submits[sequence_id] = replace(submit, job_class="interactive")
            self.commands.append(Promote(sequence_id))

    @rule(pick=st.integers(0, 99))
    def cancel_and_continue(self, pick: int) -> None:
        """As after the death of a worker: the received tokens are a prefix of the same sequence
        elsewhere."""
        if not self.owed:
            return
        sequence_id = sorted(self.owed)[pick % len(self.owed)]
        submit = self.submits[sequence_id]
        owed = self.owed.pop(sequence_id)
        expected = expected_outputs(submit, self.vocab_size)
        received = [output.token_id for output in expected[: len(expected) - len(owed)]]
        self.commands.append(CancelSequence(sequence_id))
        self._send(replace(submit, output_ids=[*submit.output_ids, *received]))

    def teardown(self) -> None:
        """All sequences end, at the latest after twice the time that they would take in
        sequence."""
        max_num_steps = 2 * sum(
            len(submit.prompt_ids) + submit.max_tokens for submit in self.submits.values()
        )
        for _ in range(max_num_steps + 1):
            if not (self.engine.has_work or self.commands):
                break
            self._step()
        assert self.owed == {}
        assert self.engine.load().num_free_blocks == self.engine.load().num_blocks

    def _prompt_ids(self, prompt: str, num_tokens: int) -> list[int]:
        return [
            token_id % self.vocab_size for token_id in new_submit(prompt, num_tokens).prompt_ids
        ]

    def _send(self, submit: Submit) -> None:
        self.submits[submit.sequence_id] = submit
        self.last_position[submit.sequence_id] = -1
        self.owed[submit.sequence_id] = expected_outputs(submit, self.vocab_size)
        self.commands.append(submit)

    def _step(self) -> None:
        commands, self.commands = self.commands, []
        num_launched = len(self.engine.runner.batches)
        total_s = self.engine.step_times.total_s
        outputs = self.engine.step(commands)
        self._check_charges(self.engine.step_times.total_s - total_s)
        for output in outputs:
            owed = self.owed[output.sequence_id]
            assert structs.replace(output, num_cached_tokens=0, is_predicted=False) == owed.pop(0)
            num_prompt = len(self.submits[output.sequence_id].prompt_ids)
            assert 0 <= output.num_cached_tokens <= num_prompt
            if not owed:
                del self.owed[output.sequence_id]
        for batch in self.engine.runner.batches[num_launched:]:
            self.computed = {share.sequence_id for share in batch.sequences}
            self._check_that_batch_yields(batch)

    def _check_charges(self, duration_s: float) -> None:
        """A completed step is charged to its running sequences, to the last second."""
        charges = self.engine.take_charges()
        assert charges.keys() == self.computed & self.owed.keys()
        assert isclose(sum(charges.values()), duration_s if charges else 0.0)
        self.computed = set()

    def _check_that_batch_yields(self, batch: ScheduledBatch) -> None:
        """If a step starts a batch sequence, no interactive sequence is waiting, and the reserve is
        kept."""
        for share in batch.sequences:
            # A sequence that was preempted while its token is in flight, and finds its own blocks
            # again, computes the tokens before that token in the same step.
            if share.previous_row is not None:
                assert share.token_ids[-1 - share.num_drafts] == PLACEHOLDER_ID
            if share.is_sampled:
                self.last_position[share.sequence_id] = share.position
        begun = [self.submits[share.sequence_id] for share in batch.sequences if share.start == 0]
        if not any(submit.job_class == "batch" for submit in begun):
            return
        computed = {share.sequence_id for share in batch.sequences}
        for sequence_id in self.owed:
            submit = self.submits[sequence_id]
            if submit.job_class == "interactive" and sequence_id not in computed:
                assert self.last_position[sequence_id] == submit.max_tokens - 1, "it waits"
        assert len(computed) <= self.max_num_seqs_with_batch


class DraftingService(Service):
    """The same with so few different tokens that most are drafted, and half of the drafts are
    wrong."""

    vocab_size = 2
    eos_ids = frozenset()
    max_draft_tokens = 5


class MixedService(Service):
    """The same with groups of layers that keep unequal parts of a sequence."""

    layouts = (
        all_groups,
        lambda block_size: [WindowCache(2), WindowCache(7)],
        lambda block_size: [ChunkCache(6), FullCache()],
        lambda block_size: [StateCache(num_blocks=1, every=block_size)],
        lambda block_size: [StateCache(num_blocks=3, every=4 * block_size), FullCache()],
    )


class DraftingMixedService(DraftingService, MixedService):
    """Drafts in all of these groups."""


class PredictingService(MixedService):
    """The same with a predictor, which is right after half of all tokens."""

    max_draft_tokens = 3
    prediction_cost = 0.1


TestService = Service.TestCase
TestService.settings = settings(max_examples=150, stateful_step_count=30, deadline=None)
TestDraftingService = DraftingService.TestCase
TestDraftingService.settings = settings(max_examples=100, stateful_step_count=30, deadline=None)
TestMixedService = MixedService.TestCase
TestMixedService.settings = settings(max_examples=100, stateful_step_count=30, deadline=None)
TestDraftingMixedService = DraftingMixedService.TestCase
TestDraftingMixedService.settings = settings(max_examples=50, stateful_step_count=30, deadline=None)
TestPredictingService = PredictingService.TestCase
TestPredictingService.settings = settings(max_examples=50, stateful_step_count=30, deadline=None)
