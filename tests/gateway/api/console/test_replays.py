"""The reports of replays in the fleet, in Chromium."""

import re

from playwright.async_api import Page, expect

from tests.gateway.api.console.test_accessibility import NARROW, faults
from tests.gateway.api.console.test_layout import cut_off
from tests.gateway.api.routes.test_replays import REPORT
from tests.support.console import open_console
from tests.support.gateway.http import LiveGateway

AGE = re.compile(r"^\d+(\.\d)? s$")


async def test_a_replay_says_how_many_answers_are_equal_and_how_sure_the_model_was(
    page: Page, gateway: LiveGateway
) -> None:
    await gateway.http.post("/v1/replays", json=REPORT)
    await open_console(page, gateway, "fleet")

    cells = page.get_by_role("table", name="Replays").get_by_role("row").nth(1).get_by_role("cell")
    model, sent = "m-q4b4c2a508", "1 %since 2026-12-01"
    shown = [model, "anonymous", sent, "20", "1", "12 of 16", "7", "≥ 2.500"]
    for place, text in enumerate(shown):
        await expect(cells.nth(place)).to_have_text(text)
    await expect(cells.last).to_have_text(AGE)


async def test_a_replay_in_which_all_answers_are_equal_has_no_margin(
    page: Page, gateway: LiveGateway
) -> None:
    equal = {**REPORT, "equal": 16, "median_token": None, "median_margin": None}
    await gateway.http.post("/v1/replays", json=equal)
    await open_console(page, gateway, "fleet")

    row = page.get_by_role("table", name="Replays").get_by_role("row").nth(1)
    await expect(row.get_by_role("cell").nth(5)).to_have_text("16 of 16")
    await expect(row.get_by_role("cell").nth(7)).to_have_text("–")


async def test_replays_are_read_on_any_screen(page: Page, gateway: LiveGateway) -> None:
    await gateway.http.post("/v1/replays", json=REPORT)
    await open_console(page, gateway, "fleet")
    await expect(page.get_by_role("table", name="Replays")).to_be_visible()

    wide = await faults(page)
    await page.set_viewport_size({"width": NARROW["width"], "height": NARROW["height"]})

    assert (wide, await faults(page), await cut_off(page)) == ([], [], [])


async def test_without_a_replay_the_fleet_says_how_to_begin(
    page: Page, gateway: LiveGateway
) -> None:
    await open_console(page, gateway, "fleet")

    await expect(page.locator("#replays .empty")).to_contain_text("warren replay compares them")
