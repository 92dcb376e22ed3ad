"""The console fits the screens of phones and tablets, with a key and with dead letters."""

import asyncio
from pathlib import Path
from typing import Any

from playwright.async_api import Page

from gateway.intake.keys.key_file import KeyFile
from shared.bus.memory import MemoryBus
from tests.support.console import answered, ask, give_key
from tests.support.gateway.batches import chat, ended, order
from tests.support.gateway.http import hears_a_worker, live_gateway
from tests.support.workers.jobs import dead_letter
from tests.support.workers.scripted_worker import ScriptedWorker, start_only

WIDTHS = (320, 360, 390, 768, 1024, 1280)
VIEWS = ("chat", "fleet", "dead-letters", "usage", "batches")
CONTROLS = "a:not(.skip), button, input, select, textarea, summary"


async def cut_off(page: Page) -> list[Any]:
    """The controls, words and cells that the screen does not show whole, and the width of a
    document that is wider than the screen."""
    found: list[Any] = await page.evaluate(
        """controls => {
          const isOutside = ({ left, right }) => left < 0 || right > innerWidth;
          const shown = [...document.querySelectorAll(`${controls}, h2, p, td`)]
            .filter((one) => one.checkVisibility() && !one.closest(".hidden, .toasts"));
          const outside = shown.filter((element) => isOutside(element.getBoundingClientRect()))
            .map((element) => element.outerHTML);
          const width = document.documentElement.scrollWidth;
          return width > innerWidth ? [width, ...outside] : outside;
        }""",
        CONTROLS,
    )
    return found


async def test_no_view_is_wider_than_the_screen(
    page: Page, bus: MemoryBus, worker: ScriptedWorker, tmp_path: Path
) -> None:
    file = KeyFile(tmp_path / "keys")
    scopes = ("generate", "cancel", "operator")
    key = file.add("a-team-with-a-long-name", scopes=scopes, requests_per_minute=600)
    async with live_gateway(bus, keys_file=file.path) as gateway:
        gateway.http.headers["authorization"] = f"Bearer {key}"
        gateway.openai.api_key = key
        await hears_a_worker(gateway)
        for number in range(12):
            await dead_letter(bus, f"publisher-of-reports-{number}")
        await ended(gateway, await order(gateway, [chat("a")]))
        await give_key(page, gateway, key)
        await ask(page, f"one two three {'x' * 200}")
        await answered(page)
        worker.script = start_only
        await order(gateway, [chat("b")])
        running = asyncio.create_task(gateway.chat())

        found: dict[tuple[int, str], list[Any]] = {}
        for view in VIEWS:
            await page.locator(f"nav [data-view={view}]").click()
            await page.locator(f"#view-{view} :is(.answer, table:not([hidden]))").first.wait_for()
            if view == "fleet":
                await page.get_by_role("button", name="Cancel stream").first.wait_for()
                await page.get_by_role("button", name="Cancel batch_").wait_for()
            for width in WIDTHS:
                await page.set_viewport_size({"width": width, "height": 720})
                if wrong := await cut_off(page):
                    found[width, view] = wrong
        await page.set_viewport_size({"width": WIDTHS[0], "height": 720})
        await page.get_by_role("button", name="API key").click()
        if wrong := await cut_off(page):
            found[WIDTHS[0], "dialog"] = wrong
        running.cancel()

    assert found == {}
