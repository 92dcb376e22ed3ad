"""What only a gateway that knows the secret can make: stream tokens, ids of Idempotency-Keys.

A client may send a request with an ``Idempotency-Key`` twice. The key decides the request's id, so
that every gateway finds the same log for it, and the body's hash in the log tells a retry from
another request. The rest is in `gateway.log.registry`.
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
        """The signer that the settings name, or one that no other gateway knows."""
        if settings.secret is not None:
            return cls(settings.secret.get_secret_value().encode())
        if settings.broker is not None:
            logger.warning(
                "no WARREN_SECRET: stream tokens and Idempotency-Keys are good at this gateway "
                "alone, until it ends"
            )
        return cls(secrets.token_bytes())

    def stream_token(self, request_id: str) -> str:
        """Lets whoever bears it read the stream of one request."""
        return self._sign("stream", request_id)

    def is_stream_token(self, request_id: str, token: str) -> bool:
        return hmac.compare_digest(self.stream_token(request_id).encode(), token.encode())

    def request_id(self, kind: str, tenant: str, key: str) -> str:
        """The id of the request that a tenant names by an Idempotency-Key."""
        return f"{kind}-{self._sign('request', tenant, key)}"

    def _sign(self, *parts: str) -> str:
        signed = self._keyed.copy()
        signed.update(msgspec.json.encode(parts))
        return signed.digest()[:_TOKEN_BYTES].hex()


def check_key(key: str) -> str:
    """Return a key that can be one. Raises `InvalidRequest`."""
    if _KEY.fullmatch(key) is None:
        raise InvalidRequest(
            f"{KEY_HEADER}: expected 1 to 255 visible ASCII characters.", param=KEY_HEADER
        )
    return key


def hash_body(body: bytes) -> str:
    """What two requests of one key have in common if one of them is a retry."""
    return hashlib.sha256(body).hexdigest()
