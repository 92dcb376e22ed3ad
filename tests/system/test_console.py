"""The console against real processes: a worker is killed while it answers."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest
from playwright.async_api import Page

from tests.support.browser import browser, page
from tests.support.console import answered, ask_for_many_tokens, begun
from tests.support.deployment import processes
from tests.support.deployment.broker import Broker
from tests.support.deployment.processes import NO_TLS, WarrenProcess

__all__ = ["browser", "page"]

pytestmark = pytest.mark.rabbit


@pytest.fixture
async def workers(broker: Broker, tmp_path: Path) -> AsyncIterator[dict[str, WarrenProcess]]:
    """Two slow workers of the synthetic model, by name."""
    url = broker.url_of("worker")
    with ExitStack() as stack:
        started = {
            name: processes.echo_worker(url, tmp_path / name, "--step-ms=40")
            for name in ("one", "other")
        }
        for worker in started.values():
            worker.start()
            stack.callback(worker.kill)
        for worker in started.values():
            await asyncio.to_thread(worker.wait_healthy)
        yield started


def is_busy(worker: WarrenProcess) -> bool:
    lines = httpx.get(f"{worker.url}/metrics", timeout=60, verify=NO_TLS).text.splitlines()
    return any(
        line.startswith("warren_worker_sequences_running{") and float(line.split()[-1]) > 0
        for line in lines
    )


@pytest.mark.timeout(240)
async def test_an_answer_survives_the_worker_that_is_killed(
    page: Page, broker: Broker, workers: dict[str, WarrenProcess], tmp_path: Path
) -> None:
    process = processes.gateway(broker.url_of("gateway"), tmp_path / "gateway")
    await asyncio.to_thread(process.__enter__)
    try:
        await page.goto(process.url)
        await page.locator("#model option[value=echo]").wait_for(state="attached")
        await page.locator("#model").select_option("echo")
        await ask_for_many_tokens(page)
        undisturbed = await answered(page)
        await page.get_by_role("button", name="New conversation").click()

        await ask_for_many_tokens(page)
        seen = await begun(page)
        (victim,) = [one for one in workers.values() if await asyncio.to_thread(is_busy, one)]
        os.kill(victim.pid, signal.SIGKILL)
        text = await answered(page)
        notes = await page.locator(".notes").text_content()
    finally:
        await asyncio.to_thread(process.terminate)

    assert text == undisturbed
    assert text.startswith(seen)
    assert notes == "Worker lost, continued on another"
