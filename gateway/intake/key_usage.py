"""The usage of API keys and tenants in the last minute at all gateways, and whether a request fits
in.

Counts are kept for each second, so that any 60 seconds stay within a limit. Nothing here has a
clock or does I/O.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from gateway.intake.keys.api_key import ApiKey
from gateway.intake.keys.tenant_limits import Account, account_id_of
from shared.errors import InvalidRequest, RateLimited
from shared.messages import DetachedJob, KeyUsage, LeftJob

_WINDOW_S = 61
"""A minute, and the second that has begun."""
_SILENCE_S = 10.0
"""Seconds after which the running requests of a silent gateway are not counted any more."""
_AHEAD_S = 10.0
"""Seconds. Usage that lies further in the future was counted before the clock was set back: claims
wait less long, and the clocks of gateways differ by less."""
_BUSY_RETRY_S = 1.0


class DetachedClaim(NamedTuple):
    """A detached job that a request claims."""

    request_id: str
    job: DetachedJob
    """The job that counts against its tenant."""


@dataclass(slots=True, eq=False)
class Claim:
    """The use of a request."""

    key: ApiKey
    at: float
    """When it came, a Unix time."""
    num_tokens: int = 0
    """An estimate, until the answer has ended."""
    detached: DetachedClaim | None = None
    """None if the job is not detached."""
    max_detached: int = 0
    request_id: str = ""
    """The id of a generation, whose worker reports its end; otherwise empty."""
    ends_by: float = 0.0
    """When a generation ends at the latest, a Unix time."""
    is_repeated: bool = False
    """Whether the same request has claimed the generation before, and that claim has its tokens."""
    is_of_publisher: bool = False
    """Whether it is a job over AMQP, which counts even if another job has the same request id."""
    is_dropped: bool = False
    """Whether the generation was cancelled before it had begun."""
    has_ended: bool = False
    """Whether the generation has ended."""
    account_ids: tuple[str, ...] = field(init=False)
    """Whose use it adds to."""

    def __post_init__(self) -> None:
        self.account_ids = tuple(account.account_id for account in self.key.accounts)

    @property
    def goes_on(self) -> bool:
        """Whether this is a generation that is not detached and has not ended."""
        return bool(self.request_id) and self.detached is None and not self.has_ended

    @property
    def second(self) -> int:
        return math.floor(self.at)


@dataclass(slots=True)
class _Tally:
    """The use of an account at a gateway."""

    seconds: dict[int, tuple[int, int]] = field(default_factory=dict)
    num_running: int = 0

    def add(self, second: int, num_requests: int, num_tokens: int) -> None:
        requests, tokens = self.seconds.get(second, (0, 0))
        self.seconds[second] = requests + num_requests, max(tokens + num_tokens, 0)

    def forget(self, now: float) -> None:
        oldest = math.floor(now) - _WINDOW_S
        for second in [one for one in self.seconds if not oldest < one <= now + _AHEAD_S]:
            del self.seconds[second]


@dataclass(slots=True)
class _Gateway:
    tallies: dict[str, _Tally] = field(default_factory=dict)
    """The use of each API key and tenant, by the id of its account."""
    heard_at: float = 0.0


@dataclass(frozen=True, slots=True)
class Rate:
    """The state of a limit."""

    kind: str
    """``requests`` or ``tokens``."""
    limit: int
    used: int
    reset_s: float
    """Seconds until nothing of it is used."""


class AccountUse(NamedTuple):
    """The use of a key or a tenant with limits at all gateways."""

    num_requests: int
    """In the last minute."""
    num_tokens: int
    """The tokens of the last minute. The tokens of unfinished answers are estimated."""
    num_running: int
    """Requests in flight, and jobs that go on although their clients have left."""


def require_possible(key: ApiKey, num_tokens: int) -> None:
    """Raises `InvalidRequest` if the limits of the key and its tenant never admit a request of
    about this many tokens. The worker, which knows the number, checks
    `GenerationJob.max_total_tokens`."""
    for account in key.accounts:
        limit = account.tokens_per_minute
        if limit is not None and num_tokens > limit:
            raise InvalidRequest(
                f"The request has about {num_tokens} tokens, and {account.name} has {limit} tokens "
                "per minute.",
                param="max_tokens",
            )


class JobClaims:
    """The claims of a gateway's generations that have not ended, by request id. A request that is
    sent again claims the same job."""

    def __init__(self) -> None:
        self._claims: dict[str, list[Claim]] = {}

    def add(self, claim: Claim) -> None:
        claims = self._claims.setdefault(claim.request_id, [])
        if claim not in claims:
            claims.append(claim)

    def has(self, claim: Claim) -> bool:
        return claim in self._claims.get(claim.request_id, [])

    def is_claimed(self, request_id: str) -> bool:
        return request_id in self._claims

    def remove(self, claim: Claim) -> None:
        """Remove a claim of a job, which goes on if it has others."""
        claims = self._claims.get(claim.request_id, [])
        if claim in claims:
            claims.remove(claim)
        if not claims:
            self._claims.pop(claim.request_id, None)

    def end(self, request_id: str) -> Claim | None:
        """Record that a job has ended; returns the claim that has its tokens, if this gateway has
        it."""
        claims = self._claims.pop(request_id, [])
        for claim in claims:
            claim.has_ended = True
        return next((claim for claim in claims if not claim.is_repeated), None)

    def forget(self, before: float) -> list[Claim]:
        """Forget the jobs that should have ended ``before`` this Unix time; returns the claims that
        have their tokens."""
        late = [
            request_id
            for request_id, claims in self._claims.items()
            if all(claim.ends_by < before for claim in claims)
        ]
        return [claim for request_id in late if (claim := self.end(request_id)) is not None]


class RequestWindows:
    """The requests of any kind that each account has sent to this gateway in the last minute."""

    def __init__(self) -> None:
        self._tallies: dict[str, _Tally] = {}

    def count(self, account: Account, limit: int, now: float, num: int = 1) -> None:
        """Count a request ``num`` times. Raises `RateLimited` if more than ``limit``
        would be counted."""
        tally = self._tallies.setdefault(account.account_id, _Tally())
        tally.forget(now)
        seconds = {second: requests for second, (requests, _) in tally.seconds.items()}
        used = sum(seconds.values())
        if used + num > limit:
            raise _refusal(
                account,
                "requests_per_minute",
                _says("requests of any kind per minute", account, limit, used, num),
                retry_after_s=_until_free(seconds, used + num - limit, now),
            )
        tally.add(math.floor(now), num, 0)


class UsageLedger:
    """The use of all keys and tenants. ``own`` is the gateway that admits.

    The use of a request is counted for its key, and for its tenant if the tenant has limits.
    """

    def __init__(self, own: str) -> None:
        self.detached: dict[str, DetachedJob] = {}
        """The detached jobs that have not ended, by request id."""
        self.left: dict[str, LeftJob] = {}
        """The jobs of keys with `ApiKey.limits_concurrency` that go on without their clients, by
        request id."""
        self._own = own
        self._gateways = {own: _Gateway(heard_at=math.inf)}

    def check(self, claim: Claim, *before: Claim) -> None:
        """Raises `RateLimited` unless the claim fits in after all that is counted and ``before``,
        other claims that are not counted yet."""
        if claim.detached is not None:
            self._check_detached(claim, *before)
        for account in claim.key.accounts:
            self._check_account(
                account, claim, [one for one in before if account.account_id in one.account_ids]
            )

    def add(self, claim: Claim) -> None:
        """Count an admitted claim."""
        for tally in self._own_tallies(claim):
            tally.add(claim.second, 1, claim.num_tokens)
            tally.num_running += 1
        if claim.detached is not None:
            self.detached.setdefault(claim.detached.request_id, claim.detached.job)

    def settle(self, claim: Claim, num_tokens: int, now: float) -> None:
        """Replace the estimate of an admitted claim. Unused tokens are returned to the second in
        which they were counted, and additional tokens are counted now."""
        change, claim.num_tokens = num_tokens - claim.num_tokens, num_tokens
        second = claim.second if change < 0 else math.floor(now)
        for tally in self._own_tallies(claim):
            tally.add(second, 0, change)

    def leave(self, claim: Claim) -> None:
        """Count a request as no longer running."""
        for tally in self._own_tallies(claim):
            tally.num_running -= 1

    def own_usage(self, account_id: str, *claims: Claim) -> KeyUsage:
        """The use that this gateway has admitted for an account, and ``claims`` in addition."""
        tally = self._own_tally(account_id)
        seconds, num_running = dict(tally.seconds), tally.num_running
        for claim in claims:
            if account_id in claim.account_ids:
                requests, tokens = seconds.get(claim.second, (0, 0))
                seconds[claim.second] = requests + 1, tokens + claim.num_tokens
                num_running += 1
        return KeyUsage(seconds, num_running)

    def own_accounts(self, now: float) -> list[str]:
        """The ids of the accounts that this gateway has admitted requests of; forgets the
        others."""
        tallies = self._gateways[self._own].tallies
        for account_id, tally in list(tallies.items()):
            tally.forget(now)
            if not tally.seconds and not tally.num_running:
                del tallies[account_id]
        return list(tallies)

    def is_without_client(self, request_id: str) -> bool:
        """Whether the job of a request goes on without its client."""
        return request_id in self.detached or request_id in self.left

    def end(self, request_id: str) -> DetachedJob | LeftJob | None:
        """Forget a job that has ended; returns it if it was detached, or its client had left."""
        left = self.left.pop(request_id, None)
        return self.detached.pop(request_id, None) or left

    def forget_jobs(self, now: float) -> None:
        """Forget jobs whose deadline has passed, although nobody has reported their ends."""
        self.detached = {one: job for one, job in self.detached.items() if job.deadline >= now}
        self.left = {one: job for one, job in self.left.items() if job.deadline >= now}

    def hear(self, gateway: str, usage: dict[str, KeyUsage], now: float) -> None:
        """Record the use that another gateway reports of the accounts that it names."""
        self._forget(now)
        heard = self._gateways.setdefault(gateway, _Gateway())
        heard.heard_at = now
        for account_id, one in usage.items():
            heard.tallies[account_id] = _Tally(dict(one.seconds), one.num_running)

    def rates(self, key: ApiKey, now: float) -> Iterator[Rate]:
        """The state of the limits for each minute: for each kind, the limit of the key or of the
        tenant, whichever has less left."""
        for index, kind in enumerate(_KINDS):
            rates = (self._rate(account, kind, index, now) for account in key.accounts)
            known = [rate for rate in rates if rate is not None]
            if known:
                yield min(known, key=lambda rate: rate.limit - rate.used)

    def use_of(self, account_id: str, now: float) -> AccountUse:
        requests, tokens = (self._seconds(account_id, now, index) for index in range(len(_KINDS)))
        num_running = self._num_attended(account_id, now) + self._num_left(account_id, now)
        return AccountUse(sum(requests.values()), sum(tokens.values()), num_running)

    def _check_account(self, account: Account, claim: Claim, before: list[Claim]) -> None:
        """Raises `RateLimited` unless the claim is within the limits of ``account``, whose claims
        ``before`` are not counted yet."""
        account_id, now = account.account_id, claim.at
        if account.max_concurrent is not None:
            # A request that is sent again is the same job.
            num_left = self._num_left(account_id, now, claim.request_id)
            num_running = len(before) + self._num_attended(account_id, now) + num_left
            if num_running >= account.max_concurrent:
                raise _refusal(
                    account,
                    "max_concurrent",
                    _says("concurrent requests", account, account.max_concurrent, num_running, 1),
                    retry_after_s=_BUSY_RETRY_S,
                )
        for index, kind in enumerate(_KINDS):
            limit = _limit(account, kind)
            if limit is None:
                continue
            wanted = (1, claim.num_tokens)[index]
            claimed = sum((1, one.num_tokens)[index] for one in before)
            seconds = self._seconds(account_id, now, index)
            used = claimed + sum(seconds.values())
            if used + wanted > limit:
                raise _refusal(
                    account,
                    f"{kind}_per_minute",
                    _says(f"{kind} per minute", account, limit, used, wanted),
                    kind=kind,
                    retry_after_s=_until_free(seconds, used + wanted - limit, now),
                )

    def _rate(self, account: Account, kind: str, index: int, now: float) -> Rate | None:
        limit = _limit(account, kind)
        if limit is None:
            return None
        seconds = self._seconds(account.account_id, now, index)
        newest = max((second for second, num in seconds.items() if num), default=None)
        reset_s = 0.0 if newest is None else max(newest + _WINDOW_S - now, 0.0)
        return Rate(kind, limit, sum(seconds.values()), reset_s)

    def _num_left(self, account_id: str, now: float, but: str = "") -> int:
        """The jobs of an account whose clients have left, without the job of request ``but``."""
        return sum(
            account_id in (job.key_id, account_id_of(job.tenant))
            and job.deadline >= now
            and request_id != but
            for request_id, job in self.left.items()
        )

    def _num_attended(self, account_id: str, now: float) -> int:
        return sum(tally.num_running for tally in self._tallies(account_id, now))

    def _check_detached(self, claim: Claim, *before: Claim) -> None:
        assert claim.detached is not None
        own_id, tenant = claim.detached.request_id, claim.detached.job.tenant
        self.forget_jobs(claim.at)
        # A request that is sent again is the same job.
        detached = self.detached | dict(one.detached for one in before if one.detached)
        num_detached = sum(
            job.tenant == tenant for request_id, job in detached.items() if request_id != own_id
        )
        if num_detached >= claim.max_detached:
            limit, name = claim.max_detached, f"the tenant {tenant}" if tenant else "this gateway"
            raise RateLimited(
                f"Rate limit reached for unfinished detached requests of {name}: Limit {limit}, "
                f"Used {num_detached}, Requested 1.",
                limit="max_detached",
                retry_after_s=_BUSY_RETRY_S,
            )

    def _seconds(self, account_id: str, now: float, index: int) -> dict[int, int]:
        """The use in each second, at all gateways."""
        seconds: dict[int, int] = {}
        for tally in self._tallies(account_id, now):
            for second, numbers in tally.seconds.items():
                seconds[second] = seconds.get(second, 0) + numbers[index]
        return seconds

    def _tallies(self, account_id: str, now: float) -> Iterator[_Tally]:
        for name, gateway in self._gateways.items():
            tally = gateway.tallies.get(account_id)
            if tally is not None:
                tally.forget(now)
                if name != self._own and gateway.heard_at > now + _AHEAD_S:
                    gateway.heard_at = now
                if now - gateway.heard_at > _SILENCE_S:
                    tally.num_running = 0
                yield tally

    def _own_tallies(self, claim: Claim) -> Iterator[_Tally]:
        return map(self._own_tally, claim.account_ids)

    def _own_tally(self, account_id: str) -> _Tally:
        return self._gateways[self._own].tallies.setdefault(account_id, _Tally())

    def _forget(self, now: float) -> None:
        """Forget gateways that have been silent for longer than anything counts."""
        for name, gateway in list(self._gateways.items()):
            if now - gateway.heard_at > _WINDOW_S:
                del self._gateways[name]


_KINDS = ("requests", "tokens")


def _limit(account: Account, kind: str) -> int | None:
    return account.requests_per_minute if kind == "requests" else account.tokens_per_minute


def _until_free(seconds: dict[int, int], num_wanted: int, now: float) -> float:
    """Seconds until the oldest seconds, which together have this many, count no longer."""
    for second in sorted(seconds):
        num_wanted -= seconds[second]
        if num_wanted <= 0:
            return max(second + _WINDOW_S - now, 0.001)
    return _WINDOW_S  # what claims it is not admitted yet


def _refusal(
    account: Account, limit: str, message: str, *, retry_after_s: float, kind: str = "requests"
) -> RateLimited:
    return RateLimited(
        message, limit=f"{account.limit_prefix}{limit}", kind=kind, retry_after_s=retry_after_s
    )


def _says(what: str, account: Account, limit: int, used: int, wanted: int) -> str:
    return (
        f"Rate limit reached for {what} of {account.name}: Limit {limit}, Used {used}, Requested "
        f"{wanted}."
    )
