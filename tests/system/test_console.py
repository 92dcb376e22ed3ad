"""The console against real processes: a worker is killed while it answers."""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from playwright.async_api import Page

from tests.support.browser import browser, page
from tests.support.console import answered, ask_for_many_tokens, begun
from tests.support.deployment import processes
from tests.support.deployment.broker import Broker
from tests.support.deployment.processes import WarrenProcess

__all__ = ["browser", "page"]

pytestmark = pytest.mark.rabbit


@pytest.fixture
def start_worker(broker: Broker, tmp_path: Path) -> Iterator[Callable[[str, int], WarrenProcess]]:
    """Starts a worker of the synthetic model, with a name and the duration of its steps in ms."""
    with ExitStack() as stack:

        def start(name: str, step_ms: int) -> WarrenProcess:
            url, log = broker.url_of("worker"), tmp_path / name
            return stack.enter_context(processes.echo_worker(url, log, f"--step-ms={step_ms}"))

        yield start


async def test_an_answer_survives_the_worker_that_is_killed(
    page: Page,
    broker: Broker,
    start_worker: Callable[[str, int], WarrenProcess],
    tmp_path: Path,
) -> None:
    # So slow that its answer has not ended when it is killed.
    victim = await asyncio.to_thread(start_worker, "victim", 1000)
    process = processes.gateway(broker.url_of("gateway"), tmp_path / "gateway")
    await asyncio.to_thread(process.__enter__)
    try:
        await page.goto(process.url)
        await page.locator("#model option[value=echo]").wait_for(state="attached")
        await page.locator("#model").select_option("echo")
        await ask_for_many_tokens(page)
        seen = await begun(page)
        await asyncio.to_thread(start_worker, "other", 40)
        victim.kill()
        text = await answered(page)
        notes = await page.locator(".notes").text_content()

        await page.get_by_role("button", name="New conversation").click()
        await ask_for_many_tokens(page)
        undisturbed = await answered(page)
    finally:
        await asyncio.to_thread(process.terminate)

    assert text == undisturbed
    assert text.startswith(seen)
    assert notes == "Worker lost, continued on another"
