"""The console's charts, and what requests have used: a tenant's own, everybody's for operators."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from playwright.async_api import Page, expect

from gateway.intake.keys.key_file import KeyFile
from shared import topology
from shared.bus.base import Message
from shared.bus.memory import MemoryBus
from shared.messages import encode
from tests.gateway.api.console.test_accessibility import NARROW, faults
from tests.gateway.api.routes.test_usage import PRICES, record
from tests.support.console import give_key, open_console
from tests.support.gateway.http import LiveGateway, eventually, live_gateway


@pytest.fixture(autouse=True)
def _no_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no gateway take a sample during a test."""
    monkeypatch.setattr("gateway.fleet.samples.INTERVAL_S", 3600.0)


@pytest.fixture
async def priced(bus: MemoryBus, tmp_path: Path) -> AsyncIterator[tuple[LiveGateway, str, str]]:
    """A gateway with prices and the records of two tenants, the key of a tenant and the key of an
    operator."""
    file = KeyFile(tmp_path / "keys")
    keys = file.add("alice"), file.add("ops", scopes=("operator",))
    (tmp_path / "prices").write_text(PRICES)
    options = {"keys_file": file.path, "prices_file": tmp_path / "prices"}
    async with live_gateway(bus, **options) as gateway:
        await bus.declare(topology.LEDGER_RECORDS)
        tokens = {"num_prompt_tokens": 1_000_000, "num_cached_tokens": 0, "num_output_tokens": 0}
        for one in (record("1", "alice", **tokens), record("2", "bob", **tokens)):
            await bus.publish(topology.LEDGER_RECORDS.bindings[0], Message(encode(one)))

        async def are_written() -> bool:
            return await gateway.sample("warren_gateway_usage_records_total") == 2

        await eventually(are_written)
        yield gateway, *keys


async def test_a_tenant_sees_its_own_usage_and_costs(
    page: Page, priced: tuple[LiveGateway, str, str]
) -> None:
    gateway, key, _ = priced
    await give_key(page, gateway, key, "usage")

    by_model = page.get_by_role("table", name="Usage by model")
    row = ["m", "1", "1", "1,000,000", "0", "0", "0", "0.0 s", "$1.00"]
    await expect(by_model.get_by_role("row").nth(1).get_by_role("cell")).to_have_text(row)
    await expect(by_model.get_by_role("row")).to_have_count(2)
    await expect(page.locator("#usage-total")).to_have_text("$1.00 in this time")
    await expect(page.get_by_role("table", name="Usage by day").get_by_role("row")).to_have_count(2)
    await expect(page.get_by_text("API keys and their limits")).to_be_hidden()
    await expect(page.locator("#pulse")).to_have_text("No workers")
    assert await faults(page) == []


async def test_a_tenant_sees_its_budget(page: Page, priced: tuple[LiveGateway, str, str]) -> None:
    gateway, key, operator = priced
    answer = await gateway.http.post(
        "/admin/v1/tenants/alice",
        json={"monthly_budget": 20},
        headers={"authorization": f"Bearer {operator}"},
    )
    assert answer.status_code == 200, answer.text
    await give_key(page, gateway, key, "usage")

    total = "$1.00 in this time · $1.00 of the budget of $20.00 in this month"
    await expect(page.locator("#usage-total")).to_have_text(total)


async def test_an_operator_sees_the_usage_and_costs_of_all(
    page: Page, priced: tuple[LiveGateway, str, str]
) -> None:
    gateway, _, key = priced
    await give_key(page, gateway, key, "usage")

    rows = page.get_by_role("table", name="Usage by model").get_by_role("row")
    await expect(rows).to_have_count(3)
    await expect(rows.nth(1).get_by_role("cell").nth(0)).to_have_text("alice")
    await expect(rows.nth(2).get_by_role("cell").nth(0)).to_have_text("bob")
    await expect(page.locator("#usage-total")).to_have_text("$2.00 in this time")


async def test_charts_have_an_empty_state_and_show_the_last_hour(
    page: Page, gateway: LiveGateway
) -> None:
    await open_console(page, gateway, "fleet")
    await expect(page.get_by_text("No samples yet").first).to_be_visible()

    drawn: Any = await page.evaluate(
        """async () => {
          const { Chart } = await import("/console/chart.js");
          const place = document.querySelector("#charts");
          place.replaceChildren();
          const write = (value) => `${value} t`;
          const read = ({ value }) => value;
          const chart = new Chart(place, { title: "Tokens", read, write, empty: "None." });
          const now = Date.now() / 1000;
          const values = [900, 3, 7, null, 12];
          const at = (k) => now - (k ? 600 - 60 * k : 7200);
          chart.show(values.map((value, k) => ({ at: at(k), value })), now);
          const texts = [...place.querySelectorAll("text")].map(({ textContent }) => textContent);
          const count = (selector) => place.querySelectorAll(selector).length;
          return [texts, count(".line"), count(".mark")];
        }"""
    )
    # The axis ends at 20, the round number above 12. Values older than an hour are left out. A gap
    # parts the line and a point.
    hour = ["−60 min", "−45 min", "−30 min", "−15 min", "now"]
    assert drawn == [["0 t", "10 t", "20 t", *hour], 1, 1]
    chart = page.get_by_role("img", name="Tokens in the last hour: 12 t at the end, 12 t at most.")
    await chart.focus()
    await page.keyboard.press("ArrowLeft")
    await page.keyboard.press("ArrowLeft")
    await expect(page.locator(".chart-now")).to_contain_text("– at ")
    await page.keyboard.press("ArrowLeft")
    await expect(page.locator(".chart-now")).to_contain_text("7 t at ")
    found = await faults(page)
    await page.emulate_media(color_scheme="dark")
    await page.set_viewport_size({"width": NARROW["width"], "height": NARROW["height"]})
    assert found + await faults(page) == []
