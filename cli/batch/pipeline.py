"""Runs a batch: publishes jobs within a window and writes the answers to the journal.

An answer is acknowledged only once its line is on disk. A line without an answer there is published
again by the next run, under the same request id. A job may therefore run twice, but its output line
is written once.
"""

import asyncio
import time
from collections import defaultdict
from collections.abc import Callable, Coroutine
from contextlib import suppress
from functools import partial
from pathlib import Path

from cli.batch.announcements import announcement
from cli.batch.answers import output_line
from cli.batch.input_file import BatchFile, model_of
from cli.batch.journal import Journal
from cli.batch.progress import BatchSummary, OnProgress, Pace
from shared import topology
from shared.backoff import Backoff
from shared.bus.base import Bus, Message
from shared.client.replies import Replies
from shared.errors import (
    BusUnavailable,
    InternalError,
    ModelNotFound,
    Overloaded,
    PublishRefused,
    PublishUnconfirmed,
    UndecodableMessage,
    Unroutable,
)
from shared.messages import Completed, Failed, decode_event, encode

DEFAULT_WINDOW = 256
_FIRST_PAUSE_S = 0.05
_MAX_PAUSE_S = 5.0


async def run_batch(
    input: Path,  # noqa: A002
    output: Path,
    bus: Bus,
    *,
    window: int = DEFAULT_WINDOW,
    on_progress: OnProgress = lambda _: None,
) -> BatchSummary:
    """Answer every line of ``input`` in ``output``, with at most ``window`` jobs in the queue.

    After a cancellation or a crash, another call continues where the run stopped: the answers so
    far are in ``output`` + ".part". Raises `InvalidRequest` naming each bad line, before anything
    is published, or if ``output`` exists; `ModelNotFound`; `QueueBusy` if another process runs the
    same input; `BusUnavailable` if the broker cannot be reached at the start; `OSError`.
    """
    model = await asyncio.to_thread(model_of, input)
    served = None if model is None else await announcement(bus, model)
    file = await asyncio.to_thread(partial(BatchFile.check, input, served, user=bus.user))
    if await bus.inspect(topology.jobs_queue(file.model, "batch").name) is None:
        raise ModelNotFound(f"No worker has ever served the model {file.model!r}.", param="model")
    replies = Replies(bus, file.run_id, prefetch=window)
    await replies.declare()
    with Journal.open(output, file.digest, served) as journal:
        file.served = journal.served
        run = BatchRun(file, journal, bus, replies, window=window, on_progress=on_progress)
        summary = await run.answer_all()
        await _uncancelled(partial(journal.finish, file.custom_ids))
    with suppress(BusUnavailable):  # the queue expires by itself
        await replies.delete()
    return summary


class BatchRun:
    """A run of a checked file. Lines are identified by their position in it."""

    def __init__(
        self,
        file: BatchFile,
        journal: Journal,
        bus: Bus,
        replies: Replies,
        *,
        window: int,
        on_progress: OnProgress,
    ) -> None:
        self._file = file
        self._journal = journal
        self._bus = bus
        self._replies = replies
        self._on_progress = on_progress
        self._jobs = topology.jobs_binding(file.model, "batch")
        self._pace = Pace()
        self._window = asyncio.Semaphore(window)
        self._in_flight: set[int] = set()
        self._backoffs: defaultdict[int, Backoff] = defaultdict(_backoff)
        self._tasks = asyncio.TaskGroup()
        self._background: list[asyncio.Task[None]] = []

    async def answer_all(self) -> BatchSummary:
        """Return when the answer to every line is on disk."""
        try:
            async with self._tasks:
                self._start(self._replies.collect(on_lost=self._publish_in_flight))
                self._start(self._feed())
                await self._take_answers()
                for task in self._background:
                    task.cancel()
        except ExceptionGroup as failures:
            raise failures.exceptions[0] from failures
        return BatchSummary(
            num_lines=len(self._file),
            num_failed=self._journal.num_failed,
            num_tokens=self._pace.num_tokens,
            elapsed_s=self._pace.elapsed_s,
        )

    async def _feed(self) -> None:
        """Publish the lines without an answer as the window allows."""
        # Answers that an earlier run left in the queue are not requested again.
        await self._replies.caught_up()
        for position in self._file.order:
            await self._window.acquire()
            if self._is_answered(position):
                self._window.release()
                continue
            self._in_flight.add(position)
            await self._publish(position)

    async def _publish(self, position: int) -> None:
        """Publish a line's job; returns once the broker has it, or once its answer has arrived."""
        job = self._file.job(position, created_at=time.time())
        while not self._is_answered(position):
            message = Message(
                encode(job), correlation_id=job.request_id, reply_to=self._replies.routing_key
            )
            try:
                await self._bus.publish(self._jobs, message)
            except (BusUnavailable, PublishRefused, PublishUnconfirmed, Unroutable):
                await self._pause(position)
                await self._bus.wait_connected()
            else:
                return

    async def _publish_later(self, position: int) -> None:
        """Publish the line again after a pause, because the service was overloaded."""
        await self._pause(position)
        await self._publish(position)

    async def _pause(self, position: int) -> None:
        backoff = self._backoffs[position]
        backoff.lasted()
        await asyncio.sleep(backoff.drawn_pause_s)

    def _publish_in_flight(self) -> None:
        """Publish the jobs in flight again: the reply queue was lost, and answers may have been
        lost with it."""
        for position in self._in_flight:
            self._start(self._publish(position))

    async def _take_answers(self) -> None:
        self._report()
        while len(self._journal) < len(self._file):
            deliveries = await self._replies.take()
            for delivery in deliveries:
                self._record(delivery.message)
            await _uncancelled(self._journal.sync)
            await self._replies.ack(deliveries)
            self._report()

    def _record(self, message: Message) -> None:
        """Add an answer to the journal, unless the line is answered already or is to be retried."""
        position = self._file.position(message.correlation_id)
        if position is None or self._is_answered(position):
            return
        answer = _decode(message)
        if isinstance(answer, Failed) and answer.code == Overloaded.code:
            if position in self._in_flight:
                self._start(self._publish_later(position))
            return
        job = self._file.job(position, created_at=time.time())
        self._journal.append(output_line(self._file.custom_ids[position], job, answer))
        self._pace.num_tokens += _num_tokens(answer)
        self._backoffs.pop(position, None)
        if position in self._in_flight:
            self._in_flight.remove(position)
            self._window.release()

    def _report(self) -> None:
        self._on_progress(
            self._pace.progress(len(self._file), len(self._journal), self._journal.num_failed)
        )

    def _is_answered(self, position: int) -> bool:
        return self._file.custom_ids[position] in self._journal

    def _start(self, work: Coroutine[None, None, None]) -> None:
        self._background.append(self._tasks.create_task(work))


async def _uncancelled(work: Callable[[], None]) -> None:
    """Run ``work`` in a thread and wait for it even if cancelled: the journal is closed
    afterwards."""
    running = asyncio.ensure_future(asyncio.to_thread(work))
    try:
        await asyncio.shield(running)
    except asyncio.CancelledError:
        await asyncio.wait([running])
        raise


def _decode(message: Message) -> Completed | Failed:
    try:
        answer = decode_event(message.body, message.content_type)
    except UndecodableMessage as error:
        return Failed(code=InternalError.code, message=f"The answer could not be decoded: {error}")
    if isinstance(answer, Completed | Failed):
        return answer
    return Failed(code=InternalError.code, message="Expected the answer to a job of mode final.")


def _num_tokens(answer: Completed | Failed) -> int:
    if isinstance(answer, Failed):
        return 0
    return sum(len(choice.token_ids) for choice in answer.choices)


def _backoff() -> Backoff:
    return Backoff(_FIRST_PAUSE_S, _MAX_PAUSE_S)
