"""What an endpoint receives, and what the sender refuses to reach."""

import asyncio
import socket
import ssl
import subprocess
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, contextmanager, suppress
from ipaddress import ip_network
from pathlib import Path

import pytest
from openai import InvalidWebhookSignatureError
from openai.types.webhooks import BatchCompletedWebhookEvent

from gateway.store.webhooks import EVENT_TYPES, Webhook, WebhookDelivery
from gateway.webhooks import network
from gateway.webhooks.network import Resolve
from gateway.webhooks.sending import NotSent, Sender, check_url
from shared.errors import InvalidRequest
from tests.support.gateway.webhooks import Receiver, receiving
from tests.support.network.connections import serving

SECRET, OLD, OTHER = "whsec_c2VjcmV0", "whsec_b2xk", "whsec_b3RoZXI="
LOOPBACK = (ip_network("127.0.0.0/8"),)
PUBLIC = "93.184.216.34"


def delivery(url: str, old_secret: str | None = None) -> WebhookDelivery:
    now = int(time.time())
    webhook = Webhook(
        id="webhook_1",
        tenant="a",
        name="",
        url=url,
        event_types=EVENT_TYPES,
        created_at=now,
        updated_at=now,
        secret=SECRET,
        old_secret=old_secret,
        old_secret_until=now + 3600,
    )
    return WebhookDelivery(
        id="delivery_1",
        event_id="evt_1",
        type="batch.completed",
        object_id="batch_1",
        created_at=now,
        num_tries=1,
        reason=None,
        webhook=webhook,
    )


class Names:
    """Answers each question for an address with the next answer."""

    def __init__(self, *answers: Sequence[str]) -> None:
        self.answers = list(answers)

    async def resolve(self, _host: str, _port: int) -> Sequence[str]:
        return self.answers.pop(0)


def everywhere(*addresses: str) -> Resolve:
    async def resolve(_host: str, _port: int) -> Sequence[str]:
        return addresses

    return resolve


@contextmanager
def silent_address(port: int) -> Iterator[str]:
    """An address whose port answers no further connection, because nobody accepts the first
    connections."""
    address = "127.0.0.2"
    with ExitStack() as stack:
        listener = stack.enter_context(socket.socket())
        listener.bind((address, port))
        listener.listen(0)
        for _ in range(4):
            waiting = stack.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex((address, port))
        yield address


@asynccontextmanager
async def beside_silence() -> AsyncIterator[tuple[Receiver, str]]:
    """An endpoint, and an address with its port that does not answer."""
    async with AsyncExitStack() as stack:
        while True:
            receiver = await stack.enter_async_context(receiving())
            with suppress(OSError):  # another process has this port at all addresses
                silent = stack.enter_context(silent_address(receiver.port))
                break
        yield receiver, silent


async def test_a_dead_address_of_a_host_does_not_hide_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(network, "_TRY_S", 0.05)
    async with beside_silence() as (receiver, silent):
        url = receiver.url.replace("127.0.0.1", "endpoint.example")
        resolve = everywhere(silent, "127.0.0.1")
        status = await Sender(LOOPBACK, resolve=resolve).send(delivery(url))

    assert status == 200


async def test_openais_client_accepts_an_event() -> None:
    async with receiving() as receiver:
        status = await Sender(LOOPBACK).send(delivery(receiver.url))

    (received,) = receiver.received
    event = received.unwrapped(SECRET)
    assert status == 200
    assert isinstance(event, BatchCompletedWebhookEvent)
    assert (event.id, event.object, event.data.id) == ("evt_1", "event", "batch_1")
    assert received.headers["webhook-id"] == event.id
    with pytest.raises(InvalidWebhookSignatureError):
        received.unwrapped(OTHER)


async def test_while_a_secret_is_replaced_both_verify() -> None:
    async with receiving() as receiver:
        await Sender(LOOPBACK).send(delivery(receiver.url, old_secret=OLD))

    (received,) = receiver.received
    assert received.unwrapped(SECRET) == received.unwrapped(OLD)
    with pytest.raises(InvalidWebhookSignatureError):
        received.unwrapped(OTHER)


@pytest.mark.parametrize(
    "host", ["127.0.0.1", "localhost", "127.1", "2130706433", "[::1]", "[::ffff:127.0.0.1]"]
)
async def test_private_addresses_are_not_reached(host: str) -> None:
    async with receiving() as receiver:
        url = f"https://{host}:{receiver.port}/"

        with pytest.raises(NotSent, match="not public"):
            await Sender(()).send(delivery(url))

    assert receiver.received == []


async def test_one_private_address_of_several_is_too_many() -> None:
    sender = Sender((), resolve=everywhere(PUBLIC, "10.0.0.1"))

    with pytest.raises(NotSent, match="not public"):
        await sender.send(delivery("https://hooks.example/"))


async def test_a_name_that_changes_its_address_does_not_lead_elsewhere() -> None:
    """The name is resolved once, and the connection goes to the address that was checked."""
    names = Names(["127.0.0.2"], ["127.0.0.1"])
    sender = Sender([ip_network("127.0.0.2")], resolve=names.resolve)
    async with receiving("127.0.0.2") as receiver:
        url = f"http://hooks.example:{receiver.port}/"

        assert await sender.send(delivery(url)) == 200
        assert names.answers == [["127.0.0.1"]]
        with pytest.raises(NotSent, match="not public"):
            await sender.send(delivery(url))

    (received,) = receiver.received
    assert received.headers["host"] == f"hooks.example:{receiver.port}"


async def test_without_tls_only_the_allowed_networks_are_reached() -> None:
    sender = Sender(LOOPBACK, resolve=everywhere(PUBLIC))

    with pytest.raises(NotSent, match="not public"):
        await sender.send(delivery("http://hooks.example/"))


@pytest.fixture
def certificate(tmp_path: Path) -> tuple[Path, Path]:
    """A certificate for hooks.example, and its key."""
    certificate, key = tmp_path / "tls.crt", tmp_path / "tls.key"
    command = (
        "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 1 "
        "-subj /CN=hooks.example -addext subjectAltName=DNS:hooks.example"
    )
    files = ["-keyout", str(key), "-out", str(certificate)]
    subprocess.run([*command.split(), *files], check=True, capture_output=True)
    return certificate, key


async def test_tls_verifies_the_name_and_not_the_address(certificate: tuple[Path, Path]) -> None:
    server = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    server.load_cert_chain(*certificate)
    trusted = ssl.create_default_context(cafile=certificate[0])
    sender = Sender(LOOPBACK, resolve=everywhere("127.0.0.1"), tls=trusted)

    async with receiving(tls=server) as receiver:
        assert await sender.send(delivery(f"https://hooks.example:{receiver.port}/")) == 200
        with pytest.raises(NotSent, match="certificate"):
            await sender.send(delivery(f"https://other.example:{receiver.port}/"))


async def test_redirects_are_not_followed() -> None:
    async with receiving() as receiver, receiving() as target:
        location = f"location: {target.url}".encode()
        receiver.answers = [b"HTTP/1.1 307 Elsewhere\r\n%b\r\ncontent-length: 0\r\n\r\n" % location]

        assert await Sender(LOOPBACK).send(delivery(receiver.url)) == 307

    assert target.received == []


async def test_an_endless_answer_is_not_read() -> None:
    async with receiving() as receiver:
        receiver.answers = [b"HTTP/1.1 200 OK\r\n\r\n"]
        receiver.is_endless = True

        assert await Sender(LOOPBACK).send(delivery(receiver.url)) == 200


async def test_an_endless_head_is_not_read() -> None:
    async with receiving() as receiver:
        receiver.answers = [b"HTTP/1.1 200 OK\r\nx: "]
        receiver.is_endless = True

        with pytest.raises(NotSent):
            await Sender(LOOPBACK).send(delivery(receiver.url))


async def test_an_endpoint_that_does_not_answer_in_time_has_failed() -> None:
    async def never(*_: object) -> None:
        await asyncio.Event().wait()

    async with serving(never) as port:
        with pytest.raises(NotSent, match="no answer"):
            await Sender(LOOPBACK, timeout_s=0.05).send(delivery(f"http://127.0.0.1:{port}/"))


async def test_a_name_without_an_address_has_failed() -> None:
    async def resolve(_host: str, _port: int) -> Sequence[str]:
        raise OSError

    with pytest.raises(NotSent, match="resolved"):
        await Sender((), resolve=resolve).send(delivery("https://hooks.example/"))


@pytest.mark.parametrize(
    "url",
    [
        "hooks.example",
        "ftp://hooks.example/",
        "https://",
        "https://hooks.example:99999/",
        "https://hooks.example:0/",
        "https://user:password@hooks.example/",
        "https://hooks.example/#part",
        "https://hooks.example/ x",
        "https://hooks.exämple/",
        "https://hooks.example/\r\nx: y",
        "https://[::1/",
        "http://hooks.example/",
    ],
)
def test_other_urls_are_refused(url: str) -> None:
    with pytest.raises(InvalidRequest, match="url"):
        check_url(url, ())


def test_http_is_for_private_networks() -> None:
    check_url("https://hooks.example/a?b=c", ())
    check_url("http://hooks.example:8080/", LOOPBACK)
