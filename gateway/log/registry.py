"""All relays of a gateway: how a log is opened, resumed and released.

* A new request declares its log, reads it, and publishes its job.
* A request with an Idempotency-Key may find an existing log. It writes `Accepted` and reads up to
  there; if the job has not been started by then, it is published.
* A client that reconnects reads the existing log, at this or another gateway.

A log has a single reader. A new reader announces itself to all gateways (`Release`). The current
reader releases the log or refuses with a reason (`Withheld`); a gateway that waits for the client
to return stops waiting.
"""

import asyncio
import logging
import secrets
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from contextlib import ExitStack, asynccontextmanager, contextmanager, suppress
from functools import partial
from typing import Any

import msgspec

from gateway.fleet.live_workers import LiveWorkers
from gateway.log.cursor import NOT_FOUND, Fate, LogFacts, Retention, do_nothing
from gateway.log.reading import EXPIRED, NODE_DOWN
from gateway.log.relay import LogRelay
from gateway.log.reply_queues import ReplyLog, ReplyQueues
from gateway.log.stalls import LOOK_INTERVAL_S, StallWatch
from shared import topology
from shared.bus.base import Bus, Message, Queue
from shared.errors import (
    BusError,
    IdempotencyMismatch,
    LogLost,
    QueueNotFound,
    StreamExpired,
    StreamNotFound,
    Unavailable,
    Unroutable,
    WarrenError,
)
from shared.messages import Accepted, GenerationJob, JobClass, Release, Withheld, encode
from shared.settings import GatewaySettings
from shared.telemetry import incidents

logger = logging.getLogger(__name__)

_SLOW_S = 1.0
"""Seconds. A broker that responds this slowly may also delay the heartbeats of workers."""
_EXECUTION_BITS = 53
_MAX_LOGS = 3
"""How many logs of a request may be lost before it is refused."""
_LOST = "The broker has lost this request: send it again."


class Relays:
    """The relays in progress, and the clients that may return."""

    def __init__(
        self,
        bus: Bus,
        queues: ReplyQueues,
        workers: LiveWorkers,
        settings: GatewaySettings,
        silence_s: float,
    ) -> None:
        """A worker without a heartbeat for ``silence_s`` is considered lost."""
        self._bus = bus
        self._workers = workers
        self._queues = queues
        self._settings = settings
        self._stalls = StallWatch(workers, silence_s)
        self._relays: dict[str, LogRelay] = {}
        self._departed: dict[str, tuple[LogRelay, asyncio.Future[None]]] = {}
        """Logs whose clients may return, by request id; the future ends the wait."""
        self._tasks: set[asyncio.Task[None]] = set()
        self.on_start: Callable[[LogRelay], object] = _ignore
        """Called when a worker has begun to write the log of a relay."""
        self.on_end: Callable[[LogRelay], object] = _ignore
        """Called when a relay leaves its log."""

    @asynccontextmanager
    async def open(
        self,
        log: ReplyLog,
        job: GenerationJob,
        facts: LogFacts,
        *,
        has_ids: bool = False,
        lane: JobClass = "interactive",
    ) -> AsyncIterator[LogRelay]:
        """Publish ``job`` and relay its log, or the log that its Idempotency-Key already has.

        ``has_ids``: the client receives event ids, with which it can return. ``lane`` is the class
        of the job.

        Raises `ModelNotFound`, `Overloaded`, `InvalidRequest`, `IdempotencyMismatch` and
        `BusError`, and `Unavailable` in place of a `LogLost` that leaves the context: no byte of
        the answer has been sent by then; `DeadlineExceeded` if the broker does not confirm that the
        request is accepted. The relay is closed in the background, so that no response
        waits for its queue to be deleted.
        """
        is_kept = bool(facts.body_hash) or job.is_detached
        retention = Retention.KEPT if is_kept else Retention.GRACE if has_ids else Retention.NONE
        with ExitStack() as opened:
            relay = await self._begin(log, job, facts, retention, opened)
            relay.lane = lane
            job = relay.job or job
            relay.repeats_earlier = relay.is_answered
            relay.is_first = not relay.repeats_earlier and job.publication == 0
            if not relay.repeats_earlier:
                await self._publish(relay, job)
            try:
                yield relay
            except LogLost:
                raise Unavailable(_LOST) from None

    @asynccontextmanager
    async def resume(self, request_id: str, tenant: str | None) -> AsyncIterator[LogRelay]:
        """Relay an existing log; ``tenant`` is None if the right to it is already proved.

        Reading raises `StreamExpired`, `StreamNotFound`, and `Unavailable` while another reader
        does not release the log.
        """
        relay = self._returning(_claim(request_id, tenant))
        with self._registered(relay):
            relay.start()
            try:
                yield relay
            except (LogLost, Unroutable):  # it was deleted before or while it was read
                raise StreamExpired(EXPIRED) from None

    async def cancel(self, request_id: str, tenant: str | None) -> None:
        """Cancel a job and delete its log, even if another gateway reads it. Raises as `resume`,
        and `BusError` if the log may not be deleted."""
        relay = self._returning(_claim(request_id, tenant, is_cancelled=True))
        await relay.find_log()
        if await self._bus.inspect(relay.log_name) is None:
            raise StreamExpired(EXPIRED)
        with self._registered(relay):
            relay.start()
            with suppress(StreamExpired, Unroutable):  # its reader was faster
                await relay.catch_up(Accepted(body_hash=""))
                if tenant is not None and relay.facts is None:
                    raise Unavailable("No worker has started on this request yet.")
                await relay.reading.end()

    def cancel_all(self, is_meant: Callable[[LogRelay], bool]) -> list[str]:
        """Cancel requests whose logs this gateway reads, or whose clients it waits for, in the
        background; returns their ids."""
        waiting = (relay for relay, _ in self._departed.values())
        relays = (*self._relays.values(), *waiting)
        request_ids = [relay.request_id for relay in relays if is_meant(relay)]
        for request_id in request_ids:
            self._spawn(self._cancel_own(request_id), request_id)
        return request_ids

    async def delete_log(self, request_id: str) -> None:
        """Delete the log of a request that has ended, if the broker still has it. Raises
        `BusError`."""
        log = self._queues.named(request_id)
        await log.find()
        await log.delete()

    def holds(self, request_id: str) -> bool:
        """Whether this gateway relays the log, or waits for its client."""
        return request_id in self._relays or request_id in self._departed

    def current(self) -> list[LogRelay]:
        """The relays in progress."""
        return list(self._relays.values())

    @property
    def logs(self) -> list[Queue]:
        """The logs of the relays in progress, and of clients that may return."""
        departed = (relay for relay, _ in self._departed.values())
        return [relay.queue for relay in (*self._relays.values(), *departed)]

    def slack_s(self, model: str, job_class: JobClass) -> float:
        """Seconds to the nearest deadline of the requests that no worker has started; the request
        timeout if there are none."""
        left = (left_s for _, left_s in self._waiting(model, job_class))
        return min(left, default=self._settings.request_timeout_s)

    def due_tokens(self, model: str, job_class: JobClass, horizons_s: Sequence[float]) -> list[int]:
        """For each horizon: about how many tokens the requests have, prompts and answers together,
        that no worker has started and whose deadlines are within so many seconds."""
        waiting = [(relay.num_tokens, left_s) for relay, left_s in self._waiting(model, job_class)]
        return [
            sum(num_tokens for num_tokens, left_s in waiting if left_s <= within_s)
            for within_s in horizons_s
        ]

    def _waiting(self, model: str, job_class: JobClass) -> Iterator[tuple[LogRelay, float]]:
        """The requests that no worker has started, and the seconds to their deadlines."""
        now = time.time()
        for relay in self._relays.values():
            job = relay.job
            if job is None or job.deadline is None or relay.is_answered:
                continue
            if (job.model, relay.lane) == (model, job_class):
                yield relay, job.deadline - now

    def obey(self, command: Release | Withheld) -> None:
        """Apply a command from any gateway, including this gateway."""
        relay = self._relays.get(command.request_id)
        is_own = relay is not None and relay.claim.reader == command.reader
        if isinstance(command, Withheld):
            if relay is not None and is_own:
                relay.give_up(_refusal(command.code))
        elif not is_own:
            try:
                self._let_go(command)
            except WarrenError as error:
                self._spawn(self._withhold(command, error.code), command.request_id)

    def fail_all(self, error: WarrenError) -> None:
        for relay in self._relays.values():
            relay.fail(error)

    def wait_for_nobody(self) -> None:
        """Stop waiting for clients, and leave their logs to other gateways."""
        for _, returned in self._departed.values():
            _resolve(returned)

    async def watch(self) -> None:
        """Publish jobs again whose workers stopped sending heartbeats; never returns."""
        while True:
            await asyncio.sleep(LOOK_INTERVAL_S)
            stalled = self._stalls.look(self._relays.values(), self._bus.is_connected)
            is_well = bool(stalled) and await self._is_broker_well()
            for relay in stalled:
                if self._relays.get(relay.request_id) is not relay:
                    continue  # it has ended meanwhile
                if not (is_well and await self._move(relay)):
                    self._stalls.retry(relay)

    async def wait_closed(self) -> None:
        """Wait until all ended relays are cleaned up."""
        while self._tasks:
            await asyncio.wait(self._tasks)

    async def _begin(
        self,
        log: ReplyLog,
        job: GenerationJob,
        facts: LogFacts,
        retention: Retention,
        opened: ExitStack,
    ) -> LogRelay:
        """Begin to relay a job's log, which ``opened`` closes.

        The end of an earlier request with the same key may delete the log meanwhile. Then it is
        declared again. Raises `Unavailable` if that happens each time, and as `open`.
        """
        claim = _claim(job.request_id, job.tenant, body_hash=facts.body_hash)
        known = None if facts.body_hash else facts
        is_kept = retention is Retention.KEPT
        for _ in range(_MAX_LOGS):
            try:
                log.is_used = True
                await log.declare()
                relay = LogRelay(self._bus, log, claim, known, _loop_time(job.deadline), retention)
                opened.enter_context(self._registered(relay))
                relay.start()
                relay.job = await self._accept(relay, job) if is_kept else job
            except (LogLost, QueueNotFound):
                opened.close()
                log = log.renewed()
            else:
                return relay
        raise Unavailable(_LOST)

    def _returning(self, claim: Release) -> LogRelay:
        settings = self._settings
        log = self._queues.named(claim.request_id)
        # The job has its own deadline; the deadline of the relay is for a job that is never
        # started.
        timeout_s = max(settings.request_timeout_s, settings.detach_ttl_s)
        return LogRelay(self._bus, log, claim, None, _loop_time(time.time() + timeout_s))

    async def _accept(self, relay: LogRelay, job: GenerationJob) -> GenerationJob:
        """Write `Accepted` to the log, and read the `Accepted` events of other gateways.

        Returns the job as it would have to be published now. Raises `IdempotencyMismatch`, and
        `LogLost` if the log has disappeared: deleted, or lost in a crash of the broker.
        """
        body_hash = relay.claim.body_hash
        execution = secrets.randbits(_EXECUTION_BITS) if body_hash else 0
        accepted = Accepted(body_hash=body_hash, context=job.context, execution=execution)
        try:
            await relay.catch_up(accepted)
        except (StreamExpired, Unroutable):
            # Its name may belong to another log soon, which is not this relay's to delete.
            relay.give_up(StreamExpired(EXPIRED))
            raise LogLost(_LOST) from None
        if relay.body_hash != body_hash:
            error = _refusal(IdempotencyMismatch.code)
            relay.fail(error)
            raise error
        # Each gateway that accepted it before may have published it, too.
        publication = max(0, relay.cursor.num_accepted - 1)
        execution = relay.cursor.reader.execution
        return msgspec.structs.replace(job, publication=publication, execution=execution)

    async def _publish(self, relay: LogRelay, job: GenerationJob) -> None:
        await self._workers.publish(job, relay.log_name, relay.lane)

    async def _is_broker_well(self) -> bool:
        try:
            async with asyncio.timeout(_SLOW_S):
                await self._bus.inspect(topology.DEAD_LETTERS.name)
        except (BusError, TimeoutError):
            return False
        return True

    async def _move(self, relay: LogRelay) -> bool:
        """Help a stalled relay; returns whether that was possible."""
        if relay.job is not None:
            return await self._publish_again(relay, relay.job)
        if self._stalls.is_stranded(relay):  # still
            # The rest of the answer may be on the node that is down. It is found there once the
            # node has returned and the log that was recreated has expired.
            logger.warning("stream waits for its node", extra={"request_id": relay.request_id})
            relay.give_up(Unavailable(NODE_DOWN))
        return True

    async def _publish_again(self, relay: LogRelay, job: GenerationJob) -> bool:
        """Returns whether the job was published."""
        publication = max(job.publication, relay.cursor.publication) + 1
        relay.job = job = msgspec.structs.replace(job, publication=publication)
        facts = {"request_id": relay.request_id, "worker": relay.worker}
        logger.warning("worker silent, job published again", extra=facts)
        try:
            await self._publish(relay, job)
        except WarrenError as error:
            logger.warning("not published", extra={**facts, "reason": error.code})
        except Exception as error:  # noqa: BLE001 (the other relays must be served)
            incidents.report("request", "job not published again", error, **facts)
        else:
            return True
        return False

    @contextmanager
    def _registered(self, relay: LogRelay) -> Iterator[None]:
        self._let_go(relay.claim, is_local=True)
        self._relays[relay.request_id] = relay
        relay.cursor.on_start = partial(self.on_start, relay)
        try:
            yield
        finally:
            relay.cursor.on_start = do_nothing  # it would keep the relay, in a cycle
            if self._relays.get(relay.request_id) is relay:
                del self._relays[relay.request_id]
            self._part(relay)

    def _let_go(self, release: Release, *, is_local: bool = False) -> None:
        """Release a log, or stop waiting for its client, if this gateway has it. Raises the error
        with which it is withheld."""
        relay = self._relays.get(release.request_id)
        departed = self._departed.get(release.request_id)
        # A reader that has not attached yet is newer than a remote request for the log, so the
        # request does not concern it.
        if relay is not None and (is_local or relay.reading.has_attached):
            self._let_go_of(relay, release, is_local=is_local)
        elif departed is not None:
            _require_no_objection(departed[0], release)
            _resolve(departed[1])

    def _let_go_of(self, relay: LogRelay, release: Release, *, is_local: bool) -> None:
        """Release the log of a current relay. Raises as `_let_go`."""
        if not release.is_cancelled:
            if relay.is_overtaken(release):
                return
            if relay.reading.has_only_copy and is_local:
                raise _refusal(Unavailable.code)
            if relay.reading.is_recreating and not is_local:
                return  # it is asked again until the log can be read
        _require_no_objection(relay, release)
        relay.release(release)
        if release.is_cancelled and relay.has_proved_its_right:
            # Immediately, because a client that does not read may hold the relay for long.
            self._spawn(self._end(relay), relay.request_id)

    async def _withhold(self, release: Release, code: str) -> None:
        withheld = Withheld(request_id=release.request_id, reader=release.reader, code=code)
        with suppress(BusError):
            await self._bus.publish(topology.ALL_GATEWAYS, Message(encode(withheld)))

    def _part(self, relay: LogRelay) -> None:
        """Leave a log according to its fate, in the background."""
        self.on_end(relay)
        fate = relay.fate
        if fate is not Fate.WAITS or not self._settings.disconnect_grace_s:
            self._spawn(self._close(relay, is_end=fate is not Fate.STAYS), relay.request_id)
            return
        returned = asyncio.get_running_loop().create_future()
        self._departed[relay.request_id] = relay, returned
        self._spawn(self._close_later(relay, returned), relay.request_id)

    async def _close(self, relay: LogRelay, *, is_end: bool) -> None:
        try:
            if is_end:
                # Otherwise the log expires, and the worker cancels the job for lack of a reader.
                await self._end(relay)
        finally:
            await relay.stop()

    async def _cancel_own(self, request_id: str) -> None:
        with suppress(BusError, StreamExpired, StreamNotFound):  # it has just ended
            await self.cancel(request_id, None)

    async def _end(self, relay: LogRelay) -> None:
        with suppress(BusError):
            await relay.reading.end()

    async def _close_later(self, relay: LogRelay, returned: "asyncio.Future[None]") -> None:
        try:
            await relay.stop()
            await asyncio.wait([returned], timeout=self._settings.disconnect_grace_s)
        finally:
            if self._departed.get(relay.request_id, (None,))[0] is relay:
                del self._departed[relay.request_id]
        if returned.done():
            return
        with suppress(BusError):
            # Succeeds only if there is no other reader; otherwise the client has returned
            # elsewhere.
            async with self._bus.consume(relay.log_name, prefetch=1, is_exclusive=True):
                await relay.reading.end()

    def _spawn(self, work: Coroutine[Any, Any, None], request_id: str) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(partial(self._ended, request_id))

    def _ended(self, request_id: str, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            incidents.report("request", "log not cleaned up", error, request_id=request_id)


def _claim(
    request_id: str, tenant: str | None, *, body_hash: str = "", is_cancelled: bool = False
) -> Release:
    return Release(
        request_id=request_id,
        reader=secrets.token_hex(16),
        tenant=tenant,
        body_hash=body_hash,
        is_cancelled=is_cancelled,
        claimed_at=time.time(),
    )


def _require_no_objection(relay: LogRelay, release: Release) -> None:
    code = relay.objection(release)
    if code is not None:
        raise _refusal(code)


def _refusal(code: str) -> WarrenError:
    if code == IdempotencyMismatch.code:
        return IdempotencyMismatch("This Idempotency-Key was used with another body.")
    if code == Unavailable.code:
        return Unavailable("This stream is moving to another node of the broker.")
    return StreamNotFound(NOT_FOUND)


def _ignore(relay: LogRelay) -> None:
    pass


def _resolve(future: "asyncio.Future[None]") -> None:
    if not future.done():
        future.set_result(None)


def _loop_time(deadline: float | None) -> float:
    """A Unix time in the event loop's time."""
    if deadline is None:
        return float("inf")
    return asyncio.get_running_loop().time() + deadline - time.time()
