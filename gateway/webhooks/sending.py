"""Signs an event and sends it to its endpoint, as the Standard Webhooks specification says."""

import asyncio
import re
import ssl
import time
from collections.abc import Collection
from datetime import UTC, datetime
from urllib.parse import urlsplit

import httpcore
import msgspec
from standardwebhooks import Webhook as Signer

from gateway.store.webhooks import WebhookDelivery
from gateway.webhooks.network import AddressRefused, CheckedNetwork, Network, Resolve, resolve
from shared.errors import InvalidRequest

TIMEOUT_S = 10.0
"""Seconds in which an endpoint must answer."""
MAX_URL_CHARS = 2048
_URL = re.compile(r"https?://[!-~]+")


class EventData(msgspec.Struct, frozen=True):
    id: str


class WebhookEvent(msgspec.Struct, frozen=True, kw_only=True, tag_field="object", tag="event"):
    """The body that an endpoint receives."""

    id: str
    type: str
    created_at: int
    data: EventData


class NotSent(Exception):
    """The endpoint has not answered; the text is the reason."""


def check_url(url: str, networks: Collection[Network]) -> None:
    """Raises `InvalidRequest` for a text that cannot be the URL of an endpoint."""
    try:
        parts = urlsplit(url)
        is_valid = bool(parts.hostname) and parts.port != 0 and _URL.fullmatch(url) is not None
    except ValueError:
        is_valid = False
    if not is_valid:
        raise InvalidRequest("url: expected an https:// URL of visible ASCII.", param="url")
    if parts.scheme == "http" and not networks:
        raise InvalidRequest(
            "url: http:// is for the networks of WARREN_WEBHOOK_NETWORKS.", param="url"
        )
    if "@" in parts.netloc or "#" in url:
        raise InvalidRequest("url: expected no user, no password and no fragment.", param="url")


class Sender:
    """Sends events. Redirects are not followed, and the answer's body is not read. Without TLS only
    ``networks`` are reached."""

    def __init__(
        self,
        networks: Collection[Network],
        *,
        timeout_s: float = TIMEOUT_S,
        resolve: Resolve = resolve,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        """``networks`` are allowed beside public addresses. ``tls`` is for certificates that the
        public authorities have not signed."""
        self.networks = networks
        self._timeout_s = timeout_s
        self._resolve = resolve
        self._tls = tls

    async def _loaded_tls(self) -> ssl.SSLContext:
        if self._tls is None:  # it takes a while to read the certificates of all authorities
            self._tls = await asyncio.to_thread(httpcore.default_ssl_context)
        return self._tls

    async def send(self, delivery: WebhookDelivery) -> int:
        """Returns the status of the answer. Raises `NotSent`."""
        url = delivery.webhook.url
        event = WebhookEvent(
            id=delivery.event_id,
            type=delivery.type,
            created_at=delivery.created_at,
            data=EventData(delivery.object_id),
        )
        body = msgspec.json.encode(event)
        is_plain = url.startswith("http:")
        tls = await self._loaded_tls()
        network = CheckedNetwork(self.networks, self._resolve, is_private=is_plain)
        try:
            async with (
                asyncio.timeout(self._timeout_s),
                httpcore.AsyncConnectionPool(tls, network_backend=network) as pool,
                pool.stream("POST", url, headers=_headers(delivery, body), content=body) as answer,
            ):
                return answer.status
        except TimeoutError:
            raise NotSent(f"no answer within {self._timeout_s:g} seconds") from None
        except AddressRefused:
            raise NotSent("an address of the host is not public") from None
        except (httpcore.NetworkError, httpcore.TimeoutException, httpcore.ProtocolError) as error:
            raise NotSent(str(error) or type(error).__name__) from None


def is_success(status: int) -> bool:
    """Whether an endpoint that answers so has accepted the event."""
    return 200 <= status < 300


def _headers(delivery: WebhookDelivery, body: bytes) -> list[tuple[str, str]]:
    now = time.time()
    sent_at = datetime.fromtimestamp(now, UTC)
    signatures = [
        Signer(secret).sign(delivery.event_id, sent_at, body.decode())
        for secret in delivery.webhook.active_secrets(now)
    ]
    return [
        ("content-type", "application/json"),
        ("user-agent", "warren"),
        ("webhook-id", delivery.event_id),
        ("webhook-timestamp", str(int(now))),
        ("webhook-signature", " ".join(signatures)),
    ]
