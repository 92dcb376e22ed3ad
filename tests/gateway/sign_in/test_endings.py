"""Sessions that end before their time: at every gateway, after restarts and without a database."""

import time
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

from gateway.sign_in.access import LONGEST_SESSION_HOURS, Person
from gateway.sign_in.endings import EVERYONE, Session, SessionEndings, person_named
from gateway.store.state import Store
from shared.bus.memory import MemoryBroker
from shared.errors import Unavailable
from shared.settings import GatewaySettings
from tests.gateway.sign_in.test_signing_in import signed_in
from tests.support.deployment.processes import free_port
from tests.support.gateway.http import LiveGateway, eventually, live_gateway

SESSIONS = "/admin/v1/sessions"
OLGA = Person("ab12", "Olga@example.com", "llm-operators")


async def session_of(gateway: LiveGateway, person: str) -> Mapping[str, str]:
    """The headers of a browser of its own in which a person has signed in."""
    gateway.http.cookies.clear()
    await signed_in(gateway, person)
    cookie = gateway.http.cookies["warren-session"]
    gateway.http.cookies.clear()
    return {"cookie": f"warren-session={cookie}", "origin": gateway.url}


async def is_over(gateway: LiveGateway, session: Mapping[str, str]) -> bool:
    response = await gateway.http.get("/v1/models", headers=session)
    assert response.status_code in {200, 401}
    return response.status_code == 401


@asynccontextmanager
async def gateways(
    broker: MemoryBroker, options: Mapping[str, Any], data_dir: Path
) -> AsyncIterator[tuple[LiveGateway, LiveGateway]]:
    """Two gateways that share a database. People sign in at the first."""
    shared = {**options, "data_dir": data_dir, "database_look_s": 0.02}
    async with AsyncExitStack() as stack:
        first = await stack.enter_async_context(live_gateway(broker, **shared))
        other = {**shared, "port": free_port()}
        yield first, await stack.enter_async_context(live_gateway(broker, **other))


async def test_signing_out_ends_the_session_at_every_gateway(
    broker: MemoryBroker, sign_in_options: Mapping[str, Any], tmp_path: Path
) -> None:
    async with gateways(broker, sign_in_options, tmp_path / "data") as (first, second):
        session, at_home = await session_of(first, "olga"), await session_of(first, "olga")

        await first.http.post("/console/sign-out", headers=session)

        assert await is_over(first, session)
        await eventually(lambda: is_over(second, session))
        for gateway in (first, second):
            assert not await is_over(gateway, at_home)


async def test_an_operator_ends_the_sessions_of_a_person_and_of_everyone(
    broker: MemoryBroker, sign_in_options: Mapping[str, Any], tmp_path: Path
) -> None:
    async with gateways(broker, sign_in_options, tmp_path / "data") as (first, second):
        olga, rene = await session_of(first, "olga"), await session_of(first, "rene")

        ended = await first.http.delete(f"{SESSIONS}/Rene@example.com", headers=olga)

        assert ended.json()["person"] == "Rene@example.com"
        assert [await is_over(first, one) for one in (olga, rene)] == [False, True]
        await eventually(lambda: is_over(second, rene))
        again = await session_of(first, "rene")
        assert not await is_over(second, again)
        assert (await first.http.delete(SESSIONS, headers=again)).status_code == 403
        assert (await first.http.delete(SESSIONS, headers=olga)).status_code == 200
        assert [await is_over(first, one) for one in (olga, again)] == [True, True]


async def test_a_restarted_gateway_knows_what_has_ended(
    broker: MemoryBroker, sign_in_options: Mapping[str, Any], tmp_path: Path
) -> None:
    options = {**sign_in_options, "data_dir": tmp_path / "data"}
    async with live_gateway(broker, **options) as gateway:
        olga, rene = await session_of(gateway, "olga"), await session_of(gateway, "rene")
        await gateway.http.post("/console/sign-out", headers=olga)

    async with live_gateway(broker, **options) as gateway:
        assert [await is_over(gateway, one) for one in (olga, rene)] == [True, False]


async def test_a_name_may_have_a_slash_but_an_empty_name_is_not_everyone(
    broker: MemoryBroker, sign_in_options: Mapping[str, Any], tmp_path: Path
) -> None:
    async with live_gateway(broker, **sign_in_options, data_dir=tmp_path / "data") as gateway:
        olga = await session_of(gateway, "olga")

        ended, nobody = [
            await gateway.http.delete(f"{SESSIONS}/{quote(name, safe='')}", headers=olga)
            for name in ("LAB/rene", "")
        ]

        assert (ended.status_code, ended.json()["person"]) == (200, "LAB/rene")
        assert nobody.status_code == 400
        assert not await is_over(gateway, olga)


async def test_without_a_provider_no_session_can_be_ended(broker: MemoryBroker) -> None:
    async with live_gateway(broker) as gateway:
        refused = await gateway.http.delete(SESSIONS)

    assert (refused.status_code, refused.json()["error"]["code"]) == (409, "conflict")
    assert "WARREN_OIDC_FILE" in refused.json()["error"]["message"]


@asynccontextmanager
async def store_in(data_dir: Path) -> AsyncIterator[Store]:
    store = Store(GatewaySettings(data_dir=data_dir), retry_pause_s=0.0)
    yield store
    await store.close()


def session(id_: str, person: Person = OLGA) -> Session:
    return Session(id_, person, time.time())


async def test_an_ending_concerns_the_sessions_of_its_subject_that_have_begun(
    tmp_path: Path,
) -> None:
    rene, paul = Person("cd34", "rene@example.com", "r"), Person("ef56", "paul@example.com", "r")
    async with store_in(tmp_path) as store:
        endings = SessionEndings(store)
        begun = [session("a"), session("b"), session("c", rene), session("d", paul)]
        ended = []
        for subject in ("session a", person_named("cd34"), person_named("OLGA@example.com")):
            await endings.end(subject)
            ended.append("".join(one.id for one in begun if endings.has_ended(one)))
        await endings.end(EVERYONE)

        assert ended == ["a", "ac", "abc"]
        assert all(map(endings.has_ended, begun))
        assert not endings.has_ended(session("e"))


async def test_what_ends_while_the_database_is_away_is_told_when_it_is_back(tmp_path: Path) -> None:
    in_the_way = tmp_path / "data"
    in_the_way.write_text("")
    ended = session("a")
    async with store_in(in_the_way / "warren") as store:
        endings = SessionEndings(store)

        with pytest.raises(Unavailable):
            await endings.end(person_named(OLGA.name))
        assert endings.has_ended(ended)
        in_the_way.unlink()
        await endings.refresh()

    async with store_in(in_the_way / "warren") as store:
        of_another_gateway = SessionEndings(store)
        with pytest.raises(Unavailable, match="database is away"):
            of_another_gateway.has_ended(ended)
        await of_another_gateway.refresh()
        assert of_another_gateway.has_ended(ended)


async def test_an_ending_that_is_written_late_does_not_replace_a_later_ending(
    tmp_path: Path,
) -> None:
    async with store_in(tmp_path) as store:
        stored = (await store.open()).sessions

        for subject, times in (("late", (200.0, 100.0)), ("again", (100.0, 200.0))):
            for ended_at in times:
                await stored.end(subject, ended_at)

        assert await stored.all() == {"late": 200.0, "again": 200.0}


async def test_an_ending_is_forgotten_when_no_session_can_be_older(tmp_path: Path) -> None:
    async with store_in(tmp_path) as store:
        stored = (await store.open()).sessions
        await stored.end("session of long ago", time.time() - LONGEST_SESSION_HOURS * 3600 - 60)
        await stored.end("session of now", time.time())

        await SessionEndings(store).refresh()

        assert set(await stored.all()) == {"session of now"}
