"""The other workers of a model: whether they serve the same weights and tokenizer, and their free
slots."""

import asyncio
import logging
import time
from contextlib import suppress

from shared import topology
from shared.bus.base import Bus, Consumer
from shared.bus.temporary import temporary
from shared.errors import AccessRefused, BusUnavailable, StartupError, UndecodableMessage
from shared.messages import Announcement, decode_announcement
from worker.decode.served_model import ServedModel

logger = logging.getLogger(__name__)

_PATIENCE_S = 0.25
"""Seconds allowed for the delivery of announcements."""
_RETRY_PAUSE_S = 1.0


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


async def hear_peers(
    bus: Bus, model: str, worker_id: str, announce_interval_s: float
) -> list[Announcement]:
    """Collect the announcements of running workers of ``model``.

    Takes slightly more than an announcement interval if there are such workers, and no time
    otherwise.
    """
    while True:
        await bus.wait_connected()
        try:
            jobs = await bus.inspect(topology.jobs_queue(model, "interactive").name)
            if jobs is None or not jobs.num_consumers:
                return []
            return await _listen(bus, model, worker_id, announce_interval_s + _PATIENCE_S)
        except BusUnavailable as error:
            logger.warning("peers not heard, retrying", extra={"reason": error.message})
            await asyncio.sleep(_RETRY_PAUSE_S)


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
