"""The behaviour of a bus if no broker listens."""

import asyncio
import logging
from collections import Counter

import pytest

from shared.bus import outage
from shared.bus.rabbit import RabbitBus, link
from shared.bus.rabbit.addresses import parse_urls
from shared.errors import BusUnavailable, StartupError
from tests.shared.bus.deliveries import eventually
from tests.support.deployment.processes import free_port


@pytest.mark.parametrize("delay_ms", [0.0, 0.4, 0.8, 1.2, 1.6, 2.0, 4.0, 8.0])
async def test_it_can_be_cancelled_whenever(delay_ms: float) -> None:
    url = f"amqp://nobody:secret@127.0.0.1:{free_port()}/warren"

    async def wait_in_vain() -> None:
        async with RabbitBus(url) as bus:
            await bus.wait_connected()

    waiting = [asyncio.create_task(wait_in_vain()) for _ in range(8)]
    await asyncio.sleep(delay_ms / 1e3)
    for task in waiting:
        task.cancel()
        await asyncio.sleep(2e-4)

    await asyncio.wait(waiting)

    assert all(task.cancelled() for task in waiting)


async def test_a_broker_that_is_away_is_logged_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(link, "_RECONNECT_S", (0.01, 0.01))
    monkeypatch.setattr(outage, "_REMIND_S", 3600)
    caplog.set_level(logging.DEBUG, outage.__name__)

    async def is_tried_often() -> bool:
        lines = (record for record in caplog.records if record.name == outage.__name__)
        tries = Counter(vars(line)["link"] for line in lines)
        return len(tries) == 2 and min(tries.values()) > 3

    async with RabbitBus(f"amqp://nobody:secret@127.0.0.1:{free_port()}/warren"):
        await eventually(is_tried_often)

    ours = [record for record in caplog.records if record.name.startswith("shared.")]
    warnings = [record for record in ours if record.levelno >= logging.WARNING]
    assert {record.message for record in warnings} == {"broker unreachable"}
    links = [vars(record)["link"] for record in warnings]
    assert sorted(links) == sorted(set(links))
    assert "secret" not in str([vars(record) for record in ours])


@pytest.mark.parametrize("password", ["p/ss", "p?ss", "p#ss", "100%", "p@/ss"])
def test_a_password_that_is_not_escaped_is_noticed_and_not_shown(password: str) -> None:
    with pytest.raises(StartupError, match="/ as %2F") as refused:
        parse_urls(f"amqp://worker:{password}@broker/warren")

    assert "ss" not in str(refused.value).replace("password", "")


@pytest.mark.parametrize("url", ["http://broker", "broker:5672", "amqp://", "amqp://u:p@h:port/v"])
def test_what_is_no_url_of_a_broker_is_refused(url: str) -> None:
    with pytest.raises(StartupError, match="the broker's URL"):
        parse_urls(url)


def test_an_escaped_password_is_read() -> None:
    (url,) = parse_urls("amqps://worker:p%2Fs%40s@broker/warren")

    assert url.password == "p/s@s"


async def test_errors_name_every_address_that_was_tried(caplog: pytest.LogCaptureFixture) -> None:
    ports = free_port(), free_port()
    urls = ",".join(f"amqp://nobody:secret@127.0.0.1:{port}/warren" for port in ports)
    async with RabbitBus(urls) as bus:
        with pytest.raises(BusUnavailable) as caught:
            await bus.inspect("anything")

    reasons = [str(vars(record).get("reason")) for record in caplog.records]
    for port in ports:
        assert f"127.0.0.1:{port}: " in str(caught.value)
        assert any(f"127.0.0.1:{port}: " in reason for reason in reasons)
    assert "secret" not in f"{caught.value}{[vars(record) for record in caplog.records]}"
