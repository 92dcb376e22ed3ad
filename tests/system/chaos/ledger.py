"""The usage records of answers, beside the tokens that their readers got."""

import sqlite3
from collections.abc import Iterable
from contextlib import closing
from pathlib import Path

from gateway.store.database import SQLITE_FILE
from tests.system.chaos.campaign import Row


def ledger_row(data_dir: Path, rows: Iterable[Row]) -> Row:
    """Compare the records in the gateways' database with all answers that were read to the end.

    Nothing may be waiting to be written.
    """
    row = Row("all of the above: usage records", 0)
    recorded = _recorded(data_dir)
    read = [answered for other in rows for answered in other.tally.answered.items()]
    for request_id, (tenant, num_tokens) in read:
        row.tally.num_streams += 1
        found = recorded.get(request_id)
        if found is None:
            row.tally.num_lost += 1
            row.tally.errors.append(f"{request_id} has no usage record")
        elif found != (tenant, "completed", num_tokens):
            row.tally.num_changed += 1
            row.tally.errors.append(
                f"{request_id}: {found} recorded, {num_tokens} tokens read by {tenant!r}"
            )
    return row


def _recorded(data_dir: Path) -> dict[str, tuple[str, str, int]]:
    """The tenant, the outcome and the number of generated tokens, by the id of the request."""
    query = "SELECT request_id, tenant, outcome, num_output_tokens FROM usage"
    with closing(sqlite3.connect(data_dir / SQLITE_FILE)) as database:
        return {request_id: tuple(facts) for request_id, *facts in database.execute(query)}
