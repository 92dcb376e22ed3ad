"""A minimal reader of request logs that is as strict as a gateway."""

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field

import msgspec
import pytest

from shared import topology
from shared.bus.base import Bus, Consumer, Message, Queue, QueueState
from shared.bus.memory import MemoryBroker, MemoryBus
from shared.errors import Unroutable
from shared.log import LogReader, Relay, Send
from shared.messages import (
    MSGPACK,
    Announcement,
    Completed,
    Failed,
    Finished,
    GenerationJob,
    Prompt,
    PromptScores,
    QuickJob,
    ReplyEvent,
    SamplingParams,
    Started,
    TextPrompt,
    TokenDelta,
    decode_announcement,
    decode_event,
    encode,
)
from shared.topology import Lane
from tests.support.deployment.processes import START_TIMEOUT_S
from worker.jobs.pace import JobPace

_NUMBERS = itertools.count()
SHORT = SamplingParams(max_tokens=8, temperature=0.0)


def new_job(
    model: str,
    *prompts: Prompt,
    mode: str = "stream",
    sampling: SamplingParams | None = None,
    deadline: float | None = None,
) -> GenerationJob:
    """A job with a new id. Equal arguments lead to equal answers. Streams by default."""
    return GenerationJob(
        request_id=f"test-{next(_NUMBERS)}",
        model=model,
        prompts=prompts or (TextPrompt(text="Once upon a time"),),
        sampling=msgspec.structs.replace(sampling or SHORT, seed=1),
        mode="final" if mode == "final" else "stream",
        deadline=deadline,
    )


@dataclass
class Log:
    """Everything that a reader has read of a request."""

    reader: LogReader
    raw: list[ReplyEvent] = field(default_factory=list)
    accepted: list[Started | PromptScores | TokenDelta | Finished | Failed] = field(
        default_factory=list
    )
    completed: Completed | None = None

    @classmethod
    def of(cls, job: GenerationJob) -> "Log":
        """The log of ``job`` before anything was read."""
        return cls(LogReader(job.request_id, job.total_choices))

    @property
    def text(self) -> str:
        events = [e for e in self.accepted if isinstance(e, TokenDelta | Finished)]
        return "".join(event.text for event in events)

    @property
    def token_ids(self) -> list[int]:
        return self.reader.chains[0].token_ids

    @property
    def last(self) -> ReplyEvent:
        return self.raw[-1]

    @property
    def is_ended(self) -> bool:
        return self.reader.is_ended or self.completed is not None


async def publish(
    bus: Bus,
    job: GenerationJob | QuickJob,
    lane: Lane = "interactive",
    content_type: str = MSGPACK,
    num_returns: int = 0,
) -> None:
    """``num_returns`` counts the returns of the messages that this message replaces."""
    message = Message(
        encode(job, content_type),
        content_type=content_type,
        correlation_id=job.request_id,
        reply_to=f"reply.{job.request_id}",
        headers={"warren-returns": num_returns} if num_returns else {},
    )
    await bus.publish(topology.jobs_binding(job.model, lane), message)


def reply_queue_of(job: GenerationJob) -> Queue:
    """The job's reply queue, which waits for its next reader while a worker starts."""
    return topology.reply_queue(job.request_id, expires_s=2 * START_TIMEOUT_S)


@asynccontextmanager
async def reading(bus: Bus, job: GenerationJob) -> AsyncIterator[Consumer]:
    """Hold the job's reply queue exclusively, as a gateway does."""
    queue = reply_queue_of(job)
    await bus.declare(queue)
    async with bus.consume(queue.name, is_exclusive=True) as consumer:
        yield consumer


UNSERVED = "unserved"
"""The model of the jobs that `dead_letter` rejects. No worker competes for them."""


async def dead_letter(bus: Bus, request_id: str, tenant: str = "") -> None:
    """Reject a batch job as a worker does."""
    queue = topology.jobs_queue(UNSERVED, "batch")
    await bus.declare(topology.DEAD_LETTERS, queue)
    job = new_job(UNSERVED, mode="final")
    job = msgspec.structs.replace(job, request_id=request_id, tenant=tenant)
    await publish(bus, job, "batch")
    async with bus.consume(queue.name) as consumer:
        await (await anext(consumer)).reject()


async def come_back(bus: Bus, job: GenerationJob | QuickJob, lane: Lane, num_times: int) -> None:
    """Let workers take the first job of the lane and die."""
    for _ in range(num_times):
        async with bus.consume(topology.jobs_queue(job.model, lane).name) as consumer:
            await anext(consumer)


async def say_started(bus: Bus, job: GenerationJob, num_returns: int) -> None:
    """A worker that takes the job outside quarantine and sends nothing else."""
    started = Started(
        worker=f"worker.{num_returns}",
        ticket=str(num_returns),
        num_prompt_tokens=(1,),
        is_waiting=num_returns > 0,
        publication=job.publication,
        num_returns=num_returns,
    )
    await bus.publish(topology.reply_binding(f"reply.{job.request_id}"), Message(encode(started)))


async def read(
    bus: Bus,
    job: GenerationJob,
    consumer: Consumer,
    log: Log | None = None,
    num_tokens: int = 0,
    attempt: int = 0,
) -> Log:
    """Read to the end of the log, or until ``num_tokens`` were accepted or ``attempt`` has started,
    and answer its workers."""
    log = log or Log.of(job)
    while not (
        log.is_ended or 0 < num_tokens <= len(log.token_ids) or 0 < attempt <= log.reader.attempt
    ):
        delivery = await anext(consumer)
        event = decode_event(delivery.message.body, delivery.message.content_type)
        log.raw.append(event)
        if isinstance(event, Completed):
            log.completed = event
        for action in log.reader.read(event):
            await _act(bus, action, log)
    if log.is_ended:
        await bus.delete_queue(f"reply.{job.request_id}")
    return log


async def _act(bus: Bus, action: Relay | Send, log: Log) -> None:
    if isinstance(action, Relay):
        log.accepted.append(action.event)
        return
    # A worker that was replaced may no longer exist.
    with suppress(Unroutable):
        await bus.publish(topology.worker_binding(action.address), Message(encode(action.command)))


async def ask(bus: Bus, job: GenerationJob, lane: Lane = "interactive") -> Log:
    """Publish a job and read its whole log."""
    async with reading(bus, job) as consumer:
        await publish(bus, job, lane)
        return await read(bus, job, consumer)


async def ask_all(bus: Bus, jobs: Sequence[GenerationJob]) -> list[Log]:
    return list(await asyncio.gather(*(ask(bus, job) for job in jobs)))


async def num_ready(bus: Bus, queue: str) -> int:
    """The number of messages in a queue."""
    state = await bus.inspect(queue)
    assert state is not None
    return state.num_ready


async def wait_consumers(bus: Bus, queue: str, num: int) -> None:
    """Wait until a queue exists and has so many consumers."""
    state = None
    while state is None or state.num_consumers != num:
        await asyncio.sleep(0.01)
        state = await bus.inspect(queue)


async def wait_announced(bus: Bus, is_true: Callable[[Announcement], bool]) -> Announcement:
    """Wait until a worker announces what the test waits for; returns the announcement."""
    queue = topology.announcements_queue("test-announced")
    await bus.declare(queue)
    async with bus.consume(queue.name) as consumer:
        while not is_true(said := decode_announcement((await anext(consumer)).message.body)):
            pass
    await bus.delete_queue(queue.name)  # the next wait is not for what was announced before it
    return said


async def wait_answered(bus: Bus, num_jobs: int) -> None:
    """Wait until a worker announces that it has acknowledged so many jobs: a reader has the end of
    its answer before."""
    await wait_announced(bus, lambda said: said.num_answered >= num_jobs)


async def wait_running(bus: Bus) -> None:
    """Wait until a worker announces that its engine runs a sequence."""
    await wait_announced(bus, lambda said: said.num_running > 0)


def set_pace(monkeypatch: pytest.MonkeyPatch, token_s: float) -> None:
    """Let workers learn that a token takes so long. On a busy machine, tokens that arrive together
    after a pause seem to take no time."""
    learn_answer = JobPace.learn_answer

    def learn(self: JobPace, num_tokens: int, _seconds: float) -> None:
        learn_answer(self, num_tokens, token_s * (num_tokens - 1))

    monkeypatch.setattr(JobPace, "learn_answer", learn)


class LateBus(MemoryBus):
    """Answers late that the log of a job is not there."""

    def __init__(self, broker: MemoryBroker) -> None:
        super().__init__(broker)
        self.is_missed, self.may_answer = asyncio.Event(), asyncio.Event()

    async def inspect(self, queue: str) -> QueueState | None:
        state = await super().inspect(queue)
        if state is None and queue.startswith("reply.test-") and not self.is_missed.is_set():
            self.is_missed.set()
            await self.may_answer.wait()
        return state
