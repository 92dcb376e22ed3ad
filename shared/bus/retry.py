"""Waits for the broker, and repeats calls for which it was away."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import TypeVar

from shared.bus.base import Bus
from shared.errors import BusUnavailable

logger = logging.getLogger(__name__)

CONNECT_TIMEOUT_S = 15.0
"""How long a command or a client waits for a broker before it says that there is none."""
_PAUSE_S = 1.0

_T = TypeVar("_T")


async def connected_within(
    bus: Bus, timeout_s: float = CONNECT_TIMEOUT_S, *, otherwise: str
) -> None:
    """Wait for the connection. Raises `BusUnavailable` with the message ``otherwise``."""
    try:
        async with asyncio.timeout(timeout_s):
            await bus.wait_connected()
    except TimeoutError:
        raise BusUnavailable(otherwise) from None


async def pause(bus: Bus, pause_s: float) -> None:
    """The pause before a call is repeated, which ends when the broker is connected: a broker that
    fails at once is not asked all the time, and one that is away is waited for."""
    await asyncio.sleep(pause_s)
    await bus.wait_connected()


async def until_available(
    bus: Bus, call: Callable[[], Awaitable[_T]], unanswered: str, *, pause_s: float = _PAUSE_S
) -> _T:
    """The result of ``call``, which is repeated while it raises `BusUnavailable`. ``unanswered`` is
    the line of the log that says so."""
    while True:
        await bus.wait_connected()
        try:
            return await call()
        except BusUnavailable as error:
            logger.warning("%s, retrying", unanswered, extra={"reason": error.message})
            await asyncio.sleep(pause_s)
