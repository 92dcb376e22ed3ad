"""Gateways that share the limits of a key over a real broker, with the shipped permissions."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from gateway.intake.keys.api_key import ApiKey
from gateway.intake.limits import Limits
from shared.bus.rabbit import RabbitBus
from shared.errors import RateLimited
from tests.support.deployment.broker import Broker
from tests.support.gateway.http import running_limits

pytestmark = pytest.mark.rabbit

KEY = ApiKey("00aa", "alice", "", "", requests_per_minute=5)


@asynccontextmanager
async def gateway(broker: Broker) -> AsyncIterator[Limits]:
    """The limits of one gateway, at a moment that does not pass."""
    async with (
        RabbitBus(broker.url_of("gateway")) as bus,
        running_limits(Limits(bus, max_detached=3, clock=lambda: 1_800_000_000.0), bus) as limits,
    ):
        yield limits


async def is_admitted(limits: Limits) -> bool:
    try:
        async with limits.admit(KEY) as grant:
            grant.note_published()
    except RateLimited:
        return False
    return True


async def test_two_gateways_admit_together_what_a_key_may_have(broker: Broker) -> None:
    async with gateway(broker) as first, gateway(broker) as other:
        admitted = [await is_admitted(limits) for limits in (first, other) * 4]

    assert admitted == [True] * 5 + [False] * 3
