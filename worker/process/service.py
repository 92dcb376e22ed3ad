"""The worker process: a model, an engine thread, and the tasks around them."""

import asyncio
import logging
import sys
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from itertools import islice

from shared import topology
from shared.bus.base import MAX_PREFETCH, Binding, Bus, Message, Queue
from shared.bus.retry import until_available
from shared.bus.subscribe import receive
from shared.bus.upkeep import Upkeep
from shared.errors import AccessRefused, BusError, StartupError
from shared.messages import (
    AdmissionAnswer,
    Announcement,
    Cancel,
    Continue,
    Declare,
    Drain,
    JobClass,
    LimitedTenants,
    decode_command,
    encode,
)
from shared.settings import WorkerSettings
from shared.telemetry import floods, incidents
from shared.topology import Lane, Publishers
from shared.version import VERSION
from worker.decode import served_model
from worker.decode.bridge import Generations
from worker.decode.served_model import ServedModel
from worker.jobs.admission import TenantAdmission
from worker.jobs.consumer import HeldJobs, JobConsumer
from worker.jobs.delivery import Ledger
from worker.jobs.metrics import JobMetrics
from worker.jobs.quarantine import Solitude
from worker.jobs.quick import QuickConsumer
from worker.jobs.runner import Admission, JobRunner, Workplace
from worker.jobs.window import JobWindow
from worker.process import background_loading, interruption
from worker.process.health_server import HealthServer
from worker.process.metrics import WorkerMetrics
from worker.process.peers import Peers, compare, hear_peers, num_free
from worker.process.supervision import Supervisor
from worker.process.tuning import WORKER_TUNING, WorkerTuning
from worker.process.watchdog import Watchdog, end_process

logger = logging.getLogger(__name__)

_HAND_OVER_TIMEOUT_S = 5.0
_RECORDS_TIMEOUT_S = 5.0
_MAX_NAMED_JOBS = 10
_PROGRESS_INTERVAL_S = 5.0
"""Seconds between the lines about draining."""
_BALANCE_INTERVAL_S = 0.25
_MAX_NOTICE_LEN = 1024
"""Characters of the notice of the machine's end that an announcement may have."""
_PAUSE_AGAIN_S = 0.5
_ANNOUNCED_WITHIN_S = 2.0
"""Seconds to wait for a confirmation, which needs every process that listens."""
_SET_ASIDE_SHARE = 4
"""One in so many waiting jobs is taken from the queue of jobs that were set aside."""
_SWITCH_INTERVAL_S = 2e-4
"""Python's thread switch interval in seconds. The engine thread reacquires the GIL many times a
step, and may wait this long each time while the event loop publishes; the default of 5 ms would be
a third of a step. The thread that loads the model waits as often for the thread that reads its
tokenizer."""


async def run_worker(
    settings: WorkerSettings,
    bus: Bus,
    *,
    stop: asyncio.Event,
    ready: Callable[[], None] | None = None,
    model: ServedModel | None = None,
    on_stall: Callable[[], object] = end_process,
    tuning: WorkerTuning = WORKER_TUNING,
) -> None:
    """Serve a model over ``bus`` until ``stop`` is set; then drain and return. An operator's
    `Drain` sets it as well.

    Loads the model of the settings unless ``model`` is given, and calls ``ready`` once it consumes
    jobs. Raises `StartupError` if it cannot start, and any error that ends the engine. Calls
    ``on_stall`` if the engine or the event loop hangs.
    """
    with HealthServer(settings.health_port) as health:
        await _run_worker(
            settings, bus, health, stop, ready or (lambda: None), model, on_stall, tuning
        )


async def _run_worker(
    settings: WorkerSettings,
    bus: Bus,
    health: HealthServer,
    stop: asyncio.Event,
    ready: Callable[[], None],
    model: ServedModel | None,
    on_stall: Callable[[], object],
    tuning: WorkerTuning,
) -> None:
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    worker_id = uuid.uuid4().hex
    name = served_model.name_of(settings) if model is None else model.name
    await _check_machine(settings.interruption_notice)
    await _check_account(bus, worker_id)
    hearing = asyncio.create_task(hear_peers(bus, name, worker_id, tuning.announce_interval_s))
    try:
        if model is None:
            model = await background_loading.load(settings, name)
        compare(await hearing, model)
    finally:
        hearing.cancel()
    if model.max_num_seqs is not None:
        slots = min(settings.max_num_seqs, model.max_num_seqs)
        settings = settings.model_copy(update={"max_num_seqs": slots})
    generations = Generations(model.engine, tuning.stream_events_per_s)
    with Watchdog(lambda: generations.stalled_s, settings.stall_timeout_s, on_stall):
        async with generations:
            worker = Worker(worker_id, settings, bus, model, generations, stop, tuning)
            await worker.run(health, ready)


async def _check_machine(place: str) -> None:
    """Raise `StartupError` if the machine ends soon, rather than load a model for nothing. A notice
    that cannot be read now is looked for later."""
    if not place:
        return
    try:
        notice = await interruption.read_notice(place)
    except interruption.UNREADABLE:
        return
    if notice:
        raise StartupError(f"This machine ends soon: {notice}. The worker does not start on it.")


async def _check_account(bus: Bus, worker_id: str) -> None:
    """Raise `StartupError` if the broker's user is not a worker's, rather than after the model was
    loaded. Nothing is checked while the broker is away."""
    if not bus.is_connected:
        return
    try:
        await bus.declare(topology.worker_queue(worker_id))
    except AccessRefused as error:
        raise StartupError(
            "The broker's user lacks the permissions of a worker: connect with the worker's "
            f"account. ({error.message})"
        ) from None
    except BusError as error:  # it is declared later
        logger.info("queue not declared", extra={"reason": error.code})


class Worker:
    """The tasks of a worker: consumers, commands, announcements and supervision."""

    def __init__(
        self,
        worker_id: str,
        settings: WorkerSettings,
        bus: Bus,
        model: ServedModel,
        generations: Generations,
        stop: asyncio.Event,
        tuning: WorkerTuning,
    ) -> None:
        self._settings = settings
        self._tuning = tuning
        self._bus = bus
        self._model = model
        self._generations = generations
        self._id = worker_id
        self._stop = stop
        self._must_hand_over = asyncio.Event()
        self._started_at = 0.0
        self._end_notice = ""
        self._control = topology.worker_queue(self._id)
        self._address = self._control.bindings[0].routing_key
        self._metrics = JobMetrics(model.name, settings.metrics_tenants)
        ledger = Ledger(bus, self._metrics)
        self._workplace = Workplace(
            bus=bus,
            model=model,
            generations=generations,
            address=self._address,
            job_timeout_s=settings.request_timeout_s,
            requires_same_numerics=settings.require_same_numerics,
            metrics=self._metrics,
            ledger=ledger,
        )
        self._held = HeldJobs()
        self._supervisor = Supervisor(
            bus,
            self._held,
            reader_grace_s=tuning.wait_for_reader_s(settings.disconnect_grace_s),
            batch_patience_s=tuning.batch_patience_s,
        )
        self._publishers = Publishers((bus.user, *settings.trusted_users))
        self._tenants = TenantAdmission(
            bus, self._address, self._metrics, job_timeout_s=settings.request_timeout_s
        )
        self._is_draining = False
        self._peers = Peers(bus, model.name, self._id, self._address)
        self._announced: Announcement | None = None
        self._refused: set[Binding] = set()
        """Where this worker may not announce itself."""
        num_batch = max(1, settings.max_num_seqs - settings.batch_reserve)
        self._interactive, self._overflow = self._pair("interactive", settings.max_num_seqs)
        self._batch, self._batch_overflow = self._pair("batch", num_batch)
        self._quick = QuickConsumer(
            bus, model, self._publishers, self._metrics, ledger, self._tenants, self._address
        )
        self._resumed = self._consumer("resumed", self._window(settings.max_num_seqs))
        self._near = self._consumer(
            "near", self._interactive.window, shared_queue=self._queue_of("interactive")
        )
        new = [self._interactive, self._overflow, self._batch, self._batch_overflow]
        solitude = Solitude([*new, self._near, self._resumed], [self._quick])
        suspect = self._consumer("suspect", self._window(1), admission=solitude.enter)
        self._consumers = [*new, suspect]
        self._lasting = list(topology.lasting_resources(model.name))
        self._upkeep = Upkeep(bus, lambda: self._lasting)

    async def run(self, health: HealthServer, ready: Callable[[], None]) -> None:
        await self._declare()
        self._started_at = time.time()
        health.watch(self._worker_metrics(), is_live=self._is_live, is_healthy=self._is_healthy)
        async with asyncio.TaskGroup() as tasks:
            background = [
                tasks.create_task(incidents.keep_running(work))
                for work in (
                    self._obey,
                    self._announce,
                    self._hear_peers,
                    self._balance,
                    self._follow_engine,
                    self._upkeep.run,
                    self._supervisor.cancel_unread,
                    self._supervisor.promote_batch,
                    self._quick.run,
                    self._heed_interruption,
                )
            ]
            # Outside the other tasks' error handling: if the engine fails, the worker ends.
            background.append(tasks.create_task(self._generations.watch()))
            taking = [tasks.create_task(consumer.run()) for consumer in self._consumers]
            logger.info("worker ready", extra=self._banner())
            ready()
            await self._stop.wait()
            await self._drain(taking)
            for task in background:
                task.cancel()
        await self._announce_once()

    async def _declare(self) -> None:
        """Declare the topology as soon as the broker is reachable."""

        async def declare() -> list[JobConsumer]:
            await topology.declare_worker(self._bus, self._model.name, self._id)
            return await self._declare_own()

        self._consumers += await until_available(self._bus, declare, "queues not declared")

    async def _declare_own(self) -> list[JobConsumer]:
        """Declare the queues that not all workers of the model consume; returns their
        consumers."""
        own: list[tuple[Lane, JobConsumer, str]] = [
            ("resumed", self._resumed, "jobs with equal numerics not preferred"),
            ("near", self._near, "jobs with cached prefixes not preferred"),
        ]
        declared = []
        for lane, consumer, missed in own:
            try:
                await self._bus.declare(self._queue_of(lane))
            except AccessRefused as error:  # the user is limited to the queues that exist
                logger.warning(missed, extra={"reason": error.message})
            else:
                declared.append(consumer)
                self._lasting.append(self._queue_of(lane))
        return declared

    def _queue_of(self, lane: Lane) -> Queue:
        if lane == "resumed":
            return topology.resumed_queue(self._model.name, self._model.numerics)
        if lane == "near":
            return topology.near_queue(self._model.name, self._address)
        return topology.jobs_queue(self._model.name, lane)

    def _window(
        self, max_begun: int, max_waiting: int = 0, *, fills_slots: bool = False
    ) -> JobWindow:
        weights = self._settings.tenant_weights
        pace = self._metrics.pace
        return JobWindow(max_begun, weights, max_waiting, fills_slots=fills_slots, pace=pace)

    def _pair(self, job_class: JobClass, max_begun: int) -> tuple[JobConsumer, JobConsumer]:
        """The consumers of the new jobs of a class, and of its jobs that were set aside."""
        max_waiting = self._tuning.max_waiting_jobs
        window = self._window(max_begun, max_waiting, fills_slots=job_class == "batch")
        lane = topology.OVERFLOW[job_class]
        new = self._consumer(job_class, window, overflow=self._queue_of(lane))
        return new, self._consumer(lane, window)

    def _consumer(
        self,
        lane: Lane,
        window: JobWindow,
        *,
        overflow: Queue | None = None,
        shared_queue: Queue | None = None,
        admission: Admission | None = None,
    ) -> JobConsumer:
        num_waiting = window.max_waiting if overflow else window.max_waiting // _SET_ASIDE_SHARE
        return JobConsumer(
            self._bus,
            self._model.name,
            self._queue_of(lane),
            overflow=overflow,
            shared_queue=shared_queue,
            worker=self._address,
            prefetch=min(window.max_begun + num_waiting, MAX_PREFETCH),
            window=window,
            held=self._held,
            publishers=self._publishers,
            tenants=self._tenants,
            new_runner=partial(JobRunner, self._workplace, lane, admission),
            metrics=self._metrics,
        )

    def _limits(self) -> dict[str, int]:
        settings, model = self._settings, self._model
        sizes = {
            name: size
            for name in ("kv_cache_bytes", "kv_cache_tokens", "kv_cache_sequences")
            if isinstance(size := model.facts.get(name), int)
        }
        return {
            "max_num_seqs": settings.max_num_seqs,
            "max_num_batched_tokens": settings.max_num_batched_tokens,
            "max_seq_len": model.max_seq_len,
            **sizes,
        }

    def _banner(self) -> dict[str, object]:
        """What an operator must know of a worker that has started."""
        return {
            "model": self._model.name,
            "worker": self._address,
            "version": VERSION,
            **self._model.facts,
            **self._limits(),
            "batch_reserve": self._settings.batch_reserve,
        }

    def _num_jobs_waiting(self, job_class: JobClass) -> int:
        consumer = self._batch if job_class == "batch" else self._interactive
        return consumer.num_waiting

    def _worker_metrics(self) -> WorkerMetrics:
        generations = self._generations
        return WorkerMetrics(
            self._metrics,
            lambda: generations.load,
            generations.step_times,
            stalled_s=lambda: generations.stalled_s,
            limits=self._limits(),
            batch_reserve=self._settings.batch_reserve,
            num_jobs_waiting=self._num_jobs_waiting,
            facts=self._model.facts,
        )

    def _is_live(self) -> bool:
        return self._generations.stalled_s < self._settings.stall_timeout_s

    def _is_healthy(self) -> bool:
        has_begun = all(consumer.has_begun for consumer in self._consumers)
        can_work = self._generations.ready.is_set() and not self._is_draining
        return has_begun and self._bus.is_connected and can_work

    async def _obey(self) -> None:
        """Apply the commands that arrive on this worker's control queue."""
        await receive(self._bus, self._control, self._obey_one)

    def _obey_one(self, message: Message) -> None:
        command = decode_command(message.body)
        if not self._publishers.may_command(message.user_id, command):
            facts = {"command": type(command).__name__, "user": message.user_id}
            event, user = "unauthorized command dropped", message.user_id or ""
            floods.warn(logger, event, "command dropped", facts, user)
        elif isinstance(command, Cancel | Continue):
            self._held.obey(command)
        elif isinstance(command, LimitedTenants | AdmissionAnswer):
            self._tenants.obey(command)
        elif isinstance(command, Declare):
            self._upkeep.ask()
        elif isinstance(command, Drain):
            logger.info("drain requested", extra={"is_immediate": command.is_immediate})
            self._stop.set()
            if command.is_immediate:
                self._must_hand_over.set()

    async def _heed_interruption(self) -> None:
        """Hand all jobs over as soon as the machine is to end."""
        place = self._settings.interruption_notice
        if not place:
            return

        def failed(error: Exception, num_failed: int) -> None:
            self._metrics.interruption_looks_failed.inc()
            if num_failed == 1:
                facts = {"place": place, "reason": repr(error)}
                logger.warning("notices of the machine's end cannot be read", extra=facts)

        interval_s = self._tuning.notice_interval_s
        notice = await interruption.wait_for_notice(place, interval_s, failed)
        logger.warning("machine ends soon, jobs are handed over", extra={"notice": notice})
        self._metrics.interruptions.inc()
        self._end_notice = notice[:_MAX_NOTICE_LEN]
        self._stop.set()
        self._must_hand_over.set()

    async def _announce(self) -> None:
        while True:
            await self._announce_once()
            await asyncio.sleep(self._tuning.announce_interval_s)

    async def _hear_peers(self) -> None:
        try:
            await self._peers.listen()
        except AccessRefused as error:  # the broker's user may lack the permission
            logger.warning("peer announcements unavailable", extra={"reason": error.message})

    async def _balance(self) -> None:
        """Leave jobs to peers that have free slots, and announce when this worker has free slots,
        or begins or ceases to take jobs whose prefix it may have."""
        while True:
            await asyncio.sleep(_BALANCE_INTERVAL_S)
            await self._leave_to_peers(self._interactive, self._overflow, 0)
            reserve = self._settings.batch_reserve
            await self._leave_to_peers(self._batch, self._batch_overflow, reserve)
            if self._has_news:
                await self._announce_once()

    async def _follow_engine(self) -> None:
        """While the engine is away, take no jobs, and leave the jobs that are here to other
        workers, or to this worker once the engine is back."""
        while True:
            await self._generations.away.wait()
            logger.warning("no jobs are taken while the engine is away")
            await self._announce_once()
            while self._generations.away.is_set():
                # The end of a job in quarantine resumes the others.
                await asyncio.gather(*(consumer.pause() for consumer in self._consumers))
                for held in self._held.values():
                    held.hand_over("engine away")
                with suppress(TimeoutError):
                    async with asyncio.timeout(_PAUSE_AGAIN_S):
                        await self._generations.ready.wait()
            for consumer in self._consumers:
                consumer.resume()
            await self._announce_once()

    async def _leave_to_peers(
        self, new: JobConsumer, overflow: JobConsumer, num_reserved: int
    ) -> None:
        num_free = self._peers.free.count - num_reserved
        num_given = await new.yield_to_peers(num_free)
        await overflow.yield_to_peers(num_free, num_given)
        self._peers.free.take(num_given)

    def _announcement(self) -> Announcement:
        load = self._generations.load
        windows = {consumer.window for consumer in self._consumers}
        return Announcement(
            worker=self._address,
            model=self._model.name,
            vocab_size=self._model.tokenizer.vocab_size,
            max_seq_len=self._model.max_seq_len,
            fingerprint=self._model.fingerprint,
            numerics=self._model.numerics,
            is_exact=self._model.is_exact,
            max_num_seqs=self._settings.max_num_seqs,
            num_running=load.num_running,
            num_running_batch=load.num_running_batch,
            batch_reserve=self._settings.batch_reserve,
            num_waiting=load.num_waiting + sum(window.num_waiting for window in windows),
            num_answered=self._held.num_answered,
            kv_usage=1 - load.num_free_blocks / load.num_blocks,
            newest_taken=self._metrics.newest_taken,
            mean_job_tokens=self._metrics.mean_job_tokens,
            mean_job_work_s=self._metrics.mean_job_slot_s / self._settings.max_num_seqs,
            tool_parser=self._model.tool_parser,
            reasoning_parser=self._model.reasoning_parser,
            reasoning_switches=self._model.reasoning_switches,
            template_tells_time=self._model.tokenizer.tells_time,
            engine=self._model.engine_version,
            is_engine_away=self._generations.away.is_set(),
            unsupported=self._model.unsupported,
            engine_constraints=self._model.engine_constraints,
            takes_near_jobs=self._takes_near_jobs,
            is_leaving=self._is_draining,
            end_notice=self._end_notice,
            started_at=self._started_at,
            sent_at=time.time(),
        )

    @property
    def _takes_near_jobs(self) -> bool:
        return self._near in self._consumers and self._near.is_taking and not self._is_draining

    @property
    def _has_news(self) -> bool:
        """Whether gateways and peers should not wait for the next announcement."""
        last = self._announced
        if last is None or last.takes_near_jobs != self._takes_near_jobs:
            return True
        return not num_free(last) and num_free(self._announcement()) > 0

    async def _announce_once(self) -> None:
        announcement = self._announcement()
        self._announced = announcement
        message = Message(encode(announcement))
        await self._announce_to(topology.ANNOUNCEMENTS, message)
        if (group := self._peers.news(announcement)) is not None:
            await self._announce_to(group, message)

    async def _announce_to(self, binding: Binding, message: Message) -> None:
        with incidents.survived("task", "worker not announced"):
            try:
                async with asyncio.timeout(_ANNOUNCED_WITHIN_S):
                    await self._bus.publish(binding, message)
                self._refused.discard(binding)
            except AccessRefused as error:
                if binding not in self._refused:
                    is_group = binding != topology.ANNOUNCEMENTS
                    event = "no peer" if is_group else "no gateway"
                    logger.warning(f"{event} hears of this worker", extra={"reason": error.message})
                self._refused.add(binding)
            except BusError as error:
                # No gateway listens yet, or the broker is unreachable: the next announcement
                # follows soon.
                logger.debug("announcement not published", extra={"reason": error.code})
            except TimeoutError:  # one queue is on a node that is lost; the others have it
                logger.debug("announcement not confirmed")

    async def _drain(self, taking: list[asyncio.Task[None]]) -> None:
        """Let jobs finish within the grace period and hand over the rest."""
        self._is_draining = True
        began = time.monotonic()
        until = began + self._settings.drain_grace_s
        logger.info("draining", extra=self._waited_for(until))
        await self._announce_once()
        stopping = [consumer.stop() for consumer in self._consumers]
        await asyncio.gather(self._quick.stop(), *stopping)
        answering = asyncio.create_task(self._quick.wait_idle())
        await self._let_finish([*taking, answering], until)
        answering.cancel()
        num_handed_over = len(self._held)
        for held in self._held.values():
            held.hand_over("drain")
        await asyncio.wait(taking, timeout=_HAND_OVER_TIMEOUT_S)
        for task in taking:  # the broker is unreachable and will redeliver
            task.cancel()
        await self._workplace.ledger.wait(_RECORDS_TIMEOUT_S)
        facts = {"handed_over": num_handed_over, "seconds": round(time.monotonic() - began, 1)}
        logger.info("drained", extra={"worker": self._address, **facts})

    async def _let_finish(self, working: list[asyncio.Task[None]], until: float) -> None:
        """Wait until no jobs are left, until a monotonic time, or until a command ends it."""
        finishing = asyncio.create_task(asyncio.wait(working))
        hurrying = asyncio.create_task(self._must_hand_over.wait())
        while (left_s := until - time.monotonic()) > 0:
            done, _ = await asyncio.wait(
                [finishing, hurrying],
                timeout=min(left_s, _PROGRESS_INTERVAL_S),
                return_when=asyncio.FIRST_COMPLETED,
            )
            if done:
                break
            logger.info("still draining", extra=self._waited_for(until))
        finishing.cancel()
        hurrying.cancel()

    def _waited_for(self, until: float) -> dict[str, object]:
        """The jobs that a drain waits for; ``until`` is a monotonic time in seconds."""
        return {
            "worker": self._address,
            "jobs": len(self._held),
            "request_ids": [request_id for request_id, _ in islice(self._held, _MAX_NAMED_JOBS)],
            "at_most_s": round(until - time.monotonic()),
        }
