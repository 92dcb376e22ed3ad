"""The fixtures of Chromium, and of a gateway with an OpenID provider."""

from tests.support.browser import browser, page
from tests.support.openid.fixtures import described, provider, sign_in_options, signing_in

__all__ = ["browser", "described", "page", "provider", "sign_in_options", "signing_in"]
