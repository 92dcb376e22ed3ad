"""Work that ends with the client's connection."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from starlette.types import Receive

_IS_NOTICED_WITHIN_TURNS = 8
"""Turns of the event loop in which a server that has read a request also reads that its client has
left."""


class ClientGone(Exception):
    """The client closed the connection; nobody reads an answer."""


@asynccontextmanager
async def until_disconnect(receive: Receive) -> AsyncIterator[None]:
    """Cancel what runs inside when the client goes away, and raise `ClientGone` then, or what
    receiving raises.

    The request's body must have been read, and the response's last bytes must be sent outside:
    servers report a complete response as a disconnect.
    """
    task = asyncio.current_task()
    assert task is not None
    is_inside = True

    def cancel(watch: asyncio.Task[None]) -> None:
        if is_inside and not watch.cancelled():
            task.cancel()

    watch = asyncio.create_task(_wait_disconnect(receive))
    watch.add_done_callback(cancel)
    try:
        yield
    except asyncio.CancelledError:
        # Somebody else may have cancelled the task as well: that is not ours to swallow.
        if watch.done() and not task.uncancel():
            watch.result()
            raise ClientGone from None
        raise
    finally:
        is_inside = False
        watch.cancel()


async def require_client(receive: Receive) -> None:
    """Raise `ClientGone` if the client left before its request was read."""
    async with until_disconnect(receive):
        for _ in range(_IS_NOTICED_WITHIN_TURNS):
            await asyncio.sleep(0)


async def _wait_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
