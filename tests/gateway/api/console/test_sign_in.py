"""A person signs in to the console with a provider, in Chromium, and signs out."""

from playwright.async_api import Page, expect

from tests.gateway.api.console.test_accessibility import faults
from tests.support.console import answered, ask
from tests.support.gateway.http import LiveGateway


async def sign_in(page: Page, person: str) -> None:
    await page.get_by_role("link", name="Sign in").click()
    await page.get_by_role("button", name=f"Continue as {person}").click()


async def test_an_operator_signs_in_sees_the_fleet_chats_and_signs_out(
    page: Page, signing_in: LiveGateway
) -> None:
    await page.goto(f"{signing_in.url}/#fleet")
    await expect(page.get_by_role("link", name="Sign in")).to_be_visible()
    assert await faults(page) == []

    await sign_in(page, "olga")

    await expect(page.get_by_role("table", name="Workers")).to_be_visible()
    await expect(page.locator("#person-name")).to_have_text("olga@example.com")
    assert page.url == f"{signing_in.url}/#fleet"
    assert await faults(page) == []
    await page.get_by_role("link", name="Chat").click()
    await ask(page, "one two")
    assert await answered(page)
    await page.set_viewport_size({"width": 320, "height": 720})
    assert await page.evaluate("document.documentElement.scrollWidth") == 320
    await page.get_by_role("button", name="Sign out").click()
    await expect(page.get_by_role("link", name="Sign in")).to_be_visible()
    assert await page.context.cookies() == []


async def test_whoever_has_no_role_is_told_so(page: Page, signing_in: LiveGateway) -> None:
    await page.goto(signing_in.url)

    await sign_in(page, "stranger")

    await expect(page.locator("#sign-in-error")).to_contain_text("your account has no role here")
    assert page.url == f"{signing_in.url}/"


async def test_another_role_is_told_what_it_lacks(page: Page, signing_in: LiveGateway) -> None:
    await page.goto(f"{signing_in.url}/#fleet")

    await sign_in(page, "rene")

    await expect(page.locator("#view-fleet .refusal")).to_contain_text("Missing scope: operator")
