"""Removes a model that no worker serves any more: ends the jobs that wait for it, and deletes its
queues."""

import asyncio
import secrets
from contextlib import suppress

from shared import topology
from shared.bus.base import Bus, Delivery, Message
from shared.errors import BusError, Conflict, ModelNotFound, UndecodableMessage
from shared.messages import (
    Failed,
    GenerationJob,
    ReplyEvent,
    Started,
    decode_job,
    encode,
    is_reply_key,
)

_PREFETCH = 64
_IDLE_S = 0.5
"""Seconds without a further job after which a queue counts as empty."""


async def require_no_workers(bus: Bus, model: str) -> None:
    """Raise `Conflict` if a worker consumes the model's queue, `ModelNotFound` if there is no
    queue, and `BusError`."""
    state = await bus.inspect(topology.jobs_queue(model, "interactive").name)
    if state is None:
        raise ModelNotFound(f"There is no queue of a model '{model}'.", param="model")
    if state.num_consumers:
        raise Conflict(
            f"{state.num_consumers} workers serve the model '{model}': drain them first."
        )


async def remove_model(bus: Bus, model: str) -> int:
    """End the jobs that wait for a model, and delete its queues; returns the number of jobs.

    The queues that only some workers consume return their jobs and expire by themselves. Raises as
    `require_no_workers`.
    """
    await require_no_workers(bus, model)
    num_ended = 0
    for lane in topology.DECLARED_LANES:
        name = topology.jobs_queue(model, lane).name
        if await bus.inspect(name) is not None:
            num_ended += await _end_all(bus, name, model)
            await bus.delete_queue(name)
    return num_ended


async def _end_all(bus: Bus, queue: str, model: str) -> int:
    num_ended = 0
    async with bus.consume(queue, prefetch=_PREFETCH) as consumer:
        while True:
            try:
                async with asyncio.timeout(_IDLE_S):
                    delivery = await anext(consumer)
            except (TimeoutError, StopAsyncIteration):
                return num_ended
            await _end(bus, delivery, model)
            num_ended += 1


async def _end(bus: Bus, delivery: Delivery, model: str) -> None:
    """Answer a job with an error, and remove it. A job that nobody waits for is removed all the
    same."""
    message = delivery.message
    if is_reply_key(message.reply_to):
        binding = topology.reply_binding(message.reply_to)
        with suppress(BusError):
            for event in _ending(delivery, f"The model '{model}' has been removed."):
                body = encode(event, message.content_type)
                answer = Message(
                    body, content_type=message.content_type, correlation_id=message.correlation_id
                )
                await bus.publish(binding, answer)
    await delivery.ack()


def _ending(delivery: Delivery, reason: str) -> list[ReplyEvent]:
    """The last events of a job. Readers accept the failure of a stream only from a run that has
    started."""
    job = _job_of(delivery.message)
    if job is None or job.mode != "stream":
        return [Failed(code=ModelNotFound.code, message=reason, param="model")]
    ticket = secrets.token_hex(16)
    started = Started(
        worker="",
        ticket=ticket,
        num_prompt_tokens=(),
        is_waiting=True,
        publication=job.publication,
        num_returns=delivery.num_returns,
        execution=job.execution,
        context=job.context,
    )
    failed = Failed(
        code=ModelNotFound.code,
        message=reason,
        param="model",
        ticket=ticket,
        execution=job.execution,
    )
    return [started, failed]


def _job_of(message: Message) -> GenerationJob | None:
    try:
        return decode_job(message.body, message.content_type)
    except UndecodableMessage:  # a quick job, or another program's
        return None
