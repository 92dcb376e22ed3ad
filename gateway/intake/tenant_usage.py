"""The requests and tokens of each tenant at one gateway."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

_MAX_TENANTS = 1000


@dataclass(slots=True)
class UsageOfTenant:
    """The use of one tenant since the gateway's start. Tokens count once a request has ended."""

    num_requests: int = 0
    """Including those in flight."""
    num_in_flight: int = 0
    num_failed: int = 0
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    """Prompt tokens that were found in the prefix cache."""
    num_generated_tokens: int = 0


@dataclass(slots=True)
class TenantUsage:
    """The usage of the latest tenants; beyond a thousand, the one that came first is forgotten."""

    by_tenant: dict[str, UsageOfTenant] = field(default_factory=dict)

    def num_in_flight(self, tenant: str) -> int:
        """The requests of a tenant that are in flight."""
        usage = self.by_tenant.get(tenant)
        return 0 if usage is None else usage.num_in_flight

    @contextmanager
    def request(self, tenant: str) -> Iterator[UsageOfTenant]:
        """Count a request while it is in flight; yields the tenant's usage, to add its tokens."""
        usage = self.by_tenant.get(tenant)
        if usage is None:
            if len(self.by_tenant) >= _MAX_TENANTS:
                del self.by_tenant[next(iter(self.by_tenant))]
            usage = self.by_tenant[tenant] = UsageOfTenant()
        usage.num_requests += 1
        usage.num_in_flight += 1
        try:
            yield usage
        finally:
            usage.num_in_flight -= 1
