"""Deliveries in: which jobs a worker takes, and when it acknowledges them.

A job is acknowledged when the broker has confirmed its terminal event, or when nobody is left to
read one. It goes back to its queue when the worker hands it over, and comes back by itself when the
worker dies. A body that is no job goes to the dead letters, and its publisher is told.
"""

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress

from shared import topology
from shared.bus.base import Bus, Consumer, Delivery
from shared.errors import (
    BusError,
    BusUnavailable,
    InvalidRequest,
    QueueNotFound,
    UndecodableMessage,
    Unroutable,
)
from shared.messages import (
    Cancel,
    Continue,
    Failed,
    GenerationJob,
    JobClass,
    decode_job,
    is_reply_key,
)
from worker.answer import Answer, Outcome
from worker.publisher import ReplyPublisher

logger = logging.getLogger(__name__)

AnswerFactory = Callable[[GenerationJob, JobClass, ReplyPublisher, bool], Answer]


class RunningAnswers(dict[str, Answer]):
    """The answers in progress, by request id."""

    def obey(self, command: Cancel | Continue) -> None:
        answer = self.get(command.request_id)
        if answer is not None:
            answer.obey(command)


class JobConsumer:
    """Takes jobs of one class, at most ``prefetch`` at a time, until told to stop."""

    def __init__(
        self,
        bus: Bus,
        model: str,
        job_class: JobClass,
        *,
        prefetch: int,
        running: RunningAnswers,
        new_answer: AnswerFactory,
    ) -> None:
        self._bus = bus
        self._model = model
        self._job_class = job_class
        self._queue = topology.jobs_queue(model, job_class)
        self._prefetch = prefetch
        self._running = running
        self._new_answer = new_answer
        self._consumer: Consumer | None = None
        self._is_stopped = False

    async def run(self) -> None:
        """Consume until `stop`; returns when the jobs in hand are done."""
        while not self._is_stopped:
            try:
                await self._consume()
            except* BusUnavailable:
                await self._bus.wait_connected()
            except* QueueNotFound:
                with suppress(BusUnavailable):
                    await self._bus.declare(self._queue)

    async def stop(self) -> None:
        """Take no more jobs."""
        self._is_stopped = True
        if self._consumer is not None:
            await self._consumer.stop()

    async def _consume(self) -> None:
        async with (
            self._bus.consume(self._queue.name, prefetch=self._prefetch) as consumer,
            # Inside: answers end before the consumer closes and gives their jobs back. When the
            # connection breaks they are cancelled, because their jobs come again.
            asyncio.TaskGroup() as answers,
        ):
            self._consumer = consumer
            if self._is_stopped:  # while this consumer was being opened
                await consumer.stop()
            async for delivery in consumer:
                answers.create_task(self._serve(delivery))

    async def _serve(self, delivery: Delivery) -> None:
        try:
            job = self._decode(delivery)
        except UndecodableMessage as error:
            logger.warning("job rejected", extra={"reason": error.message})
            await self._refuse(delivery, error)
            return await delivery.reject()
        publisher = ReplyPublisher(self._bus, delivery, job.request_id)
        previous = self._running.get(job.request_id)
        if previous is not None:
            previous.supersede()
        is_first = delivery.num_returns == 0 and previous is None
        answer = self._new_answer(job, self._job_class, publisher, is_first)
        self._running[job.request_id] = answer
        try:
            outcome = await answer.run()
        except Unroutable:
            logger.info("job dropped: nobody reads", extra={"request_id": job.request_id})
            outcome = Outcome.ANSWERED
        except BusError as error:
            facts = {"request_id": job.request_id, "reason": error.code}
            logger.warning("job dropped: its replies are refused", extra=facts)
            return await delivery.reject()
        finally:
            publisher.close()
            if self._running.get(job.request_id) is answer:
                del self._running[job.request_id]
        if outcome is Outcome.HANDED_OVER:
            return await delivery.reject(requeue=True)
        return await delivery.ack()

    async def _refuse(self, delivery: Delivery, error: UndecodableMessage) -> None:
        """Tell whoever waits, as far as the message says who that is."""
        if is_reply_key(delivery.message.reply_to):
            publisher = ReplyPublisher(self._bus, delivery, delivery.message.correlation_id)
            with suppress(BusError):
                await publisher.publish(Failed(code=InvalidRequest.code, message=error.message))

    def _decode(self, delivery: Delivery) -> GenerationJob:
        message = delivery.message
        job = decode_job(message.body, message.content_type)
        running = self._running.get(job.request_id)
        if running is not None and running.publisher.queue != message.reply_to:
            raise UndecodableMessage("another job of this request_id runs")
        if job.model != self._model:
            raise UndecodableMessage("the job names another model than its queue")
        if not is_reply_key(message.reply_to):
            raise UndecodableMessage("reply_to is not the key of a reply queue")
        return job
