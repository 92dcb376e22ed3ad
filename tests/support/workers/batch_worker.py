"""A worker for batch jobs whose answers are a function of the job, and which dies on demand."""

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field

import msgspec

from shared import topology
from shared.bus.base import Bus, Consumer, Delivery, Message
from shared.errors import (
    BusError,
    BusUnavailable,
    ContextLengthExceeded,
    Overloaded,
    Unroutable,
)
from shared.messages import (
    Announcement,
    ChatPrompt,
    Choice,
    Completed,
    Failed,
    GenerationJob,
    Prompt,
    TextPrompt,
    decode_job,
    encode,
)

MODEL = "scripted"
SERVED = Announcement(
    worker="w",
    model=MODEL,
    vocab_size=1000,
    max_seq_len=1000,
    fingerprint="f",
    max_num_seqs=4,
    tool_parser="hermes",
    reasoning_parser="qwen3",
)
"""The worker's announcement."""
_ANNOUNCE_INTERVAL_S = 0.02


def prompt_text(prompt: Prompt) -> str:
    match prompt:
        case ChatPrompt(messages=messages):
            return messages[-1].content
        case TextPrompt(text=text):
            return text
        case _:
            return str(prompt.token_ids)


def answer_text(prompt: str) -> str:
    """The answer to ``prompt``."""
    return f"<{prompt[::-1]}>"


@dataclass
class BatchWorker:
    """Answers jobs like a real worker: the answer is confirmed before the job is acknowledged.

    If ``faults`` is given, it sometimes dies before its answer, dies between answer and
    acknowledgement (so that the job is redelivered), or answers twice. A prompt that begins with
    "too long" fails; a prompt that begins with "busy" is refused once.
    """

    bus: Bus
    model: str = MODEL
    faults: random.Random | None = None
    num_answers: Counter[str] = field(default_factory=Counter)
    """How often this worker has computed a job, by request id."""
    max_ready: int = 0
    """The maximum length of the job queue so far."""
    _answered: asyncio.Condition = field(default_factory=asyncio.Condition)

    async def run(self) -> None:
        """Work and send announcements until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._announce())
            tasks.create_task(self._take())

    async def _announce(self) -> None:
        announcement = Message(encode(msgspec.structs.replace(SERVED, model=self.model)))
        while True:
            with suppress(BusError):  # nobody may listen
                await self.bus.publish(topology.ANNOUNCEMENTS, announcement)
            await asyncio.sleep(_ANNOUNCE_INTERVAL_S)

    async def _take(self) -> None:
        queue = topology.jobs_queue(self.model, "batch")
        while True:
            try:
                async with self.bus.consume(queue.name, prefetch=4) as consumer:
                    await self._work(consumer, queue.name)
            except BusUnavailable:
                await self.bus.wait_connected()

    async def has_answered(self, num_answers: int) -> None:
        """Wait until this worker has given this many answers."""
        async with self._answered:
            await self._answered.wait_for(lambda: self.num_answers.total() >= num_answers)

    async def _work(self, consumer: Consumer, queue: str) -> None:
        """Answer jobs until this worker dies."""
        async for delivery in consumer:
            state = await self.bus.inspect(queue)
            assert state is not None
            self.max_ready = max(self.max_ready, state.num_ready)
            if self._happens():
                return
            await self._answer(delivery)
            if self._happens():
                await self._answer(delivery)
            if self._happens():
                return
            await delivery.ack()

    async def _answer(self, delivery: Delivery) -> None:
        message = delivery.message
        job = decode_job(message.body, message.content_type)
        assert job.mode == "final"
        answer = self._completed(job) if (failed := self._failed(job)) is None else failed
        reply = Message(
            encode(answer, message.content_type),
            content_type=message.content_type,
            correlation_id=message.correlation_id,
        )
        try:
            await self.bus.publish(topology.reply_binding(message.reply_to), reply)
        except Unroutable:
            return
        async with self._answered:
            self.num_answers[job.request_id] += 1
            self._answered.notify_all()

    def _failed(self, job: GenerationJob) -> Failed | None:
        text = prompt_text(job.prompts[0])
        if text.startswith("too long"):
            return Failed(code=ContextLengthExceeded.code, message="Too long.", param="messages")
        if text.startswith("busy") and not self.num_answers[job.request_id]:
            return Failed(code=Overloaded.code, message="Later.")
        return None

    def _completed(self, job: GenerationJob) -> Completed:
        texts = [answer_text(prompt_text(prompt)) for prompt in job.prompts]
        choices = (
            Choice(
                token_ids=tuple(range(len(text))),
                text=text,
                finish_reason="stop",
                num_prompt_tokens=7,
            )
            for text in texts
        )
        return Completed(request_id=job.request_id, choices=tuple(choices))

    def _happens(self) -> bool:
        return self.faults is not None and self.faults.random() < 0.05


async def jobs_wait(bus: Bus, num_jobs: int) -> None:
    """Wait until so many jobs of the model are in its queue."""
    state = None
    while state is None or state.num_ready != num_jobs:
        await asyncio.sleep(0.01)
        state = await bus.inspect(topology.jobs_queue(MODEL, "batch").name)


@asynccontextmanager
async def working(worker: BatchWorker) -> AsyncIterator[None]:
    """Run the worker during the block."""
    task = asyncio.create_task(worker.run())
    try:
        yield
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
