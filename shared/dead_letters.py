"""Dead letters: jobs that the broker put aside, for operators to inspect, retry or drop."""

import asyncio
import hashlib
import time
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass

import msgspec

from shared import topology
from shared.bus.base import (
    DEATH_QUEUE_HEADER,
    DEATH_REASON_HEADER,
    MAX_PREFETCH,
    Bus,
    Delivery,
    Message,
)
from shared.errors import InvalidRequest, UndecodableMessage
from shared.messages import GenerationJob, decode_job, encode, request_id_in
from shared.topology import Publishers

_PATIENCE_S = 2.0
"""Seconds to wait for a letter that another operator may be holding."""
_REQUEUED_WITHIN_S = 0.25
"""Seconds in which the broker offers the letters that another listing held until just now: it does
not count them yet."""


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """A dead-lettered job. It is held until `opened` ends and then requeued, unless it was
    settled."""

    delivery: Delivery
    job: GenerationJob | None
    """The job with its tenant, or None if its publisher may not publish it."""
    tenant: str
    """The tenant of the job, or else of the broker's user that published the message; empty if it
    is unknown, because a user that publishes for many tenants published what is no job."""
    fault: str = ""
    """Why there is no job."""

    @property
    def message(self) -> Message:
        return self.delivery.message

    @property
    def request_id(self) -> str:
        """The job's request id; `name_of` the message if there is no job."""
        return self.job.request_id if self.job is not None else name_of(self.message)

    @property
    def reason(self) -> str:
        """The value of `DEATH_REASON_HEADER`, with the worker's reason for a rejection."""
        reason = str(self.message.headers.get(DEATH_REASON_HEADER, "unknown"))
        if reason == "rejected" and self.obstacle:
            return f"rejected: {self.obstacle}"
        if reason == "rejected" and self.queue.endswith(".suspect"):
            return "rejected: its workers crashed"
        return reason

    @property
    def queue(self) -> str:
        """The name of the queue that the job was dead-lettered from."""
        return str(self.message.headers.get(DEATH_QUEUE_HEADER, "unknown"))

    @property
    def model(self) -> str:
        return self.job.model if self.job else "unknown"

    @property
    def age_s(self) -> float | None:
        """Seconds since the job was created; if it does not say, since it was published; if the
        message does not say, since it was dead-lettered. None if that is unknown, too."""
        created_at = self.job.created_at if self.job else 0.0
        since = created_at or self.message.published_at or self.message.died_at
        return max(0.0, time.time() - since) if since else None

    @property
    def can_retry(self) -> bool:
        """Whether the job can be published again; what cannot can only be dropped."""
        return not self.obstacle

    @property
    def obstacle(self) -> str:
        """Why it can only be dropped; empty if it can be retried."""
        if self.job is None:
            return self.fault
        if self._lane is None:
            return f"{self.queue} is not a queue of generations"
        if self.queue.rpartition(".")[0] != f"{topology.JOBS_PREFIX}{self.job.model}":
            return "the job names another model than its queue"
        return ""

    @property
    def _lane(self) -> topology.Lane | None:
        classes = {lane: job_class for job_class, lane in topology.OVERFLOW.items()}
        if self.queue.rpartition(".")[2].startswith(("near-", "resumed-")):
            return "interactive"
        found = (one for one in topology.DECLARED_LANES if self.queue.endswith(f".{one}"))
        lane = next(found, None)
        return lane if lane is None else classes.get(lane, lane)

    async def retry(self, bus: Bus) -> str:
        """Publish the job to its original queue without a deadline; returns the name of that queue.

        Raises `InvalidRequest`, which says why it can only be dropped, and `BusError`.
        """
        lane = self._lane
        if self.job is None or lane is None or self.obstacle:
            raise InvalidRequest(f"{self.request_id} can only be dropped: {self.obstacle}")
        job = msgspec.structs.replace(self.job, deadline=None, publication=self.job.publication + 1)
        message = Message(
            encode(job, self.message.content_type),
            content_type=self.message.content_type,
            correlation_id=self.message.correlation_id,
            reply_to=self.message.reply_to,
        )
        await bus.publish(topology.jobs_binding(self.job.model, lane), message)
        await self.drop()
        return self.queue

    async def drop(self) -> None:
        """Remove the letter permanently."""
        await self.delivery.ack()


@asynccontextmanager
async def opened(
    bus: Bus, limit: int, trusted_users: Iterable[str] = ()
) -> AsyncIterator[list[DeadLetter]]:
    """Hold up to ``limit`` of the oldest dead letters. Raises `BusError`.

    ``trusted_users`` are the users that `shared.settings` trusts, to which the bus's own user is
    added.
    """
    publishers = Publishers((bus.user, *trusted_users))
    state = await bus.inspect(topology.DEAD_LETTERS.name)
    if state is None:
        yield []
        return
    letters: list[DeadLetter] = []
    async with bus.consume(
        topology.DEAD_LETTERS.name, prefetch=min(limit, MAX_PREFETCH)
    ) as consumer:
        with suppress(TimeoutError):
            while len(letters) < limit:
                is_expected = len(letters) < state.num_ready
                async with asyncio.timeout(_PATIENCE_S if is_expected else _REQUEUED_WITHIN_S):
                    letters.append(_letter(await anext(consumer), publishers))
        yield letters


async def drop_of(bus: Bus, tenant: str, trusted_users: Iterable[str] = ()) -> int:
    """Remove all dead letters of a tenant, and of the broker's user with its name, permanently;
    returns how many. Raises `BusError`."""
    return await _drop(bus, trusted_users, lambda letter: letter.tenant == tenant)


async def drop_all(bus: Bus) -> int:
    """Remove all dead letters permanently; returns how many. Raises `BusError`."""
    return await _drop(bus, (), lambda letter: True)


async def _drop(
    bus: Bus, trusted_users: Iterable[str], is_meant: Callable[[DeadLetter], bool]
) -> int:
    """Every letter is looked at alone, so that its body is not kept."""
    publishers = Publishers((bus.user, *trusted_users))
    state = await bus.inspect(topology.DEAD_LETTERS.name)
    if state is None:
        return 0
    num_seen = num_dropped = 0
    # Letters that are not acknowledged return to their places when the consumer closes.
    async with bus.consume(topology.DEAD_LETTERS.name) as consumer:
        with suppress(TimeoutError):
            while True:
                is_expected = num_seen < state.num_ready
                async with asyncio.timeout(_PATIENCE_S if is_expected else _REQUEUED_WITHIN_S):
                    letter = _letter(await anext(consumer), publishers)
                num_seen += 1
                if is_meant(letter):
                    await letter.drop()
                    num_dropped += 1
    return num_dropped


def find(letters: list[DeadLetter], request_id: str) -> DeadLetter:
    """Find the letter with this id. Raises `InvalidRequest` if there is none."""
    for letter in letters:
        if letter.request_id == request_id:
            return letter
    raise InvalidRequest(f"no dead letter has the id {request_id}")


def name_of(message: Message) -> str:
    """A name for a message that is no job, the same in each listing and in the logs: its
    correlation id, the request id in its body, its message id, or else a hash."""
    named = message.correlation_id or request_id_in(message.body, message.content_type)
    return named or message.message_id or f"letter-{_hash(message)}"


def _hash(message: Message) -> str:
    properties = (message.reply_to, message.user_id, str(message.published_at))
    return hashlib.sha256("\0".join((*properties, "")).encode() + message.body).hexdigest()[:16]


def _letter(delivery: Delivery, publishers: Publishers) -> DeadLetter:
    message = delivery.message
    try:
        job = publishers.admitted(decode_job(message.body, message.content_type), message)
    except UndecodableMessage as error:
        tenant = "" if publishers.is_trusted(message.user_id) else message.user_id
        return DeadLetter(delivery, None, tenant, error.message)
    return DeadLetter(delivery, job, job.tenant)
