"""Many slow streams that are open at once: their memory, and the delay of their tokens."""

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass

from bench.echo_worker import MODEL, synthetic_tokenizer
from bench.fleet.clock import Clock
from bench.fleet.deployment import Deployment, Meter, deployed
from bench.queue_client import Streams, opened
from cli.terminal import notices

_NUM_WARM_UP = 64
MAX_TOKENS = 4096
OPEN_TIMEOUT_S = 480
_LATE_TIMEOUT_S = 60
PROMPT = {"model": MODEL, "prompt": [1000], "max_tokens": MAX_TOKENS, "ignore_eos": True}


@dataclass(frozen=True, kw_only=True)
class SlowStreams:
    """Streams that were open at once. None lost or repeated a token, and none ended."""

    num_streams: int
    num_gateways: int
    num_workers: int
    token_every_s: float
    seconds: float
    """The time for which all were open and measured."""
    opened_per_s: float
    """Streams that were opened in a second, beside the open streams."""
    events_per_s: float
    delay_p50_ms: float
    """From the end of a worker's step to the client, of all streams of a worker at once."""
    delay_p99_ms: float
    cores: Mapping[str, float]
    others: float
    stream_bytes: Mapping[str, float]
    """Memory by role, of all its processes together."""
    process_bytes: Mapping[str, float]
    """The memory of a process without streams."""
    stream_erlang_processes: float


async def measure_streams(
    num_streams: int,
    *,
    num_gateways: int,
    num_workers: int,
    token_every_s: float,
    seconds: float,
    each_token: bool = False,
) -> SlowStreams:
    """Raises `RuntimeError` if a token is lost or repeated."""
    with deployed(num_nodes=1, num_gateways=num_gateways) as deployment:
        num_slots = -(-num_streams * 5 // 4 // num_workers) + _NUM_WARM_UP
        await asyncio.to_thread(
            deployment.add_workers,
            num_workers,
            step_s=token_every_s,
            num_slots=num_slots,
            is_clock=True,
        )
        clock = Clock(synthetic_tokenizer())
        warm_up = Streams(clock.read)
        num_warm_up = min(num_streams, _NUM_WARM_UP)
        async with opened(warm_up, deployment.urls, num_warm_up, PROMPT, timeout_s=OPEN_TIMEOUT_S):
            await warm_up.measure(token_every_s)
        await asyncio.to_thread(deployment.wait_settled)
        body = {**PROMPT, "stream_options": {"each_token": each_token}}
        streams = Streams(clock.read)
        return await _hold(deployment, streams, body, num_streams, token_every_s, seconds)


async def _hold(
    deployment: Deployment,
    streams: Streams,
    body: Mapping[str, object],
    num_streams: int,
    token_every_s: float,
    seconds: float,
) -> SlowStreams:
    memory = deployment.memory_bytes()
    num_erlang = await asyncio.to_thread(deployment.num_erlang_processes)
    start = time.monotonic()
    async with opened(streams, deployment.urls, num_streams, body, timeout_s=OPEN_TIMEOUT_S):
        opened_per_s = num_streams / (time.monotonic() - start)
        notices.print(f"  {num_streams} streams are open, {opened_per_s:.0f} a second")
        await asyncio.sleep(2 * token_every_s)
        before = [stream.num_tokens for stream in streams.streams]
        meter = Meter(deployment)
        tally = await streams.measure(seconds)
        used = meter.read()
        await _receive(streams, before, int(seconds // token_every_s) - 1)
        grown = deployment.memory_bytes()
        num_grown = await asyncio.to_thread(deployment.num_erlang_processes)
    numbers = {
        "worker": len(deployment.workers),
        "broker": len(deployment.nodes),
        "gateway": len(deployment.gateways),
        "client": 1,
    }
    return SlowStreams(
        num_streams=num_streams,
        num_gateways=len(deployment.gateways),
        num_workers=len(deployment.workers),
        token_every_s=token_every_s,
        seconds=used.seconds,
        opened_per_s=opened_per_s,
        events_per_s=tally.num_events / used.seconds,
        delay_p50_ms=tally.delay_ms(50),
        delay_p99_ms=tally.delay_ms(99),
        cores=used.cores,
        others=used.others,
        stream_bytes={role: (grown[role] - memory[role]) / num_streams for role in memory},
        process_bytes={role: memory[role] / number for role, number in numbers.items()},
        stream_erlang_processes=(num_grown - num_erlang) / num_streams,
    )


async def _receive(streams: Streams, before: list[int], num_expected: int) -> None:
    """Wait until each stream has received so many tokens; a busy machine may be late."""
    deadline = time.monotonic() + _LATE_TIMEOUT_S
    while num_late := sum(
        stream.num_tokens - earlier < num_expected
        for stream, earlier in zip(streams.streams, before, strict=True)
    ):
        if time.monotonic() > deadline:
            raise RuntimeError(f"{num_late} streams received too few tokens")
        await asyncio.sleep(0.1)
