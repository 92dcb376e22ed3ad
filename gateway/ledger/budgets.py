"""The spending of tenants with a budget in this month, and whether the budget permits more
requests.

The usage records of the month are added up every few seconds, so a request counts a few seconds
after its end, and a tenant may exceed its budget by the requests that were running when it was
spent.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import NamedTuple

from gateway.intake.keys.accepted import Keys
from gateway.ledger.prices import PriceTable
from gateway.store.state import Store
from gateway.store.usage import Group, UsageRecords
from shared.errors import QuotaExceeded, Unavailable
from shared.telemetry.metrics import Catalog

logger = logging.getLogger(__name__)

LONGEST_MONTH_S = 31 * 24 * 3600.0
_PAUSE_S = 5.0
_PAUSE_OF_WORK = 20
"""The pause is at least this many times as long as the sums took: the sums of millions of records
take seconds."""
_TENANTS_AT_ONCE = 500
"""Tenants whose sums a single query adds up."""
_MAX_SUMS = 1 << 20
_SHARES = (Decimal("0.8"), Decimal(1))
"""The shares of a budget that are reported when they are spent."""


class TenantBudget(NamedTuple):
    """A tenant's budget and its spending in this month, in the currency of the prices."""

    monthly: Decimal
    spent: Decimal
    ends_at: float
    """When the month ends, a Unix time."""


class _Month(NamedTuple):
    """A calendar month in UTC, as Unix times."""

    start: float
    end: float

    @classmethod
    def of(cls, now: float) -> "_Month":
        today = datetime.fromtimestamp(now, UTC)
        first = today.replace(day=1, hour=0, minute=0, second=0, microsecond=0)
        next_first = (first + timedelta(days=32)).replace(day=1)
        return cls(first.timestamp(), next_first.timestamp())


class Budgets:
    """The budgets of all tenants, as a gateway knows them."""

    def __init__(
        self,
        store: Store,
        keys: Keys,
        prices: PriceTable,
        catalog: Catalog,
        clock: Callable[[], float] = time.time,
        pause_s: float = _PAUSE_S,
    ) -> None:
        """``keys`` know the budgets."""
        self._store = store
        self._keys = keys
        self._prices = prices
        self._clock = clock
        self._pause_s = pause_s
        self._month = _Month.of(clock())
        self._spent: dict[str, Decimal] = {}
        """The spending in ``_month``, by tenant."""
        self._reported: set[tuple[str, Decimal, Decimal]] = set()
        """The tenants, budgets and shares that were reported in ``_month``."""
        self._reached = catalog.gauge(
            "warren_gateway_budgets_reached",
            "Tenants that have spent this share of their budget of the month, or more.",
            "share",
        )
        for share in _SHARES:
            self._reached.labels(str(share))

    def of(self, tenant: str) -> TenantBudget | None:
        """None if the tenant has no budget."""
        monthly = self._keys.limits_of(tenant).monthly_budget
        if monthly is None:
            return None
        month = _Month.of(self._clock())
        spent = self._spent.get(tenant, Decimal()) if month == self._month else Decimal()
        return TenantBudget(monthly, spent, month.end)

    def require(self, tenant: str) -> None:
        """Raises `QuotaExceeded` if the tenant has spent its budget."""
        budget = self.of(tenant)
        if budget is not None and budget.spent >= budget.monthly:
            raise QuotaExceeded(
                self._says(tenant, budget.monthly),
                retry_after_s=max(1.0, budget.ends_at - self._clock()),
            )

    def spent(self) -> dict[str, str]:
        """The messages for tenants that have spent their budgets, by tenant."""
        return {
            tenant: self._says(tenant, budget.monthly)
            for tenant, _ in self._budgets()
            if (budget := self.of(tenant)) is not None and budget.spent >= budget.monthly
        }

    async def run(self) -> None:
        """Add up the spending of tenants, again and again; never returns."""
        await self._store.wait_open()
        while True:
            began = time.monotonic()
            try:
                await self.look()
            except Unavailable as error:
                logger.warning("budgets not checked, retrying", extra={"reason": error.message})
            work_s = time.monotonic() - began
            await asyncio.sleep(max(self._pause_s, _PAUSE_OF_WORK * work_s))

    async def look(self) -> None:
        """Add up the spending of the tenants with budgets in this month. Raises `Unavailable`."""
        month = _Month.of(self._clock())
        usage = (await self._store.open()).usage
        tenants = [tenant for tenant, _ in self._budgets()]
        spent = dict.fromkeys(tenants, Decimal())
        for first in range(0, len(tenants), _TENANTS_AT_ONCE):
            some = tenants[first : first + _TENANTS_AT_ONCE]
            spent |= await self._sums(usage, some, month)
        if month != self._month:
            self._reported.clear()
        self._month, self._spent = month, spent
        for share in _SHARES:
            self._report(share)

    async def _sums(
        self, usage: UsageRecords, tenants: Sequence[str], month: _Month
    ) -> dict[str, Decimal]:
        """The spending of tenants that have spent anything; models without a price cost nothing."""
        groups: tuple[Group, ...] = ("tenant", "model")
        sums = await usage.sums(
            groups, start=month.start, end=month.end, tenants=tenants, max_rows=_MAX_SUMS
        )
        spent: dict[str, Decimal] = {}
        for priced in self._prices.priced(sums, groups):
            tenant = priced.of["tenant"]
            spent[tenant] = spent.get(tenant, Decimal()) + (priced.cost or 0)
        return spent

    def _says(self, tenant: str, monthly: Decimal) -> str:
        amount = f"{monthly} {self._prices.currency}"
        return f"The tenant {tenant} has spent its budget of {amount} for this month."

    def _report(self, share: Decimal) -> None:
        """Count the tenants that have spent this share of their budgets, and log new tenants among
        them."""
        reached = [
            (tenant, monthly)
            for tenant, monthly in self._budgets()
            if self._spent.get(tenant, Decimal()) >= share * monthly
        ]
        self._reached.labels(str(share)).set(len(reached))
        for tenant, monthly in reached:
            if (tenant, monthly, share) not in self._reported:
                self._reported.add((tenant, monthly, share))
                fields = {
                    "tenant": tenant,
                    "share": float(share),
                    "spent": float(self._spent[tenant]),
                    "budget": float(monthly),
                    "currency": self._prices.currency,
                }
                event = "budget nearly spent" if share < 1 else "budget spent, requests refused"
                logger.warning(event, extra=fields)

    def _budgets(self) -> Iterator[tuple[str, Decimal]]:
        for tenant, limits in self._keys.tenants.items():
            if limits.monthly_budget is not None:
                yield tenant, limits.monthly_budget
