import asyncio
import time

from gateway.metrics import Metrics
from shared.off_loop import measure_lag
from tests.support.gateway.http import eventually
from tests.support.metrics import total

LAG = "warren_gateway_loop_lag_seconds"


async def test_the_delay_of_the_event_loop_is_measured() -> None:
    metrics = Metrics()
    measuring = asyncio.create_task(measure_lag(metrics.loop_lag_s))
    await asyncio.sleep(0)
    time.sleep(0.75)  # noqa: ASYNC251 (what blocks the event loop)

    async def is_measured() -> bool:
        return total(metrics.render().decode(), f"{LAG}_count") > 0

    await eventually(is_measured)
    measuring.cancel()

    assert total(metrics.render().decode(), f"{LAG}_sum") > 0.4
