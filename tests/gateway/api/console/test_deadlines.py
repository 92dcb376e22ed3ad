"""What is due, what was promoted, and which machines end, in Chromium."""

import asyncio
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest
from playwright.async_api import Page, Route, expect

from gateway.batches import closing
from shared.bus.memory import MemoryBus
from tests.gateway.api.console.test_accessibility import faults
from tests.support.console import open_console
from tests.support.gateway.batches import chat, ended, order
from tests.support.gateway.http import LiveGateway, hears_a_worker, live_gateway
from tests.support.workers.scripted_worker import MODEL, ScriptedJob, ScriptedWorker


async def test_tokens_that_are_due_and_the_least_slack_are_shown_by_model(
    page: Page, gateway: LiveGateway, worker: ScriptedWorker
) -> None:
    has_looked = asyncio.Event()

    async def wait(job: ScriptedJob) -> None:
        await has_looked.wait()
        await job.start()
        await job.finish("done")

    worker.script = wait
    await hears_a_worker(gateway)
    asking = asyncio.create_task(gateway.chat(timeout=500, max_tokens=7))
    await worker.wait_until(lambda: bool(worker.jobs))
    await open_console(page, gateway, "fleet")

    rows = page.get_by_role("table", name="Deadlines").get_by_role("row")
    cells = rows.nth(1).get_by_role("cell")
    await expect(cells.nth(0)).to_have_text(MODEL)
    await expect(cells.nth(1)).to_have_text("Interactive")
    await expect(cells.nth(2)).to_have_text(re.compile(r"^[78] min \d+ s$"))
    await expect(cells.nth(3)).to_have_text("0")
    await expect(cells.nth(5)).not_to_have_text("0")
    has_looked.set()
    await asking
    await expect(page.get_by_text("No request waits for a worker.")).to_be_visible()


async def test_what_is_due_at_several_gateways_is_added_up(
    page: Page, gateway: LiveGateway
) -> None:
    at_one = {"model": "m", "class": "batch", "due_tokens": {"10": 5, "60": 60, "600": 1000}}
    slacks = iter((30.0, -2.0))

    async def add(route: Route) -> None:
        status = await (await route.fetch()).json()
        slack_s = next(slacks, None)
        if slack_s is not None:
            name = {**status["gateway"], "id": str(slack_s)}
            deadlines = [{**at_one, "slack_s": slack_s}]
            status = {**status, "gateway": name, "deadlines": deadlines}
        await route.fulfill(json=status)

    await page.route("**/admin/v1/status", add)
    await open_console(page, gateway, "fleet")

    row = page.get_by_role("table", name="Deadlines").get_by_role("row").nth(1)
    shown = ["m", "Batch", "passed", "10", "120", "2,000"]
    await expect(row.get_by_role("cell")).to_have_text(shown)
    assert await faults(page) == []
    await page.unroute_all(behavior="wait")


async def test_the_lines_of_a_late_batch_are_counted(
    page: Page,
    bus: MemoryBus,
    worker: ScriptedWorker,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(closing, "_LAST_PART", 1.0)
    async with live_gateway(bus, data_dir=tmp_path, max_batch_window=1) as gateway:
        await hears_a_worker(gateway)
        await ended(gateway, await order(gateway, [chat(str(k)) for k in range(3)]))
        await open_console(page, gateway, "batches")

        row = page.get_by_role("table", name="Batches").get_by_role("row").nth(1)
        await expect(row).to_contain_text("3 of 3, 1 with priority")


async def test_a_worker_whose_machine_ends_says_why_it_leaves(
    page: Page, gateway: LiveGateway, worker: ScriptedWorker
) -> None:
    await hears_a_worker(gateway)
    changes: dict[str, Any] = {"is_leaving": True, "end_notice": "preempted"}
    worker.announcement = msgspec.structs.replace(worker.announcement, **changes)
    await open_console(page, gateway, "fleet")

    row = page.get_by_role("table", name="Workers").get_by_role("row").nth(1)
    await expect(row).to_contain_text("leaving")
    await expect(row).to_contain_text("Its machine ends: preempted")
    assert await faults(page) == []
