"""The tenants of a deployment, each with its own API key, limits and weight."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from gateway.intake.keys.key_file import KeyFile

_LIMITS = {
    "unlimited": {},
    "few-at-once": {"max_concurrent": 4, "max_detached": 16},
    "few-requests": {"requests_per_minute": 300},
    "few-tokens": {"tokens_per_minute": 40_000, "max_tokens": 300},
    "enough": {
        "max_concurrent": 100_000,
        "requests_per_minute": 1_000_000,
        "tokens_per_minute": 100_000_000,
    },
}
WEIGHTS = "few-at-once=3,few-requests=2"
"""``WARREN_TENANT_WEIGHTS`` of the workers."""


class Tenant(NamedTuple):
    """A tenant and its API key."""

    name: str
    key: str

    @property
    def headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.key}"} if self.key else {}


NOBODY = Tenant("", "")
"""Everyone, at gateways without keys."""


def create_tenants(keys_file: Path) -> Sequence[Tenant]:
    """Write the file of their keys. The first tenant has no limits, and the last tenant has limits
    that it does not reach."""
    keys = KeyFile(keys_file)
    return [Tenant(name, keys.add(name, **limits)) for name, limits in _LIMITS.items()]
