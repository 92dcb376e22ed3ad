"""The fixtures of a provider that the doctor asks, and a doctor with patience."""

import pytest

from cli.doctor import broker, stores, web
from tests.support import PATIENCE_S
from tests.support.openid.fixtures import described, provider, sign_in_options

__all__ = ["described", "provider", "sign_in_options"]


@pytest.fixture(autouse=True)
def _patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the doctor wait for what is only slow, because the machine is busy."""
    for room in (broker, stores, web):
        monkeypatch.setattr(room, "_TIMEOUT_S", PATIENCE_S)
