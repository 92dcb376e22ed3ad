"""Signatures with the gateways' shared secret: stream tokens, and ids derived from
Idempotency-Keys.

A client may send a request with an ``Idempotency-Key`` twice. The request id is derived from the
key, so that every gateway finds the same log for it. The body's hash in the log distinguishes a
retry from a different request. The rest is in `gateway.log.registry`.
"""

import hashlib
import hmac
import logging
import re
import secrets

import msgspec

from shared.errors import InvalidRequest
from shared.settings import GatewaySettings

logger = logging.getLogger(__name__)

KEY_HEADER = "Idempotency-Key"
_KEY = re.compile(r"[\x21-\x7e]{1,255}")
_TOKEN_BYTES = 16


class Signer:
    """Signs with one secret, which all gateways of a deployment share."""

    def __init__(self, secret: bytes) -> None:
        self._keyed = hmac.new(secret, digestmod=hashlib.sha256)

    @classmethod
    def of(cls, settings: GatewaySettings) -> "Signer":
        """A signer with the secret of the settings, or with a random one."""
        if settings.secret is not None:
            return cls(settings.secret.get_secret_value().encode())
        if settings.broker is not None:
            logger.warning(
                "WARREN_SECRET is not set: stream tokens and Idempotency-Keys are valid only at "
                "this gateway, until it restarts"
            )
        return cls(secrets.token_bytes())

    def stream_token(self, request_id: str) -> str:
        """A token that grants access to the stream of one request."""
        return self._sign("stream", request_id)

    def is_stream_token(self, request_id: str, token: str) -> bool:
        return hmac.compare_digest(self.stream_token(request_id).encode(), token.encode())

    def request_id(self, kind: str, tenant: str, key: str) -> str:
        """The request id for a tenant's Idempotency-Key."""
        return f"{kind}-{self._sign('request', tenant, key)}"

    def _sign(self, *parts: str) -> str:
        signed = self._keyed.copy()
        signed.update(msgspec.json.encode(parts))
        return signed.digest()[:_TOKEN_BYTES].hex()


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
