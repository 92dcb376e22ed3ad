"""The addresses of a broker of several nodes."""

import asyncio
import socket
from collections import Counter
from typing import Any

import pytest

from shared.bus.rabbit.addresses import Addresses, parse_urls
from shared.errors import StartupError

PASSWORD = "a-secret-that-must-not-leak"
THREE = "amqp://u:p@10.0.0.1/v,amqp://u:p@10.0.0.2/v, amqp://u:p@10.0.0.3:7000/v"


def test_several_urls_are_separated_by_commas() -> None:
    urls = parse_urls(THREE)

    assert [(url.host, url.port) for url in urls] == [
        ("10.0.0.1", 5672),
        ("10.0.0.2", 5672),
        ("10.0.0.3", 7000),
    ]


def test_a_comma_in_a_password_separates_nothing() -> None:
    [url] = parse_urls("amqp://u:p,q@h/v")

    assert url.password == "p,q"


@pytest.mark.parametrize(
    "text",
    [
        f"amqp://u:{PASSWORD}@a/v,amqp://u:{PASSWORD}@b:port/v",
        f"amqp://u:{PASSWORD}@a/v,http://u:{PASSWORD}@b/v",
        f"amqp://u:{PASSWORD}@a/v,amqp://other:{PASSWORD}@b/v",
        f"amqp://u:{PASSWORD}@a/v,amqp://u:{PASSWORD}@b/other",
        f"amqp://u:{PASSWORD}@a..b/v",
        f"amqp://u:{PASSWORD}@{'a' * 64}/v",
    ],
)
def test_urls_that_are_no_nodes_of_one_broker_are_refused(text: str) -> None:
    with pytest.raises(StartupError) as caught:
        parse_urls(text)

    assert PASSWORD not in str(caught.value)


async def test_each_round_tries_every_address_once() -> None:
    addresses = Addresses(parse_urls(THREE), timeout_s=1)

    rounds = [{(await addresses.take()).host for _ in range(3)} for _ in range(4)]

    assert rounds == [{"10.0.0.1", "10.0.0.2", "10.0.0.3"}] * 4
    assert addresses.is_round_over


async def test_connections_begin_at_different_nodes() -> None:
    urls = parse_urls(THREE)

    first = Counter([(await Addresses(urls, timeout_s=1).take()).host for _ in range(200)])

    assert len(first) == 3
    assert min(first.values()) > 20


async def test_after_a_lost_connection_its_address_is_the_last() -> None:
    addresses = Addresses(parse_urls(THREE), timeout_s=1)
    lost = await addresses.take()

    await addresses.begin_again()

    assert [await addresses.take() for _ in range(3)][-1] == lost


async def test_a_connection_that_moved_on_finds_its_way_home() -> None:
    addresses = Addresses(parse_urls(THREE), timeout_s=1)
    home = await addresses.take()
    was_home = await addresses.find_home()
    await addresses.begin_again()
    await addresses.take()

    found = await addresses.find_home()
    returning = Addresses(parse_urls(THREE), timeout_s=1, first=found)

    assert was_home is None
    assert found == await returning.take() == home


async def test_a_node_that_fell_silent_is_no_longer_home() -> None:
    addresses = Addresses(parse_urls(THREE), timeout_s=1)
    await addresses.take()
    addresses.stay()
    await addresses.begin_again()
    await addresses.take()

    assert await addresses.find_home() is None


@pytest.mark.parametrize("is_resolved", [True, False])
async def test_nobody_moves_to_an_address_that_the_name_does_not_stand_for(
    is_resolved: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    ips = ["10.0.0.1"]

    async def getaddrinfo(_: str, port: int, **__: Any) -> list[tuple[Any, ...]]:
        if not ips:
            raise OSError("no answer")
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (ip, port)) for ip in ips]

    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", getaddrinfo)
    addresses = Addresses(parse_urls("amqp://u:p@broker/v"), timeout_s=1)
    await addresses.take()
    ips[:] = ["10.0.0.2"]
    await addresses.begin_again()
    await addresses.take()
    ips[:] = ["10.0.0.2", "10.0.0.3"] if is_resolved else []

    assert await addresses.find_home() is None


async def test_a_name_stands_for_all_its_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    async def getaddrinfo(_: str, port: int, **__: Any) -> list[tuple[Any, ...]]:
        ips = ("10.0.0.1", "10.0.0.2")
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (ip, port)) for ip in ips]

    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", getaddrinfo)
    addresses = Addresses(parse_urls(f"amqps://u:{PASSWORD}@broker/v"), timeout_s=1)

    taken = [str(await addresses.take()) for _ in range(2)]

    assert sorted(taken) == ["broker:5671 (10.0.0.1)", "broker:5671 (10.0.0.2)"]


async def test_a_name_without_addresses_is_tried_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    async def getaddrinfo(*_: Any, **__: Any) -> list[tuple[Any, ...]]:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", getaddrinfo)
    addresses = Addresses(parse_urls("amqp://u:p@broker/v"), timeout_s=1)

    assert str(await addresses.take()) == "broker:5672"
