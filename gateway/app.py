"""The application: routes, errors and what runs beside them."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

from fastapi import FastAPI
from fastapi.middleware.cors import CORSMiddleware

from gateway import http_errors
from gateway.deps import Gateway
from gateway.middleware import ErrorBoundary, RequestIds
from gateway.routes import generation, health, models
from gateway.subscriptions import listening
from shared.bus.base import Bus
from shared.errors import Unavailable
from shared.settings import GatewaySettings


def create_app(settings: GatewaySettings, bus: Bus) -> FastAPI:
    """Build the application on a bus. Nothing happens before its lifespan begins.

    The lifespan's end drains: /health and new requests are answered 503, streams go on, and those
    that outlast ``drain_grace_s`` end with an error.
    """
    gateway = Gateway.build(settings, bus)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(listening(bus, gateway.hear_announcement, gateway.obey))
            keeping = asyncio.create_task(gateway.reply_queues.keep_spares())
            stack.callback(keeping.cancel)
            stack.push_async_callback(_drain, gateway)
            yield

    app = FastAPI(title="Warren", lifespan=lifespan)
    http_errors.install(app, gateway.metrics)
    for group in (generation, models, health):
        app.include_router(group.router(gateway))
    _add_middleware(app, settings)
    return app


def _add_middleware(app: FastAPI, settings: GatewaySettings) -> None:
    """The last one added is the outermost: even the answer to a preflight bears an id."""
    app.add_middleware(ErrorBoundary)
    if settings.cors_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=settings.cors_origins,
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
            expose_headers=["x-request-id"],
        )
    app.add_middleware(RequestIds)


async def _drain(gateway: Gateway) -> None:
    gateway.admission.close()
    try:
        async with asyncio.timeout(gateway.settings.drain_grace_s):
            await gateway.admission.wait_idle()
    except TimeoutError:
        gateway.relays.fail_all(Unavailable("The gateway is shutting down."))
        await gateway.admission.wait_idle()
    await gateway.relays.wait_closed()
