"""Signatures with keys that are derived from the gateways' shared secret: stream tokens, and ids
derived from Idempotency-Keys. The sessions of the console have keys of their own.

A stream token is its expiry, a tag of the API key of the stream's request, and the signature of
both, of the stream's id and of the token's permission. The tags of older gateways name the tenant
in place of the key.

A client may send a request with an ``Idempotency-Key`` twice. The request id is derived from the
key, so that every gateway finds the same log for it. The body's hash in the log distinguishes a
retry from a different request. The rest is in `gateway.log.registry`.
"""

import hashlib
import hmac
import logging
import re
import secrets
import time
from typing import Literal, TypeAlias

import msgspec

from shared.errors import InvalidRequest
from shared.settings import GatewaySettings

logger = logging.getLogger(__name__)

KEY_HEADER = "Idempotency-Key"
_KEY = re.compile(r"[\x21-\x7e]{1,255}")
_TOKEN_BYTES = 16
_TAG_BYTES = 6
_TOKEN = re.compile(r"([0-9a-f]{1,16})\.(?:([0-9a-f]{12})\.)?([0-9a-f]{32})")

Verb: TypeAlias = Literal["read", "cancel"]
"""The action that a stream token permits."""


class Signer:
    """Signs with a secret that all gateways of a deployment share."""

    def __init__(self, secret: bytes) -> None:
        self._token_key = derive_key(secret, "stream tokens")
        self._tenant_key = derive_key(secret, "tenants of stream tokens")
        self._api_key_key = derive_key(secret, "API keys of stream tokens")
        self._id_key = derive_key(secret, "request ids")
        self.execution_key = derive_key(secret, "executions that requests share")
        self.session_key = derive_key(secret, "sessions of the console")
        self.sign_in_key = derive_key(secret, "sign-ins to the console")

    @classmethod
    def of(cls, settings: GatewaySettings) -> "Signer":
        """A signer with the secret of the settings, or with a random secret."""
        if settings.secret is not None:
            return cls(settings.secret.get_secret_value().encode())
        if settings.broker is not None:
            logger.warning(
                "WARREN_SECRET is not set: stream tokens, Idempotency-Keys and sessions are valid "
                "only at this gateway, until it restarts"
            )
        return cls(secrets.token_bytes())

    def stream_token(
        self, request_id: str, verb: Verb, expires_at: float, *, key_id: str = ""
    ) -> str:
        """A token that permits ``verb`` on the stream of a request, which had the API key with this
        id, until the Unix time ``expires_at``."""
        parts = [f"{int(expires_at):x}", *filter(None, [self.key_tag(key_id)])]
        return ".".join([*parts, _sign(self._token_key, request_id, verb, *parts)])

    def tag_in_token(self, request_id: str, verb: Verb, token: str) -> str | None:
        """The tag of a token's API key if the token permits ``verb`` on this stream now, provided
        that the key does; otherwise None. The tag is empty for a token without a key."""
        match = _TOKEN.fullmatch(token)
        if match is None:
            return None
        expiry, tag, signature = match.groups("")
        expected = _sign(self._token_key, request_id, verb, *filter(None, [expiry, tag]))
        is_ours = hmac.compare_digest(expected, signature)
        return tag if is_ours and time.time() < int(expiry, 16) else None

    def key_tag(self, key_id: str) -> str:
        """The name of an API key in tokens; empty without a key."""
        return _tag(self._api_key_key, key_id)

    def tenant_tag(self, tenant: str) -> str:
        """The name of a tenant in the tokens of older gateways; empty for the anonymous tenant."""
        return _tag(self._tenant_key, tenant)

    def request_id(self, prefix: str, tenant: str, key: str) -> str:
        """The request id for a tenant's Idempotency-Key."""
        return f"{prefix}{_sign(self._id_key, tenant, key)}"


def derive_key(secret: bytes, purpose: str) -> bytes:
    """A key of 32 bytes: HKDF with SHA-256 and without a salt (RFC 5869), whose first block it
    is."""
    pseudorandom_key = hmac.digest(bytes(32), secret, "sha256")
    return hmac.digest(pseudorandom_key, purpose.encode() + b"\x01", "sha256")


def check_key(key: str) -> str:
    """Return the key if it is valid. Raises `InvalidRequest`."""
    if _KEY.fullmatch(key) is None:
        raise InvalidRequest(
            f"{KEY_HEADER}: expected 1 to 255 visible ASCII characters.", param=KEY_HEADER
        )
    return key


def hash_body(body: bytes) -> str:
    """A digest of the body that identifies retries among requests with the same key."""
    return hashlib.sha256(body).hexdigest()


def _tag(key: bytes, name: str) -> str:
    return hmac.digest(key, name.encode(), "sha256")[:_TAG_BYTES].hex() if name else ""


def _sign(key: bytes, *parts: str) -> str:
    return hmac.digest(key, msgspec.json.encode(parts), "sha256")[:_TOKEN_BYTES].hex()
