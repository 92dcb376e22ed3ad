"""The fixtures of Chromium."""

from tests.support.browser import browser, page

__all__ = ["browser", "page"]
