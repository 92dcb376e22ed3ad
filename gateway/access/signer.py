"""What only a gateway that knows the secret can make: stream tokens, ids of Idempotency-Keys."""

import hashlib
import hmac
import logging
import secrets

import msgspec

from shared.settings import GatewaySettings

logger = logging.getLogger(__name__)

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
