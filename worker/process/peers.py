"""Checks that all workers of one model name serve the same model."""

import asyncio
import logging
from contextlib import suppress

from shared import topology
from shared.bus.base import Bus, Consumer
from shared.bus.temporary import temporary
from shared.errors import AccessRefused, BusUnavailable, StartupError, UndecodableMessage
from shared.messages import Announcement, decode_announcement

logger = logging.getLogger(__name__)

_PATIENCE_S = 0.25
"""Seconds allowed for the delivery of announcements."""


async def hear_peers(
    bus: Bus, model: str, worker_id: str, announce_interval_s: float
) -> list[Announcement]:
    """Collect the announcements of running workers of ``model``.

    Takes slightly more than one announcement interval if there are any, and no time otherwise.
    """
    while True:
        await bus.wait_connected()
        with suppress(BusUnavailable):
            jobs = await bus.inspect(topology.jobs_queue(model, "interactive").name)
            if jobs is None or not jobs.num_consumers:
                return []
            return await _listen(bus, model, worker_id, announce_interval_s + _PATIENCE_S)


def require_same(peers: list[Announcement], model: str, *, fingerprint: str, numerics: str) -> None:
    """Raises `StartupError` if a peer that serves ``model`` would generate different tokens."""
    for peer in peers:
        if peer.fingerprint != fingerprint:
            raise StartupError(
                f"{peer.worker} serves other weights or another tokenizer as {model!r}: its "
                f"fingerprint is {peer.fingerprint}, here it is {fingerprint}. Choose another "
                "--served-name, or stop the workers that serve it first"
            )
        if peer.numerics and peer.numerics != numerics:  # older versions do not announce it
            raise StartupError(
                f"{peer.worker} serves {model!r} with different numerics ({peer.numerics}, here "
                f"{numerics}): a text would change if it moved from one worker to the other. Use "
                "the same --dtype, --kernels, --device and --max-cpu-isa, or another --served-name"
            )


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
