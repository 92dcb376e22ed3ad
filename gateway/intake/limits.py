"""The limits of API keys, which hold for all gateways together.

A gateway announces to all gateways what a request will use, and waits until it has received its own
announcement. By then it has counted everything that the others announced before, and admits the
request if it is within the limits. Only announcements that cross each other cause an error. Every
announcement states the gateway's total usage of a key, so the next one corrects the effect of a
lost one, or of a request that was not admitted. A gateway that starts asks the others for theirs.

A request of a key without limits is admitted at once, unless it is detached.
"""

import asyncio
import logging
import time
import uuid
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, suppress

from gateway.intake.key_usage import Claim, DetachedClaim, KeyUse, UsageLedger
from gateway.intake.keys.api_key import ApiKey
from shared import topology
from shared.bus.base import Bus, Message
from shared.errors import BusError, InvalidRequest, Unavailable, WarrenError
from shared.messages import (
    ChatPrompt,
    DetachedJob,
    EmbeddingJob,
    Ended,
    GenerationJob,
    Prompt,
    QuickJob,
    TextPrompt,
    TokenPrompt,
    UsageReport,
    encode,
)

logger = logging.getLogger(__name__)

RATE_HEADERS = tuple(
    f"x-ratelimit-{name}-{kind}"
    for kind in ("requests", "tokens")
    for name in ("limit", "remaining", "reset")
)
_ANSWER_TOKENS = 1024
"""The tokens of an answer without ``max_tokens``, until it has ended."""
_CHARS_PER_TOKEN = 4
_SETTLE_S = 0.05
"""Seconds that the other gateways have to answer one that has just begun to listen."""
_PATIENCE_S = 5.0
_MAX_LATE_S = 10.0
_RETRY_PAUSE_S = 0.5
_HEARTBEAT_S = 2.0


class Grant:
    """The slot of one admitted request."""

    def __init__(self, limits: "Limits", claim: Claim | None = None) -> None:
        """``claim``: what is counted; None if nothing is."""
        self.is_published = False
        """Whether the job was published, so that its tokens count."""
        self._limits = limits
        self._claim = claim

    def note_published(self, *, has_ended: bool = False) -> None:
        """Note that the job is published. If its log has ended already, because the client sent the
        request again, no worker reports the end of a detached job another time."""
        self.is_published = True
        if has_ended and self._claim is not None and self._claim.detached is not None:
            self._limits.end(self._claim.detached.request_id)

    def settle(self, num_tokens: int) -> None:
        """Count the actual tokens of prompts and answers. Those of a detached job are counted when
        its worker reports its end."""
        if self._claim is not None and self._claim.detached is None:
            self._limits.settle(self._claim, num_tokens)


class Limits:
    """Admits the requests of one gateway, within the limits of their keys at all gateways."""

    def __init__(self, bus: Bus, max_detached: int, clock: Callable[[], float] = time.time) -> None:
        """``max_detached``: of a tenant whose key does not say otherwise."""
        self._bus = bus
        self._max_detached = max_detached
        self._clock = clock
        self.name = uuid.uuid4().hex
        """The name of the gateway in `topology.usage_queue`."""
        self._ledger = UsageLedger(self.name)
        self._waiting: dict[Claim, asyncio.Future[bool]] = {}
        """Claims that are not decided yet, in order."""
        self._announced: dict[Claim, int] = {}
        """The number of the first announcement that has the claim."""
        self._detached: dict[str, Claim] = {}
        """The claims of detached jobs of this gateway, by request id."""
        self._changed: set[str] = set()
        """Ids of keys whose use must be announced to the other gateways."""
        self._ended: list[Ended] = []
        self._ends: dict[tuple[str, float], float] = {}
        """When workers reported the ends of the last seconds, by request id and deadline. A report
        that a gateway sent before it received one of them may arrive later."""
        self._news = asyncio.Event()
        self._report_number = 0
        """The number of the latest report."""
        self._must_request_reports = False
        """Whether the next report is to ask the other gateways for theirs."""
        self._must_send_full_report = False
        """Whether another gateway has asked for the use of all keys and for all detached jobs that
        are known here."""
        self._request_number = 0
        """The number of the report that asked the others for theirs; 0 if none is unanswered."""
        self._is_ready = asyncio.Event()

    @asynccontextmanager
    async def admit(
        self, key: ApiKey, num_tokens: int = 0, job: GenerationJob | None = None
    ) -> AsyncIterator[Grant]:
        """Hold the slot of a request of about ``num_tokens``. ``job`` is a detached job, which
        counts until it has ended.

        Raises `RateLimited`, `InvalidRequest` if the request exceeds a limit by itself, and
        `Unavailable` if the other gateways cannot be asked.
        """
        if job is None and not key.has_limits:
            yield Grant(self)
            return
        claim = Claim(key, self._clock(), num_tokens)
        if job is not None:
            assert job.deadline is not None
            counted = DetachedJob(job.tenant, job.deadline)
            claim.detached = DetachedClaim(job.request_id, counted)
            claim.max_detached = key.max_detached or self._max_detached
        require_possible(key, num_tokens)
        await self._wait_decided(claim)
        grant = Grant(self, claim)
        try:
            yield grant
        finally:
            self._leave(claim, is_published=grant.is_published)

    def check(self, key: ApiKey) -> None:
        """Raises `RateLimited` if the key's limits admit no request now, however small. Nothing is
        counted."""
        if key.has_limits:
            self._ledger.check(Claim(key, self._clock()), *self._waiting)

    def settle(self, claim: Claim, num_tokens: int) -> None:
        """Replace the estimated tokens of an admitted claim."""
        if claim.key.has_limits:
            self._ledger.settle(claim, num_tokens, self._clock())
            self._publish_usage_of(claim.key.key_id)

    def end(self, request_id: str) -> None:
        """Tell all gateways that a request was cancelled, which may be a detached one."""
        self._ledger.detached.pop(request_id, None)
        self._ended.append(Ended(request_id=request_id))
        self._news.set()

    def detached_of(self, tenant: str) -> list[str]:
        """The ids of the detached requests of a tenant that have not ended, at all gateways."""
        return [one for one, job in self._ledger.detached.items() if job.tenant == tenant]

    def headers(self, key: ApiKey) -> Iterator[tuple[bytes, bytes]]:
        """OpenAI's headers about the limits of a key."""
        for rate in self._ledger.rates(key, self._clock()):
            values = rate.limit, max(rate.limit - rate.used, 0), _duration(rate.reset_s)
            for name, value in zip(("limit", "remaining", "reset"), values, strict=True):
                yield f"x-ratelimit-{name}-{rate.kind}".encode(), str(value).encode()

    def use_of(self, key: ApiKey) -> KeyUse | None:
        """What a key uses at all gateways; None if it has no limits, because it is not counted."""
        return self._ledger.use_of(key.key_id, self._clock()) if key.has_limits else None

    def listen(self) -> None:
        """Request the reports of the other gateways, which may have been missed until now."""
        self._is_ready.clear()
        self._must_request_reports = True
        self._news.set()

    def hear(self, fact: UsageReport | Ended) -> None:
        """Record what a gateway or a worker has announced."""
        if isinstance(fact, Ended):
            return self._hear_end(fact)
        if fact.gateway != self.name:
            self._ledger.hear(fact.gateway, fact.keys, self._clock())
            going_on = {
                one: job
                for one, job in fact.detached.items()
                if (one, job.deadline) not in self._ends
            }
            self._ledger.detached.update(going_on)
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
        beats_at = loop.time() + _HEARTBEAT_S
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout_at(beats_at):
                    await self._news.wait()
            if loop.time() >= beats_at:
                beats_at = loop.time() + _HEARTBEAT_S
                self._forget_ends()
                self._publish_usage_of(*self._ledger.own_keys(self._clock()))
            self._news.clear()
            if (
                self._changed
                or self._ended
                or self._must_request_reports
                or self._must_send_full_report
            ):
                try:
                    await self._publish()
                except BusError as error:
                    # Requests that wait for it may have the time to hear the next one.
                    logger.warning("usage of API keys not announced", extra={"reason": error.code})
                    self._publish_usage_of(*(claim.key.key_id for claim in self._waiting))
                    self.listen()
                    await asyncio.sleep(_RETRY_PAUSE_S)
                    await self._bus.wait_connected()

    async def _wait_decided(self, claim: Claim) -> None:
        """Wait until the claim is admitted and counted."""
        self._ledger.check(claim, *self._waiting)
        decided: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        try:
            async with asyncio.timeout(_PATIENCE_S):
                await self._is_ready.wait()
                self._ledger.check(claim, *self._waiting)
                self._waiting[claim] = decided
                self._publish_usage_of(claim.key.key_id)
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
                if claim.detached is not None:
                    if claim.detached.request_id in self._ledger.detached:
                        # The first claim of the job has its tokens, and hears of its end.
                        claim.num_tokens = 0
                    else:
                        self._detached[claim.detached.request_id] = claim
                self._ledger.add(claim)
                decided.set_result(True)

    def _retract(self, claim: Claim) -> None:
        """Withdraw a claim that may have been announced to the other gateways. A job that was
        claimed before, by the same request, goes on."""
        self._publish_usage_of(claim.key.key_id)
        if claim.detached is not None:
            request_id = claim.detached.request_id
            is_first = self._detached.get(request_id) is claim
            if is_first or request_id not in self._ledger.detached:
                self.end(request_id)

    def _leave(self, claim: Claim, *, is_published: bool) -> None:
        self._ledger.leave(claim)
        if not is_published:
            self._ledger.settle(claim, 0, self._clock())
            self._retract(claim)
        self._publish_usage_of(claim.key.key_id)

    def _hear_end(self, ended: Ended) -> None:
        job = self._ledger.detached.pop(ended.request_id, None)
        if ended.num_tokens is not None:
            if job is not None:
                self._ends[ended.request_id, job.deadline] = self._clock()
            claim = self._detached.pop(ended.request_id, None)
            if claim is not None:
                self.settle(claim, ended.num_tokens)

    def _publish_usage_of(self, *key_ids: str) -> None:
        """Let the next report name the use of these keys."""
        if key_ids:
            self._changed.update(key_ids)
            self._news.set()

    async def _publish(self) -> None:
        """Raises `BusError`."""
        self._report_number += 1
        if self._must_request_reports or self._must_send_full_report:
            self._changed.update(self._ledger.own_keys(self._clock()))
        if self._must_request_reports:
            self._request_number = self._report_number
        for claim in self._waiting:
            self._announced.setdefault(claim, self._report_number)
        claims = list(self._waiting)
        detached = dict(self._ledger.detached) if self._must_send_full_report else {}
        detached.update(one.detached for one in claims if one.detached is not None)
        changed, was_full = self._changed, self._must_send_full_report
        usage = UsageReport(
            gateway=self.name,
            number=self._report_number,
            keys={key_id: self._ledger.own_usage(key_id, *claims) for key_id in changed},
            detached=detached,
            is_new=self._must_request_reports,
        )
        self._changed, self._must_request_reports, self._must_send_full_report = set(), False, False
        try:
            await self._bus.publish(topology.USAGE, Message(encode(usage)))
        except BusError:
            # Nothing else would name a key that is no longer used.
            self._changed |= changed
            self._must_send_full_report |= was_full
            raise
        while self._ended:
            await self._bus.publish(topology.USAGE, Message(encode(self._ended[0])))
            self._ended.pop(0)

    def _forget_ends(self) -> None:
        """Forget detached jobs whose end was never reported, and ends after which no late report is
        expected."""
        now = self._clock()
        self._ends = {one: at for one, at in self._ends.items() if at > now - _MAX_LATE_S}
        self._ledger.forget_detached(now)
        for request_id, claim in list(self._detached.items()):
            if claim.detached is not None and claim.detached.job.deadline < now:
                del self._detached[request_id]


def require_possible(key: ApiKey, num_tokens: int) -> None:
    """Raises `InvalidRequest` if the limits of the key never admit a request of about this many
    tokens."""
    if key.tokens_per_minute is not None and num_tokens > key.tokens_per_minute:
        raise InvalidRequest(
            f"The request has about {num_tokens} tokens, and this API key has "
            f"{key.tokens_per_minute} tokens per minute.",
            param="max_tokens",
        )


def tokens_of(job: GenerationJob) -> int:
    """About how many tokens the prompts and answers of a job have, at most."""
    answer = job.sampling.max_tokens
    num_answer_tokens = _ANSWER_TOKENS if answer is None else answer
    return _tokens_of_prompts(job.prompts) + num_answer_tokens * job.total_choices


def tokens_of_quick(job: QuickJob) -> int:
    """About how many tokens the prompts of a quick job have; 0 unless a model computes them."""
    return _tokens_of_prompts(job.prompts) if isinstance(job, EmbeddingJob) else 0


def _tokens_of_prompts(prompts: tuple[Prompt, ...]) -> int:
    return sum(map(_num_tokens, prompts))


def _num_tokens(prompt: Prompt) -> int:
    match prompt:
        case TokenPrompt():
            return len(prompt.token_ids)
        case TextPrompt():
            num_chars = len(prompt.text)
        case ChatPrompt():
            num_chars = sum(len(message.content) for message in prompt.messages)
    return -(-num_chars // _CHARS_PER_TOKEN)


def _duration(seconds: float) -> str:
    """The duration in OpenAI's format: ``6m0s``, ``1.5s``, ``20ms``."""
    if seconds < 1:
        return f"{round(seconds * 1000)}ms"
    minutes, rest = divmod(seconds, 60)
    return f"{minutes:.0f}m{rest:.0f}s" if minutes else f"{round(rest, 1):g}s"
