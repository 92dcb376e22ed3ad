"""The reports of replays."""

from gateway.store.database import Database
from gateway.store.history.replays import Replays


async def test_the_reports_of_all_tenants_are_listed_from_the_newest_on(database: Database) -> None:
    replays = Replays(database)
    old = await replays.add("alice", {"equal": 1})
    new = await replays.add("bob", {"equal": 2})

    assert await replays.newest(5) == [new, old]
    assert await replays.newest(1) == [new]


async def test_a_new_report_replaces_the_oldest_report_of_its_tenant(
    database: Database,
) -> None:
    replays = Replays(database, max_kept=2)
    of_other = await replays.add("bob", {})

    _, *kept = [await replays.add("alice", {"equal": k}) for k in range(3)]

    assert await replays.newest(10) == [*reversed(kept), of_other]
