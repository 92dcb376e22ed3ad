"""The console's other views, in Chromium: workers, dead letters, usage and batches."""

import asyncio
import itertools
import json
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from playwright.async_api import FilePayload, Locator, Page, Route, expect

from gateway.intake.keys.api_key import id_of
from gateway.intake.keys.key_file import KeyFile
from shared.bus.memory import MemoryBroker, MemoryBus
from tests.gateway.api.console.test_accessibility import faults
from tests.support.console import (
    SLOW_STEP_S,
    STEP_S,
    answered,
    ask_for_many_tokens,
    begun,
    give_key,
    open_console,
)
from tests.support.gateway.batches import chat, jsonl, order, texts
from tests.support.gateway.http import (
    LiveGateway,
    chat_body,
    hears_a_worker,
    live_gateway,
    two_gateways,
)
from tests.support.workers.jobs import dead_letter, new_job, publish
from tests.support.workers.scripted_worker import MODEL, ScriptedWorker, start_only
from tests.support.workers.synthetic import echo_worker


async def test_a_drained_workers_stream_moves_to_another_without_a_gap(
    page: Page, broker: MemoryBroker
) -> None:
    async with live_gateway(broker) as gateway, echo_worker(broker, step_s=SLOW_STEP_S):
        await hears_a_worker(gateway)
        await open_console(page, gateway)
        await ask_for_many_tokens(page)
        await begun(page)
        await page.get_by_role("link", name="Fleet").click()
        streams = page.get_by_role("table", name="Streams")
        await expect(streams.get_by_text("running")).to_be_visible()

        async with echo_worker(broker):
            await page.get_by_role("button", name="Drain worker").first.click()
            await page.get_by_role("button", name="Move requests now").click()
            await expect(page.get_by_text("leaving")).to_be_visible()
            await page.get_by_role("link", name="Chat").click()
            await answered(page)

    await expect(page.locator(".notes")).to_have_text("Worker left, continued on another")


async def test_a_dead_letter_is_retried(
    page: Page, gateway: LiveGateway, bus: MemoryBus, worker: ScriptedWorker
) -> None:
    await dead_letter(bus, "chatcmpl-one")
    await dead_letter(bus, "chatcmpl-two")
    await open_console(page, gateway, "dead-letters")
    row = page.get_by_role("row").filter(has_text="one")

    await row.get_by_role("button", name="Retry").click()

    await expect(page.get_by_text("one was returned to its queue.")).to_be_visible()
    await expect(row).to_have_count(0)
    await expect(page.get_by_role("row").filter(has_text="two")).to_be_visible()


async def test_a_dead_letter_is_dropped_after_a_question(
    page: Page, gateway: LiveGateway, bus: MemoryBus
) -> None:
    await dead_letter(bus, "chatcmpl-one")
    await open_console(page, gateway, "dead-letters")

    await page.get_by_role("button", name="Drop one").click()
    await page.get_by_role("dialog").get_by_role("button", name="Drop").click()

    await expect(page.get_by_text("No dead letters.")).to_be_visible()


async def test_a_dead_letters_body_is_shown_and_all_are_dropped(
    page: Page, gateway: LiveGateway, bus: MemoryBus
) -> None:
    for number in range(2):
        await dead_letter(bus, f"publisher-of-reports-{number}")
    await open_console(page, gateway, "dead-letters")
    await expect(page.get_by_text("publisher-of-reports-0")).to_be_visible()
    await expect(page.locator("#pulse")).to_have_text("2 dead letters")

    await page.get_by_role("button", name="Show publisher-of-reports-0").click()
    await expect(page.locator("#letter-body")).to_contain_text("Once upon a time")
    assert await faults(page) == []
    await page.get_by_role("dialog").get_by_role("button", name="Close").click()
    await page.get_by_role("button", name="Drop all").click()
    await page.get_by_role("dialog").get_by_role("button", name="Drop all").click()

    await expect(page.get_by_text("2 dead letters dropped.")).to_be_visible()
    await expect(page.get_by_text("No dead letters.")).to_be_visible()
    await expect(page.get_by_role("button", name="Drop all")).to_be_hidden()


async def test_jobs_without_a_worker_are_marked(page: Page, bus: MemoryBus) -> None:
    async with live_gateway(bus) as gateway:
        async with ScriptedWorker(bus):
            await hears_a_worker(gateway)
        await publish(bus, new_job(MODEL, mode="final"))

        await open_console(page, gateway, "fleet")

        rows = page.get_by_role("table", name="Queues").get_by_role("row")
        await expect(rows.filter(has_text="Interactive")).to_contain_text("no consumer")
        problem = f"1 job of {MODEL} and no worker that takes them"
        await expect(page.locator("#problems .bad")).to_have_text(problem)
        await expect(page.locator("#pulse")).to_contain_text(problem)
        await expect(page.locator("#pulse")).to_have_attribute("data-state", "bad")


async def test_the_dot_says_what_the_alerts_would(page: Page, gateway: LiveGateway) -> None:
    await open_console(page, gateway)
    cases: list[tuple[dict[str, Any], str, str]] = [
        ({}, "ok", "1 worker, 2 jobs waiting"),
        ({"num_dead_letters": 3}, "warn", "3 dead letters"),
        ({"workers": []}, "warn", "No workers"),
        ({"oldest_s": 45}, "warn", "A job of m has waited 45 s"),
        ({"oldest_s": 45, "lane": "batch"}, "ok", "1 worker, 2 jobs waiting"),
        ({"num_consumers": 0}, "bad", "2 jobs of m and no worker that takes them"),
        ({"status": "draining", "num_dead_letters": 1}, "warn", "Gateway is draining, and 1 more"),
        ({"status": "broker_unavailable"}, "bad", "Broker unreachable"),
    ]
    queue = {"model": "m", "lane": "interactive", "num_waiting": 2, "num_consumers": 1}
    statuses = [
        {
            "gateway": {"status": changes.get("status", "ok")},
            "workers": changes.get("workers", [{"state": "serving"}]),
            "queues": [{**queue, "oldest_s": 1, **changes}],
            "num_dead_letters": changes.get("num_dead_letters", 0),
        }
        for changes, *_ in cases
    ]

    said = await page.evaluate(
        """all => import("/console/problems.js").then(({ summary }) => all.map(summary))""",
        statuses,
    )

    assert said == [[state, text] for _, state, text in cases]


async def test_dead_letters_are_listed_once_when_their_view_is_opened(
    page: Page, gateway: LiveGateway, bus: MemoryBus
) -> None:
    await dead_letter(bus, "chatcmpl-one")
    await open_console(page, gateway)
    await expect(page.locator("#dead-count")).to_have_text("1")
    listings: list[str] = []
    page.on("request", lambda request: listings.append(request.url))

    for view in ("Dead letters", "Fleet", "Dead letters"):
        async with page.expect_response("**/admin/v1/status"):
            await page.get_by_role("link", name=view).click()
        async with page.expect_response("**/admin/v1/status"):
            """The status is shown again, with the same number of letters."""

    await expect(page.get_by_role("row").filter(has_text="one")).to_be_visible()
    assert len([url for url in listings if url.endswith("/dead-letters")]) == 2


async def test_usage_is_shown_by_tenant(page: Page, gateway: LiveGateway) -> None:
    await gateway.chat()
    await open_console(page, gateway, "usage")

    tenants = page.get_by_role("table", name="Usage by tenant")
    row = tenants.get_by_role("row").filter(has_text="anonymous")
    await expect(row.get_by_role("cell")).to_have_text(
        ["anonymous", "1", "0", "0", "0", "3", "0", "3"]
    )


@asynccontextmanager
async def behind_a_proxy(broker: MemoryBroker, page: Page) -> AsyncIterator[Sequence[LiveGateway]]:
    """Two gateways that answer the page's requests for the status in turn, and a worker."""
    async with two_gateways(broker) as gateways, echo_worker(broker, step_s=STEP_S):
        urls = itertools.cycle(gateway.url for gateway in gateways)

        async def pass_on(route: Route) -> None:
            response = await route.fetch(url=f"{next(urls)}/admin/v1/status")
            await route.fulfill(response=response)

        await page.route("**/admin/v1/status", pass_on)
        for gateway in gateways:
            await hears_a_worker(gateway)
        yield gateways
        await page.unroute_all(behavior="wait")


async def test_hedges_audits_and_equal_requests_are_counted_and_disagreements_are_listed(
    page: Page, gateway: LiveGateway
) -> None:
    counts = {"num_hedges_won": 2, "num_hedges_lost": 1, "num_audits_equal": 30}
    found = {"request_id": "chatcmpl-1", "model": "m", "at_token": 7, "found_at": time.time()}
    workers = {"worker": "one", "other_worker": "two", "suspect": "two"}

    async def add(route: Route) -> None:
        status = await (await route.fetch()).json()
        runs = [{**run, **counts} for run in status["runs"]]
        await route.fulfill(json={**status, "runs": runs, "disagreements": [{**found, **workers}]})

    await page.route("**/admin/v1/status", add)
    await hears_a_worker(gateway)
    headers = {"x-warren-cache": "exact"}
    for _ in range(2):
        await gateway.http.post("/v1/chat/completions", json=chat_body(seed=1), headers=headers)
    await open_console(page, gateway, "fleet")

    runs = page.get_by_role("table", name="Hedges, audits and equal requests").get_by_role("row")
    shown = [MODEL, "2", "1", "0", "30", "0", "0", "1", "0"]
    await expect(runs.nth(1).get_by_role("cell")).to_have_text(shown)
    incident = page.get_by_role("table", name="Incidents").get_by_role("row").nth(1)
    await expect(incident).to_contain_text("one and two")
    await expect(page.locator("#problems .bad")).to_have_text("Workers disagree about 1 answer")
    assert await faults(page) == []
    await page.unroute_all(behavior="wait")


async def test_what_gateways_behind_a_proxy_say_is_added_up(
    page: Page, broker: MemoryBroker
) -> None:
    async with behind_a_proxy(broker, page) as gateways:
        for gateway in gateways:
            await gateway.chat(model="echo", max_tokens=3)
        await open_console(page, gateways[0], "usage")

        tenants = page.get_by_role("table", name="Usage by tenant")
        row = tenants.get_by_role("row").filter(has_text="anonymous")
        await expect(row.get_by_role("cell").nth(1)).to_have_text("2")
        await expect(page.get_by_text("Generations at 2 gateways")).to_be_visible()


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


async def test_the_streams_in_the_fleet_are_those_of_all_gateways(
    page: Page, broker: MemoryBroker
) -> None:
    async with behind_a_proxy(broker, page) as gateways:
        await open_console(page, gateways[0], "fleet")
        await expect(page.get_by_role("heading", name="Streams", exact=True)).to_be_visible()
        await expect(page.get_by_text("No request is in flight.", exact=True)).to_be_visible()

        chats = [asyncio.create_task(one.chat(model="echo", max_tokens=4000)) for one in gateways]
        rows = page.get_by_role("table", name="Streams").get_by_role("row")
        await expect(rows).to_have_count(3)  # the first one has the titles
        for chat_of_one in chats:
            chat_of_one.cancel()
        await asyncio.wait(chats)


async def start_batch(page: Page, lines: list[dict[str, Any]]) -> Locator:
    """Upload a file of requests; returns the row of its batch."""
    await page.get_by_role("link", name="Batches").click()
    file: FilePayload = {
        "name": "requests.jsonl",
        "mimeType": "application/jsonl",
        "buffer": jsonl(lines),
    }
    await page.get_by_label("File of requests").set_input_files(file)
    await page.get_by_role("button", name="Start the batch").click()
    await expect(page.get_by_text("requests.jsonl was started.")).to_be_visible()
    return page.get_by_role("table", name="Batches").get_by_role("row").nth(1)


async def test_a_batch_is_uploaded_and_its_results_are_downloaded(
    page: Page, gateway: LiveGateway, tmp_path: Path
) -> None:
    await open_console(page, gateway)

    row = await start_batch(page, [chat("a", "number one"), chat("b", "number two")])

    await expect(row.get_by_text("2 of 2")).to_be_visible()
    (batch,) = [batch async for batch in gateway.openai.batches.list()]
    await expect(row.get_by_role("cell").first).to_have_text(batch.id)
    tag, filling = row.locator(".tag"), row.locator(".bar span")
    await expect(tag).to_have_text("completed")
    color = await tag.evaluate("element => getComputedStyle(element).color")
    await expect(filling).to_have_css("background-color", color)
    async with page.expect_download() as downloading:
        await row.get_by_role("button", name="Results").click()
    results = tmp_path / "results.jsonl"
    await (await downloading.value).save_as(results)
    answers = texts(json.loads(line) for line in results.read_text(encoding="utf-8").splitlines())
    assert answers == {"a": "number one", "b": "number two"}


async def test_the_id_of_a_batch_is_selected_with_one_click(
    page: Page, gateway: LiveGateway
) -> None:
    batch = await order(gateway, [chat("a")])
    await open_console(page, gateway)
    await page.get_by_role("link", name="Batches").click()

    await page.get_by_text(batch.id).click()

    assert await page.evaluate("getSelection().toString()") == batch.id


async def test_a_batch_is_cancelled(
    page: Page, gateway: LiveGateway, worker: ScriptedWorker
) -> None:
    worker.script = start_only
    await open_console(page, gateway)
    row = await start_batch(page, [chat("a"), chat("b")])
    await expect(row.get_by_text("0 of 2")).to_be_visible()

    await row.get_by_role("button", name="Cancel").click()
    await page.get_by_role("dialog").get_by_role("button", name="Cancel the batch").click()

    await expect(row.get_by_text("cancelled", exact=True)).to_be_visible()
    await expect(row.get_by_text("0 of 2, 2 cancelled")).to_be_visible()


async def test_a_batch_that_an_operator_lets_run_is_not_cancelled(
    page: Page, gateway: LiveGateway, worker: ScriptedWorker
) -> None:
    worker.script = start_only
    batch = await order(gateway, [chat("a")])
    await open_console(page, gateway, "fleet")

    await page.get_by_role("button", name=f"Cancel {batch.id}").click()
    await page.get_by_role("dialog").get_by_role("button", name="Let it run").click()

    await expect(page.get_by_role("dialog")).to_be_hidden()
    assert (await gateway.openai.batches.retrieve(batch.id)).cancelling_at is None


async def test_an_operator_cancels_the_work_of_any_tenant(
    page: Page, bus: MemoryBus, worker: ScriptedWorker, tmp_path: Path
) -> None:
    worker.script = start_only
    file = KeyFile(tmp_path / "keys")
    tenants_key, key = file.add("acme"), file.add("ops", scopes=("operator",))
    async with live_gateway(bus, keys_file=file.path) as gateway:
        gateway.openai.api_key = tenants_key
        batch = await order(gateway, [chat("a"), chat("b")])
        headers = {"authorization": f"Bearer {tenants_key}"}
        body = chat_body(stream=True)
        asked = asyncio.create_task(
            gateway.http.post("/v1/chat/completions", json=body, headers=headers)
        )
        await give_key(page, gateway, key, "fleet")
        batches = page.get_by_role("table", name="Batches of all tenants").get_by_role("row")
        of_tenant = batches.filter(has_text=batch.id)
        streams = page.get_by_role("table", name="Streams").get_by_role("row")

        await streams.nth(1).get_by_role("button", name="Cancel stream").click()
        assert await faults(page) == []
        await page.get_by_role("dialog").get_by_role("button", name="Cancel the stream").click()
        await of_tenant.get_by_role("button", name="Cancel").click()
        await page.get_by_role("dialog").get_by_role("button", name="Cancel the batch").click()

        await expect(of_tenant).to_contain_text("acme")
        await expect(of_tenant).to_contain_text("0 of 2, 2 cancelled")
        await expect(page.get_by_text("No request is in flight.")).to_be_visible()
        assert "cancelled" in (await asked).text


@pytest.mark.parametrize("section", ["batches", "replays"])
async def test_a_gateway_that_cannot_store_anything_shows_its_fleet(
    page: Page, bus: MemoryBus, tmp_path: Path, section: str
) -> None:
    obstacle = tmp_path / "warren"
    obstacle.touch()  # where the directory of the database should be
    async with live_gateway(bus, data_dir=obstacle / "data") as gateway:
        await open_console(page, gateway, "fleet")

        problem = page.locator(f"#{section}-problem")
        await expect(problem).to_have_text("This gateway cannot store anything.")
        await expect(page.locator("#pulse")).to_have_text("No workers")


async def test_the_view_of_batches_outlasts_a_failure_at_the_start(
    page: Page, bus: MemoryBus, tmp_path: Path
) -> None:
    obstacle = tmp_path / "warren"
    obstacle.touch()  # where the directory of the database should be
    async with live_gateway(bus, data_dir=obstacle / "data") as gateway:
        await open_console(page, gateway)
        await page.get_by_role("link", name="Batches").click()
        await expect(page.locator("#pulse")).to_have_text("This gateway cannot store anything.")

        obstacle.unlink()

        await expect(page.get_by_text("No batches yet.")).to_be_visible()


async def test_there_is_no_view_of_batches_for_a_key_that_may_not_use_them(
    page: Page, bus: MemoryBus, tmp_path: Path
) -> None:
    file = KeyFile(tmp_path / "keys")
    key = file.add("ops", scopes=("operator",))
    async with live_gateway(bus, keys_file=file.path) as gateway:
        await page.goto(f"{gateway.url}/#fleet")
        await page.get_by_label("Key", exact=True).fill(key)
        await page.get_by_role("button", name="Use the key").click()

        await expect(page.get_by_text("No worker is alive.")).to_be_visible()
        await expect(page.get_by_role("link", name="Batches")).to_be_hidden()
