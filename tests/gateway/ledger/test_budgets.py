"""What tenants have spent of their budgets in a month."""

import logging
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from sqlalchemy import Engine, event

from gateway.intake.keys.accepted import Keys
from gateway.intake.keys.key_file import KeyFile
from gateway.intake.keys.tenant_limits import TenantLimits
from gateway.ledger.budgets import Budgets
from gateway.ledger.prices import Price, PriceTable
from gateway.store.state import Store
from shared import settings
from shared.errors import QuotaExceeded
from shared.messages import UsageRecord
from shared.settings import GatewaySettings
from shared.telemetry.metrics import Catalog

NOVEMBER = datetime(2026, 11, 30, 12, tzinfo=UTC).timestamp()
NEW_YEAR = datetime(2027, 1, 1, tzinfo=UTC).timestamp()
DAY_S = 24 * 3600.0


class Ledger(NamedTuple):
    """Budgets with a database of their own, on a clock that tests set."""

    budgets: Budgets
    store: Store
    keys: Keys
    catalog: Catalog
    now: list[float]

    async def spend(self, tenant: str, amount: int, at: float = NOVEMBER, model: str = "m") -> None:
        """Record a request that costs ``amount``."""
        one = UsageRecord(
            request_id=f"{tenant}-{amount}-{at}-{model}",
            tenant=tenant,
            model=model,
            job_class="interactive",
            outcome="completed",
            num_output_tokens=amount * 1_000_000,
            ended_at=at,
        )
        await (await self.store.open()).usage.write([one])

    def set(self, **budgets: int) -> None:
        limits = {
            tenant: TenantLimits(monthly_budget=Decimal(budget))
            for tenant, budget in budgets.items()
        }
        self.keys.accept_stored({}, limits)

    def num_reached(self, share: str) -> float | None:
        return self.catalog.registry.get_sample_value(
            "warren_gateway_budgets_reached", {"share": share}
        )


@pytest.fixture
async def ledger(tmp_path: Path) -> AsyncIterator[Ledger]:
    store = Store(settings.load(GatewaySettings, data_dir=tmp_path))
    file = KeyFile(tmp_path / "keys")
    file.add("ops")
    keys, catalog, now = Keys(file.path), Catalog(), [NOVEMBER]
    prices = PriceTable({"m": Price(Decimal(0), Decimal(1))})
    budgets = Budgets(store, keys, prices, catalog, lambda: now[0])
    yield Ledger(budgets, store, keys, catalog, now)
    await store.close()


@contextmanager
def queries() -> Iterator[list[str]]:
    """The queries of usage records meanwhile."""
    asked: list[str] = []

    def record(_: object, __: object, statement: str, *___: object) -> None:
        if "FROM usage" in statement:
            asked.append(statement)

    event.listen(Engine, "before_cursor_execute", record)
    try:
        yield asked
    finally:
        event.remove(Engine, "before_cursor_execute", record)


async def test_a_tenant_is_refused_once_its_budget_is_spent(ledger: Ledger) -> None:
    ledger.set(alice=10, bob=10)
    await ledger.spend("alice", 9)
    await ledger.spend("bob", 10)
    await ledger.spend("carol", 99)
    await ledger.budgets.look()

    for tenant in ("alice", "carol"):
        ledger.budgets.require(tenant)
    with pytest.raises(QuotaExceeded, match="bob has spent its budget of 10 USD") as caught:
        ledger.budgets.require("bob")
    assert caught.value.retry_after_s == pytest.approx(DAY_S / 2)


async def test_each_month_has_the_whole_budget(ledger: Ledger) -> None:
    ledger.set(alice=10)
    await ledger.spend("alice", 99, at=NOVEMBER - 30 * DAY_S)
    await ledger.spend("alice", 10)
    await ledger.budgets.look()
    with pytest.raises(QuotaExceeded):
        ledger.budgets.require("alice")

    ledger.now[0] += DAY_S
    ledger.budgets.require("alice")
    await ledger.budgets.look()

    ledger.budgets.require("alice")
    budget = ledger.budgets.of("alice")
    assert budget is not None
    assert (budget.spent, budget.ends_at) == (Decimal(), NEW_YEAR)


async def test_models_without_a_price_cost_nothing(ledger: Ledger) -> None:
    ledger.set(alice=10)
    await ledger.spend("alice", 3)
    await ledger.spend("alice", 99, model="free")
    await ledger.budgets.look()

    budget = ledger.budgets.of("alice")
    assert budget is not None
    assert budget.spent == 3


async def test_many_tenants_are_added_up_with_one_query(ledger: Ledger) -> None:
    ledger.set(**{f"tenant-{number}": 10 for number in range(40)})
    await ledger.spend("tenant-3", 3)
    await ledger.spend("tenant-3", 4, model="free")
    await ledger.spend("tenant-7", 7)

    with queries() as asked:
        await ledger.budgets.look()

    spent = {}
    for number in range(40):
        budget = ledger.budgets.of(f"tenant-{number}")
        assert budget is not None
        spent[number] = budget.spent
    assert {number: amount for number, amount in spent.items() if amount} == {3: 3, 7: 7}
    assert len(asked) == 1


async def test_what_is_reached_is_logged_once_and_counted(
    ledger: Ledger, caplog: pytest.LogCaptureFixture
) -> None:
    def said() -> list[tuple[str, Any]]:
        lines = [(one.message, vars(one)["share"]) for one in caplog.records]
        caplog.clear()
        return lines

    caplog.set_level(logging.WARNING, "gateway.ledger.budgets")
    ledger.set(alice=10, bob=10)
    reports = []
    for amount in (7, 1, 0, 2, 0):
        if amount:
            await ledger.spend("alice", amount)
        await ledger.budgets.look()
        reports.append((said(), ledger.num_reached("0.8"), ledger.num_reached("1")))
    ledger.set(alice=20)
    await ledger.budgets.look()

    nearly, spent = ("budget nearly spent", 0.8), ("budget spent, requests refused", 1.0)
    assert reports == [
        ([], 0, 0),
        ([nearly], 1, 0),
        ([], 1, 0),
        ([spent], 1, 1),
        ([], 1, 1),
    ]
    assert (ledger.num_reached("0.8"), ledger.num_reached("1")) == (0, 0)
