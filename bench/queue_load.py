"""The tokens that a gateway relays, and their cost in each process, at a given load."""

import asyncio
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from typing import Any

import psutil

from bench.queue_client import Streams, Tally, open_streams
from bench.queue_source import MODEL, published_at
from shared import topology
from shared.bus.base import Message
from shared.bus.rabbit import RabbitBus
from shared.messages import (
    GenerationJob,
    SamplingParams,
    TokenDelta,
    TokenPrompt,
    decode_event,
    encode,
)

SETTLE_S = 3.0
WARM_UP_STREAMS = 20
_NUM_BARE = 8

Processes = Mapping[str, Sequence[psutil.Process]]
"""The processes of each role. ``gateway`` is always a role."""


@dataclass(frozen=True, kw_only=True)
class LoadFigures:
    """Delays are from the worker's publish to the client, in milliseconds."""

    num_streams: int
    tokens_per_s: float
    tokens_per_event: float
    delay_p50_ms: float
    delay_p99_ms: float
    bare_delay_p50_ms: float
    """To a reader of the reply queue itself, during the same seconds."""
    bare_delay_p99_ms: float
    memory_bytes_per_stream: float
    """The memory of the gateway."""
    cpu_s_per_1000_tokens: Mapping[str, float]
    cpu_s_per_1000_events: Mapping[str, float]
    cores_used: Mapping[str, float]

    @property
    def tokens_per_gateway_core_s(self) -> float:
        """The tokens per second that the gateway would relay with a core to itself."""
        return 1000 / self.cpu_s_per_1000_tokens["gateway"]

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "tokens_per_gateway_core_s": self.tokens_per_gateway_core_s}


async def measure_load(
    url: str, broker: str, processes: Processes, *, num_streams: int, seconds: float
) -> LoadFigures:
    """Open streams, let them settle, and measure. Raises `RuntimeError` if tokens are lost."""
    async with open_streams(url, min(num_streams, WARM_UP_STREAMS)) as streams:
        await streams.measure(SETTLE_S)
    await asyncio.sleep(SETTLE_S)
    memory_before = _memory(processes["gateway"])
    async with open_streams(url, num_streams) as streams, _bare_readers(broker) as bare:
        await asyncio.sleep(SETTLE_S)
        tally, bare_tally, cpu_s, elapsed_s = await _window(streams, bare, processes, seconds)
        memory = _memory(processes["gateway"]) - memory_before
    return LoadFigures(
        num_streams=num_streams,
        tokens_per_s=tally.num_tokens / elapsed_s,
        tokens_per_event=tally.num_tokens / tally.num_events,
        delay_p50_ms=tally.delay_ms(50),
        delay_p99_ms=tally.delay_ms(99),
        bare_delay_p50_ms=bare_tally.delay_ms(50),
        bare_delay_p99_ms=bare_tally.delay_ms(99),
        memory_bytes_per_stream=memory / num_streams,
        cpu_s_per_1000_tokens={k: 1000 * s / tally.num_tokens for k, s in cpu_s.items()},
        cpu_s_per_1000_events={k: 1000 * s / tally.num_events for k, s in cpu_s.items()},
        cores_used={k: s / elapsed_s for k, s in cpu_s.items()},
    )


async def _window(
    streams: Streams, bare: Streams, processes: Processes, seconds: float
) -> tuple[Tally, Tally, dict[str, float], float]:
    cpu_before, start = _cpu_s(processes), time.monotonic()
    tally, bare_tally = await asyncio.gather(streams.measure(seconds), bare.measure(seconds))
    elapsed_s, cpu_after = time.monotonic() - start, _cpu_s(processes)
    return tally, bare_tally, {k: cpu_after[k] - cpu_before[k] for k in processes}, elapsed_s


@asynccontextmanager
async def _bare_readers(broker: str) -> AsyncIterator[Streams]:
    """Streams of the same worker whose reply queues are read here, to measure the broker alone."""
    streams = Streams()
    async with RabbitBus(broker) as bus:
        reading = [asyncio.create_task(_read_bare(bus, k, streams)) for k in range(_NUM_BARE)]
        try:
            yield streams
        finally:
            for task in reading:
                task.cancel()
            await asyncio.gather(*reading, return_exceptions=True)


async def _read_bare(bus: RabbitBus, number: int, streams: Streams) -> None:
    queue = topology.reply_queue(f"bare-{number}-{time.monotonic_ns()}", expires_s=60)
    job = GenerationJob(
        request_id=queue.name.replace(".", "-"),
        model=MODEL,
        prompts=(TokenPrompt(token_ids=(1,)),),
        sampling=SamplingParams(max_tokens=1 << 18),
        mode="stream",
    )
    await bus.declare(queue)
    message = Message(encode(job), reply_to=queue.bindings[0].routing_key)
    try:
        async with bus.consume(queue.name, is_exclusive=True) as deliveries:
            await bus.publish(topology.jobs_binding(MODEL, "interactive"), message)
            async for delivery in deliveries:
                event = decode_event(delivery.message.body)
                if isinstance(event, TokenDelta):
                    streams.tally.count(published_at(event.text), len(event.token_ids))
    finally:
        await bus.delete_queue(queue.name)


def _cpu_s(processes: Processes) -> dict[str, float]:
    times = {k: [one.cpu_times() for one in several] for k, several in processes.items()}
    return {k: sum(t.user + t.system for t in several) for k, several in times.items()}


def _memory(several: Sequence[psutil.Process]) -> int:
    return sum(one.memory_info().rss for one in several)
