"""A worker without an engine and without text, which publishes tokens at a fixed rate.

Its events go through the worker's own publisher: while an event waits for the broker's
confirmation, the next tokens of its stream are coalesced into one event. Streams are served in
batches of 64 whose steps end together, as in an engine. They start once no further job arrives, so
that the cost of opening streams is not measured. The text of an event is the time at which it was
published, from which a reader computes its delay.
"""

import asyncio
import itertools
import math
import time
import uuid
from contextlib import suppress
from typing import Annotated

import typer
import uvloop

from shared import topology
from shared.bus.base import Bus, Delivery, Message
from shared.bus.rabbit import RabbitBus
from shared.errors import BusError, Unroutable
from shared.log import LogWriter
from shared.messages import Announcement, Started, decode_job, encode
from worker.jobs.delivery import ReplyPublisher

MODEL = "clock"
TOKEN_TEXT = "word "
_BATCH_SIZE = 64
_QUIET_S = 1.0
_PREFETCH = 2000  # the maximum of quorum queues


class Source:
    """Answers every job at ``tokens_per_s`` until it has all its tokens or has no reader."""

    def __init__(self, bus: Bus, tokens_per_s: float) -> None:
        self._bus = bus
        self._step_s = 1 / tokens_per_s
        self._id = uuid.uuid4().hex
        self._batches = itertools.count()
        self._last_job_at = 0.0
        self._answers: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        """Serve until cancelled."""
        await topology.declare_worker(self._bus, MODEL, self._id)
        announcing = asyncio.create_task(self._announce())
        jobs = topology.jobs_queue(MODEL, "interactive")
        try:
            async with self._bus.consume(jobs.name, prefetch=_PREFETCH) as deliveries:
                async for delivery in deliveries:
                    answer = asyncio.create_task(self._answer(delivery))
                    self._answers.add(answer)
                    answer.add_done_callback(self._answers.discard)
        finally:
            announcing.cancel()

    async def _announce(self) -> None:
        announcement = Announcement(
            worker=self._id,
            model=MODEL,
            vocab_size=256,
            max_seq_len=1 << 20,
            fingerprint=MODEL,
            max_num_seqs=_PREFETCH,
        )
        while True:
            with suppress(BusError):  # no gateway listens yet
                await self._bus.publish(topology.ANNOUNCEMENTS, Message(encode(announcement)))
            await asyncio.sleep(0.5)

    async def _answer(self, delivery: Delivery) -> None:
        job = decode_job(delivery.message.body, delivery.message.content_type)
        await delivery.ack()
        self._last_job_at = time.monotonic()
        publisher = ReplyPublisher(self._bus, delivery, job.request_id)
        started = Started(worker=f"worker.{self._id}", ticket="once", num_prompt_tokens=(1,))
        try:
            await publisher.publish(started)
            await self._speak(publisher, job.sampling.max_tokens or 1)
        except Unroutable:
            return

    async def _speak(self, publisher: ReplyPublisher, max_tokens: int) -> None:
        while (quiet_s := time.monotonic() - self._last_job_at) < _QUIET_S:  # noqa: ASYNC110
            await asyncio.sleep(_QUIET_S - quiet_s)
        log = LogWriter(1, 1)
        begin_at = self._first_step_at()
        num_sent = 0
        while num_sent < max_tokens:
            await asyncio.sleep(begin_at + num_sent * self._step_s - time.monotonic())
            num_due = math.floor((time.monotonic() - begin_at) / self._step_s) + 1
            # A timer may fire slightly early. Send at least the token that it was set for.
            num_new = max(1, min(num_due, max_tokens) - num_sent)
            num_sent += num_new
            await publisher.publish(log.delta(0, (0,) * num_new, _text(num_new)))
        await publisher.publish(log.finish(0, (), "", "length"))

    def _first_step_at(self) -> float:
        """Offsets the steps of batches from each other, evenly for any number of batches (golden
        ratio)."""
        phase = next(self._batches) // _BATCH_SIZE * 0.618 % 1
        return (math.ceil(time.monotonic() / self._step_s) + phase) * self._step_s


def _text(num_tokens: int) -> str:
    return f"{time.monotonic():.6f} {TOKEN_TEXT * num_tokens}"


def published_at(text: str) -> float:
    """When the event with this text was published, in monotonic time."""
    return float(text.split(" ", 1)[0])


async def _run(broker: str, tokens_per_s: float) -> None:
    async with RabbitBus(broker) as bus:
        await Source(bus, tokens_per_s).run()


def main(
    broker: Annotated[str, typer.Option(help="AMQP URL.")],
    tokens_per_s: Annotated[float, typer.Option(help="Tokens per second of each stream.")],
) -> None:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_run(broker, tokens_per_s))


if __name__ == "__main__":
    typer.run(main)
