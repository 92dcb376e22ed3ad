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
from gateway.fleet.live_workers import Backlog, LiveWorkers
from gateway.fleet.queue_watch import QueueWatch
from gateway.fleet.quick import QuickLane
from gateway.fleet.samples import Samples
from gateway.intake.admission import Admission
from gateway.intake.keys.accepted import LOOK_INTERVAL_S, Keys
from gateway.intake.keys.api_key import Scope
from gateway.intake.limits import Limits
from gateway.intake.receipts import ReceiptKeys
from gateway.intake.signer import Signer, Verb
from gateway.ledger.budgets import Budgets
from gateway.ledger.prices import PriceTable
from gateway.ledger.recorder import UsageRecorder
from gateway.log.bindings import LogBindings
from gateway.log.registry import Relays
from gateway.log.reply_queues import ReplyQueues
from gateway.metrics import Metrics
from gateway.sign_in.access import Access
from gateway.sign_in.signing_in import SignIn
from gateway.store.batches import BATCH_PREFIX
from gateway.store.state import Store
from gateway.tenants.erasure import TenantErasure
from gateway.tenants.key_directory import KeyDirectory
from gateway.tenants.publishers import PublisherAdmission
from gateway.tenants.stopping import SETTLED_S, WorkStopper
from gateway.webhooks.dispatcher import Deliverer
from gateway.webhooks.sending import Sender
from shared import topology
from shared.bus.base import Bus, Message, Queue
from shared.bus.subscribe import receive
from shared.bus.upkeep import Upkeep
from shared.errors import AccessRefused, BusError, StartupError, Unavailable
from shared.messages import (
    AdmissionRequest,
    ModelName,
    Release,
    StopWork,
    Withheld,
    decode_announcement,
    decode_command,
    decode_usage,
)
from shared.settings import GatewaySettings
from shared.telemetry import floods, incidents
from shared.telemetry.audit import Refusals
from shared.topology import Publishers

logger = logging.getLogger(__name__)

_RETRY_PAUSE_S = 1.0
_MODEL_RETENTION_S = 30 * 24 * 3600.0
"""Seconds for which the database keeps a model after it was last seen."""
_RECORD_INTERVAL_S = 2.0
_RENEW_AFTER_S = 3600.0
"""Seconds after which the time at which a model was last seen is written again."""
_RECORD_RETRY_S = 60.0
Handler = Callable[[Message], None]
_SCOPE_OF_VERB: Mapping[Verb, Scope] = {"read": "generate", "cancel": "cancel"}
GatewayState: TypeAlias = Literal["ok", "draining", "broker_unavailable", "broker_blocked"]


@dataclass(frozen=True, slots=True)
class Timing:
    """How long a gateway waits for what changes beside it, in seconds."""

    keys_look_s: float = LOOK_INTERVAL_S
    """Between two looks at the file of API keys."""
    settled_s: float = SETTLED_S
    """Until all gateways know that keys are revoked."""


TIMING = Timing()


@dataclass(slots=True)
class Gateway:
    """One gateway: its settings, its bus and its state."""

    settings: GatewaySettings
    bus: Bus
    admission: Admission
    reply_queues: ReplyQueues
    relays: Relays
    workers: LiveWorkers
    queues: QueueWatch
    samples: Samples
    keys: Keys
    limits: Limits
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
    """Held by those that look at the dead letters: one hides them from the others."""
    log_bindings: LogBindings
    upkeep: Upkeep
    started_at: float = field(default_factory=time.time)
    """Unix time in seconds."""
    batches_changed: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when a batch was created here, or cancelled here or at another gateway."""
    _key_ids_by_tag: dict[str, list[str]] = field(default_factory=dict)

    @classmethod
    def build(cls, settings: GatewaySettings, bus: Bus, timing: Timing = TIMING) -> "Gateway":
        """Build a gateway. Raises `StartupError`."""
        reply_queues = ReplyQueues(bus, settings.reply_retention_s)
        keys = Keys.of(settings, timing.keys_look_s)
        metrics = Metrics(settings.metrics_tenants)
        access, signer = Access.of(settings), Signer.of(settings)
        workers = LiveWorkers(
            bus,
            Backlog(bus, settings.max_queue_wait_s),
            catalog=metrics.catalog,
            has_affinity=settings.affinity,
            requires_worker=settings.require_worker,
        )
        queues = QueueWatch(bus, workers)
        admission = Admission(
            settings.max_requests, settings.max_bytes_in_flight, has_tenants=keys.are_needed
        )
        publishers = Publishers((bus.user, *settings.trusted_users))
        store = Store(settings)
        deliverer = Deliverer(
            store,
            Sender(settings.webhook_networks),
            metrics,
            max_tries=settings.webhook_max_tries,
            first_pause_s=settings.webhook_retry_s,
        )
        metrics.keys_file_broken.set_function(lambda: keys.is_broken)
        for name, outage in store.outages.items():
            metrics.store_up.labels(name).set_function(outage.is_up)
        relays = Relays(bus, reply_queues, workers, settings)
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
        prices = PriceTable.of(settings.prices_file)
        budgets = Budgets(store, keys, prices, metrics.catalog)
        limits = Limits(bus, settings.max_detached, require_budget=budgets.require)
        stopper = WorkStopper(bus, relays, limits, timing.settled_s)
        listing_letters = asyncio.Lock()
        return cls(
            settings=settings,
            bus=bus,
            admission=admission,
            reply_queues=reply_queues,
            relays=relays,
            workers=workers,
            keys=keys,
            refusals=Refusals(),
            limits=limits,
            signer=signer,
            sign_in=None if access is None else SignIn(access, signer, keys, metrics),
            receipts=ReceiptKeys.of(settings.receipt_keys_file),
            quick=QuickLane(bus, workers.jobs),
            publishers=publishers,
            queues=queues,
            samples=Samples(
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
                settings.usage_retention_s,
                on_model=lambda model: queues.recall({model: time.time()}),
            ),
            prices=prices,
            budgets=budgets,
            publisher_admission=PublisherAdmission(
                bus, keys, limits, lambda: [worker.worker for worker, _ in workers.announced()]
            ),
            stopper=stopper,
            erasure=TenantErasure(bus, store, relays, stopper, keys, settings, listing_letters),
            key_directory=KeyDirectory(store, keys),
            listing_letters=listing_letters,
            log_bindings=LogBindings(bus, lambda: [*reply_queues.spare, *relays.logs]),
            upkeep=Upkeep(bus, lambda: (*topology.EXCHANGES, topology.LEDGER_RECORDS)),
        )

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
        """Watch the queues of models whose workers may be gone: those that API keys and prices
        name, and those that a gateway has seen recently. Returns when the database has been
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
            await asyncio.sleep(_RECORD_INTERVAL_S)
            due = {
                model: seen_at
                for model, seen_at in self.workers.known_models.items()
                if seen_at > recorded.get(model, 0.0) + _RENEW_AFTER_S
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
        await self.relays.cancel(request_id, tenant)
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
            else:
                self.relays.obey(command)
        elif isinstance(command, StopWork):
            self.batches_changed.set()
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
        asyncio.create_task(incidents.keep_running(partial(receive, bus, queue, handle)))
        for queue, handle in (
            (topology.announcements_queue(gateway_id), on_announcement),
            (topology.gateway_queue(gateway_id), on_command),
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
