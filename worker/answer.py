"""The life of one job in a worker: from its prompts to its terminal event."""

import asyncio
import itertools
import logging
import secrets
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable
from enum import Enum, auto
from typing import TypeAlias

from shared.errors import (
    Cancelled,
    DeadlineExceeded,
    InternalError,
    Superseded,
    Unroutable,
    WarrenError,
)
from shared.messages import (
    Cancel,
    Choice,
    Completed,
    Continue,
    Failed,
    Finished,
    GenerationJob,
    HandedOver,
    JobClass,
    Started,
    TokenDelta,
)
from shared.stream import LogWriter
from worker.choice import ChoiceWriter
from worker.engine.interface import SequenceId, StepOutput, Submit
from worker.generation import Generation, Generations
from worker.plan import ChoicePlan, plan
from worker.publisher import ReplyPublisher
from worker.served_model import ServedModel
from worker.timeline import Timeline

logger = logging.getLogger(__name__)

_RUNS = itertools.count()

Interrupt: TypeAlias = WarrenError | Continue | HandedOver
Emit: TypeAlias = Callable[[TokenDelta | Finished], Awaitable[None]]


class Outcome(Enum):
    """What becomes of the job after `Answer.run`."""

    ANSWERED = auto()
    HANDED_OVER = auto()


class Answer:
    """Answers one delivery of a job.

    A first delivery opens attempt 1 and starts at once. Any other one asks the log's reader where
    to go on: it writes `Started` and waits for `Continue`.
    """

    def __init__(
        self,
        job: GenerationJob,
        job_class: JobClass,
        publisher: ReplyPublisher,
        *,
        model: ServedModel,
        generations: Generations,
        address: str,
        is_first: bool,
        timeout_s: float,
    ) -> None:
        self.job = job
        self.publisher = publisher
        self._job_class = job_class
        self._model = model
        self._generations = generations
        self._address = address
        self._is_first = is_first
        self._deadline = job.deadline or time.time() + timeout_s
        self._timeline = Timeline(job)
        self._log: LogWriter | None = None
        self._continue: asyncio.Future[Continue] = asyncio.get_running_loop().create_future()
        self._ticket = secrets.token_hex(8)
        self._interrupt: Interrupt | None = None
        self._is_ending = False
        self._task: asyncio.Task[object] | None = None

    async def run(self) -> Outcome:
        """Publish everything up to the terminal event. Raises `Unroutable` when nobody reads."""
        self._task = asyncio.current_task()
        while True:
            try:
                return await self._run_until_interrupted()
            except asyncio.CancelledError:
                if self._task is None or self._interrupt is None or self._task.uncancel():
                    raise
                interrupt, self._interrupt = self._interrupt, None
            if not isinstance(interrupt, Continue):
                self._is_ending = True
                return await self._end(interrupt)
            self._log = LogWriter.resume(interrupt)

    def obey(self, command: Cancel | Continue) -> None:
        """Follow the log's reader."""
        if command.ticket not in (None, self._ticket):
            return
        if isinstance(command, Cancel):
            self.cancel()
        elif len(command.choices) != len(self.job.prompts):
            logger.warning("continue dropped", extra={"request_id": self.job.request_id})
        elif not self._is_first and not self._continue.done():
            self._continue.set_result(command)
        elif command.attempt > self._attempt:
            # The job was published twice and both copies ran: the reader has counted two attempts.
            self._stop(command)

    def cancel(self) -> None:
        """Nobody waits for the answer any more."""
        self._stop(Cancelled("The request was cancelled."))

    def supersede(self) -> None:
        """The same job was delivered again: that delivery answers."""
        self._stop(Superseded("The job was delivered again."))

    def hand_over(self) -> None:
        """Give the job to another worker, which goes on from the log."""
        self._stop(HandedOver(attempt=self._attempt))

    async def _end(self, interrupt: WarrenError | HandedOver) -> Outcome:
        if isinstance(interrupt, HandedOver):
            if self._log is not None:
                await self.publisher.publish(interrupt)
            return Outcome.HANDED_OVER
        if isinstance(interrupt, Superseded):
            return Outcome.ANSWERED
        return await self._fail(interrupt)

    @property
    def _attempt(self) -> int:
        return self._log.attempt if self._log is not None else 0

    def _stop(self, interrupt: Interrupt) -> None:
        if self._task is not None and self._interrupt is None and not self._is_ending:
            self._interrupt = interrupt
            self._task.cancel()

    async def _run_until_interrupted(self) -> Outcome:
        try:
            async with asyncio.timeout(self._deadline - time.time()):
                await asyncio.sleep(0)  # where a deadline that has passed already is noticed
                await self._answer()
        except TimeoutError:
            return await self._fail(DeadlineExceeded("The request's deadline has passed."))
        except Unroutable:
            raise
        except WarrenError as error:
            return await self._fail(error)
        except Exception:  # one job's bug must not take the worker's other jobs with it
            logger.exception("job failed", extra={"request_id": self.job.request_id})
            return await self._fail(InternalError("The worker failed on this request."))
        finally:
            self._timeline.ended()
        return Outcome.ANSWERED

    async def _answer(self) -> None:
        try:
            plans = await plan(self.job, self._model)
        except Exception:
            if self.job.mode == "stream" and not self._is_first:
                # The failure has its place behind what readers have accepted already.
                self._log = self._log or await self._open_log([])
            raise
        if self.job.mode == "final":
            await self._complete(plans)
        else:
            self._log = self._log or await self._open_log(plans)
            await self._generate(plans, self._log, self.publisher.publish)

    async def _complete(self, plans: list[ChoicePlan]) -> None:
        """Answer with one message."""
        texts: defaultdict[int, str] = defaultdict(str)
        ends: dict[int, Finished] = {}

        async def keep(event: TokenDelta | Finished) -> None:
            texts[event.choice] += event.text
            if isinstance(event, Finished):
                ends[event.choice] = event

        log = LogWriter(1, len(plans))
        await self._generate(plans, log, keep)
        choices = (
            Choice(
                token_ids=tuple(log.chains[k].token_ids),
                text=texts[k],
                finish_reason=ends[k].finish_reason,
                stop_reason=ends[k].stop_reason,
                num_prompt_tokens=len(choice.prompt_ids),
                num_cached_tokens=ends[k].num_cached_tokens,
            )
            for k, choice in enumerate(plans)
        )
        await self.publisher.publish(
            Completed(request_id=self.job.request_id, choices=tuple(choices))
        )

    async def _open_log(self, plans: list[ChoicePlan]) -> LogWriter:
        """Open a new attempt in the request's log."""
        started = Started(
            worker=self._address,
            ticket=self._ticket,
            num_prompt_tokens=tuple(len(choice.prompt_ids) for choice in plans),
            is_waiting=not self._is_first,
        )
        if self._is_first:
            # The engine need not wait for the broker to confirm what comes before its tokens.
            self.publisher.begin(started)
            return LogWriter(1, len(plans))
        await self.publisher.publish(started)
        return LogWriter.resume(await self._continue)

    async def _generate(self, plans: list[ChoicePlan], log: LogWriter, emit: Emit) -> None:
        """Run the choices that ``log`` does not hold yet to their ends."""
        writers = [self._choice_writer(k, choice, log) for k, choice in enumerate(plans)]
        for writer in writers:
            if not writer.is_finished and (end := writer.close()) is not None:
                await emit(end)
        # A name of its own: late tokens of an earlier run of this job on this worker go nowhere.
        run = f"{self.job.request_id}/{next(_RUNS)}"
        submits = [
            self._submit(run, k, choice, log)
            for k, choice in enumerate(plans)
            if not writers[k].is_finished
        ]
        self._timeline.submitted()
        async with self._generations.open(submits) as generation:
            async for outputs in generation:
                self._timeline.token()
                await self._emit(outputs, writers, generation, emit)

    async def _emit(
        self,
        outputs: list[StepOutput],
        writers: list[ChoiceWriter],
        generation: Generation,
        emit: Emit,
    ) -> None:
        by_sequence: defaultdict[SequenceId, list[StepOutput]] = defaultdict(list)
        for output in outputs:
            by_sequence[output.sequence_id].append(output)
        for sequence_id, tokens in by_sequence.items():
            event = writers[sequence_id.choice].advance(tokens)
            if isinstance(event, Finished):
                generation.close(sequence_id)
            await emit(event)

    async def _fail(self, error: WarrenError) -> Outcome:
        if self._log is None:
            await self.publisher.publish(
                Failed(code=error.code, message=error.message, param=error.param)
            )
        elif not self._log.is_ended:
            await self.publisher.publish(self._log.fail(error.code, error.message, error.param))
        return Outcome.ANSWERED

    @property
    def _eos_ids(self) -> frozenset[int]:
        return frozenset() if self.job.sampling.ignore_eos else self._model.tokenizer.eos_ids

    def _choice_writer(self, choice: int, plan: ChoicePlan, log: LogWriter) -> ChoiceWriter:
        return ChoiceWriter(
            choice,
            log,
            self._model.tokenizer.text_stream(self.job.sampling.stop),
            max_tokens=plan.max_tokens,
            eos_ids=self._eos_ids,
        )

    def _submit(self, run: str, choice: int, plan: ChoicePlan, log: LogWriter) -> Submit:
        return Submit(
            sequence_id=SequenceId(run, choice),
            prompt_ids=plan.prompt_ids,
            sampling=self.job.sampling,
            seed=self.job.seed,
            max_tokens=plan.max_tokens,
            eos_ids=self._eos_ids,
            output_ids=tuple(log.chains[choice].token_ids),
            job_class=self._job_class,
            tenant=self.job.tenant,
        )
