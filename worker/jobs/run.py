"""Runs one job in a worker, from its prompts to its terminal event."""

import asyncio
import secrets
import time
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, nullcontext
from enum import Enum, auto
from typing import TypeAlias

from shared import incidents
from shared.errors import (
    BusError,
    Cancelled,
    DeadlineExceeded,
    InternalError,
    Superseded,
    Unroutable,
    WarrenError,
    WorkerLost,
)
from shared.log import LogWriter
from shared.log.attempt import Attempt, Verdict
from shared.messages import Cancel, Continue, Failed, HandedOver, Started
from worker.decode.choices import Choices
from worker.decode.plan import ChoicePlan, plan, prompt_text
from worker.decode.timeline import Timeline
from worker.jobs.log_reader import read_log
from worker.jobs.quarantine import LAST_RETURNS, is_returned_too_often
from worker.jobs.taken import TakenJob, Workplace

_CHECK_INTERVAL_S = 1.0
_FRESH_S = 0.5
"""Seconds. A job that has waited longer is confirmed with the broker before any work is done."""


class Outcome(Enum):
    """How the job is settled after `Answer.run`."""

    ANSWERED = auto()
    HANDED_OVER = auto()
    GIVEN_BACK = auto()
    SUSPECTED = auto()
    EXCUSED = auto()
    """The job was returned too often, but only because connections to the broker were lost."""
    BURIED = auto()


Interrupt: TypeAlias = WarrenError | Verdict | Outcome
_HAND_OVERS: dict[Interrupt, Outcome] = {
    Outcome.HANDED_OVER: Outcome.HANDED_OVER,
    Verdict.GIVE_BACK: Outcome.GIVEN_BACK,
    Verdict.QUARANTINE: Outcome.SUSPECTED,
}
Admission: TypeAlias = Callable[[], AbstractAsyncContextManager[object]]


class Answer:
    """Runs one delivery of a job.

    A first delivery starts at once. Any other one first determines where to continue
    (`shared.log.attempt`): it writes `Started` and waits for the answer of the log's reader; if
    there is no reader, it reads the log itself.
    """

    def __init__(
        self, taken: TakenJob, workplace: Workplace, admission: Admission = nullcontext
    ) -> None:
        """The job runs within ``admission``."""
        self.job = taken.job
        self._taken = taken
        self._workplace = workplace
        self._admission = admission
        self.job_class = taken.job_class
        self._publisher = taken.publisher
        self._deadline = self.job.deadline or time.time() + workplace.job_timeout_s
        self._timeline = Timeline(self.job)
        self._attempt = Attempt(
            self.job.request_id,
            self.job.total_choices,
            ticket=secrets.token_hex(8),
            num_returns=taken.num_returns + taken.is_copy,
            publication=self.job.publication,
            is_suspect=taken.is_suspect,
        )
        self._choices: Choices | None = None
        """None until the prompts are planned."""
        self._started: Started | None = None
        """The event that opened the attempt in the log; None for jobs of mode ``final``."""
        self._is_told = asyncio.Event()
        """Set once the position from which to continue is known."""
        self._interrupt: Interrupt | None = None
        self._is_ending = False
        self._task: asyncio.Task[object] | None = None

    @property
    def queue(self) -> str:
        """The name of the reply queue."""
        return self._publisher.queue

    async def run(self) -> Outcome:
        """Publish all events up to the terminal one.

        Raises `Unroutable` if there is no reader, and `BusError` if the broker refuses the replies.
        After any other error it is unknown whether the readers know the outcome.
        """
        self._task = asyncio.current_task()
        try:
            return await self._run_until_interrupted()
        except asyncio.CancelledError:
            if self._task is None or self._interrupt is None or self._task.uncancel():
                raise
            return await self._end(self._interrupt)
        finally:
            self._is_ending = True

    def close(self) -> None:
        """Stop publishing."""
        self._publisher.close()

    def obey(self, command: Cancel | Continue) -> None:
        """Apply a command of the log's reader."""
        is_settled = self._workplace.bus.is_settled
        self._follow(self._attempt.obey(command, is_settled=is_settled))

    def cancel(self) -> None:
        """Stop the run, because no reader is left."""
        self._stop(Verdict.STOP)

    def supersede(self) -> None:
        """Stop the run in favour of a newer delivery of the same job."""
        self._stop(Superseded("The job was delivered again."))

    def hand_over(self) -> None:
        """Stop the run and hand the job over to another worker, which continues from the log."""
        self._stop(Outcome.HANDED_OVER)

    @property
    def starves_s(self) -> float:
        """Seconds for which a batch job has waited for a token; 0 for other jobs."""
        return self._timeline.waits_s if self.job_class == "batch" else 0.0

    def promote(self) -> None:
        """Continue with interactive priority."""
        self.job_class = "interactive"
        if self._choices is not None:
            self._choices.promote()

    def _follow(self, verdict: Verdict | None) -> None:
        if verdict is Verdict.GO_ON:
            self._is_told.set()
        elif verdict is not None:
            self._stop(verdict)

    def _stop(self, interrupt: Interrupt) -> None:
        """Interrupt the run; only the first interrupt counts."""
        if self._task is not None and self._interrupt is None and not self._is_ending:
            self._interrupt = interrupt
            self._task.cancel()

    async def _end(self, interrupt: Interrupt) -> Outcome:
        self._is_ending = True
        if (outcome := _HAND_OVERS.get(interrupt)) is not None:
            await self._say_handed_over()
            return outcome
        match interrupt:
            case Verdict.BURY:
                await self._fail(WorkerLost("The workers that ran this request died of it."))
                return Outcome.BURIED
            case Verdict.FAIL:
                return await self._fail(InternalError("The request's log cannot be read."))
            case Superseded():
                return Outcome.ANSWERED
            case BusError():
                raise interrupt
            case WarrenError():
                return await self._fail(interrupt)
            case _:
                return await self._fail(Cancelled("The request was cancelled."))

    async def _run_until_interrupted(self) -> Outcome:
        try:
            async with asyncio.timeout(self._deadline - time.time()):
                await asyncio.sleep(0)  # where a deadline that has already passed takes effect
                async with self._admission():
                    return await self._answer()
        except TimeoutError:
            return await self._fail(DeadlineExceeded("The request's deadline has passed."))
        except Unroutable:
            raise
        except WarrenError as error:
            return await self._fail(error)
        except Exception as error:  # noqa: BLE001 (a bug fails only this job)
            incidents.report("job", "job failed", error, request_id=self.job.request_id)
            return await self._fail(InternalError("The worker failed on this request."))
        finally:
            self._timeline.ended()

    async def _answer(self) -> Outcome:
        taken = self._taken
        if is_returned_too_often(self.job, taken.num_returns, is_suspect=taken.is_suspect):
            return await self._condemn()
        try:
            plans = await plan(self.job, self._workplace.model)
        except Exception:
            if self.job.mode == "stream" and not self._attempt.is_first:
                # The failure must follow the events that readers have already accepted.
                await self._open_log([])
            raise
        self._choices = choices = Choices(
            self.job,
            self.job_class,
            plans,
            model=self._workplace.model,
            generations=self._workplace.generations,
            timeline=self._timeline,
        )
        if self.job.mode == "stream":
            await choices.run(await self._open_log(plans), self._publisher.publish)
        else:
            await self._publisher.publish(await choices.complete())
        return Outcome.ANSWERED

    async def _condemn(self) -> Outcome:
        """Quarantine or dead-letter a job that has been returned too often."""
        if self._taken.num_returns >= LAST_RETURNS:
            await self._fail(InternalError("The request could not be moved to another queue."))
            return Outcome.BURIED
        if not self._workplace.bus.is_settled:
            return Outcome.EXCUSED
        if not self._taken.is_suspect:
            return await self._end(Verdict.QUARANTINE)
        if self.job.mode == "stream":
            await self._open_log([])
        return await self._end(Verdict.BURY)

    async def _open_log(self, plans: list[ChoicePlan]) -> LogWriter:
        """Open a new attempt in the request's log; returns a writer at its position."""
        self._started = self._new_started(plans)
        await self._publish_started(self._started)
        return await self._position(self._started)

    async def _publish_started(self, started: Started) -> None:
        age_s = time.time() - self.job.created_at
        if self._attempt.is_first and (not self.job.created_at or age_s < _FRESH_S):
            # The engine need not wait for the broker to confirm events that precede its tokens.
            self._publisher.begin(started, self._stop)
        else:
            await self._publisher.publish(started)

    def _new_started(self, plans: list[ChoicePlan]) -> Started:
        job = self.job
        prompts = zip(job.prompts, plans, strict=True) if job.wants_prompt_text and plans else ()
        return Started(
            worker=self._workplace.address,
            ticket=self._attempt.ticket,
            num_prompt_tokens=tuple(len(prompt.prompt_ids) for prompt in plans),
            is_waiting=not self._attempt.is_first,
            publication=job.publication,
            num_returns=self._taken.num_returns,
            is_alone=self._taken.is_suspect,
            context=job.context,
            prompt_texts=tuple(
                prompt_text(prompt, plan.prompt_ids, self._workplace.model.tokenizer)
                for prompt, plan in prompts
            ),
        )

    async def _position(self, started: Started) -> LogWriter:
        """Where to continue, according to the log's reader or, if there is none, to the log
        itself."""
        while self._attempt.log is None:
            events = await read_log(self._workplace.bus, self.queue, self._attempt.ticket)
            if events is not None:
                is_settled = self._workplace.bus.is_settled
                verdict = self._attempt.read(events, is_settled=is_settled)
                if verdict is Verdict.STOP:  # the log has ended, or a newer run owns it
                    self.supersede()
                else:
                    self._follow(verdict)
            try:
                async with asyncio.timeout(_CHECK_INTERVAL_S):
                    await self._is_told.wait()
            except TimeoutError:
                # The reader's answer is lost if it arrives while this worker is disconnected.
                await self._publisher.publish(started)
        self._is_told.set()
        return self._attempt.log

    async def _say_handed_over(self) -> None:
        """Write `HandedOver`, so that readers do not count this run as a crash."""
        if self._started is not None:
            await self._publisher.publish(HandedOver(ticket=self._attempt.ticket))

    async def _fail(self, error: WarrenError) -> Outcome:
        if self._has_ended:
            await self._publisher.flush()
            return Outcome.ANSWERED
        if self._started is None and self.job.mode == "stream" and not self._attempt.is_first:
            # Only a run with a position in the log can fail after other runs' tokens.
            self._started = self._new_started([])
            await self._publisher.publish(self._started)
        await self._publisher.publish(self._failed(error))
        return Outcome.ANSWERED

    @property
    def _has_ended(self) -> bool:
        """Whether the last event was passed to the publisher."""
        if self._started is None:
            return self._publisher.has_unsent  # the only event of such an answer
        return self._attempt.log is not None and self._attempt.log.is_ended

    def _failed(self, error: WarrenError) -> Failed:
        log = self._attempt.log
        if self._started is not None and log is not None:
            return log.fail(error.code, error.message, error.param)
        # A run that waits has no position in the log; its ticket identifies it instead.
        ticket = None if self._started is None else self._started.ticket
        return Failed(code=error.code, message=error.message, param=error.param, ticket=ticket)
