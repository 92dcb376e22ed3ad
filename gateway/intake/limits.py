"""The limits of API keys and tenants, which hold for all gateways together.

A gateway announces to all gateways what a request will use, and waits until it has received its own
announcement. By then it has counted everything that the others announced before, and admits the
request if it is within the limits. Only announcements that cross each other cause an error. Every
announcement states the gateway's total usage of a key or tenant, so the next announcement corrects
the effect of a lost announcement, or of a request that was not admitted. A gateway that starts asks
the other gateways for their usage.

A request counts as running until its job has ended. If its client leaves before, the job is
announced to all gateways as a job that goes on, and the worker reports its end to all of them.

A job that a publisher sends to a worker over AMQP counts in the same way, against the limits of its
tenant: the worker asks a gateway, which admits it like a request whose client has left at once.

A request of a key without limits, whose tenant has no limits either, is admitted at once, unless it
is detached.
"""

import asyncio
import logging
import math
import time
import uuid
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from typing import TypeVar

from starlette.exceptions import HTTPException

from gateway.intake.key_usage import (
    AccountUse,
    Claim,
    DetachedClaim,
    JobClaims,
    RequestWindows,
    UsageLedger,
    require_possible,
)
from gateway.intake.keys.api_key import ApiKey
from gateway.intake.keys.tenant_limits import account_id_of
from shared import topology
from shared.bus import retry
from shared.bus.base import Bus, Message
from shared.errors import BusError, RateLimited, RequestError, Unavailable, WarrenError
from shared.messages import (
    DetachedJob,
    Ended,
    GenerationJob,
    LeftJob,
    StopWork,
    UsageReport,
    encode,
)

logger = logging.getLogger(__name__)

RATE_HEADERS = tuple(
    f"x-ratelimit-{name}-{kind}"
    for kind in ("requests", "tokens")
    for name in ("limit", "remaining", "reset")
)
_SETTLE_S = 0.05
"""Seconds that the other gateways have to answer a gateway that has just begun to listen."""
_PATIENCE_S = 5.0
_MAX_LATE_S = 10.0
_RETRY_PAUSE_S = 0.5
_HEARTBEAT_S = 2.0
_MIN_ANY = 60
_ANY_PER_REQUEST = 10
"""Requests of any kind that a key may send to a gateway for each of its requests per minute:
requests that read or store something take less than generations."""
_MAX_DEFERRED = 960
_DEFERRED_BYTES = 64 << 10
"""A gateway reads so many bodies of at most this size in a minute for a key that is at its limits,
to learn whether their requests would wait. Larger bodies count several times. Each costs time, and
the key has none left; but those that wait must not be refused because others do not."""
_DROPPED_S = 5.0
"""Seconds for which a job still counts that was cancelled before its worker was heard of. A worker
that has begun reports its end earlier; otherwise the job never runs."""

_Job = TypeVar("_Job", DetachedJob, LeftJob)


class Grant:
    """The slot of an admitted request."""

    def __init__(self, limits: "Limits", claim: Claim | None = None) -> None:
        """``claim`` is counted; None if the request has no limits."""
        self.is_published = False
        """Whether the job was published, so that its tokens count."""
        self._limits = limits
        self._claim = claim

    def note_published(self, *, has_ended: bool = False) -> None:
        """Note that the job is published, maybe once more. If its log has ended already, because
        the client sent the request again, no worker reports its end another time."""
        if self._claim is not None:
            self._limits.note_published(self._claim, has_ended=has_ended, again=self.is_published)
        self.is_published = True

    def settle(self, num_tokens: int | None) -> None:
        """Note that the job has ended, with so many tokens of prompts and answers; None if its
        worker is to report them. A detached job ends when its worker reports its end."""
        if self._claim is not None and self._claim.detached is None:
            self._limits.settle(self._claim, num_tokens)

    def drop(self) -> None:
        """Note that the job is cancelled, and that no worker seems to have begun with it."""
        if self._claim is not None and self._claim.detached is None:
            self._limits.drop(self._claim)


@dataclass(slots=True)
class RequestAttempt:
    """A request that may be refused before it is admitted."""

    is_admitted: bool = False
    refusal: RateLimited | None = None
    """The error of a key whose limits admit no request now, while the request might wait for
    them."""

    def require_now(self) -> None:
        """Raises the error of a request that is not going to wait."""
        if self.refusal is not None:
            raise self.refusal


class Limits:
    """Admits the requests of a gateway, within the limits of their keys and tenants at all
    gateways."""

    def __init__(
        self,
        bus: Bus,
        max_detached: int,
        clock: Callable[[], float] = time.time,
        require_budget: Callable[[str], None] = lambda tenant: None,
        heartbeat_s: float = _HEARTBEAT_S,
        retry_pause_s: float = _RETRY_PAUSE_S,
    ) -> None:
        """``max_detached``: of a tenant, unless its limits or its key say otherwise.
        ``require_budget`` raises `QuotaExceeded` for a tenant that has spent its budget."""
        self._require_budget = require_budget
        self._bus = bus
        self._max_detached = max_detached
        self._clock = clock
        self._heartbeat_s = heartbeat_s
        self._retry_pause_s = retry_pause_s
        self.name = uuid.uuid4().hex
        """The name of the gateway in `topology.usage_queue`."""
        self._ledger = UsageLedger(self.name)
        self._waiting: dict[Claim, asyncio.Future[bool]] = {}
        """Claims that are not decided yet, in order."""
        self._announced: dict[Claim, int] = {}
        """The number of the first announcement that has the claim."""
        self._jobs = JobClaims()
        self._any = RequestWindows()
        self._deferred = RequestWindows()
        self._left: dict[str, LeftJob] = {}
        """The jobs of `UsageLedger.left` that the next report contains."""
        self._changed: set[str] = set()
        """Ids of accounts whose use must be announced to the other gateways."""
        self._ended: list[Ended] = []
        self._ends: dict[tuple[str, float], float] = {}
        """When workers reported the ends of the last seconds, by request id and deadline. A report
        that a gateway sent before it received such an end may arrive later."""
        self._news = asyncio.Event()
        self._report_number = 0
        """The number of the latest report."""
        self._must_request_reports = False
        """Whether the next report is to ask the other gateways for theirs."""
        self._must_send_full_report = False
        """Whether another gateway has asked for the use of all accounts and for all detached jobs
        that are known here."""
        self._request_number = 0
        """The number of the report that asked the others for theirs; 0 if none is unanswered."""
        self._is_ready = asyncio.Event()

    @asynccontextmanager
    async def admit(
        self,
        key: ApiKey,
        num_tokens: int = 0,
        job: GenerationJob | None = None,
        *,
        is_batch_line: bool = False,
    ) -> AsyncIterator[Grant]:
        """Hold the slot of a request of about ``num_tokens``. ``job`` is its generation, if the
        request is a generation, and counts until it has ended. The job of a batch's line is no
        detached request.

        Raises `RateLimited`, `InvalidRequest` if the request exceeds a limit by itself, and
        `Unavailable` if the other gateways cannot be asked.
        """
        self._require_budget(key.tenant)
        is_detached = job is not None and job.is_detached and not is_batch_line
        if not is_detached and not key.has_limits:
            yield Grant(self)
            return
        claim = Claim(key, self._clock(), num_tokens)
        if job is not None:
            assert job.deadline is not None
            claim.request_id, claim.ends_by = job.request_id, job.deadline
            if is_detached:
                counted = DetachedJob(job.tenant, job.deadline, key.key_id)
                claim.detached = DetachedClaim(job.request_id, counted)
                own, of_tenant = key.max_detached, key.of_tenant.max_detached
                claim.max_detached = own or of_tenant or self._max_detached
        require_possible(key, num_tokens)
        await self._wait_decided(claim)
        grant = Grant(self, claim)
        try:
            yield grant
        finally:
            self._leave(claim, is_published=grant.is_published)

    async def admit_published(
        self, key: ApiKey, request_id: str, num_tokens: int, ends_by: float
    ) -> None:
        """Admit a job that its publisher has sent to a worker over AMQP, and count it until the
        worker reports its end. ``key`` has the limits of the tenant. Raises as `admit`."""
        self._require_budget(key.tenant)
        if not key.has_limits:
            return
        claim = Claim(key, self._clock(), num_tokens, request_id=request_id, ends_by=ends_by)
        claim.is_of_publisher = True
        require_possible(key, num_tokens)
        await self._wait_decided(claim)
        self._leave(claim, is_published=True)

    @contextmanager
    def attempt(
        self, key: ApiKey, request_id: str = "", *, waiting_bytes: int = 0
    ) -> Iterator[RequestAttempt]:
        """Count a request that is refused as its client's fault before it is admitted. The id may
        be the id of a job that its client has sent before.

        Raises `RateLimited`, before anything is read, if the key's limits admit no request now,
        however small. If the request might wait, the error is `RequestAttempt.refusal`, because
        only its body of ``waiting_bytes`` says whether it does.
        """
        self._require_budget(key.tenant)
        attempt = RequestAttempt()
        if key.has_limits:
            claim = Claim(key, self._clock(), request_id=request_id)
            try:
                self._ledger.check(claim, *self._waiting)
            except RateLimited as refusal:
                if not (waiting_bytes and self._may_defer(key, waiting_bytes)):
                    raise
                attempt.refusal = refusal
        try:
            yield attempt
        except (RequestError, HTTPException):
            attempt.require_now()
            if key.has_rates and not attempt.is_admitted:
                refused = Claim(key, self._clock())
                self._ledger.add(refused)
                self._ledger.leave(refused)
                self._publish_usage_of(*refused.account_ids)
            raise

    def count_any(self, key: ApiKey) -> None:
        """Count a request of any kind at this gateway, before anything is done for it. Raises
        `RateLimited` if the key or its tenant has sent too many in the last minute."""
        for account in key.accounts:
            if account.requests_per_minute is not None:
                limit = max(_MIN_ANY, _ANY_PER_REQUEST * account.requests_per_minute)
                self._any.count(account, limit, self._clock())

    def _may_defer(self, key: ApiKey, num_bytes: int) -> bool:
        """Whether one more body may be read for a key that is at its limits."""
        num = math.ceil(num_bytes / _DEFERRED_BYTES)
        try:
            for account in key.accounts:
                self._deferred.count(account, _MAX_DEFERRED, self._clock(), num)
        except RateLimited:
            return False
        return True

    def note_published(self, claim: Claim, *, has_ended: bool, again: bool) -> None:
        """Note that the job of an admitted claim is published, or ``again`` after it had ended."""
        if again and claim.request_id:
            claim.has_ended = False
            self._jobs.add(claim)
        if claim.detached is None:
            self.end_left(claim.request_id)  # it counts with this claim again
        elif has_ended:
            self.end(claim.request_id)

    def settle(self, claim: Claim, num_tokens: int | None) -> None:
        """Note that the job of an admitted claim has ended. ``num_tokens`` replaces the estimate,
        unless it is None."""
        if claim.has_ended:
            return  # its worker has said so
        claim.has_ended = True
        if num_tokens is not None:
            first = self._jobs.end(claim.request_id) if claim.request_id else claim
            if first is not None:
                self._count(first, num_tokens)

    def drop(self, claim: Claim) -> None:
        """Note that the job of an admitted claim was cancelled before it had begun."""
        claim.is_dropped = True
        claim.ends_by = min(claim.ends_by, self._clock() + _DROPPED_S)

    def end(self, request_id: str) -> None:
        """Tell all gateways that the job of a request was cancelled or has ended, if it has no
        client."""
        self._ledger.end(request_id)
        self._left.pop(request_id, None)
        self._ended.append(Ended(request_id=request_id))
        self._news.set()

    def left_of(self, work: StopWork) -> list[str]:
        """The ids of the requests that are to be cancelled and go on without a client, at all
        gateways."""
        jobs: dict[str, DetachedJob | LeftJob] = {**self._ledger.detached, **self._ledger.left}
        return [
            request_id for request_id, job in jobs.items() if work.covers(job.tenant, job.key_id)
        ]

    def end_left(self, request_id: str) -> None:
        """`end` if the client of the job is known to have left."""
        if request_id in self._ledger.left:
            self.end(request_id)

    def hear_record(self, request_id: str) -> None:
        """`end` if the job goes on without its client, because its usage was recorded. The record
        is durable, while a broker that restarts loses what the worker has told the gateways."""
        if self._ledger.is_without_client(request_id):
            self.end(request_id)

    def headers(self, key: ApiKey) -> Iterator[tuple[bytes, bytes]]:
        """OpenAI's headers about the limits of a key and its tenant."""
        for rate in self._ledger.rates(key, self._clock()):
            values = rate.limit, max(rate.limit - rate.used, 0), _duration(rate.reset_s)
            for name, value in zip(("limit", "remaining", "reset"), values, strict=True):
                yield f"x-ratelimit-{name}-{rate.kind}".encode(), str(value).encode()

    def use_of(self, key: ApiKey) -> AccountUse | None:
        """The use of a key at all gateways; None if neither the key nor its tenant has limits,
        because it is not counted."""
        return self._ledger.use_of(key.key_id, self._clock()) if key.has_limits else None

    def use_of_tenant(self, tenant: str) -> AccountUse:
        """The use of a tenant with limits at all gateways."""
        return self._ledger.use_of(account_id_of(tenant), self._clock())

    def listen(self) -> None:
        """Request the reports of the other gateways, which may have been missed until now."""
        self._is_ready.clear()
        self._must_request_reports = True
        self._news.set()

    def hear(self, fact: UsageReport | Ended) -> None:
        """Record the announcement of a gateway or a worker."""
        if isinstance(fact, Ended):
            return self._hear_end(fact)
        if fact.gateway != self.name:
            self._ledger.hear(fact.gateway, fact.keys, self._clock())
            self._ledger.detached.update(self._going_on(fact.detached))
            self._ledger.left.update(self._going_on(fact.left))
            if fact.is_new:
                self._must_send_full_report = True
                self._news.set()
            return None
        if self._request_number and fact.number >= self._request_number:
            self._request_number = 0
            asyncio.get_running_loop().call_later(_SETTLE_S, self._is_ready.set)
        self._decide(fact.number)
        return None

    async def announce(self) -> None:
        """Tell the other gateways what changes, and all of it at intervals; never returns."""
        loop = asyncio.get_running_loop()
        beats_at = loop.time() + self._heartbeat_s
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout_at(beats_at):
                    await self._news.wait()
            if loop.time() >= beats_at:
                beats_at = loop.time() + self._heartbeat_s
                self._forget_ends()
                self._publish_usage_of(*self._ledger.own_accounts(self._clock()))
            self._news.clear()
            if (
                self._changed
                or self._ended
                or self._left
                or self._must_request_reports
                or self._must_send_full_report
            ):
                try:
                    await self._publish()
                except BusError as error:
                    # Requests that wait for this announcement may have the time to hear the next
                    # announcement.
                    logger.warning("usage of API keys not announced", extra={"reason": error.code})
                    for claim in self._waiting:
                        self._publish_usage_of(*claim.account_ids)
                    self.listen()
                    await retry.pause(self._bus, self._retry_pause_s)

    async def _wait_decided(self, claim: Claim) -> None:
        """Wait until the claim is admitted and counted."""
        self._ledger.check(claim, *self._waiting)
        decided: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        try:
            async with asyncio.timeout(_PATIENCE_S):
                await self._is_ready.wait()
                self._ledger.check(claim, *self._waiting)
                self._waiting[claim] = decided
                self._publish_usage_of(*claim.account_ids)
                await decided
        except TimeoutError:
            if not decided.done() or decided.cancelled():
                raise Unavailable("The limits of this API key cannot be checked now.") from None
            decided.result()  # decided in the same turn of the event loop
        except asyncio.CancelledError:
            if decided.done() and not decided.cancelled() and decided.exception() is None:
                self._leave(claim, is_published=False)
            raise
        finally:
            self._announced.pop(claim, None)
            if self._waiting.pop(claim, None) is not None:
                self._retract(claim)

    def _decide(self, number: int) -> None:
        """Decide the claims that were announced up to report ``number``, which all gateways have
        been sent."""
        for claim in [one for one, first in self._announced.items() if first <= number]:
            del self._announced[claim]
            decided = self._waiting.pop(claim)
            if decided.done():
                continue
            try:
                self._ledger.check(claim)
            except WarrenError as error:
                decided.set_exception(error)
                self._retract(claim)
            else:
                if claim.request_id:
                    self._claim_job(claim)
                self._ledger.add(claim)
                decided.set_result(True)

    def _claim_job(self, claim: Claim) -> None:
        """Note the job of an admitted claim, which the same request may have claimed before. A
        publisher may give several jobs the same request id, so each job counts."""
        is_known = self._ledger.is_without_client(claim.request_id)
        if claim.is_of_publisher:
            return self._jobs.add(claim)
        if is_known or self._jobs.is_claimed(claim.request_id):
            claim.is_repeated, claim.num_tokens = True, 0
            self._publish_usage_of(*claim.account_ids)
        if claim.detached is None or not is_known:
            self._jobs.add(claim)
        return None

    def _retract(self, claim: Claim) -> None:
        """Withdraw a claim that may have been announced to the other gateways. A job that was
        claimed before, by the same request, goes on."""
        self._publish_usage_of(*claim.account_ids)
        if claim.detached is not None:
            request_id = claim.detached.request_id
            if self._jobs.has(claim) or request_id not in self._ledger.detached:
                self.end(request_id)

    def _leave(self, claim: Claim, *, is_published: bool) -> None:
        self._ledger.leave(claim)
        if not is_published:
            self._ledger.settle(claim, 0, self._clock())
            self._retract(claim)
            self._jobs.remove(claim)
        elif claim.goes_on and claim.key.limits_concurrency:
            job = LeftJob(claim.key.key_id, claim.ends_by, claim.key.tenant)
            self._ledger.left[claim.request_id] = self._left[claim.request_id] = job
            self._news.set()
        self._publish_usage_of(*claim.account_ids)

    def _count(self, claim: Claim, num_tokens: int) -> None:
        if claim.key.has_limits:
            self._ledger.settle(claim, num_tokens, self._clock())
            self._publish_usage_of(*claim.account_ids)

    def _hear_end(self, ended: Ended) -> None:
        job = self._ledger.end(ended.request_id)
        if ended.num_tokens is not None:
            self._left.pop(ended.request_id, None)
            if job is not None:
                self._ends[ended.request_id, job.deadline] = self._clock()
            claim = self._jobs.end(ended.request_id)
            if claim is not None:
                self._count(claim, ended.num_tokens)
                if isinstance(job, LeftJob):
                    # The worker's message may reach another gateway before this gateway's report.
                    self.end(ended.request_id)

    def _going_on(self, jobs: Mapping[str, _Job]) -> dict[str, _Job]:
        """The jobs of a report whose ends were not reported before it arrived."""
        return {one: job for one, job in jobs.items() if (one, job.deadline) not in self._ends}

    def _publish_usage_of(self, *account_ids: str) -> None:
        """Let the next report name the use of these accounts."""
        if account_ids:
            self._changed.update(account_ids)
            self._news.set()

    async def _publish(self) -> None:
        """Raises `BusError`."""
        self._report_number += 1
        if self._must_request_reports or self._must_send_full_report:
            self._changed.update(self._ledger.own_accounts(self._clock()))
        if self._must_request_reports:
            self._request_number = self._report_number
        for claim in self._waiting:
            self._announced.setdefault(claim, self._report_number)
        claims = list(self._waiting)
        detached = dict(self._ledger.detached) if self._must_send_full_report else {}
        detached.update(one.detached for one in claims if one.detached is not None)
        left, self._left = self._left, {}
        changed, was_full = self._changed, self._must_send_full_report
        usage = UsageReport(
            gateway=self.name,
            number=self._report_number,
            keys={one: self._ledger.own_usage(one, *claims) for one in changed},
            detached=detached,
            left=dict(self._ledger.left) if was_full else left,
            is_new=self._must_request_reports,
        )
        self._changed, self._must_request_reports, self._must_send_full_report = set(), False, False
        try:
            await self._bus.publish(topology.USAGE, Message(encode(usage)))
        except BusError:
            # Nothing else would name an account that is no longer used.
            self._changed |= changed
            self._left = left | self._left
            self._must_send_full_report |= was_full
            raise
        while self._ended:
            await self._bus.publish(topology.USAGE, Message(encode(self._ended[0])))
            self._ended.pop(0)

    def _forget_ends(self) -> None:
        """Forget jobs whose end was never reported, and ends after which no late report is
        expected."""
        now = self._clock()
        self._ends = {one: at for one, at in self._ends.items() if at > now - _MAX_LATE_S}
        self._ledger.forget_jobs(now)
        for claim in self._jobs.forget(now):
            if claim.is_dropped:
                self._count(claim, 0)


def _duration(seconds: float) -> str:
    """The duration in OpenAI's format: ``6m0s``, ``1.5s``, ``20ms``."""
    if seconds < 1:
        return f"{round(seconds * 1000)}ms"
    minutes, rest = divmod(seconds, 60)
    return f"{minutes:.0f}m{rest:.0f}s" if minutes else f"{round(rest, 1):g}s"
