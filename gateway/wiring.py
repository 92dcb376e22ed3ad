"""The components that routes share."""

import asyncio
import logging
import time
import uuid
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Literal, TypeAlias

import msgspec

from gateway.fleet.gauges import export_fleet
from gateway.fleet.live_workers import HEARD_WITHIN_S, STALE_AFTER_S, Backlog, LiveWorkers
from gateway.fleet.queue_watch import QueueWatch
from gateway.fleet.quick import QuickLane
from gateway.fleet.samples import RecentSamples
from gateway.intake.admission import Admission
from gateway.intake.keys.accepted import LOOK_INTERVAL_S as FILE_LOOK_INTERVAL_S
from gateway.intake.keys.accepted import Keys
from gateway.intake.keys.api_key import Scope
from gateway.intake.limits import Limits
from gateway.intake.receipts import ReceiptKeys
from gateway.intake.signer import Signer, Verb
from gateway.intake.turnstile import Turnstiles
from gateway.ledger.budgets import Budgets
from gateway.ledger.prices import PriceTable
from gateway.ledger.recorder import UsageRecorder
from gateway.log.auditing import Auditor
from gateway.log.bindings import LogBindings
from gateway.log.hedging import Hedging
from gateway.log.registry import Relays
from gateway.log.reply_queues import ReplyQueues
from gateway.metrics import Metrics
from gateway.once.answers import AnswerShelf
from gateway.once.execution import Sources
from gateway.once.executions import Executions
from gateway.sign_in.access import Access
from gateway.sign_in.endings import SessionEndings
from gateway.sign_in.signing_in import SignIn
from gateway.store.batches import BATCH_PREFIX
from gateway.store.state import Store
from gateway.store.tenants.revisions import LOOK_INTERVAL_S as DATABASE_LOOK_INTERVAL_S
from gateway.tenants.erasure import TenantErasure
from gateway.tenants.key_directory import KeyDirectory
from gateway.tenants.publishers import PublisherAdmission
from gateway.tenants.stopping import SETTLED_S, WorkStopper
from gateway.webhooks.dispatcher import Deliverer
from gateway.webhooks.sending import Sender
from shared import topology
from shared.bus.base import Bus, Message, Queue
from shared.bus.subscribe import Gathering, receive
from shared.bus.upkeep import Upkeep
from shared.errors import AccessRefused, BusError, Cancelled, StartupError, Unavailable
from shared.messages import (
    AdmissionRequest,
    Follow,
    ModelName,
    Release,
    StopWork,
    UsageRecord,
    Withheld,
    decode_announcement,
    decode_command,
    decode_usage,
)
from shared.settings import DAY_S, GatewaySettings
from shared.telemetry import floods, incidents
from shared.telemetry.audit import Refusals
from shared.topology import Publishers

logger = logging.getLogger(__name__)

_RETRY_PAUSE_S = 1.0
_MODEL_RETENTION_S = 30 * 24 * 3600.0
"""Seconds for which the database keeps a model after it was last seen."""
_RECORD_RETRY_S = 60.0
Handler = Callable[[Message], None]
_SCOPE_OF_VERB: Mapping[Verb, Scope] = {"read": "generate", "cancel": "cancel"}
GatewayState: TypeAlias = Literal["ok", "draining", "broker_unavailable", "broker_blocked"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuning:
    """The times and sizes of a gateway that operators do not choose; times are in seconds. A
    service has the defaults, and tests choose others."""

    first_event_timeout_s: float = 10.0
    """The time until a response begins without an event of a worker. An error within this time
    still determines the HTTP status."""
    ping_interval_s: float = 15.0
    """Of silence, after which a stream receives an SSE comment. Proxies close connections that are
    silent for 30 or 60 seconds."""
    send_timeout_s: float = 30.0
    """The time in which a client must read 64 KB of its response, or it is disconnected."""
    reply_retention_s: float = 60.0
    """The least time for which the broker keeps a log after its last reader has gone: a gateway
    restarts within this time."""
    has_hedging: bool = True
    """Whether slow streams get a second worker; benchmarks compare."""
    has_affinity: bool = True
    """Whether conversations have affinity targets; benchmarks compare."""
    has_batch_order: bool = True
    """Whether a batch runs its lines in the best order, or in the order of the file; benchmarks
    compare."""
    worker_silence_s: float = 4 * topology.ANNOUNCE_INTERVAL_S
    """The time without a heartbeat after which a worker counts as lost, and its jobs are published
    again."""
    max_bytes_in_flight: int | None = None
    """The bytes of all bodies together. None: what follows from the largest body."""
    max_detached: int = 500
    """The detached requests of a tenant whose jobs have not ended, at all gateways together. A key
    or a tenant may have another limit."""
    batch_window: int = 128
    """The least number of requests of a batch and model that are in the queue at once; twice as
    many as all workers of the model run keep them busy."""
    max_batch_window: int = 1024
    batch_lease_s: float = 15.0
    """The time until another gateway continues the batches of a gateway that was killed. It is
    several times the difference between the gateways' clocks."""
    max_batches: int = 16
    """Batches that a gateway runs at once; other batches wait for it, or for another gateway."""
    max_first_batches: int = 16
    """Extra slots for tenants that have no running batch at this gateway: a tenant does not wait
    for the batches of others."""
    batch_lines_bytes: int = 64 << 20
    """The memory that the running lines of all batches may take together, besides a large line of
    each batch."""
    batch_room_s: float = 1.0
    """The time after which a batch looks again whether its tenant has room for more answers."""
    webhook_max_tries: int = 16
    """The delivery of a webhook is given up after so many tries, about 18 hours after the first
    try."""
    webhook_retry_s: float = 5.0
    """The pause between the first two tries of a webhook; each further pause is twice as long."""
    keys_look_s: float = FILE_LOOK_INTERVAL_S
    """The pause between two looks at the file of API keys."""
    database_look_s: float = DATABASE_LOOK_INTERVAL_S
    """The pause between two looks for changes that other gateways have made to keys, tenants and
    sessions."""
    heard_within_s: float = HEARD_WITHIN_S
    """The time after its start within which a gateway hears of every live worker."""
    backlog_stale_s: float = STALE_AFTER_S
    """The time for which the number of waiting jobs counts after it was looked up."""
    record_models_s: float = 2.0
    """The time between two looks at which models have been seen."""
    renew_models_s: float = 3600.0
    """The time after which the time at which a model was last seen is written again."""
    settled_s: float = SETTLED_S
    """The time until all gateways know that keys are revoked."""

    def keep_log_s(self, disconnect_grace_s: float) -> float:
        """A log without a reader outlasts the time for which clients may return to it."""
        return max(self.reply_retention_s, disconnect_grace_s)


TUNING = Tuning()


@dataclass(slots=True)
class Gateway:
    """A gateway: its settings, its bus and its state."""

    settings: GatewaySettings
    tuning: Tuning
    bus: Bus
    admission: Admission
    reply_queues: ReplyQueues
    relays: Relays
    hedging: Hedging
    executions: Executions
    answers: AnswerShelf
    auditor: Auditor
    workers: LiveWorkers
    queues: QueueWatch
    samples: RecentSamples
    keys: Keys
    limits: Limits
    turnstiles: Turnstiles
    refusals: Refusals
    signer: Signer
    sign_in: SignIn | None
    receipts: ReceiptKeys
    quick: QuickLane
    publishers: Publishers
    metrics: Metrics
    store: Store
    deliverer: Deliverer
    recorder: UsageRecorder
    prices: PriceTable
    budgets: Budgets
    publisher_admission: PublisherAdmission
    stopper: WorkStopper
    erasure: TenantErasure
    key_directory: KeyDirectory
    listing_letters: asyncio.Lock
    """Held by each reader of the dead letters, because a reader hides them from the others."""
    log_bindings: LogBindings
    upkeep: Upkeep
    started_at: float = field(default_factory=time.time)
    """Unix time in seconds."""
    batches_changed: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when a batch was created here, or cancelled here or at another gateway."""
    _key_ids_by_tag: dict[str, list[str]] = field(default_factory=dict)

    @classmethod
    def build(cls, settings: GatewaySettings, bus: Bus, tuning: Tuning = TUNING) -> "Gateway":
        """Build a gateway. Raises `StartupError`."""
        log_retention_s = tuning.keep_log_s(settings.disconnect_grace_s)
        reply_queues = ReplyQueues(bus, log_retention_s)
        keys = Keys.of(settings, tuning.keys_look_s)
        metrics = Metrics(settings.metrics_tenants)
        access, signer = Access.of(settings), Signer.of(settings)
        workers = LiveWorkers(
            bus,
            Backlog(bus, settings.max_queue_wait_s, stale_after_s=tuning.backlog_stale_s),
            catalog=metrics.catalog,
            has_affinity=tuning.has_affinity,
            requires_worker=settings.require_worker,
            heard_within_s=tuning.heard_within_s,
        )
        queues = QueueWatch(bus, workers)
        admission = Admission(
            settings.max_requests,
            tuning.max_bytes_in_flight or settings.max_bytes_in_flight,
            has_tenants=keys.are_needed,
        )
        publishers = Publishers((bus.user, *settings.trusted_users))
        store = Store(settings)
        deliverer = Deliverer(
            store,
            Sender(settings.webhook_networks),
            metrics,
            max_tries=tuning.webhook_max_tries,
            first_pause_s=tuning.webhook_retry_s,
        )
        metrics.keys_file_broken.set_function(lambda: keys.is_broken)
        for name, outage in store.outages.items():
            metrics.store_up.labels(name).set_function(outage.is_up)
        relays = Relays(bus, reply_queues, workers, settings, tuning.worker_silence_s)
        hedging = Hedging(bus, workers, metrics.catalog)
        if tuning.has_hedging:
            relays.on_start = hedging.hear_start
        auditor = Auditor(relays.open, reply_queues, workers, metrics.catalog, settings.audit_share)
        if settings.audit_share:
            relays.on_end = auditor.consider
        export_fleet(
            metrics.catalog,
            settings,
            bus,
            queues,
            workers,
            lambda: admission.num_requests,
            relays.slack_s,
            relays.due_tokens,
        )
        answers = AnswerShelf(
            store,
            metrics.catalog,
            kept_s=settings.retention_days.answers * DAY_S,
            max_bytes=settings.max_exact_cache_bytes,
        )
        sources = Sources(bus, relays, reply_queues, answers, settings.disconnect_grace_s)
        prices = PriceTable.of(settings.prices_file)
        budgets = Budgets(store, keys, prices, metrics.catalog)
        limits = Limits(bus, tuning.max_detached, require_budget=budgets.require)
        stopper = WorkStopper(bus, relays, limits, tuning.settled_s)

        def on_record(record: UsageRecord) -> None:
            queues.recall({record.model: time.time()})
            limits.hear_record(record.request_id)

        listing_letters = asyncio.Lock()
        endings = SessionEndings(store, look_interval_s=tuning.database_look_s)
        return cls(
            settings=settings,
            tuning=tuning,
            bus=bus,
            admission=admission,
            reply_queues=reply_queues,
            relays=relays,
            hedging=hedging,
            executions=Executions(signer.execution_key, sources, metrics.catalog),
            answers=answers,
            auditor=auditor,
            workers=workers,
            keys=keys,
            refusals=Refusals(),
            limits=limits,
            turnstiles=Turnstiles(
                limits, keys, admission, metrics.catalog, max_requests=settings.max_requests
            ),
            signer=signer,
            sign_in=None if access is None else SignIn(access, signer, keys, metrics, endings),
            receipts=ReceiptKeys.of(settings.receipt_keys_file),
            quick=QuickLane(bus, workers.jobs),
            publishers=publishers,
            queues=queues,
            samples=RecentSamples(
                metrics.tokens_and_first_tokens, queues, lambda: admission.num_requests
            ),
            metrics=metrics,
            store=store,
            deliverer=deliverer,
            recorder=UsageRecorder(
                bus,
                store,
                publishers,
                metrics.catalog,
                settings.retention_days.usage * DAY_S,
                on_record=on_record,
            ),
            prices=prices,
            budgets=budgets,
            publisher_admission=PublisherAdmission(
                bus, keys, limits, lambda: [worker.worker for worker, _ in workers.announced()]
            ),
            stopper=stopper,
            erasure=TenantErasure(
                bus,
                store,
                relays,
                stopper,
                keys,
                settings,
                listing_letters,
                log_retention_s,
            ),
            key_directory=KeyDirectory(store, keys, look_interval_s=tuning.database_look_s),
            listing_letters=listing_letters,
            log_bindings=LogBindings(bus, lambda: [*reply_queues.spare, *relays.logs]),
            upkeep=Upkeep(bus, lambda: (*topology.EXCHANGES, topology.LEDGER_RECORDS)),
        )

    async def hedge(self) -> None:
        """Give slow streams a second worker, if that is wanted."""
        if self.tuning.has_hedging:
            await self.hedging.watch(self.relays.current)

    @property
    def state(self) -> GatewayState:
        """Whether requests are taken, and why not."""
        if not self.admission.is_open:
            return "draining"
        if not self.bus.is_connected:
            return "broker_unavailable"
        return "broker_blocked" if self.bus.is_blocked else "ok"

    def tenant_of(self, tag: str, verb: Verb) -> str | None:
        """The tenant of a stream token with this tag; None if the API key that it names is not in
        force any more, or does not permit ``verb``. For the tag of a tenant any of its keys will
        do."""
        if not self.keys.are_needed:
            return ""
        if tag not in self._key_ids_by_tag:
            self._key_ids_by_tag = self._tagged_keys()
        keys = map(self.keys.with_id, self._key_ids_by_tag.get(tag, []))
        scope = _SCOPE_OF_VERB[verb]
        valid = (key for key in keys if key is not None and key.permits(scope))
        return next((key.tenant for key in valid), None)

    def _tagged_keys(self) -> dict[str, list[str]]:
        """The ids of all API keys by the tags that name them in stream tokens."""
        tagged: dict[str, list[str]] = {}
        for key in self.keys.known:
            for tag in (self.signer.key_tag(key.key_id), self.signer.tenant_tag(key.tenant)):
                tagged.setdefault(tag, []).append(key.key_id)
        return tagged

    def hear_announcement(self, message: Message) -> None:
        self.workers.hear(decode_announcement(message.body))

    async def recall_models(self) -> None:
        """Watch the queues of models whose workers may be gone: the models that API keys and prices
        name, and the models that a gateway has seen recently. Returns when the database has been
        read."""
        self.queues.recall(dict.fromkeys(self._named_models(), time.time()))
        while True:
            models = (await self.store.wait_open()).models
            try:
                await models.sweep(time.time() - _MODEL_RETENTION_S)
                self.queues.recall(await models.all())
                break
            except Unavailable:
                await asyncio.sleep(_RETRY_PAUSE_S)

    async def record_models(self) -> None:
        """Write the models that this gateway sees to the database, for the gateways that start
        later; never returns. A model is written when it is new, and once an hour."""
        recorded: dict[str, float] = {}
        while True:
            await asyncio.sleep(self.tuning.record_models_s)
            due = {
                model: seen_at
                for model, seen_at in self.workers.known_models.items()
                if seen_at > recorded.get(model, 0.0) + self.tuning.renew_models_s
            }
            if not due:
                continue
            try:
                await (await self.store.open()).models.write(due)
                recorded |= due
            except Unavailable:
                await asyncio.sleep(_RECORD_RETRY_S)

    async def hear_usage(self) -> None:
        """Receive the reports of other gateways and workers on the use of API keys; never
        returns."""
        queue = topology.usage_queue(self.limits.name)
        await receive(self.bus, queue, self._hear_fact, self.limits.listen)

    async def cancel(self, request_id: str, tenant: str | None) -> None:
        """Cancel a job and delete its log. Raises as `Relays.cancel`."""
        await self.executions.cancel(request_id, tenant)
        self.limits.end(request_id)

    def _named_models(self) -> set[str]:
        named = {model for key in self.keys.known for model in key.models}
        return set(filter(_is_model_name, named | self.prices.models.keys()))

    def _hear_fact(self, message: Message) -> None:
        if not self.publishers.is_trusted(message.user_id):
            return
        fact = decode_usage(message.body)
        if isinstance(fact, AdmissionRequest):
            self.publisher_admission.hear(fact)
        else:
            self.limits.hear(fact)

    def obey(self, message: Message) -> None:
        """Apply a command that another gateway sent to all gateways."""
        command = decode_command(message.body)
        if not self.publishers.may_command(message.user_id, command):
            fields = {"command": type(command).__name__, "user": message.user_id}
            event, user = "unauthorized command dropped", message.user_id or ""
            floods.warn(logger, event, "command dropped", fields, user)
        elif isinstance(command, Release | Withheld):
            if command.request_id.startswith(BATCH_PREFIX):
                self.batches_changed.set()
            elif isinstance(command, Withheld) or not self.executions.obey(command):
                self.relays.obey(command)
        elif isinstance(command, Follow):
            self.executions.copy(command)
        elif isinstance(command, StopWork):
            self.batches_changed.set()
            self.turnstiles.stop(command)
            stopped = Cancelled("The request was cancelled.")
            self.executions.end_all(
                stopped, lambda relay: command.covers(relay.tenant, relay.key_id)
            )
            self.stopper.obey(command)
            if not command.key_id:
                self.metrics.tenant_usage.forget(command.tenant)


def _is_model_name(text: str) -> bool:
    """Whether ``text`` is the name of a model rather than a pattern."""
    try:
        msgspec.convert(text, ModelName)
    except msgspec.ValidationError:
        return False
    return True


@asynccontextmanager
async def listening(bus: Bus, on_announcement: Handler, on_command: Handler) -> AsyncIterator[None]:
    """Declare a gateway's queues and pass their messages to the handlers, across reconnects.

    A handler may raise `UndecodableMessage`. Raises `StartupError` if the broker's user may not
    declare these queues.
    """
    gateway_id = uuid.uuid4().hex
    await _check_permission(bus, topology.gateway_queue(gateway_id))
    listeners = [
        asyncio.create_task(
            incidents.keep_running(partial(receive, bus, queue, handle, gathering=gathering))
        )
        for queue, handle, gathering in (
            (topology.announcements_queue(gateway_id), on_announcement, Gathering()),
            (topology.gateway_queue(gateway_id), on_command, None),
        )
    ]
    try:
        yield
    finally:
        for listener in listeners:
            listener.cancel()
        await asyncio.wait(listeners)


async def _check_permission(bus: Bus, queue: Queue) -> None:
    if not bus.is_connected:
        return
    try:
        await bus.declare(queue)
    except AccessRefused as error:
        raise StartupError(
            "The broker's user lacks the permissions of a gateway: connect with the gateway's "
            f"account. ({error.message})"
        ) from None
    except BusError as error:  # the listeners try again
        logger.info("queue not declared", extra={"queue": queue.name, "reason": error.code})
