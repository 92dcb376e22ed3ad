"""The names of logs that were recreated."""

from collections.abc import Iterator

import pytest

from shared import topology
from shared.bus.base import QueueState
from shared.bus.memory import MemoryBroker, MemoryBus
from shared.errors import BusError, QueueDown, QueueSilent

LOG = "reply.cmpl-1"
LATER = "reply.cmpl-1--2"


class HesitantBus(MemoryBus):
    """Answers with each of these errors before it answers."""

    def __init__(self, errors: Iterator[BusError]) -> None:
        super().__init__(MemoryBroker())
        self._errors = errors

    async def inspect(self, queue: str) -> QueueState | None:
        for error in self._errors:
            raise error
        return await super().inspect(queue)


@pytest.mark.parametrize(
    ("errors", "found"),
    [
        ([], None),
        ([QueueSilent("")], None),
        ([QueueSilent(""), QueueSilent("")], LATER),
        ([QueueDown("")], LATER),
    ],
    ids=["absent", "slow", "silent", "down"],
)
async def test_a_later_log_may_be_on_a_node_that_is_down(
    errors: list[BusError], found: str | None
) -> None:
    async with HesitantBus(iter(errors)) as bus:
        assert await topology.find_later_log(bus, LOG) == found


async def test_a_later_log_that_is_there_is_found() -> None:
    async with MemoryBus() as bus:
        await bus.declare(topology.reply_queue("cmpl-1--2", expires_s=60))

        assert await topology.find_later_log(bus, LOG) == LATER
