import sqlite3
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import closing
from pathlib import Path
from typing import Literal

import httpx
import openai
import pytest

from gateway.intake.keys.key_file import KeyFile
from gateway.store.database import SQLITE_FILE
from gateway.store.files import records
from shared.bus.memory import MemoryBus
from tests.support.gateway.http import LiveGateway, live_gateway
from tests.support.workers.scripted_worker import ScriptedWorker

CONTENT = bytes(range(256)) * 4


async def upload(
    gateway: LiveGateway,
    content: bytes = CONTENT,
    fields: Mapping[str, str] | None = None,
    headers: Mapping[str, str] | None = None,
) -> httpx.Response:
    files = {"file": ("dir/na\\me.jsonl", content)}
    data = {"purpose": "batch", **(fields or {})}
    return await gateway.http.post("/v1/files", data=data, files=files, headers=headers)


async def test_a_file_whose_bytes_are_missing_is_not_found(
    storing: LiveGateway, tmp_path: Path
) -> None:
    file_id = (await upload(storing)).json()["id"]
    (tmp_path / "files" / file_id).unlink()

    response = await storing.http.get(f"/v1/files/{file_id}/content")

    assert (response.status_code, response.json()["error"]["param"]) == (404, "id")


async def test_a_client_of_openai_handles_files(storing: LiveGateway) -> None:
    client = storing.openai.files

    made = await client.create(file=("in.jsonl", CONTENT), purpose="batch")
    found = await client.retrieve(made.id)
    listed = [file async for file in client.list(limit=1)]
    outputs = [file async for file in client.list(purpose="batch_output")]
    content = (await client.content(made.id)).content
    gone = await client.delete(made.id)

    assert (made.object, made.bytes, made.filename) == ("file", len(CONTENT), "in.jsonl")
    assert made.created_at <= time.time() < (made.expires_at or 0)
    assert (found, listed, outputs) == (made, [made], [])
    assert content == CONTENT
    assert gone.deleted
    with pytest.raises(openai.NotFoundError, match="No such File"):
        await client.retrieve(made.id)


@pytest.mark.parametrize("order", ["asc", "desc"])
async def test_a_client_of_openai_lists_files_by_their_age(
    storing: LiveGateway, tmp_path: Path, order: Literal["asc", "desc"]
) -> None:
    client = storing.openai.files
    made = [(await client.create(file=("f", CONTENT), purpose="batch")).id for _ in range(3)]
    with closing(sqlite3.connect(tmp_path / SQLITE_FILE)) as database, database:
        for age, file_id in enumerate(reversed(made)):
            change = "UPDATE files SET created_at = created_at - ? WHERE id = ?"
            database.execute(change, (age, file_id))

    listed = [file.id async for file in client.list(order=order, limit=2)]

    assert listed == (made if order == "asc" else made[::-1])


@pytest.mark.parametrize(
    ("asked", "span"),
    [
        ("bytes=0-0", (0, 1)),
        ("bytes=10-19", (10, 20)),
        ("bytes=1000-", (1000, 1024)),
        ("bytes=-24", (1000, 1024)),
        ("bytes=1000-9999", (1000, 1024)),
    ],
)
async def test_a_range_is_a_part(storing: LiveGateway, asked: str, span: tuple[int, int]) -> None:
    file_id = (await upload(storing)).json()["id"]

    part = await storing.http.get(f"/v1/files/{file_id}/content", headers={"range": asked})

    assert part.status_code == 206
    assert part.content == CONTENT[slice(*span)]
    assert part.headers["content-range"] == f"bytes {span[0]}-{span[1] - 1}/1024"


@pytest.mark.parametrize("asked", ["bytes=2000-", "bytes=-0"])
async def test_a_range_behind_the_end_is_refused(storing: LiveGateway, asked: str) -> None:
    file_id = (await upload(storing)).json()["id"]

    refused = await storing.http.get(f"/v1/files/{file_id}/content", headers={"range": asked})

    assert refused.status_code == 416
    assert refused.headers["content-range"] == "bytes */1024"


@pytest.mark.parametrize("asked", ["bytes=0-1,5-6", "lines=1-2", "bytes=9-1", "bytes=-"])
async def test_what_is_not_one_range_is_ignored(storing: LiveGateway, asked: str) -> None:
    file_id = (await upload(storing)).json()["id"]

    whole = await storing.http.get(f"/v1/files/{file_id}/content", headers={"range": asked})

    assert (whole.status_code, whole.content) == (200, CONTENT)


async def test_a_name_is_no_path(storing: LiveGateway) -> None:
    assert (await upload(storing)).json()["filename"] == "dir_na_me.jsonl"


async def test_an_upload_says_when_it_expires(storing: LiveGateway) -> None:
    expiry = {"expires_after[anchor]": "created_at", "expires_after[seconds]": "3600"}

    asked_at = int(time.time())
    file = (await upload(storing, fields=expiry)).json()

    assert asked_at <= file["created_at"] <= time.time()
    assert asked_at + 3600 <= file["expires_at"] <= time.time() + 3600


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"purpose": "assistants"}, "purpose"),
        ({"expires_after[seconds]": "3600"}, "expires_after"),
        (
            {"expires_after[anchor]": "created_at", "expires_after[seconds]": "1"},
            "expires_after",
        ),
    ],
)
async def test_a_wrong_field_is_named(
    storing: LiveGateway, tmp_path: Path, fields: dict[str, str], param: str
) -> None:
    refused = await upload(storing, fields=fields)

    assert (refused.status_code, refused.json()["error"]["param"]) == (400, param)
    assert list((tmp_path / "files").iterdir()) == []


async def test_a_form_needs_its_file(storing: LiveGateway) -> None:
    refused = await storing.http.post("/v1/files", files={"purpose": (None, "batch")})

    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "file")


@pytest.mark.parametrize(
    ("content_type", "body", "status"),
    [
        ("application/json", b"{}", 415),
        ("multipart/form-data", b"", 415),
        (f"multipart/form-data; boundary={'x' * 257}", b"", 400),
        ("multipart/form-data; boundary=x", b"no form", 400),
        ("multipart/form-data; boundary=x", b"--x\r\n", 400),
    ],
)
async def test_what_is_no_form_is_refused(
    storing: LiveGateway, content_type: str, body: bytes, status: int
) -> None:
    headers = {"content-type": content_type}

    assert (await storing.http.post("/v1/files", content=body, headers=headers)).status_code == (
        status
    )


def form_with(num_fields: int) -> bytes:
    """A form with an empty file and ``num_fields`` fields, which have the same name."""
    head = b"--x\r\ncontent-disposition: form-data; name="
    field, file = b'"purpose"\r\n\r\nbatch\r\n', b'"file"; filename="f"\r\n\r\n\r\n'
    return (head + field) * num_fields + head + file + b"--x--\r\n"


async def test_a_form_of_unknown_length_is_limited_beside_its_file(storing: LiveGateway) -> None:
    async def long() -> AsyncIterator[bytes]:
        for _ in range(200):
            yield b"\r\n" * 5000
        yield form_with(1)

    headers = {"content-type": "multipart/form-data; boundary=x"}
    refused = await storing.http.post("/v1/files", content=long(), headers=headers)

    assert refused.status_code == 413


@pytest.mark.parametrize(("num_fields", "status"), [(32, 200), (33, 400)])
async def test_the_parts_of_a_form_are_counted(
    storing: LiveGateway, num_fields: int, status: int
) -> None:
    headers = {"content-type": "multipart/form-data; boundary=x"}
    content = form_with(num_fields)

    answer = await storing.http.post("/v1/files", content=content, headers=headers)

    assert answer.status_code == status


async def test_sizes_are_limited(bus: MemoryBus, worker: ScriptedWorker, tmp_path: Path) -> None:
    limits = {"max_file_bytes": 1500, "max_tenant_bytes": 2000, "data_dir": tmp_path}
    async with live_gateway(bus, **limits) as gateway:
        statuses = [
            (await upload(gateway, bytes(size))).status_code for size in (1501, 1500, 501, 500, 1)
        ]

    assert statuses == [413, 200, 413, 200, 413]
    assert sorted(path.stat().st_size for path in (tmp_path / "files").iterdir()) == [500, 1500]


async def test_a_file_that_is_being_received_leaves_no_room_for_another_one(
    bus: MemoryBus, tmp_path: Path
) -> None:
    order = {"bytes": 500, "filename": "f", "mime_type": "text/plain", "purpose": "batch"}
    async with live_gateway(bus, max_tenant_bytes=1000, data_dir=tmp_path) as gateway:

        async def slow() -> AsyncIterator[bytes]:
            yield b'--x\r\ncontent-disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
            yield b'--x\r\ncontent-disposition: form-data; name="file"; filename="f"\r\n\r\n'
            yield bytes(600)
            while (await gateway.post("/v1/uploads", **order)).status_code == 200:
                pass
            yield b"\r\n--x--\r\n"

        headers = {"content-type": "multipart/form-data; boundary=x"}
        received = await gateway.http.post("/v1/files", content=slow(), headers=headers)

    assert received.status_code == 200


async def test_the_number_of_files_is_limited(
    storing: LiveGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(records, "MAX_FILES", 1)

    statuses = [(await upload(storing, b"")).status_code for _ in range(2)]

    assert statuses == [200, 413]


async def test_a_tenant_sees_its_own_files_only(
    bus: MemoryBus, worker: ScriptedWorker, tmp_path: Path
) -> None:
    keys = KeyFile(tmp_path / "keys")
    mine, other = ({"authorization": f"Bearer {keys.add(tenant)}"} for tenant in ("me", "other"))
    async with live_gateway(bus, data_dir=tmp_path, keys_file=tmp_path / "keys") as gateway:
        file_id = (await upload(gateway, headers=mine)).json()["id"]

        async def status(path: str, headers: dict[str, str]) -> int:
            return (await gateway.http.get(path, headers=headers)).status_code

        assert await status(f"/v1/files/{file_id}", mine) == 200
        assert await status(f"/v1/files/{file_id}", other) == 404
        assert await status(f"/v1/files/{file_id}/content", other) == 404
        listed = await gateway.http.get("/v1/files", headers=other)
        assert listed.json()["data"] == []
        deleted = await gateway.http.delete(f"/v1/files/{file_id}", headers=other)
        assert deleted.status_code == 404


async def test_a_directory_that_cannot_be_used_is_not_named_to_clients(
    bus: MemoryBus, worker: ScriptedWorker, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    async with live_gateway(bus, data_dir=tmp_path / "file") as gateway:
        refused = await gateway.http.get("/v1/files")

    assert refused.status_code == 503
    assert str(tmp_path) not in refused.text


async def test_the_download_of_a_file_that_is_deleted_is_cut_and_is_no_incident(
    storing: LiveGateway, caplog: pytest.LogCaptureFixture
) -> None:
    file_id = (await upload(storing, bytes(64 << 20))).json()["id"]
    path = f"/v1/files/{file_id}"

    async def download() -> None:
        async with storing.http.stream("GET", f"{path}/content") as response:
            await storing.http.delete(path)
            await response.aread()

    with pytest.raises(httpx.RemoteProtocolError):
        await download()

    assert "request failed" not in caplog.text
