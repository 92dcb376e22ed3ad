"""All shared executions of a gateway: how a request joins one, returns to it and is cancelled."""

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, suppress
from itertools import chain

from prometheus_client import Counter, Gauge

from gateway.log.cursor import NOT_FOUND
from gateway.log.relay import LogRelay
from gateway.once.execution import ExecutionTerms, SharedExecution, Sources
from gateway.once.ids import ExecutionIds
from gateway.once.relay import SharedRelay
from shared import topology
from shared.bus.base import Message
from shared.errors import BusError, LogLost, StreamExpired, StreamNotFound, Unroutable, WarrenError
from shared.messages import Follow, GenerationJob, Release, encode
from shared.telemetry.metrics import Catalog

_EXPIRED = "This stream is no longer kept."
_LEAST_SHARE_LEFT = 0.5
"""A request joins an execution that has at least this share of the request's own time left."""


class Executions:
    """The shared executions that have clients at this gateway."""

    def __init__(self, key: bytes, sources: Sources, catalog: Catalog) -> None:
        """All gateways have the same ``key``."""
        self._ids = ExecutionIds(key)
        self._sources = sources
        self._running: dict[str, SharedExecution] = {}
        """The executions that requests join, by id."""
        self._failed: set[SharedExecution] = set()
        """Executions whose clients still read a failure, or may return, while another execution has
        begun for the requests that came later."""
        self.requests = _requests(catalog)
        """Requests that asked to be computed once, by model and result."""
        _gauge(catalog).set_function(lambda: len(self._running))

    def name(self, prefix: str, tenant: str, digest: str) -> tuple[str, str]:
        """The id of the execution of a request, and a new id for the stream of its client."""
        execution_id = self._ids.execution_id(prefix, tenant, digest)
        return execution_id, self._ids.stream_id(execution_id)

    def is_open_to(self, execution_id: str, created_at: float, deadline: float) -> bool:
        """Whether a request with these times, in Unix time, may join the execution: it would end
        with the execution's deadline, which is earlier than its own."""
        running = self._running.get(execution_id)
        if running is None or running.playback.is_complete or running.playback.has_failed:
            return True
        return running.ends_by - time.time() >= _LEAST_SHARE_LEFT * (deadline - created_at)

    @asynccontextmanager
    async def open(
        self, job: GenerationJob, terms: ExecutionTerms, *, has_ids: bool
    ) -> AsyncIterator[SharedRelay]:
        """Relay the execution of an equal request, or begin one with ``terms``. ``job`` is the
        request's own; ``has_ids``: its client can return."""
        claim = _claim(job.request_id, job.tenant)
        assert job.deadline is not None
        ends_by = asyncio.get_running_loop().time() + job.deadline - time.time()
        self._set_failed_aside(terms.job.request_id)
        shared = self._execution(terms.job.request_id)
        relay = self._relay(shared, claim, job, ends_by, has_ids=has_ids)
        shared.join(relay, terms)
        try:
            yield relay
        finally:
            shared.leave(relay)

    @asynccontextmanager
    async def resume(self, request_id: str, tenant: str | None) -> AsyncIterator[LogRelay]:
        """As `Relays.resume`, for all streams."""
        execution_id = self._ids.execution_of(request_id)
        if execution_id is None or not await self._exists(execution_id):
            async with self._sources.relays.resume(request_id, tenant) as own:
                yield own
            return
        claim = _claim(request_id, tenant)
        with suppress(BusError):  # the earlier connection, if there is one, goes on beside this
            await self._tell_all(claim)
        shared = self._execution(execution_id)
        relay = self._relay(shared, claim, None, float("inf"), has_ids=True)
        shared.join(relay, None)
        try:
            yield relay
        except (LogLost, Unroutable):
            raise StreamExpired(_EXPIRED) from None
        finally:
            shared.leave(relay)

    async def cancel(self, request_id: str, tenant: str | None) -> None:
        """As `Relays.cancel`, for all streams. An execution ends with its last client."""
        execution_id = self._ids.execution_of(request_id)
        if execution_id is None or not await self._exists(execution_id):
            await self._sources.relays.cancel(request_id, tenant)
            return
        own = (relay for relay in self.current() if relay.request_id == request_id)
        if any(tenant not in (None, relay.tenant) for relay in own):
            raise StreamNotFound(NOT_FOUND)
        await self._tell_all(_claim(request_id, tenant, is_cancelled=True))

    def obey(self, command: Release) -> bool:
        """Apply a command from any gateway; returns whether it concerns a shared execution's
        client."""
        for shared in self._all():
            if shared.holds(command.request_id):
                shared.obey(command)
                return True
        return False

    def copy(self, command: Follow) -> None:
        """Copy a log that this gateway reads to the gateway that asks for it."""
        shared = self._running.get(command.request_id)
        if shared is not None:
            shared.copy_to(command.reply_to)

    def current(self) -> Sequence[SharedRelay]:
        """The relays to clients."""
        return [relay for shared in self._all() for relay in shared.relays.values()]

    def end_all(self, error: WarrenError, is_meant: Callable[[LogRelay], bool]) -> list[str]:
        """End the streams of clients with ``error``; returns their ids."""
        ended = [relay for relay in self.current() if is_meant(relay)]
        for relay in ended:
            relay.fail(error)
        return [relay.request_id for relay in ended]

    def count(self, model: str, share: str) -> None:
        """Count a request that asked to be computed once."""
        self.requests.labels(model, share).inc()

    async def close(self) -> None:
        """Leave all logs to other gateways."""
        for shared in list(self._all()):
            await shared.close()

    def _all(self) -> Iterator[SharedExecution]:
        return chain(self._running.values(), self._failed)

    def _execution(self, execution_id: str) -> SharedExecution:
        shared = self._running.get(execution_id)
        if shared is None:
            shared = SharedExecution(execution_id, self._sources, self._forget)
            self._running[execution_id] = shared
        return shared

    def _set_failed_aside(self, execution_id: str) -> None:
        """Let the next request begin another execution if the current one has failed."""
        shared = self._running.get(execution_id)
        if shared is not None and shared.playback.has_failed:
            del self._running[execution_id]
            self._failed.add(shared)

    def _forget(self, shared: SharedExecution) -> None:
        self._failed.discard(shared)
        if self._running.get(shared.execution_id) is shared:
            del self._running[shared.execution_id]

    def _relay(
        self,
        shared: SharedExecution,
        claim: Release,
        job: GenerationJob | None,
        ends_by: float,
        *,
        has_ids: bool,
    ) -> SharedRelay:
        sources = self._sources
        log = sources.queues.named(claim.request_id)
        return SharedRelay(sources.bus, log, claim, shared.playback, job, ends_by, has_ids=has_ids)

    async def _exists(self, execution_id: str) -> bool:
        """Whether the answer of an execution can be read. Raises `BusError`."""
        if execution_id in self._running or await self._sources.shelf.has(execution_id):
            return True
        bus, key = self._sources.bus, topology.reply_key(execution_id)
        return (
            await bus.inspect(key) is not None
            or await topology.find_later_log(bus, key) is not None
        )

    async def _tell_all(self, command: Release) -> None:
        """Raises `BusError`."""
        await self._sources.bus.publish(topology.ALL_GATEWAYS, Message(encode(command)))


def _claim(request_id: str, tenant: str | None, *, is_cancelled: bool = False) -> Release:
    return Release(
        request_id=request_id,
        reader=secrets.token_hex(16),
        tenant=tenant,
        is_cancelled=is_cancelled,
        claimed_at=time.time(),
    )


def _requests(catalog: Catalog) -> Counter:
    return catalog.counter(
        "warren_gateway_exact_requests_total",
        "Requests that asked to be computed once, by result: hit (the answer was there), attached "
        "(to a running execution of an equal request), miss (computed for this request), or bypass "
        "(no other request can be equal).",
        "model",
        "result",
    )


def _gauge(catalog: Catalog) -> Gauge:
    return catalog.gauge(
        "warren_gateway_shared_executions",
        "Executions that have clients at this gateway and that equal requests can join.",
    )
