"""Receipts of answers in the chat, in Chromium."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from joserfc.jwk import OKPKey
from playwright.async_api import Page, Route, expect

from gateway.intake.receipts import verified
from tests.gateway.api.console.test_accessibility import NARROW, faults
from tests.gateway.api.console.test_layout import cut_off
from tests.support.console import answered, ask, open_console
from tests.support.gateway.http import LiveGateway, hears_a_worker
from tests.support.workers.scripted_worker import MODEL, ScriptedWorker

KEYS = "/.well-known/jwks.json"


@pytest.fixture
def gateway_options(tmp_path: Path) -> Mapping[str, Any]:
    path = tmp_path / "receipts.pem"
    path.write_bytes(OKPKey.generate_key("Ed25519").as_pem(private=True))
    return {"receipt_keys_file": path}


async def ask_for_a_receipt(page: Page, gateway: LiveGateway) -> None:
    await hears_a_worker(gateway)
    await open_console(page, gateway)
    await page.get_by_label("Ask for receipts").check()
    await ask(page, "one two")
    await answered(page)


async def test_a_receipt_says_what_was_computed_and_is_downloaded(
    page: Page, gateway: LiveGateway, worker: ScriptedWorker, tmp_path: Path
) -> None:
    await ask_for_a_receipt(page, gateway)
    await page.get_by_role("button", name="Receipt").click()
    dialog = page.get_by_role("dialog", name="Receipt")
    async with page.expect_download() as downloading:
        await dialog.get_by_role("button", name="Download").click()
    saved = tmp_path / "receipt.jws"
    await (await downloading.value).save_as(saved)

    receipt = verified(saved.read_text(), (await gateway.http.get(KEYS)).json())
    assert receipt.id == worker.jobs[0].job.request_id
    await expect(page.locator("#receipt-signature")).to_have_class("good")
    for fact in (receipt.id, receipt.request_sha256, receipt.seed, MODEL, "2 tokens"):
        await expect(dialog.get_by_role("definition").get_by_text(fact, exact=True)).to_be_visible()
    await expect(dialog.get_by_role("listitem")).to_contain_text("from token 0")


async def test_a_receipt_is_read_on_any_screen_and_in_the_dark(
    page: Page, gateway: LiveGateway, worker: ScriptedWorker
) -> None:
    await ask_for_a_receipt(page, gateway)
    await page.get_by_role("button", name="Receipt").click()
    await expect(page.locator("#receipt-facts")).to_be_visible()

    found = await faults(page)
    await page.emulate_media(color_scheme="dark")
    await page.set_viewport_size({"width": NARROW["width"], "height": NARROW["height"]})

    assert found + await faults(page) == []
    assert await cut_off(page) == []


async def test_a_receipt_that_was_changed_or_signed_elsewhere_is_marked(
    page: Page, gateway: LiveGateway, worker: ScriptedWorker
) -> None:
    other = OKPKey.generate_key("Ed25519")
    (own,) = (await gateway.http.get(KEYS)).json()["keys"]
    keys: list[dict[str, Any]] = []

    async def publish(route: Route) -> None:
        await route.fulfill(json={"keys": keys})

    await ask_for_a_receipt(page, gateway)
    await page.route(f"**{KEYS}", publish)
    signature, said = page.locator("#receipt-signature"), []
    for published in (other.as_dict(private=False), {**own, "x": other.as_dict()["x"]}):
        keys[:] = [published]
        await page.get_by_role("button", name="Receipt").click()
        await expect(signature).to_be_visible()
        await expect(signature).to_have_class("warn")
        said.append(await signature.text_content())
        await page.get_by_role("dialog").get_by_role("button", name="Close").click()

    assert said == [
        "Signed with a key that this gateway does not publish.",
        "The signature does not hold: the receipt was changed.",
    ]
    await page.unroute_all(behavior="wait")


async def test_an_answer_without_a_receipt_has_no_button(
    page: Page, gateway: LiveGateway, worker: ScriptedWorker
) -> None:
    await hears_a_worker(gateway)
    await open_console(page, gateway)
    await expect(page.get_by_label("Ask for receipts")).to_be_visible()

    await ask(page, "one two")
    await answered(page)

    await expect(page.get_by_role("button", name="Copy as curl")).to_be_visible()
    await expect(page.get_by_role("button", name="Receipt")).to_be_hidden()
