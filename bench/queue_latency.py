"""Seconds to the first token: of the bare engine, of the bare broker, and end to end."""

import asyncio
import math
import time
from collections.abc import Awaitable, Callable
from urllib.parse import urlsplit

from bench.echo_worker import MODEL, echo_model
from bench.queue_client import http_request
from shared import settings, topology
from shared.bus.base import Message
from shared.bus.rabbit import RabbitBus
from shared.messages import SamplingParams
from shared.settings import WorkerSettings
from worker.decode.bridge import Generations
from worker.engine.interface import SequenceId, Submit

PROMPT_IDS = list(range(100, 228))
WARM_UP = 20
STEP_S = 0.005
"""The duration of a step of a small model. The first token takes one step."""
PAUSE_S = 0.02
"""The pause between requests, so that no request pays for the clean-up after the previous one."""

Measure = Callable[[int], Awaitable[float]]


async def _sample(measure: Measure, num_requests: int) -> list[float]:
    """The times of sequential requests in seconds, after the warm-up."""
    times = []
    for k in range(WARM_UP + num_requests):
        times.append(await measure(k))
        await asyncio.sleep(PAUSE_S)
    return times[WARM_UP:]


async def bare_engine(num_requests: int) -> list[float]:
    model = echo_model(settings.load(WorkerSettings), STEP_S)
    async with Generations(model.engine, math.inf) as generations:

        async def measure(k: int) -> float:
            submit = Submit(
                sequence_id=SequenceId(f"bench-{k}", 0),
                prompt_ids=PROMPT_IDS,
                sampling=SamplingParams(temperature=0.0),
                seed=0,
                max_tokens=4,
            )
            has_token = asyncio.Event()
            start = time.perf_counter()
            generation = generations.open([submit], has_token.set)
            await has_token.wait()
            elapsed_s = time.perf_counter() - start
            generation.close()
            return elapsed_s

        return await _sample(measure, num_requests)


async def bare_broker(url: str, num_requests: int) -> list[float]:
    """A message to a job queue and a message to a reply queue, the minimum over any broker."""
    jobs = topology.jobs_queue("bare", "interactive")
    replies = topology.reply_queue("bare", expires_s=60)
    async with RabbitBus(url) as bus:
        await bus.declare(jobs, replies)
        async with bus.consume(jobs.name) as taken, bus.consume(replies.name) as answered:

            async def measure(_: int) -> float:
                start = time.perf_counter()
                await bus.publish(jobs.bindings[0], Message(bytes(800)))
                await (await anext(taken)).ack()
                await bus.publish(replies.bindings[0], Message(bytes(100)))
                await (await anext(answered)).ack()
                return time.perf_counter() - start

            return await _sample(measure, num_requests)


async def over_http(url: str, num_requests: int) -> list[float]:
    """The whole way from request to first token. Uses a bare connection, because an HTTP library
    would cost as much as the measured path."""
    address = urlsplit(url)
    request = http_request(
        address.netloc,
        {
            "model": MODEL,
            "prompt": PROMPT_IDS,
            "max_tokens": 4,
            "temperature": 0,
            "stream": True,
            "ignore_eos": True,
        },
    )
    reader, writer = await asyncio.open_connection(address.hostname, address.port)

    async def measure(_: int) -> float:
        start = time.perf_counter()
        writer.write(request)
        await reader.readuntil(b'"text":')
        first_token = time.perf_counter() - start
        await reader.readuntil(b"0\r\n\r\n")
        return first_token

    times = await _sample(measure, num_requests)
    writer.close()
    return times
