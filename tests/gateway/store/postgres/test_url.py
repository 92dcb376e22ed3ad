"""URLs of PostgreSQL as libpq's users write them, and poolers between the gateway and the
server."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from sqlalchemy import text

from gateway.store.database import Database
from gateway.store.files.blobs import Blobs
from gateway.store.files.records import Files
from gateway.store.postgres.url import connect_args
from shared.errors import StartupError, Unavailable
from shared.telemetry.store_outage import StoreOutage
from tests.support.deployment.pooling.pgbouncer import running_pgbouncer
from tests.support.deployment.postgres import PostgresServer

PLACE = "postgresql://u:secret@h/db"


@pytest.fixture
def url(postgres: PostgresServer, migrated_template: str) -> str:
    return postgres.create_database(migrated_template)


@pytest.fixture
def pooled(url: str) -> Iterator[str]:
    with running_pgbouncer(url) as pool:
        yield pool


async def setting(url: str, name: str) -> str:
    database = Database.at(url, StoreOutage("database"))
    try:
        async with database.read() as connection:
            return str((await connection.execute(text(f"SHOW {name}"))).scalar_one())
    finally:
        await database.close()


@pytest.mark.parametrize(
    ("query", "name", "value"),
    [
        ("sslmode=prefer", "ssl", "off"),
        ("sslmode=disable&connect_timeout=3", "ssl", "off"),
        ("ssl=disable", "ssl", "off"),
        ("application_name=warren", "application_name", "warren"),
        ("options=-c%20work_mem%3D8MB", "work_mem", "8MB"),
        ("statement_cache_size=0&prepared_statement_cache_size=0", "ssl", "off"),
        ("keepalives=1&gssencmode=disable&channel_binding=prefer", "ssl", "off"),
        ("target_session_attrs=read-write", "ssl", "off"),
    ],
)
async def test_parameters_of_libpq_are_understood(
    url: str, query: str, name: str, value: str
) -> None:
    assert await setting(f"{url}?{query}", name) == value


@pytest.mark.parametrize(
    "form",
    [
        "postgresql://{user}@127.0.0.1:1,127.0.0.1:{port}{path}",
        "postgres://{user}@{path}?host=127.0.0.1,127.0.0.1&port=1,{port}",
        "postgresql://{user}@{path}?host=127.0.0.1:1&host=127.0.0.1:{port}",
    ],
)
async def test_the_first_host_that_answers_is_used(url: str, form: str) -> None:
    parts = urlsplit(url)
    several = form.format(user=parts.username, port=parts.port, path=parts.path)

    assert await setting(several, "ssl") == "off"


@pytest.mark.parametrize(
    ("written", "reason"),
    [
        (f"{PLACE}?sslmod=require", "'sslmod' is not a parameter"),
        (f"{PLACE}?sslmode=on", "sslmode='on' is not one of disable"),
        (f"{PLACE}?ssl=on", "ssl='on' is not one of disable"),
        (f"{PLACE}?sslrootcert=/none", "sslrootcert: there is no file /none"),
        (f"{PLACE}?connect_timeout=soon", "connect_timeout: expected a number"),
        (f"{PLACE}?channel_binding=require", "use sslmode=verify-full"),
        (f"{PLACE}?host=a,b,c&port=1,2", "as many as there are hosts"),
        ("postgresql://u:secret@h:x/db", "expected a number from 1 to 65535"),
        ("postgresql://u:secret@h:0/db", "expected a number from 1 to 65535"),
        ("postgresql://u:secret@[::1/db", "not a valid URL"),
    ],
)
def test_what_is_not_understood_is_named(written: str, reason: str) -> None:
    with pytest.raises(StartupError, match="WARREN_DATABASE_URL") as raised:
        connect_args(written)

    assert reason in raised.value.message
    assert "secret" not in raised.value.message


def test_addresses_of_ipv6_and_sockets_are_kept() -> None:
    (ipv6, socket) = (
        connect_args(place)["dsn"]
        for place in ("postgresql://u@[::1]:6000/db", "postgresql://u@%2Frun%2Fpg/db")
    )

    assert ipv6.endswith("?host=%3A%3A1&port=6000")
    assert socket.endswith("?host=%2Frun%2Fpg&port=5432")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (("warren@", "nobody:wrong@"), 'role "nobody" does not exist: correct the user'),
        (("/test_", "/no_"), "does not exist: create the database"),
        (("/test_", "/test_"), "unrecognized configuration parameter"),
    ],
    ids=["user", "database", "server setting"],
)
async def test_a_connection_that_the_server_refuses_names_the_remedy(
    url: str, change: tuple[str, str], reason: str, tmp_path: Path
) -> None:
    wrong = url.replace(*change)
    if change[0] == change[1]:
        wrong += "?options=-c%20nonsense%3D1"

    with pytest.raises(StartupError, match="WARREN_DATABASE_URL") as raised:
        await Database.open(wrong, tmp_path)

    assert reason in raised.value.message


async def test_a_server_without_tls_is_unavailable_to_those_who_require_it(
    url: str, tmp_path: Path
) -> None:
    outage = StoreOutage("database")

    with pytest.raises(Unavailable):
        await Database.open(f"{url}?sslmode=require", tmp_path, outage)

    assert not outage.is_up()


async def test_a_database_behind_pgbouncer_is_migrated(
    postgres: PostgresServer, tmp_path: Path
) -> None:
    with running_pgbouncer(postgres.create_database()) as pooled:
        database = await Database.open(pooled, tmp_path)
        await database.close()


async def test_pgbouncer_may_give_each_transaction_another_connection(
    pooled: str, tmp_path: Path
) -> None:
    places = [Database.at(pooled, StoreOutage("database")) for _ in range(3)]
    blobs = Blobs.in_directory(tmp_path, StoreOutage("files"))
    stores = [Files(database, blobs) for database in places]

    async def upload(number: int) -> str:
        files = stores[number % len(stores)]
        async with files.writing("alice", f"{number}", "batch") as draft:
            await draft.write(b"a")
        return (await files.get("alice", draft.id)).filename

    names = await asyncio.gather(*(upload(number) for number in range(60)))

    assert names == [str(number) for number in range(60)]
    listed = await stores[0].page("alice", purpose=None, after=None, limit=100, newest_first=True)
    assert len(listed) == 60
    for database in places:
        await database.close()
