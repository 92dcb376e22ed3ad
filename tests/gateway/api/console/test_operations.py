"""The console's other views, in Chromium: workers, dead letters, usage and batches."""

import json
from pathlib import Path
from typing import Any

import pytest
from playwright.async_api import Page, Route, expect

from gateway.intake.key_file import KeyFile, id_of
from shared.bus.memory import MemoryBroker, MemoryBus
from tests.gateway.api.console.test_accessibility import faults
from tests.support.console import STEP_S, answered, ask_for_many_tokens, begun, open_console
from tests.support.gateway.http import LiveGateway, hears_a_worker, live_gateway
from tests.support.workers.jobs import bury
from tests.support.workers.scripted_worker import ScriptedWorker
from tests.support.workers.synthetic import echo_worker


async def test_a_drained_workers_stream_moves_to_another_without_a_gap(
    page: Page, broker: MemoryBroker
) -> None:
    async with live_gateway(broker) as gateway, echo_worker(broker, step_s=STEP_S):
        await hears_a_worker(gateway)
        await open_console(page, gateway)
        await ask_for_many_tokens(page)
        await begun(page)
        await page.get_by_role("link", name="Fleet").click()
        streams = page.get_by_role("table", name="Streams")
        await expect(streams.get_by_text("running")).to_be_visible()

        async with echo_worker(broker, step_s=STEP_S):
            await page.get_by_role("button", name="Drain worker").first.click()
            await page.get_by_role("button", name="Move requests now").click()
            await expect(page.get_by_text("leaving")).to_be_visible()
            await page.get_by_role("link", name="Chat").click()
            await answered(page)

    await expect(page.locator(".notes")).to_have_text("Worker left, continued on another")


async def test_a_dead_letter_is_retried(
    page: Page, gateway: LiveGateway, bus: MemoryBus, worker: ScriptedWorker
) -> None:
    await bury(bus, "chatcmpl-one")
    await bury(bus, "chatcmpl-two")
    await open_console(page, gateway, "dead-letters")
    row = page.get_by_role("row").filter(has_text="one")

    await row.get_by_role("button", name="Retry").click()

    await expect(page.get_by_text("one was returned to its queue.")).to_be_visible()
    await expect(row).to_have_count(0)
    await expect(page.get_by_role("row").filter(has_text="two")).to_be_visible()


async def test_a_dead_letter_is_dropped_after_a_question(
    page: Page, gateway: LiveGateway, bus: MemoryBus
) -> None:
    await bury(bus, "chatcmpl-one")
    await open_console(page, gateway, "dead-letters")

    await page.get_by_role("button", name="Drop one").click()
    await page.get_by_role("dialog").get_by_role("button", name="Drop").click()

    await expect(page.get_by_text("No dead letters.")).to_be_visible()


async def test_usage_is_shown_by_tenant(page: Page, gateway: LiveGateway) -> None:
    await gateway.chat()
    await open_console(page, gateway, "usage")

    row = page.get_by_role("row").filter(has_text="anonymous")
    await expect(row.get_by_role("cell")).to_have_text(["anonymous", "1", "0", "0", "3", "0", "3"])


async def test_limits_are_shown_by_key(page: Page, bus: MemoryBus, tmp_path: Path) -> None:
    file = KeyFile(tmp_path / "keys")
    key = file.add("ops", label="On call", scopes=("operator",), requests_per_minute=600)
    async with live_gateway(bus, keys_file=file.path) as gateway:
        await page.goto(f"{gateway.url}/#usage")
        await page.get_by_label("Key", exact=True).fill(key)
        await page.get_by_role("button", name="Use the key").click()

        row = page.get_by_role("table", name="API keys").get_by_role("row").nth(1)
        cells = row.get_by_role("cell")
        limits = ["0 of 600", "no limit", "no limit", "never"]
        await expect(cells).to_have_text([f"{id_of(key)}On call", "ops", *limits])
        assert await faults(page) == []


async def test_a_fleet_without_workers_says_what_to_do(page: Page, bus: MemoryBus) -> None:
    async with live_gateway(bus) as gateway:
        await open_console(page, gateway, "fleet")

        await expect(page.get_by_text("No worker is alive.")).to_be_visible()
        await expect(page.locator("#pulse")).to_have_text("No workers")


BATCH = {
    "id": "batch_11112222",
    "endpoint": "/v1/chat/completions",
    "status": "in_progress",
    "created_at": 1,
    "request_counts": {"total": 40, "completed": 10, "failed": 2},
    "output_file_id": None,
    "error_file_id": None,
}


@pytest.fixture
async def batches(page: Page) -> list[str]:
    """The endpoints of OpenAI's batches, with one batch; returns what is posted to them."""
    posted: list[str] = []

    async def answer(route: Route) -> None:
        request = route.request
        if request.method == "POST":
            posted.append(request.url.partition("/v1/")[2])
        body: Any = {"object": "list", "data": [BATCH]}
        await route.fulfill(json={"id": "file-1"} if "files" in request.url else body)

    await page.route("**/v1/batches**", answer)
    await page.route("**/v1/files", answer)
    return posted


async def test_batches_are_started_and_followed_where_the_gateway_has_them(
    page: Page, gateway: LiveGateway, batches: list[str]
) -> None:
    await open_console(page, gateway)
    await page.get_by_role("link", name="Batches").click()
    line = {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": {}}
    file: Any = {
        "name": "requests.jsonl",
        "mimeType": "application/jsonl",
        "buffer": json.dumps(line).encode(),
    }

    await page.get_by_label("File of requests").set_input_files(file)
    await page.get_by_role("button", name="Start the batch").click()

    await expect(page.get_by_text("requests.jsonl was started.")).to_be_visible()
    await expect(page.get_by_text("10 of 40, 2 failed")).to_be_visible()
    assert batches == ["files", "batches"]


async def test_there_is_no_view_of_batches_where_the_gateway_has_none(
    page: Page, gateway: LiveGateway
) -> None:
    await page.route("**/v1/batches**", lambda route: route.fulfill(status=404, json={}))
    await open_console(page, gateway, "fleet")

    await expect(page.get_by_role("link", name="Fleet")).to_be_visible()
    await expect(page.get_by_role("link", name="Batches")).to_be_hidden()
