"""Streams at the speed at which people read that do not end, so that they cost events alone.

Beside `bench.fleet.dense`, these loads separate events from requests, up to the most events that
the machine carries.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from bench.echo_worker import synthetic_tokenizer
from bench.fleet.clock import Clock
from bench.fleet.dense import Layout
from bench.fleet.deployment import Deployment, Meter, deployed
from bench.fleet.point import Point, point_of
from bench.fleet.slow_streams import MAX_TOKENS, OPEN_TIMEOUT_S, PROMPT
from bench.fleet.users import Received
from bench.queue_client import Streams, opened
from cli.terminal import notices

LAYOUTS = (
    Layout(num_nodes=1, num_gateways=1, num_workers=1, num_streams=(60, 120, 200, 270)),
    Layout(num_nodes=1, num_gateways=2, num_workers=4, num_streams=(60, 200)),
)
_STEP_S = 0.05
_SETTLE_S = 2.0
"""The first tokens of a stream have an event each."""


@dataclass(frozen=True, kw_only=True)
class Steady:
    """The loads of all layouts."""

    points: Sequence[Point]


async def measure_steady(layouts: Sequence[Layout], seconds: float) -> Steady:
    """Raises `RuntimeError` if a token is lost or repeated."""
    points: list[Point] = []
    for layout in layouts:
        with deployed(num_nodes=layout.num_nodes, num_gateways=layout.num_gateways) as deployment:
            await asyncio.to_thread(
                deployment.add_workers,
                layout.num_workers,
                step_s=_STEP_S,
                num_slots=layout.num_slots,
                is_clock=True,
            )
            points += [
                await measure_open(deployment, number, seconds) for number in layout.num_streams
            ]
    return Steady(points=points)


async def measure_open(deployment: Deployment, num_streams: int, seconds: float) -> Point:
    """The cores while so many streams are open."""
    streams = Streams(Clock(synthetic_tokenizer()).read)
    async with opened(streams, deployment.urls, num_streams, PROMPT, timeout_s=OPEN_TIMEOUT_S):
        await asyncio.sleep(_SETTLE_S)
        meter = Meter(deployment)
        tally = await streams.measure(seconds)
        used = meter.read()
    received = Received(
        tokens_per_s=tally.num_tokens / used.seconds,
        events_per_s=tally.num_events / used.seconds,
        requests_per_s=0.0,
        ttft_p50_ms=0.0,
    )
    notices.print(f"  {num_streams} streams: {received.events_per_s:.0f} events/s")
    return point_of(deployment, used, MAX_TOKENS, received)
