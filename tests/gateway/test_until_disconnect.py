"""`until_disconnect` on connections that a test simulates."""

import asyncio

import pytest
from starlette.types import Message

from gateway.api.event_stream import ClientGone, until_disconnect
from tests.support.workers.faults import Unforeseen


async def test_a_client_that_leaves_ends_the_work() -> None:
    async def receive() -> Message:
        return {"type": "http.disconnect"}

    with pytest.raises(ClientGone):
        async with until_disconnect(receive):
            await asyncio.sleep(5)


async def test_an_error_of_the_connection_is_raised_as_it_is() -> None:
    async def receive() -> Message:
        raise Unforeseen

    with pytest.raises(Unforeseen):
        async with until_disconnect(receive):
            await asyncio.sleep(5)
