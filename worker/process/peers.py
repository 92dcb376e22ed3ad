"""The other workers of a model: whether they serve the same weights and tokenizer, and their free
slots.

In a small fleet, a worker hears the announcements of all others. If a thousand workers did so, each
of them would spend its time on it, and the broker would deliver half a million announcements a
second. So a worker that has heard many workers divides the workers of its model into groups by
their ids, and listens to its own group only, to which each worker announces itself as well. A group
is as good as the fleet for the question that it answers: whether others have free slots.
"""

import asyncio
import logging
import time
from collections.abc import Callable
from contextlib import suppress

from shared import topology
from shared.bus.base import Binding, Bus, Consumer, Message, Queue
from shared.bus.retry import until_available
from shared.bus.subscribe import Gathering, receive
from shared.bus.temporary import temporary
from shared.errors import (
    AccessRefused,
    BusError,
    StartupError,
    UndecodableMessage,
)
from shared.messages import Announcement, decode_announcement
from worker.decode.served_model import ServedModel

logger = logging.getLogger(__name__)

_PATIENCE_S = 0.25
"""Seconds allowed for the delivery of announcements."""
_GROUPS_FACTOR = 4
"""The number of groups is a power of it, so that it seldom changes."""
_REPEAT_AFTER_S = 2 * topology.ANNOUNCE_INTERVAL_S
"""Seconds after which a worker announces itself to its group without news, too."""


class FreeSlots:
    """The free sequence slots of the other workers of a model, from their announcements."""

    def __init__(self, model: str, own_address: str) -> None:
        self._model = model
        self._own_address = own_address
        self._free: dict[str, tuple[int, float]] = {}
        """The slots and the time of the announcement, by worker."""

    @property
    def count(self) -> int:
        self._forget()
        return sum(free for free, _ in self._free.values())

    def hear(self, announcement: Announcement) -> None:
        if announcement.model != self._model or announcement.worker == self._own_address:
            return
        if announcement.is_leaving:
            self._free.pop(announcement.worker, None)
        else:
            self._free[announcement.worker] = num_free(announcement), time.monotonic()

    def take(self, count: int) -> None:
        """Count so many slots as used, until the next announcements."""
        for worker, (free, heard_at) in self._free.items():
            taken = min(count, free)
            self._free[worker] = free - taken, heard_at
            count -= taken

    def _forget(self) -> None:
        """Forget workers that have died without a last announcement."""
        oldest = time.monotonic() - topology.FORGET_AFTER_S
        gone = [worker for worker, (_, heard_at) in self._free.items() if heard_at <= oldest]
        for worker in gone:
            del self._free[worker]


def num_free(announcement: Announcement) -> int:
    """The sequence slots that a worker neither uses nor needs for jobs that it holds."""
    num_used = announcement.num_running + announcement.num_waiting
    return max(0, announcement.max_num_seqs - num_used)


class Peers:
    """Hears of the other workers of a model, and says where this worker announces itself to
    them."""

    def __init__(
        self,
        bus: Bus,
        model: str,
        worker_id: str,
        address: str,
        *,
        count_interval_s: float = topology.FORGET_AFTER_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``count_interval_s`` is the time between two decisions about the group. ``clock`` returns
        the time in seconds."""
        self.free = FreeSlots(model, address)
        self._bus = bus
        self._model = model
        self._id = worker_id
        self._count_interval_s = count_interval_s
        self._clock = clock
        self._heard: set[str] = set()
        """The workers that were heard since the last decision."""
        self._is_in_group = False
        self._may_be_in_group = True
        """False if the broker's user may not listen to groups, as a user for some models only."""
        self._num_groups = 1
        self._last: tuple[int, float] | None = None
        """The free slots that the group was told last, and when."""

    @property
    def queue(self) -> Queue:
        """The queue on which this worker listens."""
        if self._is_in_group:
            return topology.group_queue(self._model, self._num_groups, self._id)
        return topology.peers_queue(self._id)

    def news(self, announcement: Announcement) -> Binding | None:
        """Where this worker has to announce itself to its group; None if there is nothing new."""
        num, now = num_free(announcement), self._clock()
        if self._last is not None and not announcement.is_leaving:
            last_num, said_at = self._last
            if num == last_num and now - said_at < _REPEAT_AFTER_S:
                return None
        self._last = num, now
        return topology.group_binding(self._model, self._num_groups, self._id)

    async def listen(self) -> None:
        """Note the free slots of the other workers, until cancelled. Raises `AccessRefused` if this
        worker may hear nobody."""
        while True:
            queue = self.queue
            try:
                await self._listen_at(queue)
            except AccessRefused as error:
                if not self._is_in_group:
                    raise
                logger.info("all workers are heard", extra={"reason": error.message})
                self._is_in_group = self._may_be_in_group = False
            with suppress(BusError):  # it is deleted with the connection
                await self._bus.delete_queue(queue.name)

    async def _listen_at(self, queue: Queue) -> None:
        """Listen at a queue until this worker should listen at another."""
        receiving = asyncio.create_task(
            receive(self._bus, queue, self._hear, gathering=Gathering())
        )
        try:
            while self.queue == queue and not receiving.done():
                await asyncio.wait([receiving], timeout=self._count_interval_s)
                await self._decide()
            if receiving.done():
                await receiving
        finally:
            receiving.cancel()
            await asyncio.wait([receiving])

    def _hear(self, message: Message) -> None:
        announcement = decode_announcement(message.body)
        self._heard.add(announcement.worker)
        self.free.hear(announcement)

    async def _decide(self) -> None:
        """Decide whether this worker listens to its group, and how many groups there are."""
        is_large = len(self._heard) > topology.MAX_PEERS
        self._is_in_group = self._is_in_group or (is_large and self._may_be_in_group)
        self._heard.clear()
        with suppress(BusError):
            quick = await self._bus.inspect(topology.jobs_queue(self._model, "quick").name)
            if quick is not None:
                self._num_groups = num_groups(quick.num_consumers)


def num_groups(num_workers: int) -> int:
    """The number of groups into which so many workers of a model are divided, so that a group has
    at most `topology.MAX_PEERS` workers, and a quarter of it at least."""
    groups = 1
    while num_workers > groups * topology.MAX_PEERS:
        groups *= _GROUPS_FACTOR
    return groups


async def hear_peers(
    bus: Bus, model: str, worker_id: str, announce_interval_s: float
) -> list[Announcement]:
    """Collect the announcements of running workers of ``model``.

    Takes slightly more than an announcement interval if there are such workers, and no time
    otherwise.
    """

    async def hear() -> list[Announcement]:
        jobs = await bus.inspect(topology.jobs_queue(model, "interactive").name)
        if jobs is None or not jobs.num_consumers:
            return []
        return await _listen(bus, model, worker_id, announce_interval_s + _PATIENCE_S)

    return await until_available(bus, hear, "peers not heard")


def compare(peers: list[Announcement], model: ServedModel) -> None:
    """Raises `StartupError` if a peer serves another model under this name. Other numerics are
    logged."""
    for peer in peers:
        if peer.fingerprint != model.fingerprint:
            raise StartupError(
                f"{peer.worker} serves other weights or another tokenizer as {model.name!r}: its "
                f"fingerprint is {peer.fingerprint}, here it is {model.fingerprint}. Choose "
                "another --served-name, or stop the workers that serve it first"
            )
    others = {peer.numerics for peer in peers if peer.numerics not in ("", model.numerics)}
    if others:
        facts = {"numerics": model.numerics, "of_peers": sorted(others)}
        logger.warning("peers have other numerics", extra=facts)


async def _listen(bus: Bus, model: str, worker_id: str, for_s: float) -> list[Announcement]:
    queue = topology.peers_queue(worker_id)
    heard: dict[str, Announcement] = {}
    try:
        async with temporary(bus, queue):
            with suppress(TimeoutError):
                async with asyncio.timeout(for_s), bus.consume(queue.name) as consumer:
                    await _collect(consumer, model, heard)
    except AccessRefused as error:  # the broker's user may lack the permission
        logger.warning("peer announcements unavailable", extra={"reason": error.message})
    return list(heard.values())


async def _collect(consumer: Consumer, model: str, heard: dict[str, Announcement]) -> None:
    async for delivery in consumer:
        with suppress(UndecodableMessage):
            announcement = decode_announcement(delivery.message.body)
            if announcement.model != model:
                continue
            heard[announcement.worker] = announcement
            if announcement.is_leaving:
                del heard[announcement.worker]
