"""What the routes work with."""

from dataclasses import dataclass, field

from gateway.admission import Admission
from gateway.metrics import Metrics
from gateway.relay import Relays
from gateway.reply_queues import ReplyQueues
from gateway.workers import LiveWorkers
from shared.bus.base import Bus, Message
from shared.messages import Release, decode_announcement, decode_command
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
    metrics: Metrics = field(default_factory=Metrics)

    @classmethod
    def build(cls, settings: GatewaySettings, bus: Bus) -> "Gateway":
        reply_queues = ReplyQueues(bus, settings.reply_retention_s)
        return cls(
            settings=settings,
            bus=bus,
            admission=Admission(settings.max_requests),
            reply_queues=reply_queues,
            relays=Relays(bus, reply_queues),
            workers=LiveWorkers(bus),
        )

    def hear_announcement(self, message: Message) -> None:
        self.workers.hear(decode_announcement(message.body))

    def obey(self, message: Message) -> None:
        """Follow a command that went to all gateways."""
        command = decode_command(message.body)
        if isinstance(command, Release):
            self.relays.release(command.request_id)
