"""Every view meets WCAG 2.2 AA as far as axe-core can tell, light and wide, dark and narrow."""

from importlib import resources
from typing import Any, Literal

import pytest
from playwright.async_api import Page

from shared.bus.memory import MemoryBus
from tests.support.console import answered, ask, open_console
from tests.support.gateway.batches import chat, ended, order
from tests.support.gateway.http import LiveGateway, hears_a_worker
from tests.support.workers.jobs import dead_letter

AXE = resources.files("axe_playwright_python").joinpath("axe.min.js").read_text()
RULES = ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa", "best-practice"]
WIDE, NARROW = {"width": 1280, "height": 800}, {"width": 390, "height": 800}


async def faults(page: Page) -> list[tuple[str, str]]:
    """The rules that the page breaks, each with the element that does."""
    await page.evaluate(f"() => {{ {AXE} }}")
    found: Any = await page.evaluate(
        """rules => axe.run({ runOnly: { type: 'tag', values: rules } }).then(({ violations }) =>
           violations.flatMap(({ id, nodes }) => nodes.map(({ html }) => [id, html])))""",
        RULES,
    )
    return [(rule, html) for rule, html in found]


@pytest.mark.parametrize(
    ("scheme", "size"), [("light", WIDE), ("dark", NARROW)], ids=["light-wide", "dark-narrow"]
)
async def test_no_view_breaks_a_rule(
    page: Page,
    gateway: LiveGateway,
    bus: MemoryBus,
    scheme: Literal["light", "dark"],
    size: Any,
) -> None:
    await page.emulate_media(color_scheme=scheme)
    await page.set_viewport_size(size)
    await hears_a_worker(gateway)
    await dead_letter(bus, "chatcmpl-one")
    await ended(gateway, await order(gateway, [chat("a")]))
    await open_console(page, gateway)
    await ask(page, "one two three")
    await answered(page)

    found = {"chat": await faults(page)}
    for view in ("fleet", "dead-letters", "usage", "batches"):
        await page.locator(f"nav [data-view={view}]").click()
        await page.locator(f"#view-{view} table:not([hidden])").first.wait_for()
        found[view] = await faults(page)
    await page.locator("nav [data-view=fleet]").click()
    await page.get_by_role("button", name="Drain worker").click()
    found["dialog"] = await faults(page)

    assert not any(found.values()), found


async def test_the_chat_works_with_the_keyboard_alone(page: Page, gateway: LiveGateway) -> None:
    await hears_a_worker(gateway)
    await open_console(page, gateway)
    await page.locator("#model option").first.wait_for(state="attached")

    await page.keyboard.type("one two")  # the message has the focus
    await page.keyboard.press("Enter")
    await answered(page)
    await page.keyboard.press("Shift+Tab")
    await page.keyboard.press("Enter")  # the last button before the message: copy as curl

    await page.locator(".toasts p").wait_for()
