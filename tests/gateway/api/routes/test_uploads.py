import hashlib
import json
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from gateway.intake.keys.key_file import KeyFile
from shared.bus.memory import MemoryBus
from tests.support.gateway.batches import chat, ended, jsonl, output, texts
from tests.support.gateway.http import LiveGateway, live_gateway
from tests.support.workers.scripted_worker import ScriptedWorker

ORDER: dict[str, Any] = {
    "bytes": 4,
    "filename": "in.jsonl",
    "mime_type": "application/jsonl",
    "purpose": "batch",
}


async def test_the_helper_of_openai_uploads_the_file_of_a_batch(
    storing: LiveGateway, tmp_path: Path
) -> None:
    path = tmp_path / "in.jsonl"
    path.write_bytes(jsonl(chat(f"line {k}", f"number {k}") for k in range(10)))
    content = path.read_bytes()

    upload = await storing.openai.uploads.upload_file_chunked(
        file=path,
        mime_type="application/jsonl",
        purpose="batch",
        part_size=500,
        md5=hashlib.md5(content, usedforsecurity=False).hexdigest(),
    )

    assert (upload.object, upload.status, upload.bytes) == ("upload", "completed", len(content))
    assert upload.file is not None
    assert await storing.openai.files.retrieve(upload.file.id) == upload.file
    assert (await storing.openai.files.content(upload.file.id)).content == content
    batch = await storing.openai.batches.create(
        input_file_id=upload.file.id, endpoint="/v1/chat/completions", completion_window="24h"
    )
    answers = await output(storing, (await ended(storing, batch)).output_file_id)
    assert texts(answers) == {f"line {k}": f"number {k}" for k in range(10)}


async def test_parts_are_put_together_in_the_order_asked_for(storing: LiveGateway) -> None:
    uploads = storing.openai.uploads
    expiry: Any = {"anchor": "created_at", "seconds": 3600}
    upload = await uploads.create(**ORDER, expires_after=expiry)
    last, first = [await uploads.parts.create(upload.id, data=data) for data in (b"34", b"12")]

    done = await uploads.complete(upload.id, part_ids=[first.id, last.id])

    assert (upload.status, upload.file, upload.filename) == ("pending", None, "in.jsonl")
    assert (first.object, first.upload_id) == ("upload.part", upload.id)
    assert done.file is not None
    assert done.file.expires_at == pytest.approx(done.file.created_at + 3600, abs=60)
    assert (await storing.openai.files.content(done.file.id)).content == b"1234"
    assert await uploads.complete(upload.id, part_ids=[first.id, last.id]) == done
    with pytest.raises(openai.BadRequestError, match="completed"):
        await uploads.parts.create(upload.id, data=b"more")


async def test_a_cancelled_upload_takes_no_parts(storing: LiveGateway) -> None:
    uploads = storing.openai.uploads
    upload = await uploads.create(**ORDER)

    assert (await uploads.cancel(upload.id)).status == "cancelled"

    with pytest.raises(openai.BadRequestError, match="cancelled"):
        await uploads.parts.create(upload.id, data=b"1234")
    with pytest.raises(openai.BadRequestError, match="cancelled"):
        await uploads.complete(upload.id, part_ids=[])


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"bytes": -1}, "bytes"),
        ({"bytes": 1 << 40}, "bytes"),
        ({"filename": ""}, "filename"),
        ({"purpose": "assistants"}, "purpose"),
        ({"expires_after": {"anchor": "created_at", "seconds": 1}}, "expires_after"),
    ],
)
async def test_a_wrong_field_of_an_order_is_named(
    storing: LiveGateway, changes: dict[str, Any], param: str
) -> None:
    refused = await storing.post("/v1/uploads", **{**ORDER, **changes})

    assert (refused.status_code, refused.json()["error"]["param"]) == (400, param)


@pytest.mark.parametrize(
    ("completion", "param"),
    [
        ({"part_ids": ["part_unknown"]}, "part_ids"),
        ({"part_ids": []}, "part_ids"),
        ({"part_ids": ["PART"], "md5": "0" * 32}, "md5"),
        ({"part_ids": ["PART"], "md5": "no digest"}, "md5"),
        ({}, "part_ids"),
    ],
)
async def test_a_completion_that_does_not_fit_is_refused_and_may_be_repeated(
    storing: LiveGateway, completion: dict[str, Any], param: str
) -> None:
    upload = await storing.openai.uploads.create(**ORDER)
    part = await storing.openai.uploads.parts.create(upload.id, data=b"1234")
    body = json.loads(json.dumps(completion).replace("PART", part.id))

    refused = await storing.post(f"/v1/uploads/{upload.id}/complete", **body)

    assert (refused.status_code, refused.json()["error"]["param"]) == (400, param)
    done = await storing.openai.uploads.complete(upload.id, part_ids=[part.id])
    assert done.status == "completed"


async def test_a_part_needs_its_data(storing: LiveGateway) -> None:
    upload = await storing.openai.uploads.create(**ORDER)
    path = f"/v1/uploads/{upload.id}/parts"

    refused = await storing.http.post(path, files={"file": ("name", b"1234")})

    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "data")


async def test_sizes_are_limited(bus: MemoryBus, worker: ScriptedWorker, tmp_path: Path) -> None:
    limits = {"max_file_bytes": 1500, "max_tenant_bytes": 2000, "data_dir": tmp_path}
    async with live_gateway(bus, **limits) as gateway:

        async def order(num_bytes: int) -> httpx.Response:
            return await gateway.post("/v1/uploads", **{**ORDER, "bytes": num_bytes})

        async def add(upload_id: str, num_bytes: int) -> int:
            path = f"/v1/uploads/{upload_id}/parts"
            files = {"data": ("name", bytes(num_bytes))}
            return (await gateway.http.post(path, files=files)).status_code

        orders = [(await order(size)).status_code for size in (1501, 1500)]
        one, other = [(await order(1500)).json()["id"] for _ in range(2)]
        parts = [await add(one, 1501), await add(one, 1500), await add(one, 1)]
        others = [await add(other, 501), await add(other, 500), await add(other, 1)]

    assert orders == [400, 200]
    assert parts == [413, 200, 400]
    assert others == [413, 200, 413]
    assert sorted(path.stat().st_size for path in (tmp_path / "files").iterdir()) == [500, 1500]


async def test_a_tenant_sees_its_own_uploads_only(
    bus: MemoryBus, worker: ScriptedWorker, tmp_path: Path
) -> None:
    keys = KeyFile(tmp_path / "keys")
    mine, other = (openai.AsyncOpenAI(api_key=keys.add(name), base_url="-") for name in "ab")
    async with live_gateway(bus, data_dir=tmp_path, keys_file=tmp_path / "keys") as gateway:
        for client in (mine, other):
            client.base_url = f"{gateway.url}/v1"
        async with mine, other:
            upload = await mine.uploads.create(**ORDER)

            with pytest.raises(openai.NotFoundError, match="No such Upload"):
                await other.uploads.parts.create(upload.id, data=b"1234")
            with pytest.raises(openai.NotFoundError):
                await other.uploads.complete(upload.id, part_ids=[])
            with pytest.raises(openai.NotFoundError):
                await other.uploads.cancel(upload.id)
            assert (await mine.uploads.cancel(upload.id)).status == "cancelled"
