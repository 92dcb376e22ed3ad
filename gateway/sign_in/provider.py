"""An OpenID provider: its endpoints and its keys, the exchange of codes, and the check of tokens.

Nothing is asked of the provider before somebody signs in, so that a gateway starts and serves its
API keys without it.
"""

import asyncio
import base64
import hashlib
import logging
import math
import ssl
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote, urlencode

import httpx
import msgspec
from joserfc import jwt
from joserfc.errors import BadSignatureError, InvalidKeyIdError, JoseError
from joserfc.jwk import Key, KeySet, import_key
from joserfc.jws import JWSRegistry
from joserfc.jwt import ClaimsOption, JWTClaimsRegistry
from msgspec import Struct

from gateway.sign_in.access import Access, Claims
from shared.errors import StartupError, Unavailable
from shared.proxies import proxy_of

logger = logging.getLogger(__name__)

_TIMEOUT_S = 10.0
"""Seconds in which the provider must answer a request."""
_MAX_BYTES = 1 << 20
_FRESH_S = 3600.0
"""Seconds after which endpoints and keys are asked for again."""
_KEPT_S = 24 * 3600.0
"""Seconds for which they count while the provider is away."""
_PAUSE_S = 10.0
"""Seconds between two requests for the same: strangers decide how often a key is not found."""
_LEEWAY_S = 60
"""Seconds by which the provider's clock may differ."""
_MAX_HEADER_BYTES = 8192
_AWAY = "The OpenID provider cannot be reached. API keys work without it."
ALGORITHMS = (
    "RS256",
    "RS384",
    "RS512",
    "PS256",
    "PS384",
    "PS512",
    "ES256",
    "ES384",
    "ES512",
    "Ed25519",
)
"""Signatures with a private key. Anyone who knows the published keys can make the other
signatures."""
_KEY_TYPES = ("RSA", "EC", "OKP")


class NotVerified(Exception):
    """The answer of the provider, or of somebody in its name, does not prove who signs in. The text
    is for the operator."""


class CodeRefused(NotVerified):
    """The provider gives no tokens for a code. ``error`` is the provider's error code (RFC 6749,
    5.2)."""

    def __init__(self, error: str) -> None:
        super().__init__(f"the provider refuses the code: {error}")
        self.error = error


class NotAvailable(Exception):
    """The provider cannot be used now. The text, which is for the operator, says why."""


class Metadata(Struct, frozen=True):
    """The metadata that the provider publishes (OpenID Connect Discovery 1.0)."""

    issuer: str
    authorization_endpoint: str
    token_endpoint: str
    jwks_uri: str
    token_endpoint_auth_methods_supported: Sequence[str] = ("client_secret_basic",)
    id_token_signing_alg_values_supported: Sequence[str] | None = None
    code_challenge_methods_supported: Sequence[str] | None = None


class _KeyList(Struct, frozen=True):
    keys: Sequence[dict[str, Any]]


class _Tokens(Struct, frozen=True):
    id_token: str


class _Refusal(Struct, frozen=True):
    error: str = "invalid_response"


@dataclass(frozen=True, slots=True)
class Published:
    """The metadata and keys that the provider has published."""

    metadata: Metadata
    keys: KeySet
    """The keys of the kinds that may sign."""
    read_at: float
    """The time of `time.monotonic`."""


class IdentityProvider:
    """Asks a provider, and remembers its endpoints and keys."""

    def __init__(self, access: Access, redirect_uri: str, *, pause_s: float = _PAUSE_S) -> None:
        self._pause_s = pause_s
        self._access = access
        self._redirect_uri = redirect_uri
        self._known: Published | None = None
        self._asking = asyncio.Lock()
        self._asked_at = -math.inf
        self._tls: ssl.SSLContext | None = None

    async def page_for(self, state: str, nonce: str, verifier: str) -> str:
        """The URL of the provider's page where a browser signs in. Raises `Unavailable`."""
        known = await self._read()
        digest = hashlib.sha256(verifier.encode()).digest()
        query = {
            "response_type": "code",
            "client_id": self._access.client_id,
            "redirect_uri": self._redirect_uri,
            "scope": self._access.scope,
            "state": state,
            "nonce": nonce,
            "code_challenge": base64.urlsafe_b64encode(digest).rstrip(b"=").decode(),
            "code_challenge_method": "S256",
        }
        page = known.metadata.authorization_endpoint
        return f"{page}{'&' if '?' in page else '?'}{urlencode(query)}"

    async def redeem(self, code: str, nonce: str, verifier: str) -> Claims:
        """The claims of the person for whom the provider has given this code. Raises `NotVerified`
        and `Unavailable`."""
        known = await self._read()
        form = {
            "grant_type": "authorization_code",
            "code": code,
            "redirect_uri": self._redirect_uri,
            "code_verifier": verifier,
        }
        client_id, secret = self._access.client_id, self._access.client_secret
        supported = known.metadata.token_endpoint_auth_methods_supported
        auth = None
        if secret and "client_secret_basic" in supported:
            auth = httpx.BasicAuth(quote(client_id, safe=""), quote(secret, safe=""))
        else:
            form |= {"client_id": client_id, **({"client_secret": secret} if secret else {})}
        try:
            status, body = await self._ask(known.metadata.token_endpoint, form=form, auth=auth)
        except NotAvailable as error:
            self._log(error)
            raise Unavailable(_AWAY) from error
        if status != 200:
            refusal = _Refusal()
            with suppress(msgspec.MsgspecError):
                refusal = msgspec.json.decode(body, type=_Refusal)
            raise CodeRefused(refusal.error[:64])
        try:
            tokens = msgspec.json.decode(body, type=_Tokens)
        except msgspec.MsgspecError as error:
            raise NotVerified(f"the provider's answer has no id_token: {error}") from None
        return await self.claims_of(tokens.id_token, client_id, nonce)

    async def claims_of(self, token: str, audience: str, nonce: str | None = None) -> Claims:
        """The claims of a token that the provider has signed for ``audience``. Raises `NotVerified`
        and `Unavailable`."""
        known = await self._read()
        try:
            claims = _verified(token, known.keys)
        except (BadSignatureError, InvalidKeyIdError):
            known = await self._read(since=known.read_at)  # it may have changed its keys
            try:
                claims = _verified(token, known.keys)
            except (JoseError, ValueError) as error:
                raise NotVerified(f"the signature of a token does not hold: {error}") from None
        except (JoseError, ValueError) as error:
            raise NotVerified(f"a token cannot be read: {error}") from None
        try:
            self._check(claims, audience, nonce)
        except JoseError as error:
            raise NotVerified(f"a token is not for this sign-in: {error}") from None
        return claims

    def _check(self, claims: dict[str, Any], audience: str, nonce: str | None) -> None:
        """Raises `JoseError`."""
        options: dict[str, ClaimsOption] = {
            "iss": {"essential": True, "value": self._access.issuer},
            "sub": {"essential": True},
            "aud": {"essential": True, "value": audience},
            "exp": {"essential": True},
        }
        if nonce is not None:
            options["nonce"] = {"essential": True, "value": nonce}
            # The token of another client may list this client among its audiences.
            is_shared = isinstance(claims.get("aud"), list) and len(claims["aud"]) > 1
            options["azp"] = {"essential": is_shared, "value": self._access.client_id}
        JWTClaimsRegistry(None, _LEEWAY_S, **options).validate(claims)

    async def _read(self, since: float | None = None) -> Published:
        """The endpoints and keys, as they were read after ``since`` if the provider has not been
        asked just before. Raises `Unavailable`."""
        if (known := self._remembered(since)) is not None:
            return known
        async with self._asking:
            if (known := self._remembered(since)) is not None:
                return known
            now, known = time.monotonic(), self._known
            if now - self._asked_at >= self._pause_s:
                self._asked_at = now
                try:
                    self._known = known = await self.ask()
                except NotAvailable as error:
                    self._log(error)
            if known is None or known.read_at + _KEPT_S < now:
                raise Unavailable(_AWAY)
            return known

    def _remembered(self, since: float | None) -> Published | None:
        """The metadata and keys that were read, unless they are old or were read before
        ``since``."""
        known = self._known
        if known is None or known.read_at + _FRESH_S < time.monotonic():
            return None
        return None if since is not None and known.read_at <= since else known

    async def ask(self) -> Published:
        """The metadata and keys that the provider publishes now. Raises `NotAvailable`."""
        issuer = self._access.issuer
        url = f"{issuer.rstrip('/')}/.well-known/openid-configuration"
        metadata = await self._ask_for(url, Metadata)
        if metadata.issuer != issuer:
            raise NotAvailable(f"it calls itself {metadata.issuer[:256]!r}, and not {issuer!r}")
        is_plain = issuer.startswith("http:")
        urls = (metadata.authorization_endpoint, metadata.token_endpoint, metadata.jwks_uri)
        if not is_plain and not all(one.startswith("https://") for one in urls):
            raise NotAvailable("one of its endpoints is not an https:// URL")
        listed = await self._ask_for(metadata.jwks_uri, _KeyList)
        keys = [key for fields in listed.keys if (key := _imported(fields)) is not None]
        return Published(metadata, KeySet(keys), time.monotonic())

    async def _ask_for(self, url: str, kind: type[Any]) -> Any:
        status, body = await self._ask(url)
        if status != 200:
            raise NotAvailable(f"{url} is answered with {status}")
        try:
            return msgspec.json.decode(body, type=kind)
        except msgspec.MsgspecError as error:
            raise NotAvailable(f"{url} cannot be read: {error}") from None

    async def _ask(
        self, url: str, form: Mapping[str, str] | None = None, auth: httpx.Auth | None = None
    ) -> tuple[int, bytes]:
        """The status and the body of an answer. Redirects are not followed. Raises
        `NotAvailable`."""
        if self._tls is None:  # it takes a while to read the certificates of all authorities
            self._tls = await asyncio.to_thread(httpx.create_ssl_context)
        method, body = "GET" if form is None else "POST", bytearray()
        try:
            proxy = proxy_of(url)
            async with (
                asyncio.timeout(_TIMEOUT_S),
                httpx.AsyncClient(
                    verify=self._tls, proxy=proxy, trust_env=False, timeout=_TIMEOUT_S
                ) as client,
                client.stream(method, url, data=form, auth=auth) as answer,
            ):
                async for chunk in answer.aiter_bytes():
                    body += chunk
                    if len(body) > _MAX_BYTES:
                        raise NotAvailable(f"{url} is answered with more than {_MAX_BYTES} bytes")
        except TimeoutError:
            raise NotAvailable(f"{url} is not answered within {_TIMEOUT_S:g} seconds") from None
        except (httpx.HTTPError, httpx.InvalidURL, StartupError, ValueError) as error:
            raise NotAvailable(f"{url}: {str(error) or type(error).__name__}") from None
        if answer.status_code >= 500:
            raise NotAvailable(f"{url} is answered with {answer.status_code}")
        return answer.status_code, bytes(body)

    def _log(self, error: NotAvailable) -> None:
        fields = {"issuer": self._access.issuer, "reason": str(error)}
        logger.warning("OpenID provider not available", extra=fields)


def _imported(fields: dict[str, Any]) -> Key | None:
    """The key of an entry of a JWK Set; None for other purposes and unknown kinds."""
    if fields.get("kty") not in _KEY_TYPES or fields.get("use", "sig") != "sig":
        return None
    with suppress(JoseError, ValueError, TypeError):
        return import_key(fields)
    return None


def _verified(token: str, keys: KeySet) -> dict[str, Any]:
    """The claims of a token with a signature that holds. Raises `JoseError` and ValueError."""
    registry = JWSRegistry(algorithms=ALGORITHMS, strict_check_header=False)
    registry.max_header_length = _MAX_HEADER_BYTES  # some have chains of certificates
    return jwt.decode(token, keys, registry=registry).claims
