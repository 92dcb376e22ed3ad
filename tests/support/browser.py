"""Fixtures of headless Chromium."""

from collections.abc import AsyncIterator

import pytest
from playwright.async_api import Browser, Page, async_playwright, expect

from tests.support.console import TIMEOUT_MS

expect.set_options(timeout=TIMEOUT_MS)


@pytest.fixture
async def browser(chromium: str) -> AsyncIterator[Browser]:
    """The session's browser, without anything that other tests have left in it."""
    async with async_playwright() as playwright:
        browser = await playwright.chromium.connect(chromium, timeout=TIMEOUT_MS)
        yield browser
        await browser.close()


@pytest.fixture
async def page(browser: Browser) -> AsyncIterator[Page]:
    """A page that has reported no error at the end of the test."""
    errors: list[str] = []
    context = await browser.new_context()
    page = await context.new_page()
    page.set_default_timeout(TIMEOUT_MS)
    page.on("pageerror", lambda error: errors.append(str(error)))
    yield page
    await context.close()
    assert errors == []
