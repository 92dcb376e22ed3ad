"""Jobs over RabbitMQ for asynchronous programs: `AsyncClient`."""

import asyncio
import secrets
import time
from collections.abc import AsyncGenerator as _Generator
from collections.abc import Coroutine, Mapping, Sequence
from contextlib import aclosing, suppress
from typing import Any, Self, TypeAlias, TypedDict, TypeVar, Unpack

from msgspec import structs

from shared import topology
from shared.bus import retry
from shared.bus.base import Bus, Message
from shared.bus.subscribe import attaching
from shared.client.prompts import (
    Chats,
    PromptLike,
    ToolLike,
    chat_prompts,
    checked,
    prompts_of,
)
from shared.client.replies import Replies
from shared.errors import (
    BusUnavailable,
    DeadlineExceeded,
    InternalError,
    InvalidRequest,
    ModelNotFound,
    Overloaded,
    PublishRefused,
    PublishUnconfirmed,
    QueueBusy,
    QueueNotFound,
    StreamExpired,
    Unavailable,
    Unroutable,
    from_code,
)
from shared.log import LogReader, Relay, Send
from shared.messages import (
    ChatPrompt,
    Completed,
    Failed,
    Finished,
    GenerationJob,
    JobClass,
    Prompt,
    SamplingParams,
    TokenDelta,
    decode_event,
    encode,
)
from shared.settings import DEFAULT_MODEL

_Item = TypeVar("_Item")
AnswerEvent: TypeAlias = TokenDelta | Finished
AsyncGenerator: TypeAlias = _Generator[_Item, None]

_WINDOW = 256
"""Jobs of a call that are in the queue of their model at once."""
_DEFAULT = SamplingParams()
_EXPIRES_S = 600.0
_BUSY_S = 30.0
"""Seconds for which another reader may hold a log. A connection that was killed holds it until the
broker misses its heartbeat."""
_PAUSE_S = 0.1
_OVERLOADED_PAUSE_S = 1.0


class Options(TypedDict, total=False):
    """What a request may state beside its prompt and its sampling parameters."""

    num_choices: int
    """The number of answers to each prompt; 1 if it is not given."""
    model: str
    """The model, if it is not that of the client."""
    deadline_s: float
    """Seconds after which the request fails with `DeadlineExceeded`."""


class ChatOptions(Options, total=False):
    """What a request with conversations may state as well."""

    tools: Sequence[ToolLike]
    """Functions that the model may call. Its calls, like its reasoning, are part of the text, in
    the format of the model."""
    template_kwargs: Mapping[str, Any]
    """Further variables of the chat template, such as ``enable_thinking``."""


class AsyncClient:
    """Submits jobs to RabbitMQ and reads their answers, without a gateway. ``async with`` connects
    and disconnects it.

    A client reconnects by itself, and its streams continue at the next token when a worker dies.
    The user of the URL is the tenant of its jobs; another user can neither read nor cancel them.
    """

    def __init__(self, url: str, model: str = DEFAULT_MODEL, *, bus: Bus | None = None) -> None:
        """``url`` is the broker's, such as ``amqp://publisher:PASSWORD@broker/warren``; for a
        cluster, the URLs of its nodes separated by commas. ``model`` answers the requests that name
        no other model. ``bus`` replaces the connection to the broker. Raises `StartupError`."""
        self._bus = bus or _rabbit(url)
        self._model = model

    async def __aenter__(self) -> Self:
        """Raises `StartupError` if the broker refuses the login, and `BusUnavailable` if it cannot
        be reached."""
        await self._bus.__aenter__()
        try:
            await retry.connected_within(self._bus, otherwise="The broker cannot be reached.")
        except BaseException:
            await self._bus.__aexit__(None, None, None)
            raise
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._bus.__aexit__(*error)

    async def generate(
        self,
        prompts: PromptLike | Sequence[PromptLike],
        sampling: SamplingParams = _DEFAULT,
        **options: Unpack[Options],
    ) -> list[Completed]:
        """Continue each prompt; the answers are in the order of the prompts.

        Raises `InvalidRequest` before anything is published, `ModelNotFound` if no worker has ever
        served the model, and the error of a job that fails. `batch` does not stop at it.
        """
        return await self._answers(prompts_of(prompts), sampling, options)

    async def chat(
        self,
        conversations: Chats,
        sampling: SamplingParams = _DEFAULT,
        **options: Unpack[ChatOptions],
    ) -> list[Completed]:
        """Answer a conversation or several, as `generate` continues prompts."""
        return await self._answers(_chats(conversations, options), sampling, options)

    def batch(
        self,
        prompts: PromptLike | Sequence[PromptLike],
        sampling: SamplingParams = _DEFAULT,
        **options: Unpack[Options],
    ) -> AsyncGenerator[tuple[int, Completed | Failed]]:
        """Continue many prompts, and yield the number and the answer of each as it arrives.

        The jobs have the class ``batch``: they leave their places to interactive requests. A few
        hundred are in the queue of the model at once, and a job that a busy service refuses is
        published again.
        """
        jobs = [self._job(prompt, sampling, options) for prompt in prompts_of(prompts)]
        return _answered(self._bus, jobs, "batch")

    def batch_chat(
        self,
        conversations: Chats,
        sampling: SamplingParams = _DEFAULT,
        **options: Unpack[ChatOptions],
    ) -> AsyncGenerator[tuple[int, Completed | Failed]]:
        """Answer many conversations as `batch` continues prompts."""
        chats = _chats(conversations, options)
        return _answered(self._bus, [self._job(chat, sampling, options) for chat in chats], "batch")

    def stream(
        self,
        prompt: PromptLike,
        sampling: SamplingParams = _DEFAULT,
        **options: Unpack[Options],
    ) -> AsyncGenerator[AnswerEvent]:
        """Continue a prompt, and yield the text of each choice as it is generated.

        An iterator that is closed cancels the request. Raises as `generate` does, and `Overloaded`
        if too many jobs wait for the model.
        """
        return self._streamed(prompts_of(prompt), sampling, options)

    def stream_chat(
        self,
        conversation: Chats,
        sampling: SamplingParams = _DEFAULT,
        **options: Unpack[ChatOptions],
    ) -> AsyncGenerator[AnswerEvent]:
        """Answer a conversation as `stream` continues a prompt."""
        return self._streamed(_chats(conversation, options), sampling, options)

    async def submit(
        self,
        prompt: PromptLike | ChatPrompt,
        sampling: SamplingParams = _DEFAULT,
        **options: Unpack[Options],
    ) -> str:
        """Start a request that goes on without a reader, and return its id for `resume`.

        Its answer is kept for ten minutes without a reader. Raises as `stream` does.
        """
        (one,) = prompts_of(prompt)
        job = structs.replace(self._job(one, sampling, options), mode="stream", is_detached=True)
        log = _ClientLog(self._bus, job.request_id, job.num_choices)
        await log.declare()
        try:
            await _publish(self._bus, job, "interactive", log.key, waits=False)
        except BaseException:
            await _uncancelled(log.delete())
            raise
        return job.request_id

    async def resume(
        self, request_id: str, *, num_choices: int = 1, num_seen: int = 0
    ) -> AsyncGenerator[AnswerEvent]:
        """Yield the events of a request that `submit` started, without the first ``num_seen``.

        They can be read again. Raises `StreamExpired`, `Unavailable` while another reader holds the
        stream, and the error with which the request ended.
        """
        async with aclosing(
            _ClientLog(self._bus, request_id, num_choices).events(num_seen)
        ) as events:
            async for event in events:
                yield event

    async def cancel(self, request_id: str, *, num_choices: int = 1) -> None:
        """Stop a request that `submit` started, and delete its answer. Raises `StreamExpired`, and
        `Unavailable` while another reader holds the stream."""
        log = _ClientLog(self._bus, request_id, num_choices)
        await log.catch_up()
        await log.end()

    async def _answers(
        self, prompts: Sequence[Prompt], sampling: SamplingParams, options: Options
    ) -> list[Completed]:
        found: dict[int, Completed] = {}
        jobs = [self._job(prompt, sampling, options) for prompt in prompts]
        async with aclosing(_answered(self._bus, jobs, "interactive")) as answers:
            async for number, answer in answers:
                if isinstance(answer, Failed):
                    raise from_code(answer.code, answer.message, answer.param)
                found[number] = answer
        return [found[number] for number in range(len(jobs))]

    def _streamed(
        self, prompts: Sequence[Prompt], sampling: SamplingParams, options: Options
    ) -> AsyncGenerator[AnswerEvent]:
        if len(prompts) != 1:
            raise InvalidRequest("A stream has one prompt.", param="prompt")
        job = structs.replace(self._job(prompts[0], sampling, options), mode="stream")
        return _streamed(self._bus, job)

    def _job(self, prompt: Prompt, sampling: SamplingParams, options: Options) -> GenerationJob:
        now, deadline_s = time.time(), options.get("deadline_s")
        return checked(
            GenerationJob(
                # Names that do not begin with the user are refused.
                request_id=f"{self._bus.user}.{secrets.token_hex(16)}",
                model=options.get("model", self._model),
                prompts=(prompt,),
                sampling=sampling,
                num_choices=options.get("num_choices", 1),
                created_at=now,
                deadline=None if deadline_s is None else now + deadline_s,
            )
        )


async def _streamed(bus: Bus, job: GenerationJob) -> AsyncGenerator[AnswerEvent]:
    log = _ClientLog(bus, job.request_id, job.num_choices)
    await log.declare()
    try:
        await _publish(bus, job, "interactive", log.key, waits=False)
        async with aclosing(log.events()) as events:
            async for event in events:
                yield event
    finally:
        await _uncancelled(log.end())


async def _answered(
    bus: Bus, jobs: Sequence[GenerationJob], job_class: JobClass
) -> AsyncGenerator[tuple[int, Completed | Failed]]:
    async with aclosing(_Batch(bus, jobs, job_class).answers()) as answers:
        async for answer in answers:
            yield answer


def _chats(conversations: Chats, options: ChatOptions) -> list[Prompt]:
    return chat_prompts(conversations, options.get("tools", ()), options.get("template_kwargs"))


class _ClientLog:
    """The log of a request, which is never acknowledged: another reader finds all of it."""

    def __init__(self, bus: Bus, request_id: str, num_choices: int) -> None:
        self._bus = bus
        self._request_id = request_id
        self._num_choices = num_choices
        self._queue = topology.reply_queue(request_id, _EXPIRES_S)
        self._reader = LogReader(request_id, num_choices)

    @property
    def key(self) -> str:
        """The ``reply_to`` of the job."""
        return self._queue.bindings[0].routing_key

    async def declare(self) -> None:
        await self._bus.declare(self._queue)

    async def events(self, num_seen: int = 0) -> AsyncGenerator[AnswerEvent]:
        """The events that count, across lost connections and workers."""
        busy_since: float | None = None
        backoff = attaching()
        while not self._reader.is_ended:
            began = time.monotonic()
            try:
                async with aclosing(self._read()) as relays:
                    async for relay in relays:
                        busy_since = None
                        if relay.ordinal <= num_seen:
                            continue
                        num_seen = relay.ordinal
                        if isinstance(event := relay.event, Failed):
                            raise from_code(event.code, event.message, event.param)
                        if isinstance(event, TokenDelta | Finished):
                            yield event
            except QueueNotFound:
                raise StreamExpired("This stream is no longer kept.") from None
            except QueueBusy:
                busy_since = busy_since or began
                if time.monotonic() - busy_since > _BUSY_S:
                    raise Unavailable("Another reader still has this stream.") from None
                await asyncio.sleep(_PAUSE_S)
            except (BusUnavailable, PublishUnconfirmed):
                backoff.lasted(time.monotonic() - began)
                # The run may have lost the broker together with this reader, which is no crash.
                cut_off = () if self._reader.ticket is None else (self._reader.ticket,)
                self._reader = LogReader(self._request_id, self._num_choices, cut_off)
                await retry.pause(self._bus, backoff.pause_s)

    async def catch_up(self) -> None:
        """Read what the log has so far. Raises `Unavailable` if it has another reader."""
        try:
            state = await self._bus.inspect(self._queue.name)
            if state is None:
                raise StreamExpired("This stream is no longer kept.")
            num_left = state.num_ready
            async with self._bus.consume(self._queue.name, is_exclusive=True) as consumer:
                while num_left:
                    delivery = await anext(consumer)
                    self._reader.read(decode_event(delivery.message.body))
                    num_left -= 1
        except QueueBusy:
            raise Unavailable("Another reader still has this stream.") from None

    async def end(self) -> None:
        """Cancel the job, unless it has ended, and delete the log."""
        for send in self._reader.cancel():
            with suppress(BusUnavailable, PublishUnconfirmed):
                await self._send(send)
        await self.delete()

    async def delete(self) -> None:
        with suppress(BusUnavailable):  # the queue expires by itself
            await self._bus.delete_queue(self._queue.name)

    async def _read(self) -> AsyncGenerator[Relay]:
        async with self._bus.consume(self._queue.name, is_exclusive=True) as consumer:
            async for delivery in consumer:
                message = delivery.message
                for action in self._reader.read(decode_event(message.body, message.content_type)):
                    if isinstance(action, Send):
                        await self._send(action)
                    else:
                        yield action
                if self._reader.is_ended:
                    return

    async def _send(self, send: Send) -> None:
        # The queue of a worker that has died is gone. A worker that needs an answer asks again.
        with suppress(Unroutable, PublishRefused):
            await self._bus.publish(
                topology.worker_binding(send.address), Message(encode(send.command))
            )


class _Batch:
    """Jobs whose answers arrive in a common queue."""

    def __init__(self, bus: Bus, jobs: Sequence[GenerationJob], job_class: JobClass) -> None:
        self._bus = bus
        self._jobs = jobs
        self._job_class = job_class
        self._numbers = {job.request_id: number for number, job in enumerate(jobs)}
        """The numbers of the jobs without an answer, by request id."""
        self._in_flight: set[str] = set()
        self._window = asyncio.Semaphore(_WINDOW)
        run_id = f"{bus.user}.{secrets.token_hex(16)}"
        self._replies = Replies(bus, run_id, prefetch=_WINDOW, expires_s=_EXPIRES_S)
        self._tasks: set[asyncio.Task[None]] = set()
        self._failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def answers(self) -> AsyncGenerator[tuple[int, Completed | Failed]]:
        await self._replies.declare()
        try:
            self._start(self._replies.collect(on_lost=self._publish_in_flight))
            self._start(self._feed())
            while self._numbers:
                for message in await self._taken():
                    request_id, answer = message.correlation_id, _answer(message)
                    if request_id not in self._in_flight:  # a second answer
                        continue
                    if isinstance(answer, Failed) and answer.code == Overloaded.code:
                        self._start(self._publish_later(request_id))
                        continue
                    self._in_flight.remove(request_id)
                    self._window.release()
                    yield self._numbers.pop(request_id), answer
        finally:
            self._failed.cancel()
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
            with suppress(BusUnavailable):  # the queue expires by itself
                await self._replies.delete()

    async def _taken(self) -> list[Message]:
        """Wait for answers, or raise the error of a task."""
        taking = asyncio.create_task(self._replies.take())
        try:
            waiting: list[asyncio.Future[Any]] = [taking, self._failed]
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            if self._failed.done():
                self._failed.result()
        except BaseException:
            taking.cancel()
            raise
        deliveries = taking.result()
        await self._replies.ack(deliveries)
        return [delivery.message for delivery in deliveries]

    async def _feed(self) -> None:
        for job in self._jobs:
            await self._window.acquire()
            self._in_flight.add(job.request_id)
            await self._publish(job.request_id)

    async def _publish(self, request_id: str) -> None:
        if (number := self._numbers.get(request_id)) is not None:
            key = self._replies.routing_key
            await _publish(self._bus, self._jobs[number], self._job_class, key, waits=True)

    async def _publish_later(self, request_id: str) -> None:
        await asyncio.sleep(_OVERLOADED_PAUSE_S)
        await self._publish(request_id)

    def _publish_in_flight(self) -> None:
        """Publish again what waits for an answer: the queue was lost, and maybe answers with it."""
        for request_id in self._in_flight:
            self._start(self._publish(request_id))

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: "asyncio.Task[None]") -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) and not self._failed.done():
            self._failed.set_exception(error)


async def _publish(
    bus: Bus, job: GenerationJob, job_class: JobClass, reply_to: str, *, waits: bool
) -> None:
    """Return once the broker has the job, and not before it can be reached. ``waits``: also while
    too many jobs wait for the model. Raises `ModelNotFound`, `Overloaded` and
    `DeadlineExceeded`."""
    message = Message(encode(job), correlation_id=job.request_id, reply_to=reply_to)
    backoff = attaching()
    while True:
        try:
            return await bus.publish(topology.jobs_binding(job.model, job_class), message)
        except Unroutable:
            raise ModelNotFound(
                f"No worker has ever served the model {job.model!r}.", param="model"
            ) from None
        except PublishRefused:
            if not waits:
                raise Overloaded(f"Too many jobs wait for the model {job.model!r}.") from None
        except (BusUnavailable, PublishUnconfirmed):
            await bus.wait_connected()
        if job.deadline is not None and time.time() > job.deadline:
            raise DeadlineExceeded("The request's deadline has passed.")
        backoff.lasted(0.0)
        await asyncio.sleep(backoff.pause_s)


def _answer(message: Message) -> Completed | Failed:
    answer = decode_event(message.body, message.content_type)
    if isinstance(answer, Completed | Failed):
        return answer
    return Failed(code=InternalError.code, message="The answer is not that of a job.")


async def _uncancelled(work: Coroutine[Any, Any, None]) -> None:
    """Do what ends a request, even if the program is being cancelled."""
    task = asyncio.ensure_future(work)
    try:
        await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait([task])
        raise


def _rabbit(url: str) -> Bus:
    from shared.bus.rabbit import RabbitBus

    return RabbitBus(url)
