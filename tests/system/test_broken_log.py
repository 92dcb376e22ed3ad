"""A log with an event that cannot be decoded ends in the same way for every reader."""

import pytest

from shared import topology
from shared.bus.base import Bus, Message
from shared.bus.memory import MemoryBroker, MemoryBus
from tests.support.engines.brake import Brake
from tests.support.gateway.http import LiveGateway, events, live_gateway
from tests.support.workers.jobs import wait_answered
from tests.support.workers.synthetic import doomed_worker, echo_worker

BODY = {"model": "echo", "prompt": "one two", "max_tokens": 500, "stream": True, "detach": True}


async def begin(gateway: LiveGateway, bus: Bus, *, is_kept: bool) -> tuple[str, str]:
    """Ask, read a little, let the log break, and leave, or read on; returns the id and the body."""
    async with gateway.http.stream(
        "POST", "/v1/completions", json=BODY, headers={"accept": "text/event-stream"}
    ) as response:
        request_id = response.headers["x-request-id"]
        pieces = response.aiter_text()
        body = await anext(pieces)
        if is_kept:
            await spoil(bus, request_id)
            async for piece in pieces:
                body += piece
    return request_id, body


async def spoil(bus: Bus, request_id: str) -> None:
    await bus.publish(topology.reply_binding(f"reply.{request_id}"), Message(b"\xc1"))


def code_of(body: str) -> str:
    """The error code of the stream's last event."""
    *_, last = (event for event in events(body) if event != "[DONE]")
    return str(last["error"]["code"])


@pytest.mark.parametrize("first", ["gateway", "worker"])
async def test_a_broken_log_ends_with_the_same_error(first: str) -> None:
    broker = MemoryBroker()
    async with MemoryBus(broker) as bus, live_gateway(bus) as gateway:
        brake = Brake(4)  # or the answer may have ended before its log breaks
        async with doomed_worker(broker, brake=brake):
            request_id, body = await begin(gateway, bus, is_kept=first == "gateway")
        if first == "worker":
            await spoil(bus, request_id)
            async with echo_worker(broker):
                await wait_answered(bus, 1)
            body = (await gateway.http.get(f"/v1/streams/{request_id}")).text

    assert code_of(body) == "internal_error"
