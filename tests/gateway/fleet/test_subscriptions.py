"""What a gateway hears of workers and of other gateways, on a bus that comes and goes."""

import asyncio

import pytest

from gateway.wiring import listening
from shared import topology
from shared.bus.base import Binding, Exchange, Message, Queue
from shared.bus.memory import MemoryBroker, MemoryBus
from shared.errors import AccessRefused, StartupError, UndecodableMessage, Unroutable
from shared.telemetry import incidents

ANNOUNCEMENT, COMMAND = Message(b"announcement"), Message(b"command")


class Ears:
    """What was heard, in order."""

    def __init__(self) -> None:
        self.announcements: asyncio.Queue[Message] = asyncio.Queue()
        self.commands: asyncio.Queue[Message] = asyncio.Queue()

    async def hear_both(self, bus: MemoryBus) -> None:
        """Have a message of each kind published, and wait for them."""
        await publish(bus, topology.ANNOUNCEMENTS, ANNOUNCEMENT)
        await publish(bus, topology.ALL_GATEWAYS, COMMAND)
        assert (await self.announcements.get()).body == ANNOUNCEMENT.body
        assert (await self.commands.get()).body == COMMAND.body


async def publish(bus: MemoryBus, binding: Binding, message: Message) -> None:
    """Publish as soon as somebody listens."""
    while True:
        try:
            return await bus.publish(binding, message)
        except Unroutable:
            await asyncio.sleep(0.01)


async def test_announcements_and_commands_are_heard_across_lost_connections(
    broker: MemoryBroker, bus: MemoryBus
) -> None:
    ears = Ears()
    async with (
        MemoryBus(broker) as ours,
        listening(ours, ears.announcements.put_nowait, ears.commands.put_nowait),
    ):
        for _ in range(3):
            await ears.hear_both(bus)
            ours.sever()


@pytest.mark.parametrize(
    ("error", "num_incidents"), [(UndecodableMessage("no message"), 0), (ValueError("a bug"), 1)]
)
async def test_a_message_that_cannot_be_handled_is_passed_over(
    error: Exception, num_incidents: int, broker: MemoryBroker, bus: MemoryBus
) -> None:
    ears = Ears()

    def hear(message: Message) -> None:
        if message.body == b"bad":
            raise error
        ears.commands.put_nowait(message)

    before = incidents.num_reported("task")
    async with MemoryBus(broker) as ours, listening(ours, ears.announcements.put_nowait, hear):
        await publish(bus, topology.ALL_GATEWAYS, Message(b"bad"))
        await ears.hear_both(bus)

    assert incidents.num_reported("task") == before + num_incidents


class RefusingBus(MemoryBus):
    """A bus whose user may not declare anything as often as ``num_refusals`` says."""

    num_refusals = 0

    async def declare(self, *resources: Exchange | Queue) -> None:
        if self.num_refusals:
            self.num_refusals -= 1
            raise AccessRefused("not for this user")
        await super().declare(*resources)


async def test_an_account_without_permissions_is_refused_at_the_start(broker: MemoryBroker) -> None:
    ears = Ears()
    async with RefusingBus(broker) as ours:
        ours.num_refusals = 1
        with pytest.raises(StartupError, match="connect with the gateway's account"):
            async with listening(ours, ears.announcements.put_nowait, ears.commands.put_nowait):
                pass


async def test_a_later_refusal_is_reported_and_tried_again(
    broker: MemoryBroker, bus: MemoryBus
) -> None:
    ears = Ears()
    before = incidents.num_reported("task")
    async with (
        RefusingBus(broker) as ours,
        listening(ours, ears.announcements.put_nowait, ears.commands.put_nowait),
    ):
        ours.num_refusals = 2  # one for each listener, which have not begun yet
        await ears.hear_both(bus)

    assert incidents.num_reported("task") == before + 2
