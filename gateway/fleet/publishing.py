"""Publishes jobs to the queues of their models, and has lost bindings of these queues restored."""

import asyncio
import math
import time
from collections.abc import Callable, Sequence
from contextlib import suppress

import msgspec

from gateway.fleet.clocks import WorkerClocks
from shared import topology
from shared.bus.base import Binding, Bus, Message
from shared.bus.upkeep import report_unbound
from shared.errors import (
    BusError,
    InvalidRequest,
    MessageTooLarge,
    ModelNotFound,
    Overloaded,
    PublishRefused,
    Unavailable,
    Unroutable,
)
from shared.messages import Declare, GenerationJob, JobClass, QuickJob, encode

_RETRY_PAUSE_S = 0.1
_ASK_INTERVAL_S = 0.5
_PROBLEM_S = 60.0
_PATIENCE_S = 5.0
"""Seconds that a request waits for a worker to bind the queue of its model again."""


class JobPublisher:
    """Publishes generations and quick jobs."""

    def __init__(
        self,
        bus: Bus,
        addresses: Callable[[str], Sequence[str]] = lambda _: (),
        clocks: WorkerClocks | None = None,
    ) -> None:
        """``addresses`` returns the addresses of a model's live workers, whose ``clocks`` may be
        ahead of this gateway's."""
        self._bus = bus
        self._addresses = addresses
        self._clocks = clocks or WorkerClocks()
        self._problems: dict[str, tuple[str, float]] = {}
        """The last problem with the queues of each model, and its monotonic time."""
        self._asked_at: dict[str, float] = {}
        """When workers were asked to bind a queue, by its routing key."""

    async def publish(
        self, job: GenerationJob | QuickJob, reply_key: str, job_class: JobClass = "interactive"
    ) -> None:
        """Publish a generation to the queue of its class, ``job_class``, and any other job to the
        quick queue of its model. It is answered under ``reply_key``.

        If the model has live workers and its queue has no binding, the workers are asked to bind
        the queue again, and the job is published then.

        Raises `ModelNotFound`, `Overloaded`, `InvalidRequest`, `Unavailable` and `BusError`.
        """
        lane: topology.Lane = job_class if isinstance(job, GenerationJob) else "quick"
        binding = topology.jobs_binding(job.model, lane)
        give_up_at = 0.0
        while True:
            try:
                message = job_message(job, reply_key, self._shift_s(job.model))
                return await self._bus.publish(binding, message)
            except Unroutable:
                workers = self._addresses(job.model)
                is_given_up = bool(give_up_at) and time.monotonic() > give_up_at
                if is_given_up or not workers:
                    if workers:
                        self._note(job.model, "has lost its binding at the broker")
                    raise await self._no_route(job.model, lane) from None
                give_up_at = give_up_at or time.monotonic() + _PATIENCE_S
                await self._ask_to_bind(binding, workers)
                await asyncio.sleep(_RETRY_PAUSE_S)
            except PublishRefused:
                self._note(job.model, "is full")
                raise Overloaded(
                    "Too many requests are waiting for this model.", limit="queue_length"
                ) from None
            except MessageTooLarge:
                raise InvalidRequest("The request is too large.") from None

    def _shift_s(self, model: str) -> float:
        clocks = self._clocks
        return 0.0 if clocks.are_level else clocks.shift_s(self._addresses(model))

    def problems(self) -> list[str]:
        """The problems that kept jobs from their queues within the last minute, as sentences."""
        oldest = time.monotonic() - _PROBLEM_S
        self._problems = {model: one for model, one in self._problems.items() if one[1] > oldest}
        return [
            f"The queue of the model '{model}' {problem}."
            for model, (problem, _) in sorted(self._problems.items())
        ]

    def _note(self, model: str, problem: str) -> None:
        self._problems[model] = problem, time.monotonic()

    async def _ask_to_bind(self, binding: Binding, workers: Sequence[str]) -> None:
        """Ask the workers, for all requests that wait for the binding. Their own queues may have
        lost their bindings, too, so that the first command does not arrive."""
        now = time.monotonic()
        asked_at = self._asked_at.get(binding.routing_key, -math.inf)
        if now - asked_at < _ASK_INTERVAL_S:
            return
        if now - asked_at > _PATIENCE_S:
            report_unbound(binding.exchange.name, binding.routing_key)
        self._asked_at[binding.routing_key] = now
        for address in workers:
            with suppress(BusError):  # another worker may be reached, or declares at its interval
                await self._bus.publish(
                    topology.worker_binding(address), Message(encode(Declare()))
                )

    async def _no_route(self, model: str, lane: topology.Lane) -> ModelNotFound | Unavailable:
        """The error for a job that found no queue. Raises `BusError`."""
        if await self._bus.inspect(topology.jobs_queue(model, lane).name) is None:
            return ModelNotFound(f"The model '{model}' does not exist.", param="model")
        return Unavailable(
            f"The queue of the model '{model}' has lost its binding at the broker. Its workers "
            "restore the binding."
        )


def job_message(job: GenerationJob | QuickJob, reply_key: str, shift_s: float = 0.0) -> Message:
    """The message of a job, with its deadline moved by ``shift_s`` for the clock of its worker."""
    if shift_s and job.deadline is not None:
        job = msgspec.structs.replace(job, deadline=job.deadline + shift_s)
    return Message(encode(job), correlation_id=job.request_id, reply_to=reply_key)
