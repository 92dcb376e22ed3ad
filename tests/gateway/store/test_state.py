"""The store: it opens once, and sweeps."""

import asyncio
from pathlib import Path

from gateway.store.state import Store, StoredState
from shared import settings
from shared.errors import Unavailable
from shared.settings import GatewaySettings


async def test_sweeps_go_on_after_one_that_does_not_reach_the_database(tmp_path: Path) -> None:
    store = Store(settings.load(GatewaySettings, data_dir=tmp_path))
    states = [await store.open()]
    is_swept_again = asyncio.Event()

    async def sweep(state: StoredState) -> None:
        states.append(state)
        if len(states) == 2:
            raise Unavailable("The database is unreachable.")
        is_swept_again.set()

    sweeping = asyncio.create_task(store.keep_swept(sweep, 0.0))
    await is_swept_again.wait()
    sweeping.cancel()
    await asyncio.wait([sweeping])
    await store.close()

    assert states[0] is states[1] is states[2]
