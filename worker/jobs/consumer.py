"""Consumes generation jobs, and settles each delivery.

A job is acknowledged once the broker has confirmed its terminal event, or if no reader is left. It
is requeued when the worker shuts down, and redelivered by the broker when the worker crashes. A job
that has crashed twice is published to the suspect queue; if it crashes there too, it is
dead-lettered. A body that cannot be decoded, or that names something that its publisher may not, is
dead-lettered as well, and its publisher receives an error.

An unexpected error in the handling of a job affects that job only: the job is requeued after a
pause, and so is a job that could not be published again. A job that is returned each time fails
before it reaches the queue's delivery limit, at which it would be dead-lettered without an answer.
"""

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress
from typing import TypeAlias

import msgspec

from shared import topology
from shared.bus.base import Bus, Delivery, Message, Queue
from shared.bus.subscribe import Attached, Lost, Subscription
from shared.bus.upkeep import report_unbound
from shared.errors import BusError, UndecodableMessage, Unroutable, WarrenError
from shared.messages import (
    MAX_CHOICES,
    Cancel,
    Continue,
    GenerationJob,
    decode_job,
)
from shared.telemetry import incidents, requests
from shared.topology import Publishers, first_log
from worker.jobs.admission import TenantAdmission, Terms
from worker.jobs.delivery import (
    JobDelivery,
    ReplyPublisher,
    as_message,
    in_order,
    published_again,
    refuse,
    tell_end,
    turn_away,
)
from worker.jobs.metrics import JobMetrics
from worker.jobs.observation import report_ignored, report_turned_away, report_undecodable
from worker.jobs.run import ENDS, MAX_RETURNS, Outcome, Signal
from worker.jobs.runner import JobRunner
from worker.jobs.window import JobWindow, Place, Turn

logger = logging.getLogger(__name__)
NewRunner: TypeAlias = Callable[
    [GenerationJob, ReplyPublisher, int, bool, Callable[[], object]], JobRunner
]
"""Called with a job, its publisher, its number of returns, whether it already runs here, and what
to call when it receives tokens."""
_ADOPTION_S = 2.0
"""Seconds for which a run continues after a reconnect without its delivery."""
_RETRY_PAUSE_S = 0.5


class HeldJob:
    """A job that this worker runs, and the delivery to settle at its end.

    A delivery is lost with its channel, but the run continues. If the broker redelivers the job
    here and no other worker has had it in between, the run adopts the new delivery.

    There may be several messages of one publication of a job, because a message whose confirmation
    is lost is published again. The run adopts them all: a second run could compare as older than
    this run, and both would end.
    """

    def __init__(self, job: GenerationJob, runner: JobRunner, delivery: JobDelivery) -> None:
        self.job = job
        self.runner = runner
        self._delivery: JobDelivery | None = delivery
        self._copies: list[JobDelivery] = []
        """The deliveries of other messages of the same publication, maybe of other queues. To
        acknowledge a lost delivery has no effect."""
        self._num_returns = delivery.num_returns
        """The highest of its deliveries."""
        self._num_losses = 0
        self._is_delivery_known = asyncio.Event()
        """Set while it is known which delivery, if any, is to be settled."""
        self._is_delivery_known.set()

    def lose(self) -> int:
        """Record that the delivery was lost with its channel; returns the number of this loss."""
        self._delivery = None
        self._is_delivery_known.clear()
        self._num_losses += 1
        return self._num_losses

    def adopt(self, job: GenerationJob, delivery: JobDelivery) -> bool:
        """Adopt this delivery of ``job`` for the current run.

        Returns False if another worker may have had the job, or if the delivery does not match.
        """
        if job.publication != self.job.publication:
            return False
        num_more = delivery.num_returns - self._num_returns
        if self._delivery is not None:
            if num_more <= 0:
                self._copies.append(delivery)
            return num_more <= 0
        if self._is_delivery_known.is_set() or num_more > 1:
            return False
        self._delivery = delivery
        self._num_returns = max(self._num_returns, delivery.num_returns)
        self._is_delivery_known.set()
        return True

    def is_beside(self, job: GenerationJob) -> bool:
        """Whether ``job`` is to run on another worker, because the log decides which of them is its
        writer: a hedge of this job, or the job that this run hedges."""
        is_other = job.hedge != self.job.hedge
        return is_other and (job.hedge is not None or self.runner.is_contested)

    def give_up(self, loss: int) -> None:
        """Hand the job over: the delivery did not come back after the loss of this number, so
        another worker has it. No effect after a later loss, for which a new wait begins."""
        if self._delivery is None and loss == self._num_losses:
            self._is_delivery_known.set()
            self.hand_over("delivery lost")

    def hand_over(self, reason: str) -> None:
        """Leave the job to another worker. No error propagates."""
        request_id = self.job.request_id
        with incidents.survived("job", "job not handed over", request_id=request_id):
            self.runner.hand_over(reason)

    def is_of(self, subscription: Subscription) -> bool:
        """Whether a delivery that is to be settled came from ``subscription``."""
        deliveries = (self._delivery, *self._copies)
        return any(one is not None and one.is_of(subscription) for one in deliveries)

    @property
    def current_delivery(self) -> JobDelivery | None:
        """The delivery, or None if it was lost."""
        return self._delivery

    async def wait_for_delivery(self) -> JobDelivery | None:
        """The delivery to settle; waits while a lost delivery may still come back."""
        await self._is_delivery_known.wait()
        return self._delivery

    async def settle_copies(self, outcome: Outcome | None) -> None:
        """Settle the other messages. If the job continues, it does so with the first message alone.

        After the end of a stream they return to their queues: a client may have repeated a request
        that failed with its Idempotency-Key, and declared its log anew. Otherwise their runs find
        that the log has ended, or is gone.
        """
        has_ended = outcome is Outcome.ANSWERED and self.job.mode == "stream"
        while self._copies:
            copy = self._copies.pop()
            if has_ended or outcome is Outcome.UNREAD:
                await copy.reject(requeue=True)
            else:
                await copy.ack()


def _is_counted(job: GenerationJob) -> bool:
    """Whether gateways count the job until they hear of its end."""
    return job.is_counted or job.is_detached


JobKey: TypeAlias = tuple[str, int]
"""A request id and an execution of that request."""


def key_of(job: GenerationJob) -> JobKey:
    return job.request_id, job.execution


class HeldJobs(dict[JobKey, HeldJob]):
    """The held jobs. Two executions of a request are two jobs."""

    def __init__(self) -> None:
        super().__init__()
        self.num_answered = 0

    def obey(self, command: Cancel | Continue) -> None:
        """Apply a command to the jobs that it may be meant for. None of their errors propagates."""
        request_id = command.request_id
        for held in [one for key, one in self.items() if key[0] == request_id]:
            with incidents.survived("job", "command not executed", request_id=request_id):
                held.runner.on(command)


class JobConsumer:
    """Consumes the jobs of one queue, with at most ``prefetch`` unacknowledged, until stopped.

    Jobs for which the window has no room are moved to the queue ``overflow``, whose consumer has
    the same window. A consumer without such a queue keeps all of its jobs. A consumer with a
    ``shared_queue`` has a queue of its own, and moves each job that it cannot begin at once to the
    shared queue.
    """

    def __init__(
        self,
        bus: Bus,
        model: str,
        queue: Queue,
        *,
        overflow: Queue | None,
        shared_queue: Queue | None = None,
        worker: str,
        prefetch: int,
        window: JobWindow,
        held: HeldJobs,
        publishers: Publishers,
        tenants: TenantAdmission,
        new_runner: NewRunner,
        metrics: JobMetrics,
    ) -> None:
        self._bus = bus
        self._model = model
        self._queue = queue
        self._overflow = overflow
        self._shared_queue = shared_queue
        self._worker = worker
        self._prefetch = prefetch
        self.window = window
        self._held = held
        self._publishers = publishers
        self._tenants = tenants
        self._new_runner = new_runner
        self._metrics = metrics
        self._subscription: Subscription | None = None
        self._serving: dict[asyncio.Task[None], JobDelivery | HeldJob] = {}
        """A job is held once it has begun."""
        self._may_take = asyncio.Event()
        self._may_take.set()
        self._num_losses = 0
        """How often all deliveries were lost with their channel."""
        self._is_stopped = self._is_paused = self._yields = False
        self.has_begun = False
        """Whether the broker has ever sent jobs here, if there were any."""

    @property
    def num_waiting(self) -> int:
        """The number of jobs taken that have not begun."""
        return self.window.num_waiting

    @property
    def is_taking(self) -> bool:
        """Whether it is to take jobs: it is neither stopped nor paused, and does not yield."""
        return self._may_take.is_set() and not self._is_stopped

    async def run(self) -> None:
        """Consume until `stop`; returns when all jobs taken are done."""
        async with asyncio.TaskGroup() as tasks:
            while not self._is_stopped:
                try:
                    await self._may_take.wait()
                    await self._take_jobs(tasks)
                except Exception as error:  # noqa: BLE001 (the jobs in hand must not end with it)
                    facts = {"queue": self._queue.name}
                    incidents.report("task", "job consumer opened again", error, **facts)
                    tasks.create_task(self._give_up(self._lose_deliveries()))
                    await asyncio.sleep(_RETRY_PAUSE_S)

    async def stop(self) -> None:
        """Stop consuming permanently, and return the jobs that have not begun."""
        self._is_stopped = True
        self._may_take.set()
        with incidents.survived("task", "job consumer not stopped", queue=self._queue.name):
            await self._stop_consumer()
        self.window.close()

    async def pause(self) -> None:
        """Stop consuming until `resume`, and give back the jobs that have not begun."""
        self._is_paused = True
        await self._start_or_stop()
        self.window.close()

    async def wait_idle(self) -> None:
        """Return when all jobs taken are done."""
        while self._serving:
            await asyncio.wait(self._serving)

    def resume(self) -> None:
        self._is_paused = False
        self.window.open()
        if not self._yields:
            self._may_take.set()

    async def yield_to_peers(self, num_free: int, num_given: int = 0) -> int:
        """Leave jobs to other workers of the model that have ``num_free`` free slots, and have been
        given ``num_given`` jobs.

        While this worker has none itself, it stops consuming and gives back up to that many of the
        jobs that have not begun. Returns how many.
        """
        self.window.yields = num_free > 0
        yields = num_free > 0 and self.window.is_full
        if yields != self._yields:
            self._yields = yields
            await self._start_or_stop()
        return self.window.give_back(num_free - num_given) if yields else 0

    async def _start_or_stop(self) -> None:
        if self._is_stopped:
            return
        if self._is_paused or self._yields:
            self._may_take.clear()
            await self._stop_consumer()
        else:
            self._may_take.set()

    async def _stop_consumer(self) -> None:
        if self._subscription is not None:
            await self._subscription.stop()

    async def _take_jobs(self, tasks: asyncio.TaskGroup) -> None:
        """Consume until stopped or paused."""
        self._subscription = subscription = Subscription(
            self._bus, self._queue.name, prefetch=self._prefetch, declare=(self._queue,)
        )
        try:
            if self._is_stopped or not self._may_take.is_set():  # while this was waiting
                await subscription.stop()
            async for item in subscription:
                match item:
                    case Attached():
                        self.has_begun = True
                    case Lost():
                        tasks.create_task(self._give_up(self._lose_deliveries()))
                    case _:
                        delivery = self._delivery_of(item, subscription)
                        task = tasks.create_task(self._serve(delivery))
                        self._serving[task] = delivery
                        task.add_done_callback(self._serving.pop)
        except BaseException:
            await subscription.close()
            raise
        tasks.create_task(self._close_when_idle(subscription))

    async def _close_when_idle(self, subscription: Subscription) -> None:
        """Close a stopped subscription once its deliveries are settled, because closing it returns
        the others."""
        with incidents.survived("task", "job consumer not closed", queue=self._queue.name):
            async with subscription:
                while users := [
                    task for task, job in self._serving.items() if job.is_of(subscription)
                ]:
                    await asyncio.wait(users)

    def _delivery_of(self, item: Delivery, subscription: Subscription) -> JobDelivery:
        is_trusted = self._publishers.is_trusted(item.message.user_id)
        return JobDelivery(item, subscription, is_trusted=is_trusted)

    def _lose_deliveries(self) -> list[tuple[HeldJob, int]]:
        """Lose all deliveries; returns the jobs that run, each with the number of its loss."""
        self._num_losses += 1
        if self._shared_queue is None:  # otherwise none of its jobs waits
            self.window.lose(were_set_aside=self._overflow is None)
        running = [job for job in self._serving.values() if isinstance(job, HeldJob)]
        return [(held, held.lose()) for held in running]

    async def _give_up(self, lost: list[tuple[HeldJob, int]]) -> None:
        with incidents.survived("task", "lost deliveries not waited for", queue=self._queue.name):
            await self._bus.wait_connected()
            with suppress(TimeoutError):
                async with asyncio.timeout(_ADOPTION_S):
                    for held, _ in lost:
                        await held.wait_for_delivery()
        for held, loss in lost:
            held.give_up(loss)

    async def _serve(self, delivery: JobDelivery) -> None:
        """Run a delivery. No error propagates, because it would end all jobs of the worker."""
        task = asyncio.current_task()
        assert task is not None
        try:
            await self._take(delivery, task)
        except Exception as error:  # noqa: BLE001 (any error is reported)
            job = self._serving[task]
            current_delivery = job.current_delivery if isinstance(job, HeldJob) else job
            facts = {"request_id": delivery.message.correlation_id}
            if isinstance(error, BusError):
                logger.warning("job not moved", extra={**facts, "reason": error.code})
            elif current_delivery is None:  # another worker has the job, or will have it
                incidents.report("job", "job left for redelivery", error, **facts)
            else:
                incidents.report("job", "job returned to its queue", error, **facts)
            if current_delivery is not None:
                await current_delivery.give_back()

    async def _take(self, delivery: JobDelivery, task: "asyncio.Task[None]") -> None:
        try:
            job = self._decode(delivery)
        except UndecodableMessage as error:
            await self._refuse(delivery, error)
            if self._publishers.is_trusted(delivery.message.user_id):  # it may be detached
                await tell_end(self._bus, delivery.message.correlation_id, num_tokens=0)
            return
        report_ignored(job, delivery.note_ignored_fields(job), self._worker)
        admitted = await self._admitted(job, delivery)
        if admitted is None:
            return
        job = admitted
        # A job that runs here does not wait: it is adopted, superseded, or dropped. A job that
        # leaves the queue before it reaches the delivery limit does not wait, either.
        at_once = key_of(job) in self._held or delivery.num_returns >= MAX_RETURNS
        is_fresh = not delivery.num_returns
        with self.window.place(
            job,
            is_fresh=is_fresh,
            at_once=at_once,
            was_set_aside=self._overflow is None,
            may_wait=self._shared_queue is None,
        ) as place:
            match await place.turn():
                case Turn.BEGIN:
                    await self._begin(job, delivery, place, task)
                case Turn.GIVE_BACK if self._shared_queue is not None:
                    await self._move_on(job, delivery, self._shared_queue)
                case Turn.GIVE_BACK:
                    await self._give_back(job, delivery, self._queue)
                case Turn.SET_ASIDE:
                    await self._set_aside(job, delivery)
                case Turn.LOST:
                    pass

    async def _admitted(self, job: GenerationJob, delivery: JobDelivery) -> GenerationJob | None:
        """The job with the terms on which it may run. None if it may not, and is answered with an
        error, or if its delivery was lost meanwhile, so that it is delivered again."""
        held = self._held.get(key_of(job))
        if held is not None and held.job.publication == job.publication:
            return job  # a copy of a job that runs
        num_losses, refusal, terms = self._num_losses, None, Terms()
        try:
            terms = await self._tenants.terms_of(job, delivery)
        except WarrenError as error:
            refusal = error
        if num_losses != self._num_losses:
            return None
        if refusal is not None:
            report_turned_away(job, refusal, self._metrics, self._worker)
            await turn_away(self._bus, delivery, refusal)
            return None
        return terms.applied_to(job)

    async def _begin(
        self, job: GenerationJob, delivery: JobDelivery, place: Place, task: "asyncio.Task[None]"
    ) -> None:
        previous = self._held.get(key_of(job))
        reply_to = delivery.message.reply_to
        if previous is not None and first_log(previous.runner.queue) != first_log(reply_to):
            error = UndecodableMessage("another job of this request_id runs")
            return await self._refuse(delivery, error)
        if previous is not None and previous.adopt(job, delivery):
            previous.runner.write("job adopted", {})
            return None
        if previous is not None and previous.is_beside(job):
            return await delivery.give_back()
        if previous is not None and previous.job.publication > job.publication:
            # The worker that published the newer message could not acknowledge this delivery, and
            # the newer message is already here.
            previous.runner.write("job ended", {"outcome": "published again"})
            return await delivery.ack()
        if previous is not None:
            previous.runner.on(Signal.SUPERSEDED)
        publisher = ReplyPublisher(self._bus, delivery, job.request_id)
        is_copy = previous is not None
        runner = self._new_runner(job, publisher, delivery.num_returns, is_copy, place.progress)
        held = HeldJob(job, runner, delivery)
        self._serving[task] = held
        if self._shared_queue is not None:
            self._metrics.near_jobs.labels(self._model, "taken").inc()
        await self._run(held)
        return None

    async def _set_aside(self, job: GenerationJob, delivery: JobDelivery) -> None:
        """Move a job that has not begun behind its tenant's jobs that were moved before."""
        assert self._overflow is not None
        self._metrics.set_aside.labels(self._model).inc()
        await self._give_back(job, delivery, self._overflow)

    async def _move_on(self, job: GenerationJob, delivery: JobDelivery, queue: Queue) -> None:
        """Leave a job that cannot begin here at once to all workers. Raises `BusError`.

        It must not come back to this worker. A job that was returned before may have begun, so it
        is the next publication.
        """
        num_returns = delivery.num_returns
        moved = published_again if num_returns else as_message
        await self._publish(moved(job, delivery.message, num_returns), queue)
        self._metrics.near_jobs.labels(self._model, "moved").inc()
        facts = {"worker": self._worker, "class": "interactive", "attempt": num_returns + 1}
        requests.write_line("job moved", job, {**facts, "to": queue.name})
        await delivery.ack()

    async def _give_back(self, job: GenerationJob, delivery: JobDelivery, queue: Queue) -> None:
        """Return a job that has not begun to a queue.

        A return would count towards quarantine, so a copy is published that counts as many as this
        delivery. A stream that was returned before is returned again, so that its next run compares
        as newer than its last run.
        """
        num_returns = delivery.num_returns
        if job.mode == "final" or not num_returns:
            with suppress(BusError):
                await self._publish(as_message(job, delivery.message, num_returns), queue)
                return await delivery.ack()
        return await delivery.reject(requeue=True)

    async def _run(self, held: HeldJob) -> None:
        key = key_of(held.job)
        self._held[key] = held
        outcome = None
        try:
            outcome = await held.runner.run()
            may_count_as_crash = outcome in (Outcome.ANSWERED, Outcome.SUPERSEDED)
            if held.current_delivery is None and may_count_as_crash:
                await held.runner.excuse()
            delivery = await held.wait_for_delivery()
            if delivery is not None:
                await self._settle(held, delivery, outcome)
        finally:
            if self._held.get(key) is held:
                del self._held[key]
            await held.settle_copies(outcome)
        # A delivery that comes while this waits for the broker would not be settled any more.
        if delivery is not None and outcome in ENDS and _is_counted(held.job):
            await tell_end(self._bus, held.job.request_id, held.runner.num_tokens)

    async def _settle(self, held: HeldJob, delivery: JobDelivery, outcome: Outcome) -> None:
        match outcome:
            case Outcome.ANSWERED | Outcome.UNREAD:
                self._held.num_answered += 1
                await delivery.ack()
            case Outcome.SUPERSEDED:
                await delivery.ack()
            case Outcome.DEAD_LETTERED:
                await delivery.reject()
            case Outcome.QUARANTINED:
                suspects = topology.jobs_queue(self._model, "suspect")
                await self._publish_again(held, delivery, suspects)
            case Outcome.MOVED:
                resumed = topology.resumed_queue(self._model, held.runner.numerics)
                await self._publish_again(held, delivery, resumed)
            case Outcome.REPUBLISHED:
                await self._publish_again(held, delivery, self._shared_queue or self._queue)
            case Outcome.HANDED_OVER if held.job.mode == "final":
                # Without a log, a return would count as a crash.
                queue = self._shared_queue or self._queue
                await self._publish_again(held, delivery, queue, delivery.num_returns)
            case Outcome.HANDED_OVER | Outcome.REQUEUED:
                # All brokers count this return, so the next run compares as newer than this run.
                await delivery.reject(requeue=True)

    async def _publish_again(
        self, held: HeldJob, delivery: JobDelivery, queue: Queue, num_returns: int = 0
    ) -> None:
        """Publish the job again with the same deadline, then acknowledge its delivery. Raises
        `BusError`."""
        job = msgspec.structs.replace(held.job, deadline=held.runner.deadline)
        await self._publish(published_again(job, delivery.message, num_returns), queue)
        held.runner.write("job moved", {"to": queue.name}, is_warning=True)
        # It may have been lost meanwhile, and have come back.
        newest = await held.wait_for_delivery()
        if newest is not None:
            await newest.ack()

    async def _publish(self, message: Message, queue: Queue) -> None:
        (binding,) = queue.bindings
        try:
            await self._bus.publish(binding, message)
        except Unroutable:
            await self._bus.bind(queue)  # an operator may have removed the binding
            report_unbound(binding.exchange.name, binding.routing_key)
            await self._bus.publish(binding, message)

    async def _refuse(self, delivery: JobDelivery, error: UndecodableMessage) -> None:
        report_undecodable(delivery.message, error, self._metrics, self._worker)
        await refuse(self._bus, delivery, error, self._publishers)

    def _decode(self, delivery: JobDelivery) -> GenerationJob:
        message = delivery.message
        job = decode_job(message.body, message.content_type)
        job = self._publishers.admitted(job, message)
        if job.model != self._model:
            raise UndecodableMessage("the job names another model than its queue")
        if job.total_choices > MAX_CHOICES:
            raise UndecodableMessage(f"more than {MAX_CHOICES} choices for all prompts together")
        return in_order(job, message)
