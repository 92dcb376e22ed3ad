"""Executes the run of a job: passes events to a `JobRun`, and performs its actions."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, suppress
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

from shared.bus.base import Bus, Queue
from shared.bus.retry import until_available
from shared.errors import (
    BusError,
    BusUnavailable,
    DeadlineExceeded,
    InternalError,
    Unroutable,
    WarrenError,
)
from shared.log import LogWriter
from shared.messages import GenerationJob, HandedOver, JobClass, ReplyEvent
from shared.telemetry import incidents, requests
from shared.topology import OVERFLOW, Lane, resumed_queue
from worker.decode.bridge import Generation, Generations
from worker.decode.choices import (
    ChoicePlan,
    Choices,
    is_long_replay,
    plan,
    prompt_texts,
    provenance,
)
from worker.decode.served_model import ServedModel
from worker.engine.interface import StepOutput
from worker.jobs.delivery import Ledger, LogMoved, ReplyPublisher, recorded
from worker.jobs.log_reader import read_log
from worker.jobs.metrics import JobMetrics
from worker.jobs.observation import JobObservation
from worker.jobs.pace import least_tokens
from worker.jobs.run import (
    Action,
    Decoded,
    Event,
    JobRun,
    LogRead,
    Outcome,
    Planned,
    Publish,
    Record,
    Refused,
    Settle,
    Signal,
    Work,
)

logger = logging.getLogger(__name__)
_CHECK_INTERVAL_S = 1.0
_FRESH_S = 0.5
"""Seconds. A job that has waited longer is confirmed with the broker before any work is done."""
Admission: TypeAlias = Callable[[], AbstractAsyncContextManager[object]]


@dataclass(frozen=True, slots=True)
class Workplace:
    """What all runs of a worker share."""

    bus: Bus
    model: ServedModel
    generations: Generations
    address: str
    """The routing key of the worker's commands."""
    job_timeout_s: float
    requires_same_numerics: bool
    """Whether jobs wait for workers with the numerics of their tokens, rather than continue
    here."""
    metrics: JobMetrics
    ledger: Ledger


class JobRunner:
    """Runs a delivery of a job.

    Events are applied as soon as they occur, so a cancelled job frees the engine even while the
    broker is slow. Tokens are an exception: they gather while an event is being published, and the
    next events contain many of them.
    """

    def __init__(
        self,
        workplace: Workplace,
        lane: Lane,
        admission: Admission | None,
        job: GenerationJob,
        publisher: ReplyPublisher,
        num_returns: int,
        is_copy: bool,
        on_tokens: Callable[[], object],
    ) -> None:
        """The job runs within ``admission``. ``on_tokens`` is called when it receives tokens."""
        is_batch = lane in ("batch", OVERFLOW["batch"])
        self.job_class: JobClass = "batch" if is_batch else "interactive"
        self._workplace = workplace
        self._admission = admission
        self._on_tokens = on_tokens
        self._job = job
        self._publisher = publisher
        self._num_returns = num_returns
        self._is_copy = is_copy
        self._observation = JobObservation(
            job,
            self.job_class,
            worker=workplace.address,
            num_returns=num_returns,
            metrics=workplace.metrics,
            generations=workplace.generations,
        )
        self._run = JobRun(
            job,
            worker=workplace.address,
            ticket=self._observation.ticket,
            num_returns=num_returns,
            is_suspect=lane == "suspect",
            is_copy=is_copy,
            numerics=workplace.model.numerics,
            requires_same_numerics=workplace.requires_same_numerics,
        )
        self.deadline = job.deadline or time.time() + workplace.job_timeout_s
        self._admitted = AsyncExitStack()
        self._plans: list[ChoicePlan] = []
        self._choices: Choices | None = None
        self._generation: Generation | None = None
        self._working: asyncio.Task[None] | None = None
        self._publishing: ReplyEvent | None = None
        self._recording: asyncio.Task[None] | None = None
        """The record of the request's usage, until it is confirmed."""
        self._is_leaving = False
        """Whether another worker is to continue."""
        self._end: Outcome | Exception | None = None
        self._news = asyncio.Event()
        """Set when tokens have arrived or an event was applied."""

    @property
    def queue(self) -> str:
        """The name of the reply queue."""
        return self._publisher.queue

    @property
    def numerics(self) -> str:
        """The numerics of the tokens that the run found in the log."""
        return self._run.numerics

    @property
    def is_contested(self) -> bool:
        """Whether the run is a hedge, and not the log's writer as far as it knows."""
        return self._run.is_contested

    @property
    def num_tokens(self) -> int:
        """The tokens of the prompts, and of the answers so far."""
        chains = () if self._choices is None else self._run.log.chains
        num_answered = sum(len(chain.token_ids) for chain in chains)
        return sum(len(plan.prompt_ids) for plan in self._plans) + num_answered

    async def find_log(self) -> bool:
        """Whether the log was recreated; `run` takes notice with the next event.

        Raises `BusUnavailable`.
        """
        return await self._publisher.find_log()

    async def run(self) -> Outcome:
        """Publish all events; returns how the job is to be settled.

        After an error it is unknown whether the readers know the outcome.
        """
        remaining_s = self.deadline - time.time()
        loop = asyncio.get_running_loop()
        deadline = loop.call_later(remaining_s, self.on, Signal.DEADLINE)
        async with self._admitted:
            try:
                if remaining_s <= 0:
                    self.on(Signal.DEADLINE)
                elif (late := self._lateness(remaining_s)) is not None:
                    self.on(late)
                elif self._admission is None:
                    self.on(Signal.ADMITTED)
                else:
                    self._start(partial(self._admit, self._admission))
                outcome = await self._run_until_settled()
            except asyncio.CancelledError:
                if self._is_leaving:  # its last event is not confirmed at the end of a drain
                    self._observation.end(Outcome.HANDED_OVER)
                raise
            except Exception:
                self._observation.end(None)
                raise
            else:
                self._observation.end(outcome)
                if self._recording is not None:
                    await asyncio.shield(self._recording)
                return outcome
            finally:
                deadline.cancel()
                self._work(Work.NONE)
                if self._working is not None and not self._working.done():
                    facts = {"request_id": self._job.request_id}
                    with incidents.survived("job", "work not waited for", **facts):
                        await asyncio.wait([self._working])

    def on(self, event: Event) -> None:
        """Apply an event to the run."""
        self._apply(event, is_settled=self._workplace.bus.is_settled)

    async def excuse(self) -> None:
        """Record in the log that this run has ended. Another run may have replaced it without its
        knowledge, and readers count a replaced run without this record as lost."""
        if self._job.mode != "stream":
            return
        event = HandedOver(ticket=self._observation.ticket)
        with suppress(BusError):
            try:
                await self._publisher.publish(event)
            except LogMoved:
                await self._publisher.publish(event)

    def hand_over(self, reason: str) -> None:
        """Let another worker continue; ``reason`` is for the log."""
        self._is_leaving = True
        self._observation.hand_over_reason = reason
        self.on(Signal.HAND_OVER)

    def write(
        self, step: requests.Step, facts: dict[str, object], *, is_warning: bool = False
    ) -> None:
        """Write a line about the job, with the worker and the attempt."""
        self._observation.write(step, facts, is_warning=is_warning)

    @property
    def starves_s(self) -> float:
        """Seconds for which a batch job has waited for a token; 0 for other jobs."""
        return self._observation.waits_s if self.job_class == "batch" else 0.0

    def promote(self) -> None:
        """Continue with interactive priority."""
        self.job_class = "interactive"
        if self._generation is not None:
            self._generation.promote()

    @property
    def is_due(self) -> bool:
        """Whether a batch job must have its tokens now to end before its deadline."""
        if self.job_class != "batch" or self._job.deadline is None:
            return False
        left_s = self._job.deadline - time.time()
        return left_s <= self._workplace.metrics.pace.expected_s(self._job)

    def _lateness(self, left_s: float) -> DeadlineExceeded | None:
        """The error of a job that cannot end in this time. Other runs may have generated tokens of
        a job that was returned or published again, or that runs here."""
        job = self._job
        if job.deadline is None or self._num_returns or job.publication or self._is_copy:
            return None
        needed_s = self._workplace.metrics.pace.least_s(job)
        if needed_s < left_s:
            return None
        self._observation.refuse(needed_s, left_s)
        return DeadlineExceeded(
            f"The request needs at least {needed_s:.1f} s for {least_tokens(job)} tokens, and its "
            f"deadline is in {left_s:.1f} s."
        )

    async def _run_until_settled(self) -> Outcome:
        while self._end is None:
            if self._publishing is not None:
                await self._publish(self._publishing)
                continue
            try:
                self._news.clear()
                if not self._decode():
                    await self._news.wait()
            except Exception as error:  # noqa: BLE001 (a bug fails only this job)
                self._fail(error)
        if isinstance(self._end, Exception):
            raise self._end
        return self._end

    async def _publish(self, event: ReplyEvent) -> None:
        result: Event = Signal.CONFIRMED
        if self._recording is not None:
            await recorded(self._recording)
        try:
            await self._publisher.publish(event)
        except LogMoved:
            logger.warning("log recreated", extra={"request_id": self._job.request_id})
            self._choices = None  # their place in the log is unknown
            result = Signal.LOG_MOVED
        except BusError as error:
            facts = {"request_id": self._job.request_id, "reason": error.code, "queue": self.queue}
            is_usual = isinstance(error, Unroutable)  # readers delete logs that they have read
            logger.log(logging.INFO if is_usual else logging.WARNING, "event refused", extra=facts)
            result = Refused(error)
        except Exception as error:
            self._apply(Signal.UNCONFIRMED)
            if self._end is Outcome.UNKNOWN:
                raise
            self._report("event published again", error)
            return
        self._publishing = None
        self._apply(result)

    def _decode(self) -> bool:
        """Decode the tokens that have arrived; False if there are none."""
        if self._generation is None or self._choices is None:
            return False
        news = self._generation.take()
        if news is None:
            return False
        if news.outputs:
            self._observation.count_tokens(sum(isinstance(o, StepOutput) for o in news.outputs))
            self._on_tokens()
        cancel = self._generation.cancel
        for event in self._choices.advance(news.outputs, cancel, is_due=news.is_due):
            self._apply(Decoded([event]))  # even if an error follows
        return True

    def _apply(self, event: Event, *, is_settled: bool = True) -> None:
        """Apply an event and perform the actions. An error fails the run, a second error ends
        it."""
        try:
            for action in self._run.on(event, is_settled=is_settled):
                self._perform(action)
        except Exception as error:  # noqa: BLE001 (a bug fails only this job)
            if isinstance(event, WarrenError):
                self._end = error
            else:
                self._fail(error)
        self._news.set()

    def _fail(self, error: Exception) -> None:
        if not isinstance(error, WarrenError):
            self._report("job failed", error)
            error = InternalError("The worker failed on this request.")
        self._apply(error)

    def _report(self, event: str, error: Exception) -> None:
        incidents.report("job", event, error, request_id=self._job.request_id)

    def _perform(self, action: Action) -> None:
        match action:
            case Publish():
                self._publishing = action.event
                self._observation.published(action.event)
            case Record():
                self._record(action)
            case Settle():
                self._end = action.outcome
            case _:
                self._work(action)

    def _record(self, action: Record) -> None:
        """The end that follows is published even if this fails."""
        try:
            record = self._observation.recorded(action)
            self._recording = self._workplace.ledger.record(record)
        except Exception as error:  # noqa: BLE001 (any error is reported)
            facts = {"request_id": self._job.request_id}
            incidents.report("job", "usage not recorded", error, **facts)

    def _work(self, work: Work) -> None:
        """Cancel the current work and start this."""
        if self._working is not None:
            self._working.cancel()
        if self._generation is not None:
            self._generation.close()
            self._observation.computed(self._generation.compute_s)
            self._generation = None
        match work:
            case Work.PLAN:
                self._start(self._plan)
            case Work.READ_LOG:
                self._start(self._read_log)
            case Work.FIND_PEERS:
                self._start(self._find_peers)
            case Work.GENERATE:
                log = self._run.log
                if is_long_replay(log, self._job):
                    self._start(partial(self._replay, log))
                else:
                    self._generate(self._new_choices(log), log)

    def _start(self, work: Callable[[], Awaitable[None]]) -> None:
        self._working = asyncio.create_task(self._survive(work))

    async def _survive(self, work: Callable[[], Awaitable[None]]) -> None:
        try:
            await work()
        except Exception as error:  # noqa: BLE001 (a bug fails only this job)
            self._fail(error)

    async def _admit(self, admission: Admission) -> None:
        await self._admitted.enter_async_context(admission())
        self.on(Signal.ADMITTED)

    async def _plan(self) -> None:
        model = self._workplace.model
        self._plans = await plan(self._job, model)
        texts = await prompt_texts(self._job, self._plans, model)
        age_s = time.time() - self._job.created_at
        self._apply(
            Planned(
                tuple(len(plan.prompt_ids) for plan in self._plans),
                texts,
                provenance(self._job, self._plans, model),
                is_fresh=not self._job.created_at or age_s < _FRESH_S,
            )
        )

    async def _read_log(self) -> None:
        if not await self._look_for_log():
            ticket = self._observation.ticket
            events = await read_log(self._workplace.bus, self.queue, ticket)
            if events is not None:
                self.on(LogRead(events, is_renewed=self._publisher.is_renewed))
        await asyncio.sleep(_CHECK_INTERVAL_S)
        self._apply(Signal.UNANSWERED)

    async def _find_peers(self) -> None:
        num_peers = await self._num_consumers(resumed_queue(self._job.model, self._run.numerics))
        self.on(Signal.PEERS_FOUND if num_peers else Signal.NO_PEERS)

    async def _num_consumers(self, queue: Queue) -> int:
        """The number of a queue's consumers, or 0 if the broker does not say."""
        bus = self._workplace.bus
        try:
            state = await until_available(bus, partial(bus.inspect, queue.name), "peers not found")
        except BusError:
            return 0
        return 0 if state is None else state.num_consumers

    async def _look_for_log(self) -> bool:
        with suppress(BusUnavailable):
            return await self.find_log()
        return False

    async def _replay(self, log: LogWriter) -> None:
        self._generate(await asyncio.to_thread(self._new_choices, log), log)

    def _new_choices(self, log: LogWriter) -> Choices:
        return Choices(self._job, self._plans, self._workplace.model, log)

    def _generate(self, choices: Choices, log: LogWriter) -> None:
        first_events = list(choices.begin())
        submits = choices.submits(self.job_class)
        self._observation.begin(
            log.attempt if self._job.mode == "stream" else self._num_returns + 1,
            sum(len(plan.prompt_ids) for plan in self._plans),
            sum(len(chain.token_ids) for chain in log.chains),
            self._run.replaced,
            self._run.changed_numerics,
        )
        self._choices = choices
        self._generation = self._workplace.generations.open(
            submits,
            self._news.set,
            each_token=self._job.each_token and self._job.mode == "stream",
            reads_each=bool(self._job.sampling.stop),
        )
        self._apply(Decoded(first_events))
