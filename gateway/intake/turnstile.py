"""Requests and lines of batches that wait until the limits of their API key admit them."""

import asyncio
import math
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import NamedTuple
from weakref import WeakValueDictionary

from prometheus_client import Gauge, Histogram

from gateway.intake.admission import Admission
from gateway.intake.keys.accepted import Keys
from gateway.intake.keys.api_key import ApiKey
from gateway.intake.limits import Grant, Limits
from gateway.intake.shared_amount import SharedAmount
from shared.backoff import drawn
from shared.errors import Cancelled, InvalidApiKey, QuotaExceeded, RateLimited, Unavailable
from shared.messages import GenerationJob, StopWork
from shared.telemetry.metrics import REQUEST_S, Catalog

_MAX_PAUSE_S = 0.1
"""A slot may become free at any time: answers have fewer tokens than estimated, and end."""
_WAITING_SHARE = 4
"""A divisor: at most a quarter of the requests of a gateway wait. Otherwise the limits of a key
would not keep its tenant from taking most of the gateway's slots."""


class Turnstile:
    """Admits the requests of a key in the order in which they came: small requests do not overtake
    a large request for ever."""

    def __init__(self, limits: Limits, clock: Callable[[], float] = time.time) -> None:
        self._limits = limits
        self._clock = clock
        self._turn = asyncio.Lock()
        self._refusal: RateLimited | None = None
        """The latest, of the request whose turn it is."""

    async def admit(
        self,
        stack: AsyncExitStack,
        key: Callable[[], ApiKey],
        num_tokens: int,
        job: GenerationJob | None,
        *,
        until: float = math.inf,
        is_batch_line: bool = False,
        report: Callable[[RateLimited], object] = lambda refusal: None,
    ) -> Grant:
        """Wait until `Limits.admit` admits a request, whose slot ``stack`` holds. ``key`` returns
        the key with its present limits, and ``report`` is called with each refusal.

        Raises as `Limits.admit`, but `RateLimited` only at the Unix time ``until``, or for a tenant
        without a budget.
        """
        try:
            async with asyncio.timeout(None if until == math.inf else until - self._clock()):
                await self._turn.acquire()
        except TimeoutError:
            raise self._refused_behind_others() from None
        try:
            while True:
                try:
                    admission = self._limits.admit(
                        key(), num_tokens, job, is_batch_line=is_batch_line
                    )
                    return await stack.enter_async_context(admission)
                except RateLimited as refusal:
                    report(refusal)
                    left_s = until - self._clock()
                    if left_s <= 0 or (isinstance(refusal, QuotaExceeded) and not is_batch_line):
                        raise
                    self._refusal = refusal
                    pause_s = drawn(min(refusal.retry_after_s, _MAX_PAUSE_S))
                    await asyncio.sleep(min(pause_s, left_s))
        finally:
            self._turn.release()

    def _refused_behind_others(self) -> RateLimited | Unavailable:
        if self._refusal is None:
            return Unavailable("The limits of this API key cannot be checked now.")
        return RateLimited(
            "Other requests of this API key waited for its limits until the deadline of this "
            "request.",
            limit=self._refusal.limit or "",
            kind=self._refusal.kind,
            retry_after_s=self._refusal.retry_after_s,
        )


class _Owner(NamedTuple):
    """The requests that share a turnstile."""

    tenant: str
    key_id: str
    is_detached: bool
    """Detached requests have a limit of their own, which may be reached for an hour, while the
    limits admit other requests."""


@dataclass(slots=True, eq=False)
class _Waiting:
    """A request that waits."""

    key: ApiKey
    is_stopped: bool = False


class Turnstiles:
    """The turnstiles of the keys whose requests wait at this gateway."""

    def __init__(
        self,
        limits: Limits,
        keys: Keys,
        admission: Admission,
        catalog: Catalog,
        *,
        max_requests: int,
    ) -> None:
        """``max_requests``: how many requests the gateway handles at once."""
        self._limits = limits
        self._keys = keys
        self._admission = admission
        self._places = SharedAmount(
            max(1, max_requests // _WAITING_SHARE), has_owners=keys.are_needed
        )
        self._by_key: WeakValueDictionary[_Owner, Turnstile] = WeakValueDictionary()
        self._all_waiting: set[_Waiting] = set()
        self._num_waiting: Gauge = catalog.gauge(
            "warren_gateway_limit_waiting",
            'Requests with "on_limit": "wait" that wait for the limits of their keys.',
        )
        self._waited_s: Histogram = catalog.histogram(
            "warren_gateway_limit_wait_seconds",
            'How long requests with "on_limit": "wait" waited for the limits of their keys, '
            "whether they were admitted or not.",
            REQUEST_S,
        )

    @asynccontextmanager
    async def admit(self, key: ApiKey, num_tokens: int, job: GenerationJob) -> AsyncIterator[Grant]:
        """`Limits.admit`, but wait for the limits until the job's deadline, unless too many
        requests wait. Raises `ShuttingDown` once the gateway shuts down, `InvalidApiKey` once the
        key is revoked, and `Cancelled` once its work is stopped."""
        assert job.deadline is not None
        if not self._places.take(key.tenant, 1):
            async with self._limits.admit(key, num_tokens, job) as grant:
                yield grant
            return
        owner = _Owner(key.tenant, key.key_id, job.is_detached)
        turnstile = self._by_key.setdefault(owner, Turnstile(self._limits))
        async with AsyncExitStack() as stack:
            with self._waiting(key) as waiting:
                grant = await turnstile.admit(
                    stack,
                    lambda: self._present(waiting),
                    num_tokens,
                    job,
                    until=job.deadline,
                    report=lambda refusal: self._admission.require_open(),
                )
            yield grant

    def stop(self, work: StopWork) -> None:
        """Cancel the requests that wait, as a gateway has asked all gateways."""
        for waiting in self._all_waiting:
            waiting.is_stopped |= work.covers(waiting.key.tenant, waiting.key.key_id)

    def _present(self, waiting: _Waiting) -> ApiKey:
        """The key with its limits of now; the same for a person who has signed in."""
        key = waiting.key
        if waiting.is_stopped:
            raise Cancelled("The request was cancelled while it waited.")
        if key.person or not key.key_id:
            return key
        known = self._keys.with_id(key.key_id)
        if known is None:
            raise InvalidApiKey("The API key was revoked while its request waited.")
        return known

    @contextmanager
    def _waiting(self, key: ApiKey) -> Iterator[_Waiting]:
        """Note that a request waits, which has taken a place."""
        waiting, began = _Waiting(key), time.monotonic()
        self._all_waiting.add(waiting)
        self._num_waiting.inc()
        try:
            yield waiting
        finally:
            self._all_waiting.remove(waiting)
            self._places.give_back(key.tenant, 1)
            self._num_waiting.dec()
            self._waited_s.observe(time.monotonic() - began)
