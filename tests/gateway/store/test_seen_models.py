"""The list of models that gateways have seen."""

import time
from pathlib import Path

from sqlalchemy import text

from gateway.store.database import Database
from gateway.store.seen_models import SeenModels
from gateway.store.usage import UsageRecords
from tests.gateway.store.test_usage import DAY_S, a_record


async def test_a_model_has_the_time_at_which_it_was_last_seen(seen_models: SeenModels) -> None:
    await seen_models.write({"a": 2.0, "b": 2.0})
    await seen_models.write({"b": 1.0, "a": 3.0, "c": 1.0})

    assert await seen_models.all() == {"a": 3.0, "b": 2.0, "c": 1.0}


async def test_models_that_were_not_seen_for_long_are_swept(seen_models: SeenModels) -> None:
    await seen_models.write({"old": 1.0, "new": 2.0})

    await seen_models.sweep(2.0)

    assert await seen_models.all() == {"new": 2.0}


async def test_an_older_database_has_the_models_of_recent_requests(
    database: Database, database_url: str | None, usage: UsageRecords, tmp_path: Path
) -> None:
    now = float(int(time.time()))
    ends = {"1": ("a", now - DAY_S), "2": ("a", now), "3": ("old", now - 31 * DAY_S)}
    await usage.write(
        [a_record(name, model=model, ended_at=at) for name, (model, at) in ends.items()]
    )
    async with database.begin() as connection:
        tables = ("models", "api_keys", "tenants", "ended_sessions", "exact_answers", "replays")
        for table in tables:
            await connection.execute(text(f"DROP TABLE {table}"))
        for name in ("run_s", "is_cached"):  # of later versions
            await connection.execute(text(f"ALTER TABLE usage DROP COLUMN {name}"))
        for kind in ("input", "cached", "output", "reasoning"):
            column = text(f"ALTER TABLE batches DROP COLUMN num_{kind}_tokens")
            await connection.execute(column)
        await connection.execute(text("ALTER TABLE batches DROP COLUMN num_promoted"))
        for index in ("webhook_deliveries_of_webhook_due", "uploads_of_tenant"):
            await connection.execute(text(f"DROP INDEX {index}"))
        index = "CREATE INDEX webhook_deliveries_of_webhook ON webhook_deliveries (webhook_id)"
        await connection.execute(text(index))
        await connection.execute(text("UPDATE alembic_version SET version_num = 'batch_keys'"))

    migrated = await Database.open(database_url, tmp_path)

    assert await SeenModels(migrated).all() == {"a": now}
    await migrated.close()
