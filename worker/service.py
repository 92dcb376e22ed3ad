"""The worker process: one model, one engine thread, and the tasks around them."""

import asyncio
import logging
import math
import sys
import time
import uuid
from collections.abc import Callable
from contextlib import AsyncExitStack, suppress

from shared import topology
from shared.bus.base import Bus, Message
from shared.errors import BusError, BusUnavailable, UndecodableMessage
from shared.messages import (
    Announcement,
    Cancel,
    Continue,
    GenerationJob,
    JobClass,
    decode_command,
    encode,
)
from shared.settings import WorkerSettings
from worker import served_model
from worker.answer import Answer
from worker.consumer import JobConsumer, RunningAnswers
from worker.generation import Generations
from worker.health import HealthServer
from worker.publisher import ReplyPublisher
from worker.served_model import ServedModel

logger = logging.getLogger(__name__)

_READER_CHECK_INTERVAL_S = 1.0
_HAND_OVER_TIMEOUT_S = 5.0
_SWITCH_INTERVAL_S = 2e-4
"""The engine's threads come back to Python many times a step, and each time wait so long for the
event loop while it publishes; Python's own 5 ms would be a third of a step."""


async def run_worker(
    settings: WorkerSettings,
    bus: Bus,
    *,
    stop: asyncio.Event,
    ready: Callable[[], None] | None = None,
    model: ServedModel | None = None,
) -> None:
    """Serve one model over ``bus`` until ``stop`` is set; then drain and return.

    Loads the model that the settings name unless ``model`` is given, and calls ``ready`` once jobs
    are taken. Raises `StartupError` when it cannot start and whatever the engine dies of.
    """
    if model is None:
        model = await asyncio.to_thread(served_model.load, settings)
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    async with Generations(model.engine) as generations:
        worker = Worker(settings, bus, model, generations)
        await worker.run(stop, ready or (lambda: None))


class Worker:
    """The tasks of one worker: consumers, commands, announcements, the watch over readers."""

    def __init__(
        self, settings: WorkerSettings, bus: Bus, model: ServedModel, generations: Generations
    ) -> None:
        self._settings = settings
        self._bus = bus
        self._model = model
        self._generations = generations
        self._id = uuid.uuid4().hex
        self._control = topology.worker_queue(self._id)
        self._address = self._control.bindings[0].routing_key
        self._running = RunningAnswers()
        self._is_draining = False
        slots = settings.max_num_seqs
        self._consumers = [
            self._consumer("interactive", slots),
            self._consumer("batch", max(1, slots - settings.batch_reserve)),
        ]

    async def run(self, stop: asyncio.Event, ready: Callable[[], None]) -> None:
        await self._declare()
        async with AsyncExitStack() as stack:
            health = HealthServer(
                self._settings.health_port,
                self._generations,
                is_live=self._is_live,
                is_healthy=self._is_healthy,
            )
            stack.enter_context(health)
            tasks = await stack.enter_async_context(asyncio.TaskGroup())
            background = [
                tasks.create_task(task)
                for task in (
                    self._generations.watch(),
                    self._obey(),
                    self._announce(),
                    self._watch_readers(),
                )
            ]
            taking = [tasks.create_task(consumer.run()) for consumer in self._consumers]
            logger.info("worker ready", extra={"model": self._model.name, "worker": self._id})
            ready()
            await stop.wait()
            await self._drain(taking)
            for task in background:
                task.cancel()
        await self._announce_once()

    async def _declare(self) -> None:
        """Declare the topology as soon as the broker is there."""
        while True:
            await self._bus.wait_connected()
            with suppress(BusUnavailable):
                return await topology.declare_worker(self._bus, self._model.name, self._id)

    def _consumer(self, job_class: JobClass, prefetch: int) -> JobConsumer:
        return JobConsumer(
            self._bus,
            self._model.name,
            job_class,
            prefetch=prefetch,
            running=self._running,
            new_answer=self._new_answer,
        )

    def _new_answer(
        self, job: GenerationJob, job_class: JobClass, publisher: ReplyPublisher, is_first: bool
    ) -> Answer:
        return Answer(
            job,
            job_class,
            publisher,
            model=self._model,
            generations=self._generations,
            address=self._address,
            is_first=is_first,
            timeout_s=self._settings.job_timeout_s,
        )

    def _is_live(self) -> bool:
        return self._generations.stalled_s < self._settings.stall_timeout_s

    def _is_healthy(self) -> bool:
        return self._bus.is_connected and not self._is_draining

    async def _obey(self) -> None:
        """Follow the commands that come to this worker's own queue."""
        while True:
            try:
                async with self._bus.consume(self._control.name) as commands:
                    async for delivery in commands:
                        await delivery.ack()
                        self._obey_one(delivery.message)
            except BusError:
                await self._bus.wait_connected()
                with suppress(BusUnavailable):
                    await self._bus.declare(self._control)

    def _obey_one(self, message: Message) -> None:
        try:
            command = decode_command(message.body)
        except UndecodableMessage as error:
            logger.warning("command dropped", extra={"reason": error.message})
            return
        if isinstance(command, Cancel | Continue):
            self._running.obey(command)

    async def _announce(self) -> None:
        while True:
            await self._announce_once()
            await asyncio.sleep(self._settings.announce_interval_s)

    async def _announce_once(self) -> None:
        load = self._generations.load
        announcement = Announcement(
            worker=self._address,
            model=self._model.name,
            vocab_size=self._model.tokenizer.vocab_size,
            max_seq_len=self._model.max_seq_len,
            fingerprint=self._model.fingerprint,
            max_num_seqs=self._settings.max_num_seqs,
            num_running=load.num_running,
            num_waiting=load.num_waiting,
            kv_usage=1 - load.num_free_blocks / load.num_blocks,
            is_leaving=self._is_draining,
        )
        try:
            await self._bus.publish(topology.ANNOUNCEMENTS, Message(encode(announcement)))
        except BusError as error:
            # No gateway listens yet, or the broker is away: the next announcement will do.
            logger.debug("not announced", extra={"reason": error.code})

    async def _watch_readers(self) -> None:
        """Cancel the answers that nobody reads any more; looking at their logs keeps them."""
        unread_since: dict[str, float] = {}
        while True:
            await asyncio.sleep(_READER_CHECK_INTERVAL_S)
            now = time.monotonic()
            answers = list(self._running.values())
            grace_s = {a.job.request_id: await self._unread_grace_s(a) for a in answers}
            unread_since = {i: unread_since.get(i, now) for i in grace_s if grace_s[i] < math.inf}
            for request_id, since in unread_since.items():
                if now - since >= grace_s[request_id]:
                    self._running.obey(Cancel(request_id=request_id))

    async def _unread_grace_s(self, answer: Answer) -> float:
        """How long the answer may go on as its log is now: for ever while somebody reads it."""
        try:
            log = await self._bus.inspect(answer.publisher.queue)
        except BusError:
            return math.inf
        job = answer.job
        if job.mode == "final":  # collected later, maybe from a queue of another name
            return math.inf
        if log is None:
            return 0
        is_wanted = log.num_consumers > 0 or job.is_detached
        return math.inf if is_wanted else self._settings.reader_grace_s

    async def _drain(self, taking: list[asyncio.Task[None]]) -> None:
        """Finish what ends within the grace and hand over the rest."""
        self._is_draining = True
        await self._announce_once()
        for consumer in self._consumers:
            await consumer.stop()
        await asyncio.wait(taking, timeout=self._settings.drain_grace_s)
        for answer in self._running.values():
            answer.hand_over()
        await asyncio.wait(taking, timeout=_HAND_OVER_TIMEOUT_S)
        for task in taking:  # the broker is away: what is left comes back when it misses us
            task.cancel()
