"""Runs the choices of one job."""

import asyncio
import itertools
from collections import defaultdict
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeAlias

from shared.log import LogWriter
from shared.messages import (
    Completed,
    Finished,
    GenerationJob,
    JobClass,
    PromptScores,
    TokenDelta,
)
from worker.decode.bridge import Generation, Generations
from worker.decode.choice import ChoiceWriter
from worker.decode.plan import ChoicePlan, prompt_text
from worker.decode.scores import PromptScorer
from worker.decode.served_model import ServedModel
from worker.decode.timeline import Timeline
from worker.decode.whole_answer import WholeAnswer
from worker.engine.engine import Output
from worker.engine.interface import PromptScored, SequenceId, StepOutput, Submit

_RUNS = itertools.count()
_INLINE_TOKENS = 500
"""Replaying this many takes 3 ms; switching to another thread would delay the event loop by 5
ms."""

Emit: TypeAlias = Callable[[PromptScores | TokenDelta | Finished], Awaitable[None]]


class Choices:
    """Generates all choices of a job."""

    def __init__(
        self,
        job: GenerationJob,
        job_class: JobClass,
        plans: list[ChoicePlan],
        *,
        model: ServedModel,
        generations: Generations,
        timeline: Timeline,
    ) -> None:
        self._job = job
        self._job_class = job_class
        self._plans = plans
        self._model = model
        self._generations = generations
        self._timeline = timeline
        self._generation: Generation | None = None

    def promote(self) -> None:
        """Promote the choices of a batch job to interactive priority."""
        self._job_class = "interactive"
        if self._generation is not None:
            self._generation.promote()

    async def complete(self) -> Completed:
        """Run all choices to their ends and return them as one message."""
        answer = WholeAnswer(self._job)
        await self.run(answer.log, answer.keep)
        return answer.completed(self._plans, self._prompt_texts())

    async def run(self, log: LogWriter, emit: Emit) -> None:
        """Run the choices that are unfinished in ``log`` to their ends."""
        writers = await self._writers(log)
        scorers = self._scorers(log)
        for choice, writer in enumerate(writers):
            scorer = scorers.get(choice)
            for scores in () if scorer is None else scorer.begin():
                await emit(scores)
            if scorer is None or scorer.is_complete:
                for end in writer.close():
                    await emit(end)
        self._timeline.submitted()
        async with self._generations.open(self._submits(log, scorers)) as generation:
            self._generation = generation
            async for outputs in generation:
                self._timeline.token()
                await self._emit(outputs, writers, scorers, generation, emit)

    async def _emit(
        self,
        outputs: list[Output],
        writers: list[ChoiceWriter],
        scorers: dict[int, PromptScorer],
        generation: Generation,
        emit: Emit,
    ) -> None:
        by_sequence: defaultdict[SequenceId, list[Output]] = defaultdict(list)
        for output in outputs:
            by_sequence[output.sequence_id].append(output)
        for sequence_id, news in by_sequence.items():
            writer = writers[sequence_id.choice]
            tokens = [output for output in news if isinstance(output, StepOutput)]
            for output in news:
                if isinstance(output, PromptScored):
                    for scores in scorers[sequence_id.choice].add(output.scores):
                        await emit(scores)
            events: Sequence[TokenDelta | Finished] = ()
            if tokens:
                events = [writer.advance(tokens)]
            elif scorers[sequence_id.choice].is_complete:
                events = writer.close()
            for event in events:
                if isinstance(event, Finished):
                    generation.close(sequence_id)
                await emit(event)

    def _scorers(self, log: LogWriter) -> dict[int, PromptScorer]:
        """A scorer for each prompt none of whose choices has begun, by its first choice."""
        if self._job.sampling.prompt_logprobs is None:
            return {}
        num_choices = self._job.num_choices
        return {
            prompt * num_choices: PromptScorer(
                prompt, log.attempt, plan.prompt_ids, self._model.tokenizer
            )
            for prompt, plan in enumerate(self._plans)
            if not log.chains[prompt * num_choices].is_finished
            and not any(
                chain.token_ids
                for chain in log.chains[prompt * num_choices : (prompt + 1) * num_choices]
            )
        }

    def _plan_of(self, choice: int) -> ChoicePlan:
        return self._plans[choice // self._job.num_choices]

    def _prompt_texts(self) -> tuple[str, ...]:
        if not self._job.wants_prompt_text:
            return ()
        return tuple(
            prompt_text(prompt, plan.prompt_ids, self._model.tokenizer)
            for prompt, plan in zip(self._job.prompts, self._plans, strict=True)
        )

    @property
    def _eos_ids(self) -> frozenset[int]:
        return frozenset() if self._job.sampling.ignore_eos else self._model.tokenizer.eos_ids

    async def _writers(self, log: LogWriter) -> list[ChoiceWriter]:
        def replay() -> list[ChoiceWriter]:
            return [self._writer(k, log) for k in range(self._job.total_choices)]

        if sum(len(chain.token_ids) for chain in log.chains) <= _INLINE_TOKENS:
            return replay()
        return await asyncio.to_thread(replay)

    def _writer(self, choice: int, log: LogWriter) -> ChoiceWriter:
        return ChoiceWriter(
            choice,
            log,
            self._model.tokenizer,
            self._job.sampling,
            max_tokens=self._plan_of(choice).max_tokens,
            eos_ids=self._eos_ids,
        )

    def _submits(self, log: LogWriter, scorers: dict[int, PromptScorer]) -> list[Submit]:
        """The sequences for all unfinished choices; the first one of each prompt is the others'
        leader."""
        # A unique prefix: late tokens of an earlier run of this job on this worker are ignored.
        run = f"{self._job.request_id}/{next(_RUNS)}"
        leaders: dict[int, SequenceId] = {}
        submits = []
        for choice, chain in enumerate(log.chains):
            if not chain.is_finished:
                sequence_id = SequenceId(run, choice)
                leader = leaders.setdefault(choice // self._job.num_choices, sequence_id)
                submits.append(
                    self._submit(
                        sequence_id,
                        tuple(chain.token_ids),
                        leader=None if leader == sequence_id else leader,
                        scores_prompt=choice in scorers and not scorers[choice].is_complete,
                    )
                )
        return submits

    def _submit(
        self,
        sequence_id: SequenceId,
        output_ids: tuple[int, ...],
        *,
        leader: SequenceId | None,
        scores_prompt: bool,
    ) -> Submit:
        plan = self._plan_of(sequence_id.choice)
        vocabulary = plan.vocabulary
        grammar = vocabulary.grammar
        return Submit(
            sequence_id=sequence_id,
            prompt_ids=plan.prompt_ids,
            sampling=self._job.sampling,
            seed=self._job.seed,
            max_tokens=plan.max_tokens,
            eos_ids=self._eos_ids,
            output_ids=output_ids,
            job_class=self._job_class,
            tenant=self._job.tenant,
            leader=leader,
            scores_prompt=scores_prompt,
            bad_words=vocabulary.bad_words,
            allowed=vocabulary.allowed,
            constraint=None if grammar is None else grammar.matcher(output_ids, vocabulary.allowed),
        )
