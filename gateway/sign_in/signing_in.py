"""How a browser signs in, and its session afterwards.

The gateway sends the browser to the provider with a state, a nonce and the challenge of PKCE, and
keeps their secrets in a signed cookie of the browser. The provider sends the browser back with a
code, for which the gateway gets an id_token. The session is a second signed cookie, so that any
gateway with the same secret accepts it, until it has ended.
"""

import hashlib
import hmac
import secrets
import time
from collections.abc import Mapping
from typing import Any, Literal, TypeAlias

from joserfc import jwt
from joserfc.errors import JoseError
from joserfc.jwk import OctKey
from joserfc.jwt import JWTClaimsRegistry
from starlette.requests import cookie_parser

from gateway.intake.keys.accepted import Keys
from gateway.intake.keys.api_key import ApiKey
from gateway.intake.signer import Signer
from gateway.metrics import Metrics
from gateway.sign_in.access import Access, Person
from gateway.sign_in.endings import Session, SessionEndings
from gateway.sign_in.provider import IdentityProvider, NotVerified
from shared.errors import InvalidApiKey, PermissionDenied, Unavailable

CALLBACK_PATH = "/console/callback"
BEGIN_S = 600
"""Seconds that a person has for the provider's page."""
_MAX_AT_ONCE = 16
"""Codes that a gateway exchanges at the same time: strangers can send any."""
_ALGORITHM = "HS256"
_SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})
_DOTS_OF_A_TOKEN = 2

SignInOutcome: TypeAlias = Literal[
    "completed", "denied", "expired", "failed", "unavailable", "busy"
]
"""How a sign-in ends: the provider or the roles deny it; the browser's cookie is gone or old; a
proof does not hold; the provider does not answer; or too many people sign in at once."""


class NotSignedIn(Exception):
    """A sign-in did not succeed. The text is for the operator, and ``outcome`` for the person."""

    def __init__(self, outcome: SignInOutcome, reason: str) -> None:
        super().__init__(reason)
        self.outcome = outcome


class SignIn:
    """Signs people in with a provider."""

    def __init__(
        self,
        access: Access,
        signer: Signer,
        keys: Keys,
        metrics: Metrics,
        endings: SessionEndings,
        max_at_once: int = _MAX_AT_ONCE,
    ) -> None:
        self.access = access
        self.endings = endings
        self.session_s = round(access.session_hours * 3600)
        prefix = "__Host-" if access.is_secure else ""
        self.session_cookie = f"{prefix}warren-session"
        self.begun_cookie = f"{prefix}warren-sign-in"
        self._keys = keys
        self._metrics = metrics
        self._provider = IdentityProvider(access, f"{access.origin}{CALLBACK_PATH}")
        self._session_key = OctKey.import_key(signer.session_key)
        self._begun_key = OctKey.import_key(signer.sign_in_key)
        self._max_at_once = max_at_once
        self._exchanging = 0

    async def begin(self, view: str) -> tuple[str, str]:
        """The URL of the provider's page, and the secrets that the browser keeps until it comes
        back. ``view`` is the console's view that it sees then. Raises `NotSignedIn`."""
        state, nonce, verifier = (secrets.token_urlsafe(32) for _ in range(3))
        try:
            page = await self._provider.page_for(state, nonce, verifier)
        except Unavailable as error:
            raise self._ended("unavailable", error.message) from None
        facts = {"state": state, "nonce": nonce, "verifier": verifier, "view": view}
        return page, _signed(facts, BEGIN_S, self._begun_key)

    async def complete(self, query: Mapping[str, str], begun: str) -> tuple[Person, str, str]:
        """Who has come back from the provider, with this query and with the secrets that the
        browser kept; the session; and the view. Raises `NotSignedIn`."""
        facts = _checked(begun, self._begun_key)
        if facts is None:
            raise self._ended("expired", "the browser has begun no sign-in lately")
        if not hmac.compare_digest(query.get("state", "").encode(), facts["state"].encode()):
            raise self._ended("failed", "the state is another one")
        if query.get("iss", self.access.issuer) != self.access.issuer:
            raise self._ended("failed", "another provider has answered")
        if not (code := query.get("code", "")):
            reason = query.get("error", "no code")[:64]
            raise self._ended("denied", f"the provider says {reason!r}")
        person = await self._exchange(code, facts["nonce"], facts["verifier"])
        self._metrics.sign_ins.labels("completed").inc()
        session = {
            "sub": person.id,
            "name": person.name,
            "role": person.role,
            "id": secrets.token_hex(16),
            "began_at": time.time(),
        }
        return person, _signed(session, self.session_s, self._session_key), facts["view"]

    async def _exchange(self, code: str, nonce: str, verifier: str) -> Person:
        if self._exchanging >= self._max_at_once:
            raise self._ended("busy", "too many people sign in at once")
        self._exchanging += 1
        try:
            claims = await self._provider.redeem(code, nonce, verifier)
        except NotVerified as error:
            raise self._ended("failed", str(error)) from None
        except Unavailable as error:
            raise self._ended("unavailable", error.message) from None
        finally:
            self._exchanging -= 1
        person = self.access.person_of(claims)
        if person is None:
            raise self._ended("denied", f"no role for {claims['sub'][:128]!r}")
        return person

    def person_of(self, cookies: str) -> Person | None:
        """Who has signed in at the browser with this ``Cookie`` header; None if nobody, or no
        longer. Raises `Unavailable` while nobody can know."""
        session = self.session_of(cookies)
        return None if session is None or self.endings.has_ended(session) else session.person

    def session_of(self, cookies: str) -> Session | None:
        """The session of the browser with this ``Cookie`` header, which may have been ended; None
        if there is none, or it is too old."""
        session = cookie_parser(cookies).get(self.session_cookie, "")
        facts = _checked(session, self._session_key) if session else None
        if facts is None or facts["role"] not in self.access.roles:
            return None
        person = Person(facts["sub"], facts["name"], facts["role"])
        # The sessions of older gateways count as old, and have no id of their own.
        session_id = facts.get("id") or hashlib.sha256(session.encode()).hexdigest()
        return Session(session_id, person, facts.get("began_at", 0.0))

    def has_session(self, cookies: str) -> bool:
        """Whether there is a session, which may have ended."""
        return self.session_cookie in cookies

    def caller_of(self, method: str, headers: Mapping[str, str]) -> ApiKey:
        """What a browser with a session may do. Raises `InvalidApiKey` if the session has ended,
        `PermissionDenied` for what another site makes the browser send, and `Unavailable`."""
        person = self.person_of(headers["cookie"])
        if person is None:
            raise InvalidApiKey("Your session has ended. Sign in again.")
        if method not in _SAFE_METHODS and not self.is_own(headers):
            raise PermissionDenied(
                "Only the console's own page may use a session. Programs send an API key."
            )
        return self._key_of(person)

    def is_own(self, headers: Mapping[str, str]) -> bool:
        """Whether a browser says that the console's page has sent a request."""
        return headers.get("origin", "").lower() == self.access.origin

    def is_token(self, authorization: str) -> bool:
        """Whether this may be an access token of the provider: no API key has dots."""
        return bool(self.access.audience) and authorization.count(".") == _DOTS_OF_A_TOKEN

    async def caller_of_token(self, authorization: str) -> ApiKey:
        """What a program with an access token may do. Raises `InvalidApiKey` and `Unavailable`."""
        scheme, _, token = authorization.partition(" ")
        try:
            claims = await self._provider.claims_of(token, self.access.audience)
        except NotVerified as error:
            raise InvalidApiKey(f"This access token is not valid: {error}.") from None
        person = self.access.person_of(claims)
        if person is None or scheme.lower() != "bearer":
            raise InvalidApiKey("This access token gives no role here.")
        return self._key_of(person)

    def _key_of(self, person: Person) -> ApiKey:
        """The substitute for an API key of a person. Its id is no key's id, so it cannot be
        revoked, but usage is recorded for it, and its work can be stopped."""
        role = self.access.roles[person.role]
        limits = self._keys.limits_of(role.tenant)
        return ApiKey(
            person.id,
            role.tenant,
            "",
            "",
            scopes=role.scopes,
            person=person.name,
            of_tenant=limits,
        )

    def _ended(self, outcome: SignInOutcome, reason: str) -> NotSignedIn:
        """The error of a sign-in that did not succeed, which is counted."""
        self._metrics.sign_ins.labels(outcome).inc()
        return NotSignedIn(outcome, reason)


def _signed(facts: Mapping[str, Any], valid_s: float, key: OctKey) -> str:
    claims = {**facts, "exp": int(time.time() + valid_s)}
    return jwt.encode({"alg": _ALGORITHM}, claims, key, algorithms=[_ALGORITHM])


def _checked(token: str, key: OctKey) -> dict[str, Any] | None:
    """What a gateway of this deployment has signed with ``key``; None if it has not, or if it is
    too old."""
    try:
        claims = jwt.decode(token, key, algorithms=[_ALGORITHM]).claims
        JWTClaimsRegistry(exp={"essential": True}).validate(claims)
    except (JoseError, ValueError):
        return None
    return claims
