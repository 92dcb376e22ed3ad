"""The components that routes share."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from gateway.fleet.backlog import Backlog
from gateway.fleet.live_workers import LiveWorkers
from gateway.fleet.unary import QuickLane
from gateway.intake.admission import Admission
from gateway.intake.api_keys import Keys
from gateway.intake.signer import Signer, check_key
from gateway.log.registry import Relays
from gateway.log.reply_queues import ReplyLog, ReplyQueues, new_id
from gateway.metrics import Metrics
from shared.bus.base import Bus, Message
from shared.messages import Release, Withheld, decode_announcement, decode_command
from shared.settings import GatewaySettings


@dataclass(slots=True)
class Gateway:
    """One gateway: its settings, its bus and its state."""

    settings: GatewaySettings
    bus: Bus
    admission: Admission
    reply_queues: ReplyQueues
    relays: Relays
    workers: LiveWorkers
    keys: Keys
    signer: Signer
    quick: QuickLane
    metrics: Metrics = field(default_factory=Metrics)

    @classmethod
    def build(cls, settings: GatewaySettings, bus: Bus) -> "Gateway":
        """Build a gateway. Raises `StartupError`."""
        reply_queues = ReplyQueues(bus, settings.reply_retention_s)
        workers = LiveWorkers(bus, Backlog(bus, settings.max_queue_wait_s))
        return cls(
            settings=settings,
            bus=bus,
            admission=Admission(settings.max_requests, settings.max_bytes_in_flight),
            reply_queues=reply_queues,
            relays=Relays(bus, reply_queues, workers, settings),
            workers=workers,
            keys=Keys(settings.keys_file),
            signer=Signer.of(settings),
            quick=QuickLane(bus),
        )

    @contextmanager
    def log_for(
        self, kind: str, *, tenant: str, key: str | None = None, is_detached: bool = False
    ) -> Iterator[ReplyLog]:
        """The log of a new request, whose id is ``kind-...``, or derived from its Idempotency-Key.

        Raises `InvalidRequest`.
        """
        retention_s = self.settings.detach_ttl_s if is_detached else 0.0
        if key is not None:
            request_id = self.signer.request_id(kind, tenant, check_key(key))
            yield self.reply_queues.named(request_id, retention_s, may_exist=True)
        elif is_detached:
            yield self.reply_queues.named(new_id(kind), retention_s)
        else:
            with self.reply_queues.take(kind) as log:
                yield log

    def hear_announcement(self, message: Message) -> None:
        self.workers.hear(decode_announcement(message.body))

    def obey(self, message: Message) -> None:
        """Apply a command that was sent to all gateways."""
        command = decode_command(message.body)
        if isinstance(command, Release | Withheld):
            self.relays.obey(command)
