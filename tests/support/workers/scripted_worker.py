"""A worker whose answers are scripted by the test, and which otherwise behaves correctly.

It writes real events at their positions, acknowledges a job after its last event, obeys `Cancel`,
asks for `Continue` when a job is redelivered, and drops jobs without a reader.
"""

import asyncio
import itertools
import secrets
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Self, TypeAlias

from shared import topology
from shared.bus.base import Bus, Delivery, Message
from shared.errors import BusError, BusUnavailable, Unroutable
from shared.log import LogWriter
from shared.messages import (
    AdmissionAnswer,
    Announcement,
    Cancel,
    ChatPrompt,
    Command,
    Continue,
    Declare,
    Detokenized,
    DetokenizeJob,
    Drain,
    Embedded,
    EmbeddingJob,
    Ended,
    Failed,
    FinishReason,
    GenerationJob,
    JobClass,
    LimitedTenants,
    Prompt,
    QuickAnswer,
    QuickJob,
    ReplyEvent,
    Started,
    StopWork,
    TextPrompt,
    Tokenized,
    TokenizeJob,
    decode_command,
    decode_job,
    decode_quick_job,
    encode,
)
from tests.support import PATIENCE_S

MODEL = "scripted"
NUM_DIMENSIONS = 4
_IDS = itertools.count()
_ANNOUNCE_INTERVAL_S = 0.05


class ScriptedJob:
    """A delivery of a job, with methods to answer it."""

    def __init__(self, worker: "ScriptedWorker", delivery: Delivery, lane: JobClass) -> None:
        self.lane = lane
        self.job: GenerationJob = decode_job(delivery.message.body, delivery.message.content_type)
        self.message = delivery.message
        self.num_returns = delivery.num_returns
        self.is_first = delivery.num_returns == 0 and self.job.publication == 0
        self.ticket = secrets.token_hex(8)
        self.log = LogWriter(1, self.job.total_choices, self.job.execution)
        self.continued: asyncio.Future[Continue] = asyncio.get_running_loop().create_future()
        self.has_started = False
        self._worker = worker

    async def publish(self, event: ReplyEvent) -> None:
        """Raises `Unroutable` if the reply queue no longer exists."""
        binding = topology.reply_binding(self.message.reply_to)
        while True:
            try:
                return await self._worker.bus.publish(binding, Message(encode(event)))
            except BusUnavailable:
                await self._worker.bus.wait_connected()

    def is_meant_by(self, command: Cancel) -> bool:
        return command.ticket in (None, self.ticket)

    async def start(self) -> None:
        """Open an attempt. If it is not the first attempt, it continues at the position that the
        reader sends."""
        self.has_started = True
        prompts = [words(prompt) for prompt in self.job.prompts]
        await self.publish(
            Started(
                worker=self._worker.address,
                ticket=self.ticket,
                num_prompt_tokens=tuple(map(len, prompts)),
                is_waiting=not self.is_first,
                publication=self.job.publication,
                num_returns=self.num_returns,
                execution=self.job.execution,
                context=self.job.context,
                prompt_texts=tuple(map(" ".join, prompts)) if self.job.wants_prompt_text else (),
            )
        )
        if not self.is_first:
            self.log = LogWriter.resume(await self.continued, self.job.execution)

    @property
    def num_tokens(self) -> int:
        """The tokens of the prompts, and of the answers so far; 0 if the job did not begin."""
        num_prompt = sum(len(words(prompt)) for prompt in self.job.prompts)
        num_answered = sum(len(chain.token_ids) for chain in self.log.chains)
        return num_prompt + num_answered if self.has_started else 0

    async def is_unread(self) -> bool:
        """Whether the reply queue no longer exists."""
        return await self._worker.bus.inspect(self.message.reply_to) is None

    async def say(self, text: str, choice: int = 0) -> None:
        """Send a token."""
        await self.publish(self.log.delta(choice, [len(text)], text))

    async def finish(
        self,
        text: str = "",
        choice: int = 0,
        reason: FinishReason = "stop",
        stop_reason: str | None = None,
    ) -> None:
        """Send the last token of a choice."""
        await self.publish(self.log.finish(choice, [len(text)], text, reason, stop_reason))

    async def fail(self, code: str, message: str, param: str | None = None) -> None:
        await self.publish(self.log.fail(code, message, param))


_LONG_BYTES = 100_000
Script: TypeAlias = Callable[[ScriptedJob], Awaitable[None]]


QuickScript: TypeAlias = Callable[[QuickJob], QuickAnswer | Failed | None]
"""Returns None to send nothing."""


def count_words(job: QuickJob) -> QuickAnswer | Failed:
    """Answer a quick job: a word is a token, its id is its length, and its vector points along the
    first axis."""
    match job:
        case TokenizeJob():
            tokens = tuple(words(job.prompt))
            return Tokenized(
                request_id=job.request_id,
                token_ids=tuple(map(len, tokens)),
                tokens=tokens,
                max_seq_len=2048,
            )
        case DetokenizeJob():
            text = " ".join("x" * token_id for token_id in job.token_ids)
            return Detokenized(request_id=job.request_id, text=text)
        case EmbeddingJob(num_dimensions=wanted) if wanted is not None and wanted > NUM_DIMENSIONS:
            message = f"{wanted} dimensions wanted, the model has {NUM_DIMENSIONS}."
            return Failed(code="invalid_request", message=message, param="dimensions")
        case EmbeddingJob():
            axis = (1.0, *[0.0] * ((job.num_dimensions or NUM_DIMENSIONS) - 1))
            return Embedded(
                request_id=job.request_id,
                vectors=(axis,) * len(job.prompts),
                num_prompt_tokens=tuple(len(words(prompt)) for prompt in job.prompts),
            )


async def start_only(job: ScriptedJob) -> None:
    """Take the job, and generate nothing until it is cancelled."""
    await job.start()
    await asyncio.Event().wait()


def wait_before_the_end(
    worker: "ScriptedWorker", first: str = "", last: str = "done"
) -> asyncio.Event:
    """Let the worker start its jobs and say ``first``, and end with ``last`` when the event is
    set."""
    may_end = asyncio.Event()

    async def wait(job: ScriptedJob) -> None:
        await job.start()
        if first:
            await job.say(first)
        await may_end.wait()
        await job.finish(last)

    worker.script = wait
    return may_end


async def repeat_the_prompt(job: ScriptedJob) -> None:
    """Send each word of each prompt, as many as the request allows."""
    await job.start()
    limit = job.job.sampling.max_tokens
    prompts = [words(prompt) for prompt in job.job.prompts]
    for choice in range(job.job.total_choices):
        said = prompts[choice // job.job.num_choices]
        kept = said if limit is None else said[:limit]
        for word in kept[:-1]:
            await job.say(f"{word} ", choice)
        reason: FinishReason = "stop" if len(kept) == len(said) else "length"
        await job.finish(kept[-1] if kept else "", choice, reason)


class ScriptedWorker:
    """Runs ``script`` for every job of its model, until its ``async with`` ends."""

    def __init__(self, bus: Bus, script: Script = repeat_the_prompt, model: str = MODEL) -> None:
        self.bus = bus
        self.model = model
        self.script = script
        self.quick_script: QuickScript = count_words
        self.quick_messages: list[Message] = []
        self.commands: list[Command] = []
        self.jobs: list[ScriptedJob] = []
        self.is_silent = False
        """Whether it has stopped its announcements."""
        self.num_dropped = 0
        """Jobs whose reply queue no longer existed."""
        self._id = f"scripted-{next(_IDS)}"
        self._control = topology.worker_queue(self._id)
        self.address = self._control.bindings[0].routing_key
        self.announcement = Announcement(
            worker=self.address,
            model=model,
            vocab_size=100,
            max_seq_len=2048,
            fingerprint="f",
            max_num_seqs=8,
        )
        """The worker's announcement, which a test may replace."""
        self._running: dict[ScriptedJob, asyncio.Task[None]] = {}
        self.most_running = 0
        """The most jobs that ran at once. Jobs whose scripts have ended do not count, even before
        they are acknowledged."""
        self._changed = asyncio.Condition()
        self._tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Self:
        await topology.declare_worker(self.bus, self.model, self._id)
        jobs = (self._take_jobs(lane) for lane in topology.JOB_CLASSES)
        works = (*jobs, self._take_quick_jobs(), self._obey(), self._announce())
        for work in works:
            self._tasks.add(asyncio.create_task(work))
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    @property
    def num_running(self) -> int:
        return len(self._running)

    async def wait_until(self, is_true: Callable[[], bool]) -> None:
        """Wait for an event in this worker."""
        async with asyncio.timeout(PATIENCE_S), self._changed:
            await self._changed.wait_for(is_true)

    async def wait_cancelled(self, request_id: str) -> None:
        """Wait for the `Cancel` of a request."""
        await self.wait_until(
            lambda: any(
                isinstance(command, Cancel) and command.request_id == request_id
                for command in self.commands
            )
        )

    async def wait_settled(self) -> None:
        """Wait until every job is acknowledged. A broker gives the others to the next worker, which
        may be that of the next test."""
        await self.wait_until(lambda: self.num_running == 0)

    async def _take_jobs(self, lane: JobClass) -> None:
        queue = topology.jobs_queue(self.model, lane).name
        while True:
            try:
                async with self.bus.consume(queue) as consumer, asyncio.TaskGroup() as runs:
                    async for delivery in consumer:
                        runs.create_task(self._serve(delivery, lane))
            except* BusUnavailable:
                await self.bus.wait_connected()

    async def _take_quick_jobs(self) -> None:
        queue = topology.jobs_queue(self.model, "quick").name
        while True:
            with suppress(BusUnavailable):
                async with self.bus.consume(queue) as consumer:
                    async for delivery in consumer:
                        await self._answer(delivery)
            await self.bus.wait_connected()

    async def _answer(self, delivery: Delivery) -> None:
        message = delivery.message
        self.quick_messages.append(message)
        if len(message.body) > _LONG_BYTES:  # the gateway has the same event loop
            answer = await asyncio.to_thread(self._encoded_answer, message)
        else:
            answer = self._encoded_answer(message)
        if answer is None:
            return await delivery.ack()
        with suppress(Unroutable):
            await self.bus.publish(
                topology.reply_binding(message.reply_to),
                Message(answer, correlation_id=message.correlation_id),
            )
        return await delivery.ack()

    def _encoded_answer(self, message: Message) -> bytes | None:
        answer = self.quick_script(decode_quick_job(message.body, message.content_type))
        return None if answer is None else encode(answer)

    async def _serve(self, delivery: Delivery, lane: JobClass) -> None:
        job = ScriptedJob(self, delivery, lane)
        run = asyncio.create_task(self._run(job))
        self.jobs.append(job)
        self._running[job] = run
        num_at_work = sum(not one.done() for one in self._running.values())
        self.most_running = max(self.most_running, num_at_work)
        await self._notify()
        try:
            await asyncio.wait([run])
            if not run.cancelled():
                run.result()
            await delivery.ack()
            if job.job.is_detached or job.job.is_counted:
                ended = Ended(request_id=job.job.request_id, num_tokens=job.num_tokens)
                with suppress(BusError):
                    await self.bus.publish(topology.USAGE, Message(encode(ended)))
        finally:
            run.cancel()
            del self._running[job]
        await self._notify()

    async def _run(self, job: ScriptedJob) -> None:
        try:
            await self.script(job)
        except Unroutable:
            self.num_dropped += 1

    async def _obey(self) -> None:
        while True:
            with suppress(BusUnavailable):
                async with self.bus.consume(self._control.name) as commands:
                    async for delivery in commands:
                        await delivery.ack()
                        self._obey_one(decode_command(delivery.message.body))
                        await self._notify()
            await self.bus.wait_connected()

    def _obey_one(self, command: Command) -> None:
        self.commands.append(command)
        if isinstance(
            command, Drain | StopWork | LimitedTenants | AdmissionAnswer | Declare
        ):  # a test obeys the first
            return
        for job, run in self._running.items():
            if job.job.request_id != command.request_id:
                continue
            if isinstance(command, Continue) and not job.continued.done():
                job.continued.set_result(command)
            if isinstance(command, Cancel) and job.is_meant_by(command):
                run.cancel()

    async def _announce(self) -> None:
        while True:
            if not self.is_silent:
                with suppress(BusError):
                    message = Message(encode(self.announcement))
                    await self.bus.publish(topology.ANNOUNCEMENTS, message)
            await asyncio.sleep(_ANNOUNCE_INTERVAL_S)

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()


def words(prompt: Prompt) -> list[str]:
    match prompt:
        case ChatPrompt(messages=messages):
            return messages[-1].content.split()
        case TextPrompt(text=text):
            return text.split()
        case _:
            return [str(token_id) for token_id in prompt.token_ids]
