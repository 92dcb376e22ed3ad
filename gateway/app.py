"""The FastAPI application: routes, error handlers and background tasks."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from functools import partial

from fastapi import FastAPI
from fastapi.middleware.cors import CORSMiddleware

from gateway import errors
from gateway.api.abandoned_responses import ResponseCompleter
from gateway.api.compute_once import CACHE_HEADER
from gateway.api.openapi import IGNORED_PARAMETERS_HEADER, IGNORED_TOOLS_HEADER, DocumentedAPI
from gateway.api.routes import (
    admin,
    admin_models,
    admin_work,
    batches,
    console,
    conversations,
    dead_letters,
    docs,
    files,
    forks,
    generation,
    health,
    history,
    keys,
    messages,
    models,
    quick,
    receipts,
    replays,
    responses,
    sessions,
    sign_in,
    streams,
    tenants,
    uploads,
    usage,
    webhooks,
)
from gateway.batches.batch_runner import BatchRunner
from gateway.intake.limits import RATE_HEADERS
from gateway.middleware import (
    Authentication,
    ErrorBoundary,
    KnownSites,
    Paths,
    RequestIds,
    Traces,
)
from gateway.wiring import TUNING, Gateway, Tuning, listening
from shared.bus.base import Bus
from shared.errors import ShuttingDown, Unavailable
from shared.off_loop import measure_lag
from shared.settings import GatewaySettings
from shared.telemetry import incidents

logger = logging.getLogger(__name__)

MAX_CLOSING_S = 70
"""Seconds that a gateway may take to end beyond ``drain_grace_s``, if neither clients nor broker
nor database answer. Whatever runs it waits as long before it kills it."""
_LAST_WORDS_S = 5.0
_CLEAN_UP_S = 10.0
_PROGRESS_INTERVAL_S = 5.0
"""Seconds between the lines about a drain."""


def create_app(settings: GatewaySettings, bus: Bus, tuning: Tuning = TUNING) -> FastAPI:
    """Build the application on a bus. Nothing runs before its lifespan starts.

    The end of the lifespan drains the gateway: /health and new requests are answered 503, and open
    streams continue. Streams that outlast ``drain_grace_s`` end with an error that says how to
    resume them. Raises `StartupError` if the API keys cannot be read.
    """
    gateway = Gateway.build(settings, bus, tuning)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(listening(bus, gateway.hear_announcement, gateway.obey))
            for work in (
                gateway.reply_queues.keep_spares,
                gateway.relays.watch,
                gateway.hedge,
                gateway.log_bindings.run,
                gateway.upkeep.run,
                gateway.quick.listen,
                gateway.hear_usage,
                gateway.limits.announce,
                gateway.queues.run,
                partial(measure_lag, gateway.metrics.loop_lag_s),
                gateway.samples.run,
                gateway.recall_models,
                gateway.key_directory.run,
                gateway.publisher_admission.run,
            ):
                stack.callback(asyncio.create_task(incidents.keep_running(work)).cancel)
            await stack.enter_async_context(_recording_usage(gateway))
            stack.push_async_callback(gateway.publisher_admission.leave)
            stack.callback(gateway.auditor.stop)
            stack.push_async_callback(_drain, gateway)
            await stack.enter_async_context(_using_store(gateway))
            yield

    app = DocumentedAPI(lifespan=lifespan)
    app.state.metrics = gateway.metrics  # for connections, which the server refuses
    app.state.send_timeout_s = tuning.send_timeout_s
    errors.install(app, gateway.metrics, gateway.workers.models)
    for group in (
        generation,
        responses,
        conversations,
        messages,
        quick,
        files,
        uploads,
        batches,
        streams,
        forks,
        receipts,
        replays,
        models,
        usage,
        admin,
        keys,
        history,
        dead_letters,
        admin_models,
        admin_work,
        tenants,
        sessions,
        webhooks,
        health,
    ):
        app.serve(group.router(gateway))
    docs.install(app)
    sign_in.install(app, gateway)
    console.install(app)
    _add_middleware(app, gateway)
    return app


@asynccontextmanager
async def _using_store(gateway: Gateway) -> AsyncIterator[None]:
    """Run batches, deliver webhooks and complete responses, until other gateways go on with them.

    Raises `StartupError`.
    """
    if gateway.settings.database_url is not None:
        if gateway.settings.files_url is None:
            # Other gateways of the database find the records of these files, but not their bytes.
            logger.warning("files are stored in the data directory, as WARREN_FILES_URL is not set")
        with suppress(Unavailable):
            await gateway.store.open_as_set()
    await gateway.key_directory.read_first()
    works = [BatchRunner(gateway).run, gateway.deliverer.run, ResponseCompleter(gateway).run]
    if gateway.sign_in is not None:
        await gateway.sign_in.endings.read_first()
        works.append(gateway.sign_in.endings.run)
    running = [asyncio.create_task(incidents.keep_running(work)) for work in works]
    try:
        yield
    finally:
        for task in running:
            task.cancel()
        _, left = await asyncio.wait(running, timeout=_CLEAN_UP_S)
        if left:
            reason = "database or storage do not answer; leases will expire"
            logger.warning("drain incomplete", extra={"reason": reason})


@asynccontextmanager
async def _recording_usage(gateway: Gateway) -> AsyncIterator[None]:
    """Record what requests have used, until all have ended, and the models; then close the
    store."""
    recorder = gateway.recorder
    running = [
        asyncio.create_task(incidents.keep_running(work))
        for work in (
            recorder.run,
            recorder.sweep,
            gateway.record_models,
            gateway.budgets.run,
            gateway.answers.sweep,
        )
    ]
    try:
        yield
    finally:
        try:
            await recorder.wait_written()
            for task in running:
                task.cancel()
            await asyncio.wait(running, timeout=_CLEAN_UP_S)
        finally:
            await gateway.store.close()


def _add_middleware(app: FastAPI, gateway: Gateway) -> None:
    """Add the middleware. The last middleware is the outermost, so even preflight responses have a
    request id."""
    app.add_middleware(
        Authentication,
        keys=gateway.keys,
        sign_in=gateway.sign_in,
        limits=gateway.limits,
        refusals=gateway.refusals,
        metrics=gateway.metrics,
    )
    if not gateway.keys.are_needed:
        app.add_middleware(KnownSites, settings=gateway.settings, metrics=gateway.metrics)
    app.add_middleware(ErrorBoundary, metrics=gateway.metrics)
    if gateway.settings.cors_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=gateway.settings.cors_origins,
            allow_methods=["GET", "POST", "DELETE"],
            allow_headers=["*"],
            expose_headers=[
                "x-request-id",
                "request-id",
                "x-stream-token",
                "x-cancel-token",
                CACHE_HEADER,
                "retry-after",
                "retry-after-ms",
                "x-should-retry",
                *RATE_HEADERS,
                IGNORED_TOOLS_HEADER,
                IGNORED_PARAMETERS_HEADER,
            ],
        )
    app.add_middleware(Traces)
    app.add_middleware(Paths)
    app.add_middleware(RequestIds)


async def _drain(gateway: Gateway) -> None:
    admission, grace_s = gateway.admission, gateway.settings.drain_grace_s
    admission.close()
    began = time.monotonic()
    fields: dict[str, object] = {"requests": admission.num_requests}
    logger.info("draining", extra={**fields, "at_most_s": grace_s})
    try:
        async with asyncio.timeout(grace_s):
            while not await _is_idle(gateway):
                left_s = round(began + grace_s - time.monotonic())
                fields = {"requests": admission.num_requests, "at_most_s": left_s}
                logger.info("still draining", extra=fields)
    except TimeoutError:
        shutting_down = ShuttingDown("The gateway is shutting down.")
        gateway.executions.end_all(shutting_down, lambda relay: True)
        gateway.relays.fail_all(shutting_down)
        await _at_most(_LAST_WORDS_S, admission.wait_idle(), "clients are not reading")
    await gateway.executions.close()
    gateway.relays.wait_for_nobody()
    await _at_most(
        _CLEAN_UP_S, gateway.relays.wait_closed(), "logs were not cleaned up and will expire"
    )
    logger.info("drained", extra={"seconds": round(time.monotonic() - began, 1)})


async def _is_idle(gateway: Gateway) -> bool:
    """Whether all requests have ended within the next few seconds."""
    waiting = asyncio.create_task(gateway.admission.wait_idle())
    try:
        done, _ = await asyncio.wait([waiting], timeout=_PROGRESS_INTERVAL_S)
        return bool(done)
    finally:
        waiting.cancel()


async def _at_most(seconds: float, work: Awaitable[None], trouble: str) -> None:
    """Run ``work`` with a time limit: a client may not read, and a broker may not respond."""
    try:
        async with asyncio.timeout(seconds):
            await work
    except TimeoutError:
        logger.warning("drain incomplete", extra={"reason": trouble})
