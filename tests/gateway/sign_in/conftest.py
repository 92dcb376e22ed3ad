"""The fixtures of a provider and its gateway."""

from tests.support.openid.fixtures import described, provider, sign_in_options, signing_in

__all__ = ["described", "provider", "sign_in_options", "signing_in"]
