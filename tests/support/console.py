"""What a user does with the console, in a browser that playwright drives."""

import re

from playwright.async_api import Page

from tests.support import PATIENCE_S
from tests.support.gateway.http import LiveGateway

TIMEOUT_MS = PATIENCE_S * 1000
NUM_TOKENS = 400
STEP_S = 0.05
SLOW_STEP_S = 0.5
"""Of a worker whose answer must not end before something else happens."""


async def ask(page: Page, question: str) -> None:
    await page.locator("#model option").first.wait_for(state="attached")
    await page.get_by_label("Your message").fill(question)
    await page.get_by_label("Your message").press("Enter")


async def ask_for_many_tokens(page: Page) -> None:
    """A question whose answer depends on nothing but the request, and is shown as it is."""
    await page.get_by_label("Maximum tokens").fill(str(NUM_TOKENS))
    await page.get_by_label("Seed").fill("7")
    await page.get_by_label("Show answers as Markdown").uncheck()
    await ask(page, "Tell me something long.")


async def begun(page: Page) -> str:
    """The first words of an answer, as soon as there are some."""
    answer = page.locator(".answer.streaming", has_text=re.compile(r"\S"))
    return await answer.text_content() or ""


async def answered(page: Page) -> str:
    """The whole answer."""
    await page.locator(".answer:not(.waiting, .streaming)").wait_for()
    assert await page.locator(".after .error").text_content() == ""
    return await page.locator(".answer").text_content() or ""


async def open_console(page: Page, gateway: LiveGateway, view: str = "chat") -> None:
    await page.goto(f"{gateway.url}/#{view}")
    await page.locator(f"#view-{view}").wait_for()


async def give_key(page: Page, gateway: LiveGateway, key: str, view: str = "chat") -> None:
    """Open the console of a gateway with keys, and give it the key."""
    await page.goto(f"{gateway.url}/#{view}")
    await page.get_by_label("Key", exact=True).fill(key)
    await page.get_by_role("button", name="Use the key").click()
