"""The store: its sweeps, and what it writes before it closes."""

import asyncio
import subprocess
import sys
from pathlib import Path

import pytest
from sqlalchemy import text

from gateway.store.database import Database
from gateway.store.files.records import Files
from gateway.store.state import Store, StoredState
from shared import settings
from shared.bus.memory import MemoryBus
from shared.errors import Unavailable
from shared.settings import GatewaySettings
from tests.support.gateway.http import live_gateway
from tests.support.network.connections import serving


async def write(files: Files) -> None:
    async with files.writing("a", "name.jsonl", "batch") as draft:
        await draft.write(b"content")


async def test_sweeps_go_on_after_one_that_does_not_reach_the_database(tmp_path: Path) -> None:
    store = Store(settings.load(GatewaySettings, data_dir=tmp_path))
    states = [await store.open()]
    is_swept_again = asyncio.Event()

    async def sweep(state: StoredState) -> None:
        states.append(state)
        if len(states) == 2:
            raise Unavailable("The database is unreachable.")
        is_swept_again.set()

    sweeping = asyncio.create_task(store.keep_swept(sweep, 0.0))
    await is_swept_again.wait()
    sweeping.cancel()
    await asyncio.wait([sweeping])
    await store.close()

    assert states[0] is states[1] is states[2]


async def test_what_is_being_written_is_written_before_the_store_closes(tmp_path: Path) -> None:
    store = Store(settings.load(GatewaySettings, data_dir=tmp_path))
    may_write = asyncio.Event()
    written: list[int] = []

    async def write() -> None:
        await may_write.wait()
        written.append(await (await store.open()).files.bytes_left("nobody"))

    await store.write(write(), max_wait_s=0.0)
    closing = asyncio.create_task(store.close())
    await asyncio.sleep(0)
    may_write.set()
    await closing

    assert len(written) == 1


async def test_requests_do_not_try_one_after_the_other_to_open_a_database_that_is_silent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.store.postgres.url._CONNECT_TIMEOUT_S", 0.2)
    attempts = []
    has_arrived = asyncio.Event()

    async def be_silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        attempts.append(writer)
        has_arrived.set()
        await reader.read()

    async with serving(be_silent) as port:
        url = f"postgresql://nobody@127.0.0.1:{port}/none?ssl=disable"
        store = Store(
            settings.load(GatewaySettings, data_dir=tmp_path, database_url=url), retry_pause_s=600.0
        )
        opened = await asyncio.gather(*(store.open() for _ in range(5)), return_exceptions=True)
        await has_arrived.wait()  # the attempt may have ended before it was accepted

    assert {type(error) for error in opened} == {Unavailable}
    assert len(attempts) == 1


async def test_a_store_that_closes_while_it_is_opened_stays_closed(tmp_path: Path) -> None:
    store = Store(settings.load(GatewaySettings, data_dir=tmp_path))
    opening = asyncio.create_task(store.open())
    await asyncio.sleep(0)

    await store.close()

    with pytest.raises(Unavailable):
        await opening
    with pytest.raises(Unavailable):
        await store.open()


async def test_the_cause_of_an_unusable_database_is_logged_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    url = "postgresql://nobody:secret@127.0.0.1:1/none"
    store = Store(
        settings.load(GatewaySettings, data_dir=tmp_path, database_url=url), retry_pause_s=0.0
    )
    for _ in range(3):
        with pytest.raises(Unavailable):
            await store.open()

    (line,) = caplog.records
    assert line.getMessage() == "database unavailable"
    assert "ConnectionRefusedError" in line.__dict__["reason"]
    assert "secret" not in line.__dict__["reason"]
    assert (store.outages["database"].is_up(), store.outages["files"].is_up()) == (False, True)


async def test_the_cause_of_an_unusable_directory_is_logged_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    store = Store(
        settings.load(GatewaySettings, data_dir=tmp_path / "file" / "data"), retry_pause_s=0.0
    )
    for _ in range(3):
        with pytest.raises(Unavailable):
            await store.open()

    (line,) = caplog.records
    assert line.getMessage() == "file storage unavailable"
    assert "Not a directory" in line.__dict__["reason"]


async def test_a_full_disk_is_an_outage_until_a_file_is_written(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = Store(settings.load(GatewaySettings, data_dir=tmp_path))
    files = (await store.open()).files
    (tmp_path / "files").rmdir()
    (tmp_path / "files").touch()  # as good as full

    with pytest.raises(Unavailable):
        await write(files)
    assert not store.outages["files"].is_up()
    (tmp_path / "files").unlink()
    await write(files)

    assert store.outages["files"].is_up()
    assert "file storage unavailable" in caplog.text
    await store.close()


@pytest.fixture
def damaged(tmp_path: Path) -> Path:
    directory = tmp_path / "damaged"
    directory.mkdir()
    (directory / "warren.db").write_bytes(b"This is no database. " * 500)
    return directory


@pytest.mark.parametrize(
    ("data_dir", "reason"),
    [
        ("damaged", "warren.db is damaged, or is no SQLite database: restore it from a backup"),
        ("~no-such-user/warren", "this user has no home directory: set it to an absolute path"),
    ],
)
async def test_a_place_that_cannot_be_used_is_unavailable_and_named_once(
    damaged: Path,
    data_dir: str,
    reason: str,
    bus: MemoryBus,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.chdir(tmp_path)
    async with live_gateway(bus, data_dir=data_dir) as gateway:
        answers = [
            await gateway.http.post(
                "/v1/files", data={"purpose": "batch"}, files={"file": ("a.jsonl", b"{}")}
            )
            for _ in range(2)
        ]
        listed = await gateway.http.get("/v1/batches")

    assert [answer.status_code for answer in (*answers, listed)] == [503] * 3
    (said,) = (vars(one) for one in caplog.records if one.levelname == "ERROR")
    assert said["message"] in ("database unavailable", "file storage unavailable")
    assert reason in said["reason"]
    assert not [one for one in caplog.records if one.exc_info]


@pytest.fixture
def half_damaged(migrated_file: Path, tmp_path: Path) -> Path:
    content = migrated_file.read_bytes()
    (tmp_path / "warren.db").write_bytes(content[:100] + b"\xff" * (len(content) - 100))
    return tmp_path


async def test_pages_that_were_damaged_are_unavailable(half_damaged: Path) -> None:
    with pytest.raises(Unavailable):
        await Store(settings.load(GatewaySettings, data_dir=half_damaged)).open()


def test_the_migrations_are_silent(tmp_path: Path) -> None:
    program = (
        "import asyncio, logging, sys; from pathlib import Path\n"
        "logging.basicConfig(level=logging.INFO)\n"
        "from gateway.store.database import Database\n"
        "async def migrate(): await (await Database.open(None, Path(sys.argv[1]))).close()\n"
        "asyncio.run(migrate())"
    )

    done = subprocess.run(
        [sys.executable, "-c", program, tmp_path], check=True, capture_output=True, text=True
    )

    assert done.stderr == ""


async def test_errors_of_statements_do_not_contain_their_values(tmp_path: Path) -> None:
    database = await Database.open(None, tmp_path)
    with pytest.raises(Unavailable) as raised:
        async with database.begin() as connection:
            await connection.execute(text("SELECT :prompt FROM nowhere"), {"prompt": "secret"})
    await database.close()

    assert "nowhere" in str(raised.value.__cause__)
    assert "secret" not in str(raised.value.__cause__)
