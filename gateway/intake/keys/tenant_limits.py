"""The limits of a tenant, which all its API keys share, and the accounts with limits: keys and
tenants."""

from dataclasses import dataclass
from decimal import Decimal
from typing import Annotated

from msgspec import Meta, Struct

Limit = Annotated[int, Meta(ge=1, lt=1 << 53)]
"""A limit on a count."""


class TenantLimits(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A limit of None is no limit."""

    requests_per_minute: Limit | None = None
    tokens_per_minute: Limit | None = None
    """Maximum number of tokens per minute, of prompts and answers together."""
    max_concurrent: Limit | None = None
    """Maximum number of concurrent requests, at all gateways."""
    max_detached: Limit | None = None
    """Detached requests whose jobs have not ended. The limit of a key counts more."""
    monthly_budget: Decimal | None = None
    """The most that its requests may cost in a calendar month, in the currency of the prices."""

    @property
    def are_counted(self) -> bool:
        """Whether the requests of the tenant are counted at all gateways together."""
        counted = (self.requests_per_minute, self.tokens_per_minute, self.max_concurrent)
        return any(limit is not None for limit in counted)


NO_LIMITS = TenantLimits()


@dataclass(frozen=True, slots=True)
class Account:
    """An API key or a tenant, whose use is counted. A limit of None is no limit."""

    account_id: str
    name: str
    """As refusals name it."""
    requests_per_minute: int | None
    tokens_per_minute: int | None
    max_concurrent: int | None
    limit_prefix: str = ""
    """The prefix that distinguishes its limits from the limits of other accounts in metrics."""


def account_of(tenant: str, limits: TenantLimits) -> Account:
    """The account of a tenant."""
    return Account(
        account_id_of(tenant),
        f"the tenant {tenant}",
        limits.requests_per_minute,
        limits.tokens_per_minute,
        limits.max_concurrent,
        limit_prefix="tenant_",
    )


def account_id_of(tenant: str) -> str:
    """The id of a tenant's account, which is the id of no API key."""
    return f"tenant:{tenant}"
